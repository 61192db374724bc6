"""Sizes as monomials: exact products of integers and symbols, cheap to multiply and divide.

A view re-groups factors of a shape. To follow a token axis through it, sizes must be compared and
divided; doing that through the symbolic engine costs a millisecond a time. A size is therefore
written as ``coefficient * symbol**power * ...``; anything that is not a product (``s + 1``) counts
as one opaque symbol.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from afd_graph import _compat


@dataclass(frozen=True)
class Size:
    """``coefficient * prod(symbol ** power)``; powers are positive."""

    coefficient: int
    powers: tuple[tuple[sympy.Expr, int], ...] = ()

    def __mul__(self, other: Size) -> Size:
        powers = dict(self.powers)
        for symbol, power in other.powers:
            powers[symbol] = powers.get(symbol, 0) + power
        return Size(self.coefficient * other.coefficient, _ordered(powers))

    def divide(self, other: Size) -> Size | None:
        """Return ``self / other`` when that is a monomial with integer coefficient, else None."""
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        powers = dict(self.powers)
        for symbol, power in other.powers:
            left = powers.get(symbol, 0) - power
            if left < 0:
                return None
            powers[symbol] = left
        return Size(
            self.coefficient // other.coefficient,
            _ordered({symbol: power for symbol, power in powers.items() if power}),
        )

    @property
    def is_one(self) -> bool:
        """Whether this is the integer 1."""
        return self.coefficient == 1 and not self.powers

    @property
    def static(self) -> int | None:
        """The value when no symbol is involved, else None."""
        return None if self.powers else self.coefficient

    def factors(self) -> Iterator[sympy.Expr]:
        """Symbols, each as often as its power says."""
        for symbol, power in self.powers:
            for _ in range(power):
                yield symbol

    def __str__(self) -> str:
        names = [f"({s})" if s.is_Add else str(s) for s in self.factors()]
        if self.coefficient != 1 or not names:
            names.insert(0, str(self.coefficient))
        return "*".join(names)


ONE = Size(1)
_cache: dict[sympy.Expr, Size] = {}


def size_of(value: Any) -> Size:
    """The monomial of an ``int`` or ``SymInt``."""
    if isinstance(value, torch.SymInt):
        return size_of_expression(value.node.expr)
    return Size(int(value))


def size_of_expression(expr: sympy.Expr) -> Size:
    """The monomial of a symbolic expression."""
    if expr.is_Integer:
        return Size(int(expr))
    found = _cache.get(expr)
    if found is None:
        found = _cache[expr] = _monomial(expr)
    return found


def shape_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """The shape of a (fake) tensor as monomials."""
    return tuple(size_of(extent) for extent in tensor.shape)


def product(sizes: Iterable[Size]) -> Size:
    """Product of sizes; 1 for none."""
    result = ONE
    for size in sizes:
        result = result * size
    return result


def _monomial(expr: sympy.Expr) -> Size:
    if expr.is_Mul:
        return product(size_of_expression(factor) for factor in expr.args)
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return product([size_of_expression(expr.base)] * int(expr.exp))
    if expr.is_Add:
        return _sum(expr)
    division = _compat.floor_division(expr)
    if division is not None:
        dividend, divisor = (size_of_expression(part) for part in division)
        quotient = dividend.divide(divisor)
        if quotient is not None:
            return quotient
    return Size(1, ((expr, 1),))


def _sum(expr: sympy.Expr) -> Size:
    """Common factor times what remains: ``2*s + 2*t`` is ``2 * (s + t)``, one opaque symbol."""
    terms = [size_of_expression(term) for term in expr.args]
    common = Size(math.gcd(*(term.coefficient for term in terms)), terms[0].powers)
    for term in terms[1:]:
        powers = dict(term.powers)
        shared = {s: min(power, powers.get(s, 0)) for s, power in common.powers}
        common = Size(common.coefficient, _ordered({s: p for s, p in shared.items() if p}))
    if common.is_one:
        return Size(1, ((expr, 1),))
    rest = sympy.Add(*(_expression(term.divide(common)) for term in terms))
    return common * Size(1, ((rest, 1),))


def _expression(size: Size | None) -> sympy.Expr:
    assert size is not None
    return sympy.Mul(size.coefficient, *size.factors())


def _ordered(powers: dict[sympy.Expr, int]) -> tuple[tuple[sympy.Expr, int], ...]:
    return tuple(sorted(powers.items(), key=lambda item: str(item[0])))
