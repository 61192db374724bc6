"""Check that the pieces run in the order of the graph that was cut.

vLLM runs pieces by Python code that it generates: compiled pieces are called by number, splitting
operators are written out. That code is what is read here, when it was made and when it comes out
of a cache, and held against the order that the schedule gave.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from afd_graph.errors import PassError
from afd_graph.vllm.operators import operator_name

Call = tuple[str, tuple[int | str, ...]]
"""A splitting operator and its arguments that are numbers or strings: layer, stage, name."""

_INLINED = "__vllm_inlined_submods__"
_MAIN = "execution_fn"


def graph_order(graph: fx.Graph, splits: Callable[[fx.Node], bool]) -> list[Call]:
    """The calls of splitting operators in a graph."""
    return [
        (str(operator_name(node)), _constants((*node.args, *node.kwargs.values())))
        for node in graph.nodes
        if splits(node)
    ]


def executed_order(code: str) -> list[Call | int]:
    """What vLLM's code for a cut graph runs: splitting operators, and numbers of compiled pieces.

    Raises:
        PassError: the code is not of the form that is known.
    """
    functions = {f.name: f for f in ast.parse(code).body if isinstance(f, ast.FunctionDef)}
    if _MAIN not in functions:
        raise PassError(
            f"vLLM's code for the pieces has no function {_MAIN}",
            remedy="use a vLLM version of the table in docs/vllm.md",
        )
    return list(_calls(functions[_MAIN], functions))


def check_order(code: str, expected: Iterable[Call]) -> None:
    """Refuse code that does not run the splitting operators in the order of the graph.

    An operator that was left inside a compiled piece is missing from the code.

    Raises:
        PassError: says which operator is not where it belongs.
    """
    compare_orders([c for c in executed_order(code) if not isinstance(c, int)], expected)


def cut_order(
    cut: fx.GraphModule, pieces: Iterable[Any], splits: Callable[[fx.Node], bool]
) -> list[Call]:
    """The calls of splitting operators in a graph that vLLM has cut; those between its pieces."""
    between = {p.submod_name: p.graph.graph for p in pieces if p.is_splitting_graph}
    return [
        call
        for node in cut.graph.find_nodes(op="call_module")
        if node.target in between
        for call in graph_order(between[node.target], splits)
    ]


def compare_orders(found: list[Call], expected: Iterable[Call]) -> None:
    """Refuse another order than the expected one.

    Raises:
        PassError: says which operator is not where it belongs.
    """
    for number, (want, got) in enumerate(_pairs(list(expected), found)):
        if want != got:
            raise PassError(
                f"vLLM's pieces run {_text(got)} where the schedule has {_text(want)}, as "
                f"splitting operator {number}",
                remedy="this is a defect of the backend; please report it",
            )


def _pairs(a: list[Call], b: list[Call]) -> Iterator[tuple[Call | None, Call | None]]:
    for i in range(max(len(a), len(b))):
        yield (a[i] if i < len(a) else None, b[i] if i < len(b) else None)


def _text(call: Call | None) -> str:
    return "nothing" if call is None else f"{call[0]}({', '.join(map(str, call[1]))})"


def _calls(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> Iterator[Any]:
    for statement in function.body:
        value = getattr(statement, "value", None)
        if not isinstance(value, ast.Call):
            continue
        called = value.func
        if isinstance(called, ast.Subscript):
            yield ast.literal_eval(called.slice)
        elif isinstance(called, ast.Name) and called.id.startswith(_INLINED):
            yield from _calls(functions[called.id], functions)
        elif ast.unparse(called).startswith("torch.ops."):
            _, _, namespace, name, *_ = ast.unparse(called).split(".")
            given = [*value.args, *(keyword.value for keyword in value.keywords)]
            yield (
                f"{namespace}::{name}",
                _constants(a.value for a in given if isinstance(a, ast.Constant)),
            )


def _constants(arguments: Iterable[Any]) -> tuple[int | str, ...]:
    return tuple(argument for argument in arguments if type(argument) in (int, str))
