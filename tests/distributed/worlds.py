"""Worlds of forked processes: imports are paid once, a world starts in a fraction of a second.

Meant for a process of its own that has run no kernels and started no threads yet.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from afd_graph.errors import AFDError


@dataclass
class Ended:
    """How one rank ended.

    Attributes:
        result: what its function returned.
        error: message of the error that it raised; a traceback when it is none of ours.
        expected: whether the error is one of ours.
        signal: signal that killed it; None when it exited by itself.
        seconds: from the start of the world to its end; None when it had to be killed.
        steps_begun: whether it came to its first step.
    """

    result: Any = None
    error: str | None = None
    expected: bool = True
    signal: int | None = None
    seconds: float | None = None
    steps_begun: bool = False


steps_begun = False
"""Set by a rank's function when its first step begins."""


def run_world(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    agent: bool = True,
    limit_s: float = 120.0,
    expendable: int | None = None,
) -> list[Ended]:
    """Run ``function(*args)`` on every rank of a new world.

    Args:
        agent: the store lives outside of the ranks, as under torchrun; else in rank 0.
        limit_s: kill what is left after this time.
        expendable: a rank that is killed when the others have ended.
    """
    context = mp.get_context("fork")
    store: Any = None
    if agent:
        # Not in this process: a fork must not happen beside the threads of a store.
        told, tell = context.Pipe(duplex=False)
        store = context.Process(target=_hold_store, args=(tell,), daemon=True)
        store.start()
        port = told.recv()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    processes, results = [], []
    begin = time.monotonic()
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, ranks, port, agent, theirs, function, args)
        )
        process.start()
        theirs.close()
        processes.append(process)
        results.append(ours)
    ended = [Ended() for _ in range(ranks)]
    for rank in sorted(range(ranks), key=lambda rank: rank == expendable):
        pipe, left_s = results[rank], max(0.0, begin + limit_s - time.monotonic())
        try:
            if pipe.poll(min(left_s, 1.0) if rank == expendable else left_s):
                ended[rank] = pipe.recv()
        except EOFError:
            pass
    for rank, process in enumerate(processes):
        if rank == expendable:
            process.kill()
        process.join(max(0.1, begin + limit_s - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
            ended[rank].seconds = None
        elif process.exitcode < 0:
            ended[rank].signal = -process.exitcode
    if store is not None:
        store.kill()
        store.join()
    return ended


def _hold_store(tell: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tell.send(store.port)
    while True:
        time.sleep(3600)


def _rank(
    rank: int,
    ranks: int,
    port: int,
    agent: bool,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    begin = time.monotonic()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if agent:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ended = Ended()
    try:
        ended.result = function(*args)
    except AFDError as error:
        ended.error = str(error)
    except BaseException:
        ended.error, ended.expected = traceback.format_exc(), False
    ended.seconds, ended.steps_begun = time.monotonic() - begin, steps_begun
    pipe.send(ended)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # As a killed rank would: connections close, nothing is torn down in order.
    os._exit(0)
