from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from random_deepseek import greedy_tokens, make_checkpoint

AFD = {"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"}
# vLLM's rotary kernel for CPU is wrong for queries with three axes; docs/vllm.md.
PLAIN = {"mode": "NONE", "custom_ops": ["all", "-rotary_embedding"]}
# Two threads that spin on a busy machine take many times as long as one.
torch.set_num_threads(1)
ENGINE = str(Path(__file__).parent / "engine.py")


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
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(self.cache),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engines"))
