"""Steps of many requests over paged caches: the split step against the unsplit one, layer by layer.

The eager model with a cache of its own is the oracle; for the operator, attention recomputed
without a cache is a second one. The faults are numbered as in ``cases/README.md``.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_model import (
    HEADS,
    HIDDEN,
    NOPE,
    RANK,
    ROPE,
    VALUE,
    Batch,
    MoE,
    PagedModel,
)

import afd_graph.backend
import afd_graph.paged_step
from afd_graph import AFDBackend, AFDConfig, ConfigError, PlanError
from afd_graph.cost_model import CostModel
from afd_graph.metadata import AttentionMetadata
from afd_graph.passes.kv_writes import write_in_place
from afd_graph.planner import StagePlan, plan_at, plan_stages

ATTENTION = torch.ops.afd.paged_mla_attention.default
FP64 = 1e-11
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


# -- the operator -------------------------------------------------------------------------------


def operator_arguments(batch: Batch, dtype=torch.float64):
    generator = torch.Generator().manual_seed(batch.seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = len(batch.ids)
    return (
        random(rows, HEADS, NOPE + ROPE),
        random(rows, RANK),
        random(rows, ROPE),
        random(batch.num_blocks, batch.block_size, RANK + ROPE),
        random(HEADS * (NOPE + VALUE), RANK),
        batch.starts,
        batch.seq_lens,
        batch.block_table,
        batch.slots,
        0.3,
    )


def attention_without_cache(batch: Batch, query, kv_c, k_pe, cache, kv_b_proj, *_):
    """Each request from keys and values of its whole history, token by token."""
    latents = torch.cat([kv_c, k_pe], 1)
    keys, values = kv_b_proj.view(HEADS, NOPE + VALUE, RANK).split([NOPE, VALUE], 1)
    out = torch.zeros(len(query), HEADS, VALUE, dtype=query.dtype)
    row = 0
    for (cached, new), table in zip(batch.requests, batch.tables, strict=True):
        places = [divmod(position, batch.block_size) for position in range(cached)]
        history = [cache[table[block], offset] for block, offset in places]
        for _ in range(new):
            history.append(latents[row])
            c, rotated = torch.stack(history).split([RANK, ROPE], 1)
            for head in range(HEADS):
                key = torch.cat([c @ keys[head].T, rotated], 1)
                weights = (key @ query[row, head] * 0.3).softmax(0)
                out[row, head] = weights @ (c @ values[head].T)
            row += 1
    return out


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    requests = draw(
        st.lists(st.tuples(st.integers(0, 13), st.integers(1, 9)), min_size=1, max_size=4)
    )
    tokens = sum(new for _, new in requests)
    return Batch(
        requests,
        block_size=draw(st.integers(2, 5)),
        pad_tokens=draw(st.integers(0 if tokens > 1 else 1, 4)),
        pad_requests=draw(st.integers(0 if len(requests) > 1 else 1, 2)),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=100, **SETTINGS)
@given(batch=batches())
def test_operator_equals_attention_without_a_cache(batch):
    arguments = operator_arguments(batch)
    before = arguments[3].clone()
    expected = attention_without_cache(batch, *arguments)
    got = ATTENTION(*arguments)
    assert (got - expected).abs().max() < FP64
    assert not got[batch.tokens :].any()
    # Exactly the slots of the step were written, with the rows of the step.
    slots = batch.slots[: batch.tokens]
    after = arguments[3].flatten(0, 1)
    rows = torch.cat(arguments[1:3], 1)[: batch.tokens]
    assert torch.equal(after[slots], rows)
    kept = torch.ones(len(after), dtype=torch.bool)
    kept[slots] = False
    assert torch.equal(after[kept], before.flatten(0, 1)[kept])


def test_operator_writes_nothing_for_negative_slots():
    batch = Batch([(2, 3)], pad_requests=1)
    arguments = operator_arguments(batch)
    before = arguments[3].clone()
    batch.slots.fill_(-1)
    ATTENTION(*arguments)
    assert torch.equal(arguments[3], before)


def test_operator_in_bfloat16_rounds_once():
    batch = Batch([(5, 4), (0, 3)])
    arguments = operator_arguments(batch, torch.bfloat16)
    wide = tuple(
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in arguments
    )
    got, exact = ATTENTION(*arguments), ATTENTION(*wide)
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    "batch", [Batch([(3, 5), (0, 2)], pad_tokens=2, pad_requests=1), Batch([(4, 2)])]
)
def test_fault_12_operator_passes_opcheck(batch):
    arguments = operator_arguments(batch)
    torch.library.opcheck(ATTENTION, arguments)
    torch.library.opcheck(ATTENTION, (*arguments, torch.zeros(1)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (5, [0, 3, 6, 6], "4 starts, 2 lengths, 2 block rows"),
        (5, [0, 3, 9], "9 tokens, 5 rows, 5 slots"),
        (6, [2, 4], "3 new tokens of a request of 2"),
        (6, [3, 400], "2 new tokens of a request of 400"),
    ],
)
def test_operator_refuses_metadata_that_does_not_fit(field, value, message):
    arguments = list(operator_arguments(Batch([(1, 3), (2, 2)])))
    arguments[field] = torch.tensor(value)
    with pytest.raises(RuntimeError, match=message):
        ATTENTION(*arguments)


# -- the model ----------------------------------------------------------------------------------


LOWER = afd_graph.backend.lower
CHOOSE = afd_graph.paged_step.PagedStepChooser.choose


class Pair:
    """A compiled model and the eager one, each with its own caches."""

    def __init__(self, monkeypatch, model=None, dtype=torch.float64, cut_by_policy=False, **config):
        self.model = (model or PagedModel()).to(dtype)
        self.cut = None
        self.programs = []
        self.running = False
        self.chosen = []
        self.tamper = lambda chosen: chosen
        self._watch(monkeypatch)
        plan = None if cut_by_policy else lambda extent, tokens: self.cut
        config.setdefault("connector_options", {"threads": 1})
        self.backend = AFDBackend(AFDConfig(**config), plan=plan)
        self.compiled = torch.compile(
            self.model, backend=self.backend, fullgraph=True, dynamic=True
        )

    def _watch(self, monkeypatch):
        # Around the originals: another pair may be watching theirs already.
        lower, choose = LOWER, CHOOSE

        def lowered(name, gm, *rest):
            if self.running:  # Another backend may compile while this one is watching.
                self.programs.append(gm)
            return lower(name, gm, *rest)

        chooser = afd_graph.paged_step.PagedStepChooser

        def chosen(this, args):
            result = choose(this, args)
            if not isinstance(result, str):
                result = self.tamper(result)
            self.chosen.append(result)
            return result

        monkeypatch.setattr(afd_graph.backend, "lower", lowered)
        monkeypatch.setattr(chooser, "choose", chosen)

    @property
    def report(self):
        return self.backend.report()

    @property
    def two_stages(self):
        """The last two-stage program."""
        return next(
            gm
            for gm in reversed(self.programs)
            if any(node.name == "afd_cut" for node in gm.graph.nodes)
        )

    def step(self, batch, cut=None, metadata=..., caches=None):
        """Run both; returns (split, errors by name over the real rows and the caches)."""
        self.cut = cut
        self.running = True
        expected_caches = batch.caches(self.model) if caches is None else caches
        got_caches = [cache.clone() for cache in expected_caches]
        before = self.report.steps_split
        metadata = batch.metadata() if metadata is ... else metadata
        with torch.no_grad():
            expected, expected_layers = self.model(*batch.arguments(expected_caches))
            if metadata is None:
                got, got_layers = self.compiled(*batch.arguments(got_caches))
            else:
                with self.backend.step_metadata(metadata):
                    got, got_layers = self.compiled(*batch.arguments(got_caches))
        self.running = False
        split = self.report.steps_split > before
        pairs = {"logits": (got, expected)}
        for i, (mine, theirs) in enumerate(zip(got_layers, expected_layers, strict=True)):
            pairs[f"attention {i}"] = mine[0], theirs[0]
            pairs[f"mlp {i}"] = mine[1], theirs[1]
        self.rows = {
            name: (mine[: batch.tokens] - theirs[: batch.tokens]).abs().amax(-1)
            for name, (mine, theirs) in pairs.items()
        }
        errors = {name: float(rows.max()) for name, rows in self.rows.items()}
        for i, (mine, theirs) in enumerate(zip(got_caches, expected_caches, strict=True)):
            errors[f"cache {i}"] = float((mine - theirs).abs().max())
        if split:
            # What was computed stage by stage has zeros in the rows of the step's padding.
            for name in ("logits", "mlp 1"):
                assert not pairs[name][0][batch.tokens :].any(), name
        return split, errors


# Sizes that are equal when a graph is captured would be taken for the same one.
ALL_SIZES_DIFFER = Batch(
    [(6, 1), (0, 10), (9, 1), (13, 4)], block_size=3, pad_tokens=4, pad_requests=4
)


@pytest.fixture(scope="module")
def shared_pair():
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(patch)
        pair.step(ALL_SIZES_DIFFER, 5)
        yield pair
        pair.backend.close()


@pytest.fixture
def pair(shared_pair):
    """The plain model, compiled once; counters start at zero."""
    shared_pair.tamper = lambda chosen: chosen
    shared_pair.report.steps_split = 0
    shared_pair.report.steps_unsplit.clear()
    return shared_pair


def assert_equal(step, tolerance=FP64):
    split, errors = step
    assert split
    assert max(errors.values()) < tolerance, errors


def test_random_steps_and_cuts(pair):
    graphs = len(pair.report.graphs)
    ran = set()

    @settings(max_examples=140, **SETTINGS)
    @given(batch=batches(), where=st.floats(0, 1, exclude_max=True))
    def check(batch, where):
        if batch.tokens < 2:
            return
        cut = 1 + int(where * (batch.tokens - 1))
        assert_equal(pair.step(batch, cut))
        ran.add((tuple(batch.requests), batch.block_size, batch.pad_tokens, cut))

    check()
    assert len(ran) >= 100
    # No number of requests, rows, blocks or stage tokens compiled anything new.
    assert len(pair.report.graphs) == graphs == 1
    assert pair.report.graphs[0].mode == "paged"
    assert not pair.report.steps_unsplit


@pytest.mark.parametrize(
    "batch",
    [
        Batch([(0, 9)], pad_requests=1),
        Batch([(6, 1), (11, 1), (3, 1)]),
        Batch([(6, 1), (0, 10), (9, 1), (4, 5)], pad_tokens=3, pad_requests=2),
        Batch([(0, 1), (0, 1)]),
        Batch([(8, 3)], block_size=4, pad_tokens=5, pad_requests=1),
    ],
    ids=["one prompt", "decode", "mixed", "two tokens", "odd chunk"],
)
def test_every_cut_of_a_step(pair, batch):
    for cut in range(1, batch.tokens):
        assert_equal(pair.step(batch, cut))


def test_in_fp32(monkeypatch):
    pair = Pair(monkeypatch, dtype=torch.float32)
    assert_equal(pair.step(Batch([(6, 1), (0, 10), (9, 1)], pad_tokens=3), 5), 1e-5)
    pair.backend.close()


@pytest.mark.parametrize("credits", [1, 2])
def test_both_orders(monkeypatch, credits):
    pair = Pair(monkeypatch, model=PagedModel(3), credits=credits)
    assert_equal(pair.step(Batch([(6, 1), (3, 8)], pad_tokens=1), 4))
    pair.backend.close()


def test_caches_in_one_stacked_tensor(pair):
    """The layers mutate views of one graph input; Dynamo gives it to the operator as a base."""
    batch = Batch([(6, 1), (3, 8)], pad_tokens=1)
    stacked = torch.stack(batch.caches(pair.model))
    expected = stacked.clone()
    pair.cut = 5
    with torch.no_grad(), pair.backend.step_metadata(batch.metadata()):
        logits, _ = pair.compiled(*batch.arguments(stacked))
        wanted, _ = pair.model(*batch.arguments(expected))
    assert pair.report.steps_split == 1
    assert (logits - wanted)[: batch.tokens].abs().max() < FP64
    assert (stacked - expected).abs().max() < FP64


# -- which steps are split ----------------------------------------------------------------------

MIXED = Batch([(0, 9), (30, 1), (12, 5), (2, 1)], pad_tokens=2, pad_requests=1)


@pytest.mark.parametrize("split", ["token", "request", "cost", "auto"])
def test_policies_plan_from_the_real_counts(monkeypatch, split):
    # Seconds per item that make a split pay, so that auto takes one.
    costs = CostModel(linear=1.0, quadratic=0.1, experts=2.0, num_layers=2, credits=2)
    pair = Pair(monkeypatch, split=split, costs=costs, cut_by_policy=True)
    assert_equal(pair.step(MIXED))
    with_context = CostModel(
        [cached for cached, _ in MIXED.requests],
        linear=1.0,
        quadratic=0.1,
        experts=2.0,
        num_layers=2,
        credits=2,
    )
    plan = plan_stages(MIXED.counts, split=split, costs=with_context)
    assert isinstance(plan, StagePlan)
    assert (pair.chosen[-1][0], pair.chosen[-1][-1]) == (16, plan.stages[0].actual_tokens)
    pair.backend.close()


def test_policies_differ_on_this_step():
    costs = CostModel([c for c, _ in MIXED.requests], linear=1.0, quadratic=0.1)
    cuts = {
        split: plan_stages(MIXED.counts, split=split, costs=costs).stages[0].actual_tokens
        for split in ("token", "request", "cost")
    }
    assert len(set(cuts.values())) == 3, cuts


@pytest.mark.parametrize(
    ("config", "batch", "metadata", "reason"),
    [
        ({}, MIXED, None, "metadata_missing"),
        ({}, Batch([(5, 1)], pad_tokens=2, pad_requests=1), ..., "single_token"),
        ({"min_split_tokens": 40}, MIXED, ..., "below_min_tokens"),
        ({"split": "request"}, Batch([(5, 4)], pad_requests=1), ..., "single_request"),
        (
            {"split": "auto", "costs": CostModel(attention_overhead=9.0)},
            MIXED,
            ...,
            "unsplit_faster",
        ),
    ],
    ids=["metadata", "single token", "below minimum", "single request", "auto"],
)
def test_a_step_that_is_not_split_is_right_and_counted(
    monkeypatch, config, batch, metadata, reason
):
    pair = Pair(monkeypatch, cut_by_policy=True, **config)
    split, errors = pair.step(batch, metadata=metadata)
    assert not split
    assert max(errors.values()) < FP64
    assert pair.report.steps_unsplit == {reason: 1}
    pair.backend.close()


def test_metadata_ends_with_its_step(pair):
    pair.step(MIXED, 5)
    pair.step(MIXED, 5, metadata=None)
    assert (pair.report.steps_split, pair.report.steps_unsplit) == (1, {"metadata_missing": 1})


def test_metadata_of_another_step_is_refused(pair):
    other = Batch([(0, 9), (30, 2), (12, 4), (2, 1)], pad_tokens=2, pad_requests=1)
    with pytest.raises(PlanError, match=r"not that of its inputs: query_start_loc=\[0, 9, 11"):
        pair.step(MIXED, 5, metadata=other.metadata())


def test_a_plan_of_the_user_must_cut_inside_the_step(pair):
    with pytest.raises(PlanError, match="cuts a step of 16 tokens at 16"):
        pair.step(MIXED, 16)
    split, errors = pair.step(MIXED, "not today")
    assert not split
    assert max(errors.values()) < FP64
    assert pair.report.steps_unsplit == {"not today": 1}


def test_costs_belong_to_their_policies():
    for split in ("cost", "auto"):
        with pytest.raises(ConfigError, match=f"split='{split}' needs costs"):
            AFDConfig(split=split)
    with pytest.raises(ConfigError, match="costs=3 is not a CostModel"):
        AFDConfig(costs=3)
    with pytest.raises(ConfigError, match=r"context_lens=\[1\] belongs to one step"):
        AFDConfig(costs=CostModel([1]))
    assert AFDConfig(split="cost", costs=CostModel()).digest() != AFDConfig().digest()


def test_cost_policy_without_requests_takes_rows_as_one_fresh_request():
    torch.manual_seed(0)
    model = MoE().requires_grad_(False)
    config = AFDConfig(split="cost", costs=CostModel(linear=0.0, quadratic=1.0))
    rows = []
    with AFDBackend(config) as backend:
        dispatch = backend.channel.dispatch

        def watched(hidden, *rest):
            rows.append(len(hidden))
            return dispatch(hidden, *rest)

        backend.channel.dispatch = watched
        x = torch.randn(100, HIDDEN)
        with torch.no_grad():
            got = torch.compile(model, backend=backend, dynamic=True)(x)
            assert torch.allclose(got, model(x), atol=1e-6)
    assert rows == [71, 29]  # 100 / sqrt(2)


# -- writes in place ----------------------------------------------------------------------------


def test_no_copy_of_a_cache_is_left(pair):
    pair.step(MIXED, 5)
    for gm in pair.programs:
        targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        assert torch.ops.higher_order.auto_functionalized_v2 not in targets
        assert torch.ops.aten.copy_.default not in targets
        caches = {node.args[3] for node in gm.graph.nodes if node.target is ATTENTION}
        assert len(caches) == len(pair.model.layers)
        # The graph's input itself, or a view of the input in which the layers are stacked.
        views = {"placeholder", torch.ops.aten.as_strided.default}
        assert {cache.target if cache.op == "call_function" else cache.op for cache in caches} <= (
            views
        )
    assert pair.report.graphs[0].edits["kv_writes"] == len(pair.model.layers)


class ReadsItsCache(PagedModel):
    """Something else than attention reads a cache, behind the step's writes."""

    def forward(self, ids, positions, kv_caches, *metadata):
        logits, layers = super().forward(ids, positions, kv_caches, *metadata)
        return logits + kv_caches[1].mean(), layers


def test_a_cache_that_is_read_elsewhere_is_refused_by_name(monkeypatch):
    pair = Pair(monkeypatch, model=ReadsItsCache())
    with pytest.raises(Exception, match="auto_functionalized_v2 cannot be split by tokens"):
        pair.step(MIXED, 5)
    pair.backend.close()
    torch._dynamo.reset()
    pair = Pair(monkeypatch, model=ReadsItsCache(), on_unsupported="fallback")
    split, errors = pair.step(MIXED, 5)
    assert not split
    assert max(errors.values()) < FP64
    assert pair.report.graphs[0].edits["kv_writes"] == len(pair.model.layers) - 1
    pair.backend.close()


class SharesACache(PagedModel):
    """Two layers write the same entries: only their order in the unsplit step is right."""

    def forward(self, ids, positions, kv_caches, *metadata):
        caches = [kv_caches[0], kv_caches[1], kv_caches[1]]
        return super().forward(ids, positions, caches, *metadata)


def test_two_layers_on_one_cache_are_refused_by_name(monkeypatch):
    pair = Pair(monkeypatch, model=SharesACache())
    with pytest.raises(Exception, match=r"writes a KV cache that \w+ writes too"):
        pair.step(MIXED, 5)
    pair.backend.close()


class OwnMetadata(PagedModel):
    """A layer with metadata that is computed in the graph."""

    def forward(self, ids, positions, kv_caches, starts, seq_lens, *rest):
        return super().forward(ids, positions, kv_caches, starts, seq_lens + 0, *rest)


def test_metadata_that_is_no_graph_input_is_refused_by_name(monkeypatch):
    pair = Pair(monkeypatch, model=OwnMetadata())
    with pytest.raises(Exception, match=r"its seq_lens, \w+, is not an input of the graph"):
        pair.step(MIXED, 5)
    pair.backend.close()


# -- faults -------------------------------------------------------------------------------------


def stage_fields(chosen):
    """(stage 0, stage 1) metadata tensors of what the two-stage program is given."""
    fields = chosen[1:-1]
    return fields[: len(fields) // 2], fields[len(fields) // 2 :]


def test_fault_1_stages_do_not_share_metadata(pair):
    """105 tokens cut 53/52: overwriting one stage's metadata leaves the other stage as it was."""
    batch = Batch([(7, 40), (0, 65)], block_size=16, pad_tokens=7)
    assert_equal(pair.step(batch, 53))
    stages = stage_fields(pair.chosen[-1])
    given = (batch.starts, batch.seq_lens, batch.block_table, batch.slots)
    owners = [{t.untyped_storage().data_ptr() for t in side} for side in (*stages, given)]
    assert not any(a & b for a, b in itertools.combinations(owners, 2))

    for poisoned in (0, 1):

        def poison(chosen, poisoned=poisoned):
            mine, other = stage_fields(chosen)[poisoned], stage_fields(chosen)[1 - poisoned]
            before = [tensor.clone() for tensor in other]
            mine[2].zero_()  # Every block of the stage is block 0 now.
            mine[3].fill_(-1)
            assert all(map(torch.equal, before, other))
            return chosen

        pair.tamper = poison
        split, _ = pair.step(batch, 53)
        assert split
        first, second = pair.rows["attention 1"].split([53, 52])
        assert (first if poisoned == 0 else second).max() > 1e-3
        if poisoned == 1:
            assert max(float(rows[:53].max()) for rows in pair.rows.values()) < FP64
        assert torch.equal(batch.slots[:105] >= 0, torch.ones(105, dtype=torch.bool))


def test_fault_2_each_stage_has_its_own_lengths(pair):
    """Stages of 3 and 21 tokens, 2 and 3 requests: no stage is given the other's lengths."""
    batch = Batch([(5, 1), (2, 6), (0, 9), (1, 8)])
    assert_equal(pair.step(batch, 3))
    (starts, lengths, table, slots), second = stage_fields(pair.chosen[-1])
    assert (starts.tolist(), lengths.tolist()) == ([0, 1, 3], [6, 4])
    assert (len(table), len(slots)) == (2, 3)
    assert [len(field) for field in second] == [4, 3, 3, 21]
    # The next step of the same sizes, cut elsewhere, has nothing of this one.
    assert_equal(pair.step(Batch([(9, 1), (1, 6), (3, 9), (0, 8)]), 12))
    assert stage_fields(pair.chosen[-1])[0][1].tolist() == [10, 7, 8]


def test_fault_2_metadata_of_the_wrong_stage_does_not_compile(monkeypatch):
    from afd_graph.passes import split_paged

    def of_stage_0(this, node, part, copy=split_paged._PagedSplitter._copy_part):
        this.metadata = {key: this.metadata[key[0], 0] for key in this.metadata}
        copy(this, node, part)

    monkeypatch.setattr(split_paged._PagedSplitter, "_copy_part", of_stage_0)
    pair = Pair(monkeypatch)
    with pytest.raises(Exception, match="reads the query_start_loc of stage 0"):
        pair.step(MIXED, 5)
    pair.backend.close()


def test_fault_3_request_with_context_cut_in_the_middle(pair):
    """24 cached and 8 new tokens, cut after 4: stage 1 has a context of 28."""
    batch = Batch([(24, 8)], block_size=8, pad_requests=1)
    assert_equal(pair.step(batch, 4))
    first, second = stage_fields(pair.chosen[-1])
    assert [field.tolist() for field in (*first[:2], *second[:2])] == [[0, 4], [28], [0, 4], [32]]
    assert torch.equal(torch.cat([first[3], second[3]]), batch.slots)
    assert torch.equal(first[2], batch.block_table[:1])
    assert torch.equal(second[2], batch.block_table[:1])


# Request 0 has a context of 4 tokens in a block that request 1 computes in the same step.
SHARED_PREFIX = Batch([(4, 4), (0, 8)], block_size=4, shared={0: (1, 1)})


def test_fault_6_unguarded_split_of_a_shared_prefix_is_wrong(monkeypatch):
    monkeypatch.setattr(afd_graph.paged_step, "PrefixHazard", lambda **_: lambda plan: None)
    pair = Pair(monkeypatch)
    split, errors = pair.step(SHARED_PREFIX, 4)
    assert split
    assert errors["attention 1"] > 1e-3
    pair.backend.close()


@pytest.mark.parametrize("by_policy", [True, False])
def test_fault_6_shared_prefix_runs_unsplit_and_is_counted(monkeypatch, by_policy):
    pair = Pair(monkeypatch, split="request", cut_by_policy=by_policy)
    split, errors = pair.step(SHARED_PREFIX, 4)
    assert not split
    assert max(errors.values()) < FP64
    assert pair.report.steps_unsplit == {"prefix_hazard": 1}
    # The writer in stage 0 and the reader in stage 1 is no hazard.
    other = Batch([(0, 8), (4, 4)], block_size=4, shared={1: (0, 1)})
    assert_equal(pair.step(other, 8))
    pair.backend.close()


def attentions(graph):
    return [node for node in graph.nodes if node.target is ATTENTION]


def test_fault_9_stage_0_writes_before_stage_1_reads_in_the_graph(pair):
    pair.step(MIXED, 5)
    by_cache = {}
    for node in attentions(pair.two_stages.graph):
        by_cache.setdefault(node.args[3], []).append(node)
    dense, *moe = by_cache.values()
    assert len(dense) == 1
    assert len(moe) == 2
    for first, second in moe:
        assert (first.meta["afd_stage"], second.meta["afd_stage"]) == (0, 1)
        assert second.args[10] is first  # A data edge, whatever a compiler thinks of mutation.


def test_fault_9_lost_order_does_not_compile(monkeypatch):
    from afd_graph.passes import split_paged

    def unordered(this, node, part, copy=split_paged._PagedSplitter._copy_part):
        copy(this, node, part)
        if node.target is ATTENTION:
            new = this.parts[node, part]
            new.args = (*new.args[:10], None)

    monkeypatch.setattr(split_paged._PagedSplitter, "_copy_part", unordered)
    pair = Pair(monkeypatch)
    with pytest.raises(Exception, match=r"after split: writes \w+ in no order with"):
        pair.step(MIXED, 5)
    pair.backend.close()


def test_fault_9_order_survives_inductor(monkeypatch):
    from torch._inductor.utils import run_and_get_code

    pair = Pair(monkeypatch, model=PagedModel(1), lowering="inductor", cut_by_policy=True)
    step, codes = run_and_get_code(pair.step, MIXED)
    assert_equal(step)
    call = re.compile(
        r"(buf\d+) = torch\.ops\.afd\.ordered_paged_mla_attention\.default\("
        r"\w+, \w+, \w+, \w+, (\w+),.* (?:after=)?(\w+)\)"
    )
    programs = [call.findall(code) for code in codes]
    (calls,) = (found for found in programs if len(found) == 3)  # dense, stage 0, stage 1
    (_, _, _), (first, cache, none), (_, same_cache, after) = calls
    assert (none, same_cache) == ("None", cache)
    (code,) = (code for code in codes if len(call.findall(code)) == 3)
    # ``after`` is the first call's result, under the name that the code gave it.
    assert after == first or re.search(rf"\b{after} = {first}\b", code)
    # Another cut, other requests and padding run the same code; a stage of one row does not.
    other = Batch([(3, 2), (0, 30), (5, 2), (1, 1)], pad_tokens=1, pad_requests=1)
    assert_equal(pair.step(other))
    assert len(pair.report.graphs) == 1
    split, errors = pair.step(Batch([(3, 1), (0, 1), (5, 1)], pad_tokens=4, pad_requests=2))
    assert not split
    assert max(errors.values()) < FP64
    assert pair.report.steps_unsplit == {"sizes_not_compiled": 1}
    pair.backend.close()


def test_writes_in_place_need_the_whole_chain_to_themselves():
    """A graph without paged attention is not touched."""
    graph = torch.fx.Graph()
    cache, rows = graph.placeholder("cache"), graph.placeholder("rows")
    added = graph.call_function(torch.ops.aten.add.Tensor, (cache, rows))
    graph.call_function(torch.ops.aten.copy_.default, (cache, added))
    graph.output(added)
    assert write_in_place(graph) == 0
    assert len(graph.nodes) == 5


def test_plan_at_describes_any_cut():
    plan = plan_at([3, 6, 2], 4)
    first, second = plan.stages
    assert (first.request_slice, first.token_slice) == (slice(0, 2), slice(0, 4))
    assert (second.request_slice, second.token_slice) == (slice(1, 3), slice(4, 11))
    parent = AttentionMetadata(query_start_loc_cpu=[0, 3, 9, 11], seq_lens_cpu=[3, 6, 2])
    assert [parent.for_stage(stage).context_lens for stage in plan.stages] == [[0, 0], [1, 0]]
