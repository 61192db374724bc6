"""Operators that check, while a step runs, what the compiler took for granted.

Inserted by the passes with ``AFDConfig(check_values=True)``. They read tensor values, so they
synchronise; they change nothing.
"""

from __future__ import annotations

import torch
from torch.fx.node import has_side_effect

from afd_graph.errors import AFDError

_library = torch.library.Library("afd", "FRAGMENT")
_library.define("check_masked(Tensor mask, str where) -> ()")
_library.define("check_zero(Tensor rows, str where) -> ()")


def _check_masked(mask: torch.Tensor, where: str) -> None:
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    if not bool(hidden.all()):
        raise AFDError(
            "an attention mask lets stage 0 see keys of stage 1",
            node=where,
            remedy="do not set assume_causal for this model, or use split='request'",
        )


def _check_zero(rows: torch.Tensor, where: str) -> None:
    if bool(rows.any()):
        raise AFDError(
            "padding rows are not zero where they are dropped",
            node=where,
            remedy="something between two sums of tensor parallelism adds to zero rows (a bias?): "
            "set sequence_parallel=False",
        )


for _name, _kernel in (("check_masked", _check_masked), ("check_zero", _check_zero)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"afd::{_name}", lambda tensor, where: None, lib=_library)
    has_side_effect(getattr(torch.ops.afd, _name).default)
