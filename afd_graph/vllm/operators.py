"""What vLLM's operators are called in a captured graph, and how their arguments are read."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from afd_graph.errors import UnsupportedError

KV_UPDATES = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
"""They write keys and values to the cache, by the slot mapping of the forward context."""

ATTENTIONS = (
    "vllm::unified_attention_with_output",
    "vllm::unified_mla_attention_with_output",
    "vllm::mla_forward",
)
"""They attend by the metadata of the forward context, and write to a given output.

``mla_forward`` is vLLM-Ascend's: projections, cache update and attention in one.
"""

STAGED = (*KV_UPDATES, *ATTENTIONS)
"""Operators that have to see the metadata of their own stage."""

PREFETCHES = ("vllm::prefetch_preprocess", "vllm::prefetch_postprocess")
"""vLLM-Ascend's prefetch of weights, which counts the layers of a step as they are called."""

FUSED_MOE = "_C::cpu_fused_moe"
"""The routed experts of a layer where vLLM's CPU platform traces the layer inline."""

OPAQUE_MOE = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""A whole MoE layer as one operator: what vLLM traces for accelerators."""

COUNTED_NAME = "from_forward_context"
"""Layer name of old versions that stands for 'the next MoE layer in order of calls'."""


def operator_name(node: fx.Node) -> str | None:
    """``namespace::name`` of a call of a registered operator; None for anything else."""
    target = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload):
        return target._schema.name
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name
    return None


def reads_context(node: fx.Node) -> bool:
    """Whether a call finds its layer in the forward context, and is not known to this package."""
    name = operator_name(node)
    if name is None or not name.startswith("vllm::") or name in STAGED:
        return False
    names = (argument.name for argument in overload(node)._schema.arguments)
    return name in PREFETCHES or "layer_name" in names


def overload(node: fx.Node) -> OpOverload:
    """The overload that a call of an operator means; Dynamo leaves packets in its graphs."""
    target = node.target
    if isinstance(target, OpOverloadPacket):
        return getattr(target, target.overloads()[0])
    assert isinstance(target, OpOverload)
    return target


def arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of an operator call by name, defaults filled in."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(overload(node)._schema.arguments):
        if position < len(node.args):
            found[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value
    return found


def layer_name(argument: Any, node: fx.Node) -> str:
    """The layer's name, in whichever of vLLM's three forms it is given.

    A string; a graph input that stands for a ``LayerName`` object; such an object itself.

    Raises:
        UnsupportedError: the name of old versions that counts calls, or something unknown.
    """
    value = argument
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value", value.meta.get("val"))
    value = getattr(value, "real_obj", value)  # a fake of an opaque object
    value = getattr(value, "value", value)
    if value == COUNTED_NAME:
        raise UnsupportedError(
            "this vLLM names MoE layers by counting calls, and a split step calls each twice",
            node=node.name,
            remedy="set --compilation-config '{\"fast_moe_cold_start\": false}'",
        )
    if not isinstance(value, str):
        raise UnsupportedError(
            f"the layer name of {operator_name(node)} has the unknown form {argument!r}",
            node=node.name,
            remedy="use a vLLM version of the table in docs/vllm.md",
        )
    return value
