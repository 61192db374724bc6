"""The operators that exchange rows on Ascend: one table for schema, shapes, converter and tests.

Each entry says how an operator is called from PyTorch (namespace, arguments in their order) and
how the same operator is declared to CANN (type, inputs, attributes, outputs, in the order of its
registration). The fake kernels, the schemas where no binary package registers them, the torchair
converters and the checks of the emitted graph are all made from it.

Two packages offer the same four phases: ``umdk_cam_op_lib``, which also carries the rows of the
shared experts, and ``afd_ascend``, routed experts only. CANN has four operators of its own, which
torch_npu knows: their arguments are others (:mod:`afd_graph.lowering.ascend.cann_exchange`), and
they carry one row more for every token, that of a shared expert. No two interoperate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MAX_ROWS = 262144
"""Rows that a dispatch can ever bring to an FFN rank; a constant of both packages."""

INFO_HEADER = 5
"""Fields of the opaque info tensor before the prefixes and counts."""


@dataclass(frozen=True)
class Operator:
    """One operator, as PyTorch and as CANN see it.

    Attributes:
        name: qualified name in ``torch.ops``.
        arguments: schema between the parentheses.
        returns: schema of the result.
        ge_type: CANN operator type.
        inputs: (argument, CANN input), in order.
        attributes: (argument, CANN attribute), in order; the argument ``None`` stands for zero.
        outputs: CANN outputs, in order.
        shapes: from the arguments by name to empty results.
    """

    name: str
    arguments: str
    returns: str
    ge_type: str
    inputs: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str | None, str], ...]
    outputs: tuple[str, ...]
    shapes: Callable[..., Any]

    @property
    def schema(self) -> str:
        """The schema that defines it."""
        return f"{self.name}({self.arguments}) -> {self.returns}"

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Argument names, in order."""
        return tuple(re.findall(r"[\w\]?] (\w+)", self.arguments))

    @property
    def optional(self) -> frozenset[str]:
        """Arguments that may be left out and are tensors."""
        return frozenset(re.findall(r"Tensor\? (\w+)", self.arguments))

    @property
    def defaulted(self) -> frozenset[str]:
        """Arguments that may be left out and are numbers."""
        return frozenset(re.findall(r"(\w+)=\d", self.arguments))

    def bind(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of a call, from values by argument name."""
        positional, _, _ = self.arguments.partition(", *, ")
        names = self.argument_names
        count = positional.count(",") + 1
        keywords = {name: values[name] for name in names[count:] if name in values}
        return tuple(values[name] for name in names[:count]), keywords

    @property
    def overload(self) -> Any:
        """The operator itself, once :func:`register` ran."""
        namespace, name = self.name.split("::")
        return getattr(getattr(torch.ops, namespace), name).default


def _sent(anchor: str) -> Callable[..., torch.Tensor]:
    def shapes(**given: Any) -> torch.Tensor:
        return given[anchor].new_empty((1,), dtype=torch.int8)

    return shapes


def _combined(**given: Any) -> torch.Tensor:
    return given["expand_x"].new_empty((given["batch_size"], given["hidden_size"]))


def capacity() -> int:
    """Rows that a dispatch_recv allocates."""
    from afd_graph.config import received_rows_factor

    return int(MAX_ROWS * received_rows_factor())


def info_length(tp_size: int, experts: int) -> int:
    """Length of the info tensor that travels with every chunk."""
    return INFO_HEADER + tp_size + experts * tp_size


def _received_rows(given: dict[str, Any], rows: int) -> torch.Tensor:
    dtype = torch.int8 if given["dynamic_quant"] else None
    return given["x"].new_empty((rows, given["hidden_size"]), dtype=dtype)


def _received_scales(given: dict[str, Any], rows: int) -> torch.Tensor:
    length = rows if given["dynamic_quant"] else 1
    return given["x"].new_empty((length,), dtype=torch.float32)


def _integers(given: dict[str, Any], length: int) -> torch.Tensor:
    return given["x"].new_empty((length,), dtype=torch.int64)


def _received_routed(**given: Any) -> list[torch.Tensor]:
    rows, experts = capacity(), given["route_expert_num_per_moe"]
    return [
        _received_rows(given, rows),
        _received_scales(given, rows),
        _integers(given, info_length(given["tp_size"], experts)),
        _integers(given, experts),
    ]


def _received_all(**given: Any) -> tuple[torch.Tensor, ...]:
    rows, experts = capacity(), given["expert_per_rank"]
    shared = max(1, rows // given["expert_rank_size"])
    return (
        _received_rows(given, rows),
        _received_rows(given, shared),
        _received_scales(given, rows),
        _received_scales(given, shared),
        _integers(given, info_length(given["tp_size"], experts)),
        _integers(given, experts),
        _integers(given, 1),
    )


def _attributes(*names: str) -> tuple[tuple[str | None, str], ...]:
    pairs = (name.partition("=") for name in names)
    return ((None, "magic"), *((argument, attribute) for argument, _, attribute in pairs))


_UMDK_SIZES = "int hidden_size, int topk, int expert_rank_size, int attention_rank_size, int expert_per_rank, int rank, int world_size"  # noqa: E501
_UMDK_NAMES = (
    "hidden_size=hiddenSize",
    "topk=topk",
    "expert_rank_size=moeRankNum",
    "attention_rank_size=attnRankNum",
    "expert_per_rank=routeExpertNumPerMoe",
)
_ROUTED_SIZES = (
    "int hidden_size, int top_k, int moe_rank_num, int attn_rank_num, int route_expert_num_per_moe"
)
_ROUTED_NAMES = (
    "hidden_size=hiddenSize",
    "top_k=topk",
    "moe_rank_num=moeRankNum",
    "attn_rank_num=attnRankNum",
    "route_expert_num_per_moe=routeExpertNumPerMoe",
)

_UMDK = (
    Operator(
        "umdk_cam_op_lib::async_dispatch_send",
        "Tensor x, Tensor expert_ids, Tensor comm_args, int comm_id, int max_seq_len, "
        f"int batch_size, {_UMDK_SIZES}, int layer_index, int tp_size, int dynamic_quant, "
        "str group_name",
        "Tensor",
        "CamMoeDistributeDispatchSend",
        (("x", "x"), ("expert_ids", "expertIds"), ("comm_args", "commArgs")),
        _attributes(
            "max_seq_len=maxSeqLen",
            "batch_size=batchSize",
            *_UMDK_NAMES,
            "rank=attnRankId",
            "world_size=worldSize",
            "layer_index=layerIndex",
            "tp_size=tpSize",
            "dynamic_quant=dynamicQuant",
            "group_name=hccl_group_name",
        ),
        ("expandX",),
        _sent("x"),
    ),
    Operator(
        "umdk_cam_op_lib::async_dispatch_recv",
        f"Tensor x, Tensor comm_args, int comm_id, int batch_size, {_UMDK_SIZES}, int tp_size, "
        "int dynamic_quant, str group_name",
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        "CamMoeDistributeDispatchRecv",
        (("x", "x"), ("comm_args", "commArgs")),
        _attributes(
            "batch_size=maxSeqLen",
            *_UMDK_NAMES,
            "rank=moeRankId",
            "world_size=worldSize",
            "tp_size=tpSize",
            "dynamic_quant=dynamicQuant",
            "group_name=hccl_group_name",
        ),
        (
            "expandX",
            "expandXShared",
            "dynamicScales",
            "dynamicScalesShared",
            "batchInfo",
            "epRecvCountRouted",
            "epRecvCountShared",
        ),
        _received_all,
    ),
    Operator(
        "umdk_cam_op_lib::async_combine_send",
        "Tensor expand_x, Tensor expand_x_shared, Tensor comm_args, Tensor expert_token_nums, "
        f"int comm_id, int batch_size, {_UMDK_SIZES}, int tp_size, str group_name",
        "Tensor",
        "CamMoeDistributeCombineSend",
        (
            ("expand_x", "expandX"),
            ("expand_x_shared", "expandXShared"),
            ("comm_args", "commArgs"),
            ("expert_token_nums", "batchInfo"),
        ),
        _attributes(
            "batch_size=batchSize",
            *_UMDK_NAMES,
            "rank=moeRankId",
            "world_size=worldSize",
            "tp_size=tpSize",
            "group_name=hccl_group_name",
        ),
        ("x",),
        _sent("expand_x"),
    ),
    Operator(
        "umdk_cam_op_lib::async_combine_recv",
        "Tensor expand_x, Tensor expert_ids, Tensor expert_scales, Tensor comm_args, int comm_id, "
        f"int batch_size, {_UMDK_SIZES}, str group_name",
        "Tensor",
        "CamMoeDistributeCombineRecv",
        (
            ("expand_x", "expandX"),
            ("expert_ids", "expertIds"),
            ("expert_scales", "expertScales"),
            ("comm_args", "commArgs"),
        ),
        _attributes(
            "batch_size=batchSize",
            *_UMDK_NAMES,
            "rank=attnRankId",
            "world_size=worldSize",
            "group_name=hccl_group_name",
        ),
        ("x",),
        _combined,
    ),
)

_ROUTED = (
    Operator(
        "afd_ascend::afd_async_dispatch_send",
        "Tensor x, Tensor expert_ids, Tensor comm_args, int comm_id, int max_seq_len, "
        f"int batch_size, {_ROUTED_SIZES}, int attn_rank_id, int world_size, int layer_index, "
        "int tp_size, int dynamic_quant, str group_name",
        "Tensor",
        "AfdAsyncDispatchSend",
        (("x", "x"), ("expert_ids", "expertIds"), ("comm_args", "commArgs")),
        _attributes(
            "max_seq_len=maxSeqLen",
            "batch_size=batchSize",
            *_ROUTED_NAMES,
            "attn_rank_id=attnRankId",
            "world_size=worldSize",
            "layer_index=layerIndex",
            "tp_size=tpSize",
            "dynamic_quant=dynamicQuant",
            "group_name=hccl_group_name",
        ),
        ("expandX",),
        _sent("x"),
    ),
    Operator(
        "afd_ascend::afd_async_dispatch_recv",
        f"Tensor x, Tensor comm_args, int comm_id, int max_seq_len, {_ROUTED_SIZES}, "
        "int moe_rank_id, int world_size, int tp_size, int dynamic_quant, str group_name",
        "Tensor[]",
        "AfdAsyncDispatchRecv",
        (("x", "x"), ("comm_args", "commArgs")),
        _attributes(
            "max_seq_len=maxSeqLen",
            *_ROUTED_NAMES,
            "moe_rank_id=moeRankId",
            "world_size=worldSize",
            "tp_size=tpSize",
            "dynamic_quant=dynamicQuant",
            "group_name=hccl_group_name",
        ),
        ("expandX", "dynamicScales", "batchInfo", "epRecvCountRouted"),
        _received_routed,
    ),
    Operator(
        "afd_ascend::afd_async_combine_send",
        "Tensor expand_x, Tensor comm_args, Tensor batch_info, int comm_id, int max_seq_len, "
        f"{_ROUTED_SIZES}, int moe_rank_id, int world_size, int tp_size, str group_name",
        "Tensor",
        "AfdAsyncCombineSend",
        (("expand_x", "expandX"), ("comm_args", "commArgs"), ("batch_info", "batchInfo")),
        _attributes(
            "max_seq_len=maxSeqLen",
            *_ROUTED_NAMES,
            "moe_rank_id=moeRankId",
            "world_size=worldSize",
            "tp_size=tpSize",
            "group_name=hccl_group_name",
        ),
        ("x",),
        _sent("expand_x"),
    ),
    Operator(
        "afd_ascend::afd_async_combine_recv",
        "Tensor expand_x, Tensor expert_ids, Tensor expert_scales, Tensor comm_args, int comm_id, "
        f"int batch_size, {_ROUTED_SIZES}, int attn_rank_id, int world_size, str group_name",
        "Tensor",
        "AfdAsyncCombineRecv",
        (
            ("expand_x", "expandX"),
            ("expert_ids", "expertIds"),
            ("expert_scales", "expertScales"),
            ("comm_args", "commArgs"),
        ),
        _attributes(
            "batch_size=batchSize",
            *_ROUTED_NAMES,
            "attn_rank_id=attnRankId",
            "world_size=worldSize",
            "group_name=hccl_group_name",
        ),
        ("x",),
        _combined,
    ),
)


@dataclass(frozen=True)
class Package:
    """The four phases as one package registers them.

    Attributes:
        name: namespace in ``torch.ops``.
        dispatch_send, combine_recv: of the attention side.
        dispatch_recv, combine_send: of the FFN side.
        carries_shared: whether rows of the shared experts travel too.
        dtypes: of the rows.
    """

    name: str
    dispatch_send: Operator
    dispatch_recv: Operator
    combine_send: Operator
    combine_recv: Operator
    carries_shared: bool
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All four."""
        return self.dispatch_send, self.dispatch_recv, self.combine_send, self.combine_recv


PACKAGES = {
    "umdk_cam_op_lib": Package("umdk_cam_op_lib", *_UMDK, carries_shared=True),
    "afd_ascend": Package("afd_ascend", *_ROUTED, carries_shared=False),
}
"""By the namespace of their operators."""


def _named(*names: str) -> tuple[tuple[str, str], ...]:
    """Arguments that CANN calls by the same names."""
    return tuple((name, name) for name in names)


def _batched(**given: Any) -> tuple[torch.Tensor, ...]:
    sessions, tokens, slots, width = given["max_out_shape"]
    rows = sessions * tokens * slots
    dtype = (torch.float16, torch.bfloat16, torch.int8)[given["token_dtype"]]
    new = given["schedule_context"].new_empty
    return (
        new((rows, width), dtype=dtype),
        new((given["expert_num"], 2), dtype=torch.int64),
        *(new((rows,), dtype=torch.int32) for _ in range(4)),
        new((rows,), dtype=torch.float32),
        new((1,), dtype=torch.int64),
    )


def _weighted(**given: Any) -> tuple[torch.Tensor, ...]:
    dtype = (torch.float16, torch.bfloat16)[given["token_dtype"]]
    new = given["schedule_context"].new_empty
    rows = given["expert_scales"].shape[0]
    return (
        new((rows, given["hidden_size"]), dtype=dtype),
        new((given["layer_id"].shape[0],), dtype=torch.int32),
    )


_CANN = (
    Operator(
        "npu::npu_attention_to_ffn",
        "Tensor x, Tensor session_id, Tensor micro_batch_id, Tensor layer_id, Tensor expert_ids, "
        "Tensor expert_rank_table, str group, int world_size, int[] ffn_token_info_table_shape, "
        "int[] ffn_token_data_shape, int[] attn_token_info_table_shape, int moe_expert_num, *, "
        "Tensor? scales=None, Tensor? active_mask=None, int quant_mode=0, int sync_flag=0, "
        "int ffn_start_rank_id=0",
        "()",
        "AttentionToFFN",
        _named(
            "x",
            "session_id",
            "micro_batch_id",
            "layer_id",
            "expert_ids",
            "expert_rank_table",
            "scales",
            "active_mask",
        ),
        _named(
            "group",
            "world_size",
            "ffn_token_info_table_shape",
            "ffn_token_data_shape",
            "attn_token_info_table_shape",
            "moe_expert_num",
            "quant_mode",
            "sync_flag",
            "ffn_start_rank_id",
        ),
        (),
        lambda **_: None,
    ),
    Operator(
        "npu::npu_ffn_worker_batching",
        "Tensor schedule_context, int expert_num, int[4] max_out_shape, *, int token_dtype=0, "
        "int need_schedule=0, int layer_num=0",
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        "FfnWorkerBatching",
        _named("schedule_context"),
        _named("expert_num", "max_out_shape", "token_dtype", "need_schedule", "layer_num"),
        (
            "y",
            "group_list",
            "session_ids",
            "micro_batch_ids",
            "token_ids",
            "expert_offsets",
            "dynamic_scale",
            "actual_token_num",
        ),
        _batched,
    ),
    Operator(
        "npu::npu_ffn_to_attention",
        "Tensor x, Tensor session_ids, Tensor micro_batch_ids, Tensor token_ids, "
        "Tensor expert_offsets, Tensor actual_token_num, str group, int world_size, "
        "int[] token_info_table_shape, int[] token_data_shape, *, Tensor? attn_rank_table=None",
        "()",
        "FFNToAttention",
        _named(
            "x",
            "session_ids",
            "micro_batch_ids",
            "token_ids",
            "expert_offsets",
            "actual_token_num",
            "attn_rank_table",
        ),
        _named("group", "world_size", "token_info_table_shape", "token_data_shape"),
        (),
        lambda **_: None,
    ),
    Operator(
        "npu::npu_attention_worker_combine",
        "Tensor schedule_context, Tensor expert_scales, Tensor layer_id, int hidden_size, *, "
        "int token_dtype=0, int need_schedule=0",
        "(Tensor, Tensor)",
        "AttentionWorkerCombine",
        _named("schedule_context", "expert_scales", "layer_id"),
        _named("hidden_size", "token_dtype", "need_schedule"),
        ("y", "next_layer_id"),
        _weighted,
    ),
)

CANN = Package("npu", *_CANN, carries_shared=True)
"""CANN's own operators."""

FORMS = {**PACKAGES, "cann": CANN}
"""Everything that a group can exchange rows with, by the name in its configuration."""
