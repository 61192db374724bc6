"""A MoE layer of vLLM-Ascend, opened: gate, top-k and shared experts here, experts elsewhere.

vLLM-Ascend keeps vLLM's opaque operators and replaces what is inside. Version 0.18 names the
layer's own module, later ones its *runner*, whose weights are in ``routed_experts``. Only the plain
case is opened: unquantised experts in the ordinary format, one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from afd_graph.errors import UnsupportedError
from afd_graph.ffn.program import Expression, FFNProgram

_PLAIN = "AscendUnquantizedFusedMoEMethod"
_ND = 2
"""CANN's number of the ordinary tensor format."""


def check_ascend_layer(layer: Any, name: str) -> None:
    """Refuse a layer whose experts cannot be taken out.

    Raises:
        UnsupportedError: why, by name.
    """
    experts = experts_of(layer)
    method = experts.quant_method
    problems: dict[str, Any] = {
        f"its experts are computed by {type(method).__name__}": type(method).__name__ != _PLAIN,
        "its experts are mapped to ranks": getattr(layer, "_expert_map", None) is not None
        or getattr(layer, "log2phy", None) is not None,
        "some of its experts compute nothing": getattr(experts, "zero_expert_num", 0),
        "it routes by token id": getattr(layer, "tid2eid", None) is not None,
        "the weights of the top-k are applied before the experts": getattr(
            layer, "apply_router_weight_on_input", False
        ),
        "its experts have biases": method.moe.has_bias,
        "its experts have LoRA": getattr(experts, "_ascend_moe_lora_context", None) is not None,
        "its rows are transformed around the experts": any(
            getattr(layer, name, None) is not None
            for name in ("routed_input_transform", "_routed_input_transform")
        ),
        f"its activation is {activation_of(layer)}": activation_of(layer) != "silu"
        or getattr(experts, "swiglu_limit", 0),
        "its ranks share the experts": layer.moe_config.ep_size > 1 or layer.moe_config.tp_size > 1,
        "its weights are a list": not isinstance(
            getattr(experts, "w13_weight", None), torch.Tensor
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise UnsupportedError(
                f"the experts of {name} cannot leave the layer: {problem}",
                remedy="run this model without the AFD backend",
            )


def experts_of(layer: Any) -> Any:
    """The module that has the expert weights."""
    return getattr(layer, "routed_experts", layer)


def activation_of(layer: Any) -> str:
    """Name of the activation."""
    activation = layer.activation
    return str(getattr(activation, "value", activation))


def route(
    layer: Any, hidden: torch.Tensor, router_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of the top-k, as the layer itself computes them.

    Args:
        layer: of vLLM-Ascend.
        hidden: ``[n, hidden]``.
        router_logits: ``[n, experts]``; ``hidden`` again where the gate is inside the layer.

    Returns:
        Weights ``[n, k]`` in fp32, rounded to the dtype of ``hidden`` as the layer does; ids
        ``[n, k]`` in int32.
    """
    from vllm_ascend.ops.fused_moe.experts_selector import select_experts

    if layer.is_internal_router:
        router_logits = torch.nn.functional.linear(hidden.float(), layer.gate.weight_fp32)
    # Later versions keep the factor under another name, since their base class applies its own.
    factor = getattr(layer, "_original_routed_scaling_factor", None)
    weights, ids = select_experts(
        hidden_states=hidden,
        router_logits=router_logits,
        top_k=layer.top_k,
        use_grouped_topk=layer.use_grouped_topk,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor if factor is None else factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )
    return weights.to(hidden.dtype).float(), ids.to(torch.int32)


def shared(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """The answer of the shared experts, ``[n, hidden]``, in the layer's own two parts."""
    return layer._shared_experts_part2(rows, layer._shared_experts_part1(rows))


def ascend_program(number: int, name: str, layer: Any) -> FFNProgram:
    """The routed experts of a layer, over its weights as vLLM-Ascend packs them.

    They are ``[experts, hidden, 2 * inner]``, gate before up, and ``[experts, inner, hidden]``:
    what the grouped products take, without a copy.

    Raises:
        UnsupportedError: they are in a format of the NPU, whose memory is not that of the shape.
    """
    w13, w2 = _plain_weights(layer, name)
    graph = fx.Graph()
    rows, counts = graph.placeholder("rows"), graph.placeholder("counts")
    up, down = graph.placeholder("w13"), graph.placeholder("w2")
    product, aten = torch.ops.afd.grouped_mm.default, torch.ops.aten
    both = graph.call_function(product, (rows, up, counts))
    gate, value = (
        graph.call_function(aten.slice.Tensor, (both, 1, start, start + w2.shape[1]))
        for start in (0, w2.shape[1])
    )
    inner = graph.call_function(
        aten.mul.Tensor, (graph.call_function(aten.silu.default, (gate,)), value)
    )
    graph.output(graph.call_function(product, (inner, down, counts)))
    return FFNProgram(
        layer=number,
        name=name,
        num_experts=w13.shape[0],
        hidden_size=w13.shape[1],
        dtype=w13.dtype,
        routed=Expression(graph, [(f"{name}.w13", w13), (f"{name}.w2", w2)]),
        key=f"layer {number}",
    )


def _plain_weights(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    experts = experts_of(layer)
    w13, w2 = experts.w13_weight.data, experts.w2_weight.data
    for weight in (w13, w2):
        if weight.device.type == "npu":
            import torch_npu

            if torch_npu.get_npu_format(weight) != _ND:
                raise UnsupportedError(
                    f"the expert weights of {name} are in a format of the NPU",
                    remedy="set VLLM_ASCEND_ENABLE_NZ=0, and leave fused MC2 off",
                )
    return w13, w2
