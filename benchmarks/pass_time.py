"""What the passes cost beside the capture, from 8 to 61 layers.

    python benchmarks/pass_time.py

A Hugging Face DeepseekV2 of tiny widths is captured with a free token count; every pass and every
verification is timed by the pipeline itself. The passes run several times on copies of the graph,
and the fastest run counts, because other work can only add. Exits with 1 when at 61 layers all
passes together take 1 s or more, or 3 % or more of the capture (Dynamo and AOTAutograd), or when
the time per node at any size is more than 1.25 times what it is at the smallest.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from _models import deepseek_v2
from _verdict import verdict
from torch import fx

from afd_graph import AFDBackend, AFDConfig
from afd_graph.report import GraphReport

FLAT = 1.25


class Repeated(AFDBackend):
    """A backend that compiles copies of each captured graph before the graph itself."""

    repeats = 1
    spent_s = 0.0

    def _compile(self, gm: fx.GraphModule, *rest: Any) -> Any:
        begin = time.perf_counter()
        for _ in range(self.repeats - 1):
            copy = fx.Graph()
            copy.output(copy.graph_copy(gm.graph, {}))
            super()._compile(fx.GraphModule(gm, copy), *rest)
        compiled = super()._compile(gm, *rest)
        self.spent_s = time.perf_counter() - begin
        return compiled


def measure(layers: int, repeats: int) -> tuple[GraphReport, float]:
    """The fastest run of the passes, and the capture in seconds."""
    torch.compiler.reset()
    model = deepseek_v2(num_hidden_layers=layers, first_k_dense_replace=1)
    with Repeated(AFDConfig()) as backend, torch.no_grad():
        backend.repeats = repeats
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        ids = torch.randint(0, 256, (1, 16))
        begin = time.perf_counter()
        compiled(ids, use_cache=False)
        first_s = time.perf_counter() - begin
        begin = time.perf_counter()
        compiled(ids, use_cache=False)
        step_s = time.perf_counter() - begin
        fastest = min(backend.report().graphs, key=lambda g: sum(g.pass_seconds.values()))
        return fastest, first_s - step_s - backend.spent_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 61])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=1.0)
    parser.add_argument("--of-capture", type=float, default=0.03)
    options = parser.parse_args()
    print(
        f"{'layers':>6} {'nodes':>6} {'emitted':>7} {'passes':>9} {'per node':>9} {'to first':>8} "
        f"{'capture':>9} {'of it':>6}"
    )
    per_node: list[float] = []
    for layers in options.layers:
        report, capture_s = measure(layers, options.repeats)
        spent_s = sum(report.pass_seconds.values())
        per_node.append(spent_s / report.nodes_before)
        print(
            f"{layers:>6} {report.nodes_before:>6} {report.nodes_after:>7} {spent_s:>7.3f} s "
            f"{per_node[-1] * 1e6:>6.1f} us {per_node[-1] / per_node[0]:>8.2f} {capture_s:>7.1f} s "
            f"{spent_s / capture_s:>6.2%}",
            flush=True,
        )
    for name, seconds in sorted(report.pass_seconds.items(), key=lambda item: -item[1]):
        print(f"  {name:<18} {seconds * 1e3:8.1f} ms")
    bounds = (
        ("seconds of all passes", spent_s, options.limit_s),
        ("passes over capture", spent_s / capture_s, options.of_capture),
        ("per node over the smallest model", max(per_node) / per_node[0], FLAT),
    )
    held = [
        verdict(claim, value, f"at most {most:g}", value <= most) for claim, value, most in bounds
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
