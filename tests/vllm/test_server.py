"""vLLM's OpenAI-compatible server, its engine and the FFN process, as their users run them.

One server a model family runs all policies, one after the other: a server takes many times as long
to start as 24 requests take. The first policy is the one of its command line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from conftest import mixed_requests
from openai_server import AFD, Server, serving

HERE = Path(__file__).parent
POLICIES = ("token", "request", "cost", "auto")
PATIENCE_S = 120
LONG = 500
# Of vLLM's metrics.
RUNNING = r"num_requests_running\{.*\}"
MADE = r"generation_tokens_total\{.*\}"

SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    # Plain attention has prefix caching and chunked prefill, which MLA on CPU has not.
    "deepseek_v2": (
        ["--enable-prefix-caching", "--max-num-batched-tokens", "64", "--block-size", "32"],
        {"VLLM_MLA_DISABLE": "1"},
    ),
    "deepseek_v3": ([], {}),
}


class Served:
    """A server, the processes below it, and its counters."""

    def __init__(self, family: str, server: Server) -> None:
        self.family = family
        self.server = server
        self.processes = descendants(server.process.pid)

    def ask(self, method: str, *args: str) -> Any:
        """Call a method of the worker."""
        body = {"method": method, "args": args}
        with self.server.post("/collective_rpc", body) as answer:
            text = answer.read()
        return json.loads(text)["results"][0] if text else None

    def run(self, policy: str, work: list[tuple[list[int], int]]) -> tuple[list[Any], Counter[str]]:
        """Send all requests at once; every other one is streamed."""
        self.ask("afd_set_policy", policy)
        self.server.post("/reset_prefix_cache", {}).close()
        before = Counter(self.ask("afd_counters"))
        with ThreadPoolExecutor(len(work)) as pool:
            asked = [
                pool.submit(self.server.complete, prompt, length, stream=i % 2 == 0)
                for i, (prompt, length) in enumerate(work)
            ]
            answers = [future.result() for future in asked]
        counters = Counter(self.ask("afd_counters"))
        counters.subtract(before)
        return answers, +counters


def descendants(pid: int) -> dict[int, str]:
    """Processes below ``pid``, with their command lines."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            found |= descendants(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture(scope="module", params=SERVERS)
def served(
    request: Any, checkpoint: Any, engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    arguments, environment = SERVERS[request.param]
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with serving(
        checkpoint(request.param),
        [
            *(*AFD, "--additional-config", json.dumps({"afd": {"split": POLICIES[0]}})),
            *("--worker-extension-cls", "policy.PolicySwitch", *arguments),
        ],
        tmp_path_factory.mktemp("server") / "server.log",
        {
            **engine.environment(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **environment,
        },
    ) as server:
        yield Served(request.param, server)


def test_tokens_and_counters_of_all_policies(served: Served, reference: Any) -> None:
    work = list(zip(*mixed_requests(), strict=True))
    done: list[str] = []
    total: Counter[str] = Counter()
    # Which requests meet in a step is up to chance: more rounds where four had few split steps.
    for policy in (*POLICIES, *["token"] * 4):
        if policy in done and total["split"] >= 100 and total["mid_request"] >= 20:
            break
        done.append(policy)
        answers, counters = served.run(policy, work)
        assert [answer.tokens for answer in answers] == reference(served.family), policy
        streamed = [answer for i, answer in enumerate(answers) if i % 2 == 0]
        # One part a token, but where the server had more than one at hand.
        assert sum(answer.parts for answer in streamed) > 2 * len(streamed)
        assert counters["split"] > 0, policy
        assert (counters["mid_request"] > 0) == (policy != "request"), policy
        total += counters
    print(f"\nserver of {served.family}: {len(done) * len(work)} requests, {dict(total)}")
    assert total["split"] >= 100
    assert total["mid_request"] >= 20
    if served.family == "deepseek_v2":
        assert metric(served.server, r"prefix_cache_hits_total\{.*\}") > 0


def test_counters_are_in_the_log(served: Served) -> None:
    """Once a second here; the last line is that of a step before the last."""
    time.sleep(1.1)
    served.server.complete([5, 6, 7], 2)
    counters = served.ask("afd_counters")
    log = served.server.log.read_text()
    split, inside = map(int, re.findall(r"so far: (\d+) split \((\d+) inside", log)[-1])
    assert 0 < split <= counters["split"] <= split + 2
    assert 0 < inside <= counters["mid_request"] <= inside + 2
    assert "two stages" in log


def test_processes_of_its_own(served: Served) -> None:
    commands = list(served.processes.values())
    assert any("EngineCore" in command for command in commands)
    assert sum("ffn_process" in command for command in commands) == 1


def test_an_aborted_request_harms_no_other(served: Served, reference: Any) -> None:
    work = list(zip(*mixed_requests(), strict=True))[:6]
    before = metric(served.server, MADE)
    with served.server.start(work[5][0], LONG) as leaving, ThreadPoolExecutor(6) as pool:
        leaving.readline()
        asked = [pool.submit(served.server.complete, *one) for one in work]
        leaving.readline()
        leaving.close()
        answers = [future.result().tokens for future in asked]
    assert answers == reference(served.family)[:6]
    wait_until(lambda: metric(served.server, RUNNING) == 0, "the aborted request goes on")
    made = metric(served.server, MADE) - before
    assert 0 < made - sum(length for _, length in work) < LONG
    assert served.server.complete(*work[0]).tokens == reference(served.family)[0]


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^vllm:{name} (\S+)$", text, re.M)))


def end(served: Served) -> None:
    if served.family == "deepseek_v2":
        served.server.process.send_signal(signal.SIGTERM)
    else:
        (ffn,) = (pid for pid, name in served.processes.items() if "ffn_process" in name)
        os.kill(ffn, signal.SIGKILL)


# The last test: it ends the servers.
def test_nothing_is_left_behind(served: Served) -> None:
    """V2: the server is told to stop in the middle of a request. V3: the FFN process dies."""
    with served.server.start([5, 6, 7], LONG) as asked:
        asked.readline()
        end(served)
        if served.family == "deepseek_v3":
            with suppress(OSError, HTTPException):
                # vLLM may end what it answered so far as if it were a whole answer.
                assert asked.read().count(b"data:") < LONG
    # The client has left: vLLM ends the engine before the answers, with or without the backend, and
    # its HTTP server may wait for one that nobody ends any more.
    wait_until(lambda: served.server.process.poll() is not None, "the server goes on")
    wait_until(
        lambda: not any(is_running(pid) for pid in served.processes), "processes are left behind"
    )
    if served.family == "deepseek_v3":
        assert re.search(r"FFN process.*\[layer=\d+, stage=\d\]", served.server.log.read_text())
