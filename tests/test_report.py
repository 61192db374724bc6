"""What the report says, against what is known of the model and of the steps."""

from __future__ import annotations

import pytest
import torch

import afd_graph
from afd_graph import AFDBackend, AFDConfig, AFDError, Report
from tiny_models import DenseModel, PlainModel

IDS = torch.arange(14).view(2, 7)
PASSES = ("normalize", "match", "insert", "token_flow", "split", "schedule", "schedule_unsplit")


@pytest.fixture(autouse=True)
def no_default_backends():
    yield
    afd_graph.close_default_backends()


def test_fields():
    model = PlainModel(layers=3, shared=48, experts=6, top_k=2)
    with AFDBackend(AFDConfig(credits=1)) as backend, torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        for _ in range(2):
            compiled(IDS)
        compiled(IDS[:1, :1].clone())
        report = backend.report()
    assert isinstance(report, Report)
    assert [(x.index, x.name, x.experts, x.top_k, x.shared) for x in report.layers] == [
        (i, f"blocks.{i}.moe", 6, 2, 2) for i in range(3)
    ]
    assert report.steps_split == report.steps_mid_request == 2
    assert dict(report.steps_unsplit) == {"single_token": 1}
    assert Report.from_dict(report.as_dict()) == report
    assert (report.credits, report.order) == (1, "receive-first")
    assert len(report.graphs) == 2
    assert [graph.mode for graph in report.graphs] == ["sequence", None]
    assert report.graphs[1].unsplit_reason == "single_token"
    assert set(PASSES) <= set(report.pass_seconds)
    assert all(seconds >= 0 for seconds in report.pass_seconds.values())
    for name, seconds in report.pass_seconds.items():
        parts = [graph.pass_seconds.get(name, 0.0) for graph in report.graphs]
        assert seconds == pytest.approx(sum(parts))
    assert report.nodes_before == sum(graph.nodes_before for graph in report.graphs)
    assert report.nodes_after == sum(graph.nodes_after for graph in report.graphs)
    assert report.graphs[0].nodes_after > report.graphs[0].nodes_before > 50


def test_prints_as_a_table():
    with AFDBackend() as backend, torch.no_grad():
        torch.compile(PlainModel(shared=24), backend=backend)(IDS)
        lines = str(backend.report()).splitlines()
    assert lines[0] == "2 MoE layers, 1 graph"
    assert lines[1].split() == ["index", "layer", "experts", "top-k", "shared"]
    assert lines[2].split() == ["0", "blocks.0.moe", "6", "2", "1"]
    assert lines[3].split() == ["1", "blocks.1.moe", "6", "2", "1"]
    assert lines[4] == "gate and top-k: attention side, from the graph"
    # Columns are aligned.
    assert lines[1].index("experts") == lines[2].index("6") == lines[3].index("6")
    assert "order: send-first (2 credits)" in lines
    assert "steps split: 1 (1 inside a request)" in lines
    assert any(line.split()[:1] == ["token_flow"] for line in lines)


def test_of_the_default_backend():
    with pytest.raises(AFDError, match=r"no model was compiled.*afd_backend"):
        afd_graph.report()
    with torch.no_grad():
        compiled = torch.compile(PlainModel(), backend=afd_graph.afd_backend)
        compiled(IDS)
        assert afd_graph.report().steps_split == 1
        by_name = torch.compile(DenseModel(), backend="afd", options={"min_split_tokens": 5})
        by_name(IDS)
    # Other options make another backend, and the last one is reported.
    assert dict(afd_graph.report().steps_unsplit) == {"no_moe_layer": 1}
    assert afd_graph.report().layers == []


def test_of_a_compiled_model():
    with AFDBackend() as first, AFDBackend() as second, torch.no_grad():
        one = torch.compile(PlainModel(layers=1), backend=first)
        other = torch.compile(PlainModel(layers=2), backend=second)
        one(IDS)
        other(IDS)
        assert len(afd_graph.report(one).layers) == 1
        assert len(afd_graph.report(other).layers) == 2
        assert afd_graph.report(one) is first.report()


def test_a_failed_step_is_not_counted():
    model = PlainModel(layers=1)
    with AFDBackend() as backend, torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        compiled(IDS)
        model.blocks[0].moe.down.fill_(float("nan"))
        with pytest.raises(AFDError):
            compiled(IDS)
        assert backend.report().steps_split == 1
        assert backend.channel.outstanding == 0


@pytest.mark.parametrize("policy", ["token", "request"])
def test_one_token_has_one_reason_whatever_the_policy(policy):
    """The planner's: what a step could not be cut for is the same word in every graph."""
    with AFDBackend(AFDConfig(split=policy)) as backend, torch.no_grad():
        compiled = torch.compile(PlainModel(), backend=backend, dynamic=True)
        compiled(IDS[:1, :1].clone())
        compiled(IDS[:1].clone())
        report = backend.report()
    expected = {"single_token": 1} | ({"single_request": 1} if policy == "request" else {})
    assert dict(report.steps_unsplit) == expected


@pytest.mark.parametrize(("policy", "inside"), [("token", 1), ("request", 0)])
def test_counts_cuts_inside_a_request(policy, inside):
    with AFDBackend(AFDConfig(split=policy)) as backend, torch.no_grad():
        torch.compile(PlainModel(), backend=backend, dynamic=True)(IDS)
        report = backend.report()
    assert (report.steps_split, report.steps_mid_request) == (1, inside)
