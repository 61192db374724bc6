"""A measured step against the pipeline model, on events of a machine that is perfect or is not."""

from __future__ import annotations

from itertools import product
from unittest.mock import Mock

import pytest

from afd_graph.efficiency import efficiency
from afd_graph.errors import PlanError
from afd_graph.runtime import Channel, Event
from afd_graph.schedule_ir import KINDS, StageCosts, Step, by_credits
from afd_graph.simulate import closed_form
from afd_graph.timeline import Recorder

LAYERS = 6
FIRST = 5  # layers need not be numbered from 0
MS = 1_000_000


def step(order, costs: StageCosts, *, shared=0, tail=0, combine=0, stall=0) -> Recorder:
    """What a recorder sees when ``order`` runs; costs in ms.

    ``shared`` is computed behind each dispatch, ``stall`` is lost once, in a receive.
    """
    a, f, c, d = (round(value * MS) for value in costs.uniform())
    recorder = Recorder(Mock(spec=Channel))
    now, free = 1000, 0
    recorder.begin_ns = now
    answered, ffn = {}, {}
    for what in order:
        item = (what.layer + FIRST, what.stage)
        begin = now
        if what.kind == "attention":
            now += a
            continue
        if what.kind == "dispatch":
            free = max(now + c, free) + f
            ffn[item], answered[item] = (free - f, free), free + d
            recorder.events.append(Event("dispatch", *item, begin, now, 1))
            now += round(shared * MS)
            continue
        if now < answered[item]:
            now = answered[item]
        now += round(stall * MS) if item == (FIRST + 3, 0) else 0
        now += round(combine * MS)
        recorder.events.append(Event("receive", *item, begin, now, 1, ffn[item]))
    recorder.end_ns = now + round(tail * MS)
    return recorder


@pytest.mark.parametrize(("credits", "order"), [(1, "receive-first"), (2, "send-first")])
@pytest.mark.parametrize("costs", [(20, 15, 5, 5), (10, 30, 1, 1), (30, 10, 1, 1), (1, 1, 8, 8)])
def test_a_perfect_machine_reaches_the_closed_form(credits, order, costs):
    result = efficiency(step(by_credits(LAYERS, credits), StageCosts(*costs), tail=7), credits)
    form = closed_form(LAYERS, StageCosts(*costs), order)
    assert result.wall_s == pytest.approx((form.split_s + 7) * 1e-3)
    assert result.of_bound == pytest.approx(1, abs=1e-3)
    assert result.predicted.total_s == pytest.approx(form.split_s * 1e-3, rel=1e-3)
    assert result.tail_s == pytest.approx(7e-3)
    assert result.busy("ffn") == pytest.approx(2 * LAYERS * costs[1] * 1e-3 / result.wall_s)
    attention_s = (2 * LAYERS * costs[0] + 7) * 1e-3
    assert result.busy("attention") == pytest.approx(attention_s / result.wall_s)


def test_a_stall_is_not_part_of_the_bound():
    result = efficiency(step(by_credits(LAYERS, 2), StageCosts(10, 30, 1, 1), stall=50), 2)
    assert result.bound_s == pytest.approx(0.372)
    assert result.wall_s > result.bound_s + 0.015


def test_computation_beside_the_own_round_trip_is_not_counted_twice():
    """Shared experts run here while the routed ones are away."""
    result = efficiency(step(by_credits(LAYERS, 1, 1), StageCosts(20, 20), shared=15), 1)
    assert result.wall_s == pytest.approx(LAYERS * 40e-3)
    assert result.of_bound == pytest.approx(1)
    assert result.costs.attention_s == pytest.approx(35e-3, rel=0.2)


def test_the_combination_belongs_to_the_attention():
    recorder = step(by_credits(LAYERS, 2), StageCosts(30, 10, 1, 1), combine=3)
    result = efficiency(recorder, 2)
    assert result.of_bound == pytest.approx(1, abs=0.02)
    assert result.costs.attention_s == pytest.approx(33e-3, rel=0.05)


def test_another_order_than_that_of_the_credits_is_refused():
    serial = [Step(kind, *item) for *item, kind in product(range(LAYERS), (0, 1), KINDS)]
    with pytest.raises(PlanError, match="in the order of 2 credits"):
        efficiency(step(serial, StageCosts(1, 1)), 2)


def test_a_step_without_experts_is_refused():
    with pytest.raises(PlanError, match="nothing is known of the experts"):
        efficiency(step([], StageCosts(1, 1)), 1)
