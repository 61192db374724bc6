"""Costs for the policies ``cost`` and ``auto``, from traces of the machine that serves.

1. Every stage of every traced step is a sample: its tokens and query-key pairs, and the medians
   over the MoE layers of what attention, experts and links took.
2. A straight line is laid through each: least squares of relative errors, no coefficient below
   zero, without the samples that other work on the machine held up.

Split and unsplit steps both count. Only unsplit ones tell what attention computes while its rows
are away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from afd_graph.cost_model import CostModel
from afd_graph.errors import PlanError
from afd_graph.planner import NoSplit, plan_stages
from afd_graph.timeline import Timeline, measure
from afd_graph.tracing import Trace, TracedStep, clock_offset

DECODING_CONTEXT = 512
"""Tokens in the cache of a request that decodes, for :func:`pays_from`."""

_SIZES = [2, *range(4, 64, 4), *range(64, 512, 32), *range(512, 4097, 256)]
_LEAST_S = 1e-7  # what a clock does not tell from nothing
_HELD_UP = 3.0  # a sample this many times as far off as the usual one is left out
_ROUNDS = 3


@dataclass(frozen=True)
class Fit:
    """Costs, and how far off they are.

    Attributes:
        costs: fitted.
        samples: stages that they were fitted to.
        attention_error: median relative error of the attention times.
        experts_error: median relative error of the experts' times.
    """

    costs: CostModel
    samples: int
    attention_error: float
    experts_error: float


@dataclass(frozen=True)
class _Sample:
    tokens: int
    pairs: int
    attention_s: float
    experts_s: float
    out_s: float
    back_s: float
    shared_s: float | None


def fit_costs(traces: Sequence[Trace]) -> Fit:
    """Fit a cost model to traces of one model.

    Args:
        traces: of steps of several sizes; with their query-key pairs also the quadratic part of
            attention is found.

    Raises:
        PlanError: no traced step, fewer than two sizes, or nothing is known of the experts.
    """
    samples: list[_Sample] = []
    layers = 0
    # Where pairs are known, a step without them is a profile run, which does not attend.
    with_pairs = any(step.pairs for trace in traces for step in trace.steps)
    for trace in traces:
        for number, step in enumerate(trace.steps):
            if step.events and (step.pairs or not with_pairs):
                layers = max(layers, len({event.layer for event in step.events}))
                samples += _samples(step, trace.timeline(number))
    if not samples:
        raise PlanError(
            "there is no traced step to fit costs to",
            remedy="run with the options trace and dump_dir, and end the run: the trace is written "
            "when the backend is closed",
        )
    if len({sample.tokens for sample in samples}) < 2:
        raise PlanError(
            f"{len(samples)} stages of one size cannot tell fixed costs from costs per token",
            remedy="trace steps of several sizes, such as prompts and decoding",
        )
    tokens, pairs = (np.array([getattr(s, n) for s in samples]) for n in ("tokens", "pairs"))
    once = np.ones(len(samples))

    def times(name: str) -> np.ndarray:
        return np.maximum([getattr(sample, name) for sample in samples], _LEAST_S)

    attention, attention_error = _line(times("attention_s"), once, tokens, pairs)
    experts, experts_error = _line(times("experts_s"), once, tokens)
    out, _ = _line(times("out_s"), once, tokens)
    back, _ = _line(times("back_s"), once, tokens)
    unsplit = [s for s in samples if s.shared_s is not None]
    shared = np.zeros(2)
    if unsplit:
        shared, _ = _line(
            np.maximum([s.shared_s or 0.0 for s in unsplit], _LEAST_S),
            np.ones(len(unsplit)),
            np.array([s.tokens for s in unsplit]),
        )
    fixed, per_token, per_pair = (float(value) for value in attention)
    # x tokens behind c others are x * c + x * (x + 1) / 2 pairs; the cost model counts positions.
    linear = per_token + per_pair / 2
    costs = CostModel(
        linear=max(linear, _LEAST_S / max(1, int(tokens.max()))),
        quadratic=per_pair / 2,
        attention_overhead=fixed,
        experts_overhead=float(experts[0]),
        experts=float(experts[1]),
        latency=float(out[0] + back[0]),
        dispatch=float(out[1]),
        combine=float(back[1]),
        shared_overhead=min(float(shared[0]), fixed),
        shared=min(float(shared[1]), linear),
        num_layers=layers,
        credits=min(trace.credits for trace in traces),
    )
    return Fit(costs, len(samples), attention_error, experts_error)


def pays_from(costs: CostModel, *, prompt: bool) -> int | None:
    """The least number of tokens from which on ``auto`` cuts every larger step.

    Args:
        costs: of the machine.
        prompt: whether the step is one prompt; else every token is one of a request that decodes
            behind :data:`DECODING_CONTEXT` others.

    Returns:
        None when no step up to some thousand tokens is cut.
    """
    least: int | None = None
    for tokens in reversed(_SIZES):
        counts = [tokens] if prompt else [1] * tokens
        contexts = [0 if prompt else DECODING_CONTEXT] * len(counts)
        step = plan_stages(counts, split="auto", costs=replace(costs, context_lens=contexts))
        if isinstance(step, NoSplit):
            break
        least = tokens
    return least


def _samples(step: TracedStep, timeline: Timeline) -> list[_Sample]:
    costs = measure(step.events, ffn_clock_ns=clock_offset(step.events)).costs
    if costs is None:
        raise PlanError(
            "nothing is known of the experts in these steps",
            remedy="trace over a connector that implements ffn_times",
        )
    _, _, out_s, back_s = costs.uniform()
    pairs = step.pairs or (0,) * len(step.rows)
    stages = timeline.stages
    shared_s = _while_away(step) if len(stages) == 1 else None
    return [
        _Sample(
            tokens,
            pairs[place],
            _usual(timeline, "attention", stage),
            _usual(timeline, "ffn", stage),
            out_s,
            back_s,
            shared_s,
        )
        for place, (stage, tokens) in enumerate(zip(stages, step.rows, strict=True))
    ]


def _usual(timeline: Timeline, engine: str, stage: int) -> float:
    spent = dict.fromkeys(timeline.layers, 0.0)
    for interval in timeline.lane(engine):
        if interval.stage == stage:
            spent[interval.layer] += interval.duration_s
    return median(spent.values())


def _while_away(step: TracedStep) -> float:
    """What the attention side computes between a dispatch and its receive, in seconds."""
    sent = {event.layer: event.end_ns for event in step.events if event.kind == "dispatch"}
    return median(
        (event.begin_ns - sent[event.layer]) * 1e-9
        for event in step.events
        if event.kind == "receive"
    )


def _line(times: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, float]:
    """Coefficients of the columns, and the median relative error."""
    terms = np.stack(columns, axis=1) / times[:, None]
    kept = np.ones(len(times), dtype=bool)
    for _ in range(_ROUNDS):
        found = _not_negative(terms[kept])
        errors = np.abs(terms @ found - 1)
        usual = float(np.median(errors[kept]))
        kept = errors <= max(_HELD_UP * usual, 1e-9)
    return found, usual


def _not_negative(terms: np.ndarray) -> np.ndarray:
    """Coefficients, none negative, with which the columns of ``terms`` sum to one in each row."""
    used = list(range(terms.shape[1]))
    found = np.zeros(terms.shape[1])
    while used:
        solved = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)[0]
        if solved.min() >= 0:
            found[used] = solved
            break
        used.pop(int(solved.argmin()))
    return found
