from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ports import free_port
from random_deepseek import greedy_tokens, make_checkpoint

AFD = {"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"}
# vLLM's default mode, with its two compilers of pieces.
INDUCTOR = {
    "mode": "VLLM_COMPILE",
    "backend": "inductor",
    # With the other form vLLM undoes functionalisation itself, by operators that only CUDA has.
    "inductor_compile_config": {"enable_auto_functionalized_v2": True},
}
EAGER = {
    "mode": "VLLM_COMPILE",
    "backend": "eager",
    "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},
}
FULL = os.environ.get("AFD_VLLM_MATRIX") == "full"
# vLLM's rotary kernel for CPU is wrong for queries with three axes; docs/vllm.md.
PLAIN = {"mode": "NONE", "custom_ops": ["all", "-rotary_embedding"]}
# Two threads that spin on a busy machine take many times as long as one.
torch.set_num_threads(1)
ENGINE = str(Path(__file__).parent / "engine.py")
END_S = 60  # in which FFN ranks end after vLLM has


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


def mixed_requests(count: int = 24, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts of very different lengths, many with a common start, and numbers of new tokens."""
    draw = random.Random(seed)
    common = [draw.randrange(3, 500) for _ in range(70)]
    prompts = [
        common[: draw.choice([0, 33, 64])]
        + [draw.randrange(3, 500) for _ in range(draw.choice([1, 2, 3, 9, 31, 64, 100, 150]))]
        for _ in range(count)
    ]
    return prompts, [draw.choice([1, 5, 9, 17]) for _ in range(count)]


@pytest.fixture(scope="session")
def reference(checkpoint: Any) -> Any:
    """Tokens of Hugging Face for the mixed requests."""
    made: dict[str, list[list[int]]] = {}

    def get(family: str) -> list[list[int]]:
        if family not in made:
            made[family] = greedy_tokens(checkpoint(family), *mixed_requests())
        return made[family]

    return get


class Engine:
    """Starts engines; each is a process that runs all its workloads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self._count = 0

    def run(
        self,
        model: Path,
        workloads: list[dict[str, Any]],
        *,
        afd: dict[str, Any] | None = None,
        compilation: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        other_entries: dict[str, str] | None = None,
        program: str | Path = ENGINE,
        fails: bool = False,
    ) -> dict[str, Any]:
        """Results of one engine, with its log under ``log``."""
        self._count += 1
        stem = self.folder / f"engine{self._count}"
        spec = {
            "model": str(model),
            "afd": afd,
            "compilation": AFD if compilation is None else compilation,
            "engine": engine or {},
            "workloads": workloads,
            **({} if other_entries is None else {"other_entries": other_entries}),
        }
        stem.with_suffix(".spec").write_text(json.dumps(spec))
        answer = stem.with_suffix(".json")
        log = stem.with_suffix(".log")
        with log.open("w") as out:
            code = subprocess.run(
                [sys.executable, str(program), str(stem.with_suffix(".spec")), str(answer)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment(), **(environment or {})},
                timeout=900,
                check=False,
            ).returncode
        text = log.read_text()
        if fails:
            assert code != 0, text[-4000:]
            return {"log": text}
        assert code == 0, text[-6000:]
        return {**json.loads(answer.read_text()), "log": text}

    def environment(self) -> dict[str, str]:
        """One thread, unbound: the machine of a test run is busy, and spinning threads stall."""
        return {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(self.cache),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engines"))


class Experts:
    """FFN ranks as a user starts them.

    Args:
        model: checkpoint.
        folder: for their logs.
        ranks: how many.
        options: more of the command line.
        address: where they meet vLLM; a free one if it is None.
    """

    def __init__(
        self, model: Path, folder: Path, ranks: int = 1, *options: str, address: str | None = None
    ) -> None:
        self.address = address or f"127.0.0.1:{free_port()}"
        self._logs = [folder / f"ffn{rank}-{self.address[-5:]}.log" for rank in range(ranks)]
        command = [sys.executable, "-m", "afd_graph.cli", "vllm-ffn", "--model", str(model)]
        command += ["--address", self.address, "--ffn-ranks", str(ranks), *options]
        self.processes = []
        for rank, log in enumerate(self._logs):
            with log.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        [*command, "--ffn-rank", str(rank)],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )

    def options(self, **others: Any) -> dict[str, Any]:
        """The ``afd`` section of an engine that uses them."""
        own = {"address": self.address, "ffn_ranks": len(self.processes), **others}
        return {"connector": "torch_distributed", "connector_options": own}

    def ended(self) -> list[tuple[int, str]]:
        """Exit codes and logs of all ranks, when they have ended."""
        codes = [process.wait(timeout=END_S) for process in self.processes]
        return [(code, log.read_text()) for code, log in zip(codes, self._logs, strict=True)]

    def kill(self) -> None:
        """Leave nothing behind."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def experts(tmp_path: Path) -> Iterator[Any]:
    made: list[Experts] = []

    def start(model: Path, ranks: int = 1, *options: str, address: str | None = None) -> Experts:
        made.append(Experts(model, tmp_path, ranks, *options, address=address))
        return made[-1]

    yield start
    for each in made:
        each.kill()
