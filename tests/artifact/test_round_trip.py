"""A loaded artifact gives what the model gives, in this process and in one without its code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import relative_error
from safetensors.torch import save_file

import afd_graph
import tiny_models
from afd_graph import AFDBackend, AFDConfig
from afd_graph.artifact import GuardError, save
from afd_graph.hf import PREFIX, ServingModule, serving_examples

WORKER = Path(__file__).parent / "fresh_process.py"


def check(got, expected, where=slice(None)):
    assert relative_error(got["logits"][where], expected["logits"][where]) < 1e-5
    for mine, theirs in zip(got["cache"], expected["cache"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert relative_error(a, b) < 1e-5


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, tiny_models.VOCABULARY, shape)


def test_a_request_step_by_step(artifact, module):
    torch.manual_seed(1)
    with afd_graph.load(artifact) as model, torch.no_grad():
        ids = tokens(1, 9)
        expected, got = module(ids), model.prefill(input_ids=ids)
        check(got, expected)
        for count in (3, 1, 1, 2):
            ids = tokens(1, count)
            expected = module(ids, expected["cache"])
            got = model(input_ids=ids, cache=got["cache"])
            check(got, expected)
        report = model.report()
    assert report.steps_split == 3
    assert dict(report.steps_unsplit) == {"single_token": 2}
    assert [layer.name for layer in report.layers] == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_a_padded_batch_step_by_step(artifact, module):
    torch.manual_seed(2)
    with afd_graph.load(artifact) as model, torch.no_grad():
        ids, mask = tokens(3, 6), torch.ones(3, 6, dtype=torch.int64)
        mask[0, :2] = 0
        expected = module(ids, attention_mask=mask)
        got = model(input_ids=ids, attention_mask=mask)
        check(got, expected, mask.bool())
        for count in (4, 1):
            ids, more = tokens(3, count), torch.ones(3, count, dtype=torch.int64)
            mask = torch.cat([mask, more], 1)
            expected = module(ids, expected["cache"], mask)
            got = model(input_ids=ids, cache=got["cache"], attention_mask=mask)
            check(got, expected)
        assert model.report().steps_split == 3


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_any_cut(artifact, module, cut):
    torch.manual_seed(3)
    ids = tokens(1, 9)
    with afd_graph.load(artifact, plan=lambda extent, count: cut) as model, torch.no_grad():
        check(model.prefill(input_ids=ids), module(ids))
        assert model.report().steps_split == 1


def test_experts_in_a_process_of_their_own(artifact, module):
    torch.manual_seed(4)
    ids = tokens(1, 7)
    with (
        afd_graph.load(artifact, options={"connector": "process"}) as model,
        torch.no_grad(),
    ):
        check(model.prefill(input_ids=ids), module(ids))
        assert model.channel.connector.pid is not None


def test_a_folder_moves(artifact, module, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(artifact, moved)
    ids = tokens(1, 5)
    with afd_graph.load(moved, programs=["prefill"]) as model, torch.no_grad():
        check(model.prefill(input_ids=ids), module(ids))


def test_inputs_that_fit_no_program_say_why(artifact):
    with afd_graph.load(artifact) as model:
        for inputs, message in (
            ({"input_ids": tokens(1, 9).int()}, r"input_ids is torch.int32"),
            ({"input_ids": tokens(1, 1)}, r"ge\(input_ids.1, 2\)"),
            ({"ids": tokens(1, 9)}, r"must have \['input_ids'\], got \['ids'\]"),
            ({"input_ids": tokens(1, 9), "cache": []}, r"cache must be a list of 2, got 0"),
        ):
            with pytest.raises(GuardError, match=message):
                model(**inputs)
        cache = model.prefill(input_ids=tokens(1, 9))["cache"]
        cache[1][0] = cache[1][0][:, :, :-1]
        with pytest.raises(GuardError, match="cache"):
            model.extend(input_ids=tokens(1, 3), cache=cache)


def test_every_model_in_a_fresh_process(tmp_path):
    """Bit for bit what torch.compile with the backend gives, without the library of the models."""
    torch.manual_seed(5)
    names = list(tiny_models.MODELS)
    for name in names:
        module = ServingModule(tiny_models.MODELS[name]().requires_grad_(False))
        examples = dict(serving_examples(module, None, ["prefill"]))
        save(tmp_path / f"{name}.afd", module, examples, prefix=PREFIX)
        ids = tokens(1, 8)
        with AFDBackend(AFDConfig()) as backend, torch.no_grad():
            compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
            out = compiled(ids)
            assert backend.report().steps_split == 1
        check(out, module(ids))
        flat = {f"{i}.{j}": t for i, pair in enumerate(out["cache"]) for j, t in enumerate(pair)}
        tensors = {"input_ids": ids, "logits": out["logits"], **flat}
        save_file(
            {key: t.clone().contiguous() for key, t in tensors.items()},
            tmp_path / f"{name}.expected",
        )
    run = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path), *names], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    assert answers["libraries"] == []
    assert answers["different"] == dict.fromkeys(names, 0.0)
    assert answers["split"] == dict.fromkeys(names, 1)
