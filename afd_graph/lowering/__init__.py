"""Lowerings: what the transformed graph is handed to."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

Runner = Callable[[Sequence[Any]], Sequence[Any]]
"""A lowered graph: takes all inputs as one sequence, returns all outputs."""

_LOWERINGS = {
    "eager": "afd_graph.lowering.eager",
    "inductor": "afd_graph.lowering.inductor",
}


def lower(name: str, gm: fx.GraphModule) -> Runner:
    """Lower ``gm`` with the lowering ``name``."""
    module = importlib.import_module(_LOWERINGS[name])
    return module.lower(gm)
