"""Does the runtime reach the pipeline model? Emulated costs against the closed forms.

    python benchmarks/emulated_pipeline.py

Attention keeps a processor busy for its time, the connector ``emulated`` stands for experts and
links of given latency. Every row of the golden table of docs/pipeline.md runs in both orders, and
its time is compared to the closed form. Dispatch and receive are real and cost what they cost, so
a ratio is a little above 1. Exits with 1 when a two-stage time is off by more than the tolerance.
The fastest step decides: every wait here ends on time or late, never early, so other work on the
machine can only add. It is also why a row that is off gets more steps; medians are shown beside.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from _verdict import verdict

from afd_graph.connectors.base import create_connector
from afd_graph.runtime import Channel
from afd_graph.schedule_ir import (
    StageCosts,
    credits_needed,
    receive_first,
    send_first,
    unsplit,
)
from afd_graph.simulate import REFERENCE_COSTS, closed_form

ORDERS = {"unsplit": unsplit, "send-first": send_first, "receive-first": receive_first}
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Program:
    """One step over emulated costs; a compiled model can take the place of the loop here.

    Attributes:
        run: runs one step.
        close: frees what the program holds.
    """

    run: Callable[[], None]
    close: Callable[[], None]


Build = Callable[[str, int, StageCosts], Program]


def channel_program(order_name: str, layers: int, costs: StageCosts) -> Program:
    """Walk the reference order over a channel, as an emitted graph does."""
    order = ORDERS[order_name](layers)
    attention_s, ffn_s, dispatch_s, return_s = costs.uniform()
    connector = create_connector(
        "emulated", {"ffn_s": ffn_s, "dispatch_s": dispatch_s, "return_s": return_s}
    )
    channel = Channel(connector, credits=credits_needed(order), timeout_s=TIMEOUT_S)
    channel.num_experts.update(dict.fromkeys(range(layers), 1))
    hidden = torch.ones(2, 8)
    topk_ids, topk_weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)

    def run() -> None:
        tickets: dict[tuple[int, int], int] = {}
        for step in order:
            item = (step.layer, step.stage)
            if step.kind == "attention":
                occupy(attention_s)
            elif step.kind == "dispatch":
                tickets[item] = channel.dispatch(hidden, topk_ids, *item)
            else:
                channel.receive(tickets.pop(item), hidden, topk_weights, *item)

    return Program(run, channel.close)


def occupy(seconds: float) -> None:
    """Keep the processor busy for ``seconds``, as attention does.

    A thread that slept instead would run the dispatch that follows several times slower.
    """
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def seconds_per_step(program: Program, enough_s: float, least: int, most: int) -> list[float]:
    """Times of ``least`` steps in seconds, and of more until one takes at most ``enough_s``."""
    times: list[float] = []
    try:
        while len(times) < least or (min(times) > enough_s and len(times) < most):
            begin = time.perf_counter()
            program.run()
            times.append(time.perf_counter() - begin)
    finally:
        program.close()
    return times


def measure(
    build: Build, layers: int, unit_s: float, tolerance: float, least: int, most: int
) -> bool:
    """Print the table; returns whether every two-stage time is within ``tolerance``."""
    print(f"{layers} layers, unit {unit_s * 1e3:g} ms, {least} to {most} steps; costs per stage")
    print(
        f"{'a, f, c, d':>20} {'order':>14} {'closed form':>12} {'fastest':>12} {'ratio':>7} "
        f"{'median':>7} {'steps':>5}"
    )
    worst = 1.0
    for units in REFERENCE_COSTS:
        costs = units.scaled(unit_s)
        for name in ORDERS:
            is_split = name != "unsplit"
            form = closed_form(layers, costs, name if is_split else "receive-first")
            expected = form.split_s if is_split else form.unsplit_s
            program = build(name, layers, costs if is_split else costs.scaled(2))
            times = seconds_per_step(program, expected * (1 + tolerance), least, most)
            ratio = min(times) / expected
            within = abs(ratio - 1) <= tolerance
            if is_split and abs(ratio - 1) > abs(worst - 1):
                worst = ratio
            row = ", ".join(f"{value:g}" for value in units.uniform())
            print(
                f"{row:>20} {name:>14} {expected * 1e3:>9.2f} ms {min(times) * 1e3:>9.2f} ms "
                f"{ratio:>7.4f} {median(times) / expected:>7.4f} {len(times):>5}"
                f"{'' if within else '  outside'}",
                flush=True,
            )
    holds = abs(worst - 1) <= tolerance
    return verdict("two stages over the closed form", worst, f"1 within {tolerance:.0%}", holds)


def main(arguments: Sequence[str] | None = None, build: Build = channel_program) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=20.0, help="length of a = 1")
    parser.add_argument("--least", type=int, default=3, help="steps of every row")
    parser.add_argument("--most", type=int, default=20, help="steps of a row that is off")
    parser.add_argument("--tolerance", type=float, default=0.03)
    options = parser.parse_args(arguments)
    # Rows of two tokens need no second thread, and waking one costs milliseconds on a busy machine.
    torch.set_num_threads(1)
    passed = measure(
        build,
        options.layers,
        options.unit_ms * 1e-3,
        options.tolerance,
        options.least,
        options.most,
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
