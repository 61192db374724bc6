"""How each operator carries the token axis from its inputs to its output.

A rule sees one node, at least one input of which is staged, and answers with the layout of the
output and with what its other inputs must become. It never guesses: what would mix tokens, or
what it does not understand, is a :class:`Refusal`. Extend the table with :func:`flow_rule`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from afd_graph.passes.graph_tools import input_list, input_node
from afd_graph.passes.sizes import Size, shape_of, size_of
from afd_graph.passes.token_layout import (
    Layout,
    TokenDim,
    permuted,
    regrouped,
    shifted,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Refusal(Exception):
    """A node cannot be computed stage by stage; ``str()`` says why."""


@dataclass
class Outcome:
    """What a rule answers.

    Attributes:
        layout: layout of the output; a tuple of layouts for an operator with several outputs.
        inputs: for each tensor input that must be sliced, the layout it must have.
        sizes: argument index to ``{position in that size list: token dimension}``.
        replace: argument index to a new value, the same in every stage.
    """

    layout: Layout | tuple[Layout, ...]
    inputs: dict[fx.Node, Layout] = field(default_factory=dict)
    sizes: dict[int, dict[int, TokenDim]] = field(default_factory=dict)
    replace: dict[int, Any] = field(default_factory=dict)


class FlowContext:
    """What rules may ask about the inputs of a node."""

    def __init__(self, layouts: dict[fx.Node, Layout | tuple[Layout, ...]]) -> None:
        self._layouts = layouts

    def layout(self, value: Any) -> Layout:
        """Layout of a tensor argument; empty when it is the same in every stage."""
        if not isinstance(value, fx.Node):
            return {}
        found = self._layouts.get(value, {})
        if isinstance(found, tuple):
            raise Refusal("uses all outputs of an operator at once")
        return found

    def layouts(self, value: fx.Node) -> tuple[Layout, ...]:
        """Layouts of an operator with several outputs."""
        found = self._layouts[value]
        assert isinstance(found, tuple)
        return found


Rule = Callable[[FlowContext, fx.Node], Outcome]
_rules: dict[Any, Rule] = {}


def flow_rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operator overloads."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            _rules[target] = rule
        return rule

    return register


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator; every operator tagged pointwise has one."""
    found = _rules.get(target)
    if found is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise
    return found


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Refusal(f"no tensor metadata on {node.name}")
    return value


def is_tensor(value: Any) -> bool:
    """Whether an argument is a tensor-valued node."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def tensor_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Tensor-valued inputs of a node, each once."""
    return (n for n in node.all_input_nodes if is_tensor(n))


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """A positional-or-keyword argument."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def dimension(value: Any, rank: int) -> int:
    """A dimension argument, made non-negative."""
    if not isinstance(value, int):
        raise Refusal(f"dimension {value!r} is not a constant")
    return value + rank if value < 0 else value


def dimensions(value: Any, rank: int) -> list[int]:
    """A dimension list argument; None or an empty list means all."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return list(range(rank))
    if isinstance(value, int):
        value = [value]
    return [dimension(entry, rank) for entry in value]


def _full_size(entry: TokenDim) -> Size:
    """Unsplit size of a token dimension."""
    return entry.outer * entry.axis.extent * entry.inner


def _aligned(ctx: FlowContext, operands: Sequence[tuple[fx.Node, int]], rank: int) -> Outcome:
    """Broadcast ``(operand, offset of its dimension 0)`` together."""
    merged: dict[int, TokenDim] = {}
    for operand, offset in operands:
        for dim, entry in shifted(ctx.layout(operand), offset).items():
            if merged.setdefault(dim, entry) != entry:
                raise Refusal(f"meets two different token axes in dimension {dim}")
    inputs: dict[fx.Node, Layout] = {}
    for operand, offset in operands:
        shape = shape_of(tensor(operand))
        have = ctx.layout(operand)
        need: dict[int, TokenDim] = {}
        for out_dim, entry in merged.items():
            dim = out_dim - offset
            if 0 <= dim < len(shape) and not shape[dim].is_one:
                if shape[dim] != _full_size(entry):
                    raise Refusal(
                        f"combines a token axis of {_full_size(entry)} with {shape[dim]} "
                        f"entries of {operand.name}"
                    )
                need[dim] = entry
        if have and dict(have) != need:
            raise Refusal(f"combines {operand.name} with a value of all tokens")
        if need:
            inputs[operand] = need
    if any(not 0 <= dim < rank for dim in merged):
        raise Refusal("broadcasts the token axis away")
    return Outcome(merged, inputs)


def pointwise(ctx: FlowContext, node: fx.Node) -> Outcome:
    """Element by element with broadcasting."""
    rank = tensor(node).dim()
    return _aligned(ctx, [(n, rank - tensor(n).dim()) for n in tensor_inputs(node)], rank)


for _target in (
    aten._to_copy.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.floor_divide.default,
    aten.lift_fresh_copy.default,
    aten.copy.default,
    aten.polar.default,
    aten.complex.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.full_like.default,
):
    flow_rule(_target)(pointwise)


def _same(ctx: FlowContext, node: fx.Node, *forbidden: int) -> dict[int, TokenDim]:
    """Layout of the first argument, refusing a token axis in ``forbidden`` dimensions."""
    layout = dict(ctx.layout(node.args[0]))
    for dim in forbidden:
        if dim in layout:
            raise Refusal(f"mixes tokens: works along dimension {dim}, the token axis")
    return layout


def _rank(node: fx.Node) -> int:
    first = input_node(node, 0)
    return tensor(first).dim()


@flow_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(ctx: FlowContext, node: fx.Node) -> Outcome:
    source = input_node(node, 0)
    layout = regrouped(shape_of(tensor(source)), ctx.layout(source), shape_of(tensor(node)))
    if layout is None:
        raise Refusal(
            f"reshapes across the token axis ({list(tensor(source).shape)} to "
            f"{list(tensor(node).shape)})"
        )
    return Outcome(layout, sizes={1: _without_inferred(node.args[1], layout)})


def _without_inferred(sizes: Any, layout: Layout) -> dict[int, TokenDim]:
    # A size of -1 is inferred from the stage's own element count, so it may stay.
    return {dim: entry for dim, entry in layout.items() if sizes[dim] != -1}


@flow_rule(aten.expand.default)
def _expand(ctx: FlowContext, node: fx.Node) -> Outcome:
    added = tensor(node).dim() - _rank(node)
    layout = shifted(ctx.layout(node.args[0]), added)
    return Outcome(layout, sizes={1: _without_inferred(node.args[1], layout)})


@flow_rule(aten.unsqueeze.default)
def _unsqueeze(ctx: FlowContext, node: fx.Node) -> Outcome:
    at = dimension(node.args[1], _rank(node) + 1)
    layout = ctx.layout(node.args[0])
    return Outcome({dim + (dim >= at): entry for dim, entry in layout.items()})


@flow_rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(ctx: FlowContext, node: fx.Node) -> Outcome:
    source = input_node(node, 0)
    shape = shape_of(tensor(source))
    gone = [d for d in dimensions(node.args[1], len(shape)) if shape[d].is_one]
    layout = _same(ctx, node, *gone)
    return Outcome({dim - sum(g < dim for g in gone): entry for dim, entry in layout.items()})


@flow_rule(aten.permute.default)
def _permute(ctx: FlowContext, node: fx.Node) -> Outcome:
    order = dimensions(node.args[1], _rank(node))
    return Outcome(permuted(ctx.layout(node.args[0]), order))


@flow_rule(aten.transpose.int)
def _transpose(ctx: FlowContext, node: fx.Node) -> Outcome:
    order = list(range(_rank(node)))
    a, b = (dimension(d, len(order)) for d in node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return Outcome(permuted(ctx.layout(node.args[0]), order))


@flow_rule(aten.t.default)
def _t(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome(permuted(ctx.layout(node.args[0]), list(reversed(range(_rank(node))))))


@flow_rule(aten.slice.Tensor)
def _slice(ctx: FlowContext, node: fx.Node) -> Outcome:
    dim = dimension(argument(node, 1, "dim", 0), _rank(node))
    layout = dict(ctx.layout(node.args[0]))
    if dim not in layout:
        return Outcome(layout)
    source = input_node(node, 0)
    start, step = argument(node, 2, "start"), argument(node, 4, "step", 1)
    whole = size_of(tensor(source).shape[dim]) == size_of(tensor(node).shape[dim])
    if start in (0, None) and step == 1 and whole:
        return Outcome(layout, replace={3: torch.iinfo(torch.int64).max})
    raise Refusal(f"takes a part of the token axis (dimension {dim})")


@flow_rule(aten.select.int)
def _select(ctx: FlowContext, node: fx.Node) -> Outcome:
    at = dimension(node.args[1], _rank(node))
    return Outcome({dim - (dim > at): entry for dim, entry in _same(ctx, node, at).items()})


@flow_rule(aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)
def _split(ctx: FlowContext, node: fx.Node) -> Outcome:
    dim = dimension(argument(node, 2, "dim", 0), _rank(node))
    return Outcome((_same(ctx, node, dim),) * len(node.meta["val"]))


@flow_rule(aten.unbind.int)
def _unbind(ctx: FlowContext, node: fx.Node) -> Outcome:
    at = dimension(argument(node, 1, "dim", 0), _rank(node))
    layout = {dim - (dim > at): entry for dim, entry in _same(ctx, node, at).items()}
    return Outcome((layout,) * len(node.meta["val"]))


@flow_rule(operator.getitem)
def _getitem(ctx: FlowContext, node: fx.Node) -> Outcome:
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    return Outcome(ctx.layouts(source)[index])


@flow_rule(aten.view_as_complex.default, aten.view_as_real.default)
def _complex_view(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome(_same(ctx, node))


@flow_rule(
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.all.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.var.correction,
    aten.prod.dim_int,
    aten.logsumexp.default,
)
def _reduction(ctx: FlowContext, node: fx.Node) -> Outcome:
    gone = dimensions(argument(node, 1, "dim"), _rank(node))
    layout = _same(ctx, node, *gone)
    shrunk = tensor(node).dim() < _rank(node)
    if not shrunk:
        return Outcome(layout)
    return Outcome({dim - sum(g < dim for g in gone): entry for dim, entry in layout.items()})


@flow_rule(
    aten._softmax.default,
    aten._safe_softmax.default,
    aten._log_softmax.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.cumsum.default,
    aten.cumprod.default,
)
def _along(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome(_same(ctx, node, dimension(node.args[1], _rank(node))))


@flow_rule(aten.topk.default)
def _topk(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome((_same(ctx, node, dimension(argument(node, 2, "dim", -1), _rank(node))),) * 2)


@flow_rule(aten.sort.default, aten.max.dim, aten.min.dim)
def _sort(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome((_same(ctx, node, dimension(argument(node, 1, "dim", -1), _rank(node))),) * 2)


@flow_rule(aten.argsort.default)
def _argsort(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome(_same(ctx, node, dimension(argument(node, 1, "dim", -1), _rank(node))))


@flow_rule(aten.native_layer_norm.default)
def _layer_norm(ctx: FlowContext, node: fx.Node) -> Outcome:
    normed = input_list(node, 1)
    rank = _rank(node)
    layout = _same(ctx, node, *range(rank - len(normed), rank))
    return Outcome((layout,) * 3)


@flow_rule(aten.constant_pad_nd.default)
def _pad(ctx: FlowContext, node: fx.Node) -> Outcome:
    pads = input_list(node, 1)
    rank = _rank(node)
    padded = [rank - 1 - i // 2 for i, amount in enumerate(pads) if amount != 0]
    return Outcome(_same(ctx, node, *padded))


@flow_rule(aten.cat.default)
def _cat(ctx: FlowContext, node: fx.Node) -> Outcome:
    pieces = input_list(node, 0)
    rank = tensor(node).dim()
    along = dimension(argument(node, 1, "dim", 0), rank)
    merged: dict[int, TokenDim] = {}
    for piece in pieces:
        for dim, entry in ctx.layout(piece).items():
            if merged.setdefault(dim, entry) != entry:
                raise Refusal(f"meets two different token axes in dimension {dim}")
    if along in merged:
        raise Refusal(f"concatenates along the token axis (dimension {along})")
    for piece in pieces:
        if ctx.layout(piece) and dict(ctx.layout(piece)) != merged:
            raise Refusal("concatenates a stage's tokens with all tokens")
    return Outcome(merged, dict.fromkeys(pieces, merged))


@flow_rule(aten.stack.default)
def _stack(ctx: FlowContext, node: fx.Node) -> Outcome:
    pieces = input_list(node, 0)
    rank = tensor(node).dim()
    at = dimension(argument(node, 1, "dim", 0), rank)
    inner = _aligned(ctx, [(piece, 0) for piece in pieces], rank - 1)
    assert isinstance(inner.layout, dict)
    return Outcome({dim + (dim >= at): entry for dim, entry in inner.layout.items()}, inner.inputs)


@flow_rule(
    aten.slice_scatter.default,
    aten.select_scatter.default,
)
def _slice_scatter(ctx: FlowContext, node: fx.Node) -> Outcome:
    target, source = node.args[0], node.args[1]
    assert isinstance(target, fx.Node)
    assert isinstance(source, fx.Node)
    rank = _rank(node)
    along = dimension(argument(node, 2, "dim", 0), rank)
    gone = tensor(source).dim() < rank
    of_source = {dim + (gone and dim >= along): entry for dim, entry in ctx.layout(source).items()}
    merged = dict(ctx.layout(target)) or of_source
    if along in merged or (of_source and of_source != merged):
        raise Refusal("writes a part of the token axis")
    need = {dim - (gone and dim > along): entry for dim, entry in merged.items()}
    return Outcome(merged, {target: merged, source: need})


@flow_rule(aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _gather(ctx: FlowContext, node: fx.Node) -> Outcome:
    along = dimension(node.args[1], _rank(node))
    outcome = _aligned(ctx, [(n, 0) for n in tensor_inputs(node)], _rank(node))
    if along in outcome.layout:
        raise Refusal(f"mixes tokens: works along dimension {along}, the token axis")
    return outcome


@flow_rule(aten.index_copy.default)
def _index_copy(ctx: FlowContext, node: fx.Node) -> Outcome:
    target, along, index, source = node.args
    assert isinstance(target, fx.Node)
    assert isinstance(source, fx.Node)
    if ctx.layout(index):
        raise Refusal("writes at positions that depend on the tokens")
    at = dimension(along, _rank(node))
    merged = dict(ctx.layout(source)) or dict(ctx.layout(target))
    if at in merged:
        raise Refusal("writes a part of the token axis")
    for operand in (target, source):
        if ctx.layout(operand) and dict(ctx.layout(operand)) != merged:
            raise Refusal(f"combines {operand.name} with a value of all tokens")
    return Outcome(merged, {target: merged, source: merged})


@flow_rule(aten.index_select.default)
def _index_select(ctx: FlowContext, node: fx.Node) -> Outcome:
    source, along, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, fx.Node)
    at = dimension(along, _rank(node))
    layout = _same(ctx, node, at)
    chosen = ctx.layout(index)
    if chosen and layout:
        raise Refusal("selects tokens of a staged value")
    return Outcome({at: chosen[0]} if chosen else layout)


@flow_rule(aten.embedding.default)
def _embedding(ctx: FlowContext, node: fx.Node) -> Outcome:
    if ctx.layout(node.args[0]):
        raise Refusal("looks up rows of a staged value")
    return Outcome(ctx.layout(node.args[1]))


@flow_rule(aten.index.Tensor)
def _index(ctx: FlowContext, node: fx.Node) -> Outcome:
    source, indices = input_node(node, 0), input_list(node, 1)
    if ctx.layout(source):
        raise Refusal("indexes a staged value")
    used = [at for at, index in enumerate(indices) if index is not None]
    if used != list(range(used[0], used[-1] + 1)):
        raise Refusal("indexes non-adjacent dimensions")
    chosen = [indices[at] for at in used]
    if any(tensor(index).dtype == torch.bool for index in chosen):
        raise Refusal("selects by a mask of tokens")
    rank = max(tensor(index).dim() for index in chosen)
    outcome = _aligned(ctx, [(i, rank - tensor(i).dim()) for i in chosen], rank)
    assert isinstance(outcome.layout, dict)
    return Outcome(shifted(outcome.layout, used[0]), outcome.inputs)


def _product(
    ctx: FlowContext, left: fx.Node, right: fx.Node, batch_rank: int
) -> tuple[dict[int, TokenDim], dict[fx.Node, Layout]]:
    """Layouts of ``left [*batch, n, k] @ right [*batch, k, m]``."""
    rows, inner, columns = batch_rank, batch_rank + 1, batch_rank + 1
    of_left, of_right = ctx.layout(left), ctx.layout(right)
    if inner in of_left or rows in of_right:
        raise Refusal("sums over the token axis")
    merged: dict[int, TokenDim] = {}
    for source in (of_left, of_right):
        for dim, entry in source.items():
            if dim < batch_rank and merged.setdefault(dim, entry) != entry:
                raise Refusal(f"meets two different token axes in dimension {dim}")
    need_left: dict[int, TokenDim] = dict(merged)
    need_right: dict[int, TokenDim] = dict(merged)
    if rows in of_left:
        need_left[rows] = merged[rows] = of_left[rows]
    if columns in of_right:
        need_right[columns] = merged[columns] = of_right[columns]
    inputs: dict[fx.Node, Layout] = {}
    for operand, need, have in ((left, need_left, of_left), (right, need_right, of_right)):
        if have and dict(have) != need:
            raise Refusal(f"multiplies {operand.name} by a value of all tokens")
        if need:
            inputs[operand] = need
    return merged, inputs


@flow_rule(aten.mm.default, aten.bmm.default)
def _plain_product(ctx: FlowContext, node: fx.Node) -> Outcome:
    left, right = input_node(node, 0), input_node(node, 1)
    return Outcome(*_product(ctx, left, right, tensor(node).dim() - 2))


@flow_rule(aten.addmm.default)
def _addmm(ctx: FlowContext, node: fx.Node) -> Outcome:
    bias, left, right = node.args[:3]
    assert isinstance(bias, fx.Node)
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    layout, inputs = _product(ctx, left, right, 0)
    offset = 2 - tensor(bias).dim()
    shape = shape_of(tensor(bias))
    need = {
        dim - offset: entry
        for dim, entry in layout.items()
        if dim >= offset and not shape[dim - offset].is_one
    }
    if need:
        inputs[bias] = need
    return Outcome(layout, inputs)


@flow_rule(aten.linear.default)
def _linear(ctx: FlowContext, node: fx.Node) -> Outcome:
    if any(ctx.layout(weight) for weight in node.args[1:]):
        raise Refusal("uses a staged value as a weight")
    return Outcome(_same(ctx, node, _rank(node) - 1))


@flow_rule(aten.matmul.default)
def _matmul(ctx: FlowContext, node: fx.Node) -> Outcome:
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    ranks = tensor(left).dim(), tensor(right).dim()
    if ranks[0] == ranks[1] and ranks[0] >= 2:
        return Outcome(*_product(ctx, left, right, ranks[0] - 2))
    if ranks[1] == 2 and not ctx.layout(right):
        return Outcome(_same(ctx, node, ranks[0] - 1))
    raise Refusal("matmul of this rank has no rule")


@flow_rule(aten.sym_size.int)
def _sym_size(ctx: FlowContext, node: fx.Node) -> Outcome:
    raise Refusal("asks for the size of a staged value")


@flow_rule(c10d.all_reduce.default, c10d.wait_tensor.default)
def _sum_over_ranks(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome(_same(ctx, node))


@flow_rule(c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)
def _along_dimension_0(ctx: FlowContext, node: fx.Node) -> Outcome:
    layout = _same(ctx, node)
    if 0 in layout:
        raise Refusal(
            "shards the token axis over ranks; capture the model with plain tensor parallelism "
            "and set sequence_parallel=True instead"
        )
    return Outcome(layout)


@flow_rule(torch.ops.afd.cam_dispatch.default)
def _dispatch(ctx: FlowContext, node: fx.Node) -> Outcome:
    hidden, ids = node.args[:2]
    layout, of_ids = ctx.layout(hidden), ctx.layout(ids)
    if set(layout) != {0} or dict(of_ids) != dict(layout):
        raise Refusal("the rows and their expert ids do not share one token axis")
    return Outcome({}, {})


@flow_rule(torch.ops.afd.cam_receive.default)
def _receive(ctx: FlowContext, node: fx.Node) -> Outcome:
    return Outcome(ctx.layout(node.args[1]))
