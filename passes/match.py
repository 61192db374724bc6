"""Find the MoE layers of a graph by their structure.

What makes a MoE layer, whatever its model class: rows of tokens are multiplied by *expert-stacked*
weights ``[experts, ., .]`` that top-k ids select per row, something row-wise happens in between,
and the results are summed over the choices of each token with the top-k weights.

    hidden [T, h] ─ rows per choice ─▶ product ─▶ row-wise ─▶ product ─▶ × weight ─▶ sum over k
    ids    [T, k] ─────────────────────┘ selects the expert of each row

Two spellings are known (:mod:`afd_graph.passes.match_products`): grouped products over rows
sorted by expert, and batched products with gathered weights.

Before: a normalised functional ATen graph. After: unchanged.

1. collect the expert products and group them by what selects their experts (one group a layer);
2. check the structure around each group; the first thing that does not fit is a
   :class:`NoMatch` with the reason and the nodes;
3. name the layer by its module path when the graph has one. Names label, they never decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from afd_graph.passes.flow_rules import FlowContext, Refusal, is_tensor, rule_for
from afd_graph.passes.graph_tools import (
    between,
    input_node,
    module_path,
    source_line,
)
from afd_graph.passes.match_order import GATHERS, RESHAPES, OutOfOrder, check_order
from afd_graph.passes.match_products import ExpertProduct, expert_products
from afd_graph.passes.sizes import shape_of
from afd_graph.passes.token_layout import Axis, Layout, TokenDim

aten = torch.ops.aten


@dataclass(frozen=True)
class SharedExperts:
    """The dense part that every token takes, added to the routed result.

    Attributes:
        hidden: its input, ``[..., hidden]``.
        output: its result.
        joined: the addition of routed and shared result.
        width: inner width, the sum over the fused shared experts.
    """

    hidden: fx.Node
    output: fx.Node
    joined: fx.Node
    width: int


@dataclass(frozen=True)
class Match:
    """One MoE layer.

    Attributes:
        index: position among the MoE layers of the graph, in order of execution.
        name: module path, when known.
        hidden: rows that enter the experts, ``[T, hidden]``.
        topk_ids: chosen experts, integer ``[T, k]``.
        topk_weights: their weights, ``[T, k]``.
        output: weighted sum, ``[T, hidden]``.
        products: expert products in order.
        rows: rows per choice, input of the first product, ``[T*k, hidden]``.
        result: output of the last product, ``[T*k, hidden]``.
        num_experts: number of routed experts.
        top_k: choices per token.
        width: inner width of one expert.
        shared: shared experts, if any.
    """

    index: int
    name: str | None
    hidden: fx.Node
    topk_ids: fx.Node
    topk_weights: fx.Node
    output: fx.Node
    products: Sequence[ExpertProduct]
    rows: fx.Node
    result: fx.Node
    num_experts: int
    top_k: int
    width: int
    shared: SharedExperts | None = None

    @property
    def shared_experts(self) -> int:
        """Number of shared experts, counted in widths of a routed expert."""
        if self.shared is None:
            return 0
        return max(1, round(self.shared.width / self.width))


@dataclass(frozen=True)
class NoMatch:
    """Expert products that are not a MoE layer we know, and why."""

    reason: str
    nodes: Sequence[fx.Node]

    def __str__(self) -> str:
        where = source_line(self.nodes[0])
        names = ", ".join(node.name for node in self.nodes[:4])
        return f"{self.reason} [{names}]" + (f" (at {where})" if where else "")


class _DoesNotFit(Exception):
    def __init__(self, reason: str, *nodes: fx.Node) -> None:
        super().__init__(reason)
        self.reason = reason
        self.nodes = nodes


def match_moe_layers(graph: fx.Graph) -> tuple[list[Match], list[NoMatch]]:
    """Return the MoE layers in order of execution, and the candidates that did not fit."""
    groups: dict[fx.Node, list[ExpertProduct]] = {}
    for product in expert_products(graph):
        groups.setdefault(product.selector, []).append(product)
    matches: list[Match] = []
    failures: list[NoMatch] = []
    for products in groups.values():
        try:
            matches.append(_match(len(matches), products))
        except _DoesNotFit as misfit:
            nodes = misfit.nodes or tuple(product.output for product in products)
            failures.append(NoMatch(misfit.reason, nodes))
    return matches, failures


def _match(index: int, products: list[ExpertProduct]) -> Match:
    first, last = products[0], products[-1]
    ids = _routed_ids(first)
    top_k = _static(ids, 1)
    hidden = _rows_source(first.rows, ids, top_k)
    _check_row_wise(first.rows, last.output, products)
    output, weights = _weighted_sum(last.output, ids, top_k)
    try:
        check_order(first, hidden, ids, weights, last.output, output)
    except OutOfOrder as wrong:
        raise _DoesNotFit(wrong.reason, wrong.node) from wrong
    num_experts = int(first.weight.meta["val"].shape[0])
    shared = _shared_experts(hidden, output)
    name = module_path(last.output)
    if name is not None and name.endswith(".experts"):
        name = name.removesuffix(".experts")
    return Match(
        index=index,
        name=name,
        hidden=hidden,
        topk_ids=ids,
        topk_weights=weights,
        output=output,
        products=tuple(products),
        rows=first.rows,
        result=last.output,
        num_experts=num_experts,
        top_k=top_k,
        width=int(last.rows.meta["val"].shape[-1]),
        shared=shared,
    )


def _static(node: fx.Node, dim: int) -> int:
    size = shape_of(node.meta["val"])[dim].static
    if size is None:
        raise _DoesNotFit(f"dimension {dim} is not static", node)
    return size


def _through(node: fx.Node, *also: object) -> fx.Node:
    """Walk up through reshapes."""
    while node.op == "call_function" and (node.target in RESHAPES or node.target in also):
        node = input_node(node, 0)
    return node


def _routed_ids(product: ExpertProduct) -> fx.Node:
    """The ``[T, k]`` ids that decide the expert of each row."""
    node = product.ids
    while True:
        value = node.meta["val"]
        if value.dim() == 2 and not value.is_floating_point():
            return node
        if node.op != "call_function" or node.target not in RESHAPES | {aten._to_copy.default}:
            raise _DoesNotFit("the expert of each row does not come from [tokens, k] ids", node)
        node = input_node(node, 0)


def _rows_source(rows: fx.Node, ids: fx.Node, top_k: int) -> fx.Node:
    """The ``[T, hidden]`` rows that were repeated (and sorted) per choice."""
    tokens = shape_of(ids.meta["val"])[0]
    repeated = rows.target is aten.repeat_interleave.self_int and rows.args[1:3] == (top_k, 0)
    if repeated or rows.target in (aten.index.Tensor, aten.index_select.default):
        source = rows.args[0]
    else:
        source = _through(rows)
        # What the repetition started from is its last two-dimensional form.
        node: fx.Node = rows
        while node is not source:
            node = input_node(node, 0)
            if node.meta["val"].dim() == 2 and shape_of(node.meta["val"])[0] == tokens:
                source = node
                break
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    if value.dim() != 2 or shape_of(value)[0] != tokens:
        raise _DoesNotFit("the rows of the experts do not come from one row per token", rows)
    return source


def _check_row_wise(rows: fx.Node, result: fx.Node, products: list[ExpertProduct]) -> None:
    """Between first and last product every row must be computed from its own row alone."""
    by_output = {product.output: product for product in products}
    axis = Axis(shape_of(rows.meta["val"])[0])
    layouts: dict[fx.Node, Layout | tuple[Layout, ...]] = {rows: {0: TokenDim(axis)}}
    skipped = {node for product in products for node in product.interior}
    ctx = FlowContext(layouts)
    for node in sorted(between(rows, result)):
        if node is rows or node in skipped:
            continue
        if node in by_output:
            layouts[node] = {0: TokenDim(axis)}
            continue
        rule = rule_for(node.target)
        if rule is None:
            raise _DoesNotFit(f"{node.target} between the expert products has no rule", node)
        try:
            layouts[node] = rule(ctx, node).layout
        except Refusal as refusal:
            raise _DoesNotFit(f"not row-wise between the expert products: {refusal}", node) from (
                refusal
            )


def _weighted_sum(result: fx.Node, ids: fx.Node, top_k: int) -> tuple[fx.Node, fx.Node]:
    """Follow the result down to the sum over choices; returns sum and ``[T, k]`` weights."""
    tokens, hidden = shape_of(ids.meta["val"])[0], shape_of(result.meta["val"])[-1]
    weights: fx.Node | None = None
    node = result
    while True:
        following = [user for user in node.users if user.op == "call_function"]
        if len(following) != 1:
            raise _DoesNotFit("the expert result is used by more than the weighted sum", node)
        user = following[0]
        if user.target is aten.mul.Tensor:
            other = user.args[1] if user.args[0] is node else user.args[0]
            if weights is not None or not isinstance(other, fx.Node):
                raise _DoesNotFit("the expert result is scaled by something else", user)
            weights = _weights_source(other, ids)
        elif user.target is aten.sum.dim_IntList:
            shape = shape_of(node.meta["val"])
            if len(shape) != 3 or user.args[1] not in ([1], [-2]) or shape[0] != tokens:
                raise _DoesNotFit("the expert results are not summed per token", user)
            if weights is None:
                raise _DoesNotFit("the expert results are summed without weights", user)
            return _cast_of(user), weights
        elif user.target not in (
            aten._to_copy.default,
            *GATHERS,
            *RESHAPES,
        ):
            raise _DoesNotFit(f"{user.target} after the expert products is not known", user)
        if shape_of(user.meta["val"])[-1] != hidden:
            raise _DoesNotFit("the expert result changes its width", user)
        node = user


def _cast_of(node: fx.Node) -> fx.Node:
    """The cast back to the model's dtype, when that is all that uses the sum."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is aten._to_copy.default:
        return users[0]
    return node


def _weights_source(node: fx.Node, ids: fx.Node) -> fx.Node:
    shape = shape_of(ids.meta["val"])
    current, found = node, None
    while True:
        # The uppermost fit: with one choice per token, sorted weights have the same shape.
        if shape_of(current.meta["val"]) == shape:
            found = current
        if current.op != "call_function" or current.target not in (
            aten._to_copy.default,
            *GATHERS,
            *RESHAPES,
        ):
            break
        current = input_node(current, 0)
    if found is None:
        raise _DoesNotFit("the weights of the sum do not come from [tokens, k] weights", node)
    return found


_DENSE_PRODUCTS = {
    aten.mm.default: 0,
    aten.addmm.default: 1,
    aten.linear.default: 0,
    aten.matmul.default: 0,
}
"""Products of the shared experts, and which argument holds their rows."""


def _shared_experts(hidden: fx.Node, output: fx.Node) -> SharedExperts | None:
    """Find ``output + dense(hidden)``: the shared experts, if there are any."""
    top = _through(hidden)
    below = _only_reshapes_below(output)
    for add in (user for node in below for user in node.users):
        if add.target is not aten.add.Tensor:
            continue
        left, right = add.args[:2]
        other = right if left in below else left
        if not is_tensor(other) or other in below:
            continue
        assert isinstance(other, fx.Node)
        inside = between(top, other)
        if top not in inside or output in inside or other is top:
            continue
        # A gate on the shared experts is a product too, but not one that gives hidden rows.
        hidden_size = top.meta["val"].shape[-1]
        products = [
            n
            for n in inside
            if n.target in _DENSE_PRODUCTS and n.meta["val"].shape[-1] == hidden_size
        ]
        if not products:
            continue
        last = max(products, key=list(hidden.graph.nodes).index)
        rows = input_node(last, _DENSE_PRODUCTS[last.target])  # type: ignore[index]
        width = int(rows.meta["val"].shape[-1])
        return SharedExperts(top, other, add, width) if width else None
    return None


def _only_reshapes_below(node: fx.Node) -> list[fx.Node]:
    found = [node]
    while len(found[-1].users) == 1 and next(iter(found[-1].users)).target in RESHAPES:
        found.append(next(iter(found[-1].users)))
    return found
