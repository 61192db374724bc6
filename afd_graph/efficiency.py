"""How close a measured step comes to what the pipeline model allows for its own costs.

The order that fills the credits runs in the simulator with the costs that each work item really
had; what the step does after its last receive follows. That is the least time in which these
computations fit on one attention engine and one FFN engine. With equal stages it is the closed
form of docs/pipeline.md.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from afd_graph.errors import PlanError
from afd_graph.schedule_ir import StageCosts, by_credits
from afd_graph.simulate import simulate
from afd_graph.timeline import Recorder, Timeline


@dataclass(frozen=True)
class Efficiency:
    """One measured step against the model.

    Attributes:
        wall_s: time of the step in seconds.
        bound_s: least time for the same computations.
        costs: median costs of one stage of one MoE layer.
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
        PlanError: the step crossed no boundary, or the connector does not tell the experts' times.
    """
    measurement = recorder.measure(title=f"{title}, measured" if title else "measured")
    timeline, costs = measurement.timeline, measurement.costs
    if costs is None:
        raise PlanError(
            "nothing is known of the experts in this step",
            remedy="record a step with MoE layers over a connector that implements ffn_times",
        )
    spent: dict[tuple[str, int, int], float] = defaultdict(float)
    for interval in timeline.intervals:
        spent[interval.engine, interval.layer, interval.stage] += interval.duration_s
    layers = timeline.layers
    own = StageCosts(
        lambda layer, stage: spent["attention", layers[layer], stage],
        lambda layer, stage: spent["ffn", layers[layer], stage],
        costs.dispatch_s,
        costs.return_s,
    )
    order = by_credits(len(layers), credits, len(timeline.stages))
    predicted = simulate(order, own, title=f"{title}, the model" if title else "the model")
    wall_s = (recorder.end_ns - recorder.begin_ns) * 1e-9
    tail_s = (recorder.end_ns - recorder.events[-1].end_ns) * 1e-9
    return Efficiency(wall_s, predicted.total_s + tail_s, costs, timeline, predicted, tail_s)
