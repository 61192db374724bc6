"""vLLM's ahead-of-time cache: a second start loads, anything different compiles again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import AFD, mixed_requests

PROMPTS, LENGTHS = mixed_requests(6)
RUN = [{"name": "run", "prompts": PROMPTS, "lengths": LENGTHS}]


@pytest.fixture(scope="module")
def cold(engine: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    dump = tmp_path_factory.mktemp("dump")
    found = engine.run(
        checkpoint("deepseek_v2"),
        RUN,
        environment={"VLLM_CACHE_ROOT": str(engine.folder / "aot")},
        compilation={**AFD, "debug_dump_path": str(dump)},
        afd={"min_split_tokens": 3},
    )
    return {**found, "dump": dump}


def _again(engine: Any, checkpoint: Any, cold: Any, **changes: Any) -> Any:
    given = {
        "environment": {"VLLM_CACHE_ROOT": str(engine.folder / "aot")},
        "compilation": {**AFD, "debug_dump_path": str(cold["dump"])},
        "afd": {"min_split_tokens": 3},
        **changes,
    }
    return engine.run(checkpoint("deepseek_v2"), RUN, **given)


def _stored(engine: Any) -> list[Path]:
    return list((engine.folder / "aot").rglob("rank_0_0/model"))


def test_cold_start_stores(cold: Any, engine: Any) -> None:
    assert cold["compilations"]["num_aot_artifacts_saved"] == 1
    assert len(_stored(engine)) == 1
    assert cold["log"].count("AFD compiled the model: 3 MoE layers, two stages") == 1


def test_graphs_are_in_the_dump_directory(cold: Any) -> None:
    names = {path.name.split(".", 2)[2] for path in cold["dump"].rglob("afd.*.py")}
    assert {"insert.py", "split.py", "schedule.py", "schedule_unsplit.py"} <= names


def test_warm_start_loads_without_compiling(cold: Any, engine: Any, checkpoint: Any) -> None:
    warm = _again(engine, checkpoint, cold)
    assert warm["compilations"]["num_aot_artifacts_loaded"] == 1
    assert "num_aot_compiles" not in warm["compilations"]
    assert "AFD loaded the model from vLLM's compile cache" in warm["log"]
    assert "AFD compiled the model" not in warm["log"]
    assert warm["runs"]["run"]["tokens"] == cold["runs"]["run"]["tokens"]
    assert warm["runs"]["run"]["counters"] == cold["runs"]["run"]["counters"]


def test_damaged_entry_compiles_again(cold: Any, engine: Any, checkpoint: Any) -> None:
    (path,) = _stored(engine)
    data = bytearray(path.read_bytes())
    # Inside our own part: the name of the first pass in the stored report.
    data[data.index(b"schedule_unsplit") + 3] ^= 1
    path.write_bytes(data)
    again = _again(engine, checkpoint, cold)
    assert "Compiling model again due to a load failure" in again["log"]
    assert "the stored model is damaged" in again["log"]
    assert again["compilations"]["num_aot_compiles"] == 1
    assert again["runs"]["run"]["tokens"] == cold["runs"]["run"]["tokens"]
