"""Put the operators of a CAM package where dispatch and receive were.

Before: a scheduled attention program with ``afd.cam_dispatch`` and ``afd.cam_receive``. After: the
dispatch_send and combine_recv of the package, with every size and the topology as constants:

1. ids become int32, weights float32, outside the operators;
2. a step whose number of rows is symbolic is padded to what a dispatch may hold, because the
   operators take their row count as a constant; padding rows go to expert 0 with weight zero;
3. dispatch and receive have no tensor in common: their order is returned, for
   :mod:`afd_graph.lowering.ascend.streams` to put into the graph.

Refuses rows that the operators cannot carry: too many, or a dtype other than theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import UnsupportedError
from afd_graph.passes.shapes import propagate_shapes
from afd_graph.passes.token_flow import DISPATCH, RECEIVE

aten = torch.ops.aten


@dataclass(frozen=True)
class Crossing:
    """One communication operator of the graph.

    Attributes:
        node: the operator.
        kind: ``dispatch`` or ``receive``.
        layer: MoE layer, as the operator carries it.
        stage: token stage.
        result: a tensor that it makes, when the operator makes several.
    """

    node: fx.Node
    kind: str
    layer: int
    stage: int
    result: fx.Node | None = None


def exchange_in_graph(
    graph: fx.Graph, group: CamGroup, num_experts: Callable[[int], int]
) -> list[Crossing]:
    """Rewrite ``graph`` in place; returns the communication in the order of the graph.

    Args:
        graph: a scheduled attention program.
        group: ranks and operators.
        num_experts: from a MoE layer to its number of experts.

    Raises:
        UnsupportedError: rows of a dtype that the operators do not carry.
        ConnectorError: more rows than a dispatch may hold.
    """
    from afd_graph.lowering.ascend.cann_exchange import CannRewriter

    propagate_shapes(graph)
    rewriter = CannRewriter if group.is_cann else Rewriter
    return rewriter(graph, group, num_experts).run()


@dataclass
class Rows:
    """The dispatched rows of one (layer, stage), for its receive.

    Attributes:
        ids: their experts.
        rows: how many travel.
        tokens: how many of those are tokens; None when all are.
    """

    ids: fx.Node
    rows: int
    tokens: fx.Node | int | None


def dispatch_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, int, int]:
    """Hidden states, expert ids, layer and stage of a dispatch."""
    hidden, ids, layer, stage = node.args[:4]
    assert isinstance(hidden, fx.Node)
    assert isinstance(ids, fx.Node)
    assert isinstance(layer, int)
    assert isinstance(stage, int)
    return hidden, ids, layer, stage


def receive_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, int, int]:
    """Handle, hidden states, weights, layer and stage of a receive."""
    handle, hidden, weights, layer, stage = node.args[:5]
    assert isinstance(handle, fx.Node)
    assert isinstance(hidden, fx.Node)
    assert isinstance(weights, fx.Node)
    assert isinstance(layer, int)
    assert isinstance(stage, int)
    return handle, hidden, weights, layer, stage


class Rewriter:
    """Puts the operators of a CAM package into a graph."""

    def __init__(self, graph: fx.Graph, group: CamGroup, num_experts: Callable[[int], int]) -> None:
        self.graph = graph
        self.group = group
        self.num_experts = num_experts
        self.crossings: list[Crossing] = []
        self.sent: dict[fx.Node, Rows] = {}
        self.constants: dict[tuple[Any, ...], fx.Node] = {}
        self.device: torch.device | None = None

    def run(self) -> list[Crossing]:
        """Rewrite every dispatch and receive, in order."""
        for node in list(self.graph.nodes):
            if node.target is DISPATCH:
                with self.graph.inserting_before(node):
                    self._dispatch(node)
            elif node.target is RECEIVE:
                with self.graph.inserting_before(node):
                    node.replace_all_uses_with(self._receive(node))
                handle = node.args[0]
                assert isinstance(handle, fx.Node)
                self.graph.erase_node(node)
                self.graph.erase_node(handle)
        return self.crossings

    def _dispatch(self, node: fx.Node) -> None:
        hidden, ids, layer, stage = dispatch_operands(node)
        value = hidden.meta["val"]
        self._check(node, value, layer, stage)
        tokens, rows = self._row_count(hidden)
        sizes = self._sizes(value, node.args[1], layer)
        ids = self._cast(ids, torch.int32)
        if tokens is not None:
            hidden = self._padded(hidden, value.shape[1], value.dtype, rows)
            ids = self._padded(ids, sizes["top_k"], torch.int32, rows)
        send = self.group.package.dispatch_send
        tensors = {
            "x": hidden,
            "expertIds": ids,
            "commArgs": self._zeros([1], torch.float16),
        }
        arguments = self.group.arguments(send, tensors, rows=rows, layer=layer, **sizes)
        new = self._call(send.overload, *arguments)
        new.meta["afd_stage"] = stage
        self.sent[node] = Rows(ids, rows, tokens)
        self.crossings.append(Crossing(new, "dispatch", layer, stage))

    def _check(self, node: fx.Node, value: torch.Tensor, layer: int, stage: int) -> None:
        self.device = value.device
        if value.dtype not in self.group.package.dtypes:
            raise UnsupportedError(
                f"{self.group.operators} carries {self.group.package.dtypes}, the rows are "
                f"{value.dtype}",
                node=node.name,
                layer=layer,
                stage=stage,
                remedy="load the model in bfloat16 or float16",
            )
        # On a symbolic number this is a guard: a larger step is compiled anew, and refused.
        self.group.check_rows(value.shape[0], layer=layer, stage=stage)

    def _receive(self, node: fx.Node) -> fx.Node:
        handle, hidden, weights, layer, stage = receive_operands(node)
        sent, value = self.sent[handle], hidden.meta["val"]
        sizes = self._sizes(value, weights, layer)
        weights = self._cast(weights, torch.float32)
        if sent.tokens is not None:
            weights = self._padded(weights, sizes["top_k"], torch.float32, sent.rows)
        receive = self.group.package.combine_recv
        tensors = {
            "expandX": self._zeros([1], value.dtype),
            "expertIds": sent.ids,
            "expertScales": weights,
            "commArgs": self._zeros([1], torch.float16),
        }
        arguments = self.group.arguments(receive, tensors, rows=sent.rows, **sizes)
        new = self._call(receive.overload, *arguments)
        new.meta["afd_stage"] = stage
        self.crossings.append(Crossing(new, "receive", layer, stage))
        if sent.tokens is None:
            return new
        return self._call(aten.slice.Tensor, new, 0, 0, sent.tokens)

    def _row_count(self, hidden: fx.Node) -> tuple[fx.Node | None, int]:
        """The node that counts the rows, None when they are constant; and the rows to carry."""
        rows = hidden.meta["val"].shape[0]
        if isinstance(rows, int):
            return None, rows
        return self._call(aten.sym_size.int, hidden, 0), self.group.rows_per_dispatch

    def _padded(self, source: fx.Node, width: int, dtype: torch.dtype, rows: int) -> fx.Node:
        """``rows`` rows, those of ``source`` and zeros; the pad itself has a constant size."""
        pad = self._zeros([rows, int(width)], dtype)
        longer = self._call(aten.cat.default, [source, pad], 0)
        return self._call(aten.slice.Tensor, longer, 0, 0, rows)

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        if value.meta["val"].dtype is dtype:
            return value
        return self._call(aten._to_copy.default, value, dtype=dtype)

    def _sizes(self, hidden: torch.Tensor, chosen: Any, layer: int) -> dict[str, int]:
        return {
            "hidden_size": int(hidden.shape[1]),
            "top_k": int(chosen.meta["val"].shape[1]),
            "num_experts": self.num_experts(layer),
        }

    def _zeros(self, shape: list[int], dtype: torch.dtype) -> fx.Node:
        device = self.device
        return self._constant(
            (*shape, dtype),
            lambda: self._call(aten.full.default, shape, 0, dtype=dtype, device=device),
        )

    def _constant(self, key: tuple[Any, ...], make: Callable[[], fx.Node]) -> fx.Node:
        """A constant, one of each kind, ahead of everything."""
        if key not in self.constants:
            first = next(n for n in self.graph.nodes if n.op != "placeholder")
            with self.graph.inserting_before(first):
                self.constants[key] = make()
        return self.constants[key]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
