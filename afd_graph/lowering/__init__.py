"""Lowerings: what the transformed graph is handed to."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from afd_graph.errors import ConfigError

Runner = Callable[[Sequence[Any]], Sequence[Any]]
"""A lowered graph: takes all inputs as one sequence, returns all outputs."""

_LOWERINGS = {
    "eager": "afd_graph.lowering.eager",
    "inductor": "afd_graph.lowering.inductor",
    "torchair": "afd_graph.lowering.torchair",
}


def lower(name: str, gm: fx.GraphModule, options: Mapping[str, Any] | None = None) -> Runner:
    """Lower ``gm`` with the lowering ``name`` and its options.

    Raises:
        ConfigError: the lowering does not know an option.
    """
    module = importlib.import_module(_LOWERINGS[name])
    return _with_options(name, module.lower, options, gm)


def decompositions(name: str, options: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """The decompositions that the lowering wants AOTAutograd to use."""
    module = importlib.import_module(_LOWERINGS[name])
    wanted = getattr(module, "decompositions", None)
    return {} if wanted is None else _with_options(name, wanted, options)


def _with_options(
    name: str, function: Callable[..., Any], options: Mapping[str, Any] | None, *args: Any
) -> Any:
    known = set(inspect.signature(function).parameters) - {"gm"}
    unknown = set(options or {}) - known
    if unknown:
        raise ConfigError(
            f"lowering_options {sorted(unknown)} are not known to lowering={name!r}",
            remedy=f"known options: {sorted(known) or 'none'}",
        )
    return function(*args, **(options or {}))
