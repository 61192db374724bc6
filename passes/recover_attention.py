"""Turn what AOTAutograd made of attention back into ``afd.attention``.

:func:`afd_graph.attention.keep_attention_whole` works on the captured graph. Where only the
functional one is at hand, ``scaled_dot_product_attention`` has become something else already:

1. a fused kernel of the device, told by its name;
2. two matrix products around a ``_safe_softmax``, told by their shape, with the scale on both
   operands and the mask added in between.

A kernel with dropout, an unknown layout or a mask that is not a plain one stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from afd_graph.passes.token_flow import ATTENTION

aten = torch.ops.aten

_LEFT_UP_CAUSAL, _RIGHT_DOWN_CAUSAL = 2, 3
"""Sparse modes of the NPU kernel."""

_WINDOW = ("pre_tockens", "next_tockens", "pre_tokens", "next_tokens")
_UNLIMITED = 2147483647
"""What each query sees before and behind it, as the versions of the NPU kernel spell it."""


def recover_attention(graph: fx.Graph) -> int:
    """Rewrite ``graph`` in place; returns how many kernels became ``afd.attention``."""
    recovered = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._safe_softmax.default:
            recovered += _recover_products(graph, node)
            continue
        read = _READERS.get(str(node.target))
        if read is None or any(user.target is not operator.getitem for user in node.users):
            continue
        outputs = {user.args[1]: user for user in node.users}
        meant = read(graph, node) if set(outputs) == {0} else None
        if meant is None:
            continue
        with graph.inserting_before(outputs[0]):
            new = graph.call_function(ATTENTION, meant)
        new.meta = dict(outputs[0].meta)
        outputs[0].replace_all_uses_with(new)
        graph.erase_node(outputs[0])
        graph.erase_node(node)
        recovered += 1
    return recovered


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = node.target._schema  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema.arguments}
    names = [a.name for a in schema.arguments]
    return {**values, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _flash_on_cpu(graph: fx.Graph, node: fx.Node) -> tuple[Any, ...] | None:
    given = _arguments(node)
    if given["dropout_p"]:
        return None
    causal = given["is_causal"]
    if causal and not _equally_long(given["query"], given["key"]):
        return None
    rows = (given["query"], given["key"], given["value"])
    return (*rows, given["attn_mask"], causal, given["scale"], False)


def _fusion_on_npu(graph: fx.Graph, node: fx.Node) -> tuple[Any, ...] | None:
    given = _arguments(node)
    unusual = any(given.get(name) is not None for name in ("pse", "padding_mask", "prefix", "sink"))
    if unusual or given["input_layout"] != "BNSD" or given["keep_prob"] != 1.0:
        return None
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask, mode = given["atten_mask"], given["sparse_mode"]
    if mode == 0 and min(given[n] for n in _WINDOW if n in given) < _UNLIMITED:
        return None
    causal = mode == _RIGHT_DOWN_CAUSAL or (mode == _LEFT_UP_CAUSAL and _equally_long(query, key))
    if mode and not causal:
        return None
    if causal:
        mask = None
    elif mask is not None:
        if mask.meta["val"].dtype is not torch.bool:
            return None
        mask = _negated(graph, node, mask)  # it marks the hidden
    grouped = query.meta["val"].shape[1] != key.meta["val"].shape[1]
    return (query, key, value, mask, causal, given["scale"], grouped)


def _negated(graph: fx.Graph, before: fx.Node, mask: fx.Node) -> fx.Node:
    """The other truth of ``mask``: what it was negated from, where the dispatch did that."""
    if mask.target in (aten.logical_not.default, aten.bitwise_not.default):
        source = _first(mask)
        if source.meta["val"].dtype is torch.bool:
            return source
    with graph.inserting_before(before):
        other = graph.call_function(aten.logical_not.default, (mask,))
    other.meta = dict(mask.meta)
    return other


def _recover_products(graph: fx.Graph, softmax: fx.Node) -> int:
    """``softmax(scale * q @ scale * k.T + mask) @ v``; returns 1 when that is what it was."""
    scores = _first(softmax)
    mask = None
    if scores.target is aten.add.Tensor:
        scores, mask = scores.all_input_nodes
    inner = _without(scores, aten.view.default)
    outer = _behind(softmax, aten._to_copy.default, aten.expand.default, aten.view.default)
    if inner.target is not aten.bmm.default or outer.target is not aten.bmm.default:
        return 0
    query, key = (_without(n, *_WIDE) for n in inner.all_input_nodes)
    value = _without(outer.all_input_nodes[1], *_WIDE)
    if query.target is not aten.mul.Scalar or key.target is not aten.mul.Scalar:
        return 0
    scale = query.args[1] * key.args[1]  # type: ignore[operator]
    query, key = _first(query), _first(key)
    if key.target is not aten.transpose.int:
        return 0
    rows = [_without(n, aten._to_copy.default) for n in (query, _first(key), value)]
    output = _behind(outer, aten.view.default, last=True)
    dtype = rows[2].meta["val"].dtype
    if output.meta["val"].dtype is not dtype:
        output = _behind(output, aten._to_copy.default, last=True)
    if output.meta["val"].dtype is not dtype:
        return 0
    with graph.inserting_before(output):
        new = graph.call_function(ATTENTION, (*rows, _plain(mask), False, scale, False))
    new.meta = dict(output.meta)
    output.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    return 1


_WIDE = (aten.view.default, aten.expand.default)


def _first(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _without(node: fx.Node, *targets: Any) -> fx.Node:
    """What ``node`` is made of, before one operator of each of ``targets``, outermost first."""
    for target in targets:
        if node.target is target:
            node = _first(node)
    return node


def _behind(node: fx.Node, *targets: Any, last: bool = False) -> fx.Node:
    """Follow single uses through ``targets``; then one more step, unless ``last``."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target not in targets:
            return node if last else user
        node = user
    return node


def _plain(mask: fx.Node | None) -> fx.Node | None:
    """The boolean that was turned into zeros and minus infinity, or the mask as it is."""
    if mask is None or mask.target is not aten.where.self:
        return mask
    visible, zero, hidden = mask.all_input_nodes
    values = [n.args[0] for n in (zero, hidden) if n.target is aten.scalar_tensor.default]
    return visible if values == [0.0, float("-inf")] else mask


def _equally_long(query: fx.Node, key: fx.Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(query.meta["val"].shape[-2] == key.meta["val"].shape[-2])


_READERS: dict[str, Callable[[fx.Graph, fx.Node], tuple[Any, ...] | None]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _flash_on_cpu,
    "npu.npu_fusion_attention.default": _fusion_on_npu,
    "npu.npu_fusion_attention_v2.default": _fusion_on_npu,
    "npu.npu_fusion_attention_v3.default": _fusion_on_npu,
}
"""By name: the NPU kernels exist only where torch_npu is installed."""
