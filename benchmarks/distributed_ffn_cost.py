"""What the FFN server costs on top of its experts: per empty item, and per row.

    python benchmarks/distributed_ffn_cost.py

One attention rank and one FFN rank of a gloo world. Costs are processor time of the FFN process,
all its threads, gloo's included: other work on the machine does not count. The same rows go through
a plain loop over the experts in the same process; what the server takes beyond it is the cost of
receiving, grouping, answering and sending.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _verdict import verdict
from torch import fx

from afd_graph.connectors.base import WorkItem
from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.ffn.program import Expression, FFNProgram
from afd_graph.ffn.server import FFNServer, ModelWeights

EXPERTS, HIDDEN, INNER = 16, 512, 256
ROWS = (0, 16, 128, 1024)
ITEMS = 200


def program() -> FFNProgram:
    """Two products with a silu between them."""
    aten, grouped_mm = torch.ops.aten, torch.ops.afd.grouped_mm.default
    graph = fx.Graph()
    rows, counts, up, down = map(graph.placeholder, ("rows", "counts", "up", "down"))
    inner = graph.call_function(grouped_mm, (rows, up, counts))
    inner = graph.call_function(aten.silu.default, (inner,))
    graph.output(graph.call_function(grouped_mm, (inner, down, counts)))
    generator = torch.Generator().manual_seed(0)
    weights = [
        ("up", torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)),
        ("down", torch.randn(EXPERTS, INNER, HIDDEN, generator=generator)),
    ]
    experts = Expression(graph, weights)
    return FFNProgram(0, None, EXPERTS, HIDDEN, torch.float32, experts, key="0")


def plain_loop(rows: torch.Tensor, counts: list[int], up: torch.Tensor, down: torch.Tensor) -> None:
    answer, begin = torch.empty_like(rows), 0
    for expert, count in enumerate(counts):
        part = rows[begin : begin + count]
        answer[begin : begin + count] = torch.nn.functional.silu(part @ up[expert]) @ down[expert]
        begin += count


def attend(world: World) -> None:
    connector = TorchDistributedConnector(world)
    connector.add_program(program())
    for rows in ROWS:
        each = rows // EXPERTS
        for _ in range(ITEMS):
            buffer = connector.row_buffer(each * EXPERTS, HIDDEN, torch.float32).fill_(0.1)
            ticket = connector.send(WorkItem(0, 0, buffer, [each] * EXPERTS))
            connector.wait(ticket, 60)
            connector.release(ticket)
    connector.close()


def serve(world: World) -> dict[int, tuple[float, float]]:
    """Per number of rows, processor seconds an item of the server and of the plain loop."""
    weights = dict(program().routed.weights)
    server = FFNServer(world, ModelWeights(weights))
    seen: dict[int, list[float]] = {rows: [] for rows in ROWS}

    def note(item: WorkItem, begin_ns: int, end_ns: int) -> None:
        seen[item.rows.shape[0]].append(time.process_time())

    server.observers.append(note)
    server.serve()
    costs = {}
    for rows, times in seen.items():
        # The first tenth warms up memory and caches.
        first = len(times) // 10
        served = (times[-1] - times[first]) / (len(times) - 1 - first)
        counts, values = [rows // EXPERTS] * EXPERTS, torch.full((rows, HIDDEN), 0.1)
        begin = time.process_time()
        for _ in range(ITEMS):
            plain_loop(values, counts, weights["up"], weights["down"])
        costs[rows] = served, (time.process_time() - begin) / ITEMS
    return costs


def run_rank(rank: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    world = World(WorldConfig(ffn_ranks=1))
    if world.ranks.is_ffn(rank):
        answers.put(serve(world))
    else:
        attend(world)
    dist.destroy_process_group()


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_rank, (port, answers), 2)
    costs = answers.get()
    print(f"{EXPERTS} experts, {HIDDEN} x {INNER}, fp32, {ITEMS} items; processor time of one rank")
    names = ("server", "plain loop", "more", "more a row")
    print(f"{'rows':>6} " + " ".join(f"{name:>12}" for name in names) + f" {'ratio':>7}")
    for rows, (served, plain) in costs.items():
        more = served - plain if rows else served
        a_row = f"{more / rows * 1e6:>9.2f} us" if rows else ""
        ratio = f"{served / plain:.2f}" if rows else ""
        print(
            f"{rows:>6} {served * 1e6:>9.0f} us {plain * 1e6:>9.0f} us {more * 1e6:>9.0f} us "
            f"{a_row:>12} {ratio:>7}"
        )
    served, plain = costs[max(costs)]
    verdict("server over plain loop, most rows", served / plain, "no bound", True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
