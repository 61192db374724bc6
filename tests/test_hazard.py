"""The prefix-cache hazard against a slot-by-slot definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_graph.errors import PlanError
from afd_graph.hazard import HazardReport, PrefixHazard
from afd_graph.metadata import AttentionMetadata
from afd_graph.planner import NoSplitReason, Stage, StagePlan, plan_stages

BLOCK_SIZE = 4


def step(counts, cached, tables):
    """Hazard inputs of a step: request ``i`` has ``cached[i]`` tokens of context in its blocks."""
    width = max(map(len, tables))
    slots = [
        tables[request][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for request, count in enumerate(counts)
        for position in range(cached[request], cached[request] + count)
    ]
    return {
        "query_start_loc": list(itertools.accumulate(counts, initial=0)),
        "seq_lens": [count + context for count, context in zip(counts, cached, strict=True)],
        "block_table": [table + [0] * (width - len(table)) for table in tables],
        "slot_mapping": slots,
    }


def plan_at(counts, cut):
    starts = list(itertools.accumulate(counts, initial=0))
    first = next(k for k, start in enumerate(starts) if start >= cut)
    second = first if starts[first] == cut else first - 1
    total = starts[-1]
    return StagePlan(
        (
            Stage(slice(0, first), slice(0, cut), cut, cut),
            Stage(slice(second, len(counts)), slice(cut, total), total - cut, total - cut),
        )
    )


def expected_report(fields, plan):
    """Slot by slot: what stage 0 reads and stage 1 writes."""
    first, second = plan.stages
    writes = {
        slot: token
        for token, slot in enumerate(fields["slot_mapping"])
        if token >= second.token_slice.start and slot >= 0
    }
    readers, blocks = set(), set()
    for request in range(first.request_slice.stop):
        end = min(fields["query_start_loc"][request + 1], first.token_slice.stop)
        length = fields["seq_lens"][request] - (fields["query_start_loc"][request + 1] - end)
        for position in range(length):
            block = fields["block_table"][request][position // BLOCK_SIZE]
            if block * BLOCK_SIZE + position % BLOCK_SIZE in writes:
                readers.add(request)
                blocks.add(block)
    return sorted(blocks), sorted(readers)


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_hazard_is_a_read_slot_that_is_written_later(data):
    requests = data.draw(st.integers(1, 4))
    lists = st.lists(st.integers(0, 10), min_size=requests, max_size=requests)
    counts = [1 + count for count in data.draw(lists)]
    cached = data.draw(lists)
    # Few block ids, so that requests share blocks often and in any order.
    tables = [
        data.draw(st.permutations(range(1, 12)))[: (count + context - 1) // BLOCK_SIZE + 1]
        for count, context in zip(counts, cached, strict=True)
    ]
    if sum(counts) < 2:
        return
    fields = step(counts, cached, tables)
    for token in data.draw(st.sets(st.integers(0, sum(counts) - 1), max_size=3)):
        fields["slot_mapping"][token] = -1
    plan = plan_at(counts, data.draw(st.integers(1, sum(counts) - 1)))
    report = PrefixHazard(**fields, block_size=BLOCK_SIZE)(plan)
    blocks, readers = expected_report(fields, plan)
    assert (report is not None) == bool(blocks)
    if report is not None:
        assert list(report.block_ids) == blocks
        assert list(report.readers) == readers
        assert report.writers


def test_fault_6_shared_prefix_in_one_step_is_not_split():
    """Request 0 attends to block 7, which request 1 computes in the same step."""
    fields = step([4, 8], [4, 0], [[7, 1], [7, 2]])
    hazard = PrefixHazard(**fields, block_size=BLOCK_SIZE)
    result = plan_stages([4, 8], split="request", hazards=hazard)
    assert result.reason is NoSplitReason.PREFIX_HAZARD
    assert result.detail == (
        "requests [0] of stage 0 read KV blocks [7] "
        "that requests [1] write in stage 1 of the same step"
    )


def test_fault_6_reading_what_stage_0_writes_is_no_hazard():
    fields = step([8, 4], [0, 4], [[7, 2], [7, 1]])
    hazard = PrefixHazard(**fields, block_size=BLOCK_SIZE)
    assert isinstance(plan_stages([8, 4], split="request", hazards=hazard), StagePlan)


def test_fault_6_another_cut_can_be_free_of_it():
    """The reader and the writer are both in stage 0 when the cut comes late enough."""
    counts = [4, 8, 4]
    hazard = PrefixHazard(**step(counts, [4, 0, 0], [[7, 1], [7, 2], [3]]), block_size=BLOCK_SIZE)
    assert hazard(plan_at(counts, 4)) == HazardReport((7,), (0,), (1,))
    assert hazard(plan_at(counts, 12)) is None


@pytest.mark.parametrize("cut", range(1, 10))
def test_request_cut_inside_a_block_is_no_hazard(cut):
    """Stage 0 reads the front of a block, stage 1 writes the rest of the same block."""
    hazard = PrefixHazard(**step([10], [3], [[5, 2, 9, 4]]), block_size=BLOCK_SIZE)
    assert hazard(plan_at([10], cut)) is None


def test_tokens_without_a_slot_write_nothing():
    fields = step([4, 4], [0, 0], [[7], [7]])
    assert PrefixHazard(**fields, block_size=BLOCK_SIZE)(plan_at([4, 4], 4)) is not None
    fields["slot_mapping"][4:] = [-1] * 4
    assert PrefixHazard(**fields, block_size=BLOCK_SIZE)(plan_at([4, 4], 4)) is None


def test_from_metadata_reads_the_step_with_its_padding():
    fields = step([4, 8], [4, 0], [[7, 1], [7, 2]])
    tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in fields.items()}
    tensors["query_start_loc"] = torch.tensor([0, 4, 12, 12])
    tensors["seq_lens"] = torch.tensor([8, 8, 0])
    tensors["block_table"] = torch.tensor([[7, 1], [7, 2], [0, 0]])
    tensors["slot_mapping"] = torch.tensor([*fields["slot_mapping"], -1, -1])
    hazard = PrefixHazard.from_metadata(AttentionMetadata(**tensors), block_size=BLOCK_SIZE)
    assert hazard(plan_at([4, 8], 4)) == HazardReport((7,), (0,), (1,))
    del tensors["slot_mapping"]
    with pytest.raises(PlanError, match="'slot_mapping' is missing"):
        PrefixHazard.from_metadata(AttentionMetadata(**tensors), block_size=BLOCK_SIZE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"seq_lens": [8]}, "query_start_loc=2, seq_lens=1, block_table=2"),
        ({"slot_mapping": [1, 2]}, "slot_mapping has 2 entries for 12 tokens"),
        ({"block_table": [7, 7]}, r"block_table has shape \(2,\), expected 2 axes"),
        ({"seq_lens": torch.zeros(2, device="meta")}, "seq_lens lies on meta"),
    ],
)
def test_inconsistent_inputs_are_refused(change, message):
    fields = step([4, 8], [4, 0], [[7, 1], [7, 2]]) | {"block_size": BLOCK_SIZE} | change
    with pytest.raises(PlanError, match=message):
        PrefixHazard(**fields)


def test_plan_of_another_step_is_refused():
    hazard = PrefixHazard(**step([4, 8], [4, 0], [[7, 1], [7, 2]]), block_size=BLOCK_SIZE)
    with pytest.raises(PlanError, match="the plan has 16 tokens, the step 12"):
        hazard(plan_at([8, 8], 8))
    with pytest.raises(PlanError, match="two stages, got 1"):
        hazard(StagePlan((Stage(slice(0, 1), slice(0, 4), 4, 4),)))
