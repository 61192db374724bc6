"""Tensor parallelism at the dispatch boundary: every row is dispatched by one rank of the group.

Under plain tensor parallelism all ranks of a group hold the same rows. Before: an attention
program, split or not. After: around each dispatch

    pad the rows to a multiple of the group's size, take this rank's part
    dispatch ... receive
    gather the parts, drop the padding

Dispatches marked :data:`OWN_ROWS` (:mod:`sequence_parallel`) take this rank's own rows already.
Padding rows carry expert 0 with weight 0: a rank always dispatches at least one row, and every
rank of the group takes part in every gather.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.errors import UnsupportedError
from afd_graph.passes.extents import Extent, Extents
from afd_graph.passes.graph_tools import input_node
from afd_graph.passes.token_flow import DISPATCH, RECEIVE

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


OWN_ROWS = "afd_own_rows"
"""Metadata key of a node that runs on this rank's rows."""


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group of a graph.

    Attributes:
        size: ranks in the group.
        rank: this process's rank in it.
        group: name of the process group, as functional collectives take it.
    """

    size: int
    rank: int
    group: str


def tensor_parallel_group(graph: fx.Graph) -> TensorParallel | None:
    """The group whose sums the graph takes, or None when it takes none.

    Raises:
        UnsupportedError: the graph sums over several groups.
    """
    sums = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    groups = {str(node.args[2]) for node in sums}
    if not groups:
        return None
    if len(groups) > 1:
        raise UnsupportedError(
            f"the graph sums over several process groups: {sorted(groups)}",
            node=sums[0].name,
            remedy="use one tensor-parallel group",
        )
    name = groups.pop()
    size, rank = _compat.process_group(name)
    return TensorParallel(size, rank, name) if size > 1 else None


def shard_dispatch(graph: fx.Graph, group: TensorParallel) -> int:
    """Rewrite ``graph`` in place; returns the number of sharded dispatches."""
    dispatches = [
        node
        for node in graph.find_nodes(op="call_function", target=DISPATCH)
        if not node.meta.get(OWN_ROWS)
    ]
    for dispatch in dispatches:
        (receive,) = (user for user in dispatch.users if user.target is RECEIVE)
        _shard(graph, dispatch, receive, group)
    return len(dispatches)


def _shard(graph: fx.Graph, dispatch: fx.Node, receive: fx.Node, group: TensorParallel) -> None:
    hidden, ids = input_node(dispatch, 0), input_node(dispatch, 1)
    weights = input_node(receive, 2)
    with graph.inserting_before(dispatch):
        extents = Extents(graph)
        rows: Extent = graph.call_function(aten.sym_size.int, (hidden, 0))
        share = extents.divide_up(rows, group.size)
        pad = extents.subtract(extents.multiply(share, group.size), rows)
        begin = extents.multiply(share, group.rank)
        end = extents.add(begin, share)
        local_hidden, local_ids = (_own_rows(graph, n, pad, begin, end) for n in (hidden, ids))
    with graph.inserting_before(receive):
        local_weights = _own_rows(graph, weights, pad, begin, end)
    dispatch.args = (local_hidden, local_ids, *dispatch.args[2:])
    dispatch.kwargs = {"parent_rows": rows}
    receive.args = (dispatch, local_hidden, local_weights, *receive.args[3:])
    receive.kwargs = {"parent_rows": rows}
    with graph.inserting_after(receive):
        gathered = graph.call_function(
            c10d.all_gather_into_tensor.default, (receive, group.size, group.group)
        )
    with graph.inserting_after(gathered):
        waited = graph.call_function(c10d.wait_tensor.default, (gathered,))
    with graph.inserting_after(waited):
        kept = graph.call_function(aten.slice.Tensor, (waited, 0, 0, rows))
    receive.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not gathered)
    value = receive.meta.get("val")
    inserted = [rows, local_hidden, local_ids, local_weights, gathered, waited, kept]
    for node in (n for n in inserted if isinstance(n, fx.Node)):
        kept_meta = ("nn_module_stack", "stack_trace", "afd_stage")
        node.meta = {k: v for k, v in receive.meta.items() if k in kept_meta}
    if value is not None:
        kept.meta["val"] = value


def _own_rows(graph: fx.Graph, node: fx.Node, pad: Extent, begin: Extent, end: Extent) -> fx.Node:
    padded = graph.call_function(aten.constant_pad_nd.default, (node, [0, 0, 0, pad]))
    return graph.call_function(aten.slice.Tensor, (padded, 0, begin, end))
