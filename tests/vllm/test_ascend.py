"""The hook points of vLLM-Ascend, looked up in its published wheels (unpacked, never installed)."""

from __future__ import annotations

import ast
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from afd_graph.errors import ConfigError
from afd_graph.vllm.ascend import VERSIONS, AscendVersion, refuse, refuse_if_ascend

WHEELS = Path(os.environ.get("AFD_VLLM_ASCEND", ".cache/vllm_ascend"))


@pytest.fixture(params=VERSIONS, ids=lambda entry: entry.vllm_ascend)
def published(request: Any) -> tuple[AscendVersion, zipfile.ZipFile]:
    entry = request.param
    (wheel,) = WHEELS.glob(f"vllm_ascend-{entry.vllm_ascend}-*.whl")
    return entry, zipfile.ZipFile(wheel)


def _tree(wheel: zipfile.ZipFile, path: str) -> ast.Module:
    return ast.parse(wheel.read(path))


def _named(body: list[ast.stmt], name: str) -> Any:
    return next(node for node in body if getattr(node, "name", None) == name)


def test_the_runner_builds_metadata_where_the_table_says(published: Any) -> None:
    entry, wheel = published
    path, owner, method = entry.runner
    cls = _named(_tree(wheel, path).body, owner)
    assert "GPUModelRunner" in {base.id for base in cls.bases}
    found = {argument.arg for argument in _named(cls.body, method).args.args}
    assert found >= set(entry.parameters)


def test_the_common_metadata_has_these_fields(published: Any) -> None:
    entry, wheel = published
    path, name = entry.common
    cls = _named(_tree(wheel, path).body, name)
    fields = {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}
    assert fields >= set(entry.fields)


def test_attention_is_one_operator(published: Any) -> None:
    entry, wheel = published
    path, name = entry.attention
    function = _named(_tree(wheel, path).body, name)
    assert [argument.arg for argument in function.args.args] == [
        *("hidden_states", "need_gather_q_kv", "output", "layer_name")
    ]


def test_pins(published: Any) -> None:
    entry, wheel = published
    name = next(n for n in wheel.namelist() if n.endswith("dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    assert f"Requires-Dist: torch=={entry.torch}\n" in metadata
    assert f"Requires-Dist: torch-npu=={entry.torch_npu}\n" in metadata


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.18.0", "pins torch 2.9.0"), ("0.26.0rc1", "pins torch 2.10.0"), ("0.99", "not checked")],
)
def test_every_version_is_refused_with_a_reason(version: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse(version)


def test_other_platforms_are_not_refused() -> None:
    refuse_if_ascend(object())
    platform = type("NPUPlatform", (), {"__module__": "vllm_ascend.platform"})()
    with pytest.raises(ConfigError, match="unknown version"):
        refuse_if_ascend(platform)
