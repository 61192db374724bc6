"""Prefix caching: stage 0 reads what stage 1 of the same step writes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from random_deepseek import greedy_tokens


@pytest.fixture(scope="module")
def workload() -> tuple[list[list[int]], list[int]]:
    draw = random.Random(3)
    common = [draw.randrange(3, 500) for _ in range(192)]
    # A short request leaves place 0 of the batch to the reader, while the writer at place 1 is in
    # the middle of its prompt. The reader finds the blocks of the writer's current chunk in the
    # cache: they are entered when the step is scheduled, and written when it runs.
    short, writer, reader = [7], [*common, 11], [*common, 13, 17]
    return [short, writer, reader], [1, 12, 12]


@pytest.fixture(scope="module")
def results(engine: Any, checkpoint: Any, workload: Any) -> Any:
    prompts, lengths = workload
    runs = [
        {
            "name": f"{split}-{guard}",
            "prompts": prompts,
            "lengths": lengths,
            "split": split,
            "guard": guard,
            "max_num_seqs": 2,
        }
        for split in ("token", "request")
        for guard in (True, False)
    ]
    return engine.run(
        checkpoint("deepseek_v2"),
        runs,
        engine={
            "enable_prefix_caching": True,
            "block_size": 32,
            "max_num_batched_tokens": 64,
            "long_prefill_token_threshold": 32,
        },
        environment={"VLLM_MLA_DISABLE": "1"},
    )["runs"]


@pytest.mark.parametrize("split", ["token", "request"])
def test_guard_keeps_tokens_right(split: str, results: Any, workload: Any, checkpoint: Any) -> None:
    expected = greedy_tokens(checkpoint("deepseek_v2"), *workload)
    guarded, unguarded = results[f"{split}-True"], results[f"{split}-False"]
    assert guarded["tokens"] == expected
    assert guarded["counters"]["prefix_hazard"] > 0
    assert unguarded["tokens"] != expected  # or this workload proves nothing
