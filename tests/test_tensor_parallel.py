"""Tensor parallelism and sequence parallelism over two processes (gloo), against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STEPS = 4  # of each case, see the worker
CASES: dict[str, tuple[dict[str, object], bool]] = {
    "plain": ({}, False),
    "plain, request, one credit": ({"split": "request", "credits": 1}, True),
    "sequence parallel": ({"sequence_parallel": True, "check_values": True}, True),
    "sequence parallel, request": ({"sequence_parallel": True, "split": "request"}, False),
    "sequence parallel, unsplit": ({"sequence_parallel": True, "split": "none"}, False),
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    worker = HERE / "distributed" / "tensor_parallel_worker.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--standalone", str(worker), json.dumps(CASES)],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].split("RESULT ", 1)[1])


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_single_process_model(results, case) -> None:
    differences = results[case]["differences"]
    assert len(differences) == STEPS
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_decide_the_same(results, case) -> None:
    decisions = [(split, unsplit) for split, unsplit, _ in results[case]["steps"]]
    assert decisions[0] == decisions[1]
    split, unsplit = decisions[0]
    if CASES[case][0].get("split") == "none":
        assert split == 0
        assert unsplit == {"disabled": STEPS}
    else:
        assert split == STEPS
        assert not unsplit


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_dispatched_by_one_rank(results, case) -> None:
    """Both ranks together dispatch the real rows, and the padding that makes shares equal."""
    rows = [2 * length for length in (11, 5, 4, 1)]  # two requests a step
    layers, crossings, items = 2, 2, STEPS * 2 * 2
    dispatched = sum(count for _, _, count in results[case]["steps"]) / crossings
    if case == "sequence parallel, request":
        # A stage is one request, which is padded to one for each rank.
        assert dispatched == layers * 2 * sum(rows)
        return
    # Sequence parallelism pads each of the two sequences of a stage, the others an item's rows.
    padding = items * (2 if "sequence" in case else 1)
    assert layers * sum(rows) <= dispatched <= layers * sum(rows) + padding
