"""What dispatch and receive cost on top of the copies that they make.

    python benchmarks/connector_overhead.py

Experts that answer their own rows are put behind each connector, and a dispatch and its receive
are timed through the channel. The copies alone are timed in the same run, in turn with them:
gathering the rows by expert, the experts' copy where the connector has one, and the weighted sum.
The difference is what the connector adds: the credit account, messages, waking the other side,
and waking up again. Exits with 1 when its lowest decile is above the limit. The decile, because a
wake-up on a core that another program keeps busy waits for the scheduler's slice, some 4 ms; on a
quiet machine the median is some 10 us above it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch
from torch import fx

from afd_graph.connectors import create_connector
from afd_graph.ffn.program import Expression, FFNProgram
from afd_graph.routing import combine, group_by_expert, has_nan
from afd_graph.runtime import Channel

EXPERTS, TOP_K, HIDDEN = 64, 6, 2048  # DeepSeek-V2-Lite
CREDITS = 2


def echo_program() -> FFNProgram:
    """Experts that answer their rows."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    graph.placeholder("counts")
    graph.output(rows)
    return FFNProgram(0, "echo", EXPERTS, HIDDEN, torch.bfloat16, Expression(graph, ()), key="echo")


def difference_us(connector: str, tokens: int, repeats: int, cpus: Sequence[int]) -> list[float]:
    """Microseconds: medians of boundary, copies and difference; lowest decile of the latter."""
    options = {"threads": 1, "cpus": [cpus[-1]]}
    channel = Channel(create_connector(connector, options), credits=CREDITS, timeout_s=30)
    channel.connector.add_program(echo_program())
    channel.num_experts[0] = EXPERTS
    hidden = torch.randn(tokens, HIDDEN).bfloat16()
    topk_weights, topk_ids = torch.rand(tokens, EXPERTS).topk(TOP_K)
    sent, answered = torch.empty(2, tokens * TOP_K, HIDDEN, dtype=torch.bfloat16)

    def boundary() -> None:
        ticket = channel.dispatch(hidden, topk_ids, 0, 0)
        channel.receive(ticket, hidden, topk_weights, 0, 0)

    def copies() -> None:
        source, _, position = group_by_expert(topk_ids, EXPERTS)
        torch.index_select(hidden, 0, source, out=sent)
        if connector == "process":
            answered.copy_(sent)
        has_nan(combine(answered, position, topk_weights, hidden.dtype, None))

    try:
        for function in (boundary, copies) * 3:
            function()
        pairs = [(seconds(boundary), seconds(copies)) for _ in range(repeats)]
    finally:
        channel.close()
    added = [both - copy for both, copy in pairs]
    boundaries, copied = zip(*pairs, strict=True)
    lowest_decile = quantiles(added, n=10)[0]
    columns = median(boundaries), median(copied), median(added), lowest_decile
    return [value * 1e6 for value in columns]


def seconds(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--limit-us", type=float, default=100.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])  # one core a side
    passed = True
    print(f"hidden {HIDDEN}, bfloat16, top {TOP_K} of {EXPERTS}; {options.repeats} times, in us")
    print(
        f"{'connector':>10} {'tokens':>7} {'boundary':>9} {'copies':>9} {'added':>9} {'decile':>9}"
    )
    for connector in ("local", "process"):
        for tokens in options.tokens:
            columns = difference_us(connector, tokens, options.repeats, cpus)
            within = columns[-1] <= options.limit_us
            passed &= within
            print(
                f"{connector:>10} {tokens:>7} "
                + " ".join(f"{value:>9.0f}" for value in columns)
                + ("" if within else "  above the limit"),
                flush=True,
            )
    print(f"at most {options.limit_us:g} us on top of the copies: {'yes' if passed else 'NO'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
