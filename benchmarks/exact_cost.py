"""What exact mode costs: the time of a step with it over that without, in one run.

    python benchmarks/exact_cost.py [--dtype float32] [--lengths 32 256 1024]

One tiny DeepSeekV2-like model, wide enough that its products count, is compiled with both settings;
their steps alternate, so that other work on the machine hits both, and the ratio of the fastest
steps is shown for the two-stage and for the unsplit program. Every answer of exact mode is checked:
both programs must give the same bits.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence

import torch
import torch._dynamo
from _verdict import verdict
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from afd_graph import AFDBackend, AFDConfig


def model(dtype: torch.dtype) -> torch.nn.Module:
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        kv_lora_rank=128,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    return DeepseekV2ForCausalLM(config).eval().to(dtype)


class Compiled:
    """One setting; ``cut`` chooses the program."""

    def __init__(self, plain: torch.nn.Module, exact: bool) -> None:
        self.cut: int | str = "unsplit"
        self.backend = AFDBackend(AFDConfig(exact=exact), plan=lambda extent, tokens: self.cut)
        self.model = torch.compile(
            copy.deepcopy(plain), backend=self.backend, fullgraph=True, dynamic=True
        )

    def step(self, ids: torch.Tensor, cut: int | str) -> tuple[float, torch.Tensor]:
        self.cut = cut
        begin = time.perf_counter()
        logits = self.model(input_ids=ids, use_cache=False).logits
        return time.perf_counter() - begin, logits


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64
    plain = model(getattr(torch, options.dtype))
    settings = [Compiled(plain, exact) for exact in (False, True)]
    equal, dearest = True, 0.0
    print(f"{options.dtype}, {options.threads} threads, batch 2, fastest of {options.steps} steps")
    print(f"{'length':>8} {'program':>10} {'ordinary':>12} {'exact':>12} {'ratio':>7}")
    for length in options.lengths:
        ids = torch.randint(512, (2, length), generator=torch.Generator().manual_seed(length))
        answers = []
        for name, cut in (("unsplit", "unsplit"), ("two-stage", length // 2)):
            times: list[list[float]] = [[], []]
            for step in range(options.steps + 1):
                for which, compiled in enumerate(settings):
                    seconds, logits = compiled.step(ids, cut)
                    if step:  # The first compiles, or fills caches.
                        times[which].append(seconds)
            answers.append(logits)
            ordinary, exact = map(min, times)
            dearest = max(dearest, exact / ordinary)
            print(
                f"{length:>8} {name:>10} {ordinary * 1e3:>9.2f} ms {exact * 1e3:>9.2f} ms "
                f"{exact / ordinary:>7.2f}",
                flush=True,
            )
        equal &= torch.equal(*answers)
    verdict("exact over ordinary mode", dearest, "both programs give the same bits", equal)
    for compiled in settings:
        compiled.backend.close()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
