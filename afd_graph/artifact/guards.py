"""What a captured program assumes about its inputs, checked before every step.

A program was traced with some sizes fixed and some variable. The variable ones have a least value
and relations (all caches are equally long); the fixed ones and the dtypes are what they were. All
of it is a list of conditions over the inputs: JSON values, evaluated by
:mod:`afd_graph.size_expressions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.artifact.errors import GuardError
from afd_graph.errors import UnsupportedError
from afd_graph.size_expressions import SizeExpressionError, evaluator, text, tree_of
from afd_graph.step import SizeReader
from afd_graph.stored_graph import constant, constant_name


@dataclass(frozen=True)
class InputGuard:
    """One input: its path, dtype, and each size as a tree."""

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Guards:
    """What must hold for the inputs of a step; positions in trees count these inputs."""

    inputs: tuple[InputGuard, ...]
    conditions: tuple[Any, ...] = ()

    @classmethod
    def of(cls, graph: fx.Graph, names: Sequence[tuple[int, str]]) -> Guards:
        """The guards of a captured graph.

        Args:
            graph: after the passes, which may have added guards.
            names: position among the graph's inputs, and path, of each input of a step.

        Raises:
            UnsupportedError: something is assumed about a size that is not one of the inputs'.
        """
        nodes = graph.find_nodes(op="placeholder")
        step = {position: i for i, (position, _) in enumerate(names)}
        places = {
            symbol: ["dim", step[place[1]], place[2]]
            for symbol, place in SizeReader(graph).places.items()
            if place[0] == "dim" and place[1] in step
        }
        inputs = []
        for position, name in names:
            value = nodes[position].meta["val"]
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"the input {name} is a number, not a tensor",
                    remedy="artifacts take tensors only; make it a tensor or a constant",
                )
            shape = tuple(_tree(size, places) for size in value.shape)
            inputs.append(InputGuard(name, value.dtype, shape))
        conditions = []
        for condition in _compat.assumed(graph, set(places)):
            try:
                conditions.append(tree_of(condition, places))
            except SizeExpressionError as error:
                raise UnsupportedError(
                    f"the captured graph assumes {condition}, which is not about its inputs' sizes",
                    remedy="please report the model",
                ) from error
        return cls(tuple(inputs), tuple(conditions))

    def checker(self) -> Callable[[Sequence[Any]], None]:
        """A function that raises :class:`GuardError` for inputs that do not fit."""
        # A size that is read from its own place defines a variable: nothing to compare.
        sizes = [
            [(dim, tree, evaluator(tree)) for dim, tree in enumerate(guard.shape)]
            for guard in self.inputs
        ]
        free = [
            [tree == ["dim", i, dim] for dim, tree in enumerate(guard.shape)]
            for i, guard in enumerate(self.inputs)
        ]
        conditions = [(tree, evaluator(tree)) for tree in self.conditions]

        def check(inputs: Sequence[Any]) -> None:
            for guard, value in zip(self.inputs, inputs, strict=True):
                if value.dtype != guard.dtype or value.dim() != len(guard.shape):
                    raise GuardError(
                        f"{guard.name} is {value.dtype} with {value.dim()} dimensions, expected "
                        f"{guard.dtype} with {len(guard.shape)}"
                    )
            for i, (guard, value) in enumerate(zip(self.inputs, inputs, strict=True)):
                for (dim, tree, read), defines in zip(sizes[i], free[i], strict=True):
                    if not defines and value.shape[dim] != read(inputs):
                        raise GuardError(
                            f"{guard.name} has size {value.shape[dim]} in dimension {dim}, "
                            f"expected {self._named(tree)} = {read(inputs)}"
                        )
            for tree, read in conditions:
                if not read(inputs):
                    raise GuardError(f"the sizes break {self._named(tree)}")

        return check

    def describe(self) -> list[str]:
        """One line an input, for people."""
        return [
            f"{guard.name}: {constant_name(guard.dtype)} "
            f"[{', '.join(self._named(tree) for tree in guard.shape)}]"
            for guard in self.inputs
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "inputs": [
                {"name": g.name, "dtype": constant_name(g.dtype), "shape": list(g.shape)}
                for g in self.inputs
            ],
            "conditions": list(self.conditions),
        }

    @classmethod
    def from_json(cls, stored: Any) -> Guards:
        """Read what :meth:`to_json` wrote; what is malformed raises any exception."""
        inputs = tuple(
            InputGuard(str(g["name"]), constant("dtype", g["dtype"]), tuple(g["shape"]))
            for g in stored["inputs"]
        )
        guards = cls(inputs, tuple(stored["conditions"]))
        guards.checker()  # refuses malformed trees
        return guards

    def _named(self, tree: Any) -> str:
        if isinstance(tree, list) and tree[0] == "dim" and 0 <= tree[1] < len(self.inputs):
            return f"{self.inputs[tree[1]].name}.{tree[2]}"
        if isinstance(tree, list) and tree[0] not in ("dim", "input"):
            return f"{tree[0]}({', '.join(self._named(part) for part in tree[1:])})"
        return text(tree)


def _tree(size: int | torch.SymInt, places: dict[Any, Any]) -> Any:
    return tree_of(size.node.expr, places) if isinstance(size, torch.SymInt) else int(size)
