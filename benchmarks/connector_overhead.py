"""What dispatch and receive cost on top of the copies that they make.

    python benchmarks/connector_overhead.py

Experts that answer their own rows are put behind each connector, and a dispatch and its receive
are timed through the channel. The copies alone are timed in the same run, in turn with them:
gathering the rows by expert, the experts' copy where the connector has one, and the weighted sum.
What the connector adds is the difference: the credit account, messages, waking the other side, and
waking up again. Exits with 1 when it is above the limit.

Another program on one of the two cores delays a wake-up by a slice of the scheduler, some 4 ms.
Such noise only ever adds, so the difference is taken between the lowest deciles of the two times;
the difference of the medians stands beside it. A bare round trip between two processes is timed
first: where its median is far above its decile, the machine is too busy for this benchmark.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import torch
from _verdict import verdict
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


class Times(NamedTuple):
    """Microseconds."""

    decile: float
    median: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        return cls(quantiles(samples, n=10)[0] * 1e6, median(samples) * 1e6)


def round_trip(repeats: int, cpus: Sequence[int]) -> Times:
    """A bare message to a process on the other core and back."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        ours.close()
        os.sched_setaffinity(0, [cpus[-1]])
        while packet := theirs.recv(64):
            theirs.send(packet)
        os._exit(0)
    theirs.close()

    def ping() -> None:
        ours.send(bytes(48))
        ours.recv(64)

    samples = [seconds(ping) for _ in range(repeats)]
    ours.close()
    os.waitpid(child, 0)
    return Times.of(samples)


def boundary_and_copies(
    connector: str, tokens: int, repeats: int, cpus: Sequence[int]
) -> list[Times]:
    """Time of a dispatch and its receive, and of the copies alone."""
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
    return [Times.of(column) for column in zip(*pairs, strict=True)]


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
    bare = round_trip(options.repeats, cpus)
    print(f"bare round trip: {bare.decile:.0f} us (lowest decile), {bare.median:.0f} us (median)")
    print(f"hidden {HIDDEN}, bfloat16, top {TOP_K} of {EXPERTS}; {options.repeats} times, in us")
    print(
        f"{'connector':>10} {'tokens':>7} {'boundary':>9} {'copies':>9} {'added':>9} "
        f"{'by median':>10}"
    )
    worst = 0.0
    for connector in ("local", "process"):
        for tokens in options.tokens:
            both, copies = boundary_and_copies(connector, tokens, options.repeats, cpus)
            added = both.decile - copies.decile
            within = added <= options.limit_us
            worst = max(worst, added)
            print(
                f"{connector:>10} {tokens:>7} {both.decile:>9.0f} {copies.decile:>9.0f} "
                f"{added:>9.0f} {both.median - copies.median:>10.0f}"
                f"{'' if within else '  above the limit'}",
                flush=True,
            )
    holds = worst <= options.limit_us
    verdict("us on top of the copies", worst, f"at most {options.limit_us:g}", holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
