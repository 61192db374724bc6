"""Serve a small DeepSeek-V2 with vLLM twice, with the AFD backend and without, and compare.

    make serve-demo

Both servers are vLLM's own OpenAI-compatible server, started one after the other on a random
checkpoint. The same requests go to both, some at once. Printed are the tokens, whether they are
equal, the time to the first token, and what the backend counted. On one small machine, with tiny
experts, AFD is not faster: the experts live in a process of their own, and this shows that they do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from random_deepseek import make_checkpoint

AFD = ["--compilation-config", '{"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"}']
# vLLM's rotary kernel for CPU is wrong for queries with three axes; docs/vllm.md.
PLAIN = [
    "--compilation-config",
    '{"mode": "NONE", "custom_ops": ["all", "-rotary_embedding"]}',
]


@dataclass(frozen=True)
class Answer:
    """Tokens of a request, and seconds until the first came."""

    tokens: list[int]
    first_s: float


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    log: Path

    def complete(self, prompt: list[int], length: int) -> Answer:
        """Greedy tokens of one request, streamed."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        started, first_s, tokens = time.perf_counter(), 0.0, []
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
                    if tokens and not first_s:
                        first_s = time.perf_counter() - started
        return Answer(tokens, first_s)


@contextmanager
def serving(model: Path, arguments: list[str], folder: Path) -> Iterator[Server]:
    """Start a server and stop it in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "demo", "--skip-tokenizer-init"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "512", "--max-num-seqs", "8", *arguments),
    ]
    environment = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_ready(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended:\n{server.log.read_text()[-4000:]}")
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("the server was not ready within ten minutes")


def requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts of mixed lengths, and how many tokens to make."""
    draw = random.Random(0)
    return [
        ([draw.randrange(3, 500) for _ in range(draw.choice([3, 17, 60, 120]))], 12)
        for _ in range(count)
    ]


def main() -> int:
    """Run the demo; returns 1 when the tokens differ or nothing was split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--split", default="token", help="token, request, cost, auto or none")
    given = parser.parse_args()
    work = requests(given.requests)
    answers: dict[str, list[Answer]] = {}
    counted = ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_checkpoint(folder / "model", "deepseek_v2")
        kinds = {
            "vLLM": PLAIN,
            "vLLM + AFD": [
                *AFD,
                *("--additional-config", json.dumps({"afd": {"split": given.split}})),
            ],
        }
        for kind, arguments in kinds.items():
            print(f"starting {kind} ...", flush=True)
            with serving(model, arguments, folder) as server, ThreadPoolExecutor(6) as pool:
                server.complete([5, 6, 7], 4)
                answers[kind] = list(pool.map(lambda r: server.complete(*r), work))
                time.sleep(1.2)  # one more step after the log interval writes the counters
                server.complete([5, 6, 7], 4)
                lines = re.findall(r"AFD (?:steps so far|compiled).*", server.log.read_text())
            counted = "\n  ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    plain, ours = answers.values()
    for (prompt, _), a, b in zip(work, plain, ours, strict=True):
        mark = "=" if a.tokens == b.tokens else "DIFFERENT"
        print(f"prompt of {len(prompt):3}: {b.tokens} {mark}")
    for kind, found in answers.items():
        first = statistics.median(answer.first_s for answer in found)
        print(f"{kind}: median time to first token {first * 1e3:.0f} ms")
    print(f"  {counted}")
    equal = [a.tokens for a in plain] == [b.tokens for b in ours]
    split = re.search(r"so far: (\d+) split", counted)
    print("tokens are equal" if equal else "tokens DIFFER")
    return 0 if equal and split and int(split[1]) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
