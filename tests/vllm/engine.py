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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stored_entries
from policy import counters, set_policy

DEFAULTS = {
    "dtype": "float32",
    "attention_backend": "CPU_MLA",  # vLLM's choice where the CPU has AMX has no float32
    "max_num_seqs": 8,
}


def keep_default_mode() -> None:
    """Keep vLLM's default compilation mode, which its CPU platform replaces by another."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def checked(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        names = ("mode", "backend", "ir_enable_torch_wrap")
        kept = {name: getattr(compilation, name) for name in names}
        check(cls, vllm_config)
        if kept["mode"] == CompilationMode.VLLM_COMPILE:
            for name, value in kept.items():
                setattr(compilation, name, value)
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


def pretend_other_source() -> None:
    """Let the backend take its own source for another than it is."""
    from afd_graph.vllm import artifact

    artifact.source_digest = lambda: "0" * 16


def record_one_split_step(model: Any) -> list[list[Any]]:
    """Returns a list that gets the first split step: what of ours runs, pieces as numbers."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.compilation.piecewise_backend import PiecewiseBackend

    found: list[list[Any]] = []
    two_stages, call_piece = model._split, PiecewiseBackend.__call__

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func.namespace == "afd":
                found.append([func._opname, *(a for a in args if type(a) in (int, str))])
            return func(*args, **(kwargs or {}))

    def piece(self: Any, *args: Any) -> Any:
        found.append(["piece", self.piecewise_compile_index])
        return call_piece(self, *args)

    def first_step(*inputs: Any) -> Any:
        model._split = two_stages
        PiecewiseBackend.__call__ = piece
        with Record():
            outputs = two_stages(*inputs)
        PiecewiseBackend.__call__ = call_piece
        return outputs

    model._split = first_step
    return found


def build(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    if os.environ.get("AFD_TEST_SOURCE"):
        pretend_other_source()
    if spec["compilation"]["mode"] == "VLLM_COMPILE":
        keep_default_mode()
    if os.environ.get("AFD_TEST_OPAQUE"):
        trace_layers_as_accelerators_do()
    compilation = spec["compilation"]
    additional = {} if spec.get("afd") is None else {"afd": spec["afd"]}
    return LLM(
        model=spec["model"],
        skip_tokenizer_init=True,
        max_model_len=512,
        seed=0,
        compilation_config=compilation,
        additional_config=additional,
        **{**DEFAULTS, **spec.get("engine", {})},
    )


def run(llm: Any, workload: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    from afd_graph.vllm import step_plan

    runner = _runner(llm)
    core = llm.llm_engine.engine_core.engine_core
    core.scheduler.max_num_active_reqs = workload.get("max_num_seqs", 8)
    llm.reset_prefix_cache()
    if "split" in workload:
        set_policy(runner, workload["split"])
    guard = step_plan.Hazards.__call__
    if not workload.get("guard", True):
        step_plan.Hazards.__call__ = lambda self, plan: None
    before = counters()
    if workload.get("dummy_steps"):
        run_dummy_steps(runner)
    try:
        with padded(runner, *workload.get("padding", (0, 0))) as steps:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in workload["prompts"]],
                [
                    SamplingParams(
                        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
                    )
                    for length in workload["lengths"]
                ],
                use_tqdm=False,
            )
    finally:
        step_plan.Hazards.__call__ = guard
    ran = counters()
    ran.subtract(before)
    ran["padded"] = len(steps)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {"tokens": tokens, "counters": {k: v for k, v in ran.items() if v}}


@contextmanager
def padded(runner: Any, rows: int, requests: int) -> Iterator[list[int]]:
    """Let steps inside have more rows than tokens, as far as fit, and more requests than real ones.

    Lists the padded steps. With ``requests`` the metadata is padded as well, not the inputs alone.

    vLLM pads for captured device graphs and data parallelism, neither of which CPUs have. Where it
    asks for the padded size of a step, it is told one here, and pads as on any device.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    steps: list[int] = []
    dispatcher = runner.cudagraph_dispatcher
    if rows:

        def dispatch(num_tokens: int, **kwargs: Any) -> tuple[Any, Any]:
            size = min(num_tokens + rows, runner.max_num_tokens)
            if size > num_tokens:
                steps.append(num_tokens)
            if not requests:
                return CUDAGraphMode.NONE, BatchDescriptor(size)
            all_requests = min(runner.input_batch.num_reqs + requests, runner.max_num_reqs, size)
            return CUDAGraphMode.FULL, BatchDescriptor(size, all_requests)

        dispatcher.dispatch = dispatch
    try:
        yield steps
    finally:
        vars(dispatcher).pop("dispatch", None)


def run_dummy_steps(runner: Any) -> None:
    """Steps without requests: as a data-parallel rank without work, and as a warm-up."""
    runner._dummy_run(1, uniform_decode=True)
    runner._dummy_run(7, force_attention=True)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = build(spec)
    from vllm.compilation.counter import compilation_counter

    from afd_graph.vllm.served import served_models

    record = os.environ.get("AFD_TEST_RECORD")
    order = record_one_split_step(served_models()[0]) if record else []
    profiled = row_memory(served_models())
    result: dict[str, Any] = {"runs": {w["name"]: run(llm, w) for w in spec["workloads"]}}
    result["most_tokens"] = _runner(llm).max_num_tokens
    if "other_entries" in spec:
        model = _runner(llm).model.model
        result["loads"] = stored_entries.load_all(model, spec["other_entries"])
    result["order"] = order
    models = served_models()
    result["reports"] = [str(model.report) for model in models]
    result["row_memory"] = {"profiled": profiled, "in_the_end": row_memory(models)}
    result["compilations"] = {
        name: value for name, value in dataclasses.asdict(compilation_counter).items() if value
    }
    from torch._dynamo.utils import counters

    result["pytorch"] = {name: dict(found) for name, found in counters.items()}
    result["weights_here"] = [
        parameter.untyped_storage().nbytes()
        for name, parameter in _runner(llm).model.named_parameters()
        if name.endswith(("w13_weight", "w2_weight"))
    ]
    for model in models:
        model.close()
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    # vLLM's own shutdown of an engine in this process may wait for threads; nothing is left to do.
    os._exit(0)


def row_memory(models: list[Any]) -> list[int]:
    """Bytes that the connectors hold for the rows of their largest item."""
    return [max(slot.item.mapped for slot in model._ffn.connector._slots) for model in models]


def _runner(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


if __name__ == "__main__":
    main()
