"""A schedule as data: an ordered list of steps, what a step costs, and what makes an order legal.

The attention side walks one list of :class:`Step`. ``attention`` computes one stage up to and
including the gate of one MoE layer, ``dispatch`` sends its rows to the experts without waiting,
``receive`` waits for their answer. The schedule pass emits such a list as graph nodes, the
simulator runs it, and :func:`check` says whether it is legal.

All reference orders are one rule. Work items are numbered ``i = layer * stages + stage``; with
``k`` credits item ``i - k`` must be received before item ``i`` is dispatched, and as late as that.
``k = 1`` is *receive-first*, ``k = stages`` is *send-first*, one stage is the *unsplit* order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from afd_graph.errors import PlanError

KINDS = ("attention", "dispatch", "receive")

Cost: TypeAlias = float | Callable[[int, int], float]


@dataclass(frozen=True)
class Step:
    """One event of the attention side.

    Attributes:
        kind: ``attention``, ``dispatch`` or ``receive``.
        layer: index of the MoE layer.
        stage: token stage, from 0.

    Raises:
        PlanError: ``kind`` is none of these, or an index is negative.
    """

    kind: str
    layer: int
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"step kind {self.kind!r} is not known", remedy=f"use one of {KINDS}")
        if self.layer < 0 or self.stage < 0:
            raise PlanError(
                f"step {self} has a negative index", remedy="count layers and stages from 0"
            )

    def __str__(self) -> str:
        return f"{self.kind}({self.layer},{self.stage})"


@dataclass(frozen=True)
class StageCosts:
    """What one stage of one MoE layer costs on each engine, in seconds.

    Each is a number, or a callable ``(layer, stage) -> seconds``.

    Attributes:
        attention_s: attention and gate (``a`` of docs/pipeline.md).
        ffn_s: experts (``f``).
        dispatch_s: way out, from dispatch to arrival at the experts (``c``).
        return_s: way back (``d``).

    Raises:
        PlanError: a number is negative or not a number.
    """

    attention_s: Cost
    ffn_s: Cost
    dispatch_s: Cost = 0
    return_s: Cost = 0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not callable(value):
                _not_negative(entry.name, value)

    def at(self, name: str, layer: int, stage: int) -> float:
        """Seconds of the cost ``name`` for one (layer, stage).

        Raises:
            PlanError: a callable returned a negative number.
        """
        value: Cost = getattr(self, name)
        if not callable(value):
            return value
        return _not_negative(name, value(layer, stage), layer, stage)

    def uniform(self) -> tuple[float, float, float, float]:
        """``(a, f, c, d)`` in seconds.

        Raises:
            PlanError: a cost is a callable, so there is no single value.
        """
        values = [getattr(self, entry.name) for entry in fields(self)]
        if any(callable(value) for value in values):
            raise PlanError(
                "these costs differ per layer or stage, but one number per engine is needed",
                remedy="use simulate() for such costs; closed forms hold for equal stages only",
            )
        a, f, c, d = values
        return a, f, c, d

    def scaled(self, factor: float) -> StageCosts:
        """Every uniform cost times ``factor``, such as 2 for the unsplit batch of equal stages."""
        return StageCosts(*(factor * value for value in self.uniform()))


def by_credits(layers: int, credits: int, stages: int = 2) -> list[Step]:
    """The order that fills ``credits`` un-received dispatches, with ``stages`` token stages.

    More credits than stages change nothing: a stage's next attention needs its own answer.

    Raises:
        PlanError: ``layers`` is negative, or ``credits`` or ``stages`` is below one.
    """
    if layers < 0 or credits < 1 or stages < 1:
        raise PlanError(
            f"no order for {layers} layers, {stages} stages, {credits} credits",
            remedy="give layers >= 0, stages >= 1 and credits >= 1",
        )
    credits = min(credits, stages)
    items = [(layer, stage) for layer in range(layers) for stage in range(stages)]
    order: list[Step] = []
    for i, item in enumerate(items):
        receive = [Step("receive", *items[i - credits])] if i >= credits else []
        attention = [Step("attention", *item)]
        # With as many credits as stages the answer due is this stage's own, and attention needs it.
        order += receive + attention if credits == stages else attention + receive
        order.append(Step("dispatch", *item))
    order += [Step("receive", *item) for item in items[-credits:]]
    return order


def receive_first(layers: int, stages: int = 2) -> list[Step]:
    """The order for one credit: each dispatch waits for the answer before it."""
    return by_credits(layers, 1, stages)


def send_first(layers: int, stages: int = 2) -> list[Step]:
    """The order for one credit per stage: a stage dispatches as soon as it can."""
    return by_credits(layers, stages, stages)


def unsplit(layers: int) -> list[Step]:
    """The order of one stage: attention, dispatch, receive, layer by layer."""
    return by_credits(layers, 1, stages=1)


def credits_needed(order: Sequence[Step]) -> int:
    """Largest number of un-received dispatches on any prefix of ``order``, at least 1."""
    outstanding = most = 0
    for step in order:
        outstanding += (step.kind == "dispatch") - (step.kind == "receive")
        most = max(most, outstanding)
    return max(most, 1)


def check(order: Sequence[Step], credits: int) -> None:
    """Refuse an order that the attention side cannot run.

    Legal orders hold, on every prefix:

    1. each stage runs attention, dispatch, receive of one layer before the next, layers ascending;
    2. at most ``credits`` dispatches are un-received;
    3. answers are received in the order of their dispatches, as connectors deliver them;
    4. in each layer attention runs in stage order: a later stage reads the keys of earlier ones;

    and at the end everything is received and all stages ran the same layers.

    Raises:
        PlanError: with the position, step, layer and stage that break a rule.
    """
    if credits < 1:
        raise PlanError(
            f"credits={credits} allows no dispatch", remedy="a connector has at least one credit"
        )
    last: dict[int, Step] = {}
    waiting: deque[tuple[int, int]] = deque()
    attended: dict[int, list[int]] = {}
    for position, step in enumerate(order):
        item = (step.layer, step.stage)
        before = last.get(step.stage)
        if step.kind == "attention":
            if before is not None and before.kind != "receive":
                _refuse(position, step, f"the stage still has {before} open")
            if before is not None and step.layer <= before.layer:
                _refuse(position, step, f"layers must ascend, the stage just finished {before}")
            if step.stage and step.layer not in attended.get(step.stage - 1, ()):
                _refuse(position, step, f"stage {step.stage - 1} has not attended this layer yet")
            attended.setdefault(step.stage, []).append(step.layer)
        elif step.kind == "dispatch":
            if before != Step("attention", *item):
                _refuse(position, step, f"its attention must precede it, not {before}")
            if len(waiting) >= credits:
                held = ", ".join(f"dispatch({layer},{stage})" for layer, stage in waiting)
                _refuse(position, step, f"no credit left: {credits} allowed, un-received: {held}")
            waiting.append(item)
        else:
            if item not in waiting:
                _refuse(position, step, "nothing was dispatched for it")
            if waiting[0] != item:
                oldest = Step("dispatch", *waiting[0])
                _refuse(position, step, f"answers come in order, the oldest is of {oldest}")
            waiting.popleft()
        last[step.stage] = step
    for stage, step in last.items():
        if step.kind != "receive":
            _refuse(len(order), step, "the order ends with this step open")
        if attended[stage] != attended[0]:
            missing = sorted(set(attended[0]) ^ set(attended[stage]))
            _refuse(len(order), step, f"stages 0 and {stage} differ in layers {missing}")


def _refuse(position: int, step: Step, why: str) -> None:
    raise PlanError(
        f"illegal order at position {position}, {step}: {why}",
        layer=step.layer,
        stage=step.stage,
        remedy="build the order with schedule_ir.by_credits, or fix the pass that emitted it",
    )


def _not_negative(
    name: str, value: float, layer: int | None = None, stage: int | None = None
) -> float:
    if not value >= 0:
        raise PlanError(
            f"{name}={value!r} is not a time in seconds",
            layer=layer,
            stage=stage,
            remedy="give a number of seconds that is zero or more",
        )
    return value
