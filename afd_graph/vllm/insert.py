"""Put dispatch and receive where the experts were.

Before: a captured graph and its MoE layers. After, for an inline layer:

    handle = afd.cam_dispatch(hidden, topk_ids, layer, stage=0, channel)
    out    = afd.cam_receive(handle, hidden, topk_weights, layer, stage=0, channel)

An opaque layer is opened first: ``afd::vllm_route`` is its gate and top-k, on this side, and
``afd::vllm_shared`` its shared experts (:mod:`opaque_layer`). The received rows are a fresh
tensor, which the model may scale in place. Buffers that nobody reads any more are removed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from afd_graph.vllm import opaque_layer  # noqa: F401  (registers the operators)
from afd_graph.vllm.match import InlineLayer, OpaqueLayer

afd = torch.ops.afd

_DROPPED_FUNCTIONS = frozenset({torch.empty, torch.empty_like, operator.getitem, math.prod})
_DROPPED_METHODS = frozenset({"flatten", "view", "reshape"})


def insert_dispatch(
    graph: fx.Graph, layers: Sequence[InlineLayer | OpaqueLayer], channel: str
) -> None:
    """Rewrite ``graph`` in place; layers are numbered in order."""
    for number, layer in enumerate(layers):
        if isinstance(layer, InlineLayer):
            _insert_inline(graph, layer, number, channel)
        else:
            _insert_opaque(graph, layer, number, channel)
    _drop_unread(graph)


def _insert_inline(graph: fx.Graph, layer: InlineLayer, number: int, channel: str) -> None:
    with graph.inserting_after(layer.call):
        handle = graph.call_function(
            afd.cam_dispatch.default, (layer.hidden, layer.topk_ids, number, 0, channel)
        )
    received = _receive(graph, handle, layer.hidden, layer.topk_weights, number, channel)
    for node in (handle, received):
        _keep_origin(node, layer.call)
    graph.erase_node(layer.call)
    layer.out.replace_all_uses_with(received)
    graph.erase_node(layer.out)


def _insert_opaque(graph: fx.Graph, layer: OpaqueLayer, number: int, channel: str) -> None:
    hidden = layer.hidden
    tokens = hidden.meta["example_value"].shape[0]
    with graph.inserting_after(layer.call):
        routed = graph.call_function(
            afd.vllm_route.default, (hidden, layer.router_logits, layer.input_ids, layer.name)
        )
    with graph.inserting_after(routed):
        weights = graph.call_function(operator.getitem, (routed, 0))
    with graph.inserting_after(weights):
        ids = graph.call_function(operator.getitem, (routed, 1))
    new = hidden.meta["example_value"].new_empty
    weights.meta["example_value"] = new((tokens, 1))
    ids.meta["example_value"] = new((tokens, 1), dtype=torch.int32)
    with graph.inserting_after(ids):
        handle = graph.call_function(afd.cam_dispatch.default, (hidden, ids, number, 0, channel))
    received = _receive(graph, handle, hidden, weights, number, channel)
    made = [routed, weights, ids, handle, received]
    answers = [received]
    if layer.has_shared:
        rows = hidden if layer.shared_input is None else layer.shared_input
        with graph.inserting_after(handle):
            shared = graph.call_function(afd.vllm_shared.default, (rows, layer.name))
        shared.meta["example_value"] = rows.meta["example_value"]
        made.append(shared)
        answers = [shared, received]
    for node in made:
        _keep_origin(node, layer.call)
    for user in list(layer.call.users):
        if layer.has_shared:
            user.replace_all_uses_with(answers[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    if not layer.has_shared:
        layer.call.replace_all_uses_with(received)
    graph.erase_node(layer.call)


def _receive(
    graph: fx.Graph,
    handle: fx.Node,
    hidden: fx.Node,
    weights: fx.Node,
    number: int,
    channel: str,
) -> fx.Node:
    with graph.inserting_after(handle):
        received = graph.call_function(
            afd.cam_receive.default, (handle, hidden, weights, number, 0, channel)
        )
    value = hidden.meta["example_value"]
    received.meta["example_value"] = value
    handle.meta["example_value"] = value.new_empty((1,), dtype=torch.int64)
    return received


def _keep_origin(node: fx.Node, origin: fx.Node) -> None:
    for key in ("nn_module_stack", "stack_trace"):
        if key in origin.meta:
            node.meta.setdefault(key, origin.meta[key])


def _drop_unread(graph: fx.Graph) -> None:
    """Remove allocations, and views of them, that nothing uses."""
    for node in reversed(graph.nodes):
        dropped = (node.op == "call_function" and node.target in _DROPPED_FUNCTIONS) or (
            node.op == "call_method" and node.target in _DROPPED_METHODS
        )
        if dropped and not node.users:
            graph.erase_node(node)
