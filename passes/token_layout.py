"""Where a value carries the token axis: which dimension, and how it is folded into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from afd_graph.passes.sizes import ONE, Size, product


@dataclass(frozen=True, eq=False)
class Axis:
    """An axis whose entries are dealt out to the stages; compared by identity.

    Attributes:
        extent: its full size in the unsplit graph.
        appended_to: for the key axis of a cache, the node that appended the step's tokens to
            earlier ones; ``None`` for the token axis itself.
    """

    extent: Size
    appended_to: fx.Node | None = None


class TokenDim(NamedTuple):
    """A dimension of size ``outer * axis.extent * inner``, row-major."""

    axis: Axis
    outer: Size = ONE
    inner: Size = ONE

    @property
    def plain(self) -> bool:
        """Whether the dimension is the axis itself."""
        return self.outer.is_one and self.inner.is_one


Layout = Mapping[int, TokenDim]
"""Dimension to token dimension; empty for a value that is the same in every stage."""


def shifted(layout: Layout, by: int) -> dict[int, TokenDim]:
    """The layout with every dimension moved by ``by``."""
    return {dim + by: entry for dim, entry in layout.items()}


def permuted(layout: Layout, order: Sequence[int]) -> dict[int, TokenDim]:
    """The layout after ``permute(order)``."""
    return {new: layout[old] for new, old in enumerate(order) if old in layout}


def regrouped(
    before: Sequence[Size], layout: Layout, after: Sequence[Size]
) -> dict[int, TokenDim] | None:
    """The layout after a view from shape ``before`` to shape ``after``, both row-major.

    Returns None when a token axis would be torn apart or cannot be located.

    Example: ``[B, S, H] -> [B*S, H]`` with ``{1: S}`` gives ``{0: B . S . 1}``.
    """
    result: dict[int, TokenDim] = {}
    for (b0, b1), (a0, a1) in _groups(before, after):
        for dim in range(b0, b1):
            if dim not in layout:
                continue
            entry = layout[dim]
            outer = product(before[b0:dim]) * entry.outer
            inner = entry.inner * product(before[dim + 1 : b1])
            place = _locate(entry.axis.extent, outer, inner, after, a0, a1)
            if place is None:
                return None
            found, token_dim_outer, token_dim_inner = place
            if found in result:
                return None
            result[found] = TokenDim(entry.axis, token_dim_outer, token_dim_inner)
    return result if len(result) == len(layout) else None


def _locate(
    extent: Size, outer: Size, inner: Size, after: Sequence[Size], start: int, stop: int
) -> tuple[int, Size, Size] | None:
    """Find the dimension of ``after[start:stop]`` that holds an axis with these factors around."""
    left = ONE
    for dim in range(start, stop):
        dim_outer = outer.divide(left)
        dim_inner = inner.divide(product(after[dim + 1 : stop]))
        if (
            dim_outer is not None
            and dim_inner is not None
            and dim_outer * extent * dim_inner == after[dim]
        ):
            return dim, dim_outer, dim_inner
        left = left * after[dim]
    return None


def _groups(
    before: Sequence[Size], after: Sequence[Size]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Smallest runs of dimensions whose products agree, in order; one last run for the rest."""
    groups = []
    i = j = 0
    while i < len(before) and j < len(after):
        i0, j0 = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if i < len(before) and right.divide(left) is not None:
                left, i = left * before[i], i + 1
            elif j < len(after) and left.divide(right) is not None:
                right, j = right * after[j], j + 1
            elif i < len(before):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                break
        groups.append(((i0, i), (j0, j)))
    if i < len(before) or j < len(after):
        groups.append(((i, len(before)), (j, len(after))))
    return groups
