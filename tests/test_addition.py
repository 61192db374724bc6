"""The small trained model: the checkpoint loads and adds, and its test problems were held out."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ADDITION = Path(__file__).parent.parent / "examples" / "addition"
MODEL = ADDITION / "model"


@pytest.fixture(scope="module")
def task():
    sys.path.insert(0, str(ADDITION))
    try:
        import task

        yield task
    finally:
        sys.path.remove(str(ADDITION))
        sys.modules.pop("task")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).eval()


def test_the_checkpoint_is_small_and_complete(model):
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 4 << 20
    config = model.config
    assert (config.model_type, config.num_hidden_layers) == ("deepseek_v2", 3)
    # Divisible for tensor parallelism and for expert parallelism by two.
    assert config.num_attention_heads % 2 == config.n_routed_experts % 2 == 0


def test_the_tokenizer_is_one_token_a_character(task):
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    text = "9081+2736=11817."
    assert tokenizer(text).input_ids == task.encode(text)
    assert tokenizer.decode(task.encode(text)) == text
    assert tokenizer.decode(task.encode(text), skip_special_tokens=True) == text[:-1]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (task.PAD, task.END)


def test_held_out_problems_are_never_trained_on(task):
    evaluated = task.held_out_problems(1000)
    assert len(set(evaluated)) == 1000
    assert evaluated == task.held_out_problems(1000)
    trained = set(islice(task.problems(0, held_out=False), 20_000))
    assert not trained & set(evaluated)
    assert len({len(problem.prompt) for problem in evaluated}) > 4  # padding is exercised


@torch.no_grad()
def test_the_model_adds(task, model):
    """The whole answer right, token by token, for problems it never saw."""
    problems, hits = task.held_out_problems(200, seed=7), 0
    for problem in problems:
        ids = torch.tensor([task.encode(problem.prompt)])
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
        hits += task.decode(out[0, ids.shape[1] :].tolist()) == problem.answer
    assert hits / len(problems) > 0.95


@torch.no_grad()
def test_all_experts_are_used(task, model):
    used: list[set[int]] = [set() for _ in range(2)]
    for problem in task.held_out_problems(32):
        ids = torch.tensor([task.encode(problem.prompt + problem.answer)])
        for layer, logits in enumerate(model(ids, output_router_logits=True).router_logits):
            chosen = logits.topk(model.config.num_experts_per_tok).indices
            used[layer].update(chosen.flatten().tolist())
    assert used == [set(range(model.config.n_routed_experts))] * 2
