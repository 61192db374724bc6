"""What a cut costs: attention work by position, and the time of a pipelined step.

Two models, both host arithmetic on a handful of numbers:

* *work*: a token at position ``j`` attends to ``j`` earlier ones, so a range of positions
  ``[lo, hi)`` of one request costs ``p * (hi - lo) + q * (hi**2 - lo**2)``. Equal tokens are
  therefore not equal work: for one fresh, purely quadratic prompt the second half costs three
  times the first.
* *pipeline*: one attention engine, one expert engine, links that do not contend. Each item
  (layer, stage) goes attention, dispatch, experts, combine; the schedule follows the connector's
  credits (receive-first with one, send-first with more).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from afd_graph.errors import PlanError


@dataclass(frozen=True)
class StageTimes:
    """Seconds one stage spends in one MoE layer.

    Attributes:
        attention: attention, gate and everything else that stays on the attention rank.
        dispatch: rows on their way to the experts.
        experts: expert computation.
        combine: rows on their way back.
        shared: of ``attention``, what an unsplit step computes while its rows are away.
    """

    attention: float
    dispatch: float
    experts: float
    combine: float
    shared: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the cost model, and the context of this step's requests.

    Only ``linear``, ``quadratic`` and ``context_lens`` matter to the ``cost`` policy, and there
    only the ratio of the first two. ``auto`` predicts seconds and needs them all.

    Attributes:
        context_lens: tokens of each request already in the KV cache before this step, in batch
            order; ``None`` means that every request starts fresh.
        linear: ``p``, seconds per token and layer on the attention rank (projections, norms, gate).
        quadratic: ``q``, seconds per squared position and layer (core attention).
        attention_overhead: seconds of one attention call, whatever its size.
        experts: ``f``, seconds per token and layer on the expert side.
        experts_overhead: seconds of one expert call, whatever its size.
        dispatch: ``c``, seconds per token and layer to the experts.
        combine: ``d``, seconds per token and layer back.
        latency: seconds on the way to the experts, whatever the number of rows.
        shared: seconds per token and layer of shared experts on the attention rank, contained in
            ``linear``; an unsplit step computes them while its rows are away.
        shared_overhead: seconds of them whatever the number of tokens, contained in
            ``attention_overhead``.
        num_layers: number of MoE layers.
        credits: un-received dispatches that the connector allows per attention rank.

    Raises:
        PlanError: a negative or non-finite coefficient, ``linear`` and ``quadratic`` both zero,
            or a non-positive ``num_layers`` or ``credits``.
    """

    context_lens: Sequence[int] | None = None
    linear: float = 1.0
    quadratic: float = 0.0
    attention_overhead: float = 0.0
    experts: float = 0.0
    experts_overhead: float = 0.0
    dispatch: float = 0.0
    combine: float = 0.0
    latency: float = 0.0
    shared: float = 0.0
    shared_overhead: float = 0.0
    num_layers: int = 1
    credits: int = 1

    def __post_init__(self) -> None:
        for name in (
            "linear",
            "quadratic",
            "attention_overhead",
            "experts",
            "experts_overhead",
            "dispatch",
            "combine",
            "latency",
            "shared",
            "shared_overhead",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(
                    f"costs.{name} must be finite and not negative: {name}={value!r}",
                    remedy="measure it with the benchmarks, in seconds",
                )
        if self.linear == 0 and self.quadratic == 0:
            raise PlanError(
                "costs.linear and costs.quadratic are both zero",
                remedy="give attention some work, or use the token policy",
            )
        for name in ("num_layers", "credits"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"costs.{name} must be positive: {name}={getattr(self, name)!r}",
                    remedy="take it from the model or the connector",
                )

    def attention_work(self, num_scheduled_tokens: Sequence[int]) -> AttentionWork:
        """Prepare the work curve of one step.

        Raises:
            PlanError: ``context_lens`` has another length than the batch, or a negative entry.
        """
        contexts = self.context_lens
        if contexts is None:
            contexts = (0,) * len(num_scheduled_tokens)
        if len(contexts) != len(num_scheduled_tokens):
            raise PlanError(
                "costs.context_lens must have one entry per request: "
                f"context_lens={len(contexts)}, requests={len(num_scheduled_tokens)}",
                remedy="pass the computed tokens of exactly the scheduled requests",
            )
        if contexts and min(contexts) < 0:
            raise PlanError(
                f"costs.context_lens must not be negative: context_lens={tuple(contexts)!r}",
                remedy="pass the number of tokens already in the KV cache",
            )
        # In units of p (of q when p is zero), so that a purely linear cost stays exact integers
        # and ties are broken exactly like the token policy breaks them.
        unit, base, slope = (
            (self.linear, 1, self.quadratic / self.linear)
            if self.linear
            else (self.quadratic, 0, 1.0)
        )
        return AttentionWork(num_scheduled_tokens, contexts, unit, base, slope)

    def stage_times(self, work: float, tokens: int) -> StageTimes:
        """Times of a stage with ``work`` seconds of attention and ``tokens`` physical rows."""
        return StageTimes(
            attention=self.attention_overhead + work,
            dispatch=self.latency + self.dispatch * tokens,
            experts=self.experts_overhead + self.experts * tokens,
            combine=self.combine * tokens,
            shared=self.shared_overhead + self.shared * tokens,
        )

    def unsplit_seconds(self, step: StageTimes) -> float:
        """Predicted seconds of all MoE layers without a split."""
        away = step.dispatch + step.experts + step.combine
        return self.num_layers * (step.attention - step.shared + max(step.shared, away))

    def pipeline_seconds(self, first: StageTimes, second: StageTimes) -> float:
        """Predicted seconds of all MoE layers with two stages, which may be unequal.

        The experts serve items in the order of their dispatch. For equal stages this reproduces
        the closed forms of the pipeline model exactly. The recurrence is linear in (max, +), so
        once a layer advances every clock by the same amount all later layers do, and the rest is
        extrapolated.
        """
        # Clocks: attention engine, expert engine, and the last combine received by each stage.
        # Plain names and comparisons, since this runs for every candidate of every step.
        attention = experts = received_0 = received_1 = 0.0
        attention_0, attention_1 = first.attention, second.attention
        dispatch_0, dispatch_1 = first.dispatch, second.dispatch
        one_credit = self.credits == 1
        for layer in range(self.num_layers):
            before = attention, experts, received_0, received_1
            attention = (attention if attention > received_0 else received_0) + attention_0
            if one_credit and received_1 > attention:
                attention = received_1  # the other stage still holds the only credit
            arrival = attention + dispatch_0
            experts = (arrival if arrival > experts else experts) + first.experts
            received_0 = experts + first.combine

            attention = (attention if attention > received_1 else received_1) + attention_1
            if one_credit and received_0 > attention:
                attention = received_0
            arrival = attention + dispatch_1
            experts = (arrival if arrival > experts else experts) + second.experts
            received_1 = experts + second.combine

            advance = attention - before[0]
            slack = 1e-12 * received_1
            if (
                abs(experts - before[1] - advance) <= slack
                and abs(received_0 - before[2] - advance) <= slack
                and abs(received_1 - before[3] - advance) <= slack
            ):
                remaining = (self.num_layers - 1 - layer) * advance
                return max(received_0, received_1) + remaining
        return max(received_0, received_1)


class AttentionWork:
    """The cumulative attention work of one step along its flattened token axis.

    Work of ``x`` tokens of a request with context ``c``, in units of ``unit`` seconds, is
    ``x * (base + slope * (2 * c + x))``.
    """

    def __init__(
        self,
        counts: Sequence[int],
        contexts: Sequence[int],
        unit: float,
        base: int,
        slope: float,
    ) -> None:
        self.unit = unit
        self._contexts = contexts
        self._base = base
        self._slope = slope
        work = (x * (base + slope * (2 * c + x)) for x, c in zip(counts, contexts, strict=True))
        self._cumulative = list(accumulate(work, initial=0.0))

    @property
    def total(self) -> float:
        """Work of the whole step, in units."""
        return self._cumulative[-1]

    @property
    def cumulative(self) -> Sequence[float]:
        """Work before each request, then the total, in units."""
        return self._cumulative

    def before(self, request: int, tokens: int) -> float:
        """Work, in units, of every token before token ``tokens`` of ``request``."""
        done = tokens * (self._base + self._slope * (2 * self._contexts[request] + tokens))
        return self._cumulative[request] + done
