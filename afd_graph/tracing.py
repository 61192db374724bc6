"""Measured traces: what every boundary node did in every step, kept, written, read and merged.

``AFDConfig(trace=True)`` makes the backend keep its last steps (:class:`Tracer`). A step holds the
begin and end of every dispatch and receive node, of the experts' work on its item, and of the step
itself; attention is what lies between. :meth:`Trace.write` makes one JSON file per rank, and
:func:`merge` puts the files of several ranks on one clock:

* attention and experts may have different clocks. An item's experts begin after its dispatch began
  and end before its receive ended, so every item bounds the difference (:func:`clock_offset`);
  where the bounds allow none, there is none.
* attention ranks meet on the clock of the experts that both talked to.

The file::

    {"format": "afd-graph trace/1", "rank": 0, "credits": 2,
     "steps": [{"begin_ns": ..., "end_ns": ..., "policy": "token", "reason": null,
                "events": [[kind, layer, stage, begin_ns, end_ns, rows, ffn_begin, ffn_end], ...],
                "pairs": [query-key pairs of each stage, where known]}]}
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from afd_graph.errors import PlanError
from afd_graph.runtime import Event
from afd_graph.schedule_ir import StageCosts, by_credits
from afd_graph.simulate import simulate
from afd_graph.timeline import Timeline, measure

if TYPE_CHECKING:
    from afd_graph.report import Report, StepTaken
    from afd_graph.runtime import Channel

FORMAT = "afd-graph trace/1"
KEPT_STEPS = 256


@dataclass(frozen=True)
class TracedStep:
    """One step of one attention rank; times in nanoseconds of that rank's clock.

    Attributes:
        begin_ns: when the compiled graph was entered.
        end_ns: when it returned.
        policy: the policy that cut the step; None when it ran unsplit.
        reason: why it ran unsplit; None when it was cut.
        events: dispatches and receives in order; ``ffn_ns`` is on the experts' clock.
        pairs: query-key pairs of each stage; empty where they are not known.
    """

    begin_ns: int
    end_ns: int
    policy: str | None
    reason: str | None
    events: tuple[Event, ...]
    pairs: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Most rows that each stage sent to a layer."""
        found: dict[int, int] = {}
        for event in self.events:
            if event.kind == "dispatch":
                found[event.stage] = max(event.rows, found.get(event.stage, 0))
        return tuple(found[stage] for stage in sorted(found))


@dataclass(frozen=True)
class Trace:
    """The steps of one attention rank.

    Attributes:
        steps: oldest first.
        credits: un-received dispatches that were allowed.
        rank: of the attention process.
    """

    steps: tuple[TracedStep, ...]
    credits: int
    rank: int = 0

    def timeline(self, number: int, *, title: str = "measured") -> Timeline:
        """Step ``number`` as a timeline that begins at 0, negative numbers from the last."""
        step = self.steps[number]
        return _measured(step, self.rank, clock_offset(step.events), step.begin_ns, title)

    def predicted(self, number: int, *, title: str = "predicted") -> Timeline:
        """What the pipeline model makes of the median costs of that step's stages.

        Raises:
            PlanError: the step has no experts' times to reckon with.
        """
        step = self.steps[number]
        timeline = self.timeline(number)
        layers, stages = timeline.layers, timeline.stages
        measured = measure(step.events, ffn_clock_ns=clock_offset(step.events))
        if measured.costs is None:
            raise PlanError(
                "nothing is known of the experts in this step",
                remedy="trace over a connector that implements ffn_times",
            )
        _, _, out_s, back_s = measured.costs.uniform()
        attention, ffn = (
            {
                stage: median(
                    sum(i.duration_s for i in timeline.lane(engine) if i.item == (layer, stage))
                    for layer in layers
                )
                for stage in stages
            }
            for engine in ("attention", "ffn")
        )
        costs = StageCosts(
            lambda _, stage: attention[stages[stage]],
            lambda _, stage: ffn[stages[stage]],
            out_s,
            back_s,
        )
        order = by_credits(len(layers), self.credits, len(stages))
        played = simulate(order, costs, title=title)
        # The simulator counts layers from 0, the step may have others.
        return Timeline(
            tuple(
                dataclasses.replace(i, layer=layers[i.layer], stage=stages[i.stage], rank=self.rank)
                if i.engine != "ffn"
                else dataclasses.replace(i, layer=layers[i.layer], stage=stages[i.stage])
                for i in played.intervals
            ),
            title,
        )

    def write(self, path: str | PathLike[str]) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(json.dumps(self._as_dict()) + "\n", encoding="utf-8")

    def _as_dict(self) -> dict[str, Any]:
        steps = [
            {
                "begin_ns": step.begin_ns,
                "end_ns": step.end_ns,
                "policy": step.policy,
                "reason": step.reason,
                "events": [
                    [e.kind, e.layer, e.stage, e.begin_ns, e.end_ns, e.rows, *(e.ffn_ns or ())]
                    for e in step.events
                ],
                "pairs": step.pairs,
            }
            for step in self.steps
        ]
        return {"format": FORMAT, "rank": self.rank, "credits": self.credits, "steps": steps}

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Trace:
        """Read what :meth:`write` wrote.

        Raises:
            PlanError: the file is no such trace, or is broken.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']!r}, not {FORMAT!r}")
            steps = tuple(
                TracedStep(
                    int(step["begin_ns"]),
                    int(step["end_ns"]),
                    step["policy"],
                    step["reason"],
                    tuple(_event(values) for values in step["events"]),
                    tuple(int(pairs) for pairs in step.get("pairs", ())),
                )
                for step in found["steps"]
            )
            return cls(steps, int(found["credits"]), int(found["rank"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"{path} is not a trace: {error!r}",
                remedy="give files that Trace.write or AFDConfig(trace=True, dump_dir=...) made",
            ) from error


def _event(values: Sequence[Any]) -> Event:
    kind, *numbers = values
    if kind not in ("dispatch", "receive") or len(numbers) not in (5, 7):
        raise ValueError(f"event {values!r}")
    layer, stage, begin, end, rows, *ffn = (int(number) for number in numbers)
    return Event(kind, layer, stage, begin, end, rows, (ffn[0], ffn[1]) if ffn else None)


class Tracer:
    """Keeps the last steps of a channel; each step ends when the report counts it.

    Args:
        channel: the channel to observe.
        report: tells the end of each step, and what it did.
        kept: number of steps to keep.
    """

    def __init__(self, channel: Channel, report: Report, kept: int = KEPT_STEPS) -> None:
        self._channel = channel
        self._events: list[Event] = []
        self._steps: deque[TracedStep] = deque(maxlen=kept)
        channel.observers.append(self._events.append)
        report.observers.append(self._taken)

    def _taken(self, step: StepTaken) -> None:
        began = self._channel.step_began_ns
        # What a failed step left behind is older than this one.
        events = tuple(event for event in self._events if event.begin_ns >= began)
        self._events.clear()
        end = self._channel.now_ns()
        self._steps.append(TracedStep(began, end, step.policy, step.reason, events, step.pairs))

    def trace(self) -> Trace:
        """What was recorded so far."""
        return Trace(tuple(self._steps), self._channel.credits, _rank())


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


def clock_offset(events: Iterable[Event]) -> int:
    """Nanoseconds to add to the experts' clock to get the attention rank's.

    An item's experts begin after its dispatch began and end before its receive ended. The bounds
    of all items leave an interval; 0 when that is in it, else its middle, which is off by half of
    its length at most.

    Raises:
        PlanError: no offset puts every item's experts between its dispatch and its receive.
    """
    begins: dict[tuple[int, int], int] = {}
    low, high = -(2**63), 2**63
    for event in events:
        item = (event.layer, event.stage)
        if event.kind == "dispatch":
            begins[item] = event.begin_ns
        elif event.ffn_ns is not None and item in begins:
            low = max(low, begins[item] - event.ffn_ns[0])
            high = min(high, event.end_ns - event.ffn_ns[1])
    if low > high:
        raise PlanError(
            f"no clock offset fits this step: at least {low} ns and at most {high} ns",
            remedy="trace a shorter run; the clocks of the two sides drift apart, or one was set",
        )
    return 0 if low <= 0 <= high else (low + high) // 2


def merge(traces: Sequence[Trace], *, title: str = "measured") -> list[Timeline]:
    """The steps of several attention ranks on one clock, the experts' one.

    Steps are matched by their number, counted from the last, since ranks run the same steps and
    may keep different numbers of them.

    Raises:
        PlanError: no trace, or two of the same rank.
    """
    ranks = [trace.rank for trace in traces]
    if not traces or len(set(ranks)) != len(ranks):
        raise PlanError(
            f"traces of the ranks {ranks} cannot be merged",
            remedy="give one trace of each attention rank",
        )
    count = min(len(trace.steps) for trace in traces)
    merged = []
    for number in range(-count, 0):
        steps = [(trace.rank, trace.steps[number]) for trace in traces]
        offsets = [clock_offset(step.events) for _, step in steps]
        origin = min(
            step.begin_ns - offset for (_, step), offset in zip(steps, offsets, strict=True)
        )
        intervals = [
            interval
            for (rank, step), offset in zip(steps, offsets, strict=True)
            for interval in _measured(step, rank, offset, origin + offset, title).intervals
        ]
        merged.append(Timeline(tuple(intervals), title))
    return merged


def _measured(step: TracedStep, rank: int, offset_ns: int, origin_ns: int, title: str) -> Timeline:
    """The timeline of one step; time 0 is at ``origin_ns`` of the rank's clock."""
    found = measure(
        step.events, begin_ns=step.begin_ns, rank=rank, title=title, ffn_clock_ns=offset_ns
    )
    late = (step.begin_ns - origin_ns) * 1e-9
    return Timeline(
        tuple(
            dataclasses.replace(
                i,
                begin_s=i.begin_s + late,
                end_s=i.end_s + late,
                rank=rank,
                source=rank if i.engine == "ffn" else None,
            )
            for i in found.timeline.intervals
        ),
        title,
    )
