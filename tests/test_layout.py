"""Row layouts against the recorded reference, and their round trips on tensors."""

from __future__ import annotations

import pytest
import torch
from host_cases import case_id, load, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_graph.errors import PlanError
from afd_graph.layout import ZERO_ROW, DispatchLayout, StageLayout, StageRows
from afd_graph.planner import Stage, StagePlan, plan_stages

STAGE_CASES = [case for case in load("layout_cases") if case["kind"] == "stage"]
BOUNDARY_CASES = [case for case in load("layout_cases") if case["kind"] == "cam_boundary"]


def no_gather(tensor):
    raise AssertionError("no collective expected here")


class Recorder:
    """An all-gather that returns a prepared answer and remembers what it was given."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.given = []

    def __call__(self, tensor):
        self.given.append(tensor)
        return self.answers.pop(0)


def layouts(plan, parent_tokens, size, sequence_parallel):
    return [StageLayout(plan, parent_tokens, size, rank, sequence_parallel) for rank in range(size)]


def rows_of(tensor):
    """Row ids back from rows that were filled with their id plus one (zero rows: none)."""
    return (tensor[:, 0].long() - 1).tolist()


def numbered(rows, width=2):
    """Rows filled with their id plus one, so that a zero row is unlike any of them."""
    return (torch.arange(rows, dtype=torch.float64) + 1)[:, None].expand(rows, width).clone()


# -- recorded cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STAGE_CASES, ids=case_id)
def test_recorded_stage_layout(case):
    given_ = case["input"]
    size, parent_tokens = given_["tp_size"], given_["parent_input_tokens"]
    sequence_parallel = given_["use_sequence_parallel"]
    plan = plan_of(given_["stages"])
    if "error" in case:
        with pytest.raises(PlanError) as error:
            layouts(plan, parent_tokens, size, sequence_parallel)
        values = {
            "error-parent-not-divisible": f"parent_tokens={parent_tokens}, tensor_parallel_size=2",
            "error-stage-not-divisible": "token_slice=slice(0, 4, None), tensor_parallel_size=2",
        }
        assert values[case["tag"]] in error.value.what
        return
    ranks = layouts(plan, parent_tokens, size, sequence_parallel)
    whole = numbered(parent_tokens)
    outputs = []
    for layout, expected in zip(ranks, case["ranks"], strict=True):
        stages = range(len(plan.stages))
        assert [layout.local_rows(s) for s in stages] == expected["local_stage_rows"]
        assert [layout.local_rows(s) for s in plan.stages] == expected["local_stage_rows"]
        counts = [layout.local_input_tokens(s) for s in stages]
        assert counts == expected["local_input_token_counts"]
        counts = [layout.local_actual_tokens(s) for s in stages]
        assert counts == expected["local_actual_token_counts"]
        assert layout.restored_rows() == expected["restored_rows"]
        # The tensor operations move the same rows, in the recorded collectives.
        local = whole[layout.parent_rows.start : layout.parent_rows.stop]
        gather = Recorder(torch.cat([whole, whole], dim=-1)) if sequence_parallel else no_gather
        built = layout.build(local, local, gather)
        assert [rows_of(rows.hidden) for rows in built] == expected["local_stage_rows"]
        assert [rows_of(rows.residual) for rows in built] == expected["local_stage_rows"]
        if sequence_parallel:
            gathered_rows = case["all_gather_input_rows_per_rank"]["build_hidden"]
            assert [len(t) for t in gather.given] == [gathered_rows[layout.tensor_parallel_rank]]
        outputs.append(built)
    for rank, (layout, expected) in enumerate(zip(ranks, case["ranks"], strict=True)):
        gather = Recorder(*gathered_stages(outputs)) if sequence_parallel else no_gather
        hidden, residual = layout.restore(outputs[rank], gather)
        assert rows_of(hidden) == rows_of(residual) == expected["restored_rows"]
        if sequence_parallel:
            gathered_rows = case["all_gather_input_rows_per_rank"]["restore"][rank]
            assert [len(tensor) for tensor in gather.given] == gathered_rows


def gathered_stages(outputs):
    """What the all-gather of each stage returns, given every rank's stage rows."""
    return [
        torch.cat([torch.cat([rows.hidden, rows.residual], dim=-1) for rows in ranks])
        for ranks in zip(*outputs, strict=True)
    ]


@pytest.mark.parametrize("case", BOUNDARY_CASES, ids=case_id)
def test_recorded_dispatch_layout(case):
    given_ = case["input"]
    hidden = numbered(given_["rows"])
    ranks = [
        DispatchLayout(given_["rows"], given_["tp_size"], rank, given_["use_sequence_parallel"])
        for rank in range(given_["tp_size"])
    ]
    shares = [layout.shard(hidden=hidden)["hidden"] for layout in ranks]
    for layout, share, expected in zip(ranks, shares, case["ranks"], strict=True):
        assert layout.local_rows() == rows_of(share) == expected["local_rows"]
        assert layout.restored_rows() == expected["restored_rows"]
        assert (share is hidden) == expected["same_tensor"]
        assert {
            "parent_tokens": layout.rows,
            "padded_tokens": layout.padded_tokens,
            "local_slice": [layout.local_slice.start, layout.local_slice.stop],
            "local_tokens": layout.local_tokens,
            "requires_tp_all_gather": layout.requires_all_gather,
            "use_sequence_parallel": layout.sequence_parallel,
            "tp_rank": layout.tensor_parallel_rank,
            "tp_size": layout.tensor_parallel_size,
        } == expected["layout"]
        gather = Recorder(torch.cat(shares)) if layout.requires_all_gather else no_gather
        assert rows_of(layout.restore(share, gather)) == expected["restored_rows"]


# -- laws ------------------------------------------------------------------------------------------

SIZES = st.integers(1, 8)
TOKENS = st.one_of(st.integers(2, 64), st.integers(2, 4096))


@settings(max_examples=2500, deadline=None)
@given(TOKENS, SIZES, st.booleans(), st.integers(0, 9), st.integers(1, 4))
def test_stage_layout_round_trip(tokens, size, sequence_parallel, padding, requests):
    """Build on every rank, gather, restore: identity on real rows and zero after them."""
    sequence_parallel = sequence_parallel and size > 1
    counts = [tokens // requests + 1] * (requests - 1) + [tokens]
    total = sum(counts)
    unit = size if sequence_parallel else 1
    parent_tokens = -(-(total + padding) // unit) * unit
    plan = plan_stages(
        counts,
        split="token",
        sequence_parallel=sequence_parallel,
        tensor_parallel_size=size,
    )
    ranks = layouts(plan, parent_tokens, size, sequence_parallel)
    whole = numbered(parent_tokens, width=1)
    both = torch.cat([whole, whole], dim=-1)
    expected = torch.where(torch.arange(parent_tokens)[:, None] < total, whole, 0.0)

    outputs = []
    for layout in ranks:
        local = whole[layout.parent_rows.start : layout.parent_rows.stop]
        gather = Recorder(both) if sequence_parallel else no_gather
        outputs.append(layout.build(local, local, gather))
        if sequence_parallel:
            assert len(gather.given) == 1
        for number, rows in enumerate(outputs[-1]):
            assert len(rows.hidden) == layout.local_input_tokens(number) > 0
    restored, answers = [], gathered_stages(outputs) if sequence_parallel else []
    for layout, built in zip(ranks, outputs, strict=True):
        gather = Recorder(*answers) if sequence_parallel else no_gather
        restored.append(layout.restore(built, gather))
    for hidden, residual in restored:
        assert torch.equal(hidden, residual)
    if sequence_parallel:
        assert torch.equal(torch.cat([hidden for hidden, _ in restored]), expected)
        # Each real row of each stage lies on exactly one rank, in order.
        for number, stage in enumerate(plan.stages):
            rows = [row for layout in ranks for row in layout.local_rows(number)]
            assert rows == [
                *range(stage.token_slice.start, stage.token_slice.stop),
                *[ZERO_ROW] * stage.padding,
            ]
    else:
        for hidden, _ in restored:
            assert torch.equal(hidden, expected)


@settings(max_examples=2500, deadline=None)
@given(st.one_of(st.integers(1, 64), st.integers(1, 4096)), SIZES, st.booleans())
def test_dispatch_layout_round_trip(rows, size, sequence_parallel):
    """Each real row is dispatched once per group, and comes back to every rank."""
    hidden = numbered(rows, width=1)
    ranks = [DispatchLayout(rows, size, rank, sequence_parallel) for rank in range(size)]
    shares = [layout.shard(hidden=hidden)["hidden"] for layout in ranks]
    answers = torch.cat(shares)
    for layout, share in zip(ranks, shares, strict=True):
        assert len(share) == layout.local_tokens > 0
        gather = Recorder(answers) if layout.requires_all_gather else no_gather
        assert torch.equal(layout.restore(share, gather), hidden)
    if ranks[0].requires_all_gather:
        dispatched = [row for layout in ranks for row in layout.local_rows()]
        assert dispatched == [*range(rows), *[ZERO_ROW] * (ranks[0].padded_tokens - rows)]
    else:
        assert all(share is hidden for share in shares)


# -- single behaviours -----------------------------------------------------------------------------


def two_ranks():
    plan = plan_stages([5], split="token", sequence_parallel=True, tensor_parallel_size=2)
    return layouts(plan, 8, 2, True)


def test_rank_with_padding_only_takes_part_in_every_collective():
    plan = plan_stages([2], split="token", sequence_parallel=True, tensor_parallel_size=2)
    idle = StageLayout(plan, 4, 2, 1, True)
    whole = numbered(4)
    build = Recorder(torch.cat([whole, whole], dim=-1))
    built = idle.build(whole[2:], whole[2:], build)
    assert len(build.given) == 1
    assert [idle.local_actual_tokens(stage) for stage in (0, 1)] == [0, 0]
    assert all(not rows.hidden.any() and len(rows.hidden) == 1 for rows in built)
    restore = Recorder(torch.zeros(2, 4), torch.zeros(2, 4))
    idle.restore(built, restore)
    assert len(restore.given) == 2


def test_model_without_residual_gathers_hidden_alone():
    layout = two_ranks()[0]
    gather = Recorder(numbered(8))
    built = layout.build(numbered(8)[:4], None, gather)
    assert [tuple(tensor.shape) for tensor in gather.given] == [(4, 2)]
    assert all(rows.residual is None for rows in built)
    hidden, residual = layout.restore(built, Recorder(numbered(4), numbered(2)))
    assert hidden.shape == (4, 2)
    assert residual is None


def test_residual_of_another_dtype_is_gathered_apart_and_unchanged():
    layout = two_ranks()[0]
    gather = Recorder(numbered(8).bfloat16(), numbered(8))
    built = layout.build(numbered(8)[:4].bfloat16(), numbered(8)[:4], gather)
    assert [tensor.dtype for tensor in gather.given] == [torch.bfloat16, torch.float64]
    assert built[0].hidden.dtype == torch.bfloat16
    assert built[0].residual.dtype == torch.float64


@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((3, 8), 1), ((8, 3), 0), ((8, 8), 1)])
def test_positions_and_scaling_follow_the_rows(shape, axis):
    positions = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)
    for layout in two_ranks():
        assert layout.token_axis(positions) == axis
        for stage in (0, 1):
            rows = layout.local_rows(stage)
            expected = torch.stack(
                [
                    torch.zeros_like(positions.select(axis, 0))
                    if row == ZERO_ROW
                    else positions.select(axis, row)
                    for row in rows
                ],
                dim=axis,
            )
            assert torch.equal(layout.shard_positions(positions, stage), expected)
            assert torch.equal(layout.shard_scaling(positions, positions, stage), expected)


def test_scaling_finds_its_own_axis_or_passes_through():
    layout = two_ranks()[0]
    positions = torch.arange(24).reshape(3, 8)
    per_token = torch.arange(1.0, 9.0)
    assert layout.shard_scaling(per_token, positions, 0).tolist() == [1, 2]
    constant = torch.ones(3)
    assert layout.shard_scaling(constant, positions, 0) is constant


def test_dispatch_padding_is_expert_zero_with_weight_zero():
    layout = DispatchLayout(5, 2, 1, False)
    shared = layout.shard(
        hidden=numbered(5), topk_ids=torch.full((5, 2), 7), topk_weights=torch.ones(5, 2)
    )
    assert shared["topk_ids"].tolist() == [[7, 7], [7, 7], [0, 0]]
    assert shared["topk_weights"].tolist() == [[1, 1], [1, 1], [0, 0]]


PLAIN = plan_stages([5], split="token")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: StageLayout(PLAIN, 4, 1, 0, False), "parent_tokens=4, num_tokens=5"),
        (lambda: StageLayout(PLAIN, 8, 2, 2, False), "tensor_parallel_rank=2"),
        (lambda: StageLayout(PLAIN, 8, 1, 0, True), "parent_tokens=8, tensor_parallel_size=1"),
        (
            lambda: StageLayout(
                StagePlan((Stage(slice(0, 1), slice(0, 5), 6, 5),)), 8, 2, 0, False
            ),
            "must not be padded without sequence parallelism",
        ),
        (
            lambda: two_ranks()[0].build(numbered(8), None, no_gather),
            "hidden states must have .* rows=8, expected=4",
        ),
        (
            lambda: two_ranks()[0].build(numbered(4), numbered(8), no_gather),
            "residual must have .* rows=8, expected=4",
        ),
        (
            lambda: two_ranks()[0].build(numbered(4), None, lambda tensor: tensor),
            "returned 4 rows, expected 8",
        ),
        (
            lambda: two_ranks()[0].restore([StageRows(numbered(2))], no_gather),
            "2 stages, got outputs of 1",
        ),
        (
            lambda: two_ranks()[0].restore(
                [StageRows(numbered(2)), StageRows(numbered(1), numbered(1))], no_gather
            ),
            "some stages have a residual",
        ),
        (
            lambda: two_ranks()[0].restore(
                [StageRows(numbered(3)), StageRows(numbered(1))], no_gather
            ),
            "a stage output has 3 rows, its layout 2",
        ),
        (lambda: two_ranks()[0].token_axis(torch.zeros(3, 7)), r"8 tokens .* shape=\(3, 7\)"),
        (lambda: DispatchLayout(0, 2, 0, False), "at least one row: rows=0"),
        (lambda: DispatchLayout(4, 0, 0, False), "tensor_parallel_size=0"),
        (
            lambda: DispatchLayout(4, 2, 0, False).shard(topk_ids=torch.zeros(3, 2)),
            "topk_ids must match .* rows=3, expected=4",
        ),
        (
            lambda: DispatchLayout(4, 2, 0, False).restore(numbered(4), no_gather),
            "does not match the dispatched rows: rows=4, expected=2",
        ),
    ],
)
def test_error(act, message):
    with pytest.raises(PlanError, match=message):
        act()


# -- diagnostics -----------------------------------------------------------------------------------


def test_diagnostic_lines_have_the_reference_fields():
    assert DispatchLayout(5, 2, 1, False).diagnostic("dispatch") == (
        "AFD Async CAM layout; phase=dispatch sequence_parallel=False tp_rank=1 tp_size=2 "
        "parent_tokens=5 padded_tokens=6 local_slice=(3,6) local_tokens=3 tp_all_gather=True"
    )
    assert two_ranks()[1].diagnostic(0) == (
        "AFD Async CAM stage attention; stage=0 actual_tokens=3 token_slice=(0,3) input_tokens=4 "
        "local_tokens=2 sequence_parallel=True context_num_tokens=3 context_pad_size=1"
    )
