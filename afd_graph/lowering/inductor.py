"""Compile the graph with Inductor, keeping the order of dispatch, attention and receive.

1. thread an order token through those operators (:mod:`ordered_ops`);
2. retrace with Inductor's decompositions, which also gives every node its shape;
3. hand the graph to ``compile_fx_inner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.lowering.ordered_ops import thread_order_token


def lower(gm: fx.GraphModule) -> Any:
    """Return a function over the list of inputs."""
    ordered = fx.GraphModule(gm, _copied(gm.graph))
    thread_order_token(ordered.graph)
    ordered.recompile()
    mode = _compat.fake_mode_of(gm.graph)
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    with mode:
        inputs.append(torch.empty(1, dtype=torch.uint8))
    compiled = _compat.inductor_compile(ordered, inputs, mode)

    def run(arguments: Sequence[Any]) -> Any:
        return compiled([*arguments, torch.empty(1, dtype=torch.uint8)])

    return run


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
