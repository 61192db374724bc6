"""Recorded cases of the eager reference, and strategies for generated steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from afd_graph.planner import Stage, StagePlan

CASES = Path(__file__).parent / "cases"


def load(name: str) -> list[dict[str, Any]]:
    """Cases of one recorded file (schemas: semantics 14)."""
    return json.loads((CASES / f"{name}.json").read_text())["cases"]


def case_id(case: dict[str, Any]) -> str:
    return f"{case['id']}-{case['tag']}"


def stage_of(recorded: dict[str, Any]) -> Stage:
    return Stage(
        slice(*recorded["request_slice"]),
        slice(*recorded["token_slice"]),
        recorded["input_tokens"],
        recorded["actual_tokens"],
    )


def plan_of(recorded: list[dict[str, Any]]) -> StagePlan:
    return StagePlan(tuple(map(stage_of, recorded)))


def recorded_stage(stage: Stage) -> dict[str, Any]:
    """The inverse of :func:`stage_of`."""
    return {
        "request_slice": [stage.request_slice.start, stage.request_slice.stop],
        "token_slice": [stage.token_slice.start, stage.token_slice.stop],
        "input_tokens": stage.input_tokens,
        "actual_tokens": stage.actual_tokens,
    }


def token_counts(max_requests: int = 8, max_tokens: int = 40) -> st.SearchStrategy[list[int]]:
    """Scheduled tokens per request: decode rows and prefills mixed."""
    count = st.one_of(st.just(1), st.integers(1, max_tokens))
    return st.lists(count, min_size=1, max_size=max_requests)
