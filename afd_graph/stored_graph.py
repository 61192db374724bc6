"""Graphs as plain dicts of JSON values; no pickle, no code.

A graph is stored as its nodes: placeholders, calls and one output. A call names its target, an
operator overload of ``torch.ops`` (``"aten.mul.Tensor"``) or one of the few Python operators that
symbolic sizes need (``"operator.add"``). Reading a graph back looks these names up and builds
nodes; nothing is executed, and a name that is not an operator overload is an error. PyTorch makes
Python of a graph before it runs it: every name that would appear there must be an identifier.

Literals are themselves where JSON has them; everything else is a dict with one tag::

    {"node": name}  {"tuple": [...]}  {"dtype": "float32"}  {"device": "cpu"}
    {"memory_format": "contiguous_format"}  {"layout": "strided"}  {"float": "inf"}

Metadata of nodes is not stored.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from afd_graph._compat import OpOverload
from afd_graph.errors import AFDError

FORMAT = 1

_OVERLOAD = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|meta)(:[0-9]{1,3})?", re.ASCII)
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


def graph_from_dict(
    stored: Mapping[str, Any], find: Callable[[str], Callable[..., Any] | None] | None = None
) -> fx.Graph:
    """Build the graph that :func:`graph_to_dict` described; runs none of it.

    Args:
        stored: the description.
        find: the operator of a name, None for one that must not be called; any operator overload
            of ``torch.ops`` when left out.

    Raises:
        SerializeError: other format, unknown operator (named), or malformed.
    """
    if not isinstance(stored, Mapping) or stored.get("format") != FORMAT:
        found = stored.get("format") if isinstance(stored, Mapping) else type(stored).__name__
        raise SerializeError(
            f"a graph of format {found!r}; this version reads {FORMAT}",
            remedy="store the graph again with this version",
        )
    entries = stored.get("nodes")
    if not isinstance(entries, list) or not entries:
        raise SerializeError("a stored graph has no list of nodes")
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for position, entry in enumerate(entries):
        name: Any = entry.get("name") if isinstance(entry, dict) else None
        if not _is_identifier(name) or name in nodes:
            raise SerializeError(f"node name {_short(name)} is missing, taken or no identifier")
        op = entry.get("op")
        if op not in ("placeholder", "call_function", "output"):
            raise SerializeError(f"a stored node is a {_short(op)}", node=name)
        if (op == "output") != (position == len(entries) - 1):
            raise SerializeError("the output is not the last node", node=name)
        nodes[name] = _create(graph, entry, name, nodes, find or find_operator)
    graph.lint()
    return graph


def _create(
    graph: fx.Graph,
    entry: Mapping[str, Any],
    name: str,
    nodes: Mapping[str, fx.Node],
    find: Callable[[str], Callable[..., Any] | None],
) -> fx.Node:
    args, kwargs, op = entry.get("args", []), entry.get("kwargs", {}), entry.get("op")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise SerializeError("the arguments of a stored node are malformed", node=name)
    if not all(_is_identifier(key) for key in kwargs):
        raise SerializeError("the name of an argument is no identifier", node=name)
    decoded = tuple(_decode(value, nodes, name) for value in args)
    if op == "call_function":
        told = entry.get("target")
        target = find(told) if isinstance(told, str) else None
        if target is None:
            raise SerializeError(
                f"the operator {_short(told)} is not known here",
                node=name,
                remedy="import the module that registers it, or store the graph again",
            )
        named = {key: _decode(value, nodes, name) for key, value in kwargs.items()}
        return graph.create_node(op, target, decoded, named, name=name)
    if kwargs:
        raise SerializeError(f"a stored {_short(op)} has named arguments", node=name)
    if op == "placeholder" and not args and _is_identifier(entry.get("target")):
        return graph.create_node(op, entry["target"], (), {}, name=name)
    if op == "output" and len(decoded) == 1:
        return graph.create_node(op, "output", decoded, {}, name=name)
    raise SerializeError(f"a stored node is a malformed {_short(op)}", node=name)


def _node_to_dict(node: fx.Node) -> dict[str, Any]:
    stored: dict[str, Any] = {"name": node.name, "op": node.op}
    if node.op == "placeholder":
        stored["target"] = node.target
    elif node.op == "call_function":
        stored["target"] = operator_name(node)
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


def operator_name(node: fx.Node) -> str:
    """What a stored graph calls the operator of a node."""
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


def find_operator(name: str) -> Callable[..., Any] | None:
    """The operator that a stored graph calls ``name``; None when there is none."""
    if name in _OPERATORS:
        return _OPERATORS[name]
    if not _OVERLOAD.fullmatch(name):
        return None
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


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
            return {tag: constant_name(value)}
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
        if tag == "node" and isinstance(content, str) and content in nodes:
            return nodes[content]
        if tag == "tuple" and isinstance(content, list):
            return tuple(_decode(part, nodes, node) for part in content)
        if tag == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if tag == "device" and isinstance(content, str) and _DEVICE.fullmatch(content):
            return torch.device(content)
        if tag in _CONSTANTS:
            return constant(tag, content, node)
    raise SerializeError(f"a stored argument is malformed: {_short(value)}", node=node)


def constant_name(value: object) -> str:
    """The name of a dtype, layout or memory format."""
    return str(value).removeprefix("torch.")


def constant(tag: str, name: object, node: str | None = None) -> Any:
    """The dtype, layout or memory format (``tag``) of that name."""
    value = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(value, _CONSTANTS[tag]):
        raise SerializeError(f"no {tag} is called {_short(name)}", node=node)
    return value


def _is_identifier(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
