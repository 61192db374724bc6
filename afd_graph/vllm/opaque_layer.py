"""The parts of an opaque MoE layer of vLLM that stay on the attention side, as operators.

    afd::vllm_route(hidden, router_logits, input_ids, layer) -> (weights [n, k], ids [n, k])
    afd::vllm_shared(rows, layer) -> [n, hidden]

Both find the layer's modules by name in the forward context, as vLLM's own operators do. Where the
gate is inside the layer it runs in the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

from afd_graph.errors import UnsupportedError
from afd_graph.vllm import ascend_layer
from afd_graph.vllm.ascend import is_ascend

_library = torch.library.Library("afd", "FRAGMENT")
_library.define(
    "vllm_route(Tensor hidden, Tensor router_logits, Tensor? input_ids, str layer_name) "
    "-> (Tensor, Tensor)"
)
_library.define("vllm_shared(Tensor rows, str layer_name) -> Tensor")


def moe_layer(name: str) -> Any:
    """The MoE layer ``name`` of the model that runs.

    Raises:
        UnsupportedError: there is none, or its experts cannot be taken out.
    """
    from vllm.forward_context import get_forward_context

    return checked_layer(get_forward_context().no_compile_layers.get(name), name)


def checked_layer(layer: Any, name: str) -> Any:
    """``layer`` if its routed experts are plain ones of this rank.

    Raises:
        UnsupportedError: what cannot be taken out, by name.
    """
    if is_ascend(layer):
        ascend_layer.check_ascend_layer(layer, name)
        return layer
    problem = None
    if layer is None:
        problem = "the model has no such MoE layer"
    elif layer.routed_experts.quant_method.is_monolithic:
        problem = "its kernel routes and computes in one"
    elif layer.moe_config.dp_size > 1 or layer.moe_config.is_sequence_parallel:
        problem = "its experts are spread over data-parallel ranks"
    elif getattr(layer, "shared_expert_gate", None) is not None:
        problem = "its shared experts have a gate that is fused with the router"
    if problem is not None:
        raise UnsupportedError(
            f"the experts of {name} cannot leave the layer: {problem}",
            remedy="run this model without the AFD backend",
        )
    return layer


def _route(
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = moe_layer(layer_name)
    if is_ascend(layer):
        return ascend_layer.route(layer, hidden, router_logits)
    layer.routed_experts._ensure_moe_quant_config_init()
    if layer.gate is not None:
        router_logits, _ = layer.gate(hidden)
    weights, ids = layer.router.select_experts(
        hidden_states=hidden,
        router_logits=router_logits,
        topk_indices_dtype=layer._quant_method.topk_indices_dtype,
        input_ids=input_ids,
    )
    return weights, ids


def _route_fake(
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    top_k = moe_layer(layer_name).moe_config.experts_per_token
    shape = (hidden.shape[0], top_k)
    return hidden.new_empty(shape, dtype=torch.float32), hidden.new_empty(shape, dtype=torch.int32)


def _shared(rows: torch.Tensor, layer_name: str) -> torch.Tensor:
    layer = moe_layer(layer_name)
    if is_ascend(layer):
        return ascend_layer.shared(layer, rows)
    return layer.shared_experts._layer(rows)


def _shared_fake(rows: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(rows)


for _name, _kernel, _fake in (
    ("vllm_route", _route, _route_fake),
    ("vllm_shared", _shared, _shared_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"afd::{_name}", _fake, lib=_library)
    has_side_effect(getattr(torch.ops.afd, _name).default)
