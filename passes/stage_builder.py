"""A graph under construction, node by node, with copies for parts of a token axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from afd_graph.passes.extents import Extent, Extents
from afd_graph.passes.sizes import size_of
from afd_graph.passes.token_layout import TokenDim

aten = torch.ops.aten


class StageBuilder:
    """The new graph, and the small operations on token axes that its emission is made of.

    Attributes:
        graph: the graph under construction.
        extents: sizes in it.
        stage: stage of the nodes that are emitted now; None for what is not part of one.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.extents = Extents(self.graph)
        self.stage: int | None = None

    def _unfold(
        self, node: fx.Node, value: fx.Node, dim: int, entry: TokenDim, length: Extent
    ) -> tuple[fx.Node, int]:
        """Bring a token axis that lies inside a dimension out; returns value and dimension."""
        if entry.outer.is_one:
            return value, dim
        shape = self._sizes(node)
        outer, inner = self.extents.of(entry.outer), self.extents.of(entry.inner)
        shape[dim : dim + 1] = [outer, self.extents.multiply(length, inner)]
        return self._call(aten.reshape.default, (value, shape), like=node), dim + 1

    def _fold(
        self, node: fx.Node, value: fx.Node, dim: int, entry: TokenDim, length: Extent
    ) -> fx.Node:
        """Undo :meth:`_unfold`, for a token axis of ``length``."""
        if entry.outer.is_one:
            return value
        shape = self._sizes(node)
        factors = self.extents.multiply(self.extents.of(entry.outer), self.extents.of(entry.inner))
        shape[dim] = self.extents.multiply(factors, length)
        return self._call(aten.reshape.default, (value, shape), like=node)

    def _sizes(self, node: fx.Node) -> list[Extent]:
        return [self.extents.of(size_of(extent)) for extent in node.meta["val"].shape]

    def _call(self, target: Any, arguments: tuple[Any, ...], *, like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, arguments)
        new.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
        self._mark(new)
        return new

    def _mark(self, new: fx.Node) -> None:
        # The shape of the unsplit value does not hold for a part of it.
        new.meta.pop("val", None)
        if self.stage is not None:
            new.meta["afd_stage"] = self.stage
