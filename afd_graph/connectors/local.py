"""The experts on a thread of their own in this process; weights and rows by reference.

PyTorch releases the interpreter lock inside its kernels, so the two sides overlap.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from afd_graph.connectors.base import Connector, WorkItem
from afd_graph.connectors.refusals import no_credit
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.executor import FFNExecutor
from afd_graph.ffn.program import FFNProgram

_JOIN_S = 60.0  # longest that close() waits for the item that the thread is computing


_Answer = tuple[torch.Tensor, "torch.Tensor | None"]


@dataclass
class _Job:
    """An item, and where its answer or error is put; cancelled items are not computed."""

    item: WorkItem
    memory: torch.Tensor | None
    outcome: queue.SimpleQueue[_Answer | ConnectorError] = field(default_factory=queue.SimpleQueue)
    is_cancelled: bool = False
    times: tuple[int, int] | None = None


class LocalConnector(Connector):
    """Runs the experts on one thread of this process.

    Args:
        threads: intra-op threads that one expert product may use; ``None`` leaves PyTorch's
            number. The number holds for the FFN thread alone.
        cpus: CPU numbers that the FFN thread may run on; ``None`` leaves them (Linux).
    """

    credits = 2

    def __init__(self, threads: int | None = None, cpus: Collection[int] | None = None) -> None:
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ConfigError(f"threads={threads!r} is not a number of threads", remedy="use 1")
        self._threads = threads
        self._cpus = None if cpus is None else frozenset(cpus)
        self._executor = FFNExecutor()
        self._jobs: dict[int, _Job] = {}
        self._next_ticket = 0
        self._spare: list[torch.Tensor] = []
        self._prepared: torch.Tensor | None = None
        self._refusal: str | None = None
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def add_program(self, program: FFNProgram) -> None:
        """Take the experts of one layer by reference; see the base class."""
        self._check_open(program.layer, None)
        self._executor.add(program)

    def row_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[rows, width]`` memory that the thread reads in place.

        Memory of released items is used again: fresh pages cost as much as the copy into them.
        """
        size = rows * width * dtype.itemsize
        memory = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
        if memory.numel() < size:
            memory = torch.empty(size, dtype=torch.uint8)
        self._prepared = memory
        return memory[:size].view(dtype).view(rows, width)

    def send(self, item: WorkItem) -> int:
        """Queue ``item`` for the thread and return its ticket."""
        self._check_open(item.layer, item.stage)
        if len(self._jobs) >= self.credits:
            raise no_credit(self.credits, item)
        if self._thread is None:
            self._start()
        memory, self._prepared = self._prepared, None
        job = _Job(item, memory)
        ticket = self._next_ticket
        self._next_ticket += 1
        self._jobs[ticket] = job
        self._queue.put(job)
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the answer of ``ticket``; an error of the experts is raised here."""
        job = self._jobs.get(ticket)
        if job is None:
            self._check_open(None, None)
            raise ConnectorError(f"ticket {ticket} is not outstanding: {sorted(self._jobs)}")
        item = job.item
        try:
            outcome = job.outcome.get(timeout=timeout_s)
        except queue.Empty:
            self._refusal = f"has failed: the FFN thread did not answer within {timeout_s:g} s"
            raise ConnectorError(
                f"the FFN thread did not answer within {timeout_s:g} s",
                layer=item.layer,
                stage=item.stage,
                remedy="raise timeout_s if one expert layer may take longer",
            ) from None
        job.outcome.put(outcome)  # a second wait gets it too
        if isinstance(outcome, ConnectorError):
            raise outcome
        return outcome

    def ffn_times(self, ticket: int) -> tuple[int, int] | None:
        """When the thread began and ended ``ticket``."""
        return self._jobs[ticket].times

    def release(self, ticket: int) -> None:
        """Drop the answer of ``ticket`` and use its memory again."""
        job = self._jobs.pop(ticket, None)
        if job is not None and job.memory is not None and not job.outcome.empty():
            self._spare.append(job.memory)

    def abandon(self) -> None:
        """Forget every item; the thread finishes the one that it has begun."""
        self._cancel("the step was abandoned")

    def close(self) -> None:
        """Stop and join the thread; idempotent.

        Raises:
            ConnectorError: the thread is still busy after a minute.
        """
        self._refusal = "is closed"
        self._finalizer()
        self._cancel("the local connector was closed")
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():
                raise ConnectorError(f"the FFN thread is still busy {_JOIN_S:g} s after close")
        self._executor = FFNExecutor()
        self._spare.clear()

    def _cancel(self, reason: str) -> None:
        """Drop every item and release whoever waits for one."""
        for job in self._jobs.values():
            job.is_cancelled = True
            job.outcome.put(ConnectorError(reason, layer=job.item.layer, stage=job.item.stage))
        self._jobs.clear()

    def _check_open(self, layer: int | None, stage: int | None) -> None:
        if self._refusal is not None:
            raise ConnectorError(
                f"the local connector {self._refusal}",
                layer=layer,
                stage=stage,
                remedy="compile the model again with a new backend",
            )

    def _start(self) -> None:
        started: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        # The thread must not hold the connector, or a forgotten connector would never be freed.
        self._thread = threading.Thread(
            target=_serve,
            args=(self._queue, self._executor, self._threads, self._cpus, started),
            name="afd-ffn",
            daemon=True,
        )
        before = torch.get_num_threads()
        self._thread.start()
        problem = started.get()
        # set_num_threads acts on the calling thread and on threads that start later: put the
        # latter back to what this process had.
        torch.set_num_threads(before)
        if problem is not None:
            self._refusal = f"has failed: {problem}"
            raise ConnectorError(
                f"the FFN thread cannot run on CPUs {sorted(self._cpus or ())}: {problem}",
                remedy="name CPUs that this process may use in connector_options",
            ) from problem


def _serve(
    jobs: queue.SimpleQueue[_Job | None],
    executor: FFNExecutor,
    threads: int | None,
    cpus: frozenset[int] | None,
    started: queue.SimpleQueue[OSError | None],
) -> None:
    try:
        if threads is not None:
            # The first question makes this thread take over the process's number; asked later,
            # by the first kernel, it would undo ours.
            torch.get_num_threads()
            torch.set_num_threads(threads)
        if cpus is not None:
            os.sched_setaffinity(threading.get_native_id(), cpus)
    except OSError as error:
        started.put(error)
        return
    started.put(None)
    while (job := jobs.get()) is not None:
        if not job.is_cancelled:
            begin = time.perf_counter_ns()
            outcome: _Answer | ConnectorError
            try:
                outcome = executor.run(job.item)
            except ConnectorError as error:
                outcome = error
            job.times = begin, time.perf_counter_ns()
            job.outcome.put(outcome)
            del outcome
        del job  # an idle thread must not keep the last rows alive
