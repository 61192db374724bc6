"""Worlds in which one rank differs, does not come, or is not what it should be.

Prints one line of JSON: by case, what every rank said.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from distributed.worlds import run_world

from afd_graph.config import AFDConfig
from afd_graph.connectors import torch_distributed_world as world_module
from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.ffn.server import FFNServer, ModelWeights

RANKS = 3
SETTINGS = {"ffn_ranks": 1, "connect_timeout_s": 30.0, "timeout_s": 5.0, "model": "aa"}
WAIT_FOR_ABSENT_S = 2.0
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # name: the rank that differs, and how
    "model": (2, {"model": "bb"}),
    "max_tokens": (2, {"max_tokens": 4096}),
    "dtype": (1, {"dtype": "bfloat16"}),
    "dynamic_quant": (2, {"dynamic_quant": True}),
    "credits": (0, {"credits": 1}),
    "policy": (1, {"split": "request"}),
    "ffn policy": (2, {"split": "request"}),
    "tp_size": (1, {"tp_size": 2}),
    "ffn_ranks": (0, {"ffn_ranks": 2}),
    "version": (2, {"version": "0.0.1"}),
    "absent": (1, {"absent": True}),
    "gave up": (2, {"gave up": True}),
    "nothing": (0, {}),
}


def rank(odd: int, how: dict[str, Any]) -> str:
    differs = int(os.environ["RANK"]) == odd
    mine = how if differs else {}
    names = set(WorldConfig.__dataclass_fields__)
    settings = {**SETTINGS, **{name: v for name, v in mine.items() if name in names}}
    if "version" in mine:
        world_module.__version__ = mine["version"]
    world = World(WorldConfig(**settings))
    if mine.get("absent"):
        return "absent"
    if how.get("absent"):
        # Only now: all three have 30 s to become a world, however busy the machine is.
        world.config = dataclasses.replace(world.config, connect_timeout_s=WAIT_FOR_ABSENT_S)
    if mine.get("gave up"):
        world.give_up(ValueError("no such checkpoint"))
        return "gave up"
    split = mine.get("split", "token" if not world.ranks.is_ffn(world.rank) else "")
    if world.ranks.is_ffn(world.rank):
        FFNServer(world, ModelWeights({}), split).serve()
    else:
        connector = TorchDistributedConnector(world)
        try:
            connector.configured(AFDConfig(split=split))
        finally:
            connector.close()
    return "agreed"


if __name__ == "__main__":
    said = {
        name: [
            end.error or end.result
            for end in run_world(RANKS, rank, *case, agent=bool(number % 2), limit_s=60)
        ]
        for number, (name, case) in enumerate(CASES.items())
    }
    print("RESULT " + json.dumps(said))
