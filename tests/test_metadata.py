"""Stage metadata against the recorded reference, the context law, and the faults of the field."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from host_cases import case_id, load, stage_of, token_counts
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_graph.errors import PlanError
from afd_graph.metadata import (
    FIELD_RULES,
    AttentionMetadata,
    FieldKind,
    FieldRule,
    StageMetadataCache,
)
from afd_graph.planner import NoSplit, Stage, plan_stages

BLOCK_SIZE = 16


def as_tensors(fields):
    """Every list as a tensor, as a serving host holds them."""
    return {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in fields.items()
    }


def as_lists(metadata):
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in metadata.as_dict().items()
    }


def step(counts, cached, padding=0):
    """Full-batch fields of a step with a paged KV cache, request ``i`` in its own blocks."""
    starts = list(itertools.accumulate(counts, initial=0))
    seq_lens = [count + context for count, context in zip(counts, cached, strict=True)]
    width = max(seq_lens) // BLOCK_SIZE + 1
    positions = [
        context + token
        for count, context in zip(counts, cached, strict=True)
        for token in range(count)
    ]
    owners = [request for request, count in enumerate(counts) for _ in range(count)]
    table = [
        [1 + request * width + block for block in range(width)] for request in range(len(counts))
    ]
    slots = [
        table[request][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for request, position in zip(owners, positions, strict=True)
    ]
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": list(starts),
        "seq_lens": seq_lens,
        "seq_lens_cpu": list(seq_lens),
        "seq_lens_cpu_upper_bound": [length + 2 for length in seq_lens],
        "num_computed_tokens_cpu": list(cached),
        "num_reqs": len(counts),
        "num_actual_tokens": starts[-1],
        "num_input_tokens": starts[-1] + padding,
        "max_query_len": max(counts),
        "max_seq_len": max(seq_lens),
        "block_table": table,
        "slot_mapping": slots + [-1] * padding,
        "positions": positions + [0] * padding,
        "actual_seq_lengths_q": list(range(1, starts[-1] + 1)),
    }


# -- recorded cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("container", [dict, as_tensors], ids=["lists", "tensors"])
@pytest.mark.parametrize("case", load("metadata_cases"), ids=case_id)
def test_recorded_case(case, container):
    parent = AttentionMetadata(**container(case["input"]["parent"]))
    starts = case["input"]["parent"]["query_start_loc"]
    for number, (recorded, expected) in enumerate(
        zip(case["stages"], case["stage_metadata"], strict=True)
    ):
        stage = stage_of(recorded)
        metadata = parent.for_stage(stage)
        expected = copy.deepcopy(expected)
        derived = expected.pop("derived")
        # Ours on purpose: real tokens, as the reference's main; advanced; rebased.
        expected["num_input_tokens"] = case["main_num_input_tokens"][number]
        head = stage.token_slice.start - starts[stage.request_slice.start]
        expected["num_computed_tokens_cpu"][0] += head
        if stage.token_slice.start:
            ends = expected["actual_seq_lengths_q"]
            expected["actual_seq_lengths_q"] = (
                list(range(1, stage.actual_tokens + 1))
                if ends and case["tag"] == "asl-short"
                else [end - stage.token_slice.start for end in ends]
            )
        assert as_lists(metadata) == expected
        assert metadata.query_lens == derived["query_lens"]
        assert metadata.context_lens == derived["context_lens"]
        assert list(itertools.accumulate(metadata.query_lens)) == derived["cum_query_lens"]


# -- laws ------------------------------------------------------------------------------------------


@settings(max_examples=3000, deadline=None)
@given(st.data())
def test_context_law(data):
    counts = data.draw(token_counts(max_requests=6))
    cached = data.draw(st.lists(st.integers(0, 40), min_size=len(counts), max_size=len(counts)))
    plan = plan_stages(counts, split=data.draw(st.sampled_from(["token", "request"])))
    if isinstance(plan, NoSplit):
        return
    fields = step(counts, cached, padding=data.draw(st.integers(0, 3)))
    parent = AttentionMetadata(**fields)
    before = copy.deepcopy(fields)
    for stage in plan.stages:
        metadata = parent.for_stage(stage)
        requests = range(stage.request_slice.start, stage.request_slice.stop)
        for row, request in enumerate(requests):
            start, stop = fields["query_start_loc"][request : request + 2]
            low = max(start, stage.token_slice.start)
            high = min(stop, stage.token_slice.stop)
            assert metadata.query_lens[row] == high - low
            assert metadata.seq_lens[row] == cached[request] + high - start
            assert metadata.seq_lens_cpu_upper_bound[row] == metadata.seq_lens[row] + 2
            assert metadata.context_lens[row] == cached[request] + low - start
            assert metadata.num_computed_tokens_cpu[row] == metadata.context_lens[row]
            # Each token sits at its place in the request, and is written where it belongs.
            for token in range(low, high):
                local = token - stage.token_slice.start
                position = cached[request] + token - start
                assert metadata.positions[local] == position
                block = metadata.block_table[row][position // BLOCK_SIZE]
                slot = metadata.slot_mapping[local]
                assert slot == block * BLOCK_SIZE + position % BLOCK_SIZE
        assert metadata.num_actual_tokens == metadata.num_input_tokens == stage.actual_tokens
        assert len(metadata.slot_mapping) == len(metadata.positions) == stage.actual_tokens
        assert metadata.max_query_len == max(metadata.query_lens)
        assert metadata.max_seq_len == max(metadata.seq_lens)
        assert metadata.actual_seq_lengths_q == list(range(1, stage.actual_tokens + 1))
    assert parent.as_dict() == before


def test_per_request_query_ends_are_clipped_and_rebased():
    fields = step([10, 10], [0, 0]) | {"actual_seq_lengths_q": [10, 20]}
    parent = AttentionMetadata(**fields)
    first = Stage(slice(0, 2), slice(0, 12), 12, 12)
    second = Stage(slice(1, 2), slice(12, 20), 8, 8)
    assert parent.for_stage(first).actual_seq_lengths_q == [10, 12]
    assert parent.for_stage(second).actual_seq_lengths_q == [8]


@pytest.mark.parametrize(("shape", "axis"), [((3, 10), 1), ((10, 3), 0), ((10, 10), 1), ((10,), 0)])
def test_positions_with_several_axes(shape, axis):
    positions = torch.arange(torch.Size(shape).numel()).reshape(shape)
    fields = step([10], [0]) | {"positions": positions}
    plan = plan_stages([10], split="token")
    cut = [AttentionMetadata(**fields).for_stage(stage).positions for stage in plan.stages]
    assert torch.equal(torch.cat(cut, dim=axis), positions)


def test_positions_without_a_token_axis_are_refused():
    fields = step([10], [0]) | {"positions": torch.zeros(3, 7)}
    stage = plan_stages([10], split="token").stages[0]
    with pytest.raises(PlanError, match=r"'positions' of shape \(3, 7\)"):
        AttentionMetadata(**fields).for_stage(stage)


def test_optional_fields_stay_none():
    stage = plan_stages([10], split="token").stages[1]
    metadata = AttentionMetadata(**step([10], [0]), encoder_seq_lens=None).for_stage(stage)
    assert metadata.encoder_seq_lens is None
    with pytest.raises(AttributeError, match="no field 'is_prefilling'"):
        _ = metadata.is_prefilling


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (Stage(slice(0, 1), slice(4, 4), 0, 0), "empty or outside"),
        (Stage(slice(0, 3), slice(0, 4), 4, 4), "empty or outside"),
        (Stage(slice(1, 2), slice(2, 8), 6, 6), "starts outside its first request"),
        (Stage(slice(0, 1), slice(0, 6), 6, 6), "stops outside its last request"),
    ],
)
def test_stage_of_another_step_is_refused(stage, message):
    with pytest.raises(PlanError, match=message):
        AttentionMetadata(**step([4, 4], [0, 0])).for_stage(stage)


def test_short_field_is_refused_by_name():
    fields = step([10], [0]) | {"slot_mapping": [1, 2, 3]}
    stage = plan_stages([10], split="token").stages[0]
    with pytest.raises(PlanError, match=r"'slot_mapping' .* rows \[0, 5\)"):
        AttentionMetadata(**fields).for_stage(stage)


# -- registered fields -----------------------------------------------------------------------------


def test_registered_fields_are_cut_by_their_kind():
    parent = AttentionMetadata(
        extra_rules={
            "rope_cos": FieldKind.PER_TOKEN,
            "token_types": FieldRule(FieldKind.PER_TOKEN, axis=1),
            "lora_ids": FieldKind.PER_REQUEST,
            "scale": "inherited",
        },
        rope_cos=torch.arange(32.0).reshape(16, 2),
        token_types=torch.arange(32).reshape(2, 16),
        lora_ids=[7, 8],
        scale=0.5,
        **step([6, 10], [0, 0]),
    )
    second = parent.for_stage(plan_stages([6, 10], split="token").stages[1])
    assert torch.equal(second.rope_cos, parent.rope_cos[8:])
    assert torch.equal(second.token_types, parent.token_types[:, 8:])
    assert second.lora_ids == [8]
    assert second.scale == 0.5
    # A stage can be cut again by whoever knows the same fields.
    assert second.for_stage(Stage(slice(0, 1), slice(0, 4), 4, 4)).lora_ids == [8]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"positions": FieldKind.PER_REQUEST}, "'positions' is already declared"),
        ({"for_stage": FieldKind.PER_REQUEST}, "'for_stage' is already declared"),
        ({"mine": FieldKind.DERIVED}, "'mine' cannot be registered as derived"),
    ],
)
def test_rules_that_cannot_be_registered(rules, message):
    with pytest.raises(PlanError, match=message):
        AttentionMetadata(extra_rules=rules)


# -- fault classes ---------------------------------------------------------------------------------


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple)) or type(value) is type({}.values()):
        return [tensor for item in value for tensor in tensors_in(item)]
    return tensors_in(vars(value)) if hasattr(value, "__dict__") else []


class KVCompression:
    """Stands for metadata of a host that holds a buffer of its own."""

    def __init__(self):
        self.buffer = torch.arange(4)


def every_field(counts, cached):
    """A step with every field that the table knows, all of them tensors where they can be."""
    fields = as_tensors(step(counts, cached))
    requests = len(counts)
    for name, rule in FIELD_RULES.items():
        if name in fields:
            continue
        if rule.kind is FieldKind.PER_TOKEN:
            fields[name] = fields["positions"].clone()
        elif rule.kind is FieldKind.PER_REQUEST:
            fields[name] = torch.arange(requests)
        elif rule.kind is FieldKind.INHERITED:
            fields[name] = torch.arange(3)
        else:
            fields[name] = fields[name.removeprefix("_")].clone()
    fields["kvcomp_metadata"] = KVCompression()
    fields["mm_req_doc_ranges"] = {0: [torch.arange(2)]}
    fields["decode_token_per_req"] = 1
    return fields


def test_fault_1_stages_share_no_buffer():
    """105 tokens cut 53/52: poisoning one stage leaves the other and the parent unchanged."""
    parent = AttentionMetadata(**every_field([105], [7]))
    assert set(parent.as_dict()) == set(FIELD_RULES)
    plan = plan_stages([105], split="token")
    assert [stage.actual_tokens for stage in plan.stages] == [53, 52]
    first, second = (parent.for_stage(stage) for stage in plan.stages)
    untouched = [
        {name: [t.clone() for t in tensors_in(v)] for name, v in metadata.as_dict().items()}
        for metadata in (parent, second)
    ]
    owners = [tensors_in(metadata.as_dict()) for metadata in (parent, first, second)]
    storages = [{t.untyped_storage().data_ptr() for t in owner} for owner in owners]
    for one, other in itertools.combinations(storages, 2):
        assert not one & other
    for tensor in owners[1]:
        tensor.fill_(-999)
    for metadata, before in zip((parent, second), untouched, strict=True):
        for name, value in metadata.as_dict().items():
            for tensor, expected in zip(tensors_in(value), before[name], strict=True):
                assert torch.equal(tensor, expected), name


def test_fault_1_lists_are_not_shared_either():
    fields = step([4, 4], [0, 0])
    parent = AttentionMetadata(**fields)
    stage = plan_stages([4, 4], split="token").stages[0]
    metadata = parent.for_stage(stage)
    before = copy.deepcopy(fields)
    for value in metadata.as_dict().values():
        if isinstance(value, list):
            (value[0] if isinstance(value[0], list) else value)[:] = [-999]
    assert parent.as_dict() == before


def test_fault_1_field_that_cannot_be_copied_is_refused():
    class Pinned:
        def __deepcopy__(self, memo):
            raise RuntimeError("pinned")

    parent = AttentionMetadata(**step([4, 4], [0, 0]), kvcomp_metadata=Pinned())
    with pytest.raises(PlanError, match="'kvcomp_metadata' of type Pinned cannot be copied"):
        parent.for_stage(plan_stages([4, 4], split="token").stages[0])


def test_fault_2_cache_tells_stages_apart():
    """With a key that leaves the stage out, stage 1 gets the lengths of stage 0."""
    parent = AttentionMetadata(**step([3, 8], [5, 0]))
    other_group = AttentionMetadata(**(step([3, 8], [5, 0]) | {"block_table": [[40], [41]]}))
    plan = plan_stages([3, 8], split="request")
    cache = StageMetadataCache()
    first, second = (cache.get(parent, stage) for stage in plan.stages)
    assert first.seq_lens == [8]
    assert second.seq_lens == [8]
    assert first.query_lens == [3]
    assert second.query_lens == [8]
    assert cache.get(parent, plan.stages[1]) is second
    assert cache.get(other_group, plan.stages[1], group=1).block_table == [[41]]
    cache.clear()
    assert cache.get(parent, plan.stages[1]) is not second


@pytest.mark.parametrize("container", [dict, as_tensors], ids=["lists", "tensors"])
def test_fault_3_request_cut_inside_with_context(container):
    """24 cached and 8 new tokens, cut after 4: what stage 1 sees of its own request."""
    parent = AttentionMetadata(**container(step([8], [24])))
    first, second = (parent.for_stage(stage) for stage in plan_stages([8], split="token").stages)
    assert (as_lists(first)["seq_lens"], first.context_lens) == ([28], [24])
    assert (as_lists(second)["seq_lens"], second.context_lens) == ([32], [28])
    assert as_lists(second)["num_computed_tokens_cpu"] == [28]
    assert as_lists(second)["query_start_loc"] == [0, 4]
    assert as_lists(second)["positions"] == [28, 29, 30, 31]
    assert as_lists(second)["slot_mapping"] == as_lists(parent)["slot_mapping"][4:]
    assert as_lists(second)["block_table"] == as_lists(parent)["block_table"]
    assert as_lists(second)["actual_seq_lengths_q"] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["positions_of_images", "is_speculative"])
def test_fault_4_unknown_field_is_refused_by_name(name):
    with pytest.raises(PlanError, match=f"unknown kind: '{name}'"):
        AttentionMetadata(**step([4, 4], [0, 0]), **{name: [1, 2]})


def test_fault_4_no_field_is_dropped():
    parent = AttentionMetadata(**every_field([5, 6], [0, 3]))
    for stage in plan_stages([5, 6], split="token").stages:
        metadata = parent.for_stage(stage)
        assert set(metadata.as_dict()) == set(parent.as_dict())
        assert len(metadata.positions) == stage.actual_tokens
        requests = stage.request_slice
        assert metadata.is_prefilling.tolist() == list(range(requests.start, requests.stop))
