"""The tests that need torch_npu itself, in its own environment: ``make torchair-dispatch-setup``.

An installed torch_npu changes ``import torch`` and how operators are dispatched, so it has an
environment of its own, beside stand-ins for the libraries of CANN (``cann_stand_ins.py``).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-torchair-b"


@pytest.mark.timeout(1800)
def test_with_the_dispatch_of_torch_npu(tmp_path: Path):
    stand_ins = ENVIRONMENT / "stand-ins"
    assert (ENVIRONMENT / ".ready").exists(), "run `make torchair-dispatch-setup` first"
    command = [ENVIRONMENT / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=dispatch_*.py", "--basetemp", tmp_path / "inside"]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(stand_ins),
        "ASCEND_HOME_PATH": str(stand_ins / "cann"),
        "ASCEND_OPP_PATH": str(stand_ins / "cann" / "opp"),
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*map(str, command), str(HERE / "dispatch_real.py")],
        env=environment,
        capture_output=True,
        text=True,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
