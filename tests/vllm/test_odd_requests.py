"""Preemption, priorities, tiny requests and sampling: answers equal those without the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import PLAIN

PROGRAM = Path(__file__).parent / "odd_engine.py"


def test_answers_equal_those_without_the_backend(engine: Any, checkpoint: Any) -> None:
    model = checkpoint("deepseek_v2")
    ours = engine.run(model, [], afd={"split": "token"}, program=PROGRAM)
    theirs = engine.run(model, [], compilation=PLAIN, program=PROGRAM)
    assert ours["preempted"] == theirs["preempted"] > 0
    assert ours["counters"]["split"] > 300
    assert ours["counters"]["mid_request"] > 20
    assert "split" not in theirs["counters"]
    assert "reload_weights loads weights" in ours["refused"]
    for name, expected in theirs["answers"].items():
        for mine, other in zip(ours["answers"][name], expected, strict=True):
            assert (mine["tokens"], mine["ends"]) == (other["tokens"], other["ends"]), name
            positions = _flat(mine), _flat(other)
            for own, plain in zip(*positions, strict=True):
                assert own == pytest.approx(plain, abs=1e-3), name


def _flat(answer: Any) -> list[dict[str, float]]:
    return [*(p for one in answer["logprobs"] for p in one), *answer["prompt_logprobs"]]
