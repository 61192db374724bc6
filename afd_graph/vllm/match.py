"""Find the MoE layers in a graph of vLLM.

Two forms are known. *Inline*, where vLLM's CPU platform traces the layer: gate, top-k and shared
experts are operators of the graph, and the routed experts are one call that writes its output:

    out = empty_like(hidden)
    _C::cpu_fused_moe(out!, hidden, w13, w2, bias13, bias2, topk_weights, topk_ids, ...)

*Opaque*, elsewhere: ``vllm::moe_forward(_shared)`` hides the whole layer, named by its path.

Before: the graph as Dynamo captured it. After: unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.passes.graph_tools import clean_path, module_path, source_line
from afd_graph.vllm.operators import (
    FUSED_MOE,
    OPAQUE_MOE,
    arguments,
    layer_name,
    operator_name,
)

_ALLOCATIONS = (torch.empty_like, torch.empty)
# Such as _C::fused_experts_cpu, vLLM's kernel for experts of eight or four bits.
_COMPUTES_EXPERTS = re.compile(r"::\w*(moe|experts)")


@dataclass(frozen=True)
class InlineLayer:
    """Routed experts that the graph shows.

    Attributes:
        name: module path.
        call: the fused call.
        out: the buffer that it writes.
        hidden: rows ``[tokens, hidden]``.
        topk_ids: ``[tokens, k]``.
        topk_weights: ``[tokens, k]``.
        weights: placeholders of w13, w2 and, where given, their biases.
        activation: name of the activation.
        isa: name of the kernel's instruction set, which decides how weights are packed.
    """

    name: str
    call: fx.Node
    out: fx.Node
    hidden: fx.Node
    topk_ids: fx.Node
    topk_weights: fx.Node
    weights: tuple[fx.Node | None, ...]
    activation: str
    isa: str


@dataclass(frozen=True)
class OpaqueLayer:
    """A MoE layer behind one operator.

    Attributes:
        name: the layer's name, by which vLLM finds its modules.
        call: the call.
        hidden: rows that are routed.
        router_logits: of the gate; the rows again where the gate is inside.
        shared_input: rows of the shared experts; None where they take ``hidden``.
        input_ids: token ids, for routers that hash them.
        has_shared: whether the call answers the shared experts' rows as well, first.
    """

    name: str
    call: fx.Node
    hidden: fx.Node
    router_logits: fx.Node
    shared_input: fx.Node | None
    input_ids: fx.Node | None
    has_shared: bool


@dataclass(frozen=True)
class NoMatch:
    """Something that computes experts and is not a form that we know."""

    reason: str
    node: fx.Node

    def __str__(self) -> str:
        where = source_line(self.node)
        return f"{self.reason} [{self.node.name}]" + (f" (at {where})" if where else "")


def match_layers(
    graph: fx.Graph,
) -> tuple[Sequence[InlineLayer | OpaqueLayer], Sequence[NoMatch]]:
    """The MoE layers in order, and what did not fit.

    Raises:
        UnsupportedError: layers are named by counting calls.
    """
    found: list[InlineLayer | OpaqueLayer] = []
    failed: list[NoMatch] = []
    for node in graph.nodes:
        name = operator_name(node)
        if name is None:
            continue
        match: InlineLayer | OpaqueLayer | NoMatch
        if name == FUSED_MOE:
            match = _inline(node)
        elif name in OPAQUE_MOE:
            match = _opaque(node, has_shared=name.endswith("_shared"))
        elif _COMPUTES_EXPERTS.search(name) and not name.startswith("afd::"):
            match = NoMatch(f"{name} computes experts in a form that is not known", node)
        else:
            continue
        if isinstance(match, NoMatch):
            failed.append(match)
        else:
            found.append(match)
    return found, failed


def _inline(node: fx.Node) -> InlineLayer | NoMatch:
    given = arguments(node)
    out, hidden = given["output"], given["input"]
    weights = tuple(given[name] for name in ("w13", "w2", "w13_bias", "w2_bias"))
    if given["skip_weighted"]:
        return NoMatch("the top-k weights are applied before the experts", node)
    if not isinstance(out, fx.Node) or out.target not in _ALLOCATIONS:
        return NoMatch("the experts do not write to a buffer of their own", node)
    if any(user < node for user in out.users):
        return NoMatch("the buffer of the experts is used before they write it", node)
    for weight in weights:
        if weight is not None and (
            not isinstance(weight, fx.Node) or weight.op not in ("placeholder", "get_attr")
        ):
            return NoMatch("an expert weight is computed in the graph", node)
    if hidden.meta["example_value"].dim() != 2:
        return NoMatch("the rows of the experts are not two-dimensional", node)
    return InlineLayer(
        name=_layer_path(node, weights[0]),
        call=node,
        out=out,
        hidden=hidden,
        topk_ids=given["topk_id"],
        topk_weights=given["topk_weights"],
        weights=weights,
        activation=given["act"],
        isa=given["isa"],
    )


def _layer_path(node: fx.Node, weight: fx.Node) -> str:
    """Module path of the experts, from where Dynamo took their weight."""
    source = _compat.input_source(weight)
    if source is not None:
        return clean_path(source).rsplit(".", 1)[0].removesuffix(".routed_experts")
    return module_path(node) or weight.name


def _opaque(node: fx.Node, *, has_shared: bool) -> OpaqueLayer | NoMatch:
    given = arguments(node)  # older versions have fewer
    if given.get("hidden_dim_unpadded"):
        return NoMatch("the experts answer rows of another width", node)
    return OpaqueLayer(
        name=layer_name(given["layer_name"], node),
        call=node,
        hidden=given["hidden_states"],
        router_logits=given["router_logits"],
        shared_input=given["shared_experts_input"],
        input_ids=given.get("input_ids"),
        has_shared=has_shared,
    )
