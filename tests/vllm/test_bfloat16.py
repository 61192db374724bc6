"""bfloat16, which vLLM serves by default, with the kernels that it chooses for the CPU of this run.

Where the CPU has AMX these are others than in float32: of attention, and of the experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import PLAIN, mixed_requests

PROGRAM = Path(__file__).parent / "logprob_engine.py"
ENGINE = {"dtype": "bfloat16", "attention_backend": None}


@pytest.fixture(scope="module")
def logprobs(engine: Any, checkpoint: Any) -> Any:
    """Error of an engine's log-probabilities against Hugging Face in float32, and its report."""
    model = checkpoint("deepseek_v3")
    prompts = [prompt for prompt in mixed_requests()[0] if len(prompt) > 1]
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            rows = oracle(ids).logits[0, :-1].log_softmax(-1)
            expected.append(rows.gather(-1, ids[0, 1:, None])[:, 0])

    def get(**options: Any) -> tuple[float, Any]:
        workload = {"prompts": prompts}
        found = engine.run(model, [workload], engine=ENGINE, program=PROGRAM, **options)
        errors = [
            torch.tensor(row) - right
            for row, right in zip(found["logprobs"], expected, strict=True)
        ]
        return torch.cat(errors).abs().mean().item(), found["report"]

    return get


@pytest.fixture(scope="module")
def alone(logprobs: Any) -> float:
    """The error of vLLM without the backend."""
    error, _ = logprobs(compilation=PLAIN)
    assert 0.001 < error < 0.1
    return error


def check(error: float, alone: float, report: Any) -> None:
    assert error < 1.2 * alone
    assert report["steps_split"] >= 20
    assert report["steps_mid_request"] >= 3


def test_experts_in_a_process(logprobs: Any, alone: float) -> None:
    error, report = logprobs(afd={})
    check(error, alone, report)


def test_experts_on_a_rank(logprobs: Any, alone: float, experts: Any, checkpoint: Any) -> None:
    ffn = experts(checkpoint("deepseek_v3"), 1, "--dtype", "bfloat16")
    error, report = logprobs(afd=ffn.options())
    check(error, alone, report)
    ((code, log),) = ffn.ended()
    assert code == 0, log
