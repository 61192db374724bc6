"""Costs from measured steps instead of a data sheet: fit them at some sizes, predict at others.

1. Each recorded step gives one :class:`Sample` per stage: its load, and the medians over the MoE
   layers of what its attention, experts and links took.
2. :func:`fit` lays ``fixed + per_token * tokens + per_pair * pairs`` through the attention times
   and ``fixed + per_token * tokens`` through the others, by least squares.
3. :func:`predict` plays a step of any cut with the fitted costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from afd_graph.cluster.costs import StepCosts
from afd_graph.cluster.disaggregated import Fleet
from afd_graph.cluster.routing import VARIANTS
from afd_graph.cluster.steps import Step
from afd_graph.efficiency import Efficiency
from afd_graph.errors import PlanError


@dataclass(frozen=True)
class Sample:
    """One stage of one measured step; times are seconds per MoE layer.

    Attributes:
        tokens: tokens of the stage.
        pairs: queries times the keys that each attends to.
        attention_s: attention.
        ffn_s: experts.
        out_s: way out.
        back_s: way back.
        around_s: what the step took outside its MoE layers, shared by its stages.
    """

    tokens: int
    pairs: float
    attention_s: float
    ffn_s: float
    out_s: float
    back_s: float
    around_s: float


@dataclass(frozen=True)
class Curves:
    """Fitted costs in seconds: ``attention`` by (1, tokens, pairs), the others by (1, tokens)."""

    attention: tuple[float, float, float]
    ffn: tuple[float, float]
    out: tuple[float, float]
    back: tuple[float, float]
    around: tuple[float, float]


def pairs_between(low: int, high: int) -> float:
    """Query-key pairs of the positions ``low`` to ``high`` of one causal prompt."""
    return (high * (high + 1) - low * (low + 1)) / 2


def samples(step: Efficiency, bounds: Sequence[int]) -> list[Sample]:
    """The stages of a measured step of one prompt.

    Args:
        step: as measured (:func:`afd_graph.efficiency.efficiency`).
        bounds: first token of each stage, then the number of tokens.
    """
    _, _, out_s, back_s = step.costs.uniform()
    stages = list(itertools.pairwise(bounds))
    first = min(step.measured.layers)
    first_layer = sum(i.duration_s for i in step.measured.lane("attention") if i.layer == first)
    usual = [_per_layer(step, "attention", stage) for stage in range(len(stages))]
    around = step.tail_s + max(0.0, first_layer - sum(usual))
    return [
        Sample(
            high - low,
            pairs_between(low, high),
            usual[stage],
            _per_layer(step, "ffn", stage),
            out_s,
            back_s,
            around / len(stages),
        )
        for stage, (low, high) in enumerate(stages)
    ]


def _per_layer(step: Efficiency, engine: str, stage: int) -> float:
    spent: dict[int, float] = {}
    for interval in step.measured.lane(engine):
        if interval.stage == stage:
            spent[interval.layer] = spent.get(interval.layer, 0.0) + interval.duration_s
    return median(spent.values())


def fit(measured: Sequence[Sample]) -> Curves:
    """Least squares over the samples, relative: every sample counts the same.

    Raises:
        PlanError: fewer than three different stages.
    """
    if len({(s.tokens, s.pairs) for s in measured}) < 3:
        raise PlanError(
            "fewer than three different stages cannot tell tokens from pairs",
            remedy="measure steps of several sizes, split and unsplit",
        )

    def line(name: str, *columns: str) -> tuple[float, ...]:
        times = np.array([getattr(s, name) for s in measured])
        terms = np.array([[1.0, *(getattr(s, c) for c in columns)] for s in measured])
        scale = 1 / np.maximum(times, 1e-9)
        found = np.linalg.lstsq(terms * scale[:, None], times * scale, rcond=None)[0]
        return tuple(float(value) for value in found)

    attention = line("attention_s", "tokens", "pairs")
    lines = {name: line(f"{name}_s", "tokens") for name in ("ffn", "out", "back", "around")}
    return Curves(attention, **lines)  # type: ignore[arg-type]


def predict(curves: Curves, bounds: Sequence[int], layers: int, credits: int) -> float:
    """Seconds of a step of one prompt on one attention and one expert engine.

    Args:
        curves: fitted costs.
        bounds: first token of each stage, then the number of tokens.
        layers: MoE layers.
        credits: un-received dispatches allowed.
    """
    stages = list(itertools.pairwise(bounds))
    tokens = [high - low for low, high in stages]
    none = [0.0] * len(stages)

    def straight(curve: tuple[float, float], count: int) -> float:
        return max(0.0, curve[0] + curve[1] * count)

    fixed, per_token, per_pair = curves.attention
    attention = [
        max(0.0, fixed + per_token * (high - low) + per_pair * pairs_between(low, high))
        for low, high in stages
    ]
    costs = StepCosts(
        0.0,
        sum(straight(curves.around, count) for count in tokens),
        attention,
        none,
        none,
        none,
        [straight(curves.ffn, count) for count in tokens],
        none,
        0.0,
        none,
        none,
        max(straight(curves.out, count) for count in tokens),
        max(straight(curves.back, count) for count in tokens),
    )
    steps = [Step(0.0, sum(tokens), costs, None)]
    fleet = Fleet(
        layers=layers,
        stages=len(stages),
        credits=credits,
        shares=np.ones((layers, VARIANTS, 1)),
        next_step=lambda replica, now: steps.pop() if steps else None,
        end_step=lambda replica, now: None,
        replica_slowness=np.ones(1),
        rank_slowness=np.ones(1),
    )
    fleet.run()
    return float(fleet.end_s[0])
