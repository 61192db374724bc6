"""The demo on a tiny checkpoint that is saved here: what it prints and what it writes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import demo
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast

LAYERS = 3


def config(**changes) -> DeepseekV2Config:
    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
    }
    return DeepseekV2Config(**{**sizes, **changes})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """safetensors of a bf16 model, without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config()).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def printed(checkpoint, tmp_path_factory) -> tuple[str, Path, Path]:
    """Output of one run, the folder that it wrote to, and the checkpoint."""
    out = tmp_path_factory.mktemp("demo")
    lines: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr("builtins.print", lambda *a, end="\n", **_: lines.append(f"{a[0]}{end}"))
    try:
        arguments = ["--weights", checkpoint, "--tokens", 40, "--rounds", 2, "--out", out]
        assert demo.main([str(argument) for argument in arguments]) == 0
    finally:
        patch.undo()
        torch.compiler.reset()
    return "".join(lines), out, checkpoint


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in\n{text}"
    return float(found[1])


class TestOutput:
    def test_names_the_matched_layers_and_the_plan(self, printed):
        text = printed[0]
        assert "2 MoE layers, 1 graph\n" in text
        for layer in (1, 2):
            assert re.search(rf"model\.layers\.{layer}\.mlp +4 +2 +1", text)
        assert "stage 0: 20 tokens, stage 1: 20 tokens" in text
        assert "order: send-first (2 credits)" in text

    def test_judges_the_difference(self, printed):
        text = printed[0]
        assert number(r"two stages to eager: (\S+)\n", text) < 0.05
        unsplit = number(r"unsplit AFD (\S+), two stages", text)
        assert 0 < number(r"unsplit AFD \S+, two stages (\S+) ", text) <= 2 * unsplit

    def test_times_come_with_their_ratio(self, printed):
        text = printed[0]
        rows = re.findall(r"^  (\S.*?) +(\S+) ms +(\S+) ms +(\S+) times as fast$", text, re.M)
        assert [row[0] for row in rows] == [
            "eager, one core",
            "eager, both cores",
            "unsplit AFD, one core a side",
            "two-stage AFD, one core a side",
        ]
        for _, middle, fastest, ratio in rows:
            assert 0 < float(fastest) <= float(middle)
            assert float(ratio) == pytest.approx(
                float(middle) / float(rows[-1][1]), rel=0.05, abs=0.01
            )

    def test_gives_the_bound_and_how_busy_the_sides_were(self, printed):
        text = printed[0]
        bound = number(r"at least (\S+) ms; measured", text)
        measured = number(r"measured (\S+) ms, ", text)
        share = number(r"ms, (\S+)% of the bound", text)
        assert share == pytest.approx(100 * bound / measured, rel=0.1)
        busy = re.findall(r"attention busy (\d+)%, experts (\d+)%", text)
        assert len(busy) == 2
        assert all(0 < int(share) <= 100 for row in busy for share in row)

    def test_writes_picture_and_trace_and_says_where(self, printed):
        text, out, _ = printed
        assert str(out / "timeline.svg") in text
        assert str(out / "timeline.trace.json") in text
        picture = ElementTree.parse(out / "timeline.svg")
        drawn = "".join(picture.getroot().itertext())
        assert "unsplit, measured" in drawn
        assert "two stages, the model" in drawn
        assert json.loads((out / "timeline.trace.json").read_text())["traceEvents"]


class TestJudge:
    def test_equals_the_widened_model_and_leaves_the_weights(self, checkpoint):
        model = demo.load(checkpoint, seed=0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        ids = torch.arange(20)[None]
        with torch.no_grad():
            judge = demo.judged_in_fp32(model, ids)
            for name, value in model.state_dict().items():
                assert value.dtype is before[name].dtype
                assert torch.equal(value, before[name])
            torch.testing.assert_close(judge, model.float()(ids, use_cache=False).logits)


class TestTokens:
    def test_bytes_without_a_tokenizer(self, checkpoint):
        assert demo.tokenize("Aé!", checkpoint, 256, 3).tolist() == [[65, 195, 169]]

    def test_the_checkpoint_s_own_tokenizer(self, tmp_path):
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({"a": 0, "rabbit": 1, "?": 2}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
        assert demo.tokenize("a rabbit late", tmp_path, 3, 99).tolist() == [[0, 1, 2]]

    @pytest.mark.parametrize(("text", "vocabulary"), [("A", 256), ("AZ", 80)])
    def test_what_does_not_suit_the_model(self, text, vocabulary):
        with pytest.raises(SystemExit, match="do not suit a vocabulary"):
            demo.tokenize(text, None, vocabulary, 10)


def test_random_weights_are_bf16_and_rows_differ():
    model = demo.random_model(config(), seed=3)
    assert model.dtype is torch.bfloat16
    weight = model.model.layers[1].mlp.experts.gate_up_proj.detach()
    assert len(weight.flatten(0, 1).unique(dim=0)) == weight.shape[0] * weight.shape[1]
    assert float(weight.float().std()) == pytest.approx(0.02, rel=0.1)
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


def test_published_shape():
    shape = demo.v2_lite_config()
    assert (shape.hidden_size, shape.num_attention_heads, shape.kv_lora_rank) == (2048, 16, 512)
    assert (shape.n_routed_experts, shape.num_experts_per_tok, shape.n_shared_experts) == (64, 6, 2)
    assert shape.moe_intermediate_size == 1408


def test_a_folder_that_is_no_checkpoint(tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--weights", str(tmp_path)])
    assert "has no config.json" in capsys.readouterr().err
