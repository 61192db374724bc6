"""Make a graph fit to be cut into pieces that a compiler gets one by one.

vLLM cuts at its splitting operators and hands what lies between to its compiler, with the values
that cross as inputs. A compiler cannot take a piece that writes one input of which another is a
view. So views do not cross: each piece makes those that it uses.

Before: a graph whose nodes have an ``example_value``. After, in each piece to be compiled:

1. a view of a value of an earlier piece is made again, before its first use;
2. in place of the result of a write in place stands the value that was written;
3. slices of tensors are method calls, because vLLM puts every ``operator.getitem`` into the piece
   of its source;
4. an empty buffer is allocated before its first use, and does not live from piece to piece;
5. the numbers of a ``torch.Size`` stand where it was used, since a piece cannot answer one.

A view reads nothing, so it does not matter when it is made. Splitting operators are not compiled
and may be given views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from afd_graph.errors import UnsupportedError
from afd_graph.vllm.in_place import effects

_ALLOCATIONS = (torch.empty, torch.empty_like)


def keep_views_inside(graph: fx.Graph, splits: Callable[[fx.Node], bool]) -> int:
    """Rewrite ``graph`` in place; returns how many views were made again.

    Args:
        graph: in the order in which it will run.
        splits: whether a node is a splitting operator.

    Raises:
        UnsupportedError: a value shares memory with another in a way that is not known.
    """
    _slice_by_method(graph)
    _write_out_sizes(graph)
    _allocate_late(graph, splits)
    rewrite = _Rewrite(graph, _pieces(graph, splits))
    for node in list(graph.nodes):
        if node.op not in ("placeholder", "get_attr", "output") and not splits(node):
            rewrite.inputs_of(node)
    for view in reversed(dict.fromkeys(source for source, _ in rewrite.made)):
        if not view.users:
            graph.erase_node(view)
    return len(rewrite.made)


class _Rewrite:
    def __init__(self, graph: fx.Graph, pieces: dict[fx.Node, int]) -> None:
        self.graph = graph
        self.pieces = pieces
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}

    def inputs_of(self, node: fx.Node) -> None:
        piece = self.pieces[node]

        def here(source: fx.Node) -> fx.Node:
            return self._in(piece, source, node)

        node.args = fx.map_arg(node.args, here)
        node.kwargs = fx.map_arg(node.kwargs, here)

    def _in(self, piece: int, source: fx.Node, user: fx.Node) -> fx.Node:
        """What ``user`` takes for ``source``."""
        if self.pieces.get(source, piece) == piece or not _shares_memory(source):
            return source
        if (source, piece) not in self.made:
            written, _ = effects(source)
            if written:
                return self._in(piece, _same_value(source, written), user)
            with self.graph.inserting_before(user):
                # The views that this one is of are put before it.
                copy = self.graph.node_copy(source, lambda of: self._in(piece, of, user))
            self.pieces[copy] = piece
            self.made[source, piece] = copy
        return self.made[source, piece]


def _slice_by_method(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        source = node.args[0]
        if not isinstance(source.meta.get("example_value"), torch.Tensor):
            continue
        with graph.inserting_before(node):
            method = graph.call_method("__getitem__", node.args)
        method.meta = node.meta
        node.replace_all_uses_with(method)
        graph.erase_node(node)


def _write_out_sizes(graph: fx.Graph) -> None:
    for size in graph.find_nodes(op="call_function", target=torch.Size):
        numbers = size.args[0]

        def written_out(argument: Any, size: fx.Node = size, numbers: Any = numbers) -> Any:
            return numbers if argument is size else argument

        for user in list(size.users):
            user.args = map_aggregate(user.args, written_out)
            user.kwargs = map_aggregate(user.kwargs, written_out)
        graph.erase_node(size)


def _allocate_late(graph: fx.Graph, splits: Callable[[fx.Node], bool]) -> None:
    position = {node: number for number, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in _ALLOCATIONS and node.users:
            first = min(node.users, key=position.__getitem__)
            if not splits(first):  # It may follow another one, with no piece between.
                first.prepend(node)


def _pieces(graph: fx.Graph, splits: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """The number of the piece that each node falls into; graph inputs are in none."""
    pieces: dict[fx.Node, int] = {}
    piece, in_split = 0, False
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in pieces:
            pieces[node] = pieces[node.args[0]]
            continue
        if splits(node) != in_split:
            piece, in_split = piece + 1, not in_split
        pieces[node] = piece
    return pieces


def _shares_memory(node: fx.Node) -> bool:
    """Whether a value has memory of one of the inputs that it was made from."""
    mine = _memory(node.meta.get("example_value"))
    return any(mine & _memory(of.meta.get("example_value")) for of in node.all_input_nodes)


def _memory(value: Any) -> set[int]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}


def _same_value(node: fx.Node, written: list[fx.Node]) -> fx.Node:
    """What ``node`` wrote and returned."""
    value = node.meta["example_value"]
    for source in written:
        other = source.meta["example_value"]
        if other is value or (
            isinstance(value, torch.Tensor)
            and _memory(other) == _memory(value)
            and (other.shape, other.stride(), other.storage_offset(), other.dtype)
            == (value.shape, value.stride(), value.storage_offset(), value.dtype)
        ):
            return source
    raise UnsupportedError(
        "a value shares memory with what its operator wrote, and is not the same",
        node=node.name,
        remedy='report the model; \'"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"\' runs it',
    )
