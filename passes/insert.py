"""Carve the experts out of the model and put dispatch and receive in their place.

Before: a normalised graph and its matches. After: the unsplit attention program,

    handle = afd.cam_dispatch(hidden, topk_ids, layer, stage=0, channel)
    out    = afd.cam_receive(handle, hidden, topk_weights, layer, stage=0, channel)

and one :class:`FFNProgram` a layer. Gate and top-k stay. The shared experts stay too, or move
with ``shared_experts="ffn"``.

1. copy what lies between the rows and the result of the expert products into a graph of its own;
   products become ``afd.grouped_mm``, weights become its inputs, the way they are laid out
   (transposed or not) comes along as it is in the model's graph;
2. insert the pair behind the last of its inputs, and use its result instead of the weighted sum;
3. remove what nothing uses any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from afd_graph.errors import PassError, UnsupportedError
from afd_graph.ffn.program import Expression, FFNProgram
from afd_graph.passes.graph_tools import between, input_node, source_line
from afd_graph.passes.match import Match, SharedExperts

aten = torch.ops.aten
afd = torch.ops.afd

WeightLookup = Callable[[fx.Node], "tuple[str, torch.Tensor] | None"]
"""From a placeholder (or ``get_attr``) to its name and real tensor; None for anything else."""


def insert_dispatch(
    graph: fx.Graph,
    matches: Sequence[Match],
    weight_of: WeightLookup,
    channel: str,
    number: Callable[[Match], int],
    shared_experts: str = "attention",
) -> list[FFNProgram]:
    """Rewrite ``graph`` in place; returns the programs in layer order.

    Args:
        graph: the normalised graph.
        matches: its MoE layers.
        weight_of: finds parameters.
        channel: name of the runtime channel.
        number: number of a layer on the FFN side; graphs of one model share them.
        shared_experts: side that computes the shared experts.

    Raises:
        UnsupportedError: an expert weight is computed from something that is not a parameter.
    """
    programs = []
    for match in matches:
        moves = match.shared is not None and shared_experts == "ffn"
        shared = match.shared if moves else None
        layer = number(match)
        programs.append(
            FFNProgram(
                layer=layer,
                key=f"layer {layer}",
                name=match.name,
                num_experts=match.num_experts,
                hidden_size=int(match.hidden.meta["val"].shape[-1]),
                dtype=match.hidden.meta["val"].dtype,
                routed=_routed_program(match, weight_of),
                shared=None if shared is None else _shared_program(match, shared, weight_of),
            )
        )
        _replace(graph, match, shared, channel, layer)
    graph.eliminate_dead_code()
    return programs


class _Carver:
    """Copies nodes into a graph of their own, turning parameters into trailing inputs."""

    def __init__(self, inputs: Sequence[str], weight_of: WeightLookup, match: Match) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(name) for name in inputs]
        self.weights: list[tuple[str, torch.Tensor]] = []
        self.env: dict[fx.Node, fx.Node] = {}
        self._last_placeholder = self.inputs[-1]
        self._weight_of = weight_of
        self._match = match

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy ``node``, and before it whatever it needs that does not depend on the rows."""
        for needed in [*node.all_input_nodes]:
            if needed not in self.env:
                self.constant(needed)
        self.env[node] = new = self.graph.node_copy(node, self.env.__getitem__)
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        return new

    def constant(self, node: fx.Node) -> fx.Node:
        """A value that does not depend on the rows: a parameter, or computed from parameters."""
        if node in self.env:
            return self.env[node]
        if node.op in ("placeholder", "get_attr"):
            found = self._weight_of(node)
            if found is None:
                raise UnsupportedError(
                    f"the experts read {node.name}, which is not a parameter or buffer",
                    node=node.name,
                    layer=self._match.index,
                    source=source_line(node),
                    remedy="only parameters, buffers and the rows may enter the experts",
                )
            with self.graph.inserting_after(self._last_placeholder):
                new = self.graph.placeholder(f"weight_{len(self.weights)}")
            self._last_placeholder = new
            self.weights.append(found)
            self.env[node] = new
            return new
        return self.copy(node)

    def finish(self, result: fx.Node) -> Expression:
        self.graph.output(result)
        self.graph.lint()
        return Expression(self.graph, tuple(self.weights))


def _routed_program(match: Match, weight_of: WeightLookup) -> Expression:
    carver = _Carver(("rows", "counts"), weight_of, match)
    rows, counts = carver.inputs
    carver.env[match.rows] = rows
    products = {product.output: product for product in match.products}
    skipped = {node for product in match.products for node in product.interior}
    for node in sorted(between(match.rows, match.result)):
        if node in skipped or node is match.rows:
            continue
        product = products.get(node)
        if product is None:
            carver.copy(node)
            continue
        weight = carver.constant(product.weight)
        if product.transposed:
            weight = carver.graph.call_function(aten.transpose.int, (weight, 1, 2))
        carver.env[node] = carver.graph.call_function(
            afd.grouped_mm.default, (carver.env[product.rows], weight, counts)
        )
    return carver.finish(carver.env[match.result])


def _shared_program(match: Match, shared: SharedExperts, weight_of: WeightLookup) -> Expression:
    """``shared(rows [n, hidden])``: the dense part re-rooted on two-dimensional rows."""
    carver = _Carver(("rows",), weight_of, match)
    rows = carver.inputs[0]
    carver.env[shared.hidden] = rows
    for node in sorted(between(shared.hidden, shared.output)):
        if node is shared.hidden:
            continue
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            # Rows stay two-dimensional here; only the width of a view may matter.
            source = input_node(node, 0)
            if node.meta["val"].shape[-1] != source.meta["val"].shape[-1]:
                raise UnsupportedError(
                    "the shared experts reshape the hidden dimension",
                    node=node.name,
                    layer=match.index,
                    source=source_line(node),
                    remedy="keep them on the attention side: shared_experts='attention'",
                )
            carver.env[node] = carver.env[source]
            continue
        carver.copy(node)
    return carver.finish(carver.env[shared.output])


def _replace(
    graph: fx.Graph, match: Match, shared: SharedExperts | None, channel: str, layer: int
) -> None:
    behind = max(match.hidden, match.topk_ids, match.topk_weights)
    hidden_value, output_value = match.hidden.meta["val"], match.output.meta["val"]
    with graph.inserting_after(behind):
        handle = graph.call_function(
            afd.cam_dispatch.default, (match.hidden, match.topk_ids, layer, 0, channel)
        )
    handle.meta = _meta(match.output, hidden_value.new_empty((1,), dtype=torch.int64))
    with graph.inserting_after(handle):
        received = graph.call_function(
            afd.cam_receive.default,
            (handle, match.hidden, match.topk_weights, layer, 0, channel),
        )
    received.meta = _meta(match.output, hidden_value.new_empty(hidden_value.shape))
    result = received
    if output_value.dtype != hidden_value.dtype:
        with graph.inserting_after(received):
            result = graph.call_function(
                aten._to_copy.default, (received,), {"dtype": output_value.dtype}
            )
        result.meta = _meta(match.output, output_value)
    match.output.replace_all_uses_with(result)
    if shared is not None:
        _drop_shared(shared)


def _drop_shared(shared: SharedExperts) -> None:
    """The received rows already hold the shared part: the addition becomes its other operand."""
    left, right = shared.joined.args[:2]
    routed = right if left is shared.output else left
    if not isinstance(routed, fx.Node):
        raise PassError("shared experts are not added to a node", node=shared.joined.name)
    shared.joined.replace_all_uses_with(routed)


def _meta(like: fx.Node, value: torch.Tensor) -> dict[str, object]:
    kept = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
    return {**kept, "val": value}
