"""Sequence parallelism: between the sums of tensor parallelism, each rank keeps its own rows.

Plain tensor parallelism holds the residual stream on every rank. With sequence parallelism the
sum that ends attention is scattered over the rows, everything row-wise that follows (residual,
norms, gate, experts) runs on this rank's rows, and the rows are gathered where a product with a
sharded weight needs all of them. Nothing of this is in the captured graph: it follows from where
its sums are.

Rows of a stage are padded with zeros to a multiple of the group's size before they are scattered,
and the padding is dropped after they are gathered, so attention sees real tokens only.

:func:`row_local_nodes` says which staged nodes run on local rows; :mod:`split` emits them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from afd_graph.passes.token_flow import ATTENTION, MATRIX_PRODUCTS, TokenFlow

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

SUM = c10d.all_reduce.default
WAIT = c10d.wait_tensor.default


def row_local_nodes(
    graph: fx.Graph, flow: TokenFlow, replicated: Collection[fx.Node]
) -> set[fx.Node]:
    """Staged nodes that run on this rank's rows.

    A sum starts local rows; what is computed from them stays local, as long as it is the same on
    every rank. What comes from a product with a sharded weight is one rank's share of something
    else (heads, inner width): it needs all rows until the next sum makes it whole.

    Args:
        graph: the unsplit AFD graph of a tensor-parallel model.
        flow: its token flow.
        replicated: graph inputs that are whole weights, the same on every rank.
    """
    constant = _from_inputs(graph, replicated)
    local: set[fx.Node] = set()
    share: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in flow.layouts or node is flow.seed:
            continue
        if node.target is SUM:
            local.add(node)
            continue
        sources = node.all_input_nodes
        if any(source in share for source in sources) or (
            node.target in MATRIX_PRODUCTS and not _keeps_rows(node, flow, constant)
        ):
            share.add(node)
            continue
        cached = node in flow.appends or node in flow.windows or node.target is ATTENTION
        if not cached and any(source in local for source in sources):
            local.add(node)
    return local


def _keeps_rows(node: fx.Node, flow: TokenFlow, constant: set[fx.Node]) -> bool:
    """Whether all weights of a product are the same on every rank."""
    return all(n in constant for n in node.all_input_nodes if n not in flow.layouts)


def _from_inputs(graph: fx.Graph, inputs: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from ``inputs`` alone."""
    found = set(inputs)
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(n in found for n in sources):
            found.add(node)
    return found
