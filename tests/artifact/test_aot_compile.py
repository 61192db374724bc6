"""What ``aot_compile`` saves with our backend runs in another process, over the model's weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import relative_error

import tiny_models
from afd_graph import AFDBackend, AFDConfig
from afd_graph.aot import SavedGraph
from afd_graph.artifact import ArtifactError

LOADER = """
import sys, torch, tiny_models
model = tiny_models.PlainModel(shared=16).requires_grad_(False)
expected = torch.load(sys.argv[2])
with open(sys.argv[1], "rb") as file:
    function = torch.compiler.load_compiled_function(file)
with torch.no_grad():
    for ids, logits in expected:
        assert torch.equal(function(model, ids), logits)
saved = function._artifacts.compiled_fn
assert saved.report.steps_split == 2, saved.report
with torch.no_grad():
    model.blocks[0].moe.up = torch.nn.Parameter(model.blocks[0].moe.up.clone(), False)
    try:
        function(model, ids)
    except Exception as error:
        assert "replaced" in str(error), error
    else:
        raise AssertionError("another weight was not noticed")
saved.close()
"""


def saved(tmp_path, **options):
    model = tiny_models.PlainModel(shared=16).requires_grad_(False)
    ids = torch.randint(0, tiny_models.VOCABULARY, (2, 7))
    backend = AFDBackend(AFDConfig(**options))
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        function = compiled.forward.aot_compile(((ids,), {}))
    return model, function, backend


def test_saved_and_loaded_in_another_process(tmp_path):
    model, function, backend = saved(tmp_path)
    steps = []
    with backend, torch.no_grad():
        for shape in ((2, 7), (3, 5)):
            ids = torch.randint(0, tiny_models.VOCABULARY, shape)
            logits = function(model, ids)
            assert relative_error(logits, model(ids)) < 1e-5
            steps.append((ids, logits))
        assert backend.report().steps_split == 2
        function.save_compiled_function(str(tmp_path / "function"))
    torch.save(steps, tmp_path / "steps.pt")
    run = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "function"), str(tmp_path / "steps.pt")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert run.returncode == 0, run.stderr


def test_what_was_saved_is_checked(tmp_path):
    _, function, backend = saved(tmp_path, shared_experts="ffn")
    data = SavedGraph.serialize_compile_artifacts(function._artifacts.compiled_fn)
    backend.close()
    SavedGraph.deserialize_compile_artifacts(data).close()
    for old, new, message in (
        (b'"versions":{', b'"versions":{"x":1,', "was made with"),
        (b'"aten.', b'"oten.', "is not known"),
        (b'"credits":2', b'"credits":1', "1 allowed"),
        (b"}", b"", "is not what was written"),
    ):
        with pytest.raises((ArtifactError, RuntimeError), match=message):
            SavedGraph.deserialize_compile_artifacts(data.replace(old, new, 1))
