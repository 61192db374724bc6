"""Run under torchrun: one rank of a world, FFN or attention; what it does is the case's name.

Prints one line of JSON: what the attention ranks found.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from afd_graph import AFDBackend, AFDConfig
from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.ffn.checkpoint import Checkpoint, LoadedExperts, fingerprint
from afd_graph.ffn.server import FFNServer
from afd_graph.hf_model import load_without_experts, make_tensor_parallel
from tiny_models import VOCABULARY, deepseek_v2

TIMEOUT_S = 60.0


def serve(world: World, checkpoint: Checkpoint) -> dict[str, Any]:
    experts = LoadedExperts(checkpoint, lambda n: world.ranks.expert_range(world.rank, n))
    server = FFNServer(world, experts)
    server.serve()
    status = server.status()
    return {"items": status.items, "empty": status.empty_items, "rows": status.rows}


def steps(vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocabulary, (2, length), generator=generator) for length in (11, 6)]


def attend(world: World, checkpoint: Checkpoint, options: dict[str, Any]) -> dict[str, Any]:
    """Largest relative difference to the eager model of one process, and what ran."""
    reference, model = deepseek_v2(), load_without_experts(checkpoint)
    if world.ranks.tp > 1:
        make_tensor_parallel(model, world.tp_mesh())
    worst = 0.0
    connector = TorchDistributedConnector(world)
    with torch.no_grad(), AFDBackend(AFDConfig(**options), connector=connector) as backend:
        compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
        for ids in steps(VOCABULARY):
            expected = reference(ids, use_cache=False).logits
            got = compiled(ids, use_cache=False).logits
            worst = max(worst, ((expected - got).abs().max() / expected.abs().max()).item())
        report = backend.report()
    sizes = {
        n: p.untyped_storage().nbytes() for n, p in model.named_parameters() if ".experts." in n
    }
    return {
        "worst": worst,
        "split": report.steps_split,
        "unsplit": dict(report.steps_unsplit),
        "expert_bytes": sum(sizes.values()),
    }


def main(path: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = World(WorldConfig(**settings, timeout_s=TIMEOUT_S))
    checkpoint = Checkpoint(path)
    world.describe(fingerprint(checkpoint), "float32")
    role: Callable[[], dict[str, Any]] = (
        (lambda: serve(world, checkpoint))
        if world.ranks.is_ffn(world.rank)
        else (lambda: attend(world, checkpoint, options))
    )
    found = {"name": world.name, **role()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if world.rank == 0:
        print("RESULT " + json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
