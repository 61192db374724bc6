"""``afd-graph compile`` and ``inspect``: normal use, misuse, and what machines read."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import afd_graph
import tiny_models
from afd_graph.artifact import ArtifactError
from afd_graph.cli.group import afd_graph as group
from afd_graph.hf import ServingModule, preset_names


def run(*args: object):
    return CliRunner().invoke(group, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as published: one tensor an expert, in two files; and the model."""
    path = tmp_path_factory.mktemp("checkpoint") / "v2"
    model = tiny_models.deepseek_v2()
    model.save_pretrained(path, max_shard_size="400KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names
    return path, ServingModule(model.requires_grad_(False))


@pytest.fixture(scope="module")
def compiled(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "v2.afd"
    answer = run(
        *("compile", checkpoint[0], "-o", path, "--programs", "prefill", "--ffn-ranks", 2),
        *("--json", "--set", "min_split_tokens=3"),
    )
    assert answer.exit_code == 0, answer.output
    return path, json.loads(answer.stdout), answer.stderr


def test_compile_refers_to_the_checkpoint(checkpoint, compiled):
    path, said, progress = compiled
    assert said["programs"].keys() == {"prefill"}
    assert said["ffn_ranks"] == 2
    assert said["weights"] == str(checkpoint[0])
    assert "capturing prefill" in progress
    assert [file.name for file in path.parent.iterdir()] == ["v2.afd"]  # nothing is duplicated
    ids = torch.randint(0, tiny_models.VOCABULARY, (1, 6))
    with afd_graph.load(path) as model, torch.no_grad():
        expected = checkpoint[1](ids)["logits"]
        torch.testing.assert_close(model(input_ids=ids)["logits"], expected, rtol=1e-5, atol=1e-5)
        assert model.report().steps_split == 1
        model(input_ids=ids[:, :2])
        assert dict(model.report().steps_unsplit) == {"below_min_tokens": 1}


def test_a_rank_loads_its_own_experts(checkpoint, compiled):
    weights = dict(checkpoint[1].model.named_parameters())
    for rank in range(2):
        experts = afd_graph.load(compiled[0], role="ffn", rank=rank)
        assert experts.first_experts == [4 * rank, 4 * rank]
        for program in experts.programs:
            assert program.num_experts == 4
            for name, tensor in program.routed.weights:
                assert torch.equal(tensor, weights[name][4 * rank : 4 * rank + 4])
        assert experts.executor() is not None
    with pytest.raises(afd_graph.ConfigError, match="2 FFN ranks"):
        afd_graph.load(compiled[0], role="ffn", rank=2)


def test_another_training_of_the_same_model_is_refused(checkpoint, compiled, tmp_path):
    other = tiny_models.deepseek_v2()
    with torch.no_grad():
        other.lm_head.weight[5, 5] += 1e-3
    other.save_pretrained(tmp_path, max_shard_size="400KB")
    with pytest.raises(ArtifactError, match=r"values of 'lm_head.weight' .* are not those"):
        afd_graph.load(compiled[0], weights=tmp_path)
    with afd_graph.load(compiled[0], weights=tmp_path, verify_weights=False) as model:
        assert model.programs


def test_compile_misuse(checkpoint, compiled, tmp_path):
    for args, code, message in (
        (["compile", checkpoint[0]], 2, "--output"),
        (["compile", tmp_path, "-o", tmp_path / "x.afd"], 1, "is no model"),
        (["compile", checkpoint[0], "-o", compiled[0]], 1, "exists"),
        (["compile", checkpoint[0], "-o", tmp_path / "a", "--programs", "fill"], 1, "prefill"),
        (["compile", checkpoint[0], "-o", tmp_path / "a", "--set", "splt=token"], 1, "split"),
        (["compile", checkpoint[0], "-o", tmp_path / "a", "--set", "split"], 1, "OPTION=VALUE"),
        (["compile", checkpoint[0], "-o", tmp_path / "a", "--dtype", "int8"], 1, "floating"),
        (["inspect"], 2, "name a model"),
        (["inspect", "deepseek-v9"], 1, "deepseek-v3"),
        (["inspect", "deepseek-v3", "--tokens", "many"], 2, "--tokens"),
    ):
        answer = run(*args)
        assert answer.exit_code == code, answer.output
        assert message in answer.output
    assert not (tmp_path / "a").exists()


def test_errors_as_json(tmp_path):
    answer = run("inspect", tmp_path, "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["remedy"]


def small_config(tmp_path, layers=1, **changes):
    values = json.loads(tiny_models.deepseek_v3(num_hidden_layers=layers).config.to_json_string())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | changes))
    return path


def test_inspect_says_what_would_happen(tmp_path):
    path = small_config(tmp_path, layers=3, first_k_dense_replace=1)
    answer = run("inspect", path, "--json", "--tokens", "2,100", "--ffn-ranks", "2")
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.stdout)
    (program,) = said["programs"]
    (kind,) = program["kinds"]
    assert kind["layers"] == ["model.layers.1.mlp", "model.layers.2.mlp"]
    assert (kind["experts"], kind["top_k"], kind["shared"]) == (8, 2, 1)
    assert program["mode"] == "sequence"
    assert [plan["stages"] for plan in program["plans"]] == [[1, 1], [50, 50]]
    assert program["order"][:3] == ["attention(0,0)", "dispatch(0,0)", "attention(0,1)"]
    assert said["expert_bytes"] == 2 * said["expert_bytes_per_ffn_rank"] == 2 * kind["bytes"]
    text = run("inspect", path, "--programs", "decode")
    assert text.exit_code == 0
    assert "single_token" in text.output


def test_inspect_reports_a_refusal(tmp_path):
    answer = run("inspect", small_config(tmp_path), "--set", "sequence_parallel=true")
    assert answer.exit_code == 3
    assert "refused: sequence_parallel=True" in answer.output


def test_inspect_lists_presets():
    answer = run("inspect", "--list", "--json")
    assert answer.exit_code == 0
    sources = json.loads(answer.stdout)
    assert list(sources) == preset_names()
    assert all(source.startswith("https://") for source in sources.values())
