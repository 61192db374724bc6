"""The two spellings of an expert product, reduced to one description."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from afd_graph.passes.flow_rules import is_tensor
from afd_graph.passes.graph_tools import input_node

aten = torch.ops.aten

_GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})


@dataclass(frozen=True)
class ExpertProduct:
    """``output[i] = rows[i] @ weight[expert of row i]``.

    Attributes:
        output: ``[m, n]``.
        rows: ``[m, k]``.
        weight: expert-stacked weight; ``[experts, k, n]``, or ``[experts, n, k]`` if
            ``transposed``.
        transposed: whether the last two dimensions of ``weight`` are exchanged.
        selector: the node that all products of one layer share.
        ids: the integer node that decides the expert of each row, possibly reshaped.
        interior: nodes that belong to the spelling, between ``rows`` and ``output``.
    """

    output: fx.Node
    rows: fx.Node
    weight: fx.Node
    transposed: bool
    selector: fx.Node
    ids: fx.Node
    interior: Sequence[fx.Node] = ()


def expert_products(graph: fx.Graph) -> Iterator[ExpertProduct]:
    """All expert products, in graph order."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        product = None
        if node.target._schema.name in _GROUPED:
            product = _grouped(node)
        elif node.target is aten.bmm.default:
            product = _batched(node)
        if product is not None:
            yield product


def _grouped(node: fx.Node) -> ExpertProduct | None:
    """``grouped_mm(rows, weight, offsets)``, rows sorted by expert."""
    if len(node.args) < 3:
        return None
    rows, weight, offsets = node.args[:3]
    if not (is_tensor(rows) and is_tensor(weight) and is_tensor(offsets)):
        return None
    assert isinstance(rows, fx.Node)
    assert isinstance(weight, fx.Node)
    assert isinstance(offsets, fx.Node)
    if rows.meta["val"].dim() != 2 or weight.meta["val"].dim() != 3:
        return None
    ids = _sorted_ids(offsets)
    return None if ids is None else ExpertProduct(node, rows, weight, False, offsets, ids)


def _sorted_ids(offsets: fx.Node) -> fx.Node | None:
    """Walk up from ``cumsum(histc(ids))`` to the ids, sorted or not."""
    node = offsets
    counting = (
        aten.cumsum.default,
        aten.histc.default,
        aten.bincount.default,
        aten._to_copy.default,
    )
    while node.op == "call_function" and node.target in counting:
        node = input_node(node, 0)
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        source = input_node(node, 0)
        if source.target is aten.sort.default:
            return input_node(source, 0)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and node is not offsets:
        return node
    return None


def _batched(node: fx.Node) -> ExpertProduct | None:
    """``bmm(weight[ids], rows[:, :, None])[:, :, 0]`` or ``bmm(rows[:, None], weight[ids])``."""
    for at, transposed in ((0, True), (1, False)):
        gathered, vector = node.args[at], node.args[1 - at]
        assert isinstance(gathered, fx.Node)
        assert isinstance(vector, fx.Node)
        if gathered.target is not aten.index.Tensor or vector.target is not aten.unsqueeze.default:
            continue
        weight, indices = gathered.args
        assert isinstance(weight, fx.Node)
        assert isinstance(indices, (list, tuple))
        rows = input_node(vector, 0)
        squeezed = [user for user in node.users if user.target is aten.squeeze.dim]
        if len(indices) != 1 or len(squeezed) != 1 or len(node.users) != 1:
            continue
        if weight.meta["val"].dim() != 3 or rows.meta["val"].dim() != 2:
            continue
        ids = indices[0]
        assert isinstance(ids, fx.Node)
        return ExpertProduct(squeezed[0], rows, weight, transposed, ids, ids, (vector, node))
    return None
