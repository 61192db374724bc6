"""Run the graph as it is: its generated Python, one operator at a time, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from afd_graph.passes.cache_writes import write_caches_in_place


def lower(gm: fx.GraphModule) -> Any:
    """Return a function over the list of inputs."""
    if write_caches_in_place(gm.graph):
        gm.recompile()
    forward = gm.forward

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        return forward(*inputs)

    return run
