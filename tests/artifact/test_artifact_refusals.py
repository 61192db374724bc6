"""What is wrong with an artifact is said by name, and nothing of it runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from fuzz import Block, seal
from safetensors.torch import load_file, save_file

import afd_graph
from afd_graph import AFDConfig, ConfigError, UnsupportedError
from afd_graph.artifact import ArtifactError, Example, allow_operators, save
from afd_graph.artifact.manifest import Manifest, sha256
from afd_graph.artifact.operators import find_allowed

FUZZER = Path(__file__).parent / "fuzz.py"


def example() -> dict[str, Example]:
    ids = torch.arange(6).view(1, 6)
    return {"step": Example({"ids": ids}, {"ids": {1: torch.export.Dim.AUTO}})}


def block() -> Block:
    return Block().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    save(path / "folder", block(), example(), ffn_ranks=2)
    save(path / "file.afd", block(), example())
    return path


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound / "folder", tmp_path / "folder"))


def refused(path, message: str, kind: type = ArtifactError, **how):
    with pytest.raises(kind, match=message):
        afd_graph.load(path, **how)


def reseal_manifest(folder: Path, **changes) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    del body["checksum"]
    body |= changes
    data = json.dumps(body, separators=(",", ":")).encode()
    body["checksum"] = sha256(data)
    (folder / "manifest.json").write_text(json.dumps(body))


def test_nothing_empty_and_foreign(tmp_path):
    refused(tmp_path / "none", "there is no artifact")
    refused(tmp_path, "manifest.json of .* cannot be read")
    (tmp_path / "manifest.json").write_text("{}")
    refused(tmp_path, "no artifact of afd-graph")
    empty = tmp_path / "empty.afd"
    empty.write_bytes(b"")
    refused(empty, "cannot be read as an archive")
    with zipfile.ZipFile(tmp_path / "foreign.afd", "w") as archive:
        archive.writestr("readme.txt", "x")
    refused(tmp_path / "foreign.afd", "manifest.json of .* cannot be read")


def test_truncated(sound, folder, tmp_path):
    data = (sound / "file.afd").read_bytes()
    for share in (0.1, 0.5, 0.99):
        cut = tmp_path / "cut.afd"
        cut.write_bytes(data[: int(len(data) * share)])
        refused(cut, "cannot be read as an archive")
    program = folder / "programs" / "step.json"
    program.write_bytes(program.read_bytes()[:-10])
    refused(folder, r"programs/step.json of .* bytes, expected .* truncated")
    program.unlink()
    refused(folder, r"programs/step.json of .* cannot be read")


def test_tampered(folder):
    program = folder / "programs" / "step.json"
    program.write_bytes(program.read_bytes().replace(b"aten.mul", b"aten.add", 1))
    refused(folder, "programs/step.json .* its hash differs")


def test_tampered_manifest(folder):
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"credits":2', '"credits":1', 1))
    refused(folder, "manifest was changed .* checksum")


def test_tampered_weights(folder):
    weights = folder / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    refused(folder, r"the values of .* are not those")
    weights.write_bytes(bytes(data[:-1]))
    refused(folder, "is no safetensors file")
    weights.unlink()
    refused(folder, "'weights.safetensors' is not in")


def test_a_renamed_parameter_and_another_shape(folder):
    weights = folder / "weights.safetensors"
    tensors = load_file(weights)
    renamed = {("gate.w" if name == "gate.weight" else name): t for name, t in tensors.items()}
    save_file(renamed, weights)
    refused(folder, "has no tensor 'gate.weight'")
    save_file(tensors | {"gate.weight": tensors["gate.weight"].half()}, weights)
    refused(folder, "'gate.weight' is torch.float16", verify_weights=False)


def test_older_and_newer(folder):
    reseal_manifest(folder, format=0)
    refused(folder, "has format 0, this version reads 1")
    reseal_manifest(folder, format=1, versions={"afd_graph": "0.0.1", "torch": torch.__version__})
    refused(folder, "made with afd_graph 0.0.1")
    version = afd_graph.__version__
    reseal_manifest(folder, versions={"afd_graph": version, "torch": "2.1.0"})
    refused(folder, "made with torch 2.1.0")


def test_a_configuration_that_is_not_the_compiled_one(sound):
    path = sound / "folder"
    refused(path, "split='token', not 'request'", ConfigError, options={"split": "request"})
    refused(path, "did you mean 'split'|splt", ConfigError, options={"splt": "token"})
    options = {"connector_options": {"threads": 1}, "timeout_s": 5, "split": "token"}
    afd_graph.load(path, options=options).close()
    refused(path, "role='attention' has no experts", ConfigError, role="attention")
    refused(path, "role='both'", ConfigError, role="both")
    refused(path, "no program 'prefill'", ConfigError, programs=["prefill"])


def test_more_credits_than_the_connector_holds(sound):
    from afd_graph.connectors.local import LocalConnector

    connector = LocalConnector()
    connector.credits = 1
    refused(sound / "folder", "credits=2 is more than", ConfigError, connector=connector)


@pytest.mark.parametrize(
    "name",
    [
        *("aten.from_file.default", "aten._print.default", "aten.add.out", "aten.add_.Tensor"),
        *("operator.pow", "builtins.eval", "profiler._record_function_enter_new.default"),
        *("aten.no_such_operator.default", "aten.empty.memory_format"),
    ],
)
def test_operators_that_must_not_be_called(folder, name):
    program = json.loads((folder / "programs" / "step.json").read_text())
    calls = [n for n in program["variants"]["unsplit"]["nodes"] if n["op"] == "call_function"]
    calls[3]["target"] = name
    seal(folder, "programs/step.json", json.dumps(program).encode())
    refused(folder, f"programs/step.json: the operator '{name}' is not known here")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("name", "x=__import__('os').abort()"),
        ("name", "x, y"),
        ("target", "x): __import__('os').abort() #"),
        ("target", "class"),
        ("kwargs", {"dtype=__import__('os').abort()": 1}),
        ("args", [{"device": "cpu'); __import__('os').abort()"}]),
        ("args", [{"dtype": "load"}]),
    ],
)
def test_names_that_would_be_code(folder, where, value):
    program = json.loads((folder / "programs" / "step.json").read_text())
    nodes = program["variants"]["split"]["nodes"]
    kind = "placeholder" if where in ("name", "target") else "call_function"
    next(n for n in nodes if n["op"] == kind)[where] = value
    seal(folder, "programs/step.json", json.dumps(program).encode())
    refused(folder, "programs/step.json: ")


def test_a_schedule_that_breaks_its_rules(folder):
    program = json.loads((folder / "programs" / "step.json").read_text())
    program["variants"]["split"] = program["variants"]["unsplit"]
    seal(folder, "programs/step.json", json.dumps(program).encode())
    refused(folder, "does not have the inputs")
    program["variants"] |= {"split": None, "sizes": None}
    seal(folder, "programs/step.json", json.dumps(program).encode())
    refused(folder, "no two-stage variant and no reason")


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path):
    program = folder / "programs" / "step.json"
    (tmp_path / "outside.json").write_bytes(program.read_bytes())
    program.unlink()
    program.symlink_to(tmp_path / "outside.json")
    refused(folder, "programs/step.json of .* cannot be read")


def test_an_archive_that_inflates(sound, tmp_path):
    path = tmp_path / "bomb.afd"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (2**28 + 1))
    refused(path, "more than .* bytes")


def test_what_is_there_is_not_overwritten(sound, tmp_path):
    with pytest.raises(ArtifactError, match="exists Remedy"):
        save(sound / "folder", block(), example())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ArtifactError, match="is no artifact"):
        save(tmp_path / "mine", block(), example(), overwrite=True)
    path = tmp_path / "again"
    for _ in range(2):
        save(path, block(), example(), overwrite=True)
        afd_graph.load(path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "mine"]  # nothing is left


def test_a_failed_write_leaves_the_old_one(sound, tmp_path, monkeypatch):
    path = Path(shutil.copytree(sound / "folder", tmp_path / "old"))
    before = (path / "manifest.json").read_bytes()
    monkeypatch.setattr(Manifest, "encode", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(path, block(), example(), overwrite=True)
    monkeypatch.undo()
    assert (path / "manifest.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    afd_graph.load(path).close()


class Unsupported(Block):
    """Writes to a buffer."""

    def forward(self, ids):
        self.scale.mul_(1.0)
        return super().forward(ids)


def test_models_that_cannot_be_stored(tmp_path):
    with pytest.raises(UnsupportedError, match="writes to"):
        save(tmp_path / "x", Unsupported().eval().requires_grad_(False), example())
    dense = torch.nn.Embedding(16, 8).eval().requires_grad_(False)
    step = {"step": Example({"input": torch.arange(6)}, {"input": {}})}
    with pytest.raises(UnsupportedError, match="no MoE layer"):
        save(tmp_path / "x", dense, step)
    with pytest.raises(ConfigError, match="lowering='inductor'"):
        save(tmp_path / "x", block(), example(), config=AFDConfig(lowering="inductor"))
    with pytest.raises(ConfigError, match="3 FFN ranks cannot share"):
        save(tmp_path / "x", block(), example(), ffn_ranks=3)
    assert not (tmp_path / "x").exists()


def test_operators_of_a_model_are_allowed_by_name():
    assert find_allowed("aten.special_i0.default") is None
    with pytest.raises(UnsupportedError, match="not known here"):
        allow_operators("mylib.rowwise.default")
    allow_operators("aten.special_i0.default")
    assert find_allowed("aten.special_i0.default") is torch.ops.aten.special_i0.default


def test_random_damage():
    """A small run of the fuzzer; ``make fuzz`` runs thousands."""
    run = subprocess.run(
        [sys.executable, str(FUZZER), "--mutations", "40", "--seed", "1"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 wrong" in run.stdout
