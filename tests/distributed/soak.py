"""Many steps: no growth in memory, threads, sockets or file descriptors, on any rank.

    python tests/distributed/soak.py --steps 10000

Two attention ranks and two FFN ranks; every step dispatches to two layers in two stages, with
another number of tokens each time. Prints one line of JSON: what each rank held after a tenth of
the steps and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from distributed.faults import layer_of  # noqa: E402
from distributed.worlds import run_world  # noqa: E402

from afd_graph.connectors.torch_distributed import TorchDistributedConnector  # noqa: E402
from afd_graph.connectors.torch_distributed_world import World, WorldConfig  # noqa: E402
from afd_graph.ffn.server import FFNServer, ModelWeights  # noqa: E402
from afd_graph.runtime import Channel  # noqa: E402

LAYERS, EXPERTS, MOST_TOKENS = 2, 4, 48
ALLOWED_KB = 4096


def held() -> dict[str, int]:
    """What this process holds now."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the one that lists them
    return {
        "kilobytes": int(lines["RssAnon"].split()[0]),
        "threads": int(lines["Threads"]),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket") for link in links),
    }


def attention(world: World, steps: int, idle_s: float) -> list[dict[str, int]]:
    connector = TorchDistributedConnector(world)
    channel = Channel(connector, credits=2, timeout_s=60)
    for number in range(LAYERS):
        connector.add_program(layer_of(number))
        channel.num_experts[number] = EXPERTS
    generator = torch.Generator().manual_seed(world.rank)
    seen = []
    for step in range(steps):
        if step == 1:
            time.sleep(idle_s)
        for layer in range(LAYERS):
            sent = []
            for stage in range(2):
                tokens = (step * 7 + stage) % MOST_TOKENS
                hidden = torch.randn(tokens, 16, generator=generator)
                share, ids = torch.rand(tokens, EXPERTS, generator=generator).topk(2)
                sent.append((channel.dispatch(hidden, ids, layer, stage), hidden, share))
            for stage, (ticket, hidden, share) in enumerate(sent):
                channel.receive(ticket, hidden, share, layer, stage)
        if step in (steps // 10, steps - 1):
            seen.append(held())
    channel.close()
    return seen


def ffn(world: World, steps: int, _: float) -> list[dict[str, int]]:
    named: dict[str, torch.Tensor] = {}
    for number in range(LAYERS):
        named.update(layer_of(number).routed.weights)
    server = FFNServer(world, ModelWeights(named))
    items = steps * LAYERS * 2 * world.ranks.attention
    seen: list[dict[str, int]] = []

    def note(item: Any, begin: int, end: int) -> None:
        if server.status().items in (items // 10, items):
            seen.append(held())

    server.observers.append(note)
    server.serve()
    return seen


def rank(steps: int, idle_s: float) -> list[dict[str, int]]:
    # The idle time is beyond every limit that the ranks and gloo know of.
    world = World(WorldConfig(ffn_ranks=2, timeout_s=20.0, connect_timeout_s=20.0))
    return (ffn if world.ranks.is_ffn(world.rank) else attention)(world, steps, idle_s)


def main(steps: int, idle_s: float = 0.0) -> dict[str, Any]:
    ended = run_world(4, rank, steps, idle_s, limit_s=60 + steps + idle_s)
    grown = [
        f"rank {number}: {name} {before[name]} -> {after[name]}"
        for number, end in enumerate(ended)
        if end.error is None and end.result
        for before, after in [end.result]
        for name in before
        if after[name] > before[name] + (ALLOWED_KB if name == "kilobytes" else 0)
    ]
    errors = [end.error or "hung" for end in ended if end.result is None]
    return {"steps": steps, "held": [end.result for end in ended], "grown": grown, "errors": errors}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds without a step")
    arguments = parser.parse_args()
    print("RESULT " + json.dumps(main(arguments.steps, arguments.idle)))
