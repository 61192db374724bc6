"""vLLM's default mode with the experts of two tensor-parallel workers on an FFN rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_ranks import MATRIX, PROGRAM, check_runs

from conftest import INDUCTOR
from ports import free_port


class Served:
    """Engines at one address with one cache, each with an FFN rank of its own."""

    def __init__(self, engine: Any, experts: Any, model: Path, cache: Path) -> None:
        self._engine, self._experts, self._model = engine, experts, model
        self._address = f"127.0.0.1:{free_port()}"
        self.cache = cache

    def start(self) -> dict[str, Any]:
        """Results of a start whose FFN rank ended as it should."""
        ffn = self._experts(self._model, 1, "--tp", "2", address=self._address)
        found: dict[str, Any] = self._engine.run(
            self._model,
            MATRIX,
            afd=ffn.options(),
            compilation=INDUCTOR,
            engine={
                "tensor_parallel_size": 2,
                "enable_prefix_caching": True,
                "max_num_batched_tokens": 64,
                "block_size": 32,
            },
            environment={"VLLM_MLA_DISABLE": "1", "VLLM_CACHE_ROOT": str(self.cache)},
            program=PROGRAM,
        )
        ((code, log),) = ffn.ended()
        assert code == 0, log
        return found


@pytest.fixture
def served(engine: Any, experts: Any, checkpoint: Any, tmp_path: Path) -> Served:
    return Served(engine, experts, checkpoint("deepseek_v2"), tmp_path / "cache")


def _check(found: dict[str, Any], expected: list[list[int]], compiled: int) -> None:
    check_runs(found, expected)
    assert len(found["weights_here"]) == 2
    log = found["log"]
    assert log.count("AFD compiled the model: 3 MoE layers, two stages") == compiled
    assert log.count("AFD loaded the model from vLLM's compile cache") == 2 - compiled


def test_tokens_equal_hugging_face_also_where_one_worker_loads(
    served: Served, reference: Any
) -> None:
    found = served.start()
    _check(found, reference("deepseek_v2"), compiled=2)
    # Pieces of both programs, on both workers: without them it was not the default mode.
    for name in ("unsplit", "two_stages"):
        assert found["log"].count(f"_{name}] Using cache directory") == 2
    (entry,) = served.cache.rglob("rank_1_0/model")
    entry.unlink()
    # Worker 1 compiles again, and the FFN rank takes layers of equal programs alone.
    _check(served.start(), reference("deepseek_v2"), compiled=1)
