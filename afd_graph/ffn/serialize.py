"""Expert programs as plain dicts of JSON values, their weights aside (:mod:`stored_graph`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from afd_graph.ffn.program import Expression, FFNProgram
from afd_graph.stored_graph import (
    FORMAT,
    SerializeError,
    constant,
    constant_name,
    graph_from_dict,
    graph_to_dict,
)


def program_to_dict(program: FFNProgram) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Describe ``program``; returns the dict and the weights it refers to by key.

    The tensors are the program's own, not copies.
    """
    tensors: dict[str, torch.Tensor] = {}
    stored = {
        "format": FORMAT,
        "layer": program.layer,
        "name": program.name,
        "num_experts": program.num_experts,
        "hidden_size": program.hidden_size,
        "dtype": constant_name(program.dtype),
        "key": program.key,
        "routed": _expression_to_dict(program.routed, "routed", tensors),
        "shared": None
        if program.shared is None
        else _expression_to_dict(program.shared, "shared", tensors),
    }
    return stored, tensors


def program_from_dict(stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> FFNProgram:
    """Build the program that :func:`program_to_dict` described, over ``tensors``.

    Raises:
        SerializeError: malformed, or a weight is missing.
    """
    if stored.get("format") != FORMAT:
        raise SerializeError(
            f"a program of format {stored.get('format')!r}; this version reads {FORMAT}"
        )
    dtype = constant("dtype", stored["dtype"])
    shared = stored["shared"]
    return FFNProgram(
        layer=int(stored["layer"]),
        name=stored["name"],
        num_experts=int(stored["num_experts"]),
        hidden_size=int(stored["hidden_size"]),
        dtype=dtype,
        routed=_expression_from_dict(stored["routed"], tensors),
        shared=None if shared is None else _expression_from_dict(shared, tensors),
        key=stored["key"],
    )


def _expression_to_dict(
    expression: Expression, prefix: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    weights = []
    for index, (name, tensor) in enumerate(expression.weights):
        key = f"{prefix}.{index}"
        tensors[key] = tensor
        weights.append({"name": name, "tensor": key})
    return {"graph": graph_to_dict(expression.graph), "weights": weights}


def _expression_from_dict(
    stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Expression:
    weights = []
    for weight in stored["weights"]:
        if weight["tensor"] not in tensors:
            raise SerializeError(f"the tensor of weight {weight['name']!r} is missing")
        weights.append((weight["name"], tensors[weight["tensor"]]))
    return Expression(graph_from_dict(stored["graph"]), tuple(weights))
