"""Checkpoints in both forms give the values that the model has, and only those asked for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from afd_graph.checkpoint import is_routed, make
from afd_graph.errors import AFDError
from afd_graph.ffn.checkpoint import LoadedExperts
from afd_graph.hf import load_without_experts, open_checkpoint

ARCHITECTURES = {
    "v2": tiny_models.MODELS["v2_group_limited"],
    "v3": tiny_models.MODELS["v3"],
    "mixtral": tiny_models.mixtral,
    "qwen2_moe": lambda: tiny_models.qwen2_moe(tie_word_embeddings=True),
    "qwen3_moe": tiny_models.qwen3_moe,
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return ARCHITECTURES[request.param]()


@pytest.fixture(scope="module", params=["matrices", "stacked"])
def folder(request, model, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    matrices = request.param == "matrices"
    model.save_pretrained(path, save_original_format=matrices, max_shard_size="200KB")
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.3." in name for name in names) == matrices
    return path


def test_values_are_those_of_the_model(model, folder):
    checkpoint = open_checkpoint(folder)
    state = model.state_dict()
    assert checkpoint.recipes.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(checkpoint.whole(name), value), name
        if is_routed(name):
            assert torch.equal(checkpoint.routed(name, 1, 3), value[1:3]), name
    assert checkpoint.row_dtype() is torch.float32
    routed = {name: value.shape[0] for name, value in state.items() if is_routed(name)}
    assert checkpoint.routed_names() == routed
    assert len(routed) == 2 * 2


def test_an_attention_rank_has_all_but_the_experts(model, folder):
    loaded = load_without_experts(open_checkpoint(folder))
    state, expected = dict(loaded.named_parameters()), dict(model.named_parameters())
    assert state.keys() == expected.keys()  # tied ones once
    for name, value in state.items():
        assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
        if is_routed(name):
            assert value.untyped_storage().nbytes() == 0
        else:
            assert torch.equal(value, expected[name]), name
    for (name, value), (_, other) in zip(
        loaded.named_buffers(), model.named_buffers(), strict=True
    ):
        assert torch.equal(value, other), name


def test_an_ffn_rank_reads_its_own_experts(model, folder):
    checkpoint = open_checkpoint(folder)
    experts = LoadedExperts(checkpoint, lambda n: (n // 2, n))
    for name, count in checkpoint.routed_names().items():
        read = []

        def piece(file, tensor, rows, read=read):
            read.append((tensor, rows))
            return checkpoint._piece(file, tensor, rows)

        mine = experts.routed(name, count // 2, count)
        assert torch.equal(make(checkpoint.recipes[name], piece, (count // 2, count)), mine)
        if folder.name.startswith("stacked"):
            assert read == [(name, (count // 2, count))]
            mapped = checkpoint.routed(name, count // 2, count)
            assert mine.data_ptr() == mapped.data_ptr(), "stacked experts stay in the mapped file"
        else:
            numbers = {int(tensor.split(".experts.")[1].split(".")[0]) for tensor, _ in read}
            assert numbers == set(range(count // 2, count))
            assert len(read) == count // 2 * (2 if name.endswith("gate_up_proj") else 1)


def test_conversion(tmp_path):
    tiny_models.mixtral().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path, torch.bfloat16)
    assert checkpoint.row_dtype() is torch.bfloat16
    loaded = load_without_experts(checkpoint)
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}
    name = next(iter(checkpoint.routed_names()))
    assert checkpoint.routed(name, 0, 2).dtype is torch.bfloat16


def test_fingerprint(tmp_path):
    model = tiny_models.mixtral()
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", max_shard_size="100KB")
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(tmp_path / "c")
    a, b, c = (open_checkpoint(tmp_path / each).fingerprint() for each in "abc")
    assert a == b != c


EXPERT = "model.layers.1.block_sparse_moe.experts.2."


def without(*names):
    def change(tensors):
        for name in names:
            del tensors[name]

    return change


def narrow(tensors):
    tensors[EXPERT + "w3.weight"] = tensors[EXPERT + "w3.weight"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "no values for 'model.norm.weight'"),
        (
            without(*(EXPERT + each + ".weight" for each in ("w1", "w2", "w3"))),
            r"'model.layers.1.mlp.experts.\w+' is of shape \(3, .* and of \(4, ",
        ),
        (without(EXPERT + "w3.weight"), "'model.layers.1.mlp.experts.gate_up_proj' do not fit"),
        (narrow, "'model.layers.1.mlp.experts.gate_up_proj' do not fit"),
        (lambda tensors: tensors.clear(), "no values for"),
    ],
)
def test_what_is_missing_is_named(tmp_path, change, message):
    tiny_models.mixtral().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(AFDError, match=message):
        open_checkpoint(tmp_path)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(AFDError, match="cannot be read as a configuration"):
        open_checkpoint(tmp_path / "none")
    model = tiny_models.mixtral()
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(AFDError, match="is no safetensors file"):
        open_checkpoint(tmp_path)
    weights.unlink()
    with pytest.raises(AFDError, match="has no safetensors files"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(AFDError, match="cannot be read as an index"):
        open_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AFDError, match="quantised"):
        open_checkpoint(tmp_path)
