"""Tiny models: the published architectures in small, and one written by hand.

Weights are drawn wide enough that attention is not flat and the routers decide clearly: a stage
that sees a wrong key must be visible in the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 128

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.12,
    "max_position_embeddings": 128,
}
_DEEPSEEK = {
    "moe_intermediate_size": 48,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}


def _build(model_class, config_class, *options, experts: str, seed: int = 0) -> nn.Module:
    values: dict[str, object] = dict(_COMMON)
    for more in options:
        values.update(more)
    config = config_class(**values)
    config._experts_implementation = experts
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model


def deepseek_v2(experts: str = "grouped_mm", **options: object) -> nn.Module:
    base = dict(_DEEPSEEK, topk_method="greedy")
    return _build(DeepseekV2ForCausalLM, DeepseekV2Config, base, options, experts=experts)


def deepseek_v3(experts: str = "grouped_mm", **options: object) -> nn.Module:
    base = dict(_DEEPSEEK, q_lora_rank=24, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    return _build(DeepseekV3ForCausalLM, DeepseekV3Config, base, options, experts=experts)


def mixtral(experts: str = "grouped_mm", **options: object) -> nn.Module:
    base = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _build(MixtralForCausalLM, MixtralConfig, base, options, experts=experts)


def qwen2_moe(experts: str = "grouped_mm", **options: object) -> nn.Module:
    base = {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    return _build(Qwen2MoeForCausalLM, Qwen2MoeConfig, base, options, experts=experts)


def qwen3_moe(experts: str = "grouped_mm", **options: object) -> nn.Module:
    base = {
        "moe_intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    return _build(Qwen3MoeForCausalLM, Qwen3MoeConfig, base, options, experts=experts)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "v2": deepseek_v2,
    "v2_group_limited": lambda: deepseek_v2(
        "batched_mm",
        q_lora_rank=24,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_experts_per_tok=3,
        num_hidden_layers=3,
        first_k_dense_replace=1,
    ),
    "v2_no_shared": lambda: deepseek_v2(n_shared_experts=0),
    "v3": lambda: deepseek_v3(num_hidden_layers=3, first_k_dense_replace=1),
    "v3_batched": lambda: deepseek_v3("batched_mm", n_shared_experts=2, q_lora_rank=None),
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_batched": lambda: qwen3_moe("batched_mm"),
}
"""Every architecture that must match, with what the library calls its experts' implementation."""

EXPECTED_LAYERS = {
    # name: (first MoE layer, MoE layers, experts, top-k, shared)
    "v2": (0, 2, 8, 2, 1),
    "v2_group_limited": (1, 2, 8, 3, 2),
    "v2_no_shared": (0, 2, 8, 2, 0),
    "v3": (1, 2, 8, 2, 1),
    "v3_batched": (0, 2, 8, 2, 2),
    "mixtral": (0, 2, 4, 2, 0),
    "qwen2_moe": (0, 2, 8, 2, 2),
    "qwen3_moe": (0, 2, 8, 2, 0),
    "qwen3_moe_batched": (0, 2, 8, 2, 0),
}


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """PyTorch's own in bf16, which is all that it traces; the library's otherwise."""
    if weight.dtype is torch.bfloat16:
        return torch._grouped_mm(rows, weight, offsets)
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, offsets)


class PlainMoE(nn.Module):
    """Top-k of a softmax gate, experts in one of two spellings, sum over the choices.

    Args:
        spelling: ``grouped`` sorts the rows by expert, ``batched`` gathers the experts' weights.
        shared: width of a dense part that every token takes; 0 for none.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, spelling: str, shared: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 24) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, 24, hidden) / 24**0.5)
        self.shared = (
            nn.Sequential(
                nn.Linear(hidden, shared, bias=False),
                nn.GELU(),
                nn.Linear(shared, hidden, bias=False),
            )
            if shared
            else None
        )
        self.top_k = top_k
        self.spelling = spelling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.size()
        rows = x.view(-1, size[-1])
        weights, ids = self.gate(rows).softmax(-1).topk(self.top_k)
        routed = self._grouped if self.spelling == "grouped" else self._batched
        y = routed(rows, ids, weights)
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.view(size)

    def _grouped(self, rows, ids, weights):
        flat, order = ids.reshape(-1).sort()
        experts = self.up.shape[0]
        counts = torch.histc(flat.float(), experts, 0, experts - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        inner = grouped_mm(rows[order // self.top_k], self.up, offsets)
        out = grouped_mm(F.gelu(inner), self.down, offsets)
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return out[back].view(rows.shape[0], self.top_k, rows.shape[1]).sum(1)

    def _batched(self, rows, ids, weights):
        flat = ids.reshape(-1)
        repeated = rows.repeat_interleave(self.top_k, dim=0)
        inner = torch.bmm(repeated.unsqueeze(1), self.up[flat]).squeeze(1)
        out = torch.bmm(F.gelu(inner).unsqueeze(1), self.down[flat]).squeeze(1)
        out = out * weights.reshape(-1, 1)
        return out.view(rows.shape[0], self.top_k, rows.shape[1]).sum(dim=1)


class PlainBlock(nn.Module):
    """Attention and experts around a residual stream."""

    def __init__(self, hidden: int, heads: int, moe: PlainMoE, mix: Callable | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.moe = moe
        self.heads = heads
        self.mix = mix

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        if self.mix is not None:
            x = self.mix(x)
        return x + self.moe(self.norm2(x))


class PlainModel(nn.Module):
    """A small MoE transformer without any library.

    Args:
        mix: a function of the residual stream that every block applies before its experts.
        make_mask: attention mask from the ids; causal attention when None.
    """

    def __init__(
        self,
        *,
        layers: int = 2,
        hidden: int = 32,
        heads: int = 4,
        experts: int = 6,
        top_k: int = 2,
        spelling: str = "batched",
        shared: int = 0,
        mix: Callable | None = None,
        make_mask: Callable | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(
            PlainBlock(hidden, heads, PlainMoE(hidden, experts, top_k, spelling, shared), mix)
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.make_mask = make_mask
        self.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = None if self.make_mask is None else self.make_mask(ids)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class DenseModel(nn.Module):
    """No experts at all."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(ids)).relu())
