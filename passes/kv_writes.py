"""Let attention write its KV cache in place again, in an order that the data flow shows.

AOTAutograd makes the graph functional: an operator that mutates a cache becomes one that returns a
new cache, and the last of those is copied to the input behind the step. Run as it is, that copies
the whole cache once a layer. Before: a functional graph with such calls. After: for every cache
input that nothing else uses,

    out = paged_attention(..., cache, ..., after)

where ``cache`` is the input itself, or a view of it, and ``after`` is the result of the previous
call that may touch the same entries. The caller sees the mutation, as the copy at the end would
have shown it; the order of two calls is a data edge, which no later pass or compiler may drop.

1. from each copy to an input, walk up the chain of calls that led to its value;
2. check that nothing but the chain reads the values in it (their sizes may be asked for);
3. put the operator in place of each call, from the first to the last.

A cache that something else reads or writes stays functional: the unsplit program is right as it
is, and :mod:`token_flow` refuses the split by name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.paged_attention import PAGED_OPERATORS

aten = torch.ops.aten

_SIZES = frozenset({aten.sym_size.int, aten.sym_stride.int, aten.sym_storage_offset.default})
_VIEWS = frozenset({aten.select.int, aten.slice.Tensor, aten.as_strided.default, aten.view.default})


def write_in_place(graph: fx.Graph) -> int:
    """Rewrite ``graph``; returns the number of calls that write in place."""
    edits = 0
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        cache, value = copy.args[:2]
        calls = _chain(cache, value, copy)
        if calls:
            _rewrite(graph, cache, calls, copy)
            edits += len(calls)
    return edits


def _chain(cache: Any, value: Any, copy: fx.Node) -> list[fx.Node]:
    """The calls from ``cache`` to ``value`` in order; empty when they have to stay functional."""
    if cache.op != "placeholder" or copy.users:
        return []
    calls: list[fx.Node] = []
    reader = copy
    while value is not cache:
        call = value.args[0] if value.target is operator.getitem else None
        if not isinstance(call, fx.Node) or value.args[1] != 1 or not _is_paged_call(call):
            return []
        if not _only_read_by(value, reader):
            return []
        calls.insert(0, call)
        value = _base(call)
        reader = call
    known = {copy, *calls[:1]}
    if any(user not in known and not _asks_for_size(user) for user in cache.users):
        return []
    return calls


def _is_paged_call(node: fx.Node) -> bool:
    if node.target is not _compat.auto_functionalized or node.args[0] not in PAGED_OPERATORS:
        return False
    return _base(node) is not None


def _base(call: fx.Node) -> fx.Node | None:
    """The one tensor that the call mutates, or a part of it."""
    bases: Any = call.kwargs["_all_bases"]
    return bases[0] if len(bases) == 1 else None


def _only_read_by(value: fx.Node, reader: fx.Node) -> bool:
    return all(user is reader or _asks_for_size(user) for user in value.users)


def _asks_for_size(node: fx.Node) -> bool:
    if node.target in _SIZES:
        return True
    return node.target in _VIEWS and all(_asks_for_size(user) for user in node.users)


def _rewrite(graph: fx.Graph, cache: Any, calls: Sequence[fx.Node], copy: fx.Node) -> None:
    graph.erase_node(copy)
    views: dict[object, fx.Node] = {}
    written: list[tuple[fx.Node, fx.Node]] = []  # (view, call in place), in order
    for call in calls:
        target: Any = call.args[0]
        described = PAGED_OPERATORS[target]
        arguments = target._schema.arguments
        name = arguments[described.cache].name
        with graph.inserting_before(call):
            view = _view(graph, cache, call, name, views)
            args = [
                view if argument.name == name else call.kwargs[argument.name]
                for argument in arguments
            ]
            args[described.after] = _last_overlapping(view, written)
            new = graph.call_function(target, tuple(args))
        result = call.meta["val"][0]
        new.meta = {**call.meta, "val": result}
        written.append((view, new))
        for output in list(call.users):
            output.replace_all_uses_with(new if output.args[1] == 0 else cache)
            graph.erase_node(output)
        graph.erase_node(call)


def _view(
    graph: fx.Graph, cache: fx.Node, call: fx.Node, argument: str, views: dict[object, fx.Node]
) -> fx.Node:
    """The part of ``cache`` that the call mutates; the same node for the same part."""
    found = _compat.mutated_view(call, argument)
    if found is None:
        return cache
    target, args = found
    if (target, args) not in views:
        node = graph.call_function(target, (cache, *args))
        with _compat.fake_mode_of(graph):
            node.meta["val"] = target(cache.meta["val"], *fx.map_arg(args, lambda n: n.meta["val"]))
        views[target, args] = node
    return views[target, args]


def _last_overlapping(view: fx.Node, written: Sequence[tuple[fx.Node, fx.Node]]) -> fx.Node | None:
    """The call that must come before one on ``view``.

    When all earlier views are this one or provably apart from it, that is the last call on it;
    else the last call of all, whose own predecessor is found in the same way.
    """
    if all(other is view or _apart(other, view) for other, _ in written):
        return next((call for other, call in reversed(written) if other is view), None)
    return written[-1][1]


def _apart(left: fx.Node, right: fx.Node) -> bool:
    begin_left, end_left = _extent(left.meta["val"])
    begin_right, end_right = _extent(right.meta["val"])
    known = _compat.statically_true
    return known(end_left <= begin_right) or known(end_right <= begin_left)


def _extent(tensor: torch.Tensor) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """Storage that a view with positive sizes can reach: first element, one behind the last."""
    begin = tensor.storage_offset()
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + reach + 1
