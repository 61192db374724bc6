"""Symbolic sizes of the two-stage program, for a compiler that knows only those of the step.

The lengths A and B of the stages are inputs of the program. Both become symbols of their own,
next to the P rows that vLLM's inputs have: A and B are at least one, and A + B is at most P.
Whatever else a compiler assumes is refused, because nothing checks it when a step comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from afd_graph import _compat
from afd_graph.errors import PassError
from afd_graph.vllm.split import LENGTHS


def give_values(gm: fx.GraphModule, captured: fx.GraphModule) -> tuple[torch.SymInt, ...]:
    """Compute ``example_value`` of every node of ``gm``.

    Args:
        gm: ``captured`` itself, or the two-stage program that was made of it.
        captured: its inputs have values.

    Returns:
        The lengths of the stages, where ``gm`` has them.
    """
    inputs = captured.graph.find_nodes(op="placeholder")
    known = {node.name: node.meta["example_value"] for node in inputs}
    lengths: tuple[torch.SymInt, ...] = ()
    if gm is not captured:
        rows = next(value for value in known.values() if isinstance(value, torch.SymInt))
        lengths = new_lengths(captured.graph, rows)
        known.update(zip(LENGTHS, lengths, strict=True))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = known[node.name]
    _compat.propagate_example_values(gm)
    gm.recompile()
    return lengths


def new_lengths(graph: fx.Graph, rows: torch.SymInt) -> tuple[torch.SymInt, ...]:
    """Symbols for the lengths of the stages, beside that for the ``rows`` of ``graph``.

    Their examples are unlike each other and, together, unlike that of ``rows``: a compiler that
    compares sizes by their examples never takes two of them for one.
    """
    example = _compat.size_hint(rows)
    examples = (max(3, example // 2 - 1), max(2, example // 2 - 2))
    return tuple(
        _compat.new_size_symbol(graph, name, hint)
        for name, hint in zip(LENGTHS, examples, strict=True)
    )


def refuse_assumptions(
    conditions: Sequence[Any], inputs: Sequence[Any], lengths: Sequence[torch.SymInt]
) -> None:
    """Refuse conditions on the lengths that do not follow from how a step is cut.

    Args:
        conditions: symbolic.
        inputs: of the captured graph; its symbolic sizes are the rows.
        lengths: of the stages.

    Raises:
        PassError: says which condition.
    """
    spare = sympy.Symbol("spare", integer=True, nonnegative=True)
    stages = [sympy.Symbol(name, integer=True, nonnegative=True) + 1 for name in LENGTHS]
    known = {size.node.expr: stage for size, stage in zip(lengths, stages, strict=True)}
    for size in inputs:
        if isinstance(size, torch.SymInt):
            known[size.node.expr] = sum(stages) + spare
    for condition in conditions:
        if sympy.simplify(condition.subs(known, simultaneous=True)) != sympy.true:
            raise PassError(
                f"the compiler of the pieces assumed {condition} of the lengths of the stages",
                remedy="this is a defect of the backend; please report it",
            )
