"""The order that in-place writes impose, for graphs that are not functional.

The graph that vLLM compiles writes into buffers, often through views: ``q[..., 64:] = rope``,
``onednn_mm(out!, ...)``. No data edge leads from such a write to the reader of the buffer, only
the order of the graph. This module finds what each node must come after besides its inputs, so
that the graph may be put in another order without changing its meaning.

1. every value but a size has roots: the values whose memory it may share. A view has those of
   its source;
2. a node that reads a root comes after the last node that wrote it;
3. a node that writes a root comes after everything that used it before.

What is not known to give a fresh value counts as a view of all its inputs. A callable that is
neither PyTorch's nor a registered operator is refused by name.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from afd_graph.errors import UnsupportedError
from afd_graph.vllm.operators import overload
from afd_graph.vllm.stage_ops import staged_layer

_INPLACE_FUNCTIONS = frozenset(
    {
        operator.setitem,
        *(getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "pow")),
        *(getattr(operator, f"i{name}") for name in ("and", "or", "xor", "floordiv", "mod")),
    }
)
_FRESH_FUNCTIONS = frozenset(
    {
        *(torch.cat, torch.stack, torch.empty, torch.empty_like, torch.zeros, torch.zeros_like),
        *(torch.ones, torch.ones_like, torch.full, torch.full_like, torch.arange, torch.where),
        *(torch.rsqrt, torch.sigmoid, torch.softmax, torch.topk, torch.mm, torch.bmm),
        *(torch.matmul, torch.mul, torch.add, torch.sub, torch.div, torch.pow, torch.mean),
        *(torch.sum, torch.exp, torch.log, torch.tanh, torch.sqrt, torch.index_select),
        *(torch.gather, torch.nn.functional.embedding, torch.nn.functional.silu),
        *(torch.nn.functional.gelu, torch.nn.functional.linear, torch.nn.functional.softmax),
        *(torch._C._nn.linear, torch._C._nn.gelu, operator.add, operator.sub, operator.mul),
        *(operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.neg),
        *(operator.invert, operator.lt, operator.le, operator.gt, operator.ge, operator.eq),
        *(operator.ne, operator.and_, operator.or_, operator.matmul),
    }
)
_FRESH_METHODS = frozenset(
    {
        *("pow", "mean", "sum", "add", "sub", "mul", "div", "clone", "softmax", "sigmoid", "max"),
        *("min", "topk", "masked_fill", "gather", "index_select", "argsort", "rsqrt", "sqrt"),
        *("exp", "neg", "bool", "new_empty", "new_zeros", "amax", "cumsum", "scatter", "size"),
    }
)


def hidden_needs(graph: fx.Graph) -> Mapping[fx.Node, set[fx.Node]]:
    """What each node must come after, beyond its inputs; nodes without such are left out.

    Attention of a later stage comes after the cache update and the attention of the same layer in
    the stages before: it reads from vLLM's cache what they wrote.

    Raises:
        UnsupportedError: a call that may do anything.
    """
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    written: dict[fx.Node, fx.Node] = {}
    used: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    on_layer: dict[str, list[fx.Node]] = defaultdict(list)
    needs: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in graph.nodes:
        if isinstance(node.meta.get("example_value"), (int, torch.SymInt)):
            roots[node] = frozenset()  # A size has no memory.
            continue
        if node.op in ("placeholder", "get_attr"):
            roots[node] = frozenset({node})
            continue
        writes, shares = effects(node)
        roots[node] = frozenset({node}.union(*(roots[source] for source in shares)))
        touched = frozenset().union(*(roots[source] for source in node.all_input_nodes))
        for root in sorted(touched):
            if root in written:
                needs[node].add(written[root])
        for root in sorted(frozenset().union(*(roots[source] for source in writes))):
            needs[node].update(used[root])
            written[root] = node
            used[root].clear()
        for root in touched:
            used[root].append(node)
        needs[node].discard(node)
        layer = staged_layer(node)
        if layer is not None:
            on_layer[layer].append(node)
    for calls in on_layer.values():
        # Sorting is stable: the calls of a stage stay in their order.
        for before, after in pairwise(sorted(calls, key=_stage)):
            needs[after].add(before)
    return {node: found for node, found in needs.items() if found}


def _stage(call: fx.Node) -> int:
    stage = call.args[0]
    assert isinstance(stage, int)
    return stage


def effects(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The inputs that ``node`` writes, and those whose memory its value may share."""
    inputs = list(node.all_input_nodes)
    if node.op == "output":
        return [], []
    if node.op == "call_method":
        name = str(node.target)
        if name.endswith("_") and not name.endswith("__"):
            return _nodes(node.args[:1]), _nodes(node.args[:1])
        return [], [] if name in _FRESH_METHODS else inputs
    if node.op != "call_function":
        raise _unknown(node)
    target = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _schema_effects(node)
    if target in _INPLACE_FUNCTIONS:
        return _nodes(node.args[:1]), _nodes(node.args[:1])
    written = _nodes([node.kwargs.get("out")])
    if target in _FRESH_FUNCTIONS:
        return written, written
    module = getattr(target, "__module__", None) or ""
    if module.split(".")[0] in ("torch", "_operator", "math", "builtins") or not module:
        if getattr(target, "__name__", "").endswith("_"):
            return _nodes(node.args[:1]), inputs
        return written, inputs
    raise _unknown(node)


def _schema_effects(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    schema = overload(node)._schema
    written: list[Any] = []
    shared: list[Any] = []
    for position, argument in enumerate(schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            written.append(value)
        if any(result.alias_info is not None for result in schema.returns):
            shared.append(value)
    return _nodes(written), _nodes(shared)


def _nodes(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.map_arg(list(values), note)
    return found


def _unknown(node: fx.Node) -> UnsupportedError:
    return UnsupportedError(
        f"the graph calls {node.target!r}, of which it is not known what it writes",
        node=node.name,
        remedy="report the model; on_unsupported='fallback' runs it unsplit",
    )
