"""bfloat16, which vLLM serves by default, with the kernels that it chooses for the CPU of this run.

Where the CPU has AMX these are others than in float32: of attention, which has chunked prefill and
prefix caching then, and of the experts, whose width is one that has to be padded here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import PLAIN, mixed_requests
from random_deepseek import make_checkpoint

PROGRAM = Path(__file__).parent / "logprob_engine.py"
ENGINE = {
    "dtype": "bfloat16",
    "attention_backend": None,
    "max_num_batched_tokens": 64,
    "block_size": 32,
}
CHUNKS = torch.cpu._is_amx_tile_supported()  # otherwise vLLM takes whole prompts, and caches none


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("v3"), "deepseek_v3", moe_intermediate_size=48)


@pytest.fixture(scope="module")
def logprobs(engine: Any, model: Path) -> Any:
    """Error of an engine's log-probabilities against Hugging Face in float32, and its report."""
    prompts = [prompt for prompt in mixed_requests()[0] if len(prompt) > 1]
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]

    def get(**options: Any) -> tuple[float, Any]:
        workload = {"prompts": prompts}
        found = engine.run(model, [workload], engine=ENGINE, program=PROGRAM, **options)
        assert (found["cached"] > 500) == CHUNKS
        errors = []
        for prompt, right, row, behind in zip(
            prompts, expected, found["prompts"], found["next"], strict=True
        ):
            given = torch.tensor(prompt[1:])[:, None]
            errors.append(torch.tensor(row) - right[:-1].gather(-1, given)[:, 0])
            likely = torch.tensor([int(token) for token in behind])
            errors.append(torch.tensor(list(behind.values())) - right[-1, likely])
        return torch.cat(errors).abs().mean().item(), found["report"]

    return get


@pytest.fixture(scope="module")
def alone(logprobs: Any) -> float:
    """The error of vLLM without the backend."""
    error, _ = logprobs(compilation=PLAIN)
    assert 0.001 < error < 0.2
    return error


def check(error: float, alone: float, report: Any) -> None:
    assert error < 1.2 * alone
    assert report["steps_split"] >= 20
    assert report["steps_mid_request"] >= (20 if CHUNKS else 3)


def test_experts_in_a_process(logprobs: Any, alone: float) -> None:
    error, report = logprobs(afd={})
    check(error, alone, report)


def test_experts_on_a_rank_and_layers_that_are_one_operator(
    logprobs: Any, alone: float, experts: Any, model: Path
) -> None:
    ffn = experts(model, 1, "--dtype", "bfloat16")
    environment = {"AFD_TEST_OPAQUE": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    error, report = logprobs(afd=ffn.options(), environment=environment)
    check(error, alone, report)
    ((code, log),) = ffn.ended()
    assert code == 0, log
