"""Does the cluster simulator predict this machine? Fit its costs at some sizes, predict others.

    python benchmarks/cluster_model.py

A DeepseekV2 over the connector ``process``, attention on one core, experts on the other. Steps of
the fitting sizes run unsplit and split; from their traces attention, experts and links are fitted
(:mod:`afd_graph.cluster.measured`). Steps of the predicted sizes run in turn with them, unsplit and
split at several places, and take part in nothing but the comparison. Exits with 1 when a
prediction is off by more than the tolerance. The fastest of several steps counts on both sides:
other work on the machine can only add.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch
from _models import UNSPLIT, Compiled, deepseek_v2, one_core_a_side
from _verdict import verdict

from afd_graph.cluster.measured import Sample, fit, predict, samples
from afd_graph.efficiency import efficiency
from afd_graph.timeline import Recorder

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 464,
}


class Cut(Compiled):
    """A compiled model that is cut where it is told."""

    def at(self, ids: torch.Tensor, bounds: tuple[int, ...]) -> torch.Tensor:
        """Logits; ``bounds`` are the first tokens of the stages, then the number of tokens."""
        self._cut = bounds[1] if len(bounds) == 3 else UNSPLIT
        return self._model(ids, use_cache=False).logits


def plans(sizes: list[int], shares: tuple[float, ...]) -> list[tuple[int, ...]]:
    """Every size unsplit, and cut at every share."""
    return [
        bounds
        for size in sizes
        for bounds in ((0, size), *((0, round(size * share), size) for share in shares))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--fit", type=int, nargs="+", default=[192, 448, 896])
    parser.add_argument("--predict", type=int, nargs="+", default=[320, 640])
    parser.add_argument("--least", type=int, default=5, help="rounds")
    parser.add_argument("--most", type=int, default=25, help="rounds while a bound is missed")
    parser.add_argument("--tolerance", type=float, default=0.05)
    options = parser.parse_args()
    _, theirs = one_core_a_side()
    model = deepseek_v2(num_hidden_layers=options.layers, **SIZES)
    ids = torch.randint(0, 256, (1, max(options.fit + options.predict)))
    fitted = plans(options.fit, (0.5,))
    predicted = plans(options.predict, (0.5, 0.65))
    fastest: dict[tuple[int, ...], float] = {}
    seen: dict[tuple[int, ...], list[Sample]] = {}
    compiled = Cut(
        model,
        connector="process",
        connector_options={"threads": 1, "cpus": theirs},
        shared_experts="ffn",
    )
    with torch.no_grad(), compiled.backend as backend:
        for bounds in fitted + predicted:
            compiled.at(ids[:, : bounds[-1]], bounds)
        for number in range(1, options.most + 1):
            for bounds in fitted + predicted:
                with Recorder(backend.channel) as recorder:
                    compiled.at(ids[:, : bounds[-1]], bounds)
                step = efficiency(recorder, backend.credits)
                if step.wall_s < fastest.get(bounds, float("inf")):
                    fastest[bounds] = step.wall_s
                    seen[bounds] = samples(step, bounds)
            curves = fit([sample for bounds in fitted for sample in seen[bounds]])
            rows = [
                (bounds, predict(curves, bounds, options.layers, backend.credits))
                for bounds in predicted
            ]
            worst = max(abs(p / fastest[bounds] - 1) for bounds, p in rows)
            if worst <= options.tolerance and number >= options.least:
                break
    print(f"{options.layers} MoE layers, fp32, {number} rounds, fitted at {options.fit} tokens")
    print(f"{'stages':>12} {'measured':>10} {'predicted':>10} {'ratio':>7}")
    for bounds, seconds in rows:
        stages = " + ".join(str(b - a) for a, b in itertools.pairwise(bounds))
        measured = fastest[bounds]
        print(
            f"{stages:>12} {measured * 1e3:>7.1f} ms {seconds * 1e3:>7.1f} ms "
            f"{seconds / measured:>7.4f}"
        )
    holds = worst <= options.tolerance
    verdict("prediction off by", worst, f"at most {options.tolerance:g}", holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
