"""What one attention rank sends to this FFN rank: received on a thread of its own.

Every attention rank has its own thread, so a slow or large transfer of one replica holds up no
other. The thread keeps the receive of the next header posted, receives the rows of an item into
one of the sender's slots (one a credit, used in turn), and hands the item on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from afd_graph.connectors import row_quantisation as quantisation
from afd_graph.connectors.torch_distributed_watch import Watch, cause
from afd_graph.connectors.torch_distributed_wire import (
    GarbageError,
    Header,
    Kind,
    Link,
    Memory,
    Tag,
    header_buffer,
)
from afd_graph.connectors.torch_distributed_world import World


class Slot:
    """Memory for one item of one attention rank and for its answer."""

    def __init__(self, device: str) -> None:
        self.packed, self.rows, self.shared = Memory(device), Memory(device), Memory(device)
        self.answer = Memory(device)
        self.sending: list[tuple[torch.Tensor, dist.Work]] = []


@dataclass
class Part:
    """What one rank of a replica sent of an item.

    Attributes:
        inlet: where it came from, and where the answer goes.
        header: what it is.
        slot: memory of the item and of its answer.
        rows: ``[m, hidden]``, grouped by local expert.
        shared_rows: ``[n, hidden]``; None when the shared experts are not on this side.
        arrived_s: when, on the monotonic clock.
    """

    inlet: Inlet
    header: Header
    slot: Slot
    rows: torch.Tensor
    shared_rows: torch.Tensor | None
    arrived_s: float


class Inlet:
    """The link to one attention rank.

    Args:
        world: the world.
        rank: the attention rank.
        watch: told when that rank is gone or sends garbage.
        layout: width and dtype of a layer's rows.
        take_item: called with every item, by this thread.
        take_program: called with every description of a program, by this thread.
        take_leave: called when the rank has said goodbye.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        watch: Watch,
        *,
        layout: Callable[[int], tuple[int, torch.dtype]],
        take_item: Callable[[Part], None],
        take_program: Callable[[int, bytes], None],
        take_leave: Callable[[int], None],
    ) -> None:
        self.rank = rank
        self.last: tuple[int, int] | None = None
        self._name, self._here = world.ranks.name(rank), world.name
        self._config = world.config
        self._watch = watch
        self._layout = layout
        self._take_item = take_item
        self._take_program = take_program
        self._take_leave = take_leave
        self._link = Link(rank, world.requests, world.answers, world.config.latency_s)
        device = world.config.device
        self._header = header_buffer()
        self._slots = [Slot(device) for _ in range(world.config.credits)]
        self._thread = threading.Thread(target=self._run, name=f"afd-inlet-{rank}", daemon=True)
        self._thread.start()

    def answer(self, part: Part, header: Header, shared: torch.Tensor | None) -> None:
        """Start sending the answer of ``part``; its rows lie in the slot's answer memory."""
        slot, sending = part.slot, part.slot.sending
        sending.append(self._link.send_header(header, Tag.ANSWER))
        if part.rows.shape[0]:
            rows = slot.answer.like(part.rows)
            sending.append((rows, self._link.send(rows, Tag.ANSWER_ROWS)))
        if shared is not None and shared.shape[0]:
            sending.append((shared, self._link.send(shared, Tag.ANSWER_SHARED)))

    def _run(self) -> None:
        try:
            # Who announced what cannot run waits for an answer, and hears why there is none.
            while self._watch.failure is None and self._serve_message():
                pass
        except GarbageError as error:
            self._fail(f"{self._name} sent garbage: {error.what}")
        except RuntimeError as error:
            self._fail(f"{self._name} is gone: {cause(error)}")
        except Exception as error:
            self._fail(f"{self._here} failed: {error!r}")
            raise

    def _fail(self, what: str) -> None:
        layer, stage = self.last or (None, None)
        self._watch.fail(what, layer, stage)

    def _serve_message(self) -> bool:
        link = self._link
        header = link.read_header(link.post_header(self._header, Tag.REQUEST))
        if header.kind is Kind.PING:
            pong = Header(Kind.PONG, end_ns=time.perf_counter_ns())
            kept, work = link.send_header(pong, Tag.ANSWER)
            work.wait()
            del kept
        elif header.kind is Kind.PROGRAM:
            description = torch.empty(header.rows, dtype=torch.uint8)
            link.post(description, Tag.REQUEST_ROWS).wait()
            self._take_program(self.rank, description.numpy().tobytes())
        elif header.kind is Kind.BYE:
            self._take_leave(self.rank)
            return False
        elif header.kind is Kind.ITEM:
            self.last = header.layer, header.stage
            self._take_item(self._receive(header))
        else:
            raise GarbageError(f"a message of kind {header.kind.name} came from an attention rank")
        return True

    def _receive(self, header: Header) -> Part:
        """Receive the rows of an item."""
        slot = self._slots[header.sequence % len(self._slots)]
        # The sender has the answer that was in this slot, or it would not have used it again.
        for _, work in slot.sending:
            work.wait()
        slot.sending.clear()
        width, dtype = self._layout(header.layer)
        most = self._config.rows_per_dispatch
        if sum(header.counts) != header.rows or not min(header.counts, default=0) >= 0:
            raise GarbageError(f"counts sum to {sum(header.counts)} for {header.rows} rows")
        if max(header.counts, default=0) > most or header.shared_rows > most:
            raise GarbageError(
                f"more than {most} rows for one expert "
                f"(max_tokens={self._config.max_tokens} over tp_size={self._config.tp_size})"
            )
        link, posted = self._link, []
        rows = slot.rows.rows(header.rows, width, dtype)
        packed = None
        if header.rows:
            into = rows
            if self._config.dynamic_quant:
                size = quantisation.packed_size(header.rows, width)
                into = packed = slot.packed.bytes(size)
            posted.append(link.post(into, Tag.REQUEST_ROWS))
        shared = None
        if header.shared_rows >= 0:
            shared = slot.shared.rows(header.shared_rows, width, dtype)
            if header.shared_rows:
                posted.append(link.post(shared, Tag.REQUEST_SHARED))
        for receive in posted:
            receive.wait()
        if packed is not None:
            quantisation.unpack_rows(packed, rows)
        return Part(self, header, slot, rows, shared, time.monotonic())
