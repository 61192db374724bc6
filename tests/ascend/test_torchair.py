"""The tests that need torchair, each file in a process of its own.

torchair renames PrivateUse1 and patches PyTorch for the whole process, so no other test may share
it. The files run by themselves as well::

    AFD_TORCH_NPU=2.10.0.post4 pytest -o python_files='inside_*.py' tests/ascend/inside_lowering.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VERSIONS = ("2.13.0", "2.10.0.post4")
FILES = sorted(path.name for path in HERE.glob("inside_*.py"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_inside_torchair(name: str, version: str, tmp_path: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=inside_*.py"]
    if version != VERSIONS[0]:  # values do not depend on it: one version is enough for them
        command += ["-m", "not newest"]
    command += ["-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inside"), str(HERE / name)]
    environment = {**os.environ, "AFD_TORCH_NPU": version, "TORCHAIR_CACHE_HOME": str(tmp_path)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
