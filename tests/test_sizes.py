"""Sizes as monomials, and token axes through views."""

from __future__ import annotations

import math

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from afd_graph.passes.sizes import ONE, Size, product, size_of_expression
from afd_graph.passes.token_layout import Axis, TokenDim, regrouped

S, T = sympy.symbols("s t", positive=True, integer=True)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (3 * S * T, "3*s*t"),
        (S**2, "s*s"),
        (S + 1, "(s + 1)"),
        (2 * S + 2 * T, "2*(s + t)"),
        (S * T + S, "s*(t + 1)"),
        (FloorDiv(4 * S * FloorDiv(S**2, S), S**2), "4"),
        (FloorDiv(S + 1, 2), "((s + 1)//2)"),
    ],
)
def test_expressions_become_products(expression, text) -> None:
    assert str(size_of_expression(sympy.sympify(expression))) == text


def test_division_is_exact_or_refused() -> None:
    six, two, s = Size(6), Size(2), size_of_expression(S)
    assert (six * s).divide(two) == Size(3) * s
    assert six.divide(Size(4)) is None
    assert two.divide(s) is None
    assert (s * s).divide(s) == s
    assert ONE.is_one


@given(st.data())
def test_a_token_axis_survives_every_split_and_merge_of_other_dimensions(data) -> None:
    """Fold the axis into a view at random, then unfold it: the layout comes back."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    at = data.draw(st.integers(0, len(sizes) - 1))
    axis = Axis(size_of_expression(S))
    shape = [Size(n) for n in sizes]
    shape[at] = axis.extent
    begin = data.draw(st.integers(0, at))
    end = data.draw(st.integers(at + 1, len(shape)))
    merged = [*shape[:begin], product(shape[begin:end]), *shape[end:]]
    folded = regrouped(shape, {at: TokenDim(axis)}, merged)
    assert folded is not None
    (entry,) = folded.values()
    assert entry.outer == Size(math.prod(sizes[begin:at]))
    assert entry.inner == Size(math.prod(sizes[at + 1 : end]))
    back = regrouped(merged, folded, shape)
    assert back == {at: TokenDim(axis)}


def test_a_view_that_tears_the_axis_apart_is_refused() -> None:
    axis = Axis(Size(6))
    assert regrouped([Size(6), Size(4)], {0: TokenDim(axis)}, [Size(4), Size(6)]) is None
    assert regrouped([Size(6)], {0: TokenDim(axis)}, [Size(2), Size(3)]) is None


def test_equal_sizes_are_not_the_same_axis() -> None:
    """Heads as many as tokens: the axis stays where its factors say."""
    axis = Axis(Size(4))
    shape = [Size(4), Size(4), Size(16)]
    assert regrouped(shape, {0: TokenDim(axis)}, [Size(4), Size(64)]) == {0: TokenDim(axis)}
    assert regrouped(shape, {1: TokenDim(axis)}, [Size(16), Size(16)]) == {
        0: TokenDim(axis, outer=Size(4))
    }
