"""Prove that rows, weights and results of the experts belong to the choices they are taken for.

Grouped products want their rows sorted by expert, and what is summed must be back in the order of
the choices. Between the two lie gathers through integer tensors. What such a tensor holds is read
from how it is computed; with ``choice = token * k + slot``, position ``p`` of it is

    choice                  p itself
    token                   p // k
    sorted choice           the choice at place p after sorting the choices by expert
    token of sorted choice  its token
    place of choice         the place of choice p in that order (the inverse)

Anything else is not a MoE layer we know: :class:`OutOfOrder` with the reason and the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from afd_graph.passes.flow_rules import FlowContext, Refusal, argument, rule_for
from afd_graph.passes.graph_tools import input_list, input_node
from afd_graph.passes.match_products import ExpertProduct
from afd_graph.passes.sizes import ONE, Size, shape_of
from afd_graph.passes.token_layout import Axis, Layout, TokenDim

aten = torch.ops.aten

CHOICE, TOKEN = "choice", "token"
SORTED, SORTED_TOKEN = "sorted choice", "token of sorted choice"
PLACE = "place of choice"

RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.clone.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.contiguous.default,
        aten.alias.default,
    }
)
GATHERS = frozenset({aten.index.Tensor, aten.index_select.default})
_SORTS = frozenset({aten.sort.default, aten.sort.stable})
_ARGSORTS = frozenset({aten.argsort.default, aten.argsort.stable})
_ARANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})


class OutOfOrder(Exception):
    """A gather around the experts is not the one that a MoE layer has."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


def check_order(
    product: ExpertProduct,
    hidden: fx.Node,
    ids: fx.Node,
    weights: fx.Node,
    result: fx.Node,
    output: fx.Node,
) -> None:
    """Check the gathers of one layer.

    Args:
        product: its first expert product.
        hidden: one row a token.
        ids: chosen experts ``[T, k]``.
        weights: their weights ``[T, k]``.
        result: output of its last product.
        output: the weighted sum.

    Raises:
        OutOfOrder: rows, weights or results are gathered in another order.
    """
    order = _Order(ids)
    space = CHOICE if product.interior else SORTED
    order.check_rows(product.rows, hidden, space)
    order.check_results(result, output, weights, space)


class _Order:
    def __init__(self, ids: fx.Node) -> None:
        self.ids = ids
        self.tokens, self.top_k = shape_of(ids.meta["val"])
        self.axis = Axis(self.tokens)

    # -- what an integer tensor holds ------------------------------------------------------------

    def read(self, node: Any) -> str | None:
        """The word of the module docstring for what ``node`` holds, if it is one of them."""
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return None
        if node.target in RESHAPES or node.target is aten._to_copy.default:
            return self.read(node.args[0])
        if self._sorts(node, self._holds_ids):
            return SORTED
        if self._sorts(node, lambda source: self.read(source) == SORTED):
            return PLACE
        if node.target in _ARANGES:
            return self._read_arange(node)
        if node.target in (aten.floor_divide.default, aten.div.Tensor_mode):
            floors = node.target is not aten.div.Tensor_mode or node.kwargs["rounding_mode"]
            if not floors or node.args[1] != self.top_k.static:
                return None
            return {CHOICE: TOKEN, SORTED: SORTED_TOKEN}.get(self.read(node.args[0]) or "")
        if node.target is aten.repeat_interleave.self_int and node.args[1] == self.top_k.static:
            return TOKEN if self._counts_to(node.args[0], self.tokens) else None
        if node.target is aten.index.Tensor and self._single_index(node) == SORTED:
            return {CHOICE: SORTED, TOKEN: SORTED_TOKEN}.get(self.read(node.args[0]) or "")
        return self._read_write(node)

    def _read_arange(self, node: fx.Node) -> str | None:
        return CHOICE if self._counts_to(node, self.tokens * self.top_k) else None

    def _read_write(self, node: fx.Node) -> str | None:
        if node.target is aten.index_put.default and not argument(node, 3, "accumulate", False):
            at, values = self._single(input_list(node, 1)), node.args[2]
        elif node.target is aten.scatter.src and node.args[1] in (0, -1):
            at, values = node.args[2], node.args[3]
        else:
            return None
        return PLACE if (self.read(at), self.read(values)) == (SORTED, CHOICE) else None

    @staticmethod
    def _counts_to(node: Any, size: Size) -> bool:
        if not isinstance(node, fx.Node) or node.target not in _ARANGES:
            return False
        start = 0 if node.target is aten.arange.default else node.args[0]
        step = argument(node, 2, "step", 1) if node.target is aten.arange.start_step else 1
        return bool(start == 0 and step == 1 and shape_of(node.meta["val"]) == (size,))

    @staticmethod
    def _sorts(node: fx.Node, wanted: Callable[[fx.Node], bool]) -> bool:
        """Whether ``node`` holds the order that sorts a ``wanted`` tensor, ascending."""
        if node.target in _ARGSORTS:
            sort = node
        elif getattr(node.target, "__name__", "") == "getitem" and node.args[1] == 1:
            sort = input_node(node, 0)
            if sort.target not in _SORTS:
                return False
        else:
            return False
        source = input_node(sort, 0)
        descending = sort.kwargs.get("descending", False) or True in sort.args[1:]
        return not descending and source.meta["val"].dim() == 1 and wanted(source)

    def _holds_ids(self, node: fx.Node) -> bool:
        while node is not self.ids:
            if node.target not in RESHAPES and node.target is not aten._to_copy.default:
                return False
            node = input_node(node, 0)
        return True

    def _single_index(self, node: fx.Node) -> str | None:
        """What a gather along dimension 0 gathers."""
        if node.target is aten.index_select.default:
            return self.read(node.args[2]) if node.args[1] == 0 else None
        return self.read(self._single(input_list(node, 1)))

    @staticmethod
    def _single(indices: list[Any]) -> Any:
        return indices[0] if indices and all(i is None for i in indices[1:]) else None

    # -- rows, weights, results ------------------------------------------------------------------

    def check_rows(self, rows: fx.Node, hidden: fx.Node, space: str) -> None:
        """Row ``p`` must be the token of (sorted) choice ``p``."""
        if rows.target in GATHERS:
            wanted = SORTED_TOKEN if space == SORTED else TOKEN
            self._expect(rows, wanted, "the rows of the experts")
        elif space == SORTED or self._layout(rows, hidden) != self._by_choice():
            raise OutOfOrder("the rows of the experts are not in the order of their ids", rows)

    def check_results(self, result: fx.Node, output: fx.Node, weights: fx.Node, space: str) -> None:
        """Follow the results to the sum, where they must be in the order of the choices."""
        node = result
        while node.target is not aten.sum.dim_IntList:
            (user,) = [user for user in node.users if user.op == "call_function"]
            if user.target in GATHERS:
                if space != SORTED:
                    raise OutOfOrder("the expert results are gathered once more", user)
                self._expect(user, PLACE, "the expert results")
                space = CHOICE
            elif user.target is aten.mul.Tensor:
                other = user.args[1] if user.args[0] is node else user.args[0]
                assert isinstance(other, fx.Node)
                self._check_weights(other, weights, space)
            node = user
        if space != CHOICE:
            raise OutOfOrder("the expert results are not brought back to the tokens", output)

    def _check_weights(self, node: fx.Node, weights: fx.Node, space: str) -> None:
        while node is not weights and node.target not in GATHERS:
            if space == CHOICE and self._layout(node, weights) is not None:
                break
            node = input_node(node, 0)
        if node.target in GATHERS and node is not weights:
            if space != SORTED:
                raise OutOfOrder("the weights are gathered once more", node)
            self._expect(node, SORTED, "the weights")
            node, space = input_node(node, 0), CHOICE
        layout = self._layout(node, weights)
        if space != CHOICE or layout is None or 0 not in layout or not layout[0].outer.is_one:
            raise OutOfOrder("the weights are not in the order of the expert results", node)

    def _expect(self, gather: fx.Node, wanted: str, what: str) -> None:
        found = self._single_index(gather)
        if self.top_k.is_one and found in (CHOICE, SORTED):
            # With one choice a token, a choice is its token.
            wanted = {TOKEN: CHOICE, SORTED_TOKEN: SORTED}.get(wanted, wanted)
        if found != wanted:
            raise OutOfOrder(
                f"{what} are not gathered by the {wanted}, but by {found or 'something else'}",
                gather,
            )

    def _by_choice(self) -> Layout:
        return {0: TokenDim(self.axis, ONE, self.top_k)}

    def _layout(self, node: fx.Node, source: fx.Node) -> Layout | None:
        """Where the tokens of ``source`` (dimension 0) lie in ``node``; None if not known."""
        path: list[fx.Node] = []
        while node is not source:
            if node.target is aten.repeat_interleave.self_int and node.args[0] is source:
                return self._by_choice() if node.args[1:] == (self.top_k.static, 0) else None
            if node.target not in RESHAPES and node.target is not aten._to_copy.default:
                return None
            path.append(node)
            node = input_node(node, 0)
        if self.tokens.static in (0, 1):
            return self._by_choice()  # There is one order only.
        layouts: dict[fx.Node, Any] = {source: {0: TokenDim(self.axis)}}
        ctx = FlowContext(layouts)
        try:
            for step in reversed(path):
                rule = rule_for(step.target)
                assert rule is not None
                layouts[step] = rule(ctx, step).layout
        except Refusal:
            return None
        return layouts[path[0] if path else source]
