"""``afd-graph bench`` over benchmarks of the test's own, and over the names of the real ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from afd_graph.cli.group import afd_graph

REAL = Path(__file__).parents[1] / "benchmarks"


def call(*args):
    return CliRunner().invoke(afd_graph, ["bench", *map(str, args)])


@pytest.fixture
def folder(tmp_path) -> Path:
    """A benchmark that holds its bound, one that misses it, and one that breaks."""
    made = tmp_path / "benchmarks"
    made.mkdir()
    (made / "_verdict.py").write_text((REAL / "_verdict.py").read_text())
    bodies = {
        "good": "verdict('new over old', 0.5, 'at most 1', True)",
        "slow": "raise SystemExit(not verdict('new over old', 1.5, 'at most 1', False))",
        "broken": "raise RuntimeError('no')",
        "asks": "verdict(' '.join(sys.argv[1:]), float('inf'), 'any', True)",
    }
    for name, body in bodies.items():
        (made / f"{name}.py").write_text(
            f'"""Is {name} any good?\n\nMore."""\nimport sys\nfrom _verdict import verdict\n'
            f"print('table')\n{body}\n"
        )
    return made


def test_list(folder):
    answer = call("--directory", folder, "--list")
    assert answer.exit_code == 0
    assert re.search(r"good +Is good any good\?", answer.stdout)
    assert "_verdict" not in answer.stdout


def test_by_name(folder):
    answer = call("good", "--directory", folder)
    assert answer.exit_code == 0
    assert "table" in answer.stdout
    assert re.search(r"good +0.5  at most 1 +met +new over old", answer.stdout)


def test_missed_bounds_and_crashes_end_with_one(folder):
    answer = call("--directory", folder, "--json")
    assert answer.exit_code == 1
    found = json.loads(answer.stdout)
    assert found["missed"] == ["broken", "slow"]
    (claim,) = found["benchmarks"]["slow"]["claims"]
    assert claim == {
        "claim": "new over old",
        "value": 1.5,
        "bound": "at most 1",
        "holds": False,
    }
    assert found["benchmarks"]["broken"]["claims"] == []
    assert "table" in answer.stderr


def test_what_needs_vllm_is_left_out_aloud(folder, monkeypatch):
    (folder / "vllm_speed.py").write_text((folder / "good.py").read_text())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = call("--directory", folder, "--json")
    assert "vllm_speed" not in json.loads(answer.stdout)["benchmarks"]
    assert "left out without vLLM: vllm_speed" in answer.stderr
    answer = call("vllm_speed", "--directory", folder, "--json")
    assert "vllm_speed" in json.loads(answer.stdout)["benchmarks"]


def test_arguments_reach_the_benchmark(folder):
    found = json.loads(call("asks", "--directory", folder, "--args", "--a '1 2'", "--json").stdout)
    assert found["benchmarks"]["asks"]["claims"][0]["claim"] == "--a 1 2"


def test_misuse(folder, tmp_path):
    answer = call("fast", "--directory", folder)
    assert answer.exit_code == 1
    assert "no benchmark is called fast" in answer.output
    assert "asks, broken, good, slow" in answer.output
    (tmp_path / "empty").mkdir()
    answer = call("--directory", tmp_path / "empty")
    assert answer.exit_code == 1
    assert "part of the repository" in answer.output
    assert call("--directory", tmp_path / "none").exit_code == 2


def test_every_benchmark_of_the_repository_is_listed_and_gives_a_verdict():
    listed = json.loads(call("--list", "--json").stdout)["benchmarks"]
    assert set(listed) == {path.stem for path in REAL.glob("[a-z]*.py")}
    assert all(len(line) > 20 for line in listed.values())
    for name in listed:
        assert "verdict(" in (REAL / f"{name}.py").read_text(encoding="utf-8"), name
