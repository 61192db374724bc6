"""One vLLM engine that serves what tests of the split seldom ask for: answers as JSON.

    python odd_engine.py SPEC.json RESULT.json

The cache is so small that requests are preempted and computed again, steps take few tokens and many
requests, requests have priorities. Sampling is not greedy, and log-probabilities are asked for.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from engine import build

from policy import counters

ENGINE = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 40,  # of 16 tokens; 33 hold the longest request
    "scheduling_policy": "priority",
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}


def workloads() -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Lengths of the prompts and the sampling parameters, by name."""
    draw = random.Random(3)
    return {
        "one_token_prompts": ([1] * 64, {"max_tokens": 6}),
        "at_borders": ([draw.choice([1, 2, 31, 32, 33, 64, 65]) for _ in range(30)], {}),
        "preempted": ([100] * 16, {"max_tokens": 90}),
        "long": ([480, 480, 5, 5, 5], {"max_tokens": 20}),
        "several_answers": ([20] * 6, {"n": 2, "temperature": 0.8, "top_p": 0.9, "seed": 7}),
        "log_probabilities": ([3, 40, 80, 3, 40, 80], {"logprobs": 5, "prompt_logprobs": 3}),
        "stop_tokens": (
            [12] * 8,
            {"max_tokens": 40, "stop_token_ids": list(range(3, 60)), "ignore_eos": False},
        ),
        "penalties": (
            [30] * 6,
            {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 3},
        ),
        "priorities": ([60] * 14, {"max_tokens": 40}),
    }


def serve(llm: Any, name: str, lengths: list[int], sampling: dict[str, Any]) -> list[Any]:
    """Tokens, reasons of the end, and log-probabilities of every request."""
    from vllm import SamplingParams

    draw = random.Random(name)
    prompts = [{"prompt_token_ids": [draw.randrange(3, 500) for _ in range(n)]} for n in lengths]
    common = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    priority = [7 * i % 5 for i in range(len(prompts))] if name == "priorities" else None
    llm.reset_prefix_cache()
    outputs = llm.generate(
        prompts, SamplingParams(**{**common, **sampling}), use_tqdm=False, priority=priority
    )
    return [
        {
            "tokens": [list(answer.token_ids) for answer in output.outputs],
            "ends": [[answer.finish_reason, answer.stop_reason] for answer in output.outputs],
            "logprobs": [_values(answer.logprobs) for answer in output.outputs],
            "prompt_logprobs": _values(output.prompt_logprobs),
        }
        for output in outputs
    ]


def _values(positions: Any) -> list[dict[str, float]]:
    return [
        {str(token): value.logprob for token, value in (position or {}).items()}
        for position in positions or []
    ]


def reload_weights(llm: Any) -> str:
    """What the worker says when it is told to load the weights again."""
    try:
        llm.collective_rpc("reload_weights")
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = build({**spec, "engine": ENGINE})
    answers = {name: serve(llm, name, *given) for name, given in workloads().items()}
    refused = reload_weights(llm) if spec["afd"] else ""
    again = serve(llm, "one_token_prompts", *workloads()["one_token_prompts"])
    preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    found = {
        "answers": {**answers, "again": again},
        "refused": refused,
        "preempted": sum(preempted),
        "counters": dict(counters()),
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
    sys.stdout.flush()
    # As in engine.py.
    os._exit(0)


if __name__ == "__main__":
    main()
