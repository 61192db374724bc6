"""The experts in a process of their own on this machine; rows and weights in shared memory.

1. The first program starts the FFN process, which gets ready while the model is still compiled.
   Weights move to shared memory at once and are freed here (:mod:`moved_weights`).
2. A dispatch takes a slot, of which there is one a credit: the caller gathers its rows right into
   the slot, and a message of some 50 bytes tells the FFN process.
3. The answer comes back the same way; the tensors that :meth:`ProcessConnector.wait` returns are
   views of the slot.
4. :meth:`ProcessConnector.close` ends the process and gives the weights back to the model.

Whatever is wrong with the FFN process or its messages fails the connector for good: the process
is killed, the cause is named, and only ``close`` is possible. An error of the experts themselves
concerns its item alone.
"""

from __future__ import annotations

import sys
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from afd_graph.connectors import wire
from afd_graph.connectors.base import Connector, WorkItem
from afd_graph.connectors.child_process import ChildProcess
from afd_graph.connectors.moved_weights import MovedWeights
from afd_graph.connectors.shared_memory import Segment
from afd_graph.connectors.wire import ItemLayout, Kind, Message
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.program import FFNProgram

_DRAIN_S = 60.0  # longest wait for the answer to an abandoned item whose slot is needed


@dataclass(frozen=True)
class _Layer:
    key: str
    hidden_size: int
    dtype: torch.dtype
    num_experts: int
    weights: MovedWeights


@dataclass
class _Slot:
    """One credit: memory for an item and for its answer."""

    index: int
    item: Segment = field(default_factory=lambda: Segment.create("afd-item"))
    answer: Segment = field(default_factory=lambda: Segment.create("afd-answer"))


@dataclass
class _Flight:
    """An item under way: what was sent, and how it stands."""

    slot: _Slot
    sent: Message
    layout: ItemLayout
    answered: bool = False
    abandoned: bool = False
    error: str | None = None
    times: tuple[int, int] = (0, 0)


class ProcessConnector(Connector):
    """Runs the experts in their own process.

    Args:
        threads: intra-op threads of the FFN process.
        cpus: CPU numbers that the FFN process may run on; ``None`` leaves them.
        start_timeout_s: longest time, in seconds, that the process may take to start and to take
            in one program.
        imports: modules that the FFN process imports first, for operators that they register.
    """

    credits = 2

    def __init__(
        self,
        threads: int = 1,
        cpus: Collection[int] | None = None,
        start_timeout_s: float = 60.0,
        imports: Sequence[str] = (),
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"connector 'process' needs Linux, this is {sys.platform}",
                remedy="use connector='local'",
            )
        if not isinstance(threads, int) or threads < 1:
            raise ConfigError(f"threads={threads!r} is not a number of threads", remedy="use 1")
        self._options = {
            "threads": threads,
            "cpus": None if cpus is None else sorted(cpus),
            "imports": list(imports),
        }
        self._start_timeout_s = start_timeout_s
        self._child: ChildProcess | None = None
        self._is_ready = False
        self._layers: dict[int, _Layer] = {}
        self._known: set[int] = set()
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._prepared: tuple[_Slot, torch.Tensor] | None = None
        self._flights: dict[int, _Flight] = {}
        self._unanswered: deque[_Flight] = deque()
        self._next_ticket = 0
        self._refusal: str | None = None
        self._finalizers: list[weakref.finalize] = []

    def add_program(self, program: FFNProgram) -> None:
        """Move the weights to shared memory and start the FFN process if there is none yet."""
        self._check_open(program.layer, None)
        known = self._layers.get(program.layer)
        if known is not None:
            if known.key and known.key == program.key:
                return
            raise ConnectorError(
                f"the layer already has other experts (key {known.key!r}, now {program.key!r})",
                layer=program.layer,
                remedy="use one backend per model",
            )
        weights = MovedWeights(program)
        # A forgotten connector gives the weights back as well, but not at interpreter exit.
        finalizer = weakref.finalize(self, weights.restore)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        self._layers[program.layer] = _Layer(
            program.key, program.hidden_size, program.dtype, program.num_experts, weights
        )
        if self._child is None:
            self._start()

    def row_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[rows, width]`` shared memory of the next free slot."""
        self._check_open(None, None)
        slot = self._prepared[0] if self._prepared is not None else self._take_slot()
        slot.item.grow(rows * width * dtype.itemsize)
        buffer = slot.item.tensor(0, (rows, width), dtype)
        self._prepared = (slot, buffer)
        return buffer

    def send(self, item: WorkItem) -> int:
        """Hand ``item`` to the FFN process and return its ticket.

        Rows that are not in the buffer of :meth:`row_buffer` are copied to it; so are shared rows.
        """
        self._check_open(item.layer, item.stage)
        layer = self._checked(item)
        if item.layer not in self._known:
            self._introduce(item.layer)
        count = item.rows.shape[0]
        if self._prepared is None or self._prepared[1] is not item.rows:
            self.row_buffer(count, item.rows.shape[1], item.rows.dtype).copy_(item.rows)
        assert self._prepared is not None
        slot, _ = self._prepared
        shared = item.shared_rows
        shared_count = wire.NO_SHARED_ROWS if shared is None else shared.shape[0]
        layout = wire.item_layout(
            count, shared_count, layer.hidden_size, layer.dtype.itemsize, layer.num_experts
        )
        slot.item.grow(layout.size)
        slot.answer.grow(layout.answer_size)
        slot.item.write(layout.counts, array("q", item.counts).tobytes())
        if shared is not None:
            slot.item.tensor(layout.shared, shared.shape, layer.dtype).copy_(shared)
        ticket = self._next_ticket
        message = Message(
            Kind.ITEM, item.layer, item.stage, slot.index, ticket, count, shared_count
        )
        try:
            self._running.send(message)
        except ConnectorError as error:
            self._fail(error, item.layer, item.stage)
        self._next_ticket += 1
        self._prepared = None
        flight = self._flights[ticket] = _Flight(slot, message, layout)
        self._unanswered.append(flight)
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the answer of ``ticket`` as views of its slot, valid until :meth:`release`."""
        flight = self._flights.get(ticket)
        if flight is None:
            self._check_open(None, None)
            raise ConnectorError(f"ticket {ticket} is not outstanding: {sorted(self._flights)}")
        sent, layout = flight.sent, flight.layout
        if not flight.answered:
            self._check_open(sent.layer, sent.stage)
            self._read(lambda: flight.answered, timeout_s, sent.layer, sent.stage)
        if flight.error is not None:
            raise ConnectorError(flight.error, layer=sent.layer, stage=sent.stage)
        layer, answer = self._layers[sent.layer], flight.slot.answer
        rows = answer.tensor(0, (sent.rows, layer.hidden_size), layer.dtype)
        if sent.shared_rows == wire.NO_SHARED_ROWS:
            return rows, None
        shape = (sent.shared_rows, layer.hidden_size)
        return rows, answer.tensor(layout.answer_shared, shape, layer.dtype)

    def ffn_times(self, ticket: int) -> tuple[int, int]:
        """When the FFN process computed ``ticket``; both processes read one clock."""
        return self._flights[ticket].times

    def release(self, ticket: int) -> None:
        """Give the slot of ``ticket`` back, at once or when its answer has come."""
        flight = self._flights.pop(ticket, None)
        if flight is not None:
            flight.abandoned = True
            if flight.answered:
                self._free.append(flight.slot)

    def abandon(self) -> None:
        """Forget every item; the FFN process still answers what it has, and nobody looks."""
        for ticket in list(self._flights):
            self.release(ticket)

    def close(self) -> None:
        """End the FFN process and give the weights back to the model; idempotent."""
        self._refusal = "is closed"
        child, self._child = self._child, None
        if child is not None:
            child.stop()
        for finalizer in self._finalizers:
            finalizer()
        self._finalizers.clear()
        for slot in self._slots:
            slot.item.close()
            slot.answer.close()
        self._prepared = None
        for left in (self._flights, self._unanswered, self._free, self._slots, self._layers):
            left.clear()

    @property
    def pid(self) -> int | None:
        """Process id of the FFN process while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def _running(self) -> ChildProcess:
        assert self._child is not None
        return self._child

    def _check_open(self, layer: int | None, stage: int | None) -> None:
        if self._refusal is not None:
            raise ConnectorError(
                f"the process connector {self._refusal}",
                layer=layer,
                stage=stage,
                remedy="compile the model again with a new backend",
            )

    def _checked(self, item: WorkItem) -> _Layer:
        layer = self._layers.get(item.layer)
        if layer is None:
            problem = f"no experts for this layer; layers here: {sorted(self._layers)}"
        elif item.rows.dim() != 2 or item.rows.shape[1] != layer.hidden_size:
            problem = f"rows {tuple(item.rows.shape)} are not [m, {layer.hidden_size}]"
        elif item.rows.dtype != layer.dtype:
            problem = f"rows are {item.rows.dtype}, the experts {layer.dtype}"
        elif len(item.counts) != layer.num_experts:
            problem = f"{len(item.counts)} counts for {layer.num_experts} experts"
        else:
            return layer
        raise ConnectorError(
            f"wrong work item: {problem}",
            layer=item.layer,
            stage=item.stage,
            remedy="check that both sides run the same model and version",
        )

    def _start(self) -> None:
        self._child = child = self._spawn()
        self._finalizers.append(weakref.finalize(self, child.stop))
        self._slots = [_Slot(index) for index in range(self.credits)]
        self._free = list(self._slots)
        segments = [slot.item for slot in self._slots] + [slot.answer for slot in self._slots]
        try:
            child.send(Message(Kind.SLOTS), [segment.descriptor for segment in segments])
        except ConnectorError as error:
            self._fail(error, None, None)

    def _spawn(self) -> ChildProcess:
        return ChildProcess(self._options)

    def _introduce(self, index: int) -> None:
        """Send the program of layer ``index`` and wait until the FFN process has it."""
        weights = self._layers[index].weights
        self._read(lambda: self._is_ready, self._start_timeout_s, index, None)
        message = Message(Kind.PROGRAM, index, ticket=-1, rows=weights.description_size)
        try:
            self._running.send(message, [weights.segment.descriptor])
        except ConnectorError as error:
            self._fail(error, index, None)
        self._read(lambda: index in self._known, self._start_timeout_s, index, None)

    def _take_slot(self) -> _Slot:
        if not self._free and any(flight.abandoned for flight in self._unanswered):
            self._read(lambda: bool(self._free), _DRAIN_S, None, None)
        if not self._free:
            raise ConnectorError(
                f"send without a credit: {self.credits} items are un-received",
                remedy="receive and release an answer first",
            )
        return self._free.pop()

    def _read(
        self, done: Callable[[], bool], timeout_s: float, layer: int | None, stage: int | None
    ) -> None:
        """Take messages in until ``done``; any failure is the connector's."""
        begin = time.monotonic()
        while not done():
            try:
                self._take(self._running.receive(timeout_s, begin))
            except ConnectorError as error:
                self._fail(error, layer, stage)

    def _take(self, message: Message) -> None:
        kind, oldest = message.kind, self._unanswered[0] if self._unanswered else None
        if kind is Kind.READY and not self._is_ready:
            self._is_ready = True
        elif kind is Kind.KNOWN and message.layer in self._layers:
            self._known.add(message.layer)
        elif kind is Kind.ERROR and message.ticket == -1:
            raise ConnectorError(f"the FFN process refused a program: {message.text}")
        elif (
            kind in (Kind.ANSWER, Kind.ERROR)
            and oldest is not None
            and message._replace(kind=Kind.ITEM, begin_ns=0, end_ns=0, text="") == oldest.sent
        ):
            self._unanswered.popleft()
            oldest.answered = True
            oldest.times = message.begin_ns, message.end_ns
            oldest.error = message.text if kind is Kind.ERROR else None
            if oldest.abandoned:
                self._free.append(oldest.slot)
        else:
            expected = "none" if oldest is None else str(oldest.sent)
            raise ConnectorError(
                f"the FFN process answered garbage: {message}, expected an answer to {expected}",
                remedy="check that both sides run the same version",
            )

    def _fail(self, error: ConnectorError, layer: int | None, stage: int | None) -> NoReturn:
        """Kill the FFN process and refuse from here on; unless ``close`` was the cause."""
        if self._refusal is None:
            self._refusal = f"has failed: {error.what}"
            self._running.kill()
        else:
            self._check_open(layer, stage)
        raise ConnectorError(error.what, layer=layer, stage=stage, remedy=error.remedy) from error
