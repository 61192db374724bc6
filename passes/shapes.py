"""Give the stage copies their shapes: fake-tensor propagation over the nodes that have none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from afd_graph._compat import fake_mode_of


def propagate_shapes(graph: fx.Graph) -> int:
    """Set ``meta["val"]`` where it is missing; returns how many. Costs a millisecond a node.

    The shapes are for readers, so they must not add guards to the captured graph.
    """
    mode = fake_mode_of(graph)
    env = mode.shape_env
    changed = 0

    def value(node: fx.Node) -> Any:
        return node.meta.get("val")

    for node in graph.nodes:
        if node.op != "call_function" or "val" in node.meta:
            continue
        args = pytree.tree_map_only(fx.Node, value, node.args)
        kwargs = pytree.tree_map_only(fx.Node, value, node.kwargs)
        with mode, env.suppress_guards() if env is not None else nullcontext():
            node.meta["val"] = node.target(*args, **kwargs)
        changed += 1
    return changed
