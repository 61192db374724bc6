"""The pipeline model: golden table, closed forms, legal orders, schedules read from graphs."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import afd_graph.ops  # noqa: F401  (registers the operators)
from afd_graph.errors import PlanError
from afd_graph.schedule_ir import (
    StageCosts,
    Step,
    by_credits,
    check,
    credits_needed,
    receive_first,
    send_first,
    unsplit,
)
from afd_graph.simulate import (
    REFERENCE_COSTS,
    closed_form,
    compute_bound_stages,
    order_from_graph,
    simulate,
)

# T1, send-first, receive-first for 58 layers, one row per entry of REFERENCE_COSTS.
GOLDEN = (
    ("232", "117", "117"),
    ("232", "117", "117"),
    ("255.2", "128.6", "140.2"),
    ("290", "146", "175"),
    ("197.2", "116.7", "139.7"),
    ("301.6", "151.8", "186.6"),
    ("348", "175.5", "233"),
)
ORDERS = {"receive-first": receive_first, "send-first": send_first}


def exact(costs: StageCosts) -> StageCosts:
    """The same decimals as fractions, so that sums have no rounding."""
    return StageCosts(*(Fraction(str(value)) for value in costs.uniform()))


def short(order: list[Step]) -> str:
    return " ".join(f"{step.kind[0].upper()}{step.layer}{step.stage}" for step in order)


seconds = st.fractions(min_value=0, max_value=8, max_denominator=16)
stage_costs = st.builds(StageCosts, seconds, seconds, seconds, seconds)


class TestGoldenTable:
    @pytest.mark.parametrize(
        ("costs", "row"), list(zip(REFERENCE_COSTS, GOLDEN, strict=True)), ids=str
    )
    def test_simulator_is_exact(self, costs, row):
        costs = exact(costs)
        t1, sent, received = (Fraction(value) for value in row)
        assert simulate(unsplit(58), costs.scaled(2)).total_s == t1
        assert simulate(send_first(58), costs).total_s == sent
        assert simulate(receive_first(58), costs).total_s == received

    @pytest.mark.parametrize(
        ("costs", "row"), list(zip(REFERENCE_COSTS, GOLDEN, strict=True)), ids=str
    )
    def test_closed_form_is_exact(self, costs, row):
        costs = exact(costs)
        t1, sent, received = (Fraction(value) for value in row)
        assert closed_form(58, costs, "send-first").unsplit_s == t1
        assert closed_form(58, costs, "send-first").split_s == sent
        assert closed_form(58, costs, "receive-first").split_s == received

    def test_floats_agree(self):
        for costs, row in zip(REFERENCE_COSTS, GOLDEN, strict=True):
            assert simulate(send_first(58), costs).total_s == pytest.approx(float(row[1]), 1e-12)


class TestClosedForm:
    @given(costs=stage_costs, layers=st.integers(1, 9), order=st.sampled_from(sorted(ORDERS)))
    @settings(max_examples=400, deadline=None)
    def test_equals_the_simulator(self, costs, layers, order):
        form = closed_form(layers, costs, order)
        assert simulate(ORDERS[order](layers), costs).total_s == form.split_s
        assert simulate(unsplit(layers), costs.scaled(2)).total_s == form.unsplit_s
        assert closed_form(layers + 1, costs, order).split_s - form.split_s == form.period_s

    @given(costs=stage_costs, layers=st.integers(1, 9))
    @settings(max_examples=200, deadline=None)
    def test_more_credits_never_lose(self, costs, layers):
        sent = closed_form(layers, costs, "send-first").split_s
        received = closed_form(layers, costs, "receive-first").split_s
        assert sent <= received <= 2 * sent
        a, f, c, d = costs.uniform()
        if c + f + d <= a:
            assert sent == received

    @pytest.mark.parametrize(
        ("costs", "order", "regime"),
        [
            (StageCosts(2, 1, 0.5, 0.5), "send-first", "attention-bound"),
            (StageCosts(1, 2, 0.5, 0.5), "send-first", "ffn-bound"),
            (StageCosts(1, 1, 0.5, 0.5), "send-first", "latency-bound"),
            (StageCosts(2, 1, 0.5, 0.5), "receive-first", "attention-bound"),
            (StageCosts(1, 2, 0, 0), "receive-first", "latency-bound"),
        ],
    )
    def test_regimes(self, costs, order, regime):
        assert closed_form(4, costs, order).regime == regime

    def test_unsplit_costs_can_be_given(self):
        form = closed_form(3, StageCosts(1, 1), "send-first", unsplit=StageCosts(1.5, 1.5))
        assert form.unsplit_s == 9
        assert form.speedup == pytest.approx(9 / 7)

    def test_refusals(self):
        with pytest.raises(PlanError, match=r"layers=0 has no closed form.*at least one MoE"):
            closed_form(0, StageCosts(1, 1), "send-first")
        with pytest.raises(PlanError, match=r"order='fastest' is not known.*'receive-first'"):
            closed_form(1, StageCosts(1, 1), "fastest")
        with pytest.raises(PlanError, match=r"costs differ per layer.*use simulate\(\)"):
            closed_form(1, StageCosts(lambda layer, stage: 1.0, 1), "send-first")

    @given(
        costs=st.builds(StageCosts, seconds.filter(bool), seconds, seconds, seconds),
        stages=st.integers(2, 6),
    )
    @settings(max_examples=200, deadline=None)
    def test_enough_stages_hide_the_links(self, costs, stages):
        """The rule m * max(a, f) >= a + R, seen as the period of the simulated send-first order."""
        a, f, _, _ = costs.uniform()
        period = (
            simulate(send_first(12, stages), costs).total_s
            - simulate(send_first(11, stages), costs).total_s
        )
        hidden = stages >= compute_bound_stages(costs)
        assert (period == stages * max(a, f)) == hidden

    def test_no_stages_without_compute(self):
        with pytest.raises(PlanError, match="behind nothing"):
            compute_bound_stages(StageCosts(0, 0, 1, 1))


class TestOrders:
    def test_receive_first(self):
        assert short(receive_first(2)) == "A00 D00 A01 R00 D01 A10 R01 D10 A11 R10 D11 R11"

    def test_send_first(self):
        assert short(send_first(2)) == "A00 D00 A01 D01 R00 A10 D10 R01 A11 D11 R10 R11"

    def test_unsplit(self):
        assert short(unsplit(2)) == "A00 D00 R00 A10 D10 R10"

    def test_three_stages_two_credits(self):
        assert short(by_credits(1, 2, 3)) == "A00 D00 A01 D01 A02 R00 D02 R01 R02"

    @given(layers=st.integers(0, 6), stages=st.integers(1, 5), credits=st.integers(1, 7))
    def test_every_order_is_legal_and_uses_its_credits(self, layers, stages, credits):
        order = by_credits(layers, credits, stages)
        check(order, credits)
        assert len(order) == 3 * layers * stages
        most = min(credits, stages) if layers else 1
        assert credits_needed(order) == most
        if most > 1:
            with pytest.raises(PlanError, match=f"no credit left: {most - 1} allowed"):
                check(order, most - 1)

    @given(costs=stage_costs, stages=st.integers(2, 5), layers=st.integers(1, 5))
    @settings(max_examples=100, deadline=None)
    def test_a_credit_more_never_loses(self, costs, stages, layers):
        totals = [
            simulate(by_credits(layers, credits, stages), costs).total_s
            for credits in range(1, stages + 1)
        ]
        assert totals == sorted(totals, reverse=True)

    def test_impossible_counts(self):
        with pytest.raises(PlanError, match=r"no order for 2 layers, 2 stages, 0 credits.*>= 1"):
            by_credits(2, 0)
        with pytest.raises(PlanError, match=r"kind 'send' is not known.*'dispatch'"):
            Step("send", 0, 0)
        with pytest.raises(PlanError, match=r"dispatch\(-1,0\) has a negative index"):
            Step("dispatch", -1, 0)


def steps(text: str) -> list[Step]:
    kinds = {"A": "attention", "D": "dispatch", "R": "receive"}
    return [Step(kinds[word[0]], int(word[1]), int(word[2])) for word in text.split()]


class TestCheck:
    @pytest.mark.parametrize(
        ("order", "credits", "message"),
        [
            (
                "A00 D00 A01 D01 R00 R01",
                1,
                r"position 3, dispatch\(0,1\): no credit left: 1 allowed, "
                r"un-received: dispatch\(0,0\).*\[layer=0, stage=1\].*by_credits",
            ),
            ("D00 R00", 1, "its attention must precede it, not None"),
            ("A00 D00 D00", 2, r"its attention must precede it, not dispatch\(0,0\)"),
            ("A00 R00", 1, r"receive\(0,0\): nothing was dispatched for it"),
            ("A00 D00 R00 R00", 1, "nothing was dispatched for it"),
            ("A00 D00 A01 D01 R01 R00", 2, r"answers come in order.*dispatch\(0,0\)"),
            ("A00 D00 A10", 1, r"the stage still has dispatch\(0,0\) open"),
            ("A00 D00 R00 A00", 1, r"layers must ascend, the stage just finished receive\(0,0\)"),
            ("A01 D01 R01", 1, "stage 0 has not attended this layer yet"),
            ("A00 D00", 1, r"dispatch\(0,0\): the order ends with this step open"),
            ("A00 D00 R00 A10", 1, r"attention\(1,0\): the order ends with this step open"),
            ("A00 D00 A01 R00 D01 A10 R01 D10 R10", 1, r"stages 0 and 1 differ in layers \[1\]"),
            ("", 0, "credits=0 allows no dispatch"),
        ],
    )
    def test_refusals_say_where_and_why(self, order, credits, message):
        with pytest.raises(PlanError, match=message):
            check(steps(order), credits)

    @given(
        order=st.sampled_from([receive_first(3), send_first(3), send_first(2, 3)]),
        data=st.data(),
    )
    def test_no_step_can_be_lost_or_doubled(self, order, data):
        position = data.draw(st.integers(0, len(order) - 1))
        for broken in (
            order[:position] + order[position + 1 :],
            order[:position] + [order[position]] + order[position:],
        ):
            with pytest.raises(PlanError, match=r"illegal order at position \d+"):
                check(broken, 3)


class TestSimulate:
    def test_refuses_an_order_beyond_the_credits(self):
        with pytest.raises(PlanError, match="no credit left: 1 allowed"):
            simulate(send_first(2), StageCosts(1, 1), credits=1)
        assert simulate(receive_first(2), StageCosts(1, 1), credits=1).total_s == 5

    def test_refuses_costs_that_are_no_times(self):
        with pytest.raises(PlanError, match="ffn_s=-1 is not a time in seconds"):
            StageCosts(1, -1)
        with pytest.raises(PlanError, match="dispatch_s=nan"):
            StageCosts(1, 1, float("nan"))
        costs = StageCosts(1, lambda layer, stage: -1.0 if layer else 1.0)
        with pytest.raises(PlanError, match=r"ffn_s=-1.0 is not a time.*\[layer=1, stage=0\]"):
            simulate(receive_first(2), costs)

    def test_is_deterministic(self):
        costs = StageCosts(1.1, 0.7, 0.3, 0.2)
        assert simulate(send_first(5), costs) == simulate(send_first(5), costs)

    def test_every_item_occupies_every_engine_once(self):
        timeline = simulate(send_first(4, 3), StageCosts(1, 1, 0.5, 0.5))
        for engine in ("attention", "link out", "ffn", "link back"):
            items = [(i.layer, i.stage) for i in timeline.lane(engine)]
            assert sorted(items) == [(layer, stage) for layer in range(4) for stage in range(3)]

    @given(costs=stage_costs, order=st.sampled_from([receive_first(4), send_first(4, 3)]))
    @settings(max_examples=100, deadline=None)
    def test_an_engine_does_one_thing_at_a_time(self, costs, order):
        timeline = simulate(order, costs)
        for engine in ("attention", "ffn"):
            lane = timeline.lane(engine)
            assert all(a.end_s <= b.begin_s for a, b in pairwise(lane))

    def test_the_experts_serve_in_order_of_arrival(self):
        """Stage 0's rows travel for long, stage 1's overtake them."""
        slow_first = StageCosts(1, 2, lambda layer, stage: 5.0 if stage == 0 else 0.0)
        timeline = simulate(send_first(1), slow_first)
        assert [(i.stage, i.begin_s) for i in timeline.lane("ffn")] == [(1, 2), (0, 6)]
        assert timeline.total_s == 8

    def test_costs_per_layer_and_stage(self):
        """Equal tokens are not equal attention work: the later stage of a causal prompt is 3x."""
        costs = StageCosts(lambda layer, stage: 3.0 if stage else 1.0, 2)
        lane = simulate(receive_first(2), costs).lane("attention")
        assert [i.duration_s for i in lane] == [1, 3, 1, 3]

    def test_no_layers_take_no_time(self):
        timeline = simulate(receive_first(0), StageCosts(1, 1))
        assert timeline.total_s == 0
        assert timeline.utilisation("ffn") == 0

    def test_utilisation_and_bubbles(self):
        timeline = simulate(receive_first(1), StageCosts(1, 1, 0.25, 0.25))
        assert timeline.total_s == 4
        assert timeline.utilisation("attention") == 0.5
        assert timeline.bubbles("attention") == [(2, 4)]
        assert timeline.bubbles("ffn") == [(0, 1.25), (2.25, 2.75), (3.75, 4)]
        assert timeline.busy_s("link out") == 0.5


def emitted(order: list[Step], *, staged: bool = True, work: int = 3) -> fx.Graph:
    """A graph with ``order``'s crossings, and ``work`` nodes per attention, at its place."""
    graph = fx.Graph()
    x, ids, weights = (graph.placeholder(name) for name in ("x", "ids", "weights"))
    graph.call_function(torch.ops.aten.neg.default, (x,))  # shared, needed by nobody
    # Live-ins of all stages are sliced at the top: strays that belong to no place there.
    current = {}
    for stage in sorted({step.stage for step in order}):
        current[stage] = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 1))
        if staged:
            current[stage].meta["afd_stage"] = stage
    handles = {}
    for step in order:
        stage = step.stage
        if step.kind == "attention":
            for _ in range(work):
                current[stage] = graph.call_function(torch.ops.aten.cos.default, (current[stage],))
                if staged:
                    current[stage].meta["afd_stage"] = stage
        elif step.kind == "dispatch":
            handles[stage] = graph.call_function(
                torch.ops.afd.cam_dispatch.default, (current[stage], ids, step.layer, stage, "c")
            )
        else:
            current[stage] = graph.call_function(
                torch.ops.afd.cam_receive.default,
                (handles[stage], current[stage], weights, step.layer, stage, "c"),
            )
    graph.output(tuple(current.values()))
    return graph


class TestOrderFromGraph:
    @pytest.mark.parametrize(
        "order", [receive_first(3), send_first(3), send_first(2, 3), by_credits(3, 2, 3)], ids=short
    )
    def test_reads_what_was_emitted(self, order):
        assert order_from_graph(emitted(order)) == order

    def test_an_unsplit_graph_has_no_stage_marks(self):
        assert order_from_graph(emitted(unsplit(3), staged=False)) == unsplit(3)

    def test_golden_table_over_emitted_nodes(self):
        for costs, (_, sent, received) in zip(REFERENCE_COSTS, GOLDEN, strict=True):
            for order, expected in ((send_first(58), sent), (receive_first(58), received)):
                read = order_from_graph(emitted(order, work=2))
                assert simulate(read, exact(costs)).total_s == Fraction(expected)

    def test_a_dispatch_without_work_keeps_its_attention(self):
        read = order_from_graph(emitted(receive_first(2), work=0))
        # Layer 0 has the slices of the live-ins; layer 1 has nothing, so it stands at its dispatch.
        assert short(read) == "A00 A01 D00 R00 D01 R01 A10 D10 R10 A11 D11 R11"
        check(read, 1)

    def test_work_after_the_last_receive_is_not_attention(self):
        graph = emitted(receive_first(1))
        output = next(iter(reversed(graph.nodes)))
        with graph.inserting_before(output):
            tail = graph.call_function(torch.ops.aten.cos.default, (output.args[0][0],))
        tail.meta["afd_stage"] = 0
        assert order_from_graph(graph) == receive_first(1)

    def test_a_graph_without_experts_is_empty(self):
        graph = fx.Graph()
        graph.output(graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)))
        assert order_from_graph(graph) == []

    def test_symbolic_indices_are_refused(self):
        graph = emitted(unsplit(1))
        node = next(n for n in graph.nodes if n.target is torch.ops.afd.cam_dispatch.default)
        node.args = (*node.args[:2], node.args[0], 0, "c")
        with pytest.raises(PlanError, match=r"not integers.*node=cam_dispatch.*plain integers"):
            order_from_graph(graph)
