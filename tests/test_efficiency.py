"""A measured step against the pipeline model."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch

from afd_graph.connectors import create_connector
from afd_graph.efficiency import efficiency
from afd_graph.errors import PlanError
from afd_graph.runtime import Channel
from afd_graph.schedule_ir import KINDS, StageCosts, Step, by_credits
from afd_graph.simulate import closed_form
from afd_graph.timeline import Recorder

LAYERS = 3


def occupy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def run(order, costs: StageCosts, credits: int, tail_s: float = 0.0) -> Recorder:
    """Walk ``order`` over emulated experts; layers are numbered from 5."""
    a, f, c, d = costs.uniform()
    connector = create_connector("emulated", {"ffn_s": f, "dispatch_s": c, "return_s": d})
    channel = Channel(connector, credits=credits, timeout_s=10)
    channel.num_experts.update(dict.fromkeys(range(5, 5 + LAYERS), 1))
    rows, ids, weights = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    tickets = {}
    with Recorder(channel) as recorder:
        for step in order:
            item = (step.layer + 5, step.stage)
            if step.kind == "attention":
                occupy(a)
            elif step.kind == "dispatch":
                tickets[item] = channel.dispatch(rows, ids, *item)
            else:
                channel.receive(tickets.pop(item), rows, weights, *item)
        occupy(tail_s)
    channel.close()
    return recorder


@pytest.mark.parametrize(("credits", "order"), [(1, "receive-first"), (2, "send-first")])
def test_a_perfect_schedule_reaches_the_closed_form(credits, order):
    costs = StageCosts(0.02, 0.015, 0.005, 0.005)
    result = efficiency(run(by_credits(LAYERS, credits), costs, credits, tail_s=0.03), credits)
    assert result.tail_s == pytest.approx(0.03, rel=0.2)
    expected = closed_form(LAYERS, costs, order).split_s + 0.03
    assert result.bound_s == pytest.approx(expected, rel=0.15)
    assert 0.8 < result.of_bound <= 1.05
    assert result.costs.attention_s == pytest.approx(0.02, rel=0.2)
    assert result.busy("ffn") == pytest.approx(6 * 0.015 / result.wall_s, rel=0.2)
    assert result.busy("attention") > result.busy("ffn")


def test_a_schedule_that_does_not_overlap_falls_short():
    costs = StageCosts(0.01, 0.01)
    serial = [Step(kind, *item) for item in product(range(LAYERS), (0, 1)) for kind in KINDS]
    result = efficiency(run(serial, costs, 2), 2)
    assert result.of_bound < 0.75


def test_a_step_without_experts_is_refused():
    channel = Channel(create_connector("emulated", {}), credits=1, timeout_s=1)
    with Recorder(channel) as recorder:
        pass
    channel.close()
    with pytest.raises(PlanError, match="nothing is known of the experts"):
        efficiency(recorder, 1)
