"""Dispatch, receive and attention that say in their schema that their order matters.

A compiler that reorders by data dependence alone sinks a dispatch down to its receive, and the
overlap is gone. These variants all write one *order token*, an otherwise unused tensor, so every
compiler that respects mutation keeps them in program order.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import has_side_effect

import afd_graph.paged_attention  # noqa: F401  (registers its operator)

_library = torch.library.Library("afd", "FRAGMENT")

_PLAIN = {
    "cam_dispatch": torch.ops.afd.cam_dispatch.default,
    "cam_receive": torch.ops.afd.cam_receive.default,
    "attention": torch.ops.afd.attention.default,
    "paged_mla_attention": torch.ops.afd.paged_mla_attention.default,
}
_ORDERED: dict[object, torch._ops.OpOverload] = {}


def _define(name: str, plain: torch._ops.OpOverload) -> torch._ops.OpOverload:
    schema = str(plain._schema).removeprefix(f"afd::{name}(")
    # An alias name of its own: paged attention also mutates its cache, as ``a``.
    _library.define(f"ordered_{name}(Tensor(z!) order, {schema}")

    def kernel(order: torch.Tensor, *args: object) -> torch.Tensor:
        return plain(*args)

    # The token is never touched: only the schema's promise to write it matters.
    _library.impl(f"ordered_{name}", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"afd::ordered_{name}", kernel, lib=_library)
    overload = getattr(torch.ops.afd, f"ordered_{name}").default
    has_side_effect(overload)
    return overload


for _name, _plain in _PLAIN.items():
    _ORDERED[_plain] = _define(_name, _plain)

ORDER = "afd_order"
"""Name of the graph input that holds the order token."""


def thread_order_token(graph: fx.Graph) -> int:
    """Replace the operators by their ordered variants; returns how many.

    The token becomes the last input of the graph.
    """
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        token = graph.placeholder(ORDER)
    replaced = 0
    for node in list(graph.nodes):
        ordered = _ORDERED.get(node.target)
        if ordered is not None:
            node.target = ordered
            node.args = (token, *node.args)
            replaced += 1
    return replaced
