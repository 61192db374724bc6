"""``afd-graph serve --artifact``: an attention and an FFN rank without the model's code."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from click.testing import CliRunner

import tiny_models
from afd_graph.artifact import save
from afd_graph.cli.group import afd_graph as group
from afd_graph.hf import PREFIX, ServingModule, serving_examples


def test_two_ranks_serve_an_artifact(tmp_path):
    model = tiny_models.deepseek_v2().requires_grad_(False)
    module = ServingModule(model)
    examples = dict(serving_examples(module, None, ["prefill_batch", "decode_batch"]))
    save(tmp_path / "model", module, examples, prefix=PREFIX)
    prompts = [[5, 9, 2, 7, 11], [3, 8, 1]]
    lines = [json.dumps({"id": str(i), "prompt_tokens": p}) for i, p in enumerate(prompts)]
    (tmp_path / "prompts").write_text("\n".join(lines))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "afd_graph.cli", "serve", "--artifact", str(tmp_path / "model")),
        *("--ffn-ranks", "1", "--max-new-tokens", "4", "--output", str(tmp_path / "out")),
        *("--prompts", str(tmp_path / "prompts")),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    documents = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    documents = [document for document in documents if "tokens" in document]
    for prompt, document in zip(prompts, documents, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert document["tokens"] == expected[0, len(prompt) :].tolist()
    assert "4 steps split" in run.stderr


def test_misuse(tmp_path):
    answer = CliRunner().invoke(group, ["serve", "--ffn-ranks", "1"])
    assert answer.exit_code == 2
    assert "--artifact" in answer.output
