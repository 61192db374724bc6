"""The ``torch.compile`` backend inside vLLM: ``{"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"}``.

vLLM resolves the name and our plugin gives it a callable that knows vLLM's configuration. The
result can be stored in vLLM's ahead-of-time cache (:mod:`artifact`).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from afd_graph.errors import ConfigError
from afd_graph.vllm.artifact import CompiledModel
from afd_graph.vllm.operators import operator_name


class ModelBackend:
    """Compiles the graph of one model of vLLM.

    Args:
        vllm_config: vLLM's configuration of the model.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> CompiledModel:
        """Called by ``torch.compile``.

        Raises:
            UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
        """
        return CompiledModel.compile(gm, self._vllm_config)

    def __repr__(self) -> str:
        return "afd"


def is_vllm_graph(gm: fx.GraphModule) -> bool:
    """Whether a graph calls operators of vLLM."""
    return any((operator_name(node) or "").startswith("vllm::") for node in gm.graph.nodes)


def compile_without_plugin(gm: fx.GraphModule, example_inputs: list[Any]) -> CompiledModel:
    """Compile a graph of vLLM for which the plugin gave no configuration.

    Raises:
        ConfigError: vLLM does not tell its configuration here.
    """
    from vllm.config import get_current_vllm_config_or_none

    from afd_graph.vllm import runner_hook

    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        raise ConfigError(
            "this is a model of vLLM, and the AFD plugin is not loaded",
            remedy="let VLLM_PLUGINS be unset or name 'afd' in it",
        )
    runner_hook.install(vllm_config)
    return ModelBackend(vllm_config)(gm, example_inputs)
