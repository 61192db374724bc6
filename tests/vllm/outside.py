"""An engine in a process of its own, as a server has it, asked for its report from outside.

python outside.py MODEL RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine import build

AFD = {"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"}


def main() -> None:
    from vllm import SamplingParams

    from afd_graph.vllm import report_as_dict

    options = {"trace": True, "dump_dir": str(Path(sys.argv[2]).parent)}
    llm = build({"model": sys.argv[1], "compilation": AFD, "afd": options})
    llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}] * 3,
        SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    (found,) = llm.collective_rpc(report_as_dict)
    Path(sys.argv[2]).write_text(json.dumps(found))
    # By itself vLLM kills its processes five seconds after it told them to end.
    llm.llm_engine.engine_core.shutdown(timeout=60)


if __name__ == "__main__":
    main()
