"""The attention side of the talk with the FFN process: programs, messages, and what a failure does.

Whatever is wrong with the process or its messages fails the peer for good: the process is killed,
the cause is named, and only :meth:`FFNPeer.close` is possible. An error of the experts themselves
concerns its item alone and is none of the peer's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from afd_graph.connectors.child_process import ChildProcess
from afd_graph.connectors.moved_weights import MovedWeights
from afd_graph.connectors.wire import Kind, Message
from afd_graph.errors import ConnectorError

_OF_A_PROGRAM = -1  # ticket of messages that concern no item


class FFNPeer:
    """One FFN process, from its start to its end.

    Args:
        start_timeout_s: processor time, in seconds, that the process may take to start, and to take
            in one program; and the longest time in which it may take none.
        take_answer: called with every message that answers an item; returns whether that was the
            one expected. Must not hold on to the connector, nor raise.
    """

    def __init__(self, start_timeout_s: float, take_answer: Callable[[Message], bool]) -> None:
        self._start_timeout_s = start_timeout_s
        self._take_answer = take_answer
        self._child: ChildProcess | None = None
        self._is_ready = False
        self._known: set[int] = set()
        self._refusal: str | None = None

    @property
    def pid(self) -> int | None:
        """Process id while there is a process."""
        return None if self._child is None else self._child.pid

    @property
    def is_started(self) -> bool:
        """Whether there is a process."""
        return self._child is not None

    def start(self, child: ChildProcess, descriptors: Sequence[int]) -> None:
        """Take ``child`` and hand it the slots; it need not be ready yet."""
        self._child = child
        self._send(Message(Kind.SLOTS), descriptors, None, None)

    def introduce(self, layer: int, weights: MovedWeights) -> None:
        """Send the program of ``layer`` unless the process has it; wait until it does."""
        if layer in self._known:
            return
        self.read_until(lambda: self._is_ready, None, layer, None)
        message = Message(Kind.PROGRAM, layer, ticket=_OF_A_PROGRAM, rows=weights.description_size)
        self._send(message, [weights.segment.descriptor], layer, None)
        self.read_until(lambda: layer in self._known, None, layer, None)

    def send_item(self, message: Message) -> None:
        """Send an item; raises ConnectorError when the process is dead or deaf."""
        self._send(message, (), message.layer, message.stage)

    def read_until(
        self,
        done: Callable[[], bool],
        timeout_s: float | None,
        layer: int | None,
        stage: int | None,
    ) -> None:
        """Take messages in until ``done``; without ``timeout_s`` those of the start.

        Raises:
            ConnectorError: with ``layer`` and ``stage``; the process died, was silent for
                ``timeout_s``, refused a program, or answered garbage.
        """
        begin = time.monotonic()
        while not done():
            self.check_open(layer, stage)
            assert self._child is not None
            try:
                if timeout_s is None:
                    message = self._child.receive_at_start(self._start_timeout_s)
                else:
                    message = self._child.receive(timeout_s, begin)
                self._take(message)
            except ConnectorError as error:
                self._fail(error, layer, stage)

    def check_open(self, layer: int | None, stage: int | None) -> None:
        """Refuse when the peer is closed or has failed."""
        if self._refusal is not None:
            raise ConnectorError(
                f"the process connector {self._refusal}",
                layer=layer,
                stage=stage,
                remedy="compile the model again with a new backend",
            )

    def close(self) -> None:
        """End and reap the process; idempotent."""
        self._refusal = "is closed"
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _send(
        self, message: Message, descriptors: Sequence[int], layer: int | None, stage: int | None
    ) -> None:
        assert self._child is not None
        try:
            self._child.send(message, descriptors)
        except ConnectorError as error:
            self._fail(error, layer, stage)

    def _take(self, message: Message) -> None:
        kind, concerns_program = message.kind, message.ticket == _OF_A_PROGRAM
        if kind is Kind.READY and not self._is_ready:
            self._is_ready = True
        elif kind is Kind.KNOWN and concerns_program:
            self._known.add(message.layer)
        elif kind is Kind.ERROR and concerns_program:
            raise ConnectorError(f"the FFN process refused a program: {message.text}")
        elif kind not in (Kind.ANSWER, Kind.ERROR) or not self._take_answer(message):
            raise ConnectorError(
                f"the FFN process answered garbage: {message} answers nothing that was sent",
                remedy="check that both sides run the same version",
            )

    def _fail(self, error: ConnectorError, layer: int | None, stage: int | None) -> NoReturn:
        """Kill the process and refuse from here on; unless ``close`` was the cause."""
        self.check_open(layer, stage)
        self._refusal = f"has failed: {error.what}"
        if self._child is not None:
            self._child.kill()
        raise ConnectorError(error.what, layer=layer, stage=stage, remedy=error.remedy) from error
