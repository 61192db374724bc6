"""One FFN rank of a torch.distributed world, seen from an attention rank.

Everything goes to an FFN rank and comes from it in the order of sending, so what it owes is
a queue: a thread takes the next from it, reads its header and waits for its rows, which arrive
where they belong. Clocks are compared by pings, which travel in the same queue.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from afd_graph.connectors.base import WorkItem
from afd_graph.connectors.torch_distributed_watch import LOOK_S, Watch, cause
from afd_graph.connectors.torch_distributed_wire import (
    Header,
    Kind,
    Link,
    Posted,
    Tag,
    header_buffer,
)
from afd_graph.connectors.torch_distributed_world import World
from afd_graph.errors import ConnectorError

_PINGS = 8
_BYE_S = 5.0  # longest that the end waits for a message to be taken


@dataclass
class Flight:
    """An item under way.

    Attributes:
        sequence: number of the item.
        item: as it was given.
        rows: where its answer belongs.
        shared_rows: where the answer of the shared experts belongs, if they are on the FFN side.
        missing: FFN ranks whose part of the answer has not come.
        sending: what was sent, and must stay until it is gone.
        error: what the experts said, if they failed.
        begin_ns: earliest begin of the experts' work, on this rank's clock.
        end_ns: latest end.
        abandoned: nobody waits for it any more.
    """

    sequence: int
    item: WorkItem
    rows: torch.Tensor
    shared_rows: torch.Tensor | None
    missing: set[int]
    sending: list[tuple[torch.Tensor, dist.Work]] = field(default_factory=list)
    error: str | None = None
    begin_ns: int | None = None
    end_ns: int | None = None
    abandoned: bool = False


@dataclass
class _Expected:
    """What one FFN rank owes: a header and its rows, in the order of sending."""

    header: Posted
    rows: list[Posted]
    flight: Flight | None


class Peer:
    """One FFN rank, seen from an attention rank, and the thread that waits for its answers.

    Args:
        world: both are in.
        rank: its rank in the world.
        watch: told when it is gone or answers garbage.
        take: called by the thread with every answer.

    Attributes:
        rank: as given.
        offset_ns: how far its clock is ahead.
    """

    def __init__(
        self, world: World, rank: int, watch: Watch, take: Callable[[Peer, Flight, Header], None]
    ) -> None:
        self.rank = rank
        self.offset_ns = 0
        self._name, self._here = world.ranks.name(rank), world.name
        self._watch = watch
        self._take = take
        self._link = Link(rank, world.requests, world.answers, world.config.latency_s)
        self._limit = timedelta(seconds=world.config.timeout_s)
        self._expected: queue.SimpleQueue[_Expected | None] = queue.SimpleQueue()
        self._headers = [header_buffer() for _ in range(world.config.credits + 1)]
        self._posted = 0
        self._pongs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"afd-answers-{rank}", daemon=True)
        self._thread.start()

    def measure_clock(self) -> None:
        """Find how far the FFN rank's clock is ahead, from the fastest of some round trips."""
        self.offset_ns = min(self._ping() for _ in range(_PINGS))[1]

    def _ping(self) -> tuple[int, int]:
        """Nanoseconds that a round trip took, and that the FFN rank's clock is ahead."""
        begin = time.perf_counter_ns()
        self._expect([], None)
        encoded, work = self._link.send_header(Header(Kind.PING), Tag.REQUEST)
        while True:
            try:
                theirs, end = self._pongs.get(timeout=LOOK_S)
                break
            except queue.Empty:
                self._watch.raise_failure()
        work.wait(self._limit)
        del encoded
        return end - begin, theirs - (begin + end) // 2

    def announce(self, layer: int, text: bytes) -> None:
        """Send the description of a program; returns when the FFN rank has bound its weights."""
        payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        header = Header(Kind.PROGRAM, layer=layer, rows=len(text))
        encoded, work = self._link.send_header(header, Tag.REQUEST)
        sent = self._link.send(payload, Tag.REQUEST_ROWS)
        for waiting in (work, sent):
            waiting.wait(self._limit)
        del encoded
        # It reads one message after the other, and an item must not wait for weights.
        self._ping()

    def send_item(
        self,
        flight: Flight,
        header: Header,
        rows: torch.Tensor,
        shared: torch.Tensor | None,
        answers: list[tuple[torch.Tensor, Tag]],
    ) -> None:
        """Start sending this rank's part of an item, and post the receives of its answer."""
        flight.sending.append(self._link.send_header(header, Tag.REQUEST))
        for tensor, tag in ((rows, Tag.REQUEST_ROWS), (shared, Tag.REQUEST_SHARED)):
            if tensor is not None and tensor.shape[0]:
                flight.sending.append((tensor, self._link.send(tensor, tag)))
        self._expect([self._link.post(into, tag) for into, tag in answers if into.shape[0]], flight)

    def say_goodbye(self) -> None:
        """Tell the FFN rank that nothing more comes."""
        if self._watch.failure is not None:
            return
        try:
            encoded, work = self._link.send_header(Header(Kind.BYE), Tag.REQUEST)
            work.wait(timedelta(seconds=_BYE_S))
            del encoded
        except RuntimeError:
            return  # it is gone itself

    def end(self) -> None:
        """End the thread; one that still waits for an answer ends with the process."""
        self._expected.put(None)
        self._thread.join(0 if self._watch.failure is not None else _BYE_S)

    def _expect(self, rows: list[Posted], flight: Flight | None) -> None:
        header = self._headers[self._posted % len(self._headers)]
        self._posted += 1
        self._expected.put(_Expected(self._link.post_header(header, Tag.ANSWER), rows, flight))

    def _run(self) -> None:
        while (expected := self._expected.get()) is not None:
            flight = expected.flight
            layer, stage = (
                (None, None) if flight is None else (flight.item.layer, flight.item.stage)
            )
            try:
                header = self._link.read_header(expected.header)
                if flight is None:
                    _check_kind(header, (Kind.PONG,))
                    self._pongs.put((header.end_ns, time.perf_counter_ns()))
                    continue
                _check_kind(header, (Kind.ANSWER, Kind.ERROR))
                asked = (flight.sequence, flight.item.layer, flight.item.stage)
                if (header.sequence, header.layer, header.stage) != asked:
                    raise ConnectorError(f"it answered item {header.sequence}, not {asked[0]}")
                for posted in expected.rows:
                    posted.wait()
                self._take(self, flight, header)
            except ConnectorError as error:
                self._watch.fail(f"{self._name} answered garbage: {error.what}", layer, stage)
                return
            except RuntimeError as error:
                self._watch.fail(f"{self._name} is gone: {cause(error)}", layer, stage)
                return
            except Exception as error:
                self._watch.fail(f"{self._here} failed: {error!r}", layer, stage)
                raise


def _check_kind(header: Header, kinds: tuple[Kind, ...]) -> None:
    if header.kind not in kinds:
        raise ConnectorError(f"a message of kind {header.kind.name} where none was due")
