"""A vLLM engine with tensor-parallel workers, whose experts are on FFN ranks; as ``engine.py``.

    python rank_engine.py SPEC.json RESULT.json

The workers are processes: what happens in them is asked and told by ``collective_rpc``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine import build, trace_layers_as_accelerators_do

from policy import counters as steps_so_far
from policy import set_policy

if os.environ.get("AFD_TEST_OPAQUE"):
    # Here and not in ``main``: vLLM spawns its workers, and each reads this file again.
    trace_layers_as_accelerators_do()


def use_policy(worker: Any, split: str) -> None:
    """On a worker: cut steps by another policy, as only a test may do."""
    set_policy(worker.model_runner, split)


def counters(worker: Any) -> dict[str, int]:
    """Of a worker: steps by what happened to them."""
    return dict(steps_so_far())


def weights(worker: Any) -> list[int]:
    """Of a worker: bytes of every expert weight that vLLM knows."""
    return [
        parameter.untyped_storage().nbytes()
        for name, parameter in worker.model_runner.model.named_parameters()
        if name.endswith(("w13_weight", "w2_weight"))
    ]


def break_worker(worker: Any, rank: int) -> None:
    """On worker ``rank``: let the next step fail before it does anything."""
    from afd_graph.vllm.served import served_models

    def fails(*_: Any) -> None:
        raise RuntimeError("broken by a test")

    if worker.rank == rank:
        (model,) = served_models()
        model._split = model._unsplit = fails


def run(llm: Any, workload: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm.collective_rpc(use_policy, args=(workload["split"],))
    before = llm.collective_rpc(counters)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in workload["prompts"]],
        [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in workload["lengths"]
        ],
        use_tqdm=False,
    )
    spent = []
    for now, then in zip(llm.collective_rpc(counters), before, strict=True):
        found = Counter(now)
        found.subtract(then)
        spent.append({name: count for name, count in found.items() if count})
    return {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "counters": spent}


def fail(llm: Any, workload: dict[str, Any]) -> dict[str, Any]:
    """Run a workload in which something is made to fail; says what failed, and after how long."""
    if "break" in workload:
        llm.collective_rpc(break_worker, args=(workload["break"],))
    Path(workload["running"]).touch()
    begin = time.monotonic()
    try:
        run(llm, workload)
    except Exception as error:
        return {"error": str(error), "seconds": time.monotonic() - begin}
    return {"error": "none", "seconds": 0}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = build(spec)
    runs, result = {}, {}
    for workload in spec["workloads"]:
        if "running" not in workload:
            runs[workload["name"]] = run(llm, workload)
    result["weights_here"] = llm.collective_rpc(weights)
    for workload in spec["workloads"]:
        if "running" in workload:
            runs[workload["name"]] = fail(llm, workload)
    Path(sys.argv[2]).write_text(json.dumps({"runs": runs, **result}))
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.flush()
    # As in engine.py: vLLM's threads of an engine in this process may not end.
    os._exit(0)


if __name__ == "__main__":
    main()
