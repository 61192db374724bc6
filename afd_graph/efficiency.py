"""How close a measured step comes to what the pipeline model allows for its own costs.

1. The step must have crossed the boundary in the order that its credits allow.
2. The model replays that order: attention computes for as long as it did between two crossings,
   the experts serve each item for as long as they did, rows travel for the median times, and
   nothing waits for anything else.
3. The mean costs of a stage go into the closed form of docs/pipeline.md as well.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import mean, median

from afd_graph.errors import PlanError
from afd_graph.schedule_ir import StageCosts, by_credits
from afd_graph.timeline import Interval, Measurement, Recorder, Timeline


@dataclass(frozen=True)
class Efficiency:
    """One measured step against the model.

    Attributes:
        wall_s: time of the step in seconds.
        bound_s: least time for the same computations in this order.
        costs: of one stage of one MoE layer: the median over layers, the mean over stages.
            Attention includes whatever else that side computes, such as shared experts.
        measured: what was seen.
        predicted: what the model makes of the costs, without the tail.
        tail_s: work after the last receive.
    """

    wall_s: float
    bound_s: float
    costs: StageCosts
    measured: Timeline
    predicted: Timeline
    tail_s: float

    @property
    def of_bound(self) -> float:
        """Share of the bound that was reached, 1 at best."""
        return self.bound_s / self.wall_s

    def busy(self, engine: str) -> float:
        """Share of the step in which ``attention`` or ``ffn`` computed, 0 to 1."""
        busy_s = self.measured.busy_s(engine)
        return (busy_s + (self.tail_s if engine == "attention" else 0.0)) / self.wall_s


def efficiency(recorder: Recorder, credits: int, title: str = "") -> Efficiency:
    """Judge the step that ``recorder`` saw, run with ``credits``.

    Raises:
        PlanError: the step crossed no boundary, the connector does not tell the experts' times,
            or the order is not that of the credits.
    """
    prefix = f"{title}, " if title else ""
    measurement = recorder.measure(title=f"{prefix}measured")
    timeline = measurement.timeline
    if measurement.costs is None:
        raise PlanError(
            "nothing is known of the experts in this step",
            remedy="record a step with MoE layers over a connector that implements ffn_times",
        )
    _check_order(recorder, timeline, credits)
    predicted = _replay(recorder, measurement, f"{prefix}the model")
    wall_s = (recorder.end_ns - recorder.begin_ns) * 1e-9
    tail_s = (recorder.end_ns - recorder.events[-1].end_ns) * 1e-9
    _, _, out_s, back_s = measurement.costs.uniform()
    costs = StageCosts(
        _per_stage(timeline, "attention"), _per_stage(timeline, "ffn"), out_s, back_s
    )
    bound_s = predicted.end_s + tail_s
    return Efficiency(wall_s, bound_s, costs, timeline, predicted, tail_s)


def _check_order(recorder: Recorder, timeline: Timeline, credits: int) -> None:
    layers = timeline.layers
    seen = [(event.kind, event.layer, event.stage) for event in recorder.events]
    expected = [
        (step.kind, layers[step.layer], step.stage)
        for step in by_credits(len(layers), credits, len(timeline.stages))
        if step.kind != "attention"
    ]
    if seen != expected:
        raise PlanError(
            f"this step did not cross the boundary in the order of {credits} credits",
            remedy="pass the credits of the backend that ran it",
        )


def _replay(recorder: Recorder, measurement: Measurement, title: str) -> Timeline:
    assert measurement.costs is not None
    _, _, out_s, back_s = measurement.costs.uniform()
    intervals: list[Interval] = []
    answered: dict[tuple[int, int], float] = {}
    ffn_s = {
        (event.layer, event.stage): (event.ffn_ns[1] - event.ffn_ns[0]) * 1e-9
        for event in recorder.events
        if event.ffn_ns is not None
    }
    now = ffn_free = 0.0
    cursor = recorder.begin_ns
    upcoming = [(e.layer, e.stage) for e in recorder.events if e.kind == "dispatch"]
    for event in recorder.events:
        item = (event.layer, event.stage)
        computed_until = event.end_ns if event.kind == "dispatch" else event.begin_ns
        until = now + (computed_until - cursor) * 1e-9
        intervals.append(Interval("attention", *(upcoming[0] if upcoming else item), now, until))
        now, cursor = until, event.end_ns
        if event.kind == "dispatch":
            upcoming.pop(0)
            arrival = now + out_s
            begin = max(arrival, ffn_free)
            ffn_free = begin + ffn_s[item]
            answered[item] = ffn_free + back_s
            intervals += [
                Interval("link out", *item, now, arrival),
                Interval("ffn", *item, begin, ffn_free),
                Interval("link back", *item, ffn_free, answered[item]),
            ]
        else:
            combined = max(now, answered[item])
            now = combined + min(measurement.combine_s, (event.end_ns - event.begin_ns) * 1e-9)
            intervals.append(Interval("attention", *item, combined, now))
    return Timeline(tuple(intervals), title)


def _per_stage(timeline: Timeline, engine: str) -> float:
    spent: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for interval in timeline.lane(engine):
        spent[interval.stage][interval.layer] += interval.duration_s
    return mean(median(layers.values()) for layers in spent.values())
