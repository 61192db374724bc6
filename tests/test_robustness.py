"""A compiled model whose FFN side fails, and one that runs for long."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from afd_graph import AFDBackend, AFDConfig, ConnectorError
from tiny_models import PlainModel, deepseek_v2

IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    model = deepseek_v2()
    expected = None
    with torch.no_grad(), AFDBackend(AFDConfig(connector="process", timeout_s=5.0)) as backend:
        expected = model(IDS, use_cache=False).logits
        run = torch.compile(model, backend=backend, fullgraph=True)
        got = run(IDS, use_cache=False).logits
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        yield backend, lambda: run(IDS, use_cache=False).logits
    # Closing gave the weights back: the model works in eager mode again.
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_failing_ffn_process_ends_the_step_with_layer_and_stage(compiled, fault) -> None:
    backend, step = compiled

    def strike(event) -> None:
        if (event.kind, event.layer, event.stage) == ("dispatch", 1, 0):
            os.kill(backend.channel.connector.pid, fault)

    backend.channel.observers.append(strike)
    begin = time.monotonic()
    with pytest.raises(ConnectorError, match=r"layer=[01], stage=[01]"):
        step()
    assert time.monotonic() - begin < 5.0 + 10.0
    with pytest.raises(ConnectorError):
        step()


def test_an_answer_that_is_not_a_number_is_an_error(compiled) -> None:
    backend, step = compiled
    wait = backend.channel.connector.wait

    def broken(*arguments):
        rows, shared = wait(*arguments)
        rows[0].fill_(float("nan"))
        return rows, shared

    backend.channel.connector.wait = broken
    with pytest.raises(ConnectorError, match=r"NaN for finite rows.*layer=0, stage=0"):
        step()
    backend.channel.connector.wait = wait
    assert torch.isfinite(step()).all()


def test_an_answer_of_another_shape_is_an_error(compiled) -> None:
    backend, step = compiled
    wait = backend.channel.connector.wait
    backend.channel.connector.wait = lambda *arguments: (wait(*arguments)[0][1:], None)
    with pytest.raises(ConnectorError, match=r"wrong answer: expected .*layer=0, stage=0"):
        step()
    backend.channel.connector.wait = wait
    assert torch.isfinite(step()).all()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("connector", ["local", "process"])
def test_nothing_grows_over_two_thousand_steps(connector: str) -> None:
    torch._dynamo.reset()
    model = PlainModel()
    draw = random.Random(0)
    with torch.no_grad(), AFDBackend(AFDConfig(connector=connector)) as backend:
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        ids = torch.randint(0, 128, (1, 96))
        run(ids)

        def steps(number: int) -> None:
            for _ in range(number):
                run(ids[:, : draw.randint(2, 96)])

        steps(300)  # buffers reach their size
        before = _resources()
        steps(2000)
        after = _resources()
        report = backend.report()
    assert report.steps_split == 2301
    assert len(report.graphs) <= 2
    assert after["descriptors"] <= before["descriptors"]
    assert after["threads"] <= before["threads"]
    assert after["resident_mb"] <= before["resident_mb"] + 16


def _resources() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "resident_mb": int(resident.split()[1]) // 1024,
    }
