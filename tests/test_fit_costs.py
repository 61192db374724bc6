"""Costs fitted to traces: known ones are found again, and the policy ``auto`` decides by them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from afd_graph.cli.group import afd_graph
from afd_graph.cost_model import CostModel
from afd_graph.errors import PlanError
from afd_graph.fit_costs import fit_costs
from afd_graph.planner import NoSplit, StagePlan, plan_stages
from afd_graph.runtime import Event
from afd_graph.schedule_ir import by_credits
from afd_graph.tracing import Trace, TracedStep

LAYERS = 5
KNOWN = CostModel(
    linear=20e-6,
    quadratic=0.02e-6,
    attention_overhead=1e-3,
    experts=25e-6,
    experts_overhead=0.8e-3,
    dispatch=0.5e-6,
    combine=0.3e-6,
    latency=0.1e-3,
    shared=4e-6,
    shared_overhead=0.3e-3,
    num_layers=LAYERS,
    credits=2,
)


def played(tokens: list[int], context: int = 0, slower: float = 1.0) -> TracedStep:
    """A step of one request, cut in stages of ``tokens``, on a machine with the known costs."""
    times, pairs, done = [], [], context
    for count in tokens:
        seconds = replace(KNOWN, context_lens=[done]).attention_work([count])
        times.append(KNOWN.stage_times(seconds.total * seconds.unit * slower, count))
        pairs.append(count * done + count * (count + 1) // 2)
        done += count
    unsplit = len(tokens) == 1
    now = ffn_free = 0.0
    answered: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {}
    events = []

    def ns(seconds: float) -> int:
        return round(seconds * 1e9)

    for step in by_credits(LAYERS, 2, len(tokens)):
        item, cost = (step.layer, step.stage), times[step.stage]
        if step.kind == "attention":
            now += cost.attention - (cost.shared if unsplit else 0.0)
        elif step.kind == "dispatch":
            events.append(Event("dispatch", *item, ns(now), ns(now), tokens[step.stage]))
            begin = max(now + cost.dispatch, ffn_free)
            ffn_free = begin + cost.experts
            answered[item] = ffn_free + cost.combine, (ns(begin), ns(ffn_free))
            now += cost.shared if unsplit else 0.0
        else:
            begin, (until, ffn) = now, answered[item]
            now = max(now, until)
            events.append(Event("receive", *item, ns(begin), ns(now), tokens[step.stage], ffn))
    reason = "disabled" if unsplit else None
    return TracedStep(0, ns(now), None if unsplit else "token", reason, tuple(events), tuple(pairs))


def trace(*steps: TracedStep) -> Trace:
    return Trace(steps, credits=2)


RUN = trace(
    *(played([tokens]) for tokens in (600, 300, 150, 40)),
    *(played([tokens, tokens]) for tokens in (400, 256, 100, 30)),
    *(played([4], context) for context in (20, 100, 300)),
    *(played([2, 2], context) for context in (50, 200)),
)


def test_known_costs_are_found_again():
    found = fit_costs([RUN])
    assert found.samples == 19
    assert found.attention_error < 0.01
    assert found.costs.num_layers == LAYERS
    assert found.costs.credits == 2
    for name in ("linear", "quadratic", "attention_overhead", "experts", "experts_overhead"):
        assert getattr(found.costs, name) == pytest.approx(getattr(KNOWN, name), rel=0.05), name
    for name in ("shared", "shared_overhead"):
        assert getattr(found.costs, name) == pytest.approx(getattr(KNOWN, name), rel=0.05), name


def test_steps_that_were_held_up_do_not_count():
    held_up = [played([tokens], slower=6.0) for tokens in (500, 200)]
    found = fit_costs([trace(*RUN.steps, *held_up)])
    assert found.costs.linear == pytest.approx(KNOWN.linear, rel=0.1)


def test_profile_runs_do_not_count():
    profile = replace(played([1024], slower=0.1), pairs=())
    assert fit_costs([trace(profile, *RUN.steps)]) == fit_costs([RUN])


def test_without_pairs_attention_is_linear():
    steps = [replace(step, pairs=()) for step in RUN.steps]
    costs = fit_costs([trace(*steps)]).costs
    assert costs.quadratic == 0
    assert costs.linear > KNOWN.linear


def test_no_coefficient_is_negative_whatever_the_times():
    steps = [played([64]), played([128]), replace(played([600], slower=0.05), pairs=(1,))]
    costs = fit_costs([trace(*steps)]).costs
    assert costs.linear > 0
    assert costs.attention_overhead >= 0


def test_auto_with_fitted_costs_cuts_prompts_and_leaves_single_tokens():
    costs = fit_costs([RUN]).costs
    assert isinstance(plan_stages([600], split="auto", costs=costs), StagePlan)
    decoding = replace(costs, context_lens=[300] * 4)
    assert isinstance(plan_stages([1] * 4, split="auto", costs=decoding), NoSplit)


def test_one_size_is_refused():
    with pytest.raises(PlanError, match="2 stages of one size"):
        fit_costs([trace(played([64, 64]))])


def test_a_run_without_a_trace_is_refused():
    for traces in ([], [trace()]):
        with pytest.raises(PlanError, match="no traced step"):
            fit_costs(traces)


def test_unsplit_time_hides_shared_experts_behind_the_way_of_the_rows():
    whole = KNOWN.stage_times(1e-2, 100)
    away = whole.dispatch + whole.experts + whole.combine
    assert KNOWN.unsplit_seconds(whole) == pytest.approx(
        LAYERS * (whole.attention - whole.shared + away)
    )
    shared = replace(whole, shared=2 * away)
    assert KNOWN.unsplit_seconds(shared) == pytest.approx(LAYERS * whole.attention)


def test_command_prints_costs_that_the_options_take(tmp_path):
    RUN.write(tmp_path / "trace.rank0.json")
    assert Trace.read(tmp_path / "trace.rank0.json") == RUN
    another = tmp_path / "another run of the same rank"
    another.mkdir()
    RUN.write(another / "trace.rank0.json")
    result = CliRunner().invoke(afd_graph, ["costs", str(tmp_path), str(another)])
    assert result.exit_code == 0, result.output
    assert CostModel(**json.loads(result.stdout)) == fit_costs([RUN, RUN]).costs
    assert "one prompt: a split is predicted to pay from" in result.stderr
    asked = CliRunner().invoke(afd_graph, ["costs", str(tmp_path), "--json"])
    pays = json.loads(asked.stdout)["pays_from_tokens"]
    assert 4 < pays["one prompt"] < 600
