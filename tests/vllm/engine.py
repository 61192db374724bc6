"""One vLLM engine in a process of its own: runs workloads, writes tokens and counters as JSON.

    python engine.py SPEC.json RESULT.json

Starting an engine costs many times what a workload costs, so one engine runs many: the split policy
and the number of concurrent requests are changed between workloads, as only a test may do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def keep_default_mode() -> None:
    """Keep vLLM's default compilation mode, which its CPU platform replaces by another."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def checked(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        mode, backend = compilation.mode, compilation.backend
        check(cls, vllm_config)
        if mode == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.backend = mode, backend
            compilation.compile_sizes = []

    CpuPlatform.check_and_update_config = classmethod(checked)


def trace_layers_as_accelerators_do() -> None:
    """Let vLLM trace a MoE layer as one operator, which its CPU platform does not."""
    import torch
    from vllm import LLM  # noqa: F401  (in this order; the other way round is a circular import)
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    def opaque(self: Any) -> Any:
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared

    MoERunner._select_forward = opaque


def build(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    if spec["compilation"]["mode"] == "VLLM_COMPILE":
        keep_default_mode()
    if os.environ.get("AFD_TEST_OPAQUE"):
        trace_layers_as_accelerators_do()
    compilation = spec["compilation"]
    additional = {} if spec.get("afd") is None else {"afd": spec["afd"]}
    return LLM(
        model=spec["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        seed=0,
        compilation_config=compilation,
        additional_config=additional,
        **{"max_num_seqs": 8, **spec.get("engine", {})},
    )


def run(llm: Any, workload: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    from afd_graph.cost_model import CostModel
    from afd_graph.vllm import runner_hook, step_plan
    from afd_graph.vllm.served import served_models

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    core.scheduler.max_num_active_reqs = workload.get("max_num_seqs", 8)
    llm.reset_prefix_cache()
    models = served_models()
    if "split" in workload:
        costs = CostModel(linear=1.0, quadratic=0.02, experts=1.0, num_layers=3, credits=2)
        options = runner_hook.options_of_runner(runner)
        config = options.config.replace(split=workload["split"], costs=costs)
        runner._afd_options = dataclasses.replace(options, config=config)
    guard = step_plan.Hazards.__call__
    if not workload.get("guard", True):
        step_plan.Hazards.__call__ = lambda self, plan: None
    before = _counters(models)
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in workload["prompts"]],
            [
                SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
                for length in workload["lengths"]
            ],
            use_tqdm=False,
        )
    finally:
        step_plan.Hazards.__call__ = guard
    counters = _counters(models)
    counters.subtract(before)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {"tokens": tokens, "counters": {k: v for k, v in counters.items() if v}}


def _counters(models: list[Any]) -> Counter[str]:
    counters: Counter[str] = Counter()
    for model in models:
        counters["split"] += model.report.steps_split
        counters["mid_request"] += model.report.steps_mid_request
        counters.update(model.report.steps_unsplit)
    return counters


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = build(spec)
    from vllm.compilation.counter import compilation_counter

    from afd_graph.vllm.served import served_models

    result: dict[str, Any] = {"runs": {w["name"]: run(llm, w) for w in spec["workloads"]}}
    models = served_models()
    result["reports"] = [str(model.report) for model in models]
    result["compilations"] = {
        name: value for name, value in dataclasses.asdict(compilation_counter).items() if value
    }
    result["weights_here"] = [
        parameter.untyped_storage().nbytes()
        for name, parameter in _parameters(llm)
        if name.endswith(("w13_weight", "w2_weight"))
    ]
    for model in models:
        model.close()
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    # vLLM's own shutdown of an engine in this process may wait for threads; nothing is left to do.
    os._exit(0)


def _parameters(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.model.named_parameters()


if __name__ == "__main__":
    main()
