"""The loop of an FFN rank as one graph: receive, grouped products, activation, send.

Which layer a chunk belongs to is data. A graph has its layers fixed, so this one serves *one*
replica, whose dispatches come in a known order, one chunk each; with more replicas the layers
interleave as they like, and :class:`afd_graph.ffn.cam_experts.CamExperts` reads them on the host.

1. ``dispatch_recv`` of the package; int8 rows are scaled back;
2. the program of the layer, ``afd.grouped_mm`` as ``npu_grouped_matmul`` with the received counts:
   the rows behind the last group are never looked at, and nothing depends on their number;
3. ``combine_send`` with the info tensor as it came.

All communication is on the stream of :mod:`afd_graph.lowering.ascend.streams`, in one order.

With CANN's own operators it is ``npu_ffn_worker_batching``, which waits for all attention ranks and
groups their rows, and ``npu_ffn_to_attention``; the schedule context is the last input. They bring
one row more for every token, that of a shared expert: it is told by its place among the choices of
the token, and answered with zeros where no expert is shared.
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
from afd_graph.lowering.ascend.cann_exchange import context_input, token_dtype, window_shapes
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

    With ``operators="cann"`` the schedule context is one input more, behind the weights.

    Args:
        programs: one for each dispatch of a step, in order: every layer once a stage.
        group: this FFN rank's view of the group.
        top_k: choices per token.
        device: of the rows.

    Raises:
        ConfigError: more than one replica, shared experts that the operators do not carry, or
            torch_npu is missing.
    """
    if group.attention_ranks != group.tp_size and not group.is_cann:
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
        self.context: fx.Node | None = None

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
        serve = self._serve
        if self.group.is_cann:
            serve = self._serve_cann
            self.context = context_input(self.graph, self.mode, self.device)
        sent = [serve(p, shares[id(p)], turn) for turn, p in enumerate(programs)]
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

    def _serve_cann(self, whole: FFNProgram, share: FFNProgram, turn: int) -> fx.Node:
        """One turn over CANN's operators; returns the number of rows that it answered."""
        package, group = self.group.package, self.group
        each = group.experts_per_rank(whole.num_experts)
        shapes = window_shapes(group, whole.hidden_size, self.top_k)
        receive = package.dispatch_recv
        values: dict[str, Any] = {
            **shapes,
            "schedule_context": self.context,
            "expert_num": each + 1,  # the shared one is numbered behind the routed ones
            "token_dtype": token_dtype(group, whole.dtype, sent=True),
            "need_schedule": 1,
            "layer_num": 0,
        }
        args, kwargs = receive.bind(values)
        chunk = self.graph.call_function(receive.overload, args, kwargs)
        named = {
            output: self._call(operator.getitem, chunk, i)
            for i, output in enumerate(receive.outputs)
        }
        self.crossings.append(Crossing(chunk, "receive", whole.layer, turn, named["y"]))
        rows = named["y"]
        if group.dynamic_quant:
            rows = self._scaled(rows, named["dynamic_scale"], whole.dtype)
        answer = self._program(share.routed, rows, self._counts(named["group_list"], each))
        shared = (
            self._call(aten.mul.Tensor, rows, 0)
            if share.shared is None
            else self._program(share.shared, rows)
        )
        is_shared = self._call(aten.eq.Scalar, named["expert_offsets"], self.top_k)
        is_shared = self._call(aten.unsqueeze.default, is_shared, 1)
        send = package.combine_send
        values = {
            **{name: named[name] for name in receive.outputs},
            **shapes,
            "x": self._call(aten.where.self, is_shared, shared, answer),
            "group": group.group_name,
            "world_size": group.world_size,
            "attn_rank_table": self._call(
                aten.arange.default,
                group.attention_ranks,
                dtype=torch.int32,
                device=self.device,
            ),
        }
        args, kwargs = send.bind(values)
        sent = self.graph.call_function(send.overload, args, kwargs)
        self.crossings.append(Crossing(sent, "dispatch", whole.layer, turn))
        return named["actual_token_num"]

    def _counts(self, pairs: fx.Node, experts: int) -> fx.Node:
        """Rows of each routed expert, from (expert, rows) of those that have some."""
        keys, rows = (self._call(aten.select.int, pairs, 1, i) for i in (0, 1))
        counts = self._constant([experts + 1], torch.int64)
        counts = self._call(aten.scatter_add.default, counts, 0, keys, rows)
        return self._call(aten.slice.Tensor, counts, 0, 0, experts)

    def _rows(self, named: dict[str, fx.Node], kind: str, dtype: torch.dtype) -> fx.Node:
        rows = named[f"expandX{kind}"]
        if not self.group.dynamic_quant:
            return rows
        return self._scaled(rows, named[f"dynamicScales{kind}"], dtype)

    def _scaled(self, rows: fx.Node, scales: fx.Node, dtype: torch.dtype) -> fx.Node:
        wide = self._call(aten._to_copy.default, rows, dtype=torch.float32)
        scales = self._call(aten.unsqueeze.default, scales, 1)
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
