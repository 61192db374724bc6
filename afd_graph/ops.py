"""The operators that the passes insert, namespace ``afd``, with their fake kernels.

Inputs and outputs are plain tensors and integers so that every lowering can carry them. A
dispatch returns a *handle*, an ``int64 [1]`` tensor that its receive consumes: the data edge
orders the two for every compiler. ``channel`` names the runtime object that does the work
(:mod:`afd_graph.runtime`), the way a process group's name does for collectives. ``parent_rows``
is given when the rows are one rank's share of that many.
"""

from __future__ import annotations

import torch
from torch.fx.node import has_side_effect

from afd_graph.ffn.grouped_mm import grouped_mm_into
from afd_graph.runtime import channel as _channel

_library = torch.library.Library("afd", "DEF")

_library.define(
    "cam_dispatch(Tensor hidden, Tensor topk_ids, int layer, int stage, str channel, *, "
    "SymInt? parent_rows=None) -> Tensor"
)
_library.define(
    "cam_receive(Tensor handle, Tensor hidden, Tensor topk_weights, int layer, int stage, "
    "str channel, *, SymInt? parent_rows=None) -> Tensor"
)
_library.define("grouped_mm(Tensor rows, Tensor weight, Tensor counts) -> Tensor")


def _dispatch(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    layer: int,
    stage: int,
    channel: str,
    *,
    parent_rows: int | None = None,
) -> torch.Tensor:
    ticket = _channel(channel).dispatch(hidden, topk_ids, layer, stage, parent_rows)
    return torch.tensor([ticket], dtype=torch.int64)


def _dispatch_fake(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    layer: int,
    stage: int,
    channel: str,
    *,
    parent_rows: int | torch.SymInt | None = None,
) -> torch.Tensor:
    torch._check(hidden.dim() == 2 and topk_ids.dim() == 2, lambda: "rows must be 2-D")
    torch._check(hidden.shape[0] == topk_ids.shape[0], lambda: "one row of ids per token")
    return hidden.new_empty((1,), dtype=torch.int64)


def _receive(
    handle: torch.Tensor,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: int,
    stage: int,
    channel: str,
    *,
    parent_rows: int | None = None,
) -> torch.Tensor:
    return _channel(channel).receive(int(handle), hidden, topk_weights, layer, stage, parent_rows)


def _receive_fake(
    handle: torch.Tensor,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: int,
    stage: int,
    channel: str,
    *,
    parent_rows: int | torch.SymInt | None = None,
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty((rows.shape[0], weight.shape[-1]))
    return grouped_mm_into(rows, weight, counts, out)


def _grouped_mm_fake(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    torch._check(rows.dim() == 2 and weight.dim() == 3, lambda: "rows 2-D, weight 3-D")
    torch._check(rows.shape[1] == weight.shape[1], lambda: "inner sizes differ")
    return rows.new_empty((rows.shape[0], weight.shape[2]))


for _name, _kernel, _fake in (
    ("cam_dispatch", _dispatch, _dispatch_fake),
    ("cam_receive", _receive, _receive_fake),
    ("grouped_mm", _grouped_mm, _grouped_mm_fake),
):
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"afd::{_name}", _fake, lib=_library)

for _effect in ("cam_dispatch", "cam_receive"):
    has_side_effect(getattr(torch.ops.afd, _effect).default)
