"""A model whose experts are on other ranks, against the eager model of one process.

Takes the checkpoint and the cases as JSON, ``[ranks, WorldConfig options, AFDConfig options]`` by
name; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from distributed.worlds import run_world

from afd_graph import AFDBackend, AFDConfig
from afd_graph.checkpoint import Checkpoint
from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.ffn.checkpoint import LoadedExperts
from afd_graph.ffn.server import FFNServer
from afd_graph.hf import load_without_experts, make_tensor_parallel, open_checkpoint
from tiny_models import VOCABULARY, deepseek_v2

SHAPE = (2, 11)
STAGES = 2
PATIENCE_S = 60.0


def serve(world: World, checkpoint: Checkpoint) -> dict[str, Any]:
    experts = LoadedExperts(checkpoint, lambda n: world.ranks.expert_range(world.rank, n))
    server = FFNServer(world, experts)
    server.serve()
    status = server.status()
    return {"items": status.items, "rows": status.rows, "summary": experts.summary()}


def attend(
    world: World, checkpoint: Checkpoint, options: dict[str, Any], path: str
) -> dict[str, Any]:
    reference, model = deepseek_v2(), load_without_experts(checkpoint)
    if world.ranks.tp > 1:
        make_tensor_parallel(model, world.tp_mesh())
    ids = torch.randint(VOCABULARY, SHAPE, generator=torch.Generator().manual_seed(7))
    connector = TorchDistributedConnector(world)
    with torch.no_grad(), AFDBackend(AFDConfig(**options), connector=connector) as backend:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        expected = reference(ids, use_cache=False).logits
        got = compiled(ids, use_cache=False).logits
        report = backend.report()
        told = wait_for_status(connector, report.steps_split * STAGES * len(report.layers))
        if backend.config.trace:
            trace = backend.trace()
            trace.write(Path(path) / f"trace.rank{trace.rank}.json")
    return {
        "difference": ((expected - got).abs().max() / expected.abs().max()).item(),
        "split": report.steps_split,
        "unsplit": dict(report.steps_unsplit),
        "told": told,
        "expert_bytes": sum(
            parameter.untyped_storage().nbytes()
            for name, parameter in model.named_parameters()
            if ".experts." in name
        ),
    }


def wait_for_status(connector: TorchDistributedConnector, items: int) -> dict[int, int]:
    """Items of each FFN rank as it tells them itself, from time to time, once it had ``items``."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        told = {rank: status.get("items", 0) for rank, status in connector.ffn_status().items()}
        if min(told.values()) >= items:
            break
        time.sleep(0.05)
    return told


def rank(path: str, settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    world = World(WorldConfig(**settings))
    checkpoint = open_checkpoint(path)
    world.describe(checkpoint.fingerprint(), "float32")
    if world.ranks.is_ffn(world.rank):
        return {"name": world.name, **serve(world, checkpoint)}
    return {"name": world.name, **attend(world, checkpoint, options, path)}


def main(path: str, cases: dict[str, Any]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    results = {}
    for name, (ranks, settings, options) in cases.items():
        ended = run_world(ranks, rank, path, settings, options, limit_s=500)
        results[name] = [end.result or {"error": end.error or "hung"} for end in ended]
    return results


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
