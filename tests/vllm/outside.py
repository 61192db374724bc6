"""An engine in a process of its own, as a server has it, asked for its report from outside.

python outside.py MODEL RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    from afd_graph.vllm import report_as_dict

    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        attention_backend="CPU_MLA",  # vLLM's choice where the CPU has AMX has no float32
        max_model_len=512,
        max_num_seqs=8,
        compilation_config={"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"},
        additional_config={"afd": {"trace": True, "dump_dir": str(Path(sys.argv[2]).parent)}},
    )
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
