"""The window of one rank that CANN's own operators exchange rows through, and its schedule context.

The window is memory of the HCCL group that the ranks of the other role write to. What lies where
in it, and whose turn it is, is in the schedule context: 1024 bytes on the device, which torch_npu
makes and the operators read and change.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import ConfigError
from afd_graph.lowering.ascend.cann_exchange import window_shapes

_FFN, _ATTENTION = 0, 1
_ALIGNMENT = 512
_INFO_BYTES = 4


@dataclass
class Window:
    """An open window.

    Attributes:
        context: the schedule context, int8 ``[1024]`` on the device.
        holder: what keeps it alive.
    """

    context: torch.Tensor
    holder: Any

    def close(self) -> None:
        """Stop who waits for the window."""
        self.holder.stop_schedule()


def open_window(
    group: CamGroup,
    process_group: Any,
    *,
    hidden_size: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype,
) -> Window:
    """Register this rank's window with the ranks of the other role and make its context.

    Raises:
        ConfigError: the group was made by somebody else, who would have to register the window.
    """
    if process_group is None:
        raise ConfigError(
            "operators='cann' register a window with the HCCL group, and only its name is known",
            remedy="pass host and port instead of group_name",
        )
    shapes = window_shapes(group, hidden_size, top_k)
    sent = shapes["ffn_token_data_shape"][-1] * (1 if group.dynamic_quant else dtype.itemsize)
    answered = hidden_size * dtype.itemsize
    rows, slots = group.rows_per_dispatch, top_k + 1
    sizes = {
        "session_num": group.attention_ranks,
        "micro_batch_num": 1,
        "micro_batch_size": rows,
        "selected_expert_num": slots,
        "expert_num": num_experts + 1,
        "attn_to_ffn_token_size": sent,
        "ffn_to_attn_token_size": answered,
    }
    if group.is_attention:
        info, data = rows * slots, rows * slots * answered
        others = list(range(group.attention_ranks, group.world_size))
    else:
        info = group.attention_ranks * (2 + rows * slots)
        data = group.attention_ranks * rows * slots * sent
        others = list(range(group.attention_ranks))
    size = _aligned(info * _INFO_BYTES) + _aligned(data)
    process_group._window_register_and_exchange(size, others)
    window = process_group._get_window_mem()
    place = {"window": window.data_ptr(), "window_size": size}
    mode, role = (_ATTENTION, "attention") if group.is_attention else (_FFN, "ffn")
    make = importlib.import_module("torch_npu._afd").create_schedule_context_holder
    holder = make(
        schedule_mode=mode, **sizes, **{f"{role}_{name}": value for name, value in place.items()}
    )
    return Window(holder.get_schedule_context_tensor(), holder)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
