"""Rewrite complex arithmetic to pairs of real tensors, for compilers without complex kernels.

DeepSeek's rotary embedding multiplies complex numbers: ``polar`` makes the frequencies,
``view_as_complex`` pairs the features, ``view_as_real`` takes them apart again. After this pass
every complex value is two real nodes, and what came out of ``view_as_real`` is equal in value:

    polar(r, a)          r * cos(a), r * sin(a)
    view_as_complex(x)   x[..., 0], x[..., 1]
    (a + bi)(c + di)     ac - bd, ad + bc
    view_as_real(z)      stack of both

1. walk the graph in order; a node that makes or takes a complex value gets two real nodes;
2. erase the complex nodes.

Refuses, by name, complex values that leave the graph and operators without a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from afd_graph.errors import UnsupportedError
from afd_graph.passes.graph_tools import source_line

aten = torch.ops.aten

Pair = tuple[fx.Node, fx.Node]
"""The real and the imaginary part of one complex value."""

_SHAPE_OPERATORS = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
"""Operators that move values of their first argument: applied to each part, as they are."""


def lower_rope(graph: fx.Graph) -> int:
    """Rewrite ``graph`` in place; returns the number of complex values that are gone.

    Raises:
        UnsupportedError: a complex value is returned, or meets an operator without a rule.
    """
    return _Realiser(graph).run()


class _Realiser:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.pairs: dict[fx.Node, Pair] = {}
        self._like: fx.Node | None = None

    def run(self) -> int:
        for node in list(self.graph.nodes):
            self._like = node
            if node.op == "placeholder" and _is_complex_input(node):
                self._split_input(node)
            elif node.op == "call_function":
                with self.graph.inserting_before(node):
                    self._visit(node)
            elif node.op == "output" and any(n in self.pairs for n in node.all_input_nodes):
                raise self._refusal(node, "a complex value leaves the graph")
        for node in reversed(list(self.pairs)):
            if node.op != "placeholder":
                self.graph.erase_node(node)
        return len(self.pairs)

    def _visit(self, node: fx.Node) -> None:
        if node.target is aten.polar.default:
            size, angle = node.args
            self.pairs[node] = (
                self._call(aten.mul.Tensor, size, self._call(aten.cos.default, angle)),
                self._call(aten.mul.Tensor, size, self._call(aten.sin.default, angle)),
            )
        elif node.target is aten.complex.default:
            real, imaginary = node.all_input_nodes
            self.pairs[node] = (real, imaginary)
        elif node.target is aten.view_as_complex.default:
            self.pairs[node] = self._parts(node.args[0])
        elif any(n in self.pairs for n in node.all_input_nodes):
            self._use(node)

    def _use(self, node: fx.Node) -> None:
        if node.target is aten.view_as_real.default:
            pair = self.pairs[node.all_input_nodes[0]]
            node.replace_all_uses_with(self._joined(pair))
            self.graph.erase_node(node)
        elif node.target in _SHAPE_OPERATORS:
            first, *rest = node.args
            if first in self.pairs and not any(n in self.pairs for n in _nodes(rest)):
                self.pairs[node] = self._each(
                    lambda part: self._call(node.target, part, *rest, **node.kwargs),
                    self.pairs[first],  # type: ignore[index]
                )
                return
            raise self._refusal(node, f"{node.target} has no rule for these operands")
        elif node.target is aten.mul.Tensor:
            self.pairs[node] = self._product(*node.args)
        elif node.target in (aten.add.Tensor, aten.sub.Tensor) and all(
            n in self.pairs for n in node.args
        ):
            left, right = (self.pairs[n] for n in node.args)  # type: ignore[index]
            self.pairs[node] = (
                self._call(node.target, left[0], right[0]),
                self._call(node.target, left[1], right[1]),
            )
        else:
            raise self._refusal(node, f"{node.target} of a complex value has no rule")

    def _product(self, left: Any, right: Any) -> Pair:
        if left not in self.pairs:
            left, right = right, left
        a, b = self.pairs[left]
        if right not in self.pairs:  # A real tensor or a number scales both parts.
            return self._each(lambda part: self._call(aten.mul.Tensor, part, right), (a, b))
        c, d = self.pairs[right]
        mul = aten.mul.Tensor
        return (
            self._call(aten.sub.Tensor, self._call(mul, a, c), self._call(mul, b, d)),
            self._call(aten.add.Tensor, self._call(mul, a, d), self._call(mul, b, c)),
        )

    def _split_input(self, node: fx.Node) -> None:
        with self.graph.inserting_after(node):
            parts = self._call(aten.view_as_real.default, node)
        with self.graph.inserting_after(parts):
            imaginary = self._call(aten.select.int, parts, -1, 1)
            real = self._call(aten.select.int, parts, -1, 0)
        self.pairs[node] = (real, imaginary)

    def _parts(self, source: Any) -> Pair:
        return (
            self._call(aten.select.int, source, -1, 0),
            self._call(aten.select.int, source, -1, 1),
        )

    def _joined(self, pair: Pair) -> fx.Node:
        columns = [self._call(aten.unsqueeze.default, part, -1) for part in pair]
        return self._call(aten.cat.default, columns, -1)

    @staticmethod
    def _each(function: Callable[[fx.Node], fx.Node], pair: Pair) -> Pair:
        return function(pair[0]), function(pair[1])

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        assert self._like is not None
        kept = ("nn_module_stack", "stack_trace", "afd_stage")
        node.meta = {k: v for k, v in self._like.meta.items() if k in kept}
        return node

    @staticmethod
    def _refusal(node: fx.Node, what: str) -> UnsupportedError:
        return UnsupportedError(
            what,
            node=node.name,
            source=source_line(node),
            remedy="write the rotary embedding with cos and sin",
        )


def _is_complex_input(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _nodes(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda n: found.append(n))
    return found
