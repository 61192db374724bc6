"""Ranks that meet at an address, without a process group in common; here, threads of a process."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_programs import swiglu_program

from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.connectors.torch_distributed_wire import Header, Kind
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.errors import AFDError, ConfigError, ConnectorError
from afd_graph.ffn.assembly import Replicas
from afd_graph.ffn.program import FFNProgram
from afd_graph.ffn.server import FFNServer, ModelWeights
from ports import free_port

WORLD: dict[str, Any] = {
    "attention_ranks": 2,
    "tp_size": 2,
    "ffn_ranks": 1,
    "connect_timeout_s": 60.0,
}
WEIGHTS = dict(swiglu_program().routed.weights)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def settings(address: str, place: int, **others: Any) -> WorldConfig:
    """Of a world of two attention ranks, one replica, and an FFN rank."""
    most = 0 if place == 2 else 64
    given = {**WORLD, "address": address, "rank": place, "max_tokens": most}
    return WorldConfig(**{**given, **others})


def run(
    configs: list[WorldConfig],
    pauses: tuple[float, ...] = (0, 0, 0),
    programs: tuple[FFNProgram | None, ...] = (None, None, None),
) -> list[Any]:
    """What each rank ended with: the most tokens that it knows, or its error.

    Args:
        configs: of the ranks.
        pauses: seconds that each comes later.
        programs: what each announces when all have met.
    """
    results: list[Any] = [None] * len(configs)

    def rank(place: int) -> None:
        time.sleep(pauses[place])
        try:
            world = World(configs[place])
            if world.ranks.is_ffn(world.rank):
                FFNServer(world, ModelWeights(WEIGHTS)).serve()
            else:
                connector = TorchDistributedConnector(world)
                connector.open("token")
                try:
                    if programs[place] is not None:
                        connector.add_program(programs[place])
                finally:
                    connector.close()
            results[place] = world.config.max_tokens
        except AFDError as error:
            results[place] = error

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.parametrize("pauses", [(0, 0, 1), (1, 0, 0)])
def test_in_any_order(address: str, pauses: tuple[float, ...]) -> None:
    # The FFN rank takes the most tokens from the attention ranks.
    assert run([settings(address, rank) for rank in range(3)], pauses) == [64, 64, 64]


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"dtype": "bfloat16"}, "ranks disagree on dtype: '' on rank 0 .* 'bfloat16' on rank 2"),
        ({"model": "other"}, "ranks disagree on model: '' on rank 0 .* 'other' on rank 2"),
        ({"max_tokens": 32}, "ranks disagree on max_tokens: 64 on rank 0 .* 32 on rank 2"),
        # It takes itself for rank 1, of which there is another one.
        ({"attention_ranks": 1, "tp_size": 1, "rank": 1}, "disagree on attention_ranks: 2 .* tp_s"),
    ],
)
def test_ranks_that_differ(address: str, differs: dict[str, Any], message: str) -> None:
    configs = [settings(address, 0), settings(address, 1), settings(address, 2, **differs)]
    for error in run(configs):
        with pytest.raises(AFDError, match=message):
            raise error


def test_experts_that_cannot_be_run(address: str) -> None:
    programs = (swiglu_program(inner=20), None, None)
    results = run([settings(address, rank) for rank in range(3)], programs=programs)
    # The other attention rank may have left before.
    for error in (results[0], results[2]):
        assert "rank 2 (ffn 0) cannot run the experts: weight 'experts.up' is" in str(error)


def test_attention_ranks_with_different_experts(address: str) -> None:
    programs = (swiglu_program(), replace(swiglu_program(), key="another"), None)
    results = run([settings(address, rank) for rank in range(3)], programs=programs)
    message = r"rank [01] \(attention [01]\) announced other experts .* than a rank before"
    told = [bool(re.search(message, str(result))) for result in results]
    # The rank that was first may have left before.
    assert told[2]
    assert sum(told) >= 2


def test_a_rank_that_was_started_twice(address: str) -> None:
    ranks = [settings(address, rank, connect_timeout_s=8.0) for rank in (0, 1, 1)]
    results = run(ranks, (0, 0, 2))
    assert "rank 1 is there already" in str(results[2])
    # The others go on waiting for the FFN rank.
    assert "did not come to the handshake within" in str(results[0])


def test_nobody_listens(address: str) -> None:
    (error,) = run([settings(address, 1, connect_timeout_s=0.5)])
    assert "nobody listens at" in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "here"}, "is not HOST:PORT"),
        ({"address": "here:http"}, "is not HOST:PORT"),
        ({"rank": None}, "which one this is"),
        ({"rank": 3}, "not in a world of 3 ranks"),
        ({"device": "npu"}, "needs device='cpu'"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorldConfig(**{"address": "127.0.0.1:1", "rank": 0, **WORLD, **options})


def test_an_attention_rank_knows_the_most_tokens(address: str) -> None:
    config = settings(address, 0, attention_ranks=1, tp_size=1, max_tokens=0)
    other = settings(address, 1, attention_ranks=1, tp_size=1, max_tokens=0)
    for error in run([config, other]):
        assert "rank 0 (attention 0) was given max_tokens=0" in str(error)


def test_ranks_that_cut_a_step_differently() -> None:
    def part(rank: int, tokens: int) -> Any:
        header = Header(Kind.ITEM, layer=3, stage=1, parent_rows=tokens)
        rows = torch.empty(0, 4)
        return SimpleNamespace(header=header, inlet=SimpleNamespace(rank=rank), rows=rows)

    replicas = Replicas(2)
    assert replicas.add(0, 0, part(0, 7)) is None
    assert len(replicas.add(0, 1, part(1, 7)) or ()) == 2
    replicas.add(0, 0, part(0, 7))
    with pytest.raises(ConnectorError, match=r"rank 0 .* of 7 tokens, rank 1 .* of 8 tokens"):
        replicas.add(0, 1, part(1, 8))
