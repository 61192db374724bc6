"""vLLM's general plugin: vLLM calls :func:`register` in every process that it starts.

It puts itself in two places, which are there before anything of the model runner is imported:

* ``CompilationConfig.init_backend``, which vLLM asks for the compiler of a model when that is
  built: early enough for the hooks that a split needs;
* ``VllmConfig.__post_init__``, where all of vLLM's own changes to the configuration are made: if
  the backend will not be called, one line says so and what to set. If it will, engines that it
  cannot serve are refused. If it will, or is switched off by its option, a kernel of vLLM for CPU
  that computes wrongly is left out.

A second call changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from afd_graph.errors import ConfigError
from afd_graph.vllm.options import BACKEND, options_of
from afd_graph.vllm.ranks import check_model, check_whole_experts
from afd_graph.vllm.wrapping import wrap

log = logging.getLogger("vllm.afd_graph")

_SETTING = f"""--compilation-config '{{"mode": "DYNAMO_TRACE_ONCE", "backend": "{BACKEND}"}}'"""
_ASCEND_SETTING = """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'"""
_said: set[str] = set()


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``."""
    from vllm.config import CompilationConfig, VllmConfig

    wrap(CompilationConfig, "init_backend", _giving_ours)
    wrap(VllmConfig, "__post_init__", _saying_what_is_missing)


def _giving_ours(original: Any) -> Any:
    def init_backend(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        backend = original(self, vllm_config, *args, **kwargs)
        options = options_of(vllm_config)
        by_name = backend == BACKEND
        if not options.enabled:
            return "eager" if by_name else backend
        if not by_name and (not options.given or isinstance(backend, str)):
            return backend
        from afd_graph.vllm import runner_hook
        from afd_graph.vllm.backend import ModelBackend
        from afd_graph.vllm.piecewise import PiecewiseBackend

        runner_hook.install(vllm_config)
        return ModelBackend(vllm_config) if by_name else PiecewiseBackend(backend, vllm_config)

    return init_backend


def _saying_what_is_missing(original: Any) -> Any:
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        problem = why_not_called(self)
        if problem is not None:
            _say(problem)
        elif _is_configured(self):
            check_engine(self)
            leave_out_wrong_kernel(self)

    return post_init


def _is_ascend() -> bool:
    from vllm.platforms import current_platform

    from afd_graph.vllm.ascend import is_ascend

    return is_ascend(current_platform)


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


def _is_configured(vllm_config: Any) -> bool:
    # Also with ``enabled`` false, so that the backend is all that differs.
    return options_of(vllm_config).given or vllm_config.compilation_config.backend == BACKEND


def check_engine(vllm_config: Any) -> None:
    """Refuse an engine whose experts cannot leave it, before its model is loaded.

    Raises:
        ConfigError: its ranks divide the experts or the requests, or FFN ranks cannot serve it.
    """
    options, model = options_of(vllm_config), vllm_config.model_config
    if not options.enabled or model is None or not model.is_moe:
        return
    parallel = vllm_config.parallel_config
    check_whole_experts(parallel)
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            "AFD inside vLLM has no data parallelism of MoE layers, and data_parallel_size is "
            f"{parallel.data_parallel_size}",
            remedy="start a server for each replica",
        )
    if options.config.connector == "torch_distributed":
        check_model(options.config, vllm_config)


def leave_out_wrong_kernel(vllm_config: Any) -> None:
    """Let vLLM compute rotary embeddings without its kernel for CPU, unless the user names it.

    The kernel turns queries with three axes the wrong way, as those of DeepSeek are.
    """
    from vllm.platforms import current_platform

    named = ("+rotary_embedding", "-rotary_embedding")
    custom_ops = vllm_config.compilation_config.custom_ops
    if current_platform.is_cpu() and not any(name in custom_ops for name in named):
        custom_ops.append("-rotary_embedding")
        _say("AFD leaves out vLLM's rotary_embedding kernel for CPU, which is wrong for DeepSeek")


def why_not_called(vllm_config: Any) -> str | None:
    """Why the backend will not see the model of this configuration; None if it will, or need not.

    Raises:
        ConfigError: the options are wrong, which is better said before a model is loaded.
    """
    from vllm.config import CompilationMode

    options = options_of(vllm_config)
    compilation = vllm_config.compilation_config
    named = compilation.backend == BACKEND
    if not options.enabled or not (options.given or named):
        return None
    mode = compilation.mode
    if named and mode == CompilationMode.DYNAMO_TRACE_ONCE:
        return None
    if not named and mode == CompilationMode.VLLM_COMPILE:
        return None
    found = f"compilation mode {getattr(mode, 'name', mode)}, backend {compilation.backend!r}"
    remedy = f"set {_SETTING}"
    if _is_ascend():
        remedy = f"set {_ASCEND_SETTING}, which vLLM-Ascend needs to compile a model in pieces"
    if mode is None or mode == CompilationMode.NONE:
        remedy += ", without --enforce-eager, LoRA or TORCH_COMPILE_DISABLE"
    return f"AFD is configured and will not be called: {found}. To use it, {remedy}"
