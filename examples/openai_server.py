"""Start vLLM's OpenAI-compatible server as its users do, send it requests, and stop it.

The server, its engine and the FFN process are processes of their own. One thread each and no
binding: on a busy machine spinning threads stall one another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from ports import free_port

AFD = ("--compilation-config", '{"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"}')
"""Arguments of a server whose model the backend compiles."""

# vLLM's rotary kernel for CPU is wrong for queries with three axes; docs/vllm.md.
PLAIN = (
    "--compilation-config",
    '{"mode": "NONE", "custom_ops": ["all", "-rotary_embedding"]}',
)
"""Arguments of a server without the backend."""

_TIMEOUT_S = 600


@dataclass(frozen=True)
class Answer:
    """What came back for a request.

    Attributes:
        tokens: their ids.
        first_s: seconds until the first came.
        parts: messages that they came in; 1 when they were not streamed.
    """

    tokens: list[int]
    first_s: float
    parts: int


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: where it listens.
        log: file with what it prints.
        process: the server; its engine and the FFN process are below it.
    """

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: Mapping[str, Any]) -> HTTPResponse:
        """The open answer to a request.

        Raises:
            OSError: the server refused it or is gone.
        """
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)

    def start(self, prompt: Sequence[int], length: int, *, stream: bool = True) -> HTTPResponse:
        """Ask for ``length`` greedy tokens behind ``prompt``."""
        return self.post(
            "/v1/completions",
            {
                "model": "model",
                "prompt": list(prompt),
                "max_tokens": length,
                "temperature": 0,
                "ignore_eos": True,
                "stream": stream,
                "return_token_ids": True,
            },
        )

    def complete(self, prompt: Sequence[int], length: int, *, stream: bool = True) -> Answer:
        """The tokens of one request.

        Raises:
            OSError: the server refused it or went away.
            RuntimeError: the server ended the request with an error, which is told.
        """
        started = time.perf_counter()
        with self.start(prompt, length, stream=stream) as answer:
            if not stream:
                tokens = _token_ids(json.load(answer))
                return Answer(tokens, time.perf_counter() - started, 1)
            first_s, parts, tokens = 0.0, 0, []
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                found = _token_ids(json.loads(line[6:]))
                if found and not parts:
                    first_s = time.perf_counter() - started
                parts += bool(found)
                tokens += found
        return Answer(tokens, first_s, parts)


def _token_ids(message: Mapping[str, Any]) -> list[int]:
    if "error" in message:
        raise RuntimeError(f"the server ended the request: {message['error']}")
    return [token for choice in message["choices"] for token in choice.get("token_ids") or ()]


@contextmanager
def serving(
    model: Path,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server of ``model`` and stop it in the end; it prints to ``log``.

    Raises:
        RuntimeError: it was not ready within ten minutes, with the end of its log.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "model", "--skip-tokenizer-init"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--attention-backend", "CPU_MLA"),  # vLLM's choice where the CPU has AMX has no float32
        *("--max-model-len", "512", "--max-num-seqs", "8", *arguments),
    ]
    given = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60",
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        **(environment or {}),
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=given)
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    what = "was not ready in time" if server.process.poll() is None else "ended"
    raise RuntimeError(f"the server {what}:\n{server.log.read_text()[-4000:]}")
