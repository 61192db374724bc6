"""What it costs to plan the stages of one step, by policy.

    python benchmarks/planning.py

A step of 256 requests, each with a cache of its own, is planned again and again, by the policies in
turn. The bound is on the fastest call, because other work on the machine can only add. Exits with 1
when a policy needs 100 microseconds or more, the planner's share of a serving step of some
milliseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from _verdict import verdict

from afd_graph.cost_model import CostModel
from afd_graph.planner import POLICIES, plan_stages

BOUND_S = 100e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    draw = random.Random(0)
    counts = [draw.randint(1, 500) for _ in range(options.requests)]
    costs = CostModel(
        [draw.randint(0, 9999) for _ in counts],
        linear=1e-6,
        quadratic=1e-9,
        experts=1e-5,
        dispatch=1e-6,
        combine=1e-6,
        num_layers=58,
    )
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(options.rounds):
        for policy, spent in seconds.items():
            begin = time.perf_counter()
            plan_stages(counts, split=policy, costs=costs)
            spent.append(time.perf_counter() - begin)
    print(f"{options.requests} requests, {sum(counts)} tokens, {options.rounds} rounds")
    print(f"{'policy':<10} {'fastest':>9} {'median':>9}")
    fastest = {policy: min(spent) for policy, spent in seconds.items()}
    for policy, spent in seconds.items():
        median = statistics.median(spent)
        print(f"{policy:<10} {fastest[policy] * 1e6:>6.1f} us {median * 1e6:>6.1f} us")
    bound = f"below {BOUND_S * 1e6:g}"
    held = [
        verdict(f"microseconds of a plan by {policy}", best * 1e6, bound, best < BOUND_S)
        for policy, best in fastest.items()
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
