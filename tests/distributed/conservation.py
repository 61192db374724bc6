"""What was dispatched is what was computed: every row once for each of its experts.

Run in a process of its own with the seeds as JSON; prints one line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from distributed.worlds import run_world
from expert_programs import dense_layer, echo_program, swiglu_program

from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.ffn.server import FFNServer, ModelWeights
from afd_graph.runtime import Channel

EXPERTS, HIDDEN, TOP_K = 12, 16, 2
ECHO, REAL, BOTH = 0, 1, 2
STEPS = 12
ROUTINGS = ("uniform", "skewed", "one hot expert", "empty experts", "all to one rank")


def programs():
    return [
        echo_program(ECHO, experts=EXPERTS),
        swiglu_program(REAL, experts=EXPERTS),
        swiglu_program(BOTH, experts=EXPERTS, transposed=True, shared=True, seed=1),
    ]


def weights() -> ModelWeights:
    """Those of all layers; names are made unique by the layer."""
    named = {}
    for program in programs():
        for expression in program.expressions():
            named.update((f"{program.layer}.{name}", weight) for name, weight in expression.weights)
    return ModelWeights(named)


def announced():
    """The programs, their weights called as :func:`weights` calls them."""
    for program in programs():
        for expression in program.expressions():
            expression.weights = [
                (f"{program.layer}.{name}", weight) for name, weight in expression.weights
            ]
        yield program


def routing(kind: str, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Chosen experts ``[tokens, TOP_K]``, different for each token."""
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "skewed":
        scores *= torch.linspace(1, 0.1, EXPERTS) ** 3
    elif kind == "one hot expert":
        scores[:, 5] += 1
    elif kind == "empty experts":
        scores[:, 1::2] -= 1
    elif kind == "all to one rank":
        scores[:, EXPERTS - 4 :] += 1
    return scores.topk(TOP_K).indices


def attention(world: World, seed: int) -> list[list[int]]:
    """Dispatch and check; returns (rank, item, token, layer, expert) of every row sent."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank)
    # The ranks of a replica take the same layers and stages.
    choose = random.Random(100 * seed + world.ranks.replica(world.rank))
    connector = TorchDistributedConnector(world)
    channel = Channel(connector, credits=connector.credits, timeout_s=60)
    real = {program.layer: program for program in announced()}
    for program in real.values():
        connector.add_program(program)
        channel.num_experts[program.layer] = EXPERTS
        if program.shared is not None:
            channel.shared_layers.add(program.layer)
    tolerance = 5e-2 if world.config.dynamic_quant else 1e-5
    sent: list[list[int]] = []
    for step in range(STEPS):
        under_way = []
        for stage in range(channel.credits):
            layer = choose.choice([ECHO, REAL, BOTH])
            kind = choose.choice(ROUTINGS)
            tokens = random.Random(str((seed, world.rank, step, stage))).choice([0, 1, 2, 7, 40])
            ids = routing(kind, tokens, generator)
            hidden = torch.randn(tokens, HIDDEN, generator=generator)
            number = step * channel.credits + stage
            # Small whole numbers pass unchanged, also as int8: scale 1 where the largest is 127.
            marks = [world.rank, number % 100, number // 100, 127]
            hidden[:, :4] = torch.tensor(marks, dtype=torch.float32)
            hidden[:, 4:6] = torch.stack(
                [torch.arange(tokens) % 100, torch.arange(tokens) // 100], 1
            )
            if layer == ECHO:
                hidden[:, 6:] = 0
            sent += [
                [world.rank, number, token, layer, expert]
                for token in range(tokens)
                for expert in ids[token].tolist()
            ]
            under_way.append(
                (channel.dispatch(hidden, ids, layer, stage), hidden, ids, layer, stage)
            )
        for ticket, hidden, ids, layer, stage in under_way:
            share = torch.rand(ids.shape, generator=generator)
            share /= share.sum(1, keepdim=True)
            out = channel.receive(ticket, hidden, share, layer, stage)
            expected = (
                hidden.double() if layer == ECHO else dense_layer(real[layer], hidden, ids, share)
            )
            bound = tolerance * max(1.0, float(expected.abs().max()) if len(expected) else 1.0)
            assert float((out.double() - expected).abs().max() if len(out) else 0.0) < bound
    channel.close()
    return sent


def ffn(world: World) -> list[list[int]]:
    """Serve; returns (rank, item, token, layer, expert) of every row computed."""
    computed: list[list[int]] = []
    server = FFNServer(world, weights())
    first, _ = world.ranks.expert_range(world.rank, EXPERTS)

    def note(item, begin, end) -> None:
        rows = item.rows[:, :6].round().int().tolist()
        experts = [e for e, count in enumerate(item.counts) for _ in range(count)]
        assert len(rows) == len(experts)
        for row, expert in zip(rows, experts, strict=True):
            rank, low, high, mark, token_low, token_high = row
            assert mark == 127
            computed.append(
                [rank, low + 100 * high, token_low + 100 * token_high, item.layer, first + expert]
            )

    server.observers.append(note)
    server.serve()
    return computed


def rank(seed: int, settings: dict[str, Any]) -> list[list[int]]:
    world = World(WorldConfig(**settings))
    done = ffn(world) if world.ranks.is_ffn(world.rank) else attention(world, seed)
    dist.destroy_process_group()
    return done


def check(seed: int) -> dict[str, Any]:
    """One world of random shape."""
    choose = random.Random(seed)
    tp, replicas = choose.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    settings = {
        "ffn_ranks": choose.choice([1, 2, 3]),
        "tp_size": tp,
        "dynamic_quant": choose.random() < 0.4,
        "credits": choose.choice([1, 2, 3]),
    }
    ended = run_world(tp * replicas + settings["ffn_ranks"], rank, seed, settings)
    errors = [end.error for end in ended if end.error is not None]
    result = {"seed": seed, "settings": settings, "errors": errors}
    if not errors:
        sides: list[Counter] = [Counter(), Counter()]
        for number, end in enumerate(ended):
            sides[number >= tp * replicas].update(tuple(row) for row in end.result)
        result["rows"] = sides[0].total()
        result["lost or made up"] = [str(row) for row in (sides[0] - sides[1])]
        result["twice"] = [str(row) for row in (sides[1] - sides[0])]
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps([check(seed) for seed in json.loads(sys.argv[1])]))
