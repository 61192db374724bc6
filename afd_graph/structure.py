"""Nested inputs and outputs as flat lists, and back: dictionaries, lists and tuples of tensors.

A *template* is the nesting with numbers in place of the tensors, made of JSON values::

    {"input_ids": 0, "cache": [{"tuple": [1, 2]}, {"tuple": [3, 4]}]}      None stays None

PyTorch has the same as ``torch.utils._pytree``; what is stored in a file must not depend on which
container types were registered there when it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afd_graph.errors import AFDError

MAX_DEPTH = 16
_TUPLE = "tuple"


class StructureError(AFDError, ValueError):
    """Nested values cannot be stored, a template is malformed, or values do not fit one."""


def flatten(value: Any) -> tuple[Any, list[Any]]:
    """The template of nested values, and the values in its order.

    Raises:
        StructureError: a container that is no dict, list or tuple, or a key that is no string.
    """
    leaves: list[Any] = []
    return _template(value, leaves, MAX_DEPTH), leaves


def unflatten(template: Any, leaves: Sequence[Any]) -> Any:
    """Put values in the places of a checked template."""
    if template is None:
        return None
    if isinstance(template, int):
        return leaves[template]
    if isinstance(template, list):
        return [unflatten(part, leaves) for part in template]
    if template.keys() == {_TUPLE}:
        return tuple(unflatten(part, leaves) for part in template[_TUPLE])
    return {key: unflatten(part, leaves) for key, part in template.items()}


def fit(template: Any, value: Any) -> list[Any]:
    """Flatten ``value``, which must be nested as ``template`` says; tuples and lists are equal.

    Raises:
        StructureError: says where they differ.
    """
    leaves: dict[int, Any] = {}
    _fit(template, value, leaves, "")
    return [leaves[position] for position in sorted(leaves)]


def count_leaves(template: Any) -> int:
    """Number of tensors of a template from a file.

    Raises:
        StructureError: it is malformed.
    """
    found: list[int] = []
    _check(template, found, MAX_DEPTH)
    if sorted(found) != list(range(len(found))):
        raise StructureError("a stored structure does not number its tensors")
    return len(found)


def _template(value: Any, leaves: list[Any], depth: int) -> Any:
    if not depth:
        raise StructureError(f"values are nested more than {MAX_DEPTH} deep")
    if value is None:
        return None
    if type(value) is dict:
        if not all(isinstance(key, str) for key in value) or value.keys() == {_TUPLE}:
            raise StructureError(f"the keys {sorted(map(str, value))} cannot be stored")
        return {key: _template(part, leaves, depth - 1) for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = [_template(part, leaves, depth - 1) for part in value]
        return parts if type(value) is list else {_TUPLE: parts}
    if hasattr(value, "__iter__") and not hasattr(value, "shape"):
        raise StructureError(
            f"a {type(value).__name__} cannot be stored",
            remedy="let the model take and return tensors in dictionaries, lists and tuples",
        )
    leaves.append(value)
    return len(leaves) - 1


def _fit(template: Any, value: Any, leaves: dict[int, Any], where: str) -> None:
    if template is None:
        if value is not None:
            raise StructureError(f"{where or 'the value'} must be None")
    elif isinstance(template, int):
        if not hasattr(value, "shape"):
            raise StructureError(f"{where} must be a tensor, got {type(value).__name__}")
        leaves[template] = value
    elif isinstance(template, dict) and template.keys() != {_TUPLE}:
        keys = sorted(value) if isinstance(value, dict) else type(value).__name__
        if keys != sorted(template):
            raise StructureError(
                f"{where or 'the inputs'} must have {sorted(template)}, got {keys}"
            )
        for key, part in template.items():
            _fit(part, value[key], leaves, f"{where}.{key}" if where else key)
    else:
        parts = template[_TUPLE] if isinstance(template, dict) else template
        got = len(value) if isinstance(value, (list, tuple)) else type(value).__name__
        if got != len(parts):
            raise StructureError(f"{where} must be a list of {len(parts)}, got {got}")
        for i, part in enumerate(parts):
            _fit(part, value[i], leaves, f"{where}[{i}]")


def _check(template: Any, found: list[int], depth: int) -> None:
    if not depth:
        raise StructureError(f"a stored structure is nested more than {MAX_DEPTH} deep")
    if template is None:
        return
    if type(template) is int:
        found.append(template)
    elif isinstance(template, list):
        for part in template:
            _check(part, found, depth - 1)
    elif isinstance(template, dict):
        if _TUPLE in template and not (len(template) == 1 and isinstance(template[_TUPLE], list)):
            raise StructureError("a stored structure is malformed")
        for part in template.values():
            _check(part, found, depth - 1)
    else:
        raise StructureError("a stored structure is malformed")
