"""Options of the backend inside vLLM: ``--additional-config '{"afd": {...}}'``.

The keys are those of :class:`afd_graph.AFDConfig`, and ``enabled``. vLLM puts the additional
configuration into the hash of its compile cache, so that a changed option compiles again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afd_graph.config import AFDConfig
from afd_graph.connectors import connector_names, create_connector
from afd_graph.connectors.torch_distributed_world import WorldConfig
from afd_graph.cost_model import CostModel
from afd_graph.errors import ConfigError
from afd_graph.runtime import check_credits
from afd_graph.validation import check_known_keys
from afd_graph.vllm.ranks import check_options

BACKEND = "afd"
"""Name of the backend, for ``--compilation-config``."""

_KEY = "afd"
_WITHOUT_EFFECT = ("assume_causal", "check_values", "disabled_passes", "lowering_options")
_FFN_IMPORTS = "afd_graph.vllm.experts"
_cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        given: whether there is an ``afd`` section at all.
        enabled: False makes every part of the backend do nothing, to find where a fault is.
        config: options of the compiler and its runtime.
    """

    given: bool
    enabled: bool
    config: AFDConfig


def options_of(vllm_config: Any) -> Options:
    """The options of a vLLM configuration.

    Raises:
        ConfigError: a key or value that is not known, or that does not work inside vLLM.
    """
    additional = getattr(vllm_config, "additional_config", None)
    section = additional.get(_KEY) if isinstance(additional, Mapping) else None
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(
            f"additional_config['afd'] is {section!r}",
            remedy='give an object: --additional-config \'{"afd": {"split": "token"}}\'',
        )
    values = dict(section or {})
    known = [field.name for field in dataclasses.fields(AFDConfig)]
    check_known_keys("afd", values, ["enabled", *known])
    enabled = values.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError(f"afd.enabled={enabled!r} is not true or false", remedy="use a boolean")
    if isinstance(values.get("costs"), Mapping):
        values["costs"] = _costs(values["costs"])
    values.setdefault("connector", "process")
    config = _checked(AFDConfig.from_options(values))
    _check_connector(config)
    if config.connector == "process":
        config = config.replace(connector_options=_for_ffn_process(config.connector_options))
    return Options(section is not None, enabled, config)


def _check_connector(config: AFDConfig) -> None:
    """Refuse now what the connector would refuse when the model has been loaded."""
    given = config.connector_options
    if config.connector not in connector_names():
        raise ConfigError(
            f"connector={config.connector!r} is not known",
            remedy=f"use one of {', '.join(connector_names())}",
        )
    if config.connector == "torch_distributed":
        check_options(given)
        # Ranks and sizes are vLLM's, and checked when they are known.
        WorldConfig(**{"ffn_ranks": 1, **given, "attention_ranks": 1, "rank": 0})
    elif config.connector == "process":
        connector = create_connector("process", given)  # starts nothing yet
        connector.close()
        check_credits(config, connector)


def _costs(values: Mapping[str, Any]) -> CostModel:
    try:
        return CostModel(**values)
    except TypeError as error:
        raise ConfigError(
            f"afd.costs={dict(values)!r} does not fit: {error}",
            remedy="the keys are the fields of afd_graph.cost_model.CostModel",
        ) from error


def _for_ffn_process(given: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(given)
    options["imports"] = [*options.get("imports", ()), _FFN_IMPORTS]
    # Loading vLLM's kernels takes seconds on a busy machine.
    options.setdefault("start_timeout_s", 300.0)
    if options.get("cpus") is None:
        # vLLM binds its threads; a child would inherit the one core of the thread that starts it.
        options["cpus"] = sorted(_cpus - _attention_cpus() or _cpus) or None
    return options


def _attention_cpus() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def _checked(config: AFDConfig) -> AFDConfig:
    problem = remedy = ""
    if config.connector == "local":
        problem = "connector='local' computes experts on a thread beside attention"
        remedy = (
            "use connector='process': two of vLLM's CPU kernels at once in one process share "
            "scratch memory and crash"
        )
    elif config.lowering != "eager":
        problem = f"lowering={config.lowering!r} is not there inside vLLM"
        remedy = "use lowering='eager'"
    elif config.exact or config.sequence_parallel:
        problem = "exact and sequence_parallel are not there inside vLLM"
        remedy = "leave both False"
    elif config.shared_experts != "attention":
        problem = f"shared_experts={config.shared_experts!r} is not there inside vLLM"
        remedy = "use shared_experts='attention'"
    else:
        for name in _WITHOUT_EFFECT:
            if getattr(config, name):
                problem = f"{name}={getattr(config, name)!r} has no effect inside vLLM"
                remedy = f"leave {name} out"
    if problem:
        raise ConfigError(problem, remedy=remedy)
    return config
