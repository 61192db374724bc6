"""Express in operators that torchair converts what it has no converter for.

1. ``afd.attention`` becomes two matrix products and a softmax in fp32, its causal flag a mask that
   is aligned to the last query and the last key;
2. ``index_copy`` (a static cache at given positions) becomes ``scatter``;
3. ``view`` becomes ``reshape``: the layout that the fused attention promised is gone;
4. complex arithmetic becomes real (:mod:`afd_graph.passes.lower_rope`).

Values stay equal; rows without any key are zero, as the fused kernels make them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from afd_graph.lowering.ascend.emitter import Emitter
from afd_graph.passes.lower_rope import lower_rope
from afd_graph.passes.shapes import propagate_shapes
from afd_graph.passes.token_flow import ATTENTION

aten = torch.ops.aten


def lower_to_plain_ops(graph: fx.Graph) -> int:
    """Rewrite ``graph`` in place; returns the number of edits."""
    propagate_shapes(graph)
    edits = 0
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target)
        if rewrite is not None:
            with graph.inserting_before(node):
                new = rewrite(Emitter(graph, node), *node.args)
            new.meta["val"] = node.meta["val"]  # the next rewrite may ask for it
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            edits += 1
    return edits + lower_rope(graph)


def _attention(
    emit: Emitter,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    mask: fx.Node | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> fx.Node:
    heads, width = (int(query.meta["val"].shape[d]) for d in (1, 3))
    dtype = value.meta["val"].dtype
    if enable_gqa:
        full_key, full_value = (_repeat_heads(emit, x, heads) for x in (key, value))
    else:
        full_key, full_value = key, value
    scores = emit(aten.matmul.default, query, emit(aten.transpose.int, full_key, -1, -2))
    scores = emit(aten._to_copy.default, scores, dtype=torch.float32)
    scores = emit(aten.mul.Tensor, scores, 1 / math.sqrt(width) if scale is None else scale)
    if mask is not None:
        scores = _masked(emit, scores, mask, mask.meta["val"].dtype)
    if causal:
        scores = _masked(emit, scores, _causal(emit, query, key), torch.bool)
    shares = emit(aten._safe_softmax.default, scores, -1)
    shares = emit(aten._to_copy.default, shares, dtype=dtype)
    return emit(aten.matmul.default, shares, full_value)


def _repeat_heads(emit: Emitter, x: fx.Node, heads: int) -> fx.Node:
    shape = x.meta["val"].shape
    groups, width = int(shape[1]), int(shape[3])
    if groups == heads:
        return x
    batch, tokens = emit.size(x, 0), emit.size(x, 2)
    wide = emit(aten.unsqueeze.default, x, 2)
    wide = emit(aten.expand.default, wide, [batch, groups, heads // groups, tokens, width])
    return emit(aten.reshape.default, wide, [batch, heads, tokens, width])


def _masked(emit: Emitter, scores: fx.Node, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
    if dtype is torch.bool:
        hidden = emit(aten.logical_not.default, mask)
        return emit(aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    mask = emit(aten._to_copy.default, mask, dtype=torch.float32)
    return emit(aten.add.Tensor, scores, mask)


def _causal(emit: Emitter, query: fx.Node, key: fx.Node) -> fx.Node:
    queries, keys = emit.size(query, 2), emit.size(key, 2)
    device = query.meta["val"].device
    before: int | fx.Node
    if isinstance(queries, int) and isinstance(keys, int):
        before = keys - queries
    else:
        before = emit(operator.sub, keys, queries)
    rows = emit(aten.arange.default, queries, device=device)
    columns = emit(aten.arange.default, keys, device=device)
    last_visible = emit(aten.add.Tensor, emit(aten.unsqueeze.default, rows, 1), before)
    return emit(aten.le.Tensor, columns, last_visible)


def _index_copy(emit: Emitter, base: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> fx.Node:
    rank = source.meta["val"].dim()
    for axis in range(rank):
        if axis != dim % rank:
            index = emit(aten.unsqueeze.default, index, axis)
    shape = [emit.size(source, axis) for axis in range(rank)]
    index = emit(aten.expand.default, index, shape)
    return emit(aten.scatter.src, base, dim, index, source)


def _view(emit: Emitter, source: fx.Node, shape: Any) -> fx.Node:
    return emit(aten.reshape.default, source, shape)


_REWRITES: dict[Any, Callable[..., fx.Node]] = {
    ATTENTION: _attention,
    aten.index_copy.default: _index_copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
