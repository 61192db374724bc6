"""Channels and operators: routing, weighted sum, pairing, checks, log."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from expert_programs import dense_layer, echo_program, swiglu_program
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from afd_graph import routing
from afd_graph.connectors import Connector, WorkItem, create_connector
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.executor import FFNExecutor
from afd_graph.routing import combine, group_by_expert, has_nan
from afd_graph.runtime import Channel, Event, channel

EXPERTS, TOP_K, HIDDEN = 4, 2, 16
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


class DirectConnector(Connector):
    """Runs the experts inside ``send`` and changes answers as a test says."""

    def __init__(self, credits: int = 2) -> None:
        self.credits = credits
        self.executor = FFNExecutor()
        self.answers: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.change = lambda rows, shared: (rows, shared)
        self.tickets = 0
        self.closes = 0
        self.abandons = 0

    def add_program(self, program):
        self.executor.add(program)

    def row_buffer(self, rows, width, dtype):
        return torch.full((rows, width), torch.nan, dtype=dtype)

    def send(self, item: WorkItem) -> int:
        self.answers[self.tickets] = self.executor.run(item)
        self.tickets += 1
        return self.tickets - 1

    def wait(self, ticket, timeout_s):
        return self.change(*self.answers[ticket])

    def release(self, ticket):
        del self.answers[ticket]

    def abandon(self):
        self.abandons += 1
        self.answers.clear()

    def close(self):
        self.closes += 1


@pytest.fixture
def open_channel():
    opened = []

    def build(program=None, credits: int = 2, **options) -> Channel:
        made = Channel(DirectConnector(), credits=credits, timeout_s=5, **options)
        opened.append(made)
        program = swiglu_program() if program is None else program
        made.connector.add_program(program)
        made.num_experts[program.layer] = program.num_experts
        if program.shared is not None:
            made.shared_layers.add(program.layer)
        return made

    yield build
    for made in opened:
        made.close()


def batch(tokens: int, dtype: torch.dtype = torch.float32):
    hidden = torch.randn(tokens, HIDDEN).to(dtype)
    weights, ids = torch.rand(tokens, EXPERTS).topk(TOP_K)
    return hidden, ids, weights


@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_layer_equals_the_dense_loop(open_channel, dtype, shared, tokens):
    program = swiglu_program(dtype=dtype, shared=shared)
    made = open_channel(program)
    hidden, ids, weights = batch(tokens, dtype)
    handle = torch.ops.afd.cam_dispatch(hidden, ids, 0, 1, made.name)
    assert handle.shape == (1,)
    assert handle.dtype is torch.int64
    out = torch.ops.afd.cam_receive(handle, hidden, weights, 0, 1, made.name)
    assert out.dtype is dtype
    assert made.outstanding == 0
    expected = dense_layer(program, hidden, ids, weights)
    error = (out.double() - expected).abs().amax() if tokens else 0.0
    assert error <= TOLERANCE[dtype] * (expected.abs().max() if tokens else 1)


def test_rows_are_grouped_stably():
    ids = torch.tensor([[2, 0], [0, 3], [2, 3]])
    source, counts, position = group_by_expert(ids, 5)
    assert source.tolist() == [0, 1, 0, 2, 1, 2]
    assert counts == [2, 0, 2, 2, 0]
    assert position.tolist() == [2, 0, 1, 4, 3, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_the_weighted_sum_is_taken_in_fp32_and_rounded_once(monkeypatch, dtype, one_pass, shared):
    monkeypatch.setattr(routing, "_ONE_PASS_VALUES", 0 if one_pass else 1 << 60)
    rows, weights = torch.randn(12, 8).to(dtype), torch.rand(6, 2)
    extra = torch.randn(6, 8).to(dtype) if shared else None
    position = torch.randperm(12)
    out = combine(rows, position, weights, dtype, extra)
    exact = (rows.double()[position].view(6, 2, 8) * weights.double()[..., None]).sum(1)
    exact += 0 if extra is None else extra.double()
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all()


def test_the_result_is_fresh(open_channel):
    made = open_channel(echo_program())
    hidden, ids, weights = batch(3)
    kept = hidden.clone()
    out = made.receive(made.dispatch(hidden, ids, 0, 0), hidden, weights, 0, 0)
    out.mul_(0)
    assert torch.equal(hidden, kept)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0], False),
        ([torch.inf, -torch.inf], False),
        ([torch.nan, 1.0], True),
        ([torch.inf, torch.nan, -torch.inf], True),
        ([], False),
    ],
)
def test_nan_is_found_and_infinity_is_not_nan(values, expected):
    assert has_nan(torch.tensor(values)) is expected


class TestOperators:
    def test_grouped_mm(self):
        for dtype in TOLERANCE:
            rows, weight = torch.randn(5, 4).to(dtype), torch.randn(3, 4, 6).to(dtype)
            opcheck(torch.ops.afd.grouped_mm, (rows, weight, torch.tensor([2, 0, 3])))

    def test_dispatch(self, open_channel, monkeypatch):
        # opcheck compares the results of several calls: let all have the same ticket.
        made = open_channel(credits=1000)
        monkeypatch.setattr(made.connector, "send", lambda item: 7)
        hidden, ids, _ = batch(3)
        opcheck(torch.ops.afd.cam_dispatch, (hidden, ids, 0, 0, made.name))

    def test_receive(self, open_channel, monkeypatch):
        # opcheck calls with the same handle again and again: let every call see the same answer.
        made = open_channel()
        hidden, ids, weights = batch(3)
        handle = torch.ops.afd.cam_dispatch(hidden, ids, 0, 0, made.name)
        pending = made._pending.copy()
        monkeypatch.setattr(made.connector, "release", lambda ticket: made._pending.extend(pending))
        opcheck(torch.ops.afd.cam_receive, (handle, hidden, weights, 0, 0, made.name))

    def test_shapes_are_checked_under_fake_tensors(self):
        with torch.device("meta"), pytest.raises(RuntimeError, match="inner sizes differ"):
            torch.ops.afd.grouped_mm(torch.ones(2, 3), torch.ones(1, 4, 5), torch.ones(1))


class TestRefusals:
    def test_dispatch_without_a_credit(self, open_channel):
        made = open_channel(credits=1)
        hidden, ids, _ = batch(2)
        made.dispatch(hidden, ids, 0, 0)
        with pytest.raises(
            ConnectorError,
            match=r"without a credit: 1 allowed, un-received \[\(0, 0\)\] \[layer=0, stage=1\]",
        ):
            made.dispatch(hidden, ids, 0, 1)

    @pytest.mark.parametrize(("ticket", "layer", "stage"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
    def test_receive_of_another_dispatch(self, open_channel, ticket, layer, stage):
        made = open_channel()
        hidden, ids, weights = batch(2)
        made.dispatch(hidden, ids, 0, 0)
        with pytest.raises(ConnectorError, match=r"does not match the oldest dispatch") as caught:
            made.receive(ticket, hidden, weights, layer, stage)
        assert (caught.value.layer, caught.value.stage) == (layer, stage)

    def test_layer_without_experts(self, open_channel):
        hidden, ids, _ = batch(2)
        with pytest.raises(ConnectorError, match=r"layers here: \[0\] \[layer=9, stage=0\]"):
            open_channel().dispatch(hidden, ids, 9, 0)

    def test_expert_that_does_not_exist(self, open_channel):
        hidden, ids, _ = batch(2)
        ids[1, 1] = EXPERTS
        with pytest.raises(ConnectorError, match="the gate chose expert 4 of 4"):
            open_channel().dispatch(hidden, ids, 0, 0)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda rows, shared: (rows[1:], shared), r"expected rows \(4, 16\).*got \(3, 16\)"),
            (lambda rows, shared: (rows.half(), shared), "torch.float32, got .*torch.float16"),
            (lambda rows, shared: (rows, None), r"expected shared rows \(2, 16\).*got none"),
            (lambda rows, shared: (rows, shared[:, 1:]), r"shared rows.*got \(2, 15\)"),
        ],
    )
    def test_wrong_answers(self, open_channel, change, message):
        made = open_channel(swiglu_program(shared=True))
        made.connector.change = change
        hidden, ids, weights = batch(2)
        ticket = made.dispatch(hidden, ids, 0, 1)
        with pytest.raises(ConnectorError, match=message) as caught:
            made.receive(ticket, hidden, weights, 0, 1)
        assert (caught.value.layer, caught.value.stage) == (0, 1)
        assert made.connector.answers == {}, "the credit must come back"

    def test_nan_for_finite_rows(self, open_channel):
        hidden, ids, weights = batch(2)
        for check_answers in (True, False):
            made = open_channel(check_answers=check_answers)
            made.connector.change = lambda rows, shared: (rows.fill_(torch.nan), shared)
            ticket = made.dispatch(hidden, ids, 0, 1)
            if check_answers:
                with pytest.raises(ConnectorError, match=r"NaN for finite rows \[layer=0, stage=1"):
                    made.receive(ticket, hidden, weights, 0, 1)
            else:
                assert made.receive(ticket, hidden, weights, 0, 1).isnan().all()

    def test_nan_that_the_rows_had_passes(self, open_channel):
        made = open_channel()
        hidden, ids, weights = batch(2)
        hidden[0] = torch.nan
        out = made.receive(made.dispatch(hidden, ids, 0, 0), hidden, weights, 0, 0)
        assert out[0].isnan().all()
        assert not out[1].isnan().any()

    def test_closed_channel(self, open_channel):
        made = open_channel()
        made.close()
        hidden, ids, _ = batch(2)
        with pytest.raises(ConnectorError, match=f"channel '{made.name}' is not open.*Remedy"):
            torch.ops.afd.cam_dispatch(hidden, ids, 0, 0, made.name)
        with pytest.raises(ConnectorError):
            channel(made.name)

    def test_unknown_connector_and_options(self):
        with pytest.raises(ConfigError, match=r"'carrier_pigeon' is not known.*'local'"):
            create_connector("carrier_pigeon", {})
        for name in ("local", "process", "emulated"):
            with pytest.raises(ConfigError, match=f"'speed'.*do not fit connector '{name}'"):
                create_connector(name, {"speed": 2})


def test_an_abandoned_step_leaves_nothing(open_channel):
    made = open_channel()
    hidden, ids, weights = batch(2)
    made.dispatch(hidden, ids, 0, 0)
    made.dispatch(hidden, ids, 0, 1)
    made.abandon()
    made.abandon()
    assert made.outstanding == 0
    assert made.connector.abandons == 1
    made.receive(made.dispatch(hidden, ids, 0, 0), hidden, weights, 0, 0)


def test_observers_see_every_crossing(open_channel):
    made = open_channel()
    events: list[Event] = []
    made.observers.append(events.append)
    hidden, ids, weights = batch(3)
    made.receive(made.dispatch(hidden, ids, 0, 1), hidden, weights, 0, 1)
    assert [(e.kind, e.layer, e.stage, e.rows) for e in events] == [
        ("dispatch", 0, 1, 3),
        ("receive", 0, 1, 3),
    ]
    times = [t for e in events for t in (e.begin_ns, e.end_ns)]
    assert times == sorted(times)


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_layout_log_has_the_reference_s_fields_and_reads_no_values(open_channel, caplog):
    launched = []
    hidden, ids, weights = batch(5)
    for layout_log in (False, True):
        made = open_channel(layout_log=layout_log)
        with Launches() as launches, caplog.at_level(logging.WARNING, "afd_graph"):
            made.receive(made.dispatch(hidden, ids, 0, 0), hidden, weights, 0, 0)
        launched.append(launches.names)
    assert launched[0] == launched[1]
    lines = [record.getMessage() for record in caplog.records]
    fields = (
        "sequence_parallel=False tp_rank=0 tp_size=1 parent_tokens=5 padded_tokens=5 "
        "local_slice=(0,5) local_tokens=5 tp_all_gather=False"
    )
    assert lines == [
        f"AFD Async CAM layout; phase={phase} {fields}" for phase in ("dispatch", "restore")
    ]
    assert all(re.fullmatch(r"afd_graph\..*", record.name) for record in caplog.records)
