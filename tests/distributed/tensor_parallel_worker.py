"""Run under torchrun: a tensor-parallel model against the single-process unsplit one.

Takes the cases as JSON, prints one line of JSON from rank 0.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import DynamicCache

from afd_graph import AFDBackend, AFDConfig
from tiny_models import deepseek_v2

BATCHES = ((2, 11),)
CHUNKS = [5, 4, 1]  # tokens of two requests in three steps over one cache


def make_tensor_parallel(model: torch.nn.Module, ranks: int, shard_shared: bool) -> None:
    """Heads per rank, as a user would write it with PyTorch's own styles."""
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        attention = layer.self_attn
        plan = {"kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        plan["q_proj" if attention.q_lora_rank is None else "q_b_proj"] = ColwiseParallel()
        parallelize_module(attention, mesh, plan)
        attention.num_heads //= ranks
        if hasattr(attention, "num_key_value_heads"):
            attention.num_key_value_heads //= ranks
        shared = getattr(layer.mlp, "shared_experts", None)
        if shard_shared and shared is not None:
            dense = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()}
            parallelize_module(shared, mesh, {**dense, "down_proj": RowwiseParallel()})


def run_case(options: dict[str, object], shard_shared: bool) -> dict[str, object]:
    """Largest relative difference of every step, and what each rank's steps did."""
    torch._dynamo.reset()
    ranks = dist.get_world_size()
    reference, model = deepseek_v2(), deepseek_v2()
    make_tensor_parallel(model, ranks, shard_shared)
    differences: dict[str, float] = {}
    generator = torch.Generator().manual_seed(1)

    def compare(step: str, ids: torch.Tensor, caches: tuple = (None, None)) -> None:
        use = caches[0] is not None
        expected = reference(ids, past_key_values=caches[0], use_cache=use).logits
        got = compiled(ids, past_key_values=caches[1], use_cache=use).logits
        scale = expected.abs().max().item()
        differences[step] = (expected - got).abs().max().item() / scale

    with torch.no_grad(), AFDBackend(AFDConfig(**options)) as backend:
        rows: list[tuple[int, int]] = []
        backend.channel.observers.append(lambda event: rows.append((event.layer, event.rows)))
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for batch, length in BATCHES:
            ids = torch.randint(0, 128, (batch, length), generator=generator)
            compare(f"{batch}x{length}", ids)
        caches = (DynamicCache(config=reference.config), DynamicCache(config=model.config))
        ids = torch.randint(0, 128, (2, sum(CHUNKS)), generator=generator)
        for number, part in enumerate(ids.split(CHUNKS, dim=1)):
            compare(f"cached {number}", part, caches)
        report = backend.report()
    every: list[object] = [None] * ranks
    steps = (report.steps_split, dict(report.steps_unsplit), sum(n for _, n in rows))
    dist.all_gather_object(every, steps)
    return {"differences": differences, "steps": every}


def main(cases: dict[str, tuple[dict[str, object], bool]]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.specialize_float = True  # as in conftest.py
    dist.init_process_group("gloo")
    results = {name: run_case(*case) for name, case in cases.items()}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
