"""A vLLM engine that says how likely given tokens are; as ``engine.py``.

    python logprob_engine.py SPEC.json RESULT.json

Log-probabilities of given tokens can be compared between programs that round in other ways; tokens
that are chosen cannot, since one choice changes all that follow.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engine import build

NEXT = 5  # of the most likely tokens behind a prompt


def of_prompts(llm: Any, prompts: list[list[int]]) -> list[list[float]]:
    """Of every token of the prompts but the first; steps that decode are among those that run."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=8, prompt_logprobs=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    return [
        [
            found[token].logprob
            for token, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def behind_prompts(llm: Any, prompts: list[list[int]]) -> tuple[list[dict[int, float]], int]:
    """Of the most likely tokens behind each prompt, and the tokens that came from the prefix cache.

    That of a request that asks for its prompt's log-probabilities is not read.
    """
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=1, logprobs=NEXT, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    rows = [
        {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}
        for output in outputs
    ]
    return rows, sum(output.num_cached_tokens for output in outputs)


def main() -> None:
    from afd_graph.vllm import report_as_dict
    from afd_graph.vllm.served import served_models

    spec = json.loads(Path(sys.argv[1]).read_text())
    (workload,) = spec["workloads"]
    llm = build(spec)
    result: dict[str, Any] = {"prompts": of_prompts(llm, workload["prompts"])}
    result["next"], result["cached"] = behind_prompts(llm, workload["prompts"])
    result["report"] = llm.collective_rpc(report_as_dict)[0] if spec["afd"] is not None else None
    Path(sys.argv[2]).write_text(json.dumps(result))
    for model in served_models():
        model.close()
    sys.stdout.flush()
    # As in engine.py: vLLM's threads of an engine in this process may not end.
    os._exit(0)


if __name__ == "__main__":
    main()
