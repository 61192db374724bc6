"""Measured traces: recorded over a compiled model, written, read, set on one clock, merged."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_graph import AFDBackend, AFDConfig
from afd_graph.errors import ConfigError, ConnectorError, PlanError
from afd_graph.runtime import Event
from afd_graph.schedule_ir import StageCosts, by_credits
from afd_graph.simulate import simulate
from afd_graph.trace import to_trace
from afd_graph.tracing import Trace, TracedStep, clock_offset, merge
from tiny_models import PlainModel

IDS = torch.arange(14).view(2, 7)


def perfect(costs: StageCosts, layers: int, *, ffn_clock: int = 0, begin: int = 0) -> TracedStep:
    """The step of a perfect machine, times in ns; the experts' clock is behind by ``ffn_clock``."""
    timeline = simulate(by_credits(layers, 2, 2), costs)
    at = {(i.engine, i.item): i for i in timeline.intervals}
    events = []
    for step in by_credits(layers, 2, 2):
        item = (step.layer, step.stage)
        ffn, back = at["ffn", item], at["link back", item]
        if step.kind == "dispatch":
            end = begin + int(at["attention", item].end_s)
            events.append(Event("dispatch", *item, end, end, 5))
        elif step.kind == "receive":
            end = begin + int(back.end_s)
            known = max(events[-1].end_ns, end)
            ffn_ns = tuple(begin + int(t) - ffn_clock for t in (ffn.begin_s, ffn.end_s))
            events.append(Event("receive", *item, events[-1].end_ns, known, 5, ffn_ns))
    return TracedStep(begin, max(e.end_ns for e in events), "token", None, tuple(events))


class TestRecording:
    def test_off_by_default(self):
        with AFDBackend() as backend, torch.no_grad():
            torch.compile(PlainModel(), backend=backend)(IDS)
            assert backend.channel.observers == []
            with pytest.raises(ConfigError, match=r"keeps no trace.*AFDConfig\(trace=True\)"):
                backend.trace()

    @pytest.mark.parametrize("connector", ["local", "process"])
    def test_every_node_and_item_of_every_step(self, connector, tmp_path):
        config = AFDConfig(trace=True, connector=connector, dump_dir=str(tmp_path))
        with AFDBackend(config) as backend, torch.no_grad():
            compiled = torch.compile(PlainModel(layers=3), backend=backend, dynamic=True)
            for _ in range(3):
                compiled(IDS)
            compiled(IDS[:1, :1].clone())
            trace = backend.trace()
        split, unsplit = trace.steps[1], trace.steps[3]
        assert [step.policy for step in trace.steps] == ["token"] * 3 + [None]
        assert unsplit.reason == "single_token"
        assert split.rows == (8, 6)
        for step, stages in ((split, 2), (unsplit, 1)):
            order = by_credits(3, 2, stages)
            crossings = [(s.kind, s.layer, s.stage) for s in order if s.kind != "attention"]
            assert [(e.kind, e.layer, e.stage) for e in step.events] == crossings
            assert all(step.begin_ns <= e.begin_ns <= e.end_ns <= step.end_ns for e in step.events)
            for event in step.events:
                assert (event.ffn_ns is not None) == (event.kind == "receive")
        assert trace.timeline(1).ranks("ffn") == [0]
        assert trace.predicted(1).stages == [0, 1]
        assert Trace.read(tmp_path / "trace.rank0.json") == trace

    def test_a_report_takes_its_trace_to_another_process(self):
        with AFDBackend(AFDConfig(trace=True)) as backend, torch.no_grad():
            torch.compile(PlainModel(layers=2), backend=backend)(IDS)
            there = pickle.loads(pickle.dumps(backend.report()))
            assert there == backend.report()
            assert there.trace() == backend.trace()
            assert there.observers == []

    def test_a_failed_step_leaves_nothing_in_the_next(self):
        with AFDBackend(AFDConfig(trace=True)) as backend, torch.no_grad():
            compiled = torch.compile(PlainModel(layers=2), backend=backend)
            compiled(IDS)

            def fail(event: Event) -> None:
                if event.kind == "dispatch" and event.layer == 1:
                    raise ConnectorError("broken on purpose")

            backend.channel.observers.append(fail)
            with pytest.raises(ConnectorError, match="on purpose"):
                compiled(IDS)
            backend.channel.observers.remove(fail)
            compiled(IDS)
            trace = backend.trace()
        assert len(trace.steps) == 2
        assert [len(step.events) for step in trace.steps] == [8, 8]
        trace.timeline(1)

    def test_tracing_does_not_compile_again(self):
        assert AFDConfig(trace=True).digest() == AFDConfig().digest()


class TestClocks:
    costs = StageCosts(1000, 700, 200, 300)

    @given(
        away=st.integers(-(10**12), 10**12),
        costs=st.builds(StageCosts, *[st.integers(10, 10**6)] * 4),
    )
    @settings(max_examples=60, deadline=None)
    def test_a_shifted_clock_is_found_within_the_links(self, away, costs):
        step = perfect(costs, 4, ffn_clock=away, begin=10**6)
        offset = clock_offset(step.events)
        _, _, out, back = costs.uniform()
        assert abs(offset - away) <= max(out, back)

    def test_equal_clocks_are_left_alone(self):
        assert clock_offset(perfect(self.costs, 4).events) == 0

    def test_no_offset_fits(self):
        step = perfect(self.costs, 4)
        drifted = [
            dataclasses.replace(e, ffn_ns=(e.ffn_ns[0] + 10**6, e.ffn_ns[1] + 10**6))
            if e.kind == "receive" and e.layer > 2
            else e
            for e in step.events
        ]
        with pytest.raises(PlanError, match="no clock offset fits"):
            clock_offset(drifted)


class TestMerging:
    costs = StageCosts(1000, 700, 200, 200)

    def traces(self, *clocks: int) -> list[Trace]:
        """Ranks that run the same step at the same time, each with a clock of its own."""
        return [
            Trace((perfect(self.costs, 3, ffn_clock=clock, begin=clock + 50 * rank),), 2, rank)
            for rank, clock in enumerate(clocks)
        ]

    def test_ranks_meet_on_the_experts_clock(self):
        (timeline,) = merge(self.traces(10**9, -(10**7)))
        first, second = (timeline.lane("attention", rank) for rank in (0, 1))
        # The second rank's step began 50 ns later.
        for a, b in zip(first, second, strict=True):
            assert b.begin_s - a.begin_s == pytest.approx(50e-9, abs=1e-15)
        assert timeline.ranks("ffn") == [0, 1]
        # Each rank's experts begin when its rows are there, on the common clock.
        for rank in (0, 1):
            at: dict[tuple[int, int], float] = {}
            for interval in timeline.lane("attention", rank):
                at.setdefault(interval.item, interval.end_s)
            for interval in timeline.lane("ffn", rank):
                assert interval.source == rank
                assert -2e-7 <= interval.begin_s - at[interval.item] <= 1.5e-6

    def test_perfetto_joins_each_rank_with_its_own_experts(self):
        (timeline,) = merge(self.traces(0, 5 * 10**8))
        events = to_trace(timeline)["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        flows: dict[int, list[str]] = {}
        for event in events:
            if event["ph"] in "stf":
                flows.setdefault(event["id"], []).append(processes[event["pid"]])
        assert len(flows) == 2 * 3 * 2  # ranks, layers, stages
        for path in flows.values():
            assert len({name.split()[-1] for name in path}) == 1, path
            assert any("FFN" in name for name in path)

    def test_the_last_steps_are_matched(self):
        one, two = self.traces(0, 0)
        longer = dataclasses.replace(one, steps=(perfect(self.costs, 9), *one.steps))
        assert merge([longer, two]) == merge([one, two])

    def test_refusals(self):
        one, _ = self.traces(0, 0)
        for traces in ([], [one, one]):
            with pytest.raises(PlanError, match=r"cannot be merged.*one trace of each"):
                merge(traces)


class TestFiles:
    @pytest.mark.parametrize(
        "text",
        ["", "{}", '{"format": "other"}', '{"format": "afd-graph trace/1", "steps": [{}]}', "[1"],
    )
    def test_no_trace(self, tmp_path, text):
        path = tmp_path / "trace.json"
        path.write_text(text)
        with pytest.raises(PlanError, match="is not a trace"):
            Trace.read(path)

    def test_broken_events(self, tmp_path):
        path = tmp_path / "trace.json"
        trace = Trace((perfect(StageCosts(10, 10, 1, 1), 1),), 2)
        trace.write(path)
        assert Trace.read(path) == trace
        for broken in (["jump", 0, 0, 0, 0, 0], ["receive", 0, 0, 1, 2, 3, 4]):
            found = json.loads(path.read_text())
            found["steps"][0]["events"][0] = broken
            (tmp_path / "broken.json").write_text(json.dumps(found))
            with pytest.raises(PlanError, match="is not a trace"):
                Trace.read(tmp_path / "broken.json")


def test_predicted_is_the_model_of_the_measured_costs():
    costs = StageCosts(2000, 900, 100, 200)
    trace = Trace((perfect(costs, 6),), 2)
    expected = simulate(by_credits(6, 2, 2), costs).total_s * 1e-9
    assert trace.predicted(0).total_s == pytest.approx(expected, rel=1e-6)
    assert trace.timeline(0).total_s == pytest.approx(expected, rel=1e-6)
