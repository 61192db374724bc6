"""Measured timelines, and timelines as Perfetto traces."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_graph.connectors.base import Connector
from afd_graph.errors import PlanError
from afd_graph.runtime import Channel, Event
from afd_graph.schedule_ir import StageCosts, receive_first, send_first, unsplit
from afd_graph.simulate import simulate
from afd_graph.timeline import ENGINES, Interval, Recorder, Timeline, measure
from afd_graph.trace import to_trace, write_trace


def replay(order, costs, *, combine=0, call=0):
    """Events and FFN times, in ns, of a perfect machine that runs ``order``.

    ``combine`` and ``call`` occupy the attention engine at the end of a receive and in a dispatch.
    """
    events, busy, queue, answers = [], [], [], {}
    now = free = 0
    for step in order:
        item = (step.layer, step.stage)
        begin = now
        if step.kind == "attention":
            now += costs.attention_s
            continue
        if step.kind == "dispatch":
            now += call
            queue.append((now + costs.dispatch_s, item))
        else:
            while item not in answers:
                arrival, served = queue.pop(0)
                start = max(arrival, free)
                free = start + costs.ffn_s
                busy.append((*served, start, free))
                answers[served] = free + costs.return_s
            now = max(now, answers[item]) + combine
        events.append(Event(step.kind, *item, begin, now, 1))
    return events, busy


nanoseconds = st.integers(1, 1000)


class TestMeasure:
    @pytest.mark.parametrize("order", [receive_first(4), send_first(4), unsplit(4)])
    @given(a=nanoseconds, f=nanoseconds, c=nanoseconds, d=nanoseconds)
    @settings(max_examples=60, deadline=None)
    def test_recovers_the_simulated_step(self, order, a, f, c, d):
        costs = StageCosts(a, f, c, d)
        events, busy = replay(order, costs)
        predicted = simulate(order, costs)
        measured = measure(events, busy, begin_ns=0)
        assert measured.timeline.total_s == pytest.approx(predicted.total_s * 1e-9)
        for engine in ("attention", "ffn"):
            assert measured.timeline.utilisation(engine) == pytest.approx(
                predicted.utilisation(engine)
            )
        for engine in ("ffn", "link out"):
            seen = [(i.layer, i.stage, i.begin_s, i.end_s) for i in measured.timeline.lane(engine)]
            assert seen == [
                (
                    i.layer,
                    i.stage,
                    pytest.approx(i.begin_s * 1e-9),
                    pytest.approx(i.end_s * 1e-9),
                )
                for i in predicted.lane(engine)
            ]
        assert measured.costs.uniform() == pytest.approx([x * 1e-9 for x in (a, f, c, d)])

    def test_calls_and_combination_are_attention_work(self):
        costs = StageCosts(1000, 100, 50, 50)
        events, busy = replay(receive_first(6), costs, combine=20, call=30)
        a, f, c, d = measure(events, busy, begin_ns=0).costs.uniform()
        assert (a, f, c, d) == pytest.approx((1050e-9, 100e-9, 50e-9, 50e-9))

    def test_without_a_ready_answer_combination_counts_as_return(self):
        events, busy = replay(unsplit(3), StageCosts(10, 100, 5, 7), combine=3)
        assert measure(events, busy, begin_ns=0).costs.return_s == pytest.approx(10e-9)

    def test_the_other_clock_is_shifted(self):
        events, busy = replay(send_first(3), StageCosts(10, 20, 5, 7))
        expected = measure(events, busy, begin_ns=0)
        away = [(layer, stage, begin + 10**12, end + 10**12) for layer, stage, begin, end in busy]
        assert measure(events, away, begin_ns=0, ffn_clock_ns=-(10**12)) == expected

    def test_without_ffn_times_only_attention_is_known(self):
        events, _ = replay(receive_first(3), StageCosts(10, 20, 5, 7))
        measured = measure(events, begin_ns=0)
        assert measured.costs is None
        assert measured.timeline.ranks("ffn") == []
        assert measured.timeline.total_s == pytest.approx(
            simulate(receive_first(3), StageCosts(10, 20, 5, 7)).total_s * 1e-9
        )
        assert measured.timeline.busy_s("attention") == pytest.approx(60e-9)

    def test_experts_that_begin_within_the_dispatch_call(self):
        events = [Event("dispatch", 0, 0, 0, 100, 1), Event("receive", 0, 0, 100, 300, 1)]
        costs = measure(events, [(0, 0, 60, 260)]).costs
        assert costs.uniform() == pytest.approx((100e-9, 200e-9, 0, 40e-9))

    def test_nothing_recorded(self):
        assert measure([]).timeline == Timeline((), "measured")

    @pytest.mark.parametrize(
        ("events", "message"),
        [
            (
                [Event("dispatch", 3, 1, 0, 1, 1)],
                r"not both dispatched and received \[layer=3, stage=1\].*whole steps",
            ),
            (
                [Event("dispatch", 0, 0, 0, 1, 1), Event("receive", 0, 0, 1, 2, 1)] * 2,
                r"two dispatch events for one work item.*one recorder per step",
            ),
        ],
    )
    def test_broken_recordings_are_refused(self, events, message):
        with pytest.raises(PlanError, match=message):
            measure(events)


class Echo(Connector):
    """Answers at once with the rows it got."""

    def __init__(self):
        self.items = {}

    def add_program(self, program):
        raise NotImplementedError

    def row_buffer(self, rows, width, dtype):
        return torch.empty(rows, width, dtype=dtype)

    def send(self, item):
        self.items[len(self.items)] = item
        return len(self.items) - 1

    def wait(self, ticket, timeout_s):
        return self.items[ticket].rows, None

    def release(self, ticket):
        pass

    def abandon(self):
        pass

    def close(self):
        pass


class TestRecorder:
    def test_records_one_step_of_a_channel(self):
        channel = Channel(Echo(), credits=1, timeout_s=1)
        channel.num_experts[0] = 1
        rows, ids = torch.ones(3, 2), torch.zeros(3, 1, dtype=torch.int64)
        with Recorder(channel, rank=5) as recorder:
            time.sleep(0.002)
            ticket = channel.dispatch(rows, ids, 0, 0)
            channel.receive(ticket, rows, torch.ones(3, 1), 0, 0)
        channel.receive(channel.dispatch(rows, ids, 0, 0), rows, torch.ones(3, 1), 0, 0)
        channel.close()
        assert [event.kind for event in recorder.events] == ["dispatch", "receive"]
        assert channel.observers == []
        timeline = recorder.measure(title="step").timeline
        assert timeline.title == "step"
        assert timeline.ranks("attention") == [5]
        assert timeline.busy_s("attention", 5) >= 0.002

    def test_a_failed_step_stops_recording(self):
        channel = Channel(Echo(), credits=1, timeout_s=1)
        with pytest.raises(ZeroDivisionError), Recorder(channel):
            _ = 1 / 0
        assert channel.observers == []
        channel.close()


def slices(trace):
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def flows(trace):
    found = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            found.setdefault(event["id"], []).append(event)
    return list(found.values())


def slice_of(trace, flow_event):
    """The slices of one thread around a flow event."""
    return [
        e
        for e in slices(trace)
        if (e["pid"], e["tid"]) == (flow_event["pid"], flow_event["tid"])
        and e["ts"] <= flow_event["ts"] < e["ts"] + e["dur"]
    ]


class TestTrace:
    @pytest.mark.parametrize("order", [receive_first(4), send_first(4, 3), unsplit(2)])
    def test_arrows_join_one_work_item(self, order):
        trace = to_trace(simulate(order, StageCosts(1e-3, 2e-3, 0.5e-3, 0.25e-3)))
        layers = {step.layer for step in order}
        joined = set()
        for path in flows(trace):
            assert [e["ph"] for e in path] == ["s"] + ["t"] * (len(path) - 2) + ["f"]
            assert [e["ts"] for e in path] == sorted(e["ts"] for e in path)
            bound = [slice_of(trace, event) for event in path]
            assert all(len(around) == 1 for around in bound)
            hops = [around[0] for around in bound]
            item = hops[0]["args"]
            assert [hop["cat"] for hop in hops[:4]] == list(ENGINES)
            assert all(hop["args"] == item for hop in hops[:4])
            if item["layer"] + 1 in layers:
                assert hops[4]["cat"] == "attention"
                assert hops[4]["args"] == {"layer": item["layer"] + 1, "stage": item["stage"]}
            joined.add((item["layer"], item["stage"]))
        assert joined == {(step.layer, step.stage) for step in order}

    def test_links_without_cost_are_passed_over(self):
        trace = to_trace(simulate(receive_first(2), StageCosts(1, 1)))
        hops = [[slice_of(trace, e)[0]["cat"] for e in path] for path in flows(trace)]
        assert hops == [["attention", "ffn", "attention"]] * 2 + [["attention", "ffn"]] * 2

    def test_a_measured_step_ends_in_its_own_combination(self):
        events, busy = replay(receive_first(2), StageCosts(1000, 100, 50, 50), combine=20)
        trace = to_trace(measure(events, busy, begin_ns=0).timeline)
        for path in flows(trace):
            first, last = slice_of(trace, path[0])[0], slice_of(trace, path[-1])[0]
            assert last["cat"] == "attention"
            assert last["args"] == first["args"]

    def test_slices_of_one_thread_do_not_overlap(self):
        trace = to_trace(simulate(send_first(6), StageCosts(1e-4 / 3, 1e-4 / 7, 1e-4, 1e-4)))
        threads = {}
        for e in slices(trace):
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        for lane in threads.values():
            lane.sort()
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(lane))

    def test_every_thread_has_a_name(self):
        timeline = simulate(receive_first(2), StageCosts(1, 1, 1, 1))
        trace = to_trace(timeline)
        names = {}
        for e in trace["traceEvents"]:
            if e["ph"] == "M" and e["name"] in ("process_name", "thread_name"):
                names[e["name"], e["pid"], e["tid"]] = e["args"]["name"]
        assert {names["thread_name", e["pid"], e["tid"]] for e in slices(trace)} == {
            "attention",
            "ffn",
            *(f"{link}, stage {stage}" for link in ("link out", "link back") for stage in (0, 1)),
        }
        processes = {names["process_name", e["pid"], 0] for e in slices(trace)}
        assert processes == {"attention rank 0", "FFN rank 0"}

    def test_several_timelines_stay_apart(self):
        one = simulate(receive_first(2), StageCosts(1, 1), title="predicted")
        moved = tuple(
            Interval(i.engine, i.layer, i.stage, i.begin_s + 9, i.end_s + 9) for i in one.intervals
        )
        trace = to_trace([one, Timeline(moved, "measured")])
        assert len({e["pid"] for e in slices(trace)}) == 4
        assert len(flows(trace)) == 8
        assert min(e["ts"] for e in slices(trace) if e["pid"] % 2) == 0

    def test_several_ranks_share_the_experts(self):
        base = simulate(unsplit(1), StageCosts(1, 1)).intervals
        second = tuple(
            Interval(i.engine, i.layer, i.stage, i.begin_s, i.end_s, rank=1)
            for i in base
            if i.engine != "ffn"
        )
        trace = to_trace(Timeline(base + second))
        assert len(flows(trace)) == 2
        assert len({e["pid"] for e in slices(trace)}) == 3

    def test_is_json_and_deterministic(self, tmp_path):
        timeline = simulate(send_first(3), StageCosts(1, 1, 0.1, 0.1))
        write_trace(timeline, tmp_path / "a.json")
        write_trace(timeline, tmp_path / "b.json")
        text = (tmp_path / "a.json").read_text()
        assert text == (tmp_path / "b.json").read_text()
        read = json.loads(text)
        assert read == to_trace(timeline)
        for event in read["traceEvents"]:
            assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
