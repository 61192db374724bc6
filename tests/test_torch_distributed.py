"""Attention and FFN ranks of one torch.distributed world (gloo), against one unsplit process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import deepseek_v2

HERE = Path(__file__).parent
STEPS = 2


def torchrun(ranks: int, worker: str, *args: str, timeout: float = 900) -> list[dict]:
    """What every rank found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), str(HERE / "distributed" / worker), *args],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].split("RESULT ", 1)[1])


@pytest.fixture(scope="module", params=[True, False], ids=["per expert", "stacked"])
def checkpoint(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("checkpoint")
    deepseek_v2().save_pretrained(path, save_original_format=request.param)
    return str(path)


@pytest.mark.timeout(1000)
def test_two_replicas_and_two_ffn_ranks_equal_one_process(checkpoint):
    found = torchrun(4, "world_worker.py", checkpoint, json.dumps({"ffn_ranks": 2}), "{}")
    attention, ffn = found[:2], found[2:]
    assert [rank["name"] for rank in ffn] == ["rank 2 (ffn 0)", "rank 3 (ffn 1)"]
    for rank in attention:
        assert rank["worst"] < 1e-5
        assert rank["split"] == STEPS
        assert not rank["unsplit"]
        assert rank["expert_bytes"] == 0
    # Two layers, two stages, two replicas; every row goes to two experts, wherever they are.
    assert [rank["items"] for rank in ffn] == [STEPS * 8] * 2
    tokens = 2 * (11 + 6)
    assert sum(rank["rows"] for rank in ffn) == 2 * 2 * 2 * tokens
