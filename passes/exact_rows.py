"""Exact mode: every kernel of a stage gives a token the bits that it has in the whole step.

Before: :func:`mark_exact` sees the unsplit AFD graph, :func:`use_exact_ops` a graph that was marked
or was made from a marked one by :mod:`split`. After: the same graph with other operators.

1. mark what a stage may compute: what depends on the seed (:func:`choose_seed`), behind the last
   MoE layer down to the first matrix product. The marks are the same for every policy, ``none``
   included, and stay on the copies that a split makes, so both variants change alike;
2. an operator that has an exact one (:mod:`afd_graph.exact_ops`) is replaced by it, attention by
   ``afd::exact_attention``, which is told how many keys later stages add.

Data movement needs nothing, nor does arithmetic that is rounded once, element by element, once it
was tried. Every other operator is refused by name: what an operator without a rule does with the
number of rows is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

import afd_graph.exact_attention  # noqa: F401  (registers afd::exact_attention)
from afd_graph._compat import OpOverload
from afd_graph.errors import ExactError
from afd_graph.exact import check_elementwise
from afd_graph.exact_ops import EXACT
from afd_graph.passes.graph_tools import descendants, source_line
from afd_graph.passes.token_flow import (
    ATTENTION,
    DISPATCH,
    MATRIX_PRODUCTS,
    RECEIVE,
    choose_seed,
)

aten = torch.ops.aten
EXACT_ATTENTION = torch.ops.afd.exact_attention.default

MARK = "afd_exact"
LATER_KEYS = "afd_later_keys"
"""Set by :mod:`split` on the attention of a stage: how many keys later stages add."""

_ROUNDED_ONCE = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
    }
)
_MOVES = frozenset(
    {
        operator.getitem,
        DISPATCH,
        RECEIVE,
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.abs.default,
        aten.add.Scalar,
        aten.alias.default,
        aten.all.dim,
        aten.amax.default,
        aten.amin.default,
        aten.any.dim,
        aten.argmax.default,
        aten.argmin.default,
        aten.argsort.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_not.default,
        aten.bitwise_or.Tensor,
        aten.cat.default,
        aten.chunk.default,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.contiguous.default,
        aten.copy.default,
        aten.copy_.default,
        aten.detach.default,
        aten.embedding.default,
        aten.empty_like.default,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.expand.default,
        aten.full_like.default,
        aten.gather.default,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.index.Tensor,
        aten.index_copy.default,
        aten.index_select.default,
        aten.le.Scalar,
        aten.le.Tensor,
        aten.lift_fresh_copy.default,
        aten.logical_and.default,
        aten.logical_not.default,
        aten.logical_or.default,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.max.dim,
        aten.maximum.default,
        aten.min.dim,
        aten.minimum.default,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.neg.default,
        aten.new_zeros.default,
        aten.ones_like.default,
        aten.permute.default,
        aten.relu.default,
        aten.reshape.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.select.int,
        aten.select_scatter.default,
        aten.slice.Tensor,
        aten.slice_scatter.default,
        aten.sort.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.stack.default,
        aten.t.default,
        aten.topk.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view_as_complex.default,
        aten.view_as_real.default,
        aten.where.self,
        aten.zeros_like.default,
    }
)


def mark_exact(graph: fx.Graph, parameters: Collection[fx.Node] = ()) -> int:
    """Mark what must become exact; returns how many nodes.

    Args:
        graph: the unsplit AFD graph.
        parameters: graph inputs that are weights.

    Raises:
        ExactError: an operator is not known to treat rows alike, or does not on this machine.
    """
    marked = 0
    for node in _staged_candidates(graph, parameters):
        if _has_exact(node) or node.target is ATTENTION:
            node.meta[MARK] = True
            marked += 1
        else:
            _check(node)
    return marked


def _staged_candidates(graph: fx.Graph, parameters: Collection[fx.Node]) -> list[fx.Node]:
    """Nodes that have a copy per stage under some policy, and perhaps a few more."""
    last = [node for node in graph.nodes if node.target is RECEIVE][-1]
    behind = descendants([last])
    whole = descendants(node for node in behind if node.target in MATRIX_PRODUCTS)
    seed = choose_seed(graph, parameters)
    candidates = descendants([seed]) - whole - {seed}
    return [node for node in graph.nodes if node in candidates and node.op == "call_function"]


def mark_program(graph: fx.Graph) -> int:
    """Make the experts' graph exact; returns the number of edits.

    Raises:
        ExactError: an operator is not known to treat rows alike, or does not on this machine.
    """
    rows = next(node for node in graph.nodes if node.op == "placeholder")
    for node in descendants([rows]):
        if node.op != "call_function":
            continue
        if _has_exact(node):
            node.meta[MARK] = True
        else:
            _check(node)
    return use_exact_ops(graph)


def use_exact_ops(graph: fx.Graph) -> int:
    """Replace what is marked, in place; returns the number of edits."""
    edits = 0
    for node in list(graph.nodes):
        if node.target is ATTENTION and (MARK in node.meta or LATER_KEYS in node.meta):
            node.args = (*node.args, node.meta.pop(LATER_KEYS, 0))
            node.target = EXACT_ATTENTION
        elif MARK in node.meta:
            node.target = EXACT[node.target]
        else:
            continue
        edits += 1
    return edits


def try_kernels(graph: fx.Graph) -> None:
    """Call every exact operator of the unsplit graph once, on one row of zeros.

    That finds the safe counts before the first step.

    Raises:
        ExactError: a kernel has none.
    """
    exact = {*EXACT.values(), EXACT_ATTENTION}
    for node in graph.nodes:
        if node.target in exact:
            args, kwargs = fx.map_arg((node.args, node.kwargs), _one_row)
            node.target(*args, **kwargs)


def _one_row(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 1
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        shape = [1 if isinstance(size, torch.SymInt) else size for size in value.shape]
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
    zeros = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return zeros.zero_()


def _has_exact(node: fx.Node) -> bool:
    if node.target is aten.mul.Tensor:
        return node.meta["val"].is_complex()
    return node.target in EXACT


def _check(node: fx.Node) -> None:
    """Refuse an operator that may treat rows differently."""
    value = node.meta.get("val")
    if node.target in _MOVES or isinstance(value, (int, torch.SymInt)):
        return
    if node.target in _ROUNDED_ONCE and node.kwargs.get("alpha", 1) == 1:
        assert isinstance(node.target, OpOverload)
        assert isinstance(value, torch.Tensor)
        if value.is_floating_point() or value.is_complex():
            check_elementwise(node.target, value.dtype)
        return
    raise ExactError(
        f"exact mode has no rule for {node.target}: whether it gives a row the same bits among "
        "other rows is not known",
        node=node.name,
        source=source_line(node),
        remedy="use exact=False, or give the operator a view in afd_graph.exact_ops",
    )
