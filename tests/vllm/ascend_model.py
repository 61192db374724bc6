"""A DeepSeek model of vLLM with the layers of vLLM-Ascend on CPU, its experts behind emulated CAM.

The model, its layers, operators and compiler are the published source. Stand-ins, each a few lines
of plain PyTorch: three kernels of the NPU, and the kernel of MLA, which reads rotary factors, block
tables, lengths and slots from vLLM-Ascend's own metadata.
"""

from __future__ import annotations

import threading
from typing import Any

import ascend_steps as steps
import torch

WIDTH = 64


def register_kernels() -> None:
    """The NPU's operators that the layers call, as operators with a schema as on the device."""
    import torch_npu

    library = torch.library.Library("npu", "FRAGMENT")
    for schema, kernel in (
        ("npu_rms_norm(Tensor x, Tensor weight, float epsilon) -> (Tensor, Tensor)", _norm),
        (
            "npu_add_rms_norm(Tensor x, Tensor y, Tensor weight, float epsilon) "
            "-> (Tensor, Tensor, Tensor)",
            _add_norm,
        ),
        ("npu_swiglu(Tensor x) -> Tensor", _swiglu),
    ):
        name = schema.split("(")[0]
        library.define(schema)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"npu::{name}", kernel, lib=library)
        setattr(torch_npu, name, getattr(torch.ops.npu, name))
    _KEPT.append(library)


_KEPT: list[Any] = []


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * weight, scale


def _add_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, ...]:
    summed = x + y
    return (*_norm(summed, weight, epsilon), summed)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Attention:
    """Attention of one layer over a paged cache, driven by vLLM-Ascend's metadata alone."""

    def __init__(self, layer: int, hidden: int) -> None:
        draw = torch.Generator().manual_seed(layer)
        slots = (steps.MAX_REQUESTS * steps.MAX_LEN // steps.BLOCK + 1) * steps.BLOCK
        self.filled = torch.randn(slots, WIDTH, generator=draw)
        self.cache = self.filled.clone()
        self.query, self.key = (
            torch.randn(hidden, WIDTH, generator=draw) / hidden**0.5 for _ in range(2)
        )
        self.out = torch.randn(WIDTH, hidden, generator=draw) / WIDTH**0.5
        self.seen: set[str] = set()

    def forward(
        self, name: str, hidden: Any, cache: Any, metadata: Any, gather: bool, output: Any
    ) -> None:
        output.zero_()
        if metadata is None:
            return  # a profile run
        from vllm.forward_context import get_forward_context

        assert get_forward_context().num_tokens == len(hidden)
        self.seen.add(metadata.attn_state.name)
        count, decodes = metadata.num_actual_tokens, metadata.num_decode_tokens
        rows = hidden[:count].float()
        parts = [p for p in (metadata.decode, metadata.prefill) if p is not None]
        angles = torch.cat([part.cos[:, 0, 0, :1].float() for part in parts]) / steps.MAX_LEN
        keys, queries = rows @ self.key * (1 + angles), rows @ self.query
        self.cache[metadata.slot_mapping.long()] = keys
        answers = torch.empty(count, WIDTH)
        if metadata.decode is not None:
            part = metadata.decode
            assert part.actual_seq_lengths_q == list(range(1, decodes + 1))
            for row, length in enumerate(part.seq_lens_list):
                at = slice(row, row + 1)
                answers[at] = self._attend(queries[at], part.block_table[row], length)
        if metadata.prefill is not None:
            part = metadata.prefill
            begin = decodes
            for row, length in enumerate(part.query_lens.tolist()):
                at = slice(begin, begin + length)
                total = int(part.context_lens[row])
                assert metadata.attn_state.name != "PrefillNoCache" or total == length
                answers[at] = self._attend(queries[at], part.block_table[row], total)
                begin += length
        output[:count] = (answers @ self.out).to(output.dtype)

    def _attend(self, queries: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
        places = torch.arange(length)
        keys = self.cache[blocks[places // steps.BLOCK].long() * steps.BLOCK + places % steps.BLOCK]
        own = torch.arange(length - len(queries), length)
        scores = (queries @ keys.T / WIDTH**0.5).masked_fill(places > own[:, None], float("-inf"))
        return scores.softmax(-1) @ keys


def build(config: Any) -> tuple[Any, list[Attention]]:
    """The model with random weights, and the attention of its layers."""
    import vllm_ascend.ops.fused_moe.moe_comm_method as ways
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm_ascend import utils
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import enable_custom_op, register_ascend_customop

    for name in ("AlltoAllCommImpl", "MC2CommImpl", "FusedMC2CommImpl"):
        setattr(ways, name, lambda moe_config: None)  # they ask HCCL; one rank takes all-gather
    assert not enable_custom_op()  # its compiled part is not here; remembered for the compiler
    draw = torch.Generator().manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config):
        register_ascend_customop(config)
        if hasattr(utils, "set_weight_prefetch_method"):  # as the runner of version 0.18 does
            utils.set_weight_prefetch_method(get_ascend_config().weight_prefetch_config)
        model = DeepseekV2ForCausalLM(vllm_config=config, prefix="")
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "norm" in name or "embed" in name else parameter.shape[-1] ** -0.5
        parameter.data.normal_(generator=draw).mul_(scale)
    for layer in model.model.layers[1:]:
        experts = getattr(layer.mlp.experts, "routed_experts", layer.mlp.experts)
        weights = (experts.w13_weight.data, experts.w2_weight.data)
        layer.mlp.unpacked = tuple(weight.clone() for weight in weights)
    with set_current_vllm_config(config):
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
    attentions = []
    for number, layer in enumerate(model.model.layers):
        attention = Attention(number, steps.MODEL["hidden_size"])
        layer.self_attn.mla_attn.mla_attn.impl = attention
        layer.self_attn.mla_attn.mla_attn.kv_cache = [None]
        attentions.append(attention)
    return model, attentions


class FFNRank:
    """The FFN rank of an emulated CAM group, on a thread."""

    def __init__(self, world: Any, layers: list[tuple[str, Any]]) -> None:
        from afd_graph.connectors.cam_group import CamGroup
        from afd_graph.ffn.cam_experts import CamExperts
        from afd_graph.vllm.ascend_layer import ascend_program

        group = CamGroup(
            world.attention_ranks, 1, world.attention_ranks, steps.MAX_TOKENS, group_name=world.name
        )
        self.experts = CamExperts(
            group,
            hidden_size=steps.MODEL["hidden_size"],
            top_k=steps.MODEL["num_experts_per_tok"],
            num_experts=steps.MODEL["n_routed_experts"],
            device="cpu",
        )
        for number, (name, layer) in enumerate(layers):
            self.experts.add_program(ascend_program(number, name, layer))
        threading.Thread(target=self.experts.serve, daemon=True).start()
