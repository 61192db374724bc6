"""Prove from the graph that an attention mask is causal.

Stage 0 runs before the keys of stage 1 exist, so it must never attend to them. A mask is causal
when query ``i`` may only see keys ``j <= i + offset``, where ``offset`` counts the keys that were
there before the step. The proof follows the mask upwards:

* a conjunction is causal when one side is; a cast, an expansion or a select with ``-inf`` for
  what is masked keeps causality;
* ``key_index <= query_index`` is causal when both are *affine*: one dimension's own index plus an
  offset (``arange``, shifted, broadcast, or looked up in another affine table);
* a mask that is an input of the graph cannot be proven; its values are looked at in every step
  that would be split (:class:`CheckedMask`).

What cannot be proven is reported with the node where the proof stopped.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from afd_graph.passes.sizes import Size, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Affine:
    """``value[..., x, ...] = x + constant + sum(terms)`` where ``x`` indexes dimension ``dim``.

    Attributes:
        dim: the dimension, counted from the right (``-1`` is the last); None for a scalar.
        constant: symbolic integer.
        terms: zero-dimensional integer tensors that are added, by node.
    """

    dim: int | None
    constant: sympy.Expr
    terms: tuple[fx.Node, ...] = ()

    def plus(self, other: Affine, sign: int = 1) -> Affine | None:
        """Sum or difference with a scalar; None when that is no longer affine."""
        if other.dim is not None:
            if self.dim is not None or sign != 1:
                return None
            return other.plus(self)
        if sign == -1 and other.terms:
            return None
        return Affine(self.dim, self.constant + sign * other.constant, self.terms + other.terms)


@dataclass(frozen=True)
class Offset:
    """How far a query sees beyond its own index: ``constant + sum(terms)`` keys."""

    constant: sympy.Expr
    terms: tuple[fx.Node, ...] = ()

    @staticmethod
    def of_size(size: Size) -> Offset:
        """The offset of a cache that holds ``size`` tokens."""
        expr = sympy.Integer(size.coefficient)
        for factor in size.factors():
            expr = expr * factor
        return Offset(expr)


@dataclass(frozen=True)
class CheckedMask:
    """A mask that is an input of the graph: causal only if its values are when a step runs.

    Attributes:
        mask: the input, ``[..., queries, keys]``; True, or more than ``-inf``, lets a query see.
        offset: keys that lie before the first query.
    """

    mask: fx.Node
    offset: Offset


@dataclass
class Verdict:
    """Result of a proof.

    Attributes:
        causal: whether the mask is causal.
        reason: why not.
        checked: masks of which the proof takes the values to be causal, to be checked when the
            step runs.
        equal_inputs: scalar graph inputs that the proof takes to be equal, to be checked when
            the step runs: the caches of all layers count their tokens separately.
    """

    causal: bool
    reason: str = ""
    equal_inputs: tuple[tuple[fx.Node, fx.Node], ...] = field(default=())
    checked: tuple[CheckedMask, ...] = ()


def affine(node: Any) -> Affine | None:
    """Read an integer tensor (or number) as an affine function of one index, if it is one."""
    if isinstance(node, (int, torch.SymInt)):
        return Affine(None, _expr(node))
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        return Affine(None, _expr(value))
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        return None
    reader = _READERS.get(node.target) if node.op == "call_function" else None
    if reader is not None:
        return reader(node)
    if value.dim() == 0:
        return Affine(None, sympy.Integer(0), (node,))
    return None


def _expr(value: int | torch.SymInt) -> sympy.Expr:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _rank(node: Any) -> int:
    return node.meta["val"].dim()


def _arange(node: fx.Node) -> Affine | None:
    if node.target is aten.arange.default:
        return Affine(-1, sympy.Integer(0))
    start = affine(node.args[0])
    step = node.args[2] if len(node.args) > 2 else 1
    if start is None or step != 1:
        return None
    return Affine(-1, start.constant, start.terms)


def _sum(sign: int) -> Callable[[fx.Node], Affine | None]:
    def read(node: fx.Node) -> Affine | None:
        if node.kwargs.get("alpha", 1) != 1:
            return None
        left, right = affine(node.args[0]), affine(node.args[1])
        return None if left is None or right is None else left.plus(right, sign)

    return read


def _same(node: fx.Node) -> Affine | None:
    return affine(node.args[0])


def _expand(node: fx.Node) -> Affine | None:
    inner, source = affine(node.args[0]), node.args[0]
    assert isinstance(source, fx.Node)
    if inner is None or inner.dim is None:
        return inner
    before, after = (shape_of(n.meta["val"])[inner.dim] for n in (source, node))
    return inner if before == after else None  # A repeated entry is no longer its own index.


def _unsqueeze(node: fx.Node) -> Affine | None:
    inner = affine(node.args[0])
    if inner is None or inner.dim is None:
        return inner
    rank, at = _rank(node.args[0]), node.args[1]
    assert isinstance(at, int)
    at = at + rank + 1 if at < 0 else at
    # Counted from the right, a dimension moves only when the new one lies to its right.
    dim = inner.dim if at <= inner.dim + rank else inner.dim - 1
    return Affine(dim, inner.constant, inner.terms)


def _index(node: fx.Node) -> Affine | None:
    table, indices = node.args
    inner = affine(table)
    if inner is None or inner.dim is None or not isinstance(indices, (list, tuple)):
        return None
    at = inner.dim + _rank(table)
    if len(indices) != _rank(table) or any(index is None for index in indices):
        return None
    chosen = affine(indices[at])
    if chosen is None or chosen.dim is None:
        return None
    return Affine(chosen.dim, chosen.constant + inner.constant, chosen.terms + inner.terms)


_READERS: dict[Any, Callable[[fx.Node], Affine | None]] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten._to_copy.default: _same,
    aten.expand.default: _expand,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    aten.index.Tensor: _index,
}

_KEEP = frozenset(
    {
        aten.expand.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.alias.default,
        aten.contiguous.default,
    }
)
_AND = frozenset(
    {aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor, operator.and_}
)
_ADD = frozenset({aten.add.Tensor})


def prove_causal(mask: fx.Node, offset: Offset) -> Verdict:
    """Whether ``mask [..., queries, keys]`` lets query ``i`` see only keys ``<= i + offset``."""
    return _prove(mask, offset)


def _prove(node: Any, offset: Offset) -> Verdict:
    if isinstance(node, fx.Node) and node.op == "placeholder" and _is_mask(node):
        if any(term.op != "placeholder" for term in offset.terms):
            return Verdict(False, f"the mask {node.name} meets keys whose place is computed")
        return Verdict(True, checked=(CheckedMask(node, offset),))
    if not isinstance(node, fx.Node) or node.op != "call_function":
        name = node.name if isinstance(node, fx.Node) else repr(node)
        return Verdict(False, f"mask value {name} comes from outside the graph")
    target = node.target
    # False masks in a bool mask, -inf in a float one; a cast between them keeps neither.
    alike = [n for n in node.all_input_nodes if _dtype_kind(n) == _dtype_kind(node)]
    if target in _KEEP and alike:
        return _prove(node.args[0], offset)
    if target in (_AND if _dtype_kind(node) is bool else _ADD) and alike:
        verdicts = [_prove(n, offset) for n in alike]
        reasons = "; ".join(verdict.reason for verdict in verdicts)
        causal = sorted((v for v in verdicts if v.causal), key=lambda v: len(v.checked))
        return causal[0] if causal else Verdict(False, reasons)
    if target in (aten.le.Tensor, aten.lt.Tensor):
        return _compare(node, node.args[0], node.args[1], target is aten.lt.Tensor, offset)
    if target in (aten.ge.Tensor, aten.gt.Tensor):
        return _compare(node, node.args[1], node.args[0], target is aten.gt.Tensor, offset)
    if target is aten.where.self and _is_masked_value(node.args[2]):
        return _prove(node.args[0], offset)
    if target is aten.tril.default and _dtype_kind(node) is bool:
        diagonal = node.args[1] if len(node.args) > 1 else 0
        return _within(node, Offset(_expr(diagonal)), offset)  # type: ignore[arg-type]
    if target is aten.unsqueeze.default and node.args[1] in range(_rank(node.args[0]) - 1):
        return _prove(node.args[0], offset)
    return Verdict(False, f"{node.name} ({target}) does not show that the mask is causal")


def _is_mask(node: fx.Node) -> bool:
    """Whether an input has a query and a key dimension and values that hide keys."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or _dtype_kind(node) is int:
        return False
    return not shape_of(value)[-1].is_one  # One value for all keys hides none from stage 0 alone.


def _dtype_kind(node: fx.Node) -> type | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return bool if value.dtype is torch.bool else float if value.is_floating_point() else int


def _compare(node: fx.Node, keys: Any, queries: Any, strict: bool, offset: Offset) -> Verdict:
    key, query = affine(keys), affine(queries)
    if key is None or query is None:
        return Verdict(False, f"{node.name} does not compare plain token positions")
    if key.dim != -1 or query.dim != -2 or key.terms:
        return Verdict(False, f"{node.name} does not compare a key index with a query index")
    reach = Offset(query.constant - key.constant - int(strict), query.terms)
    return _within(node, reach, offset)


def _within(node: fx.Node, reach: Offset, offset: Offset) -> Verdict:
    """Whether seeing ``reach`` beyond one's own index stays within ``offset``."""
    missing = list((Counter(reach.terms) - Counter(offset.terms)).elements())
    extra = list((Counter(offset.terms) - Counter(reach.terms)).elements())
    surplus = sympy.expand(reach.constant - offset.constant)
    if offset.terms and not reach.terms and reach.constant.is_nonpositive:
        # Positions in a cache are never negative: wherever the step's keys begin, none of a later
        # query lies at or before one's own index.
        return Verdict(True)
    if len(missing) != len(extra) or not surplus.is_nonpositive:
        return Verdict(
            False,
            f"{node.name} lets a query see {reach.constant} keys beyond its own index, "
            f"{offset.constant} are known to be there",
        )
    if any(n.op != "placeholder" for n in missing + extra):
        return Verdict(False, f"{node.name} compares with an offset that is computed")
    return Verdict(True, equal_inputs=tuple(zip(missing, extra, strict=True)))


def _is_masked_value(node: Any) -> bool:
    """Whether a select's other value masks: ``-inf``.

    The lowest finite value does not: a row that is masked as a whole would see every key.
    """
    if isinstance(node, fx.Node):
        if node.target not in (aten.scalar_tensor.default, aten.full.default):
            return False
        node = node.args[0] if node.target is aten.scalar_tensor.default else node.args[1]
    return isinstance(node, float) and node == -math.inf
