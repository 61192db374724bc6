"""What tracing costs a step: the same compiled model, traced and not, in turns.

    python benchmarks/trace_overhead.py

A DeepseekV2 over the connector ``process``. The processor time of the attention side's thread is
compared (everything that tracing does, it does there), so that other work on the machine matters
little; wall times stand beside it. Each round runs both kinds, in changing order. Exits with 1 when
the traced step costs more than the bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch
from _models import Compiled, deepseek_v2, one_core_a_side
from _verdict import verdict

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "n_routed_experts": 8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--bound", type=float, default=0.02)
    options = parser.parse_args()
    _, theirs = one_core_a_side()
    model = deepseek_v2(num_hidden_layers=options.layers, **SIZES)
    compiled = Compiled(
        model, trace=True, connector="process", connector_options={"threads": 1, "cpus": theirs}
    )
    worst = 0.0
    print(f"{options.layers} MoE layers, {options.rounds} rounds, two stages")
    print(f"{'tokens':>7} {'plain':>10} {'traced':>10} {'cost':>8} {'of medians':>10} {'wall':>8}")
    with torch.no_grad(), compiled.backend as backend:
        channel, report = backend.channel, backend.report()
        hooks = {True: (list(channel.observers), list(report.observers)), False: ([], [])}
        for tokens in options.tokens:
            ids = torch.randint(0, 256, (1, tokens))
            compiled(ids, split=True)
            spent: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for number in range(options.rounds):
                for traced in (True, False) if number % 2 else (False, True):
                    channel.observers[:], report.observers[:] = hooks[traced]
                    wall, processor = time.perf_counter(), time.thread_time()
                    compiled(ids, split=True)
                    spent[traced].append(
                        (time.thread_time() - processor, time.perf_counter() - wall)
                    )
            plain, traced_s = (min(s for s, _ in spent[kind]) for kind in (False, True))
            medians = [median(s for s, _ in spent[kind]) for kind in (False, True)]
            walls = [min(w for _, w in spent[kind]) for kind in (False, True)]
            cost = traced_s / plain - 1
            worst = max(worst, cost)
            print(
                f"{tokens:>7} {plain * 1e3:>7.2f} ms {traced_s * 1e3:>7.2f} ms {cost:>+8.2%} "
                f"{medians[1] / medians[0] - 1:>+10.2%} {walls[1] / walls[0] - 1:>+8.2%}"
            )
    holds = worst <= options.bound
    verdict("processor time added by tracing", worst, f"at most {options.bound:g}", holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
