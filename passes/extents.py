"""Sizes as graph values: constants where possible, nodes where a size is symbolic."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from afd_graph.errors import PassError
from afd_graph.passes.sizes import Size, size_of_expression

Extent = int | fx.Node
"""A size in a graph under construction."""


class Extents:
    """Arithmetic on extents; every symbolic result is computed once and reused."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._symbols: dict[sympy.Expr, fx.Node] = {}
        self._sized: dict[sympy.Expr, tuple[fx.Node, int]] = {}
        self._computed: dict[tuple[Any, Extent, Extent], fx.Node] = {}

    def learn(self, node: fx.Node) -> None:
        """Remember that ``node`` holds a size, or a tensor with symbolic sizes."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._symbols.setdefault(value.node.expr, node)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._sized.setdefault(size.node.expr, (node, dim))

    def of(self, size: Size) -> Extent:
        """The extent of a monomial."""
        result: Extent = size.coefficient
        for symbol in size.factors():
            result = self.multiply(result, self._symbol(symbol))
        return result

    def _symbol(self, expr: sympy.Expr) -> Extent:
        if expr not in self._symbols:
            if expr not in self._sized:
                if not expr.is_Add:
                    raise PassError(f"size {expr} is not computed anywhere in the graph")
                total: Extent = 0
                for term in expr.args:
                    total = self.add(total, self.of(size_of_expression(term)))
                return total
            node, dim = self._sized[expr]
            size = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
            size.meta["val"] = node.meta["val"].shape[dim]
            self._symbols[expr] = size
        return self._symbols[expr]

    def add(self, left: Extent, right: Extent) -> Extent:
        """Sum."""
        if left == 0:
            return right
        return left if right == 0 else self._compute(operator.add, left, right)

    def subtract(self, left: Extent, right: Extent) -> Extent:
        """Difference."""
        return left if right == 0 else self._compute(operator.sub, left, right)

    def multiply(self, left: Extent, right: Extent) -> Extent:
        """Product."""
        if left == 1:
            return right
        return left if right == 1 else self._compute(operator.mul, left, right)

    def half(self, extent: Extent, round_up: bool) -> Extent:
        """Half of it, rounded."""
        return self._compute(operator.floordiv, self.add(extent, int(round_up)), 2)

    def divide_up(self, extent: Extent, by: int) -> Extent:
        """Quotient, rounded up."""
        return self._compute(operator.floordiv, self.add(extent, by - 1), by)

    def _compute(self, function: Any, left: Extent, right: Extent) -> Extent:
        if isinstance(left, int) and isinstance(right, int):
            return function(left, right)
        key = (function, left, right)
        if key not in self._computed:
            node = self.graph.call_function(function, (left, right))
            values = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in (left, right)]
            if None not in values:
                node.meta["val"] = function(*values)
            self._computed[key] = node
        return self._computed[key]
