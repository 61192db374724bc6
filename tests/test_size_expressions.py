"""Sizes as trees: the value of the expression that they were made of, and nothing else."""

from __future__ import annotations

import json

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod

from afd_graph.size_expressions import SizeExpressionError, evaluator, positions, text, tree_of

A, B = (
    sympy.Symbol("a", integer=True, positive=True),
    sympy.Symbol("b", integer=True, positive=True),
)
PLACES = {A: ["dim", 0, 0], B: ["dim", 1, 1]}
EXPRESSIONS = [
    A + 2 * B - 3,
    A * A * B,
    FloorDiv(A + B, 3),
    Mod(A, B + 1),
    sympy.Max(A, 2 * B),
    sympy.Min(A, 5),
    sympy.Eq(A + 1, B),
    sympy.Ne(A, B),
    sympy.And(A > 2, sympy.Or(B <= 3, A >= B)),
    sympy.Not(sympy.And(A > 2, B > 2)),
    sympy.Integer(7),
    sympy.true,
]


@given(st.sampled_from(EXPRESSIONS), st.integers(1, 20), st.integers(1, 20))
def test_the_value_is_that_of_the_expression(expression, a, b):
    tree = json.loads(json.dumps(tree_of(expression, PLACES)))
    inputs = [torch.empty(a), torch.empty(1, b)]
    wanted = expression.subs({A: a, B: b})
    wanted = int(wanted == sympy.true) if wanted in (sympy.true, sympy.false) else int(wanted)
    assert int(evaluator(tree)(inputs)) == wanted
    assert positions(tree) <= {0, 1}


def test_what_has_no_tree_is_refused():
    for expression in (sympy.Symbol("c"), sympy.sin(A), A**B, A / 2):
        with pytest.raises(SizeExpressionError):
            tree_of(expression, PLACES)


@pytest.mark.parametrize(
    "tree",
    [
        *(None, "a", "__import__('os')", 1.5, True, 2**63, [], ["dim"], ["dim", 0], ["dim", -1, 0]),
        *(["dim", 0, "0"], ["eval", "1"], ["add"], ["floordiv", 1], ["mod", 1, 2, 3], {"add": [1]}),
        [["add"], 1, 2],
    ],
)
def test_malformed_trees_are_refused(tree):
    with pytest.raises(SizeExpressionError):
        evaluator(tree)


def test_a_tree_too_deep_is_refused():
    tree: object = 1
    for _ in range(100):
        tree = ["add", tree, 1]
    with pytest.raises(SizeExpressionError):
        evaluator(tree)


def test_inputs_that_lack_the_size_are_an_error():
    for tree, inputs in (
        (["dim", 3, 0], []),
        (["dim", 0, 4], [torch.empty(2)]),
        (["input", 0], ["x"]),
        (["floordiv", 1, ["dim", 0, 0]], [torch.empty(0)]),
    ):
        with pytest.raises(SizeExpressionError, match="cannot be read"):
            evaluator(tree)(inputs)


def test_text_for_people():
    assert text(["add", ["dim", 3, 1], 1]) == "add(x3.1, 1)"
