"""Timelines: what each engine did when; and the recorder that measures one.

Simulated and measured steps share one type, :class:`Timeline`, so that both can be drawn on one
axis. The engines are those of docs/pipeline.md: ``attention``, the link out (dispatch), ``ffn``
and the link back (return).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from afd_graph.errors import PlanError
from afd_graph.schedule_ir import StageCosts

if TYPE_CHECKING:
    from afd_graph.runtime import Channel, Event

ENGINES = ("attention", "link out", "ffn", "link back")

FFNBusy: TypeAlias = tuple[int, int, int, int]  # layer, stage, begin_ns, end_ns
_Item: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Interval:
    """One engine busy with one work item, times in seconds.

    Attributes:
        engine: one of :data:`ENGINES`.
        layer: index of the MoE layer.
        stage: token stage.
        begin_s: begin, on the clock of the timeline.
        end_s: end; equal to the begin for a link without cost.
        rank: rank on the engine's own side.
        source: attention rank whose rows the experts work on; ``None`` for rows of all of them.
    """

    engine: str
    layer: int
    stage: int
    begin_s: float
    end_s: float
    rank: int = 0
    source: int | None = None

    @property
    def item(self) -> tuple[int, int]:
        """``(layer, stage)``."""
        return self.layer, self.stage

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Timeline:
    """Every interval of one step.

    Attributes:
        intervals: in no particular order. Those of a link may overlap, links are uncontended.
        title: what this is, such as ``receive-first, predicted``.
    """

    intervals: tuple[Interval, ...]
    title: str = ""

    @property
    def begin_s(self) -> float:
        """Begin of the first interval, seconds; 0 without intervals."""
        return min((i.begin_s for i in self.intervals), default=0)

    @property
    def end_s(self) -> float:
        """End of the last interval, seconds; 0 without intervals."""
        return max((i.end_s for i in self.intervals), default=0)

    @property
    def total_s(self) -> float:
        """Time of the step in seconds."""
        return self.end_s - self.begin_s

    @property
    def layers(self) -> list[int]:
        """MoE layers that occur, ascending."""
        return sorted({i.layer for i in self.intervals})

    @property
    def stages(self) -> list[int]:
        """Token stages that occur, ascending."""
        return sorted({i.stage for i in self.intervals})

    def ranks(self, engine: str) -> list[int]:
        """Ranks that have intervals on ``engine``, ascending."""
        return sorted({i.rank for i in self.intervals if i.engine == engine})

    def lane(self, engine: str, rank: int = 0) -> list[Interval]:
        """Intervals of one engine of one rank, by begin."""
        chosen = [i for i in self.intervals if i.engine == engine and i.rank == rank]
        return sorted(chosen, key=lambda i: (i.begin_s, i.end_s))

    def busy_s(self, engine: str, rank: int = 0) -> float:
        """Seconds in which the engine did anything; overlapping intervals count once."""
        return sum(end - begin for begin, end in self._merged(engine, rank))

    def utilisation(self, engine: str, rank: int = 0) -> float:
        """Busy share of the step, 0 to 1."""
        return float(self.busy_s(engine, rank) / self.total_s) if self.total_s else 0.0

    def bubbles(self, engine: str, rank: int = 0) -> list[tuple[float, float]]:
        """``(begin_s, end_s)`` of every idle span of the engine, fill and drain included."""
        spans = []
        cursor = self.begin_s
        for begin, end in self._merged(engine, rank):
            if begin > cursor:
                spans.append((cursor, begin))
            cursor = end
        if self.end_s > cursor:
            spans.append((cursor, self.end_s))
        return spans

    def _merged(self, engine: str, rank: int) -> list[tuple[float, float]]:
        merged: list[tuple[float, float]] = []
        for interval in self.lane(engine, rank):
            if merged and interval.begin_s <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], interval.end_s))
            else:
                merged.append((interval.begin_s, interval.end_s))
        return merged


@dataclass(frozen=True)
class Measurement:
    """One measured step.

    Attributes:
        timeline: what was seen, in seconds from the begin of the step.
        costs: medians over all work items; see :func:`measure` for what they contain. ``None``
            when the FFN side reported nothing.
        combine_s: what the combination of one answer takes; part of the attention's cost.
    """

    timeline: Timeline
    costs: StageCosts | None
    combine_s: float = 0.0


class Recorder:
    """Collects the events of one step from a channel, as a context manager.

    The step begins when the context is entered, on the thread that runs it::

        with Recorder(channel) as recorder:
            model(tokens)
        measurement = recorder.measure()

    Args:
        channel: the channel to observe.
        rank: rank of this attention process.
    """

    def __init__(self, channel: Channel, rank: int = 0) -> None:
        self._channel = channel
        self.rank = rank
        self.events: list[Event] = []
        self.begin_ns = self.end_ns = 0

    def __enter__(self) -> Recorder:
        self.events.clear()
        self._channel.observers.append(self.events.append)
        self.begin_ns = time.perf_counter_ns()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_ns = time.perf_counter_ns()
        self._channel.observers.remove(self.events.append)

    def measure(
        self,
        ffn_busy: Iterable[FFNBusy] | None = None,
        *,
        title: str = "measured",
        ffn_clock_ns: int = 0,
    ) -> Measurement:
        """Turn what was seen into a timeline and costs; see :func:`measure`."""
        return measure(
            self.events,
            ffn_busy,
            begin_ns=self.begin_ns,
            rank=self.rank,
            title=title,
            ffn_clock_ns=ffn_clock_ns,
        )


def measure(
    events: Sequence[Event],
    ffn_busy: Iterable[FFNBusy] | None = None,
    *,
    begin_ns: int | None = None,
    rank: int = 0,
    title: str = "measured",
    ffn_clock_ns: int = 0,
) -> Measurement:
    """Build the timeline and the costs of one step from its events.

    The attention engine is busy whenever its thread is not waiting in a receive. So ``a`` is, per
    work item, the computation before its dispatch, the dispatch call itself (it groups and copies
    rows) and the combination of its answer. ``c`` is the time from the end of the dispatch call
    to the begin of the experts, over items that found the experts idle. ``d`` is the time from the
    end of the experts to the end of the receive, less the combination, over items whose experts
    were waited for. The combination takes as long as the shortest receive whose answer was surely
    there; when every receive waited it cannot be told apart and is part of ``d``. An arrival that
    nobody waited for is not seen; it is placed with the median ``c`` or ``d``.

    Args:
        events: dispatches and receives of one step, in order.
        ffn_busy: ``(layer, stage, begin_ns, end_ns)`` of the experts in this step; ``None`` takes
            what the connector noted in the receives.
        begin_ns: begin of the step; ``None`` takes the first event's.
        rank: rank of the attention process.
        title: title of the timeline.
        ffn_clock_ns: added to the FFN side's times to bring them to the attention side's clock.

    Raises:
        PlanError: a dispatch or a receive lacks its partner, or an item occurs twice.
    """
    dispatches = _by_item(events, "dispatch")
    receives = _by_item(events, "receive")
    unpaired = dispatches.keys() ^ receives.keys()
    if unpaired:
        item = min(unpaired)
        raise PlanError(
            "this work item was not both dispatched and received",
            layer=item[0],
            stage=item[1],
            remedy="record whole steps that ended without an error",
        )
    if not events:
        return Measurement(Timeline((), title), None)
    origin = events[0].begin_ns if begin_ns is None else begin_ns
    if ffn_busy is None:
        ffn_busy = [(*item, *event.ffn_ns) for item, event in receives.items() if event.ffn_ns]
    experts = {
        (layer, stage): (begin + ffn_clock_ns, end + ffn_clock_ns)
        for layer, stage, begin, end in ffn_busy
        if (layer, stage) in dispatches
    }
    out = median(_uncontended(dispatches, experts) or [0])
    back, combine = _return_costs(_with(receives, experts))
    busy = _attention(events, origin, combine)
    spans = [("attention", *span) for span in busy]
    for item, (begin, end) in experts.items():
        dispatch, receive = dispatches[item], receives[item]
        arrival = begin if _is_idle(begin, experts, dispatch) else dispatch.end_ns + out
        answer = receive.end_ns - combine if receive.begin_ns < end else end + back
        spans += [
            ("link out", item, min(dispatch.end_ns, begin), min(arrival, begin)),
            ("ffn", item, begin, end),
            ("link back", item, end, max(end, min(answer, receive.end_ns))),
        ]
    intervals = tuple(
        Interval(
            engine,
            layer,
            stage,
            (begin - origin) * 1e-9,
            (end - origin) * 1e-9,
            rank if engine != "ffn" else 0,
        )
        for engine, (layer, stage), begin, end in spans
    )
    costs = None
    if experts:
        attention: dict[_Item, float] = {}
        for item, busy_from, busy_to in busy:
            attention[item] = attention.get(item, 0) + busy_to - busy_from
        costs = StageCosts(
            median(attention.values()) * 1e-9,
            median(end - begin for begin, end in experts.values()) * 1e-9,
            out * 1e-9,
            back * 1e-9,
        )
    return Measurement(Timeline(intervals, title), costs, combine * 1e-9)


def _by_item(events: Sequence[Event], kind: str) -> dict[_Item, Event]:
    found: dict[_Item, Event] = {}
    for event in events:
        if event.kind == kind:
            if (event.layer, event.stage) in found:
                raise PlanError(
                    f"two {kind} events for one work item",
                    layer=event.layer,
                    stage=event.stage,
                    remedy="use one recorder per step",
                )
            found[event.layer, event.stage] = event
    return found


def _with(
    events: dict[_Item, Event], experts: dict[_Item, tuple[int, int]]
) -> list[tuple[Event, tuple[int, int]]]:
    return [(events[item], span) for item, span in experts.items()]


def _is_idle(begin: int, experts: dict[_Item, tuple[int, int]], dispatch: Event) -> bool:
    """Whether the experts had nothing to do when this item was dispatched."""
    ended = max((end for other, end in experts.values() if other < begin), default=None)
    return ended is None or ended <= dispatch.end_ns


def _uncontended(
    dispatches: dict[_Item, Event], experts: dict[_Item, tuple[int, int]]
) -> list[int]:
    # The experts may begin before the dispatch call has returned: then the way out costs nothing.
    return [
        max(begin - d.end_ns, 0)
        for d, (begin, _) in _with(dispatches, experts)
        if _is_idle(begin, experts, d)
    ]


def _return_costs(
    receives: Sequence[tuple[Event, tuple[int, int]]],
) -> tuple[float, float]:
    """``(d, combination)`` in nanoseconds."""
    if not receives:
        return 0, 0
    both = median(
        [r.end_ns - end for r, (_, end) in receives if r.begin_ns < end]
        or [min(r.end_ns - end for r, (_, end) in receives)]
    )
    # An answer as old as return and combination together has arrived, whatever the share of each.
    ready = (r.end_ns - r.begin_ns for r, (_, end) in receives if r.begin_ns - end >= both)
    combine = min(ready, default=0)
    return max(both - combine, 0), combine


def _attention(
    events: Sequence[Event], origin: int, combine: float
) -> list[tuple[_Item, float, float]]:
    """Busy spans of the attention thread, each with the work item that it belongs to."""
    upcoming = deque((e.layer, e.stage) for e in events if e.kind == "dispatch")
    spans: list[tuple[_Item, float, float]] = []
    cursor = origin
    for event in events:
        item = (event.layer, event.stage)
        if event.kind == "dispatch":
            spans.append((item, cursor, event.end_ns))
            upcoming.popleft()
        else:
            # In every legal order, computation between two crossings leads to the next dispatch.
            if event.begin_ns > cursor:
                spans.append((upcoming[0] if upcoming else item, cursor, event.begin_ns))
            spans.append((item, max(event.begin_ns, event.end_ns - combine), event.end_ns))
        cursor = event.end_ns
    return spans
