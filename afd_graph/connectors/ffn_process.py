"""The FFN process of the ``process`` connector: receives programs and items, answers in order.

It ends when the attention side closes the socket or dies.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from afd_graph.connectors import wire
from afd_graph.connectors.base import WorkItem
from afd_graph.connectors.moved_weights import program_from_segment
from afd_graph.connectors.shared_memory import Segment
from afd_graph.connectors.wire import Kind, Message
from afd_graph.errors import AFDError
from afd_graph.ffn.executor import FFNExecutor
from afd_graph.ffn.program import FFNProgram

_LOOK_FOR_PARENT_S = 5.0


def main(options: Mapping[str, Any]) -> None:
    """Serve the socket ``options["descriptor"]`` until the other side is gone.

    Args:
        options: ``descriptor``, ``parent`` (process id of the attention side), ``threads``,
            ``cpus`` (list or None) and ``imports`` (modules that register operators).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the attention side's to handle
    if options["cpus"] is not None:
        os.sched_setaffinity(0, options["cpus"])
    torch.set_num_threads(options["threads"])
    for module in options["imports"]:
        import_module(module)
    with socket.socket(fileno=options["descriptor"]) as connection:
        server = _Server(connection, options["parent"])
        try:
            server.serve()
        except (BrokenPipeError, ConnectionResetError):
            return  # the attention side is gone; nobody is left to tell


class _Server:
    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._executor = FFNExecutor()
        self._programs: dict[int, FFNProgram] = {}
        self._inputs: list[Segment] = []
        self._answers: list[Segment] = []

    def serve(self) -> None:
        self._connection.settimeout(_LOOK_FOR_PARENT_S)
        wire.send(self._connection, Message(Kind.READY))
        while True:
            try:
                message, descriptors = wire.receive_with_descriptors(self._connection)
            except TimeoutError:
                # A fork of the attention side may hold the socket open after its death.
                if os.getppid() != self._parent:
                    return
                continue
            if message is None:
                return
            if message.kind is Kind.SLOTS:
                segments = [Segment(descriptor) for descriptor in descriptors]
                half = len(segments) // 2
                self._inputs, self._answers = segments[:half], segments[half:]
                continue
            try:
                if message.kind is Kind.PROGRAM:
                    answer = self._add(message, Segment(descriptors[0]))
                else:
                    answer = self._run(message)
            except Exception as error:
                what = error.what if isinstance(error, AFDError) else f"{error!r}"
                answer = message._replace(kind=Kind.ERROR, text=what)
            wire.send(self._connection, answer)

    def _add(self, message: Message, segment: Segment) -> Message:
        program = program_from_segment(segment, message.rows)
        segment.close()  # the weights keep the mapping alive
        self._executor.add(program)
        self._programs[program.layer] = program
        return message._replace(kind=Kind.KNOWN)

    def _run(self, message: Message) -> Message:
        program = self._programs[message.layer]
        width, dtype = program.hidden_size, program.dtype
        has_shared = message.shared_rows != wire.NO_SHARED_ROWS
        layout = wire.item_layout(
            message.rows, message.shared_rows, width, dtype.itemsize, program.num_experts
        )
        source, target = self._inputs[message.slot], self._answers[message.slot]
        source.map(layout.size)
        target.map(layout.answer_size)
        item = WorkItem(
            message.layer,
            message.stage,
            source.tensor(0, (message.rows, width), dtype),
            source.tensor(layout.counts, (program.num_experts,), torch.int64).tolist(),
            source.tensor(layout.shared, (message.shared_rows, width), dtype)
            if has_shared
            else None,
        )
        begin = time.perf_counter_ns()
        self._executor.run(
            item,
            out=target.tensor(0, item.rows.shape, dtype),
            shared_out=None
            if item.shared_rows is None
            else target.tensor(layout.answer_shared, item.shared_rows.shape, dtype),
        )
        return message._replace(kind=Kind.ANSWER, begin_ns=begin, end_ns=time.perf_counter_ns())
