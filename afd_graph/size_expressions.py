"""Sizes of a step as trees of JSON values: what is stored, and what evaluates them; no ``eval``.

A tree is an integer or a list ``[operator, part, ...]``. Leaves say where a size is read from the
inputs of a step::

    ["dim", 3, 1]                     dimension 1 of input 3
    ["input", 5]                      input 5 itself
    ["add", ["dim", 3, 1], 1]         arithmetic and comparisons over those

A tree is turned into a Python closure by looking its operators up in a table. That is all that
can happen: a tree from an untrusted file is at worst refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, cast

import sympy

from afd_graph import _compat
from afd_graph.errors import AFDError

Tree = "int | list[Any]"
"""An integer, or ``[operator, part, ...]``."""

MAX_DEPTH = 64
MAX_INTEGER = 2**63 - 1

_LEAVES = {"dim": 2, "input": 1}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_MANY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "min": min,
    "max": max,
    "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b),
}


class SizeExpressionError(AFDError, ValueError):
    """A size cannot be written as a tree, or a stored tree is malformed."""


def tree_of(expression: sympy.Basic, places: Mapping[sympy.Basic, Any]) -> Any:
    """Write a symbolic expression as a tree.

    Args:
        expression: over the symbols of ``places``.
        places: symbol (or whole sub-expression) -> the tree that stands for it.

    Raises:
        SizeExpressionError: a symbol without a place, or a function without an operator here.
    """
    if expression in places:
        return places[expression]
    if expression is sympy.true or expression is sympy.false:
        return int(expression is sympy.true)
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer):
        count = int(expression.exp)
        if 0 < count <= MAX_DEPTH:
            return ["mul", *[tree_of(expression.base, places)] * count]
    if isinstance(expression, sympy.Not):
        return ["eq", tree_of(expression.args[0], places), 0]
    name = _compat.size_operator(expression)
    if name in _BINARY or name in _MANY:
        return [name, *(tree_of(part, places) for part in expression.args)]
    raise SizeExpressionError(
        f"the size {expression} cannot be computed from the inputs of a step",
        remedy="please report the model",
    )


def evaluator(tree: Any) -> Callable[[Sequence[Any]], int]:
    """A function from the inputs of a step to the value of ``tree``.

    Raises:
        SizeExpressionError: the tree is malformed. The function itself raises it when an input
            that the tree reads is missing, of another kind, or leads to a division by zero.
    """
    value = _compiled(tree, MAX_DEPTH)

    def read(inputs: Sequence[Any]) -> int:
        try:
            return value(inputs)
        except (ZeroDivisionError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise SizeExpressionError(
                f"the size {text(tree)} cannot be read from these inputs: {error}"
            ) from error

    return read


def text(tree: Any) -> str:
    """The tree as a person writes it; dimension 1 of input 3 is ``x3.1``."""
    if not isinstance(tree, list):
        return str(tree)
    name, *parts = tree
    if name in _LEAVES:
        return "x" + ".".join(str(part) for part in parts)
    return f"{name}({', '.join(text(part) for part in parts)})"


def positions(tree: Any) -> set[int]:
    """The inputs that a well-formed tree reads."""
    if not isinstance(tree, list):
        return set()
    if tree[0] in _LEAVES:
        return {tree[1]}
    return set().union(*(positions(part) for part in tree[1:]))


def _compiled(tree: Any, depth: int) -> Callable[[Sequence[Any]], int]:
    if _is_size(tree):
        constant = cast("int", tree)
        return lambda _: constant
    if not isinstance(tree, list) or not tree or not depth or not isinstance(tree[0], str):
        raise SizeExpressionError(f"a stored size is malformed: {_short(tree)}")
    name, *parts = tree
    if name in _LEAVES:
        if len(parts) != _LEAVES[name] or not all(_is_size(p) and p >= 0 for p in parts):
            raise SizeExpressionError(f"a stored size is malformed: {_short(tree)}")
        return _dimension(*parts) if name == "dim" else _scalar(*parts)
    compiled = [_compiled(part, depth - 1) for part in parts]
    if name in _BINARY and len(compiled) == 2:
        binary, (a, b) = _BINARY[name], compiled
        return lambda inputs: binary(a(inputs), b(inputs))
    if name in _MANY and compiled:
        many = _MANY[name]
        return lambda inputs: reduce(many, [part(inputs) for part in compiled])
    raise SizeExpressionError(f"a stored size is malformed: {_short(tree)}")


def _dimension(position: int, dim: int) -> Callable[[Sequence[Any]], int]:
    return lambda inputs: int(inputs[position].shape[dim])


def _scalar(position: int) -> Callable[[Sequence[Any]], int]:
    return lambda inputs: int(inputs[position])


def _is_size(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_INTEGER


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
