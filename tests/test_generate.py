"""Greedy completion of padded batches, against the library's own loop and against prompts alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from afd_graph.cli.serve import _write
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.generate import Generation, generate, read_prompts

MODEL = Path(__file__).parent.parent / "examples" / "addition" / "model"
LINES = ["12+34=", '{"id": "carry", "prompt": "417+85=", "expected": "502"}', "5+5=", "8000+70="]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def complete(model, tokenizer, *, batch_size: int, most: int = 8):
    prompts = read_prompts(LINES, tokenizer)
    logits: dict[str, torch.Tensor] = {}
    how = Generation("none", "eager", most, batch_size, frozenset([1]), tokenizer.decode)
    cache = lambda: DynamicCache(config=model.config)  # noqa: E731
    return list(generate(model, cache, prompts, None, how, logits)), logits


@torch.no_grad()
def test_equals_the_library(model, tokenizer):
    documents, logits = complete(model, tokenizer, batch_size=3)
    assert [document.text for document in documents] == ["46", "502", "10", "8070"]
    assert [document.id for document in documents] == ["0", "carry", "2", "3"]
    assert [document.right for document in documents] == [None, True, None, None]
    for document in documents:
        ids = tokenizer(document.prompt, return_tensors="pt").input_ids
        wanted = model.generate(
            ids,
            max_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert list(document.tokens) == wanted.sequences[0, ids.shape[1] :].tolist()
        found = logits[document.id]
        assert found.shape == (len(document.tokens), model.config.vocab_size)
        torch.testing.assert_close(found, torch.cat(wanted.logits), rtol=1e-4, atol=1e-4)
        assert found.argmax(-1).tolist() == list(document.tokens)
        assert not document.steps


def test_answers_that_do_not_end_are_cut(model, tokenizer):
    documents, logits = complete(model, tokenizer, batch_size=4, most=2)
    assert [document.text for document in documents] == ["46", "50", "10", "80"]
    assert {len(rows) for rows in logits.values()} == {2}


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"prompt": ', "line 2 of the prompts is not JSON"), ("{}", "line 2 .* gives no tokens")],
)
def test_unusable_prompts_are_refused_by_line(tokenizer, line, message):
    with pytest.raises(ConfigError, match=message):
        read_prompts(["1+1=", line], tokenizer)


def test_results_are_written_in_the_order_of_the_prompts(tmp_path):
    path = tmp_path / "out.jsonl"
    _write([None] * 5, [["0", "2", "4"]] * 2 + [["1", "3"]] * 2, 2, 2, str(path))
    assert path.read_text().split() == ["0", "1", "2", "3", "4"]


def test_ranks_of_a_replica_that_differ_are_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    gathered = [["0", "2"], ["0", "2"], ["1", "3"], ["1", "x"]]
    with pytest.raises(ConnectorError, match=r"attention ranks 2 and 3 share a replica .* 3 and x"):
        _write([None] * 4, gathered, 2, 2, str(path))
    assert not path.exists()
