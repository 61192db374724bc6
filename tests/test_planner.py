"""The planner against the recorded reference, its laws, and the cost and pipeline models."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from host_cases import case_id, load, recorded_stage, token_counts
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from afd_graph.cost_model import CostModel, StageTimes
from afd_graph.errors import AFDError, PlanError
from afd_graph.planner import NoSplit, NoSplitReason, Stage, StagePlan, plan_stages
from afd_graph.schedule_ir import StageCosts, by_credits
from afd_graph.simulate import simulate


def values_in(message: str) -> list[str]:
    """The values that a recorded message names, in order."""
    return re.findall(r"=(\([^)]*\)|-?\d+)|('[^']*')", message)


# -- recorded cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", load("planner_cases"), ids=case_id)
def test_recorded_case(case):
    given_, expected = case["input"], case["main"]

    def plan(**options):
        return plan_stages(
            given_["num_scheduled_tokens"],
            split=given_["split"],
            sequence_parallel=given_["use_sequence_parallel"],
            tensor_parallel_size=given_["tensor_parallel_size"],
            **options,
        )

    if expected["kind"] == "error":
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the values are checked below
            plan(require_tensor_parallel=True)
        assert isinstance(error.value, AFDError)
        position = 0
        for value in map("".join, values_in(expected["message"])):
            position = error.value.what.index(value, position) + len(value)
        return
    result = plan(require_tensor_parallel=True)
    if expected["kind"] == "none":
        assert isinstance(result, NoSplit)
        if result.reason is NoSplitReason.TENSOR_PARALLEL_REQUIRED:
            # On purpose: one tensor-parallel rank can be cut, unless the caller says otherwise.
            assert isinstance(plan(), StagePlan)
    else:
        assert [recorded_stage(stage) for stage in result.stages] == expected["stages"]


def test_errors_come_in_the_recorded_order():
    with pytest.raises(PlanError, match="must all be positive"):
        plan_stages([4, 0], split="bogus", tensor_parallel_size=0, alignment=0)
    with pytest.raises(PlanError, match="tensor_parallel_size must be positive"):
        plan_stages([4, 1], split="bogus", tensor_parallel_size=0, alignment=0)
    with pytest.raises(PlanError, match="Unsupported split policy: 'bogus'"):
        plan_stages([4, 1], split="bogus", alignment=0)
    with pytest.raises(PlanError, match="alignment must be positive: alignment=0"):
        plan_stages([4, 1], split="token", alignment=0)


@pytest.mark.parametrize("counts", [np.array([5, 4]), torch.tensor([5, 4]), (5, 4), iter([5, 4])])
def test_counts_of_any_integer_container(counts):
    assert plan_stages(counts, split="token").stages[0].token_slice == slice(0, 5)


def test_fractional_counts_are_an_error():
    with pytest.raises(PlanError, match="must be integers"):
        plan_stages([2.5, 4], split="token")


# -- laws of every plan ----------------------------------------------------------------------------


def check_laws(counts, plan, *, tensor_parallel_size=1, sequence_parallel=False):
    total = sum(counts)
    first, second = plan.stages
    assert (first.token_slice.start, second.token_slice.stop) == (0, total)
    assert first.token_slice.stop == second.token_slice.start
    starts = list(itertools.accumulate(counts, initial=0))
    for stage in plan.stages:
        assert stage.actual_tokens == stage.token_slice.stop - stage.token_slice.start > 0
        unit = tensor_parallel_size if sequence_parallel else 1
        assert stage.input_tokens % unit == 0
        assert 0 <= stage.padding < unit
        touched = [
            request
            for request in range(len(counts))
            if starts[request] < stage.token_slice.stop
            and starts[request + 1] > stage.token_slice.start
        ]
        assert list(range(stage.request_slice.start, stage.request_slice.stop)) == touched


@settings(max_examples=5000, deadline=None)
@given(
    token_counts(),
    st.sampled_from(["token", "request"]),
    st.integers(1, 8),
    st.booleans(),
)
def test_coverage_order_and_balance(counts, split, tensor_parallel_size, sequence_parallel):
    options = {
        "tensor_parallel_size": tensor_parallel_size,
        "sequence_parallel": sequence_parallel,
    }
    plan = plan_stages(counts, split=split, **options)
    total = sum(counts)
    if isinstance(plan, NoSplit):
        assert total < 2 or (split == "request" and len(counts) < 2)
        return
    check_laws(counts, plan, **options)
    first, second = plan.stages
    if split == "token":
        assert first.actual_tokens - second.actual_tokens in (0, 1)
    else:
        starts = list(itertools.accumulate(counts, initial=0))
        best = min(
            range(1, len(counts)),
            key=lambda k: (abs(2 * starts[k] - total), abs(2 * k - len(counts)), k),
        )
        assert first.request_slice == slice(0, best)
        assert second.request_slice == slice(best, len(counts))


@settings(max_examples=3000, deadline=None)
@given(token_counts(), st.sampled_from(["token", "request", "cost"]), st.integers(1, 64))
def test_alignment(counts, split, alignment):
    costs = CostModel(linear=0, quadratic=1)
    plan = plan_stages(counts, split=split, alignment=alignment, costs=costs)
    starts = list(itertools.accumulate(counts))
    allowed = starts[:-1] if split == "request" else range(1, sum(counts))
    allowed = [cut for cut in allowed if cut % alignment == 0]
    if isinstance(plan, NoSplit):
        assert not allowed
        return
    check_laws(counts, plan)
    cut = plan.stages[1].token_slice.start
    assert cut in allowed
    if split == "token":
        ideal = (sum(counts) + 1) // 2
        assert abs(cut - ideal) == min(abs(other - ideal) for other in allowed)


def work(tokens, context, costs):
    """Attention work of the first ``tokens`` tokens of one request, one by one."""
    return sum(
        costs.linear + costs.quadratic * ((position + 1) ** 2 - position**2)
        for position in range(context, context + tokens)
    )


@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_cost_is_the_most_balanced_cut(data):
    counts = data.draw(token_counts(max_requests=4, max_tokens=12))
    contexts = data.draw(st.lists(st.integers(0, 30), min_size=len(counts), max_size=len(counts)))
    linear, quadratic = data.draw(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: sum(pair) > 0)
    )
    costs = CostModel(contexts, linear=linear, quadratic=quadratic)
    plan = plan_stages(counts, split="cost", costs=costs)
    total = sum(counts)
    if total < 2:
        assert plan.reason is NoSplitReason.SINGLE_TOKEN
        return
    check_laws(counts, plan)
    per_token = [
        work(token + 1, context, costs) - work(token, context, costs)
        for count, context in zip(counts, contexts, strict=True)
        for token in range(count)
    ]

    def imbalance(cut):
        return abs(sum(per_token[:cut]) - sum(per_token[cut:]))

    cut = plan.stages[1].token_slice.start
    assert imbalance(cut) == pytest.approx(min(map(imbalance, range(1, total))))


@settings(max_examples=1000, deadline=None)
@given(token_counts(), st.floats(1e-9, 1e3))
def test_linear_cost_is_the_token_policy(counts, linear):
    token = plan_stages(counts, split="token")
    cost = plan_stages(counts, split="cost", costs=CostModel(linear=linear))
    assert getattr(cost, "stages", None) == getattr(token, "stages", None)


def test_quadratic_cost_of_one_prompt_cuts_at_the_square_root():
    costs = CostModel(linear=0, quadratic=1)
    plan = plan_stages([10_000], split="cost", costs=costs)
    assert plan.stages[0].actual_tokens == round(10_000 * math.sqrt(0.5))


# -- reasons ---------------------------------------------------------------------------------------

FAST_EXPERTS = CostModel(linear=1e-6, attention_overhead=1.0, num_layers=58)


@pytest.mark.parametrize(
    ("reason", "counts", "options"),
    [
        (NoSplitReason.DISABLED, [8, 8], {"split": "none"}),
        (NoSplitReason.METADATA_MISSING, None, {"split": "token"}),
        (NoSplitReason.SINGLE_TOKEN, [1], {"split": "token"}),
        (NoSplitReason.SINGLE_TOKEN, [1], {"split": "request"}),
        (NoSplitReason.BELOW_MIN_TOKENS, [8, 7], {"split": "token", "min_tokens": 16}),
        (NoSplitReason.SINGLE_REQUEST, [18], {"split": "request"}),
        (
            NoSplitReason.TENSOR_PARALLEL_REQUIRED,
            [8, 8],
            {"split": "token", "require_tensor_parallel": True},
        ),
        (NoSplitReason.ALIGNMENT, [8], {"split": "token", "alignment": 8}),
        (NoSplitReason.ALIGNMENT, [7, 9], {"split": "request", "alignment": 8}),
        (NoSplitReason.PREFIX_HAZARD, [8, 8], {"split": "token", "hazards": lambda p: "block 3"}),
        (NoSplitReason.UNSPLIT_FASTER, [8, 8], {"split": "auto", "costs": FAST_EXPERTS}),
    ],
)
def test_reason(reason, counts, options):
    result = plan_stages(counts, **options)
    assert isinstance(result, NoSplit)
    assert result.reason is reason
    assert result.reason == str(reason)
    assert result.detail


def test_every_reason_has_a_test():
    tested = {mark[0] for mark in test_reason.pytestmark[0].args[1]}
    assert tested == set(NoSplitReason)


@pytest.mark.parametrize("split", ["cost", "auto"])
def test_costs_are_required_by_name(split):
    with pytest.raises(PlanError, match=f"split='{split}' needs a cost model: costs=None"):
        plan_stages([8, 8], split=split)


def test_costs_must_fit_the_batch():
    with pytest.raises(PlanError, match="context_lens=1, requests=2"):
        plan_stages([8, 8], split="cost", costs=CostModel([3]))
    with pytest.raises(PlanError, match="quadratic must be finite and not negative"):
        CostModel(quadratic=-1)


def test_hazards_see_the_candidate():
    seen = []
    plan = plan_stages([8, 8], split="request", hazards=seen.append)
    assert seen == [plan]


# -- the plan checks itself ------------------------------------------------------------------------


def stages(*extents, requests=None):
    requests = requests or [slice(0, 1)] * len(extents)
    return tuple(
        Stage(request, slice(start, stop), rows, real)
        for request, (start, stop, rows, real) in zip(requests, extents, strict=True)
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ((), "at least one stage"),
        (stages((1, 4, 3, 3)), "tile"),
        (stages((0, 4, 4, 4), (5, 8, 3, 3)), "tile"),
        (stages((0, 4, 4, 4), (4, 4, 0, 0)), "tile"),
        (stages((0, 4, 4, 3)), "actual_tokens=3"),
        (stages((0, 4, 3, 4)), "input_tokens=3 cannot hold"),
        (stages((0, 4, 4, 4), (4, 8, 4, 4), requests=[slice(0, 1), slice(2, 3)]), "without a gap"),
    ],
)
def test_inconsistent_plan_is_refused(broken, message):
    with pytest.raises(PlanError, match=message):
        StagePlan(broken)


def test_parent_must_cover_the_plan():
    plan = plan_stages([8, 8], split="token")
    plan.check_parent(16)
    with pytest.raises(PlanError, match="parent_tokens=15, num_tokens=16"):
        plan.check_parent(15)


def test_without_sequence_parallel_drops_the_padding():
    plan = plan_stages([5], split="token", sequence_parallel=True, tensor_parallel_size=4)
    assert [stage.padding for stage in plan.stages] == [1, 2]
    plain = plan.without_sequence_parallel()
    assert [stage.padding for stage in plain.stages] == [0, 0]
    assert not plain.sequence_parallel


def test_stages_are_hashable_and_distinct():
    first, second = plan_stages([10], split="token").stages
    assert len({first, second, first}) == 2


# -- the pipeline model and the auto policy --------------------------------------------------------

GOLDEN = [
    # a, f, c, d per stage, then seconds: unsplit, send-first, receive-first; 58 layers
    (1, 1, 0, 0, 232, 117, 117),
    (1, 0.5, 0.25, 0.25, 232, 117, 117),
    (1, 1, 0.1, 0.1, 255.2, 128.6, 140.2),
    (1, 1, 0.25, 0.25, 290, 146, 175),
    (0.5, 1, 0.1, 0.1, 197.2, 116.7, 139.7),
    (1, 0.6, 0.5, 0.5, 301.6, 151.8, 186.6),
    (1, 1.5, 0.25, 0.25, 348, 175.5, 233),
]


@pytest.mark.parametrize(("a", "f", "c", "d", "unsplit", "send", "receive"), GOLDEN)
def test_pipeline_model_golden_table(a, f, c, d, unsplit, send, receive):
    stage, whole = StageTimes(a, c, f, d), StageTimes(2 * a, 2 * c, 2 * f, 2 * d)
    assert CostModel(num_layers=58).unsplit_seconds(whole) == pytest.approx(unsplit)
    two_credits = CostModel(num_layers=58, credits=2)
    assert two_credits.pipeline_seconds(stage, stage) == pytest.approx(send)
    assert CostModel(num_layers=58).pipeline_seconds(stage, stage) == pytest.approx(receive)


SECONDS = st.one_of(st.just(0.0), st.floats(0.01, 4))
TIMES = st.builds(StageTimes, st.floats(0.01, 4), SECONDS, SECONDS, SECONDS)


@settings(max_examples=2000, deadline=None)
@given(TIMES, TIMES, st.integers(1, 20), st.integers(1, 2))
def test_pipeline_model_is_the_event_simulation(first, second, layers, credits):
    """The closed recurrence of the planner against the simulator, for unequal stages too."""
    both = first, second
    for one, other in (both, both[::-1]):
        # The simulator lets an item overtake on the link; the model keeps the dispatch order.
        assume(one.dispatch <= other.attention + other.dispatch)
    simulated = simulate(
        by_credits(layers, credits),
        StageCosts(
            attention_s=lambda layer, stage: both[stage].attention,
            ffn_s=lambda layer, stage: both[stage].experts,
            dispatch_s=lambda layer, stage: both[stage].dispatch,
            return_s=lambda layer, stage: both[stage].combine,
        ),
    )
    model = CostModel(num_layers=layers, credits=credits)
    assert model.pipeline_seconds(first, second) == pytest.approx(simulated.end_s, rel=1e-9)


def test_auto_takes_the_fastest_and_says_why():
    costs = CostModel(linear=1e-3, quadratic=1e-4, experts=1e-3, num_layers=8, credits=2)
    plan = plan_stages([40, 200], split="auto", costs=costs)
    assert plan.policy == "cost"
    assert "none" in plan.detail
    assert "request at 40" in plan.detail
    assert "token at 120" in plan.detail


def test_auto_prefers_a_request_boundary_on_equal_time():
    costs = CostModel(linear=1, experts=1, num_layers=8)
    assert plan_stages([8, 8], split="auto", costs=costs).policy == "request"


def test_auto_takes_another_cut_when_the_fastest_has_a_hazard():
    costs = CostModel(linear=1e-3, experts=1e-3, num_layers=8)

    def token_is_unsafe(plan):
        return "block 3" if plan.policy == "token" else None

    assert plan_stages([40, 60], split="auto", costs=costs).policy == "token"
    plan = plan_stages([40, 60], split="auto", costs=costs, hazards=token_is_unsafe)
    assert plan.policy == "request"


def test_auto_does_not_cut_inside_requests_when_forbidden():
    costs = CostModel(linear=1e-3, experts=1e-3, num_layers=8)
    plan = plan_stages([40, 60], split="auto", costs=costs, require_tensor_parallel=True)
    assert plan.policy == "request"
    refused = plan_stages([100], split="auto", costs=costs, require_tensor_parallel=True)
    assert refused.reason is NoSplitReason.TENSOR_PARALLEL_REQUIRED


@pytest.mark.parametrize(("overhead", "pays"), [(0.9, True), (1.1, False)])
def test_auto_pays_when_the_experts_cost_more_than_a_second_attention_call(overhead, pays):
    """Attention-bound: pays iff R' > beta_A + R/L, here R' = 1.0 and R/L nearly 0."""
    costs = CostModel(linear=1.0, attention_overhead=overhead, experts=1.0 / 16, num_layers=1000)
    result = plan_stages([16], split="auto", costs=costs)
    assert isinstance(result, StagePlan) is pays


# -- fault classes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["token", "request", "cost"])
@pytest.mark.parametrize("total", [1, 2, 3, 5, 7, 105])
def test_fault_5_no_empty_stage(split, total):
    result = plan_stages([total], split=split, costs=CostModel())
    if total == 1:
        assert result.reason is NoSplitReason.SINGLE_TOKEN
    elif split == "request":
        assert result.reason is NoSplitReason.SINGLE_REQUEST
    else:
        check_laws([total], result)


def test_fault_5_empty_step_is_an_error():
    with pytest.raises(PlanError, match=re.escape("scheduled_tokens=()")):
        plan_stages([], split="token")


@pytest.mark.parametrize(("total", "cut"), [(105, 56), (110, 56), (112, 56), (9, 8)])
def test_fault_14_stage_starts_are_aligned(total, cut):
    plan = plan_stages(
        [total], split="token", sequence_parallel=True, tensor_parallel_size=8, alignment=8
    )
    assert plan.stages[1].token_slice.start == cut
    check_laws([total], plan, tensor_parallel_size=8, sequence_parallel=True)


def test_fault_14_unaligned_step_is_unsplit_with_a_reason():
    result = plan_stages([8], split="token", tensor_parallel_size=8, alignment=8)
    assert result.reason is NoSplitReason.ALIGNMENT
    assert "alignment=8" in result.detail
