"""Put CANN's own operators where dispatch and receive were.

``npu_attention_to_ffn`` writes rows into the windows of the FFN ranks and returns nothing;
``npu_attention_worker_combine`` waits for the answers and sums them with the weights. They have no
tensor in common, and torchair orders the sends among themselves only: the edge from a send to its
combine is added by :mod:`afd_graph.lowering.ascend.streams`.

1. the window of an attention rank is read through its *schedule context*, a tensor of torch_npu
   that becomes the last input of the graph;
2. both operators work on a whole window, so every dispatch is padded to what it may hold; padding
   rows go to expert 0 with weight zero;
3. a token has ``top_k + 1`` answers, the last being a shared expert's, which is summed without a
   weight. Where no expert is shared, the FFN side answers zeros there;
4. both stages use the one micro-batch of the window, in turns: the group has one credit.

An expert is found through a table, ``[layers, experts + 1, 1 + 2 * ffn_ranks]``: on how many ranks
it lives, then pairs of rank and number on that rank. The shared one lives on all of them.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.connectors.cam_group import CamGroup
from afd_graph.lowering.ascend.exchange import (
    Crossing,
    Rewriter,
    Rows,
    dispatch_operands,
    receive_operands,
)
from afd_graph.passes.token_flow import DISPATCH

aten = torch.ops.aten

CONTEXT = "afd_schedule_context"
"""Name of the input that is added."""

CONTEXT_BYTES = 1024
_ALIGNMENT = 512
_SCALE_BYTES = 4
_DYNAMIC_QUANT = 2
_TOKEN_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.int8: 2}


def window_shapes(group: CamGroup, hidden_size: int, top_k: int) -> dict[str, list[int]]:
    """Shapes of the windows, as the operators of both sides take them.

    ``ffn_token_info_table_shape`` counts 32-bit words, with a flag and the layer before the expert
    ids; the last entry of ``ffn_token_data_shape`` counts elements of what travels: a row, or its
    int8 values with their scale, aligned.
    """
    rows, slots = group.rows_per_dispatch, top_k + 1
    width = hidden_size
    if group.dynamic_quant:
        width = -(-(hidden_size + _SCALE_BYTES) // _ALIGNMENT) * _ALIGNMENT
    return {
        "ffn_token_info_table_shape": [group.attention_ranks, 1, 2 + rows * slots],
        "ffn_token_data_shape": [group.attention_ranks, 1, rows, slots, width],
        "attn_token_info_table_shape": [1, rows, slots],
        "token_info_table_shape": [1, rows, slots],
        "token_data_shape": [1, rows, slots, hidden_size],
        "max_out_shape": [group.attention_ranks, rows, slots, hidden_size],
    }


def token_dtype(group: CamGroup, dtype: torch.dtype, *, sent: bool) -> int:
    """CANN's number for rows of ``dtype``; ``sent`` ones travel as int8 when the group says so."""
    return _TOKEN_DTYPES[torch.int8 if sent and group.dynamic_quant else dtype]


def context_input(graph: fx.Graph, mode: object, device: torch.device | str) -> fx.Node:
    """Add the schedule context as the last input of ``graph``."""
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        node = graph.placeholder(CONTEXT)
    with mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(CONTEXT_BYTES, dtype=torch.int8, device=device)
    return node


class CannRewriter(Rewriter):
    """Puts CANN's operators into a graph."""

    context: fx.Node
    layers: int

    def run(self) -> list[Crossing]:
        """Rewrite every dispatch and receive, in order."""
        sends = [node for node in self.graph.nodes if node.target is DISPATCH]
        self.layers = 1 + max(int(node.args[2]) for node in sends)
        device = sends[0].args[0].meta["val"].device
        self.context = context_input(self.graph, _compat.fake_mode_of(self.graph), device)
        return super().run()

    def _dispatch(self, node: fx.Node) -> None:
        hidden, ids, layer, stage = dispatch_operands(node)
        value = hidden.meta["val"]
        self._check(node, value, layer, stage)
        sizes = self._sizes(value, ids, layer)
        tokens, rows = self._row_count(hidden)
        capacity = self.group.rows_per_dispatch
        given: fx.Node | int | None = rows if tokens is None else tokens
        ids = self._cast(ids, torch.int32)
        if given == capacity:
            given = None
        else:
            hidden = self._padded(hidden, value.shape[1], value.dtype, capacity)
            ids = self._padded(ids, sizes["top_k"], torch.int32, capacity)
        send = self.group.package.dispatch_send
        values = {
            "x": self._call(aten.unsqueeze.default, hidden, 0),
            "session_id": self._number(self.group.rank),
            "micro_batch_id": self._number(0),
            "layer_id": self._number(layer),
            "expert_ids": self._call(aten.unsqueeze.default, ids, 0),
            "expert_rank_table": self._table(sizes["num_experts"]),
            "group": self.group.group_name,
            "world_size": self.group.world_size,
            "moe_expert_num": sizes["num_experts"],
            "quant_mode": _DYNAMIC_QUANT if self.group.dynamic_quant else 0,
            "sync_flag": 0,
            "ffn_start_rank_id": self.group.attention_ranks,
            **window_shapes(self.group, sizes["hidden_size"], sizes["top_k"]),
        }
        args, kwargs = send.bind(values)
        new = self.graph.call_function(send.overload, args, kwargs)
        new.meta["afd_stage"] = stage
        self.sent[node] = Rows(ids, capacity, given)
        self.crossings.append(Crossing(new, "dispatch", layer, stage))

    def _receive(self, node: fx.Node) -> fx.Node:
        handle, hidden, weights, layer, stage = receive_operands(node)
        sent, value = self.sent[handle], hidden.meta["val"]
        sizes = self._sizes(value, weights, layer)
        weights = self._cast(weights, torch.float32)
        if sent.tokens is not None:
            weights = self._padded(weights, sizes["top_k"], torch.float32, sent.rows)
        receive = self.group.package.combine_recv
        values = {
            "schedule_context": self.context,
            "expert_scales": weights,
            "layer_id": self._number(layer),
            "hidden_size": sizes["hidden_size"],
            "token_dtype": token_dtype(self.group, value.dtype, sent=False),
            "need_schedule": 1,
        }
        args, kwargs = receive.bind(values)
        new = self.graph.call_function(receive.overload, args, kwargs)
        new.meta["afd_stage"] = stage
        combined = self._call(operator.getitem, new, 0)
        self.crossings.append(Crossing(new, "receive", layer, stage, combined))
        if sent.tokens is None:
            return combined
        return self._call(aten.slice.Tensor, combined, 0, 0, sent.tokens)

    def _number(self, value: int) -> fx.Node:
        return self._constant(("number", value), lambda: self._full([1], value))

    def _full(self, shape: list[int], value: int) -> fx.Node:
        return self._call(aten.full.default, shape, value, dtype=torch.int32, device=self.device)

    def _table(self, num_experts: int) -> fx.Node:
        return self._constant(("table", num_experts), lambda: self._new_table(num_experts))

    def _new_table(self, num_experts: int) -> fx.Node:
        ranks, each = self.group.ffn_ranks, self.group.experts_per_rank(num_experts)
        columns = 1 + 2 * ranks
        one = self._full([num_experts], 1)
        numbers = self._range(num_experts)
        rank = self._call(aten.floor_divide.default, numbers, each)
        local = self._call(aten.remainder.Scalar, numbers, each)
        routed = self._call(aten.stack.default, [one, rank, local], 1)
        if columns > 3:
            rest = self._full([num_experts, columns - 3], 0)
            routed = self._call(aten.cat.default, [routed, rest], 1)
        pairs = self._call(aten.stack.default, [self._range(ranks), self._full([ranks], each)], 1)
        pairs = self._call(aten.reshape.default, pairs, [2 * ranks])
        shared = self._call(aten.cat.default, [self._full([1], ranks), pairs])
        shared = self._call(aten.unsqueeze.default, shared, 0)
        table = self._call(aten.cat.default, [routed, shared], 0)
        table = self._call(aten.unsqueeze.default, table, 0)
        shape = [self.layers, num_experts + 1, columns]
        return self._call(aten.expand.default, table, shape)

    def _range(self, length: int) -> fx.Node:
        return self._call(aten.arange.default, length, dtype=torch.int32, device=self.device)
