"""A vLLM engine that says how likely each token of the prompts is; as ``engine.py``.

    python logprob_engine.py SPEC.json RESULT.json

Log-probabilities of given tokens can be compared between programs that round in other ways; tokens
that are chosen cannot, since one choice changes all that follow.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from engine import build


def main() -> None:
    from vllm import SamplingParams

    from afd_graph.vllm import report_as_dict
    from afd_graph.vllm.served import served_models

    spec = json.loads(Path(sys.argv[1]).read_text())
    (workload,) = spec["workloads"]
    llm = build(spec)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in workload["prompts"]],
        SamplingParams(max_tokens=8, prompt_logprobs=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    rows = [
        [
            found[token].logprob
            for token, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for prompt, output in zip(workload["prompts"], outputs, strict=True)
    ]
    report = llm.collective_rpc(report_as_dict)[0] if spec["afd"] is not None else None
    Path(sys.argv[2]).write_text(json.dumps({"logprobs": rows, "report": report}))
    for model in served_models():
        model.close()
    sys.stdout.flush()
    # As in engine.py: vLLM's threads of an engine in this process may not end.
    os._exit(0)


if __name__ == "__main__":
    main()
