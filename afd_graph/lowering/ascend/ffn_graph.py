"""The loop of an FFN rank as one graph: receive, grouped products, activation, send.

Which layer a chunk belongs to is data. A graph has its layers fixed, so this one serves *one*
replica, whose dispatches come in a known order, one chunk each; with more replicas the layers
interleave as they like, and :class:`afd_graph.ffn.cam_experts.CamExperts` reads them on the host.

1. ``dispatch_recv`` of the package; int8 rows are scaled back;
2. the program of the layer, ``afd.grouped_mm`` as ``npu_grouped_matmul`` with the received counts:
   the rows behind the last group are never looked at, and nothing depends on their number;
3. ``combine_send`` with the info tensor as it came.

All communication is on the stream of :mod:`afd_graph.lowering.ascend.streams`, in one order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import ConfigError
from afd_graph.ffn.cam_experts import check_shared, share_of
from afd_graph.ffn.program import Expression, FFNProgram
from afd_graph.lowering.ascend.converters import register_converters
from afd_graph.lowering.ascend.exchange import Crossing
from afd_graph.lowering.ascend.plain_ops import lower_to_plain_ops
from afd_graph.lowering.ascend.streams import put_on_stream

aten = torch.ops.aten

_SINGLE_OUTPUT, _BY_ROWS, _COUNTS = 3, 0, 1
"""split_item, group_type and group_list_type of npu_grouped_matmul."""


def ffn_graph(
    programs: Sequence[FFNProgram], group: CamGroup, *, top_k: int, device: str = "npu"
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return the graph and the weights that are its inputs, in order.

    Args:
        programs: one for each dispatch of a step, in order: every layer once a stage.
        group: this FFN rank's view of the group.
        top_k: choices per token.
        device: of the rows.

    Raises:
        ConfigError: more than one replica, shared experts that the operators do not carry, or
            torch_npu is missing.
    """
    if group.attention_ranks != group.tp_size:
        raise ConfigError(
            f"a graph serves one replica, this group has {group.attention_ranks // group.tp_size}",
            remedy="serve several replicas with afd_graph.ffn.cam_experts.CamExperts",
        )
    check_shared(programs, group)
    if not hasattr(torch.ops.npu, "npu_grouped_matmul"):
        raise ConfigError(
            "the experts need npu_grouped_matmul, which torch_npu brings",
            remedy="install CANN and torch_npu, and import torch_npu first",
        )
    register_converters(group.package)
    return _Builder(group, top_k, device).build(programs)


class _Builder:
    def __init__(self, group: CamGroup, top_k: int, device: str) -> None:
        self.group = group
        self.top_k = top_k
        self.device = device
        self.graph = fx.Graph()
        self.mode = torch._subclasses.FakeTensorMode()
        self.inputs: dict[int, fx.Node] = {}
        self.weights: list[torch.Tensor] = []
        self.crossings: list[Crossing] = []

    def build(self, programs: Sequence[FFNProgram]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        shares = {
            id(p): share_of(
                p,
                self.group.first_expert(p.num_experts),
                self.group.experts_per_rank(p.num_experts),
            )
            for p in programs
        }
        for share in shares.values():
            for expression in share.expressions():
                for _, weight in expression.weights:
                    self._input(weight)
        sent = [self._serve(p, shares[id(p)], turn) for turn, p in enumerate(programs)]
        self.graph.output(tuple(sent))
        lower_to_plain_ops(self.graph)
        put_on_stream(self.graph, self.crossings, "ge")
        return fx.GraphModule(torch.nn.Module(), self.graph), self.weights

    def _input(self, weight: torch.Tensor) -> None:
        if id(weight) in self.inputs:
            return
        node = self.graph.placeholder(f"weight_{len(self.weights)}")
        node.meta["val"] = self.mode.from_tensor(weight)
        self.inputs[id(weight)] = node
        self.weights.append(weight)

    def _serve(self, whole: FFNProgram, share: FFNProgram, turn: int) -> fx.Node:
        package = self.group.package
        sizes = {
            "hidden_size": whole.hidden_size,
            "top_k": self.top_k,
            "num_experts": whole.num_experts,
        }
        comm = self._constant([1], torch.float16)
        tensors = {"x": self._constant([1], whole.dtype), "commArgs": comm}
        receive = package.dispatch_recv
        chunk = self._call(receive.overload, *self.group.arguments(receive, tensors, **sizes))
        named = {
            output: self._call(operator.getitem, chunk, i)
            for i, output in enumerate(receive.outputs)
        }
        info = named["batchInfo"]
        self.crossings.append(Crossing(chunk, "receive", whole.layer, turn, info))
        rows = self._rows(named, "", whole.dtype)
        answers = {"expandX": self._program(share.routed, rows, named["epRecvCountRouted"])}
        if package.carries_shared:
            shared = self._rows(named, "Shared", whole.dtype)
            answers["expandXShared"] = (
                self._call(aten.mul.Tensor, shared, 0)
                if share.shared is None
                else self._program(share.shared, shared)
            )
        send = package.combine_send
        tensors = {**answers, "commArgs": comm, "batchInfo": info}
        sent = self._call(send.overload, *self.group.arguments(send, tensors, **sizes))
        self.crossings.append(Crossing(sent, "dispatch", whole.layer, turn))
        return sent

    def _rows(self, named: dict[str, fx.Node], kind: str, dtype: torch.dtype) -> fx.Node:
        rows = named[f"expandX{kind}"]
        if not self.group.dynamic_quant:
            return rows
        wide = self._call(aten._to_copy.default, rows, dtype=torch.float32)
        scales = self._call(aten.unsqueeze.default, named[f"dynamicScales{kind}"], 1)
        scaled = self._call(aten.mul.Tensor, wide, scales)
        return self._call(aten._to_copy.default, scaled, dtype=dtype)

    def _program(self, expression: Expression, *given: fx.Node) -> fx.Node:
        weights = [self.inputs[id(weight)] for _, weight in expression.weights]
        placeholders = expression.graph.find_nodes(op="placeholder")
        env = dict(zip(placeholders, (*given, *weights), strict=True))
        result: Any = None
        for node in expression.graph.nodes:
            if node.op == "output":
                result = env[node.args[0]]
            elif node.target is torch.ops.afd.grouped_mm.default:
                env[node] = self._grouped(*(env[n] for n in node.args))
            elif node not in env:
                env[node] = self.graph.node_copy(node, env.__getitem__)
                env[node].meta = {}
        return result

    def _grouped(self, rows: fx.Node, weight: fx.Node, counts: fx.Node) -> fx.Node:
        products = self._call(
            torch.ops.npu.npu_grouped_matmul.default,
            [rows],
            [weight],
            group_list=counts,
            split_item=_SINGLE_OUTPUT,
            group_type=_BY_ROWS,
            group_list_type=_COUNTS,
        )
        return self._call(operator.getitem, products, 0)

    def _constant(self, shape: list[int], dtype: torch.dtype) -> fx.Node:
        return self._call(aten.full.default, shape, 0, dtype=dtype, device=self.device)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
