"""What the benchmarks share: a DeepseekV2 of any size, both ways to run it, and one core a side."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from afd_graph import AFDBackend, AFDConfig
from afd_graph.planner import NoSplit, plan_stages

UNSPLIT = "asked for unsplit"


def deepseek_v2(dtype: torch.dtype = torch.float32, **sizes: int) -> DeepseekV2ForCausalLM:
    """A model of random weights; what ``sizes`` leaves out is tiny."""
    small = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
    }
    sizes = small | sizes
    config = DeepseekV2Config(
        **sizes,
        q_lora_rank=None,
        num_key_value_heads=sizes["num_attention_heads"],
        topk_method="greedy",
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    torch.manual_seed(0)
    # Dynamo warns about caches inside transformers that do not concern us.
    warnings.filterwarnings("ignore", module="torch._dynamo")
    return DeepseekV2ForCausalLM(config).to(dtype).eval().requires_grad_(False)


def one_core_a_side() -> tuple[list[int], list[int]]:
    """Keep this process to one core and one thread; returns its core and the experts' core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores, one for each side")
    os.sched_setaffinity(0, cores[:1])
    torch.set_num_threads(1)
    return cores[:1], cores[1:2]


class Compiled:
    """A compiled model whose steps run unsplit or in two stages, as asked.

    Args:
        model: what is compiled.
        options: of the backend.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        self._cut: int | str = UNSPLIT
        config = AFDConfig(**options)
        self.backend = AFDBackend(config, plan=lambda extent, tokens: self._cut)
        self._model = torch.compile(model, backend=self.backend, fullgraph=True)

    def __call__(self, ids: torch.Tensor, *, split: bool) -> torch.Tensor:
        """Logits of ``ids [1, n]``."""
        self._cut = half(ids.shape[1]) if split else UNSPLIT
        return self._model(ids, use_cache=False).logits


def half(tokens: int) -> int:
    """Where the policy ``token`` cuts."""
    plan = plan_stages([tokens], split="token")
    assert not isinstance(plan, NoSplit)
    return plan.stages[0].actual_tokens


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
