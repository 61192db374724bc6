"""The connectors: same answers, nothing lost, clear failures, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expert_programs import (
    dense_layer,
    echo_program,
    failing_program,
    pause_program,
    swiglu_program,
    threads_program,
)

from afd_graph.connectors import Connector, WorkItem, create_connector, wire
from afd_graph.connectors.child_process import ChildProcess
from afd_graph.connectors.process import ProcessConnector
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.runtime import Channel
from afd_graph.timeline import Recorder

HIDDEN, EXPERTS, TOP_K = 16, 4, 2
OPTIONS = {"local": {}, "process": {"imports": ["expert_ops"]}, "emulated": {}}
ECHO, FAILING, PAUSING, BOTH, THREADS = 10, 11, 12, 13, 14
PAUSE_S = 2.0
SOON_S = 15.0  # less than any default timeout, and enough on a busy machine


def programs():
    return [
        swiglu_program(layer=0),
        swiglu_program(layer=1, transposed=True),
        echo_program(layer=ECHO),
        failing_program(layer=FAILING),
        pause_program(PAUSE_S, layer=PAUSING),
        swiglu_program(layer=BOTH, shared=True),
        threads_program(layer=THREADS),
    ]


@contextlib.contextmanager
def opened(name: str, timeout_s: float = 20.0, connector: Connector | None = None, **options):
    connector = connector or create_connector(name, {**OPTIONS[name], **options})
    channel = Channel(connector, credits=2, timeout_s=timeout_s)
    try:
        for program in programs():
            connector.add_program(program)
            channel.num_experts[program.layer] = program.num_experts
            if program.shared is not None:
                channel.shared_layers.add(program.layer)
        yield channel
    finally:
        channel.close()


@pytest.fixture(scope="module")
def process_channel() -> Iterator[Channel]:
    """One FFN process for the tests that do not harm it."""
    with opened("process") as channel:
        yield channel


@pytest.fixture(params=["local", "process"])
def channel(request) -> Iterator[Channel]:
    if request.param == "process":
        shared = request.getfixturevalue("process_channel")
        yield shared
        shared.abandon()
    else:
        with opened(request.param) as made:
            yield made


@pytest.fixture
def own_process() -> Iterator[Channel]:
    """An FFN process that a test may harm; it is ready."""
    with opened("process") as channel:
        step(channel, ECHO)
        yield channel


def batch(tokens: int):
    hidden = torch.randn(tokens, HIDDEN)
    weights, ids = torch.rand(tokens, EXPERTS).topk(TOP_K)
    return hidden, ids, weights


def step(channel: Channel, layer: int, tokens: int = 3, stage: int = 0) -> torch.Tensor:
    hidden, ids, weights = batch(tokens)
    ticket = channel.dispatch(hidden, ids, layer, stage)
    return channel.receive(ticket, hidden, weights, layer, stage)


class TestAnswers:
    @pytest.mark.parametrize("tokens", [0, 1, 50])
    @pytest.mark.parametrize("layer", [0, 1, BOTH])
    def test_equal_the_dense_loop(self, channel, layer, tokens):
        program = next(p for p in programs() if p.layer == layer)
        hidden, ids, weights = batch(tokens)
        ticket = channel.dispatch(hidden, ids, layer, 0)
        out = channel.receive(ticket, hidden, weights, layer, 0)
        expected = dense_layer(program, hidden, ids, weights)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", ["local", "process", "emulated"])
    def test_no_row_is_lost_doubled_or_swapped(self, name, process_channel):
        # Every row carries its token's id; experts that echo must give every token its own back.
        with contextlib.ExitStack() as stack:
            made = process_channel if name == "process" else stack.enter_context(opened(name))
            choose = random.Random(0)
            for _ in range(50):
                sent = []
                for stage in range(2):
                    tokens = choose.choice([0, 1, 2, 7, 300])
                    _, ids, _ = batch(tokens)
                    marks = torch.arange(tokens) + 1000 * stage
                    hidden = marks.float()[:, None].expand(tokens, HIDDEN).contiguous()
                    sent.append((made.dispatch(hidden, ids, ECHO, stage), hidden))
                for stage, (ticket, hidden) in enumerate(sent):
                    weights = torch.tensor([[1.0, 0.0]]).expand(hidden.shape[0], TOP_K)
                    out = made.receive(ticket, hidden, weights, ECHO, stage)
                    assert torch.equal(out, hidden)

    def test_rows_outside_the_buffer_are_taken_too(self, channel):
        rows, connector = torch.randn(3, HIDDEN), channel.connector
        ticket = connector.send(WorkItem(ECHO, 0, rows, [1, 1, 1, 0]))
        answer, shared = connector.wait(ticket, 20)
        assert torch.equal(answer, rows)
        assert shared is None
        connector.release(ticket)

    def test_a_slot_that_is_in_use_is_not_given_out(self, channel):
        connector, tickets = channel.connector, []
        for value in (1.0, 2.0):
            rows = connector.row_buffer(2, HIDDEN, torch.float32)
            tickets.append(connector.send(WorkItem(ECHO, 0, rows.fill_(value), [2, 0, 0, 0])))
        answers = [connector.wait(ticket, 20)[0] for ticket in tickets]
        assert [float(a.unique()) for a in answers] == [1.0, 2.0]
        connector.release(tickets[0])
        connector.row_buffer(2, HIDDEN, torch.float32).fill_(9.0)
        assert float(answers[1].unique()) == 2.0
        connector.release(tickets[1])

    def test_the_experts_times_are_told(self, channel):
        with Recorder(channel) as recorder:
            step(channel, PAUSING)
        costs = recorder.measure().costs
        assert costs is not None
        assert PAUSE_S <= costs.ffn_s < 2 * PAUSE_S
        assert costs.dispatch_s + costs.return_s < PAUSE_S


class TestErrors:
    def test_failing_experts_surface_at_the_receive(self, channel):
        hidden, ids, weights = batch(3)
        ticket = channel.dispatch(hidden, ids, FAILING, 1)
        with pytest.raises(
            ConnectorError,
            match=r"layers.11.mlp failed: ArithmeticError.*on strike.*\[layer=11, stage=1\]",
        ):
            channel.receive(ticket, hidden, weights, FAILING, 1)
        channel.abandon()
        step(channel, ECHO)  # only that item failed

    def test_more_items_than_credits(self, channel):
        connector = channel.connector
        for _ in range(2):
            connector.send(WorkItem(ECHO, 0, torch.zeros(1, HIDDEN), [1, 0, 0, 0]))
        with pytest.raises(ConnectorError, match="without a credit: 2 items are un-received"):
            connector.send(WorkItem(ECHO, 0, torch.zeros(1, HIDDEN), [1, 0, 0, 0]))
        connector.abandon()

    def test_unknown_ticket(self, channel):
        with pytest.raises(ConnectorError, match=r"ticket 12345 is not outstanding: \[\]"):
            channel.connector.wait(12345, 1)

    def test_other_experts_for_a_known_layer(self, channel):
        channel.connector.add_program(swiglu_program(layer=0))
        other = swiglu_program(layer=0)
        other.key = "other"
        with pytest.raises(ConnectorError, match=r"already has other experts.*layer=0"):
            channel.connector.add_program(other)

    def test_steps_after_an_abandoned_one_start_clean(self, channel):
        for layer in (PAUSING, FAILING, ECHO):
            hidden, ids, _ = batch(2)
            channel.dispatch(hidden, ids, layer, 0)
            channel.dispatch(hidden, ids, ECHO, 1)
            channel.abandon()
            assert torch.isfinite(step(channel, 0)).all()

    @pytest.mark.parametrize("name", ["local", "process"])
    def test_experts_that_take_too_long(self, name):
        with opened(name) as made:
            step(made, ECHO)
            made.timeout_s = 0.2
            begin = time.monotonic()
            with pytest.raises(
                ConnectorError, match=r"did not answer within 0\.2 s.*\[layer=12, stage=1\]"
            ):
                step(made, PAUSING, stage=1)
            assert time.monotonic() - begin < PAUSE_S, "it was not waited for"
            with pytest.raises(ConnectorError, match=r"has failed: .*did not answer.*layer=10"):
                step(made, ECHO)

    @pytest.mark.parametrize("name", ["local", "process", "emulated"])
    def test_a_closed_connector_refuses(self, name):
        connector = create_connector(name, OPTIONS[name])
        connector.close()
        connector.close()
        with pytest.raises(ConnectorError, match=f"the {name} connector is closed"):
            connector.send(WorkItem(0, 0, torch.zeros(1, HIDDEN), [1, 0, 0, 0]))

    @pytest.mark.parametrize("name", ["local", "process"])
    def test_close_releases_whoever_waits(self, name):
        with opened(name) as made:
            step(made, ECHO)
            ticket = made.connector.send(WorkItem(PAUSING, 0, torch.zeros(1, HIDDEN), [1, 0, 0, 0]))
            caught: list[Exception] = []

            def wait() -> None:
                try:
                    made.connector.wait(ticket, 30)
                except ConnectorError as error:
                    caught.append(error)

            waiter = threading.Thread(target=wait)
            waiter.start()
            time.sleep(0.2)
            made.close()
            waiter.join(SOON_S)
            assert not waiter.is_alive()
            assert "closed" in str(caught[0])


class TestLocal:
    def test_threads_hold_for_the_ffn_thread_alone(self):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            with opened("local", threads=1) as made:
                hidden, ids, weights = batch(2)
                ticket = made.dispatch(hidden, ids, THREADS, 0)
                out = made.receive(ticket, hidden, weights / weights.sum(1, True), THREADS, 0)
                torch.testing.assert_close(out, torch.ones_like(out))
            elsewhere: list[int] = []
            other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert [torch.get_num_threads(), *elsewhere] == [2, 2]
        finally:
            torch.set_num_threads(before)

    def test_cpus_that_do_not_exist(self):
        with (
            opened("local", cpus=[4096]) as made,
            pytest.raises(ConnectorError, match=r"cannot run on CPUs \[4096\].*layer=10"),
        ):
            step(made, ECHO)

    def test_a_forgotten_connector_takes_its_thread_along(self):
        connector = create_connector("local", {})
        connector.add_program(echo_program())
        connector.send(WorkItem(0, 0, torch.zeros(1, HIDDEN), [1, 0, 0, 0]))
        thread = connector._thread
        del connector
        gc.collect()
        thread.join(5)
        assert not thread.is_alive()

    @pytest.mark.parametrize("name", ["local", "process"])
    @pytest.mark.parametrize("threads", [0, "two"])
    def test_threads_must_be_a_number(self, name, threads):
        with pytest.raises(ConfigError, match=f"threads={threads!r} is not a number of threads"):
            create_connector(name, {"threads": threads})


def stat_of(pid: int) -> str | None:
    """State letter of a process, None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def gone(pid: int) -> bool:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        if stat_of(pid) in (None, "Z"):
            return True
        time.sleep(0.02)
    return False


def exchange_with_killed(channel, hidden, ids, weights, pid: int) -> None:
    ticket = channel.dispatch(hidden, ids, PAUSING, 1)
    os.kill(pid, signal.SIGKILL)
    channel.receive(ticket, hidden, weights, PAUSING, 1)


class TestProcessFaults:
    @pytest.mark.parametrize("moment", ["idle", "computing"])
    def test_killed(self, own_process, moment):
        pid = own_process.connector.pid
        begin = time.monotonic()
        if moment == "idle":
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        with pytest.raises(
            ConnectorError, match=rf"pid {pid}\) was killed by SIGKILL.*\[layer=12, stage=1\]"
        ):
            exchange_with_killed(own_process, *batch(3), pid)
        assert time.monotonic() - begin < SOON_S
        own_process.abandon()
        with pytest.raises(ConnectorError, match=r"has failed: .*SIGKILL"):
            step(own_process, ECHO)
        own_process.close()
        assert stat_of(pid) is None, "not even a zombie"

    def test_stopped(self, own_process):
        pid = own_process.connector.pid
        os.kill(pid, signal.SIGSTOP)
        own_process.timeout_s = 0.3
        begin = time.monotonic()
        with pytest.raises(
            ConnectorError,
            match=r"did not answer within 0\.3 s; it is stopped \[layer=10, stage=0\].*SIGCONT",
        ):
            step(own_process, ECHO)
        assert time.monotonic() - begin < SOON_S
        own_process.close()
        assert stat_of(pid) is None

    def test_ctrl_c_is_left_to_the_attention_side(self, own_process):
        os.kill(own_process.connector.pid, signal.SIGINT)
        step(own_process, ECHO)

    def test_weights_come_back_after_a_crash(self):
        program = swiglu_program(layer=0, transposed=True, shared=True)
        weights = [w for e in program.expressions() for _, w in e.weights]
        kept = [w.detach().clone() for w in weights]
        connector = create_connector("process", {})
        try:
            connector.add_program(program)
            assert [w.untyped_storage().nbytes() for w in weights] == [0] * 4
            os.kill(connector.pid, signal.SIGKILL)
        finally:
            connector.close()
        assert all(torch.equal(w, k) for w, k in zip(weights, kept, strict=True))

    def test_a_program_that_the_process_cannot_read(self):
        # Without imports=["expert_ops"] the operator is not known there.
        connector = create_connector("process", {})
        channel = Channel(connector, credits=2, timeout_s=20)
        try:
            connector.add_program(failing_program(layer=2))
            channel.num_experts[2] = EXPERTS
            with pytest.raises(
                ConnectorError,
                match=r"refused a program: the operator 'afdtest\.fail\.default' .*\[layer=2",
            ):
                step(channel, 2)
        finally:
            channel.close()

    def test_a_process_that_cannot_start(self):
        with (
            opened("process", imports=["no_such_module"]) as made,
            pytest.raises(ConnectorError, match=r"exited with status 1 \[layer=10, stage=0\]"),
        ):
            step(made, ECHO)

    def test_the_process_dies_with_the_attention_side(self, tmp_path):
        script = textwrap.dedent("""
            import os, signal, torch
            from expert_programs import echo_program
            from afd_graph.connectors import WorkItem, create_connector
            connector = create_connector("process", {})
            connector.add_program(echo_program())
            ticket = connector.send(WorkItem(0, 0, torch.zeros(1, 16), [1, 0, 0, 0]))
            connector.wait(ticket, 60)
            print(connector.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
        path = os.pathsep.join(sys.path)
        run = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert run.returncode == -signal.SIGKILL, run.stderr
        assert gone(int(run.stdout))

    def test_a_forgotten_connector_takes_its_process_along_and_gives_the_weights_back(self):
        program = swiglu_program()
        kept = program.routed.weights[0][1].detach().clone()
        connector = create_connector("process", {})
        connector.add_program(program)
        pid = connector.pid
        del connector
        gc.collect()
        assert gone(pid)
        assert torch.equal(program.routed.weights[0][1], kept)


# What stands in for the FFN process: it reads the header's fields and answers as a test says.
_IMPOSTOR = """
import json, socket, struct, sys
header = struct.Struct("FORMAT")
more = [0] * (len(header.unpack(bytes(header.size))) - 8)  # fields that no reply needs
link = socket.socket(fileno=json.loads(sys.argv[-1])["descriptor"])
link.send(header.pack(b"AFD1", 4, 0, 0, 0, 0, 0, -1, *more))
while True:
    packet = link.recv(4096)
    if not packet:
        break
    magic, kind, layer, stage, slot, ticket, rows, shared = header.unpack(packet[:header.size])[:8]
    if kind == 2:
        link.send(header.pack(magic, 5, layer, 0, 0, -1, 0, -1, *more))
    elif kind == 3:
        REPLY
"""
_ANSWER = "link.send(header.pack({}, {}, {}, stage, slot, {}, {}, shared, *more))"
_REPLIES = {
    "another ticket": _ANSWER.format("magic", 6, "layer", "ticket + 1", "rows"),
    "another layer": _ANSWER.format("magic", 6, "layer + 1", "ticket", "rows"),
    "fewer rows": _ANSWER.format("magic", 6, "layer", "ticket", "rows - 1"),
    "another magic": _ANSWER.format("b'HTTP'", 6, "layer", "ticket", "rows"),
    "unknown kind": _ANSWER.format("magic", 99, "layer", "ticket", "rows"),
    "twice ready": _ANSWER.format("magic", 4, "layer", "ticket", "rows"),
    "short": "link.send(b'AFD1')",
    "long": "link.send(bytes(60000))",
}


class _ImpostorConnector(ProcessConnector):
    reply: str

    def _spawn(self) -> ChildProcess:
        script = _IMPOSTOR.replace("FORMAT", wire._HEADER.format).replace("REPLY", self.reply)
        return ChildProcess(self._options, [sys.executable, "-S", "-c", script])


@pytest.mark.parametrize("reply", _REPLIES.values(), ids=_REPLIES)
def test_garbage_is_an_error_with_layer_and_stage(reply):
    connector = _ImpostorConnector()
    connector.reply = reply
    with opened("process", connector=connector) as made:
        with pytest.raises(ConnectorError, match=r"answered garbage: .*\[layer=10, stage=1\]"):
            step(made, ECHO, stage=1)
        pid = connector.pid
        made.close()
        assert stat_of(pid) is None


def starting(script: str, start_timeout_s: float) -> ProcessConnector:
    """A connector whose FFN process runs ``script``, and then the impostor that answers garbage."""
    connector = _ImpostorConnector(start_timeout_s=start_timeout_s)
    connector.reply = _REPLIES["short"]
    spawn = connector._spawn

    def spawn_slowly() -> ChildProcess:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "_IMPOSTOR", script + _IMPOSTOR)
            return spawn()

    connector._spawn = spawn_slowly
    return connector


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import time; time.sleep(60)\n", "did not answer within 1 s; it is running"),
        ("while True: pass\n", "did not answer within 1 s of processor time"),
    ],
)
def test_a_silent_process_is_given_up_at_start(script, message):
    with (
        opened("process", connector=starting(script, 1.0)) as made,
        pytest.raises(ConnectorError, match=message),
    ):
        step(made, ECHO)


def test_a_process_that_gets_little_time_may_start_slowly():
    script = """
import time
end = time.monotonic() + 2.5
while time.monotonic() < end:
    time.sleep(0.1)
    begin = time.process_time()
    while time.process_time() < begin + 0.01: pass
"""
    with (
        opened("process", connector=starting(script, 1.0)) as made,
        pytest.raises(ConnectorError, match="answered garbage"),  # so it was waited for
    ):
        step(made, ECHO)


class TestWeights:
    """Which weights can be moved to the FFN process."""

    def refused(self, program, message: str) -> None:
        connector = create_connector("process", {})
        try:
            with pytest.raises(ConnectorError, match=message):
                connector.add_program(program)
            assert connector.pid is None
        finally:
            connector.close()

    def with_weights(self, *weights: torch.Tensor):
        program = swiglu_program(layer=3)
        program.routed.weights = [
            (name, weight)
            for (name, _), weight in zip(program.routed.weights, weights, strict=True)
        ]
        return program

    def test_a_view_of_something_larger(self):
        whole = torch.randn(5, 16, 48)
        program = self.with_weights(whole[1:], torch.randn(4, 24, 16))
        self.refused(
            program,
            r"'experts\.up' cannot be moved.*view of a larger storage of 15360 bytes "
            r"\[layer=3\].*clone\(\)",
        )
        assert whole.untyped_storage().nbytes() == 15360
        assert program.routed.weights[1][1].untyped_storage().nbytes(), "nothing was moved"

    def test_memory_that_is_not_pytorch_s(self):
        borrowed = torch.frombuffer(bytearray(4 * 4 * 24 * 16), dtype=torch.float32).view(4, 24, 16)
        self.refused(
            self.with_weights(torch.randn(4, 16, 48), borrowed),
            r"'experts\.down' cannot be moved.*memory that PyTorch does not own",
        )

    def test_another_device(self):
        up = torch.empty(4, 16, 48, device="meta")
        self.refused(self.with_weights(up, torch.randn(4, 24, 16)), r"'experts\.up'.*on meta")

    def test_weights_that_were_moved_before(self):
        program = swiglu_program()
        first = create_connector("process", {})
        try:
            first.add_program(program)
            self.refused(program, r"'experts\.up' cannot be moved.*moved to an FFN process before")
        finally:
            first.close()

    def test_views_that_share_one_storage_between_them(self):
        # Both matrices as interleaved halves of one storage; the FFN side must see the same views.
        whole = torch.randn(4, 24, 64) / 4
        program = self.with_weights(whole[:, :16, :48], whole[:, :, 48:])
        rows = torch.randn(5, HIDDEN)
        local = create_connector("local", {})
        local.add_program(program)
        self.refused(program, "larger storage")  # rows 16.. of the first half are nobody's
        full = torch.randn(4 * 16 * 48 + 4 * 24 * 16) / 4
        up = full[: 4 * 16 * 48].view(4, 16, 48)
        down = full[4 * 16 * 48 :].view(4, 16, 24).transpose(1, 2)
        program, kept = self.with_weights(up, down), full.clone()
        connector = create_connector("process", {})
        item = WorkItem(3, 0, rows, [2, 1, 1, 1])
        local.close()
        local = create_connector("local", {})
        local.add_program(self.with_weights(up.clone(), down.clone()))
        try:
            connector.add_program(program)
            assert full.untyped_storage().nbytes() == 0
            answers = [c.wait(c.send(item), 60)[0].clone() for c in (connector, local)]
            torch.testing.assert_close(*answers)
        finally:
            connector.close()
            local.close()
        assert torch.equal(full, kept)


def resources(pid: int) -> tuple[int, int, int]:
    """Resident KiB, descriptors and threads of a process."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(status["VmRSS"].split()[0]), descriptors, int(status["Threads"])


@pytest.mark.parametrize("name", ["local", "process"])
def test_two_thousand_steps_of_random_sizes_leave_nothing(name):
    choose = random.Random(1)

    def steps(count: int) -> None:
        for _ in range(count):
            layer, sent = choose.choice([0, 1, BOTH]), []
            for stage in range(2):
                hidden, ids, weights = batch(choose.choice([0, 1, 3, 40, choose.randrange(400)]))
                sent.append((made.dispatch(hidden, ids, layer, stage), hidden, weights))
            for stage, (ticket, hidden, weights) in enumerate(sent):
                made.receive(ticket, hidden, weights, layer, stage)

    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with opened(name) as made:
        for layer in (0, 1, BOTH):  # the largest sizes first: slots and pools grow to them once
            for stage in range(2):
                step(made, layer, tokens=400, stage=stage)
        steps(200)
        pids = [os.getpid()] + ([made.connector.pid] if name == "process" else [])
        before = [resources(pid) for pid in pids]
        steps(1800)
        after = [resources(pid) for pid in pids]
    for (rss, fds, count), (rss_after, fds_after, count_after) in zip(before, after, strict=True):
        assert (fds_after, count_after) == (fds, count)
        assert rss_after - rss < 8 * 1024, "KiB"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


class TestEmulated:
    @pytest.mark.parametrize(("at_once", "expected"), [(1, [0.1, 0.2]), (2, [0.1, 0.15])])
    def test_one_engine_and_links_that_are_not_contended(self, at_once, expected):
        # With two items at once the second waits for the engine, not for the links.
        times = {"dispatch_s": 0.02, "ffn_s": 0.05, "return_s": 0.03, "credits": at_once}
        connector = create_connector("emulated", times)
        item = WorkItem(0, 0, torch.zeros(1, 2), [1])

        def ends() -> list[float]:
            begin, seen = time.perf_counter(), []
            for _ in range(2 // at_once):
                for ticket in [connector.send(item) for _ in range(at_once)]:
                    connector.wait(ticket, 5)
                    seen.append(time.perf_counter() - begin)
                    connector.release(ticket)
            return seen

        self.assert_reached(ends, expected)

    def test_times_in_proportion_to_the_rows(self):
        connector = create_connector("emulated", {"ffn_s": 0.02, "per_rows": 4})

        def ends() -> list[float]:
            begin = time.perf_counter()
            ticket = connector.send(WorkItem(0, 0, torch.zeros(12, 2), [12]))
            connector.wait(ticket, 5)
            connector.release(ticket)
            return [time.perf_counter() - begin]

        self.assert_reached(ends, [0.06])

    def assert_reached(self, ends, expected: list[float]) -> None:
        """Never early; and within 1 % once in fifty tries, since other programs may delay any."""
        for _ in range(50):
            seen = ends()
            assert all(end >= least for end, least in zip(seen, expected, strict=True))
            if seen == pytest.approx(expected, rel=0.01):
                return
        pytest.fail(f"expected {expected}, the last try took {seen}")

    def test_slower_than_the_timeout(self):
        connector = create_connector("emulated", {"ffn_s": 5.0})
        begin = time.perf_counter()
        with pytest.raises(ConnectorError, match=r"within 0\.05 s \[layer=2, stage=1\]"):
            connector.wait(connector.send(WorkItem(2, 1, torch.zeros(1, 2), [1])), 0.05)
        assert time.perf_counter() - begin < 5.0, "it was not waited for"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ffn_s": -1}, "ffn_s=-1 is negative"),
            ({"credits": 0}, "credits=0 is not positive"),
            ({"per_rows": 0}, "per_rows=0 is not positive"),
        ],
    )
    def test_impossible_options(self, options, message):
        with pytest.raises(ConfigError, match=message):
            create_connector("emulated", options)


def test_elsewhere_than_on_linux_the_process_connector_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux, this is darwin.*connector='local'"):
        ProcessConnector()
