"""Emit the calls that take the place of a node, with the metadata of that node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_KEPT = ("nn_module_stack", "stack_trace", "afd_stage")


class Emitter:
    """Emits calls that carry the metadata of the node they stand for.

    Args:
        graph: where the calls go, at its insertion point.
        like: the node.
    """

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph = graph
        self._meta = {k: v for k, v in like.meta.items() if k in _KEPT}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of ``target``."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(self._meta)
        return node

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size as a number, or as the node that computes it."""
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self(torch.ops.aten.sym_size.int, node, dim)
