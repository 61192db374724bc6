"""The pipeline model of docs/pipeline.md: an event simulator, and its closed forms.

1. :func:`order_from_graph` reads the schedule out of an emitted graph;
2. :func:`simulate` runs it with given costs and returns the timeline;
3. :func:`closed_form` says what two equal stages can reach, without running anything.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from afd_graph.errors import PlanError
from afd_graph.schedule_ir import StageCosts, Step, check, credits_needed
from afd_graph.timeline import Interval, Timeline

if TYPE_CHECKING:
    from torch import fx

__all__ = [
    "REFERENCE_COSTS",
    "ClosedForm",
    "StageCosts",
    "closed_form",
    "compute_bound_stages",
    "order_from_graph",
    "simulate",
]

# Cost rows of the golden table of docs/pipeline.md; tests, benchmark and figures run all of them.
REFERENCE_COSTS = (
    StageCosts(1, 1, 0, 0),
    StageCosts(1, 0.5, 0.25, 0.25),
    StageCosts(1, 1, 0.1, 0.1),
    StageCosts(1, 1, 0.25, 0.25),
    StageCosts(0.5, 1, 0.1, 0.1),
    StageCosts(1, 0.6, 0.5, 0.5),
    StageCosts(1, 1.5, 0.25, 0.25),
)


def simulate(
    order: Sequence[Step], costs: StageCosts, *, credits: int | None = None, title: str = ""
) -> Timeline:
    """Run ``order`` on one attention engine, one FFN engine and two uncontended links.

    The attention engine takes the steps in list order; a dispatch is asynchronous, a receive
    blocks. The FFN engine serves work items in the order of their arrival. Times start at 0 s.

    Args:
        order: what the attention side does.
        costs: seconds per engine, uniform or per (layer, stage).
        credits: un-received dispatches allowed; ``None`` allows what the order needs.
        title: title of the timeline.

    Raises:
        PlanError: the order is illegal (:func:`afd_graph.schedule_ir.check`), or a cost is not a
            time.
    """
    check(order, credits_needed(order) if credits is None else credits)
    intervals: list[Interval] = []
    arrived: list[tuple[float, int, Step]] = []
    answered: dict[tuple[int, int], float] = {}
    now: float = 0
    ffn_free: float = 0
    for number, step in enumerate(order):
        item = (step.layer, step.stage)
        if step.kind == "attention":
            end = now + costs.at("attention_s", *item)
            intervals.append(Interval("attention", *item, now, end))
            now = end
        elif step.kind == "dispatch":
            end = now + costs.at("dispatch_s", *item)
            intervals.append(Interval("link out", *item, now, end))
            heapq.heappush(arrived, (end, number, step))
        else:
            # Whatever is dispatched after this receive arrives after the answer it waits for, so
            # the items at hand are all that can be ahead of it in the queue.
            while item not in answered:
                arrival, _, served = heapq.heappop(arrived)
                work = (served.layer, served.stage)
                begin = max(ffn_free, arrival)
                ffn_free = begin + costs.at("ffn_s", *work)
                answered[work] = ffn_free + costs.at("return_s", *work)
                intervals.append(Interval("ffn", *work, begin, ffn_free))
                intervals.append(Interval("link back", *work, ffn_free, answered[work]))
            now = max(now, answered[item])
    return Timeline(tuple(intervals), title)


@dataclass(frozen=True)
class ClosedForm:
    """What the model says about two equal stages, in seconds.

    Attributes:
        unsplit_s: time of one stage, ``T1``.
        split_s: time of two stages, ``T2``.
        period_s: time that one more layer adds to ``split_s``.
        regime: what limits: ``attention-bound``, ``ffn-bound`` or ``latency-bound``.
    """

    unsplit_s: float
    split_s: float
    period_s: float
    regime: str

    @property
    def speedup(self) -> float:
        """``T1 / T2``."""
        return float(self.unsplit_s / self.split_s) if self.split_s else 1.0


def closed_form(
    layers: int, costs: StageCosts, order: str, *, unsplit: StageCosts | None = None
) -> ClosedForm:
    """The formulas of docs/pipeline.md; they equal the simulator for every non-negative cost.

    Args:
        layers: number of MoE layers, at least 1.
        costs: costs of one stage, uniform.
        order: ``receive-first`` or ``send-first``.
        unsplit: costs of the whole batch; ``None`` takes twice ``costs``.

    Raises:
        PlanError: unknown order, no layer, or costs that are not uniform.
    """
    if layers < 1:
        raise PlanError(f"layers={layers} has no closed form", remedy="give at least one MoE layer")
    a, f, c, d = costs.uniform()
    round_trip = c + f + d
    whole = costs.scaled(2) if unsplit is None else unsplit
    unsplit_s = layers * sum(whole.uniform())
    if order == "receive-first":
        # One credit keeps the experts idle while rows travel, so they alone never limit.
        regime = "attention-bound" if round_trip <= a else "latency-bound"
        slower = max(a, round_trip)
        split_s = a + (2 * layers - 1) * slower + round_trip
        return ClosedForm(unsplit_s, split_s, 2 * slower, regime)
    if order != "send-first":
        raise PlanError(
            f"order={order!r} is not known", remedy="use 'receive-first' or 'send-first'"
        )
    if round_trip <= a:
        regime, split_s = "attention-bound", 2 * layers * a + round_trip
    elif f >= a + c + d:
        regime, split_s = "ffn-bound", a + c + 2 * layers * f + d
    else:
        regime, split_s = "latency-bound", layers * (a + round_trip) + max(a, f)
    return ClosedForm(unsplit_s, split_s, max(2 * a, 2 * f, a + round_trip), regime)


def compute_bound_stages(costs: StageCosts) -> int:
    """Fewest send-first stages of these costs that hide the links: ``m * max(a, f) >= a + R``.

    Raises:
        PlanError: neither side computes anything, or costs are not uniform.
    """
    a, f, c, d = costs.uniform()
    if max(a, f) == 0:
        raise PlanError(
            "no number of stages hides a link behind nothing", remedy="give attention_s or ffn_s"
        )
    return max(1, math.ceil((a + c + f + d) / max(a, f)))


def order_from_graph(graph: fx.Graph) -> list[Step]:
    """The schedule that an emitted graph holds.

    Dispatches and receives are the ``afd::cam_dispatch`` and ``afd::cam_receive`` nodes, in graph
    order. ``attention(layer, stage)`` stands for the nodes of that stage (``meta["afd_stage"]``)
    that the dispatch needs and no earlier dispatch needed. It is placed where most of these nodes
    are, between two crossings; stray views and sizes elsewhere do not move it. Nodes without a
    stage are shared and cost nothing here, except in an unsplit graph, where all are stage 0's.
    Work after the last receive, and work that overlaps with its own round trip (shared experts),
    has no step of its own.

    Raises:
        PlanError: an emitted node does not have integers for layer and stage.
    """
    crossings: list[tuple[fx.Node, Step]] = []
    gap: dict[fx.Node, int] = {}
    for node in graph.nodes:
        step = _crossing(node)
        if step is not None:
            crossings.append((node, step))
        elif node.op.startswith("call_"):
            gap[node] = len(crossings)
    is_unsplit = len({step.stage for _, step in crossings}) == 1
    attention: list[list[Step]] = [[] for _ in crossings]
    seen: set[fx.Node] = {node for node, _ in crossings}
    earliest: dict[int, int] = {}
    for position, (node, step) in enumerate(crossings):
        if step.kind == "receive":
            earliest[step.stage] = position + 1
            continue
        places: Counter[int] = Counter()
        stack = list(node.all_input_nodes)
        while stack:
            needed = stack.pop()
            if needed in seen:
                continue
            seen.add(needed)
            stack += needed.all_input_nodes
            stage = needed.meta.get("afd_stage")
            if needed in gap and (stage == step.stage or (stage is None and is_unsplit)):
                places[gap[needed]] += 1
        legal = {g: n for g, n in places.items() if g >= earliest.get(step.stage, 0)}
        place = max(legal, key=lambda g: (legal[g], g)) if legal else position
        attention[place].append(Step("attention", step.layer, step.stage))
    order: list[Step] = []
    for before, (_, step) in zip(attention, crossings, strict=True):
        order += [*before, step]
    return order


_CROSSINGS = {
    "afd.cam_dispatch.default": ("dispatch", 2),
    "afd.cam_receive.default": ("receive", 3),
}


def _crossing(node: fx.Node) -> Step | None:
    # By name: reading a graph must not need the operators' library, or torch itself.
    known = _CROSSINGS.get(str(node.target)) if node.op == "call_function" else None
    if known is None:
        return None
    kind, first = known
    layer, stage = node.args[first : first + 2]
    if not isinstance(layer, int) or not isinstance(stage, int):
        raise PlanError(
            f"{kind} has layer={layer!r}, stage={stage!r}, which are not integers",
            node=node.name,
            remedy="emit both as plain integers",
        )
    return Step(kind, layer, stage)
