"""Two stages against unsplit AFD over torch.distributed, real attention and real experts.

    python benchmarks/distributed_compute.py

The model of ``real_compute.py``, one attention rank and one FFN rank of a gloo world, a core each.
Nothing is emulated, so the machine sets the limits: two cores that share caches and memory are
slower while both are busy, and gloo's threads need them as well. Both are shown: a, f, c, d of the
unsplit step, where one side waits for the other, beside those of the two-stage step, twice as many
items of half the size. Exits with 1 when two stages are not faster, or reach less than the given
share of the closed form of docs/pipeline.md for their own a, f, c, d.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import Any

import torch
import torch.multiprocessing as mp
from _models import Compiled, deepseek_v2, one_core_a_side
from _verdict import verdict
from real_compute import SIZES, steps

from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.efficiency import Efficiency
from afd_graph.ffn.server import FFNServer, ModelWeights
from afd_graph.simulate import closed_form


def run_rank(rank: int, port: int, options: argparse.Namespace, answers: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    cores = one_core_a_side()
    os.sched_setaffinity(0, cores[rank])
    model = deepseek_v2(num_hidden_layers=options.layers, **SIZES)
    if rank == 1:
        world = World(WorldConfig(ffn_ranks=1))
        FFNServer(world, ModelWeights(dict(model.named_parameters()))).serve()
        return
    ids = torch.randint(0, 256, (1, options.tokens))
    compiled = Compiled(
        model,
        connector="torch_distributed",
        connector_options={"ffn_ranks": 1},
        shared_experts="ffn",
    )
    with torch.no_grad(), compiled.backend as backend:
        for split in (False, True):
            compiled(ids, split=split)
        rounds = [
            [steps(compiled, ids, split) for split in (False, True)] for _ in range(options.rounds)
        ]
        answers.put((backend.report().order, rounds))


def row(name: str, step: Efficiency) -> str:
    a, f, c, d = (value * 1e3 for value in step.costs.uniform())
    return (
        f"{name:>10} {step.wall_s * 1e3:>7.1f} ms {a:>8.2f} {f:>8.2f} {c:>6.2f} {d:>6.2f} "
        f"{step.busy('attention'):>9.1%} {step.busy('ffn'):>7.1%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--of-bound", type=float, default=0.9)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = mp.get_context("spawn").Queue()
    ranks = mp.spawn(run_rank, (port, options, answers), 2, join=False)
    order, rounds = answers.get()
    while not ranks.join():
        pass
    unsplit, split = (
        min((pair[kind] for pair in rounds), key=lambda step: step.wall_s) for kind in (0, 1)
    )
    form = closed_form(options.layers, split.costs, order)
    speedup, reached = unsplit.wall_s / split.wall_s, form.split_s / split.wall_s
    print(f"{options.layers} MoE layers, {options.tokens} tokens, fp32, {order}")
    print(f"{'':>10} {'fastest':>10} {'a':>8} {'f':>8} {'c':>6} {'d':>6} attention experts")
    print(row("unsplit", unsplit))
    print(row("two stages", split))
    print(f"closed form for two stages: {form.split_s * 1e3:.1f} ms ({form.regime})")
    fast = verdict("unsplit AFD over two stages", speedup, "above 1", speedup > 1)
    near = verdict(
        "two stages, of the closed form",
        reached,
        f"at least {options.of_bound:g}",
        reached >= options.of_bound,
    )
    return 0 if fast and near else 1


if __name__ == "__main__":
    sys.exit(main())
