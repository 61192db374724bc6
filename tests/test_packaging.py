"""What an installed wheel holds, and what it adds to the names of an environment."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy of the sources, so that the tree is not written to."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            (copy / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("afd_graph", "passes", "tests", "examples", "benchmarks", "docs"):
        for source in (ROOT / folder).rglob("*"):
            if source.is_file() and "__pycache__" not in source.parts:
                target = copy / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--disable-pip-version-check", "-w", str(out), str(copy)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    (found,) = out.glob("*.whl")
    return zipfile.ZipFile(found)


def test_one_import_name(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"afd_graph"}
    (listed,) = [name for name in wheel.namelist() if name.endswith("/top_level.txt")]
    assert wheel.read(listed).decode().split() == ["afd_graph"]


def test_every_module_is_in_it(wheel):
    names = set(wheel.namelist())
    for folder, package in (("afd_graph", "afd_graph"), ("passes", "afd_graph/passes")):
        for source in (ROOT / folder).rglob("*.py"):
            inside = source.relative_to(ROOT / folder).as_posix()
            if inside.startswith("passes/"):
                continue
            assert f"{package}/{inside}" in names
    assert "afd_graph/py.typed" in names


def test_entry_point():
    (point,) = [
        point
        for point in importlib.metadata.entry_points(group="torch_dynamo_backends")
        if point.name == "afd"
    ]
    assert point.value == "afd_graph.backend:afd_backend"
    assert "afd" in torch._dynamo.list_backends(exclude_tags=())


def test_entry_point_of_the_wheel(wheel):
    (listed,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    lines = wheel.read(listed).decode().splitlines()
    at = lines.index("[torch_dynamo_backends]")
    assert lines[at + 1] == "afd = afd_graph.backend:afd_backend"


def test_import_needs_no_extra():
    """The optional parts are imported where they are used."""
    code = (
        "import sys, afd_graph; "
        "print([n for n in ('transformers', 'vllm', 'torchair', 'matplotlib', 'torch_npu') "
        "if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
