"""Graphs and expert programs as plain dicts of JSON values; no pickle, no code.

A graph is stored as its nodes: placeholders, calls and one output. A call names its target, an
operator overload of ``torch.ops`` (``"aten.mul.Tensor"``) or one of the few Python operators that
symbolic sizes need (``"operator.add"``). Reading a graph back looks these names up and builds
nodes; nothing is executed, and a name that is not an operator overload is an error.

Literals are themselves where JSON has them; everything else is a dict with one tag::

    {"node": name}  {"tuple": [...]}  {"dtype": "float32"}  {"device": "cpu"}
    {"memory_format": "contiguous_format"}  {"layout": "strided"}  {"float": "inf"}

Metadata of nodes is not stored.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from afd_graph._compat import OpOverload
from afd_graph.errors import AFDError
from afd_graph.ffn.program import Expression, FFNProgram

FORMAT = 1

_OVERLOAD = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{function.__name__}": function
        for function in (
            *(operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv),
            *(operator.truediv, operator.mod, operator.pow, operator.neg, operator.eq),
            *(operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
            *(operator.and_, operator.or_, operator.not_),
        )
    },
    **{
        f"torch.{function.__name__}": function
        for function in (
            *(torch.sym_max, torch.sym_min, torch.sym_not),
            *(torch.sym_int, torch.sym_float, torch.sym_ite),
        )
    },
}
_OPERATOR_NAMES = {function: name for name, function in _OPERATORS.items()}
_CONSTANTS = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}


class SerializeError(AFDError, ValueError):
    """A graph holds what cannot be stored, or a stored graph is malformed."""


def graph_to_dict(graph: fx.Graph) -> dict[str, Any]:
    """Describe ``graph`` by JSON values.

    Raises:
        SerializeError: names the node and what it holds: a target that is no operator overload,
            a ``get_attr`` (lift it to a placeholder), or an argument that is no plain literal.
    """
    return {"format": FORMAT, "nodes": [_node_to_dict(node) for node in graph.nodes]}


def graph_from_dict(stored: Mapping[str, Any]) -> fx.Graph:
    """Build the graph that :func:`graph_to_dict` described; runs none of it.

    Raises:
        SerializeError: other format, unknown operator (named), or malformed.
    """
    if stored.get("format") != FORMAT:
        raise SerializeError(
            f"a graph of format {stored.get('format')!r}; this version reads {FORMAT}",
            remedy="store the graph again with this version",
        )
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for entry in stored["nodes"]:
        name, op = entry.get("name"), entry.get("op")
        if not isinstance(name, str) or name in nodes:
            raise SerializeError(f"node name {name!r} is missing or taken")
        args = tuple(_decode(value, nodes, name) for value in entry.get("args", ()))
        kwargs = {k: _decode(v, nodes, name) for k, v in entry.get("kwargs", {}).items()}
        if op == "placeholder":
            nodes[name] = graph.create_node(op, str(entry["target"]), args, {}, name=name)
        elif op == "call_function":
            target = _target(entry.get("target"), name)
            nodes[name] = graph.create_node(op, target, args, kwargs, name=name)
        elif op == "output":
            nodes[name] = graph.create_node(op, "output", args, {}, name=name)
        else:
            raise SerializeError(f"a stored node is a {op!r}", node=name)
    graph.lint()
    return graph


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
        "dtype": _constant_name(program.dtype),
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
    dtype = _constant("dtype", stored["dtype"], None)
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


def _node_to_dict(node: fx.Node) -> dict[str, Any]:
    stored: dict[str, Any] = {"name": node.name, "op": node.op}
    if node.op == "placeholder":
        stored["target"] = node.target
    elif node.op == "call_function":
        stored["target"] = _target_name(node)
    elif node.op != "output":
        raise SerializeError(
            f"a {node.op} of {node.target!r} cannot be stored",
            node=node.name,
            remedy="lift it to a placeholder",
        )
    if node.args:
        stored["args"] = [_encode(value, node) for value in node.args]
    if node.kwargs:
        stored["kwargs"] = {key: _encode(value, node) for key, value in node.kwargs.items()}
    return stored


def _target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target)
    name = None if isinstance(target, str) else _OPERATOR_NAMES.get(target)
    if name is None:
        raise SerializeError(
            f"a call of {target!r} cannot be stored: it is no operator overload",
            node=node.name,
            remedy="use an operator of torch.ops, with its overload",
        )
    return name


def _target(name: object, node: str) -> Callable[..., Any]:
    if isinstance(name, str):
        if name in _OPERATORS:
            return _OPERATORS[name]
        if _OVERLOAD.fullmatch(name):
            found: Any = torch.ops
            for part in name.split("."):
                found = getattr(found, part, None)
            if isinstance(found, OpOverload):
                return found
    raise SerializeError(
        f"the operator {name!r} is not known here",
        node=node,
        remedy="import the module that registers it, or store the graph again",
    )


def _encode(value: Any, node: fx.Node) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, tuple):
        return {"tuple": [_encode(part, node) for part in value]}
    if isinstance(value, list):
        return [_encode(part, node) for part in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for tag, kind in _CONSTANTS.items():
        if isinstance(value, kind):
            return {tag: _constant_name(value)}
    raise SerializeError(
        f"an argument {value!r} of type {type(value).__name__} cannot be stored",
        node=node.name,
        remedy="pass it as an input of the graph",
    )


def _decode(value: Any, nodes: Mapping[str, fx.Node], node: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_decode(part, nodes, node) for part in value]
    if isinstance(value, dict) and len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "node" and content in nodes:
            return nodes[content]
        if tag == "tuple" and isinstance(content, list):
            return tuple(_decode(part, nodes, node) for part in content)
        if tag == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if tag == "device" and isinstance(content, str):
            return torch.device(content)
        if tag in _CONSTANTS:
            return _constant(tag, content, node)
    raise SerializeError(f"a stored argument is malformed: {value!r}", node=node)


def _constant_name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _constant(tag: str, name: object, node: str | None) -> Any:
    value = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(value, _CONSTANTS[tag]):
        raise SerializeError(f"no {tag} is called {name!r}", node=node)
    return value
