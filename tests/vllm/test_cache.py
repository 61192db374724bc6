"""vLLM's ahead-of-time cache: a second start loads, anything different compiles again."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import AFD, mixed_requests
from stored_entries import FLIPS, with_identity

PROMPTS, LENGTHS = mixed_requests(6)
RUN = [{"name": "run", "prompts": PROMPTS, "lengths": LENGTHS}]
SEAL = ".afd-sha256"


class Cache:
    """Starts engines on a cache of its own, with what the first of them stored there."""

    def __init__(self, engine: Any, checkpoint: Any, folder: Path) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self.folder = folder / "cache"
        self.dump = folder / "dump"

    def start(self, family: str = "deepseek_v2", **given: Any) -> dict[str, Any]:
        """An engine; the options are the same at every start, unless ``given``."""
        environment = {"VLLM_CACHE_ROOT": str(self.folder), **given.pop("environment", {})}
        return self._engine.run(
            self._checkpoint(family),
            RUN,
            environment=environment,
            compilation={**AFD, "debug_dump_path": str(self.dump)},
            afd=given.pop("afd", {"min_split_tokens": 3}),
            **given,
        )

    def entries(self) -> set[Path]:
        """What is stored."""
        return set(self.folder.rglob("rank_0_0/model"))

    def restarted(self, other: Path) -> Cache:
        """A copy, so that a start that changes it disturbs no other."""
        copied = Cache(self._engine, self._checkpoint, other)
        shutil.copytree(self.folder, copied.folder)
        copied.dump = self.dump
        return copied


@pytest.fixture(scope="module")
def other_model(engine: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry of a DeepSeek-V3, whose source files and options are those of the V2."""
    cache = Cache(engine, checkpoint, tmp_path_factory.mktemp("v3"))
    cache.start("deepseek_v3")
    (entry,) = cache.entries()
    return entry


@pytest.fixture(scope="module")
def cache(engine: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(engine, checkpoint, tmp_path_factory.mktemp("v2"))


@pytest.fixture(scope="module")
def cold(cache: Cache, other_model: Path) -> dict[str, Any]:
    """The first start; it also loads all that may be wrong with an entry."""
    return cache.start(other_entries={"of another model": str(other_model)})


def test_cold_start_stores(cold: Any, cache: Cache) -> None:
    assert cold["compilations"]["num_aot_artifacts_saved"] == 1
    assert len(cache.entries()) == 1
    assert cold["log"].count("AFD compiled the model: 3 MoE layers, two stages") == 1


def test_graphs_are_in_the_dump_directory(cold: Any, cache: Cache) -> None:
    names = {path.name.split(".", 2)[2] for path in cache.dump.rglob("afd.*.py")}
    assert {"insert.py", "split.py", "schedule.py", "schedule_unsplit.py"} <= names


def test_nothing_but_the_whole_entry_is_loaded(cold: Any) -> None:
    loads = dict(cold["loads"])
    assert loads.pop("as it was") == ""
    assert sum(name.startswith("bit ") for name in loads) == FLIPS
    assert not [name for name, reason in loads.items() if not reason]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("truncated by a byte", "pickle data was truncated"),
        ("longer", "the stored model is damaged: the checksum of its file differs"),
        ("a bit of ours, sealed", "the stored model is damaged: its checksum differs"),
        ("another version", "compiled by something else: afd-graph was 9"),
        ("another source", "compiled by something else: source was 0000000000000000, is"),
        ("of another model", "compiled by something else: configuration was"),
        ("without a checksum", "the stored model has no checksum"),
    ],
)
def test_the_reason_is_told(name: str, reason: str, cold: Any) -> None:
    assert reason in cold["loads"][name]


def test_warm_start_loads_without_compiling(cold: Any, cache: Cache) -> None:
    warm = cache.start()
    assert warm["compilations"]["num_aot_artifacts_loaded"] == 1
    assert "num_aot_compiles" not in warm["compilations"]
    assert "AFD loaded the model from vLLM's compile cache" in warm["log"]
    assert "AFD compiled the model" not in warm["log"]
    assert warm["runs"] == cold["runs"]


def test_another_option_compiles_another_entry(cold: Any, cache: Cache, tmp_path: Path) -> None:
    changed = cache.restarted(tmp_path)
    again = changed.start(afd={"min_split_tokens": 3, "split": "request"})
    assert again["compilations"]["num_aot_compiles"] == 1
    assert len(changed.entries()) == 2
    assert "Compiling model again" not in again["log"]
    assert again["runs"]["run"]["tokens"] == cold["runs"]["run"]["tokens"]
    assert "mid_request" not in again["runs"]["run"]["counters"]


def _damage(data: bytes) -> bytes:
    # Not in our part: the bytecode with which Dynamo calls the graph.
    place = data.index(b"__compiled_fn")
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def _of_another_source(data: bytes) -> bytes:
    from afd_graph.vllm.artifact import source_digest

    return with_identity(data, source_digest().encode(), b"0" * 16)


@pytest.mark.parametrize(
    ("change", "fits", "reason"),
    [
        (_damage, False, "the stored model is damaged"),
        (_of_another_source, True, "compiled by something else: source was 0000000000000000"),
    ],
)
def test_a_changed_entry_compiles_again(
    change: Any, fits: bool, reason: str, cold: Any, cache: Cache, tmp_path: Path
) -> None:
    changed = cache.restarted(tmp_path)
    (entry,) = changed.entries()
    entry.write_bytes(change(entry.read_bytes()))
    if fits:
        seal = hashlib.sha256(entry.read_bytes()).hexdigest()
        entry.with_name(entry.name + SEAL).write_text(seal)
    again = changed.start()
    assert "Compiling model again due to a load failure" in again["log"]
    assert reason in again["log"]
    assert again["compilations"]["num_aot_compiles"] == 1
    assert again["runs"] == cold["runs"]
    # What it stored instead is whole.
    assert entry.with_name(entry.name + SEAL).read_text() == (
        hashlib.sha256(entry.read_bytes()).hexdigest()
    )


def test_a_start_that_must_load_fails_with_the_reason(
    cold: Any, cache: Cache, tmp_path: Path
) -> None:
    changed = cache.restarted(tmp_path)
    (entry,) = changed.entries()
    entry.write_bytes(_damage(entry.read_bytes()))
    failed = changed.start(environment={"VLLM_FORCE_AOT_LOAD": "1"}, fails=True)
    assert "AFDError: the stored model is damaged" in failed["log"]
