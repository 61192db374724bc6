"""Faults at random moments of random steps: no hang, no wrong result, an error that names the rank.

    python tests/distributed/faults.py --cases 60 --seed 0

Each case is a new world in which one rank, its *victim*, does something wrong at a random call of
its link or of its replica's collective. Afterwards every other rank must have ended with an error
of ours that names the victim; after a mere delay, all of them with right results. Where a step was
under way the error names layer and stage. Prints one line a case, and a summary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from distributed import worlds  # noqa: E402
from distributed.worlds import Ended, run_world  # noqa: E402
from expert_programs import dense_layer, swiglu_program  # noqa: E402

from afd_graph.connectors import torch_distributed_wire as wire  # noqa: E402
from afd_graph.connectors.torch_distributed import TorchDistributedConnector  # noqa: E402
from afd_graph.connectors.torch_distributed_world import World, WorldConfig  # noqa: E402
from afd_graph.ffn.server import FFNServer, ModelWeights  # noqa: E402
from afd_graph.runtime import Channel  # noqa: E402

TIMEOUT_S = 10.0  # a busy machine may hold a rank up for seconds, and that is no fault
SLACK_S = 15.0
LAYERS, STEPS = 3, 3
EXPERTS, TOP_K = 4, 2
KINDS = ("kill", "stop", "delay", "cut rows", "cut header", "garbage", "raise", "terminate", "exit")
SHAPES = ((1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 2, 1))  # tp, replicas, FFN ranks


def layer_of(number: int):
    program = swiglu_program(number, experts=EXPERTS, seed=number)
    program.routed.weights = [(f"{number}.{name}", w) for name, w in program.routed.weights]
    return program


class Fault:
    """Does ``kind`` at the ``moment``-th send or receive of the victim."""

    def __init__(self, kind: str, moment: int) -> None:
        self.kind, self.left = kind, moment
        self.happened = False

    def install(self, server: FFNServer | None = None) -> None:
        send, post = wire.Link.send, wire.Link.post_header

        def sending(link: wire.Link, tensor: torch.Tensor, tag: wire.Tag):
            if self._now(tensor, tag):
                tensor = self._damaged(tensor, tag)
            return send(link, tensor, tag)

        def posting(link: wire.Link, buffer: torch.Tensor, tag: wire.Tag):
            if self._now(None, tag):
                self._act()
            return post(link, buffer, tag)

        wire.Link.send, wire.Link.post_header = sending, posting  # type: ignore[method-assign]
        self.server = server

    def _now(self, tensor: torch.Tensor | None, tag: wire.Tag) -> bool:
        self.left -= 1
        if self.left > 0 or self.happened:
            return False
        wanted = {
            "cut rows": tag in (wire.Tag.REQUEST_ROWS, wire.Tag.ANSWER_ROWS),
            "cut header": tensor is not None and tag in (wire.Tag.REQUEST, wire.Tag.ANSWER),
            "garbage": tensor is not None and tag in (wire.Tag.REQUEST, wire.Tag.ANSWER),
        }.get(self.kind, True)
        self.happened = wanted
        return wanted

    def _damaged(self, tensor: torch.Tensor, tag: wire.Tag) -> torch.Tensor:
        if self.kind == "cut rows":
            return tensor.view(-1)[: tensor.numel() // 2].clone()
        if self.kind == "cut header":
            return tensor[: tensor.numel() - 9].clone()
        if self.kind == "garbage":
            return torch.randint(0, 256, tensor.shape, dtype=torch.uint8)
        self._act()
        return tensor

    def _act(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "delay":
            time.sleep(0.3 * TIMEOUT_S)
        elif self.kind == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == "exit":
            os._exit(3)
        elif self.kind == "raise":
            raise ZeroDivisionError("a defect on the victim")


def attention(world: World) -> str:
    connector = TorchDistributedConnector(world)
    channel = Channel(connector, credits=2, timeout_s=TIMEOUT_S)
    generator = torch.Generator().manual_seed(world.rank)
    try:
        programs = {number: layer_of(number) for number in range(LAYERS)}
        for number, program in programs.items():
            connector.add_program(program)
            channel.num_experts[number] = EXPERTS
        worlds.steps_begun = True
        for _ in range(STEPS):
            for number, program in programs.items():
                sent = []
                for stage in range(2):
                    hidden = torch.randn(5, 16, generator=generator)
                    share, ids = torch.rand(5, EXPERTS, generator=generator).topk(TOP_K)
                    ticket = channel.dispatch(hidden, ids, number, stage)
                    sent.append((ticket, hidden, ids, share))
                for stage, (ticket, hidden, ids, share) in enumerate(sent):
                    out = channel.receive(ticket, hidden, share, number, stage)
                    expected = dense_layer(program, hidden, ids, share)
                    # Not assert_close, whose first call imports for seconds on a busy machine.
                    assert (out.double() - expected).abs().max() < 1e-4, "a wrong result"
                    if world.tp_group is not None:
                        total = torch.ones(3)
                        dist.all_reduce(total, group=world.tp_group)
                        assert total[0] == world.ranks.tp
    except BaseException as error:
        failure = connector.failure_behind(error)
        channel.abandon()
        if failure is not None:
            raise failure from error
        raise
    finally:
        channel.close()
    return "done"


def rank(victim: int, kind: str, moment: int, settings: dict[str, Any]) -> str:
    me = int(os.environ["RANK"])
    fault = Fault(kind, moment)
    if me == victim:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        fault.install()
    world = World(WorldConfig(**settings, timeout_s=TIMEOUT_S, connect_timeout_s=60.0))
    if not world.ranks.is_ffn(world.rank):
        return attention(world)
    named: dict[str, torch.Tensor] = {}
    for number in range(LAYERS):
        named.update(layer_of(number).routed.weights)
    server = FFNServer(world, ModelWeights(named))
    if me == victim and kind == "terminate":
        signal.signal(signal.SIGTERM, lambda *_: server.stop("SIGTERM"))

    def note(item, begin, end) -> None:
        worlds.steps_begun = True

    server.observers.append(note)
    server.serve()
    return "done"


def check(seed: int) -> dict[str, Any]:
    """Run one case; ``problems`` is empty when it went as it must."""
    choose = random.Random(seed)
    tp, replicas, ffn = choose.choice(SHAPES)
    ranks = tp * replicas + ffn
    victim, kind = choose.randrange(ranks), choose.choice(KINDS)
    moment = choose.randrange(1, 60)
    agent = choose.random() < 0.7
    settings = {"ffn_ranks": ffn, "tp_size": tp}
    begin = time.monotonic()
    ended = run_world(
        *(ranks, rank, victim, kind, moment, settings),
        agent=agent,
        limit_s=TIMEOUT_S + SLACK_S + 10,
        expendable=victim,
    )
    case = {"seed": seed, "kind": kind, "victim": victim, "moment": moment, "agent": agent}
    return {
        **case,
        "shape": [tp, replicas, ffn],
        "seconds": round(time.monotonic() - begin, 1),
        "errors": [end.error and end.error.splitlines()[-1] for end in ended],
        "problems": _problems(ended, victim, kind, tp),
    }


def _problems(ended: list[Ended], victim: int, kind: str, tp: int) -> list[str]:
    problems = []
    others = [(number, end) for number, end in enumerate(ended) if number != victim]
    if all(end.result == "done" for _, end in others):
        return []  # the moment did not come before the end, or it was a delay
    if kind == "delay":
        return [f"rank {n}: {end.error or end.signal}" for n, end in others if end.result != "done"]
    for number, end in others:
        if end.result == "done" and number // tp != victim // tp:
            continue  # this replica had come to its end before
        if end.seconds is None:
            problems.append(f"rank {number} hung")
        elif end.error is None:
            problems.append(f"rank {number} ended by signal {end.signal}, result {end.result}")
        elif not end.expected:
            problems.append(f"rank {number} raised none of ours: {end.error.splitlines()[-1]}")
        elif f"rank {victim} (" not in end.error:
            problems.append(f"rank {number} does not name the victim: {end.error}")
        elif end.steps_begun and ("layer=" not in end.error or "stage=" not in end.error):
            problems.append(f"rank {number} does not name layer and stage: {end.error}")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = []
    for number in range(arguments.cases):
        found.append(check(arguments.seed + number))
        print(json.dumps(found[-1]), flush=True)
    print("RESULT " + json.dumps({"cases": len(found), "bad": [f for f in found if f["problems"]]}))
