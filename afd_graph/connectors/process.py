"""The experts in a process of their own on this machine; rows and weights in shared memory.

1. The first program starts the FFN process, which gets ready while the model is still compiled.
   Weights move to shared memory at once and are freed here (:mod:`moved_weights`).
2. A dispatch takes a slot, of which there is one a credit: the caller gathers its rows right into
   the slot, and a message of some 50 bytes tells the FFN process.
3. The answer comes back the same way; the tensors that :meth:`ProcessConnector.wait` returns are
   views of the slot.
4. :meth:`ProcessConnector.close` ends the process and gives the weights back to the model.
"""

from __future__ import annotations

import os
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from afd_graph.connectors import wire
from afd_graph.connectors.base import Connector, WorkItem
from afd_graph.connectors.child_process import ChildProcess
from afd_graph.connectors.ffn_peer import FFNPeer
from afd_graph.connectors.moved_weights import MovedWeights
from afd_graph.connectors.refusals import is_known, misfit, no_credit, wrong_item
from afd_graph.connectors.shared_memory import Segment
from afd_graph.connectors.wire import ItemLayout, Kind, Message
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.program import FFNProgram
from afd_graph.validation import check_seconds

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


class _Flights:
    """Items under way and the slots that they hold."""

    def __init__(self) -> None:
        self.free: list[_Slot] = []
        self.by_ticket: dict[int, _Flight] = {}
        self.unanswered: deque[_Flight] = deque()

    def answer(self, message: Message) -> bool:
        """Note an answer; False when it does not belong to the oldest unanswered item."""
        oldest = self.unanswered[0] if self.unanswered else None
        asked = message._replace(kind=Kind.ITEM, begin_ns=0, end_ns=0, text="")
        if oldest is None or asked != oldest.sent:
            return False
        self.unanswered.popleft()
        oldest.answered = True
        oldest.times = message.begin_ns, message.end_ns
        oldest.error = message.text if message.kind is Kind.ERROR else None
        if oldest.abandoned:
            self.free.append(oldest.slot)
        return True


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_cpus(cpus: object) -> None:
    """Refuse what no FFN process can be bound to.

    Raises:
        ConfigError: naming them, or saying that ``cpus`` is no list of numbers.
    """
    if cpus is None:
        return
    if not isinstance(cpus, Collection) or not cpus or not all(_is_number(cpu) for cpu in cpus):
        raise ConfigError(
            f"cpus={cpus!r} is not a list of CPU numbers", remedy="give a list such as [2, 3]"
        )
    last = os.sysconf("SC_NPROCESSORS_CONF") - 1  # those that are offline have numbers as well
    absent = sorted(cpu for cpu in cpus if not 0 <= cpu <= last)
    if absent:
        raise ConfigError(
            f"cpus={sorted(cpus)} names {absent}, and this machine has 0 to {last}",
            remedy="name CPUs of this machine",
        )


class ProcessConnector(Connector):
    """Runs the experts in their own process.

    Args:
        threads: intra-op threads of the FFN process.
        cpus: CPU numbers that the FFN process may run on; ``None`` leaves them.
        start_timeout_s: processor time, in seconds, that the process may take to start, and to take
            in one program; and the longest time in which it may take none. A machine so busy that
            it starts slowly is no error.
        imports: modules that the FFN process imports first, for operators that they register.
    """

    credits = 2
    frees_weights = True

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
        if not _is_number(threads) or threads < 1:
            raise ConfigError(f"threads={threads!r} is not a number of threads", remedy="use 1")
        _check_cpus(cpus)
        check_seconds(
            "start_timeout_s",
            start_timeout_s,
            "leave it out, or set the processor time that a start may take",
        )
        if isinstance(imports, str) or not all(isinstance(name, str) for name in imports):
            raise ConfigError(
                f"imports={imports!r} is not a list of modules", remedy="give a list of names"
            )
        self._options = {
            "threads": threads,
            "cpus": None if cpus is None else sorted(cpus),
            "imports": list(imports),
        }
        self._flights = _Flights()
        self._peer = FFNPeer(start_timeout_s, self._flights.answer)
        self._layers: dict[int, _Layer] = {}
        self._slots: list[_Slot] = []
        self._prepared: tuple[_Slot, torch.Tensor] | None = None
        self._next_ticket = 0
        self._finalizers: list[weakref.finalize] = []

    def add_program(self, program: FFNProgram) -> None:
        """Move the weights to shared memory and start the FFN process if there is none yet."""
        self._peer.check_open(program.layer, None)
        if is_known(program, self._layers.get(program.layer)):
            return
        weights = MovedWeights(program)
        # A forgotten connector gives the weights back as well, but not at interpreter exit.
        finalizer = weakref.finalize(self, weights.restore)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        self._layers[program.layer] = _Layer(
            program.key, program.hidden_size, program.dtype, program.num_experts, weights
        )
        if not self._peer.is_started:
            self._start()

    def row_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[rows, width]`` shared memory of the next free slot."""
        self._peer.check_open(None, None)
        slot = self._prepared[0] if self._prepared is not None else self._take_slot()
        slot.item.grow(rows * width * dtype.itemsize)
        buffer = slot.item.tensor(0, (rows, width), dtype)
        self._prepared = (slot, buffer)
        return buffer

    def send(self, item: WorkItem) -> int:
        """Hand ``item`` to the FFN process and return its ticket.

        Rows that are not in the buffer of :meth:`row_buffer` are copied to it; so are shared rows.
        """
        self._peer.check_open(item.layer, item.stage)
        layer = self._checked(item)
        self._peer.introduce(item.layer, layer.weights)
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
        self._peer.send_item(message)
        self._next_ticket += 1
        self._prepared = None
        flight = self._flights.by_ticket[ticket] = _Flight(slot, message, layout)
        self._flights.unanswered.append(flight)
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the answer of ``ticket`` as views of its slot, valid until :meth:`release`."""
        flight = self._flights.by_ticket.get(ticket)
        if flight is None:
            self._peer.check_open(None, None)
            raise ConnectorError(
                f"ticket {ticket} is not outstanding: {sorted(self._flights.by_ticket)}"
            )
        sent, layout = flight.sent, flight.layout
        if not flight.answered:
            self._peer.check_open(sent.layer, sent.stage)
            self._peer.read_until(lambda: flight.answered, timeout_s, sent.layer, sent.stage)
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
        return self._flights.by_ticket[ticket].times

    def release(self, ticket: int) -> None:
        """Give the slot of ``ticket`` back, at once or when its answer has come."""
        flight = self._flights.by_ticket.pop(ticket, None)
        if flight is not None:
            flight.abandoned = True
            if flight.answered:
                self._flights.free.append(flight.slot)

    def abandon(self) -> None:
        """Forget every item; the FFN process still answers what it has, and nobody looks."""
        for ticket in list(self._flights.by_ticket):
            self.release(ticket)

    def close(self) -> None:
        """End the FFN process and give the weights back to the model; idempotent."""
        self._peer.close()
        for finalizer in self._finalizers:
            finalizer()
        self._finalizers.clear()
        for slot in self._slots:
            slot.item.close()
            slot.answer.close()
        self._prepared = None
        flights = self._flights
        for left in (flights.by_ticket, flights.unanswered, flights.free, self._slots):
            left.clear()
        self._layers.clear()

    @property
    def pid(self) -> int | None:
        """Process id of the FFN process while there is one."""
        return self._peer.pid

    def _checked(self, item: WorkItem) -> _Layer:
        problem = misfit(item, self._layers)
        if problem is not None:
            raise wrong_item(item, problem)
        return self._layers[item.layer]

    def _start(self) -> None:
        child = self._spawn()
        self._finalizers.append(weakref.finalize(self, child.stop))
        self._slots = [_Slot(index) for index in range(self.credits)]
        self._flights.free.extend(self._slots)
        segments = [slot.item for slot in self._slots] + [slot.answer for slot in self._slots]
        self._peer.start(child, [segment.descriptor for segment in segments])

    def _spawn(self) -> ChildProcess:
        return ChildProcess(self._options)

    def _take_slot(self) -> _Slot:
        free = self._flights.free
        if not free and any(flight.abandoned for flight in self._flights.unanswered):
            self._peer.read_until(lambda: bool(free), _DRAIN_S, None, None)
        if not free:
            raise no_credit(self.credits)
        return free.pop()
