"""Bring the captured graph into the few forms that the later passes know.

Before: a functional ATen graph. After: the same values, and

1. a size-only constructor (``new_empty(x, size)``) no longer depends on ``x``;
2. a slice of everything is gone;
3. ``cat`` has no legacy-empty pieces (shape ``[0]``), and a ``cat`` of one piece is that piece;
4. a tensor that is written piece by piece into an empty one is a ``cat`` of the pieces;
5. the size of a computed tensor, and where a view begins, is an expression over the sizes of the
   inputs;
6. a change of dtype is ``_to_copy``: the operator of ``prims``, which Dynamo uses for numbers that
   it passes as tensors, runs in Python and costs 0.1 ms a call; torch_npu has one of its own.

Returns the number of edits. Refuses nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from afd_graph.passes.extents import Extents
from afd_graph.passes.flow_rules import argument
from afd_graph.passes.graph_tools import input_list, input_node
from afd_graph.passes.sizes import shape_of, size_of

aten = torch.ops.aten
_END = torch.iinfo(torch.int64).max
_SLICE = ("start", "end", "step")

_CONSTRUCTORS = {
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}

_CASTS = frozenset(
    {
        "prims.convert_element_type.default",
        "npu._npu_dtype_cast.default",
        "npu.npu_dtype_cast.default",
    }
)
"""By name: those of torch_npu exist only where it is."""


def normalize(graph: fx.Graph) -> int:
    """Run the rewrites in place; returns the number of edits."""
    edits = 0
    extents = Extents(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            if node.op == "placeholder":
                extents.learn(node)
            continue
        replacement: fx.Node | int | None = None
        if node.target in (aten.sym_size.int, aten.sym_storage_offset.default):
            replacement = _size_of_inputs(graph, node, extents)
        elif node.target in _CONSTRUCTORS:
            replacement = _without_source(graph, node)
        elif node.target is aten.slice.Tensor:
            replacement = _whole_slice(node)
        elif node.target is aten.cat.default:
            replacement = _without_empty_pieces(graph, node)
        elif str(node.target) in _CASTS:
            replacement = _as_copy(graph, node)
        elif node.target is aten.slice_scatter.default:
            replacement = _pieces_to_cat(graph, node)
        if replacement is not None:
            _replace(node, replacement)
            graph.erase_node(node)
            edits += 1
    graph.eliminate_dead_code()
    return edits


def _replace(node: fx.Node, replacement: fx.Node | int) -> None:
    if isinstance(replacement, fx.Node):
        node.replace_all_uses_with(replacement)
        return
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: replacement if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: replacement if n is node else n)


def _size_of_inputs(graph: fx.Graph, node: fx.Node, extents: Extents) -> fx.Node | int | None:
    source = input_node(node, 0)
    if source.op == "placeholder":
        return None
    with graph.inserting_before(node):
        return extents.of(size_of(node.meta["val"]))


def _without_source(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    with graph.inserting_before(node):
        new = graph.call_function(
            _CONSTRUCTORS[node.target],  # type: ignore[index]
            tuple(node.args[1:]),
            {"dtype": value.dtype, "device": value.device},
        )
    new.meta = dict(node.meta)
    return new


def _whole_slice(node: fx.Node) -> fx.Node | None:
    source = input_node(node, 0)
    start, end, step = (argument(node, 2 + i, name) for i, name in enumerate(_SLICE))
    if start in (0, None) and step in (1, None) and end in (_END, None):
        return source
    return None


def _as_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_before(node):
        new = graph.call_function(
            aten._to_copy.default, (input_node(node, 0),), {"dtype": node.meta["val"].dtype}
        )
    new.meta = dict(node.meta)
    return new


def _without_empty_pieces(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    pieces = input_list(node, 0)
    kept = [piece for piece in pieces if tuple(piece.meta["val"].shape) != (0,)]
    if len(kept) == 1 and kept[0].meta["val"].dtype == node.meta["val"].dtype:
        return kept[0]
    if not kept or len(kept) == len(pieces):
        return None
    with graph.inserting_before(node):
        new = graph.call_function(aten.cat.default, (kept, *node.args[1:]))
    new.meta = dict(node.meta)
    return new


def _pieces_to_cat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Rewrite ``slice_scatter(slice_scatter(empty, a, d, 0, n), b, d, n, end)`` to a ``cat``."""
    pieces: list[fx.Node] = []
    along = _scatter_range(node)[0]
    whole = shape_of(node.meta["val"])
    end: Any = None
    current: Any = node
    while current.target is aten.slice_scatter.default:
        dim, start, stop = _scatter_range(current)
        last = stop == _END or size_of(stop) == whole[dim]
        if dim != along or start is None or (end is None and not last):
            return None
        if end is not None and (not isinstance(stop, int) or stop != end):
            return None
        if current is not node and len(current.users) > 2:
            return None
        pieces.insert(0, current.args[1])
        end, current = start, current.args[0]
        if not isinstance(start, int):
            return None
    if end != 0 or current.target is not aten.empty.memory_format:
        return None
    with graph.inserting_before(node):
        sources = [_copied(graph, piece) for piece in pieces]
        new = graph.call_function(aten.cat.default, (sources, along))
    new.meta = dict(node.meta)
    return new


def _scatter_range(node: fx.Node) -> tuple[int, Any, Any]:
    dim = argument(node, 2, "dim", 0)
    start, stop, step = (argument(node, 3 + i, name) for i, name in enumerate(_SLICE))
    rank = node.meta["val"].dim()
    if not isinstance(dim, int) or step not in (1, None):
        return -1, None, None
    return dim % rank, start or 0, _END if stop is None else stop


def _copied(graph: fx.Graph, piece: fx.Node) -> fx.Node:
    """The source of ``copy(slice of the target, source)``, expanded and cast as copy does."""
    if piece.target is not aten.copy.default:
        return piece
    source = input_node(piece, 1)
    value, target = source.meta["val"], piece.meta["val"]
    if value.dtype != target.dtype:
        source = graph.call_function(aten._to_copy.default, (source,), {"dtype": target.dtype})
        source.meta = {**piece.meta, "val": value.to(target.dtype)}
    if shape_of(value) != shape_of(target):
        return piece
    return source
