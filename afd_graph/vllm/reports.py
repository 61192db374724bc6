"""The report of a served model: in its own process, or asked of vLLM's worker from outside."""

from __future__ import annotations

from typing import Any

from afd_graph.errors import AFDError
from afd_graph.report import Report
from afd_graph.vllm.served import served_models

_ASK_A_WORKER = "ask the worker of one engine: llm.collective_rpc(afd_graph.vllm.report_as_dict)"
_NOT_CALLED = "look for 'AFD is configured and will not be called' in vLLM's log"
_ALL = "read all: [model.report for model in afd_graph.vllm.served.served_models()]"


def report() -> Report:
    """The report of the model of this process; :func:`report_as_dict` asks another one.

    Raises:
        AFDError: the backend has compiled no model here, or more than one.
    """
    models = served_models()
    if len(models) != 1:
        raise AFDError(
            f"the AFD backend compiled {len(models)} models of vLLM in this process",
            remedy=_ASK_A_WORKER if models else f"{_ASK_A_WORKER}, or {_NOT_CALLED}",
        )
    return models[0].report


def report_as_dict(worker: Any = None) -> dict[str, Any]:
    """The report of a worker's model in plain values, which vLLM passes between processes.

    ``Report.from_dict(llm.collective_rpc(report_as_dict)[0])`` is the report of the first worker;
    vLLM only sends a function with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``.

    Args:
        worker: what vLLM passes; without it the model of this process is meant.

    Raises:
        AFDError: the backend has compiled no model here, or more than one.
    """
    if worker is None:
        return report().as_dict()
    # Engines may share a process; all models of one have this object in common.
    engine = worker.vllm_config.compilation_config
    models = [model for model in served_models() if model.belongs_to(engine)]
    if len(models) != 1:
        raise AFDError(
            f"the AFD backend compiled {len(models)} models of vLLM for this worker",
            remedy=_ALL if models else _NOT_CALLED,
        )
    return models[0].report.as_dict()
