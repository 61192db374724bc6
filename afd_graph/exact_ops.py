"""Operators that give a row the same bits however many rows they are called with.

For each operator of :data:`EXACT` there is ``afd::exact_<name>`` of the same schema, which calls it
with safe row counts only (:mod:`afd_graph.exact`). A *row* is everything behind the leading
dimensions that the operator treats alike. What is safe is found at the first call for each shape of
a row and of the other operands, dtype and number of threads, in the process and on the thread that
computes; a kernel that has no safe count is an :class:`ExactError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import afd_graph.ops  # noqa: F401  (registers afd::grouped_mm)
from afd_graph._compat import OpOverload
from afd_graph.exact import (
    Kernel,
    Result,
    SafeCounts,
    cancelling,
    in_safe_blocks,
    ordinary,
    safe_counts,
    sensitive,
)
from afd_graph.ffn.grouped_mm import grouped_mm_into

aten = torch.ops.aten
_GROUPED = torch.ops.afd.grouped_mm.default

EXACT: dict[OpOverload, OpOverload] = {}
"""From an operator to its exact one."""

_library = torch.library.Library("afd", "FRAGMENT")
_known: dict[object, SafeCounts] = {}


@dataclass(frozen=True)
class _Call:
    """One call seen as rows.

    Attributes:
        rows: ``[*leading, *row]``.
        leading: number of leading dimensions.
        kernel: the call on ``[count, *row]``.
        trial: makes the kernel to try and the rows to try it with.
    """

    rows: torch.Tensor
    leading: int
    kernel: Kernel
    trial: Callable[[], tuple[Kernel, list[torch.Tensor]]]


def _product(target: OpOverload, *args: Any) -> _Call:
    """``mm``, ``addmm``, ``linear`` and ``matmul``: rows times a matrix that all rows share."""
    at = 1 if target is aten.addmm.default else 0
    rows, matrix = args[at : at + 2]
    transposed = target is aten.linear.default
    if matrix.dim() != 2:
        raise NotImplementedError(f"{target}: the second operand is not a matrix")

    def kernel(block: torch.Tensor) -> torch.Tensor:
        return target(*args[:at], block, *args[at + 1 :])

    def trial() -> tuple[Kernel, list[torch.Tensor]]:
        size, columns = reversed(matrix.shape) if transposed else matrix.shape
        row, values = cancelling(size, columns, rows.dtype)
        other = torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype)
        other.copy_(values.t() if transposed else values)
        bias = [None if x is None else torch.zeros_like(x) for x in (*args[:at], *args[at + 2 :])]
        return (
            lambda block: target(*bias[:at], block, other, *bias[at:]),
            [row, ordinary(row.shape, row.dtype)],
        )

    return _Call(rows, rows.dim() - 1, kernel, trial)


def _elementwise(target: OpOverload, rows: torch.Tensor, *args: Any, **kwargs: Any) -> _Call:
    def kernel(block: torch.Tensor) -> torch.Tensor:
        return target(block, *args, **kwargs)

    leading = max(rows.dim() - 1, 0)

    def trial() -> tuple[Kernel, list[torch.Tensor]]:
        shape = rows.shape[leading:]
        values = sensitive(kernel, rows.dtype)
        if not values.numel():
            values = ordinary((1024,), rows.dtype)
        repeats = -(-shape.numel() // values.numel())
        return kernel, [values.repeat(repeats)[: shape.numel()].view(shape)]

    return _Call(rows, leading, kernel, trial)


def _along(target: OpOverload, rows: torch.Tensor, dims: Any, *args: Any, **kwargs: Any) -> _Call:
    """Reductions and softmax: a row is everything from the first dimension worked along."""
    rank = rows.dim()
    if not isinstance(dims, int):
        dims = list(dims) if dims else list(range(rank))
    behind = [d - rank if d >= 0 else d for d in ([dims] if isinstance(dims, int) else dims)]
    leading = rank + min(behind)
    along = behind[0] if isinstance(dims, int) else behind

    def kernel(block: torch.Tensor) -> torch.Tensor:
        return target(block, along, *args, **kwargs)

    return _Call(rows, leading, kernel, lambda: (kernel, _row_trials(rows, leading)))


def _layer_norm(target: OpOverload, rows: torch.Tensor, shape: Any, *args: Any) -> _Call:
    leading = rows.dim() - len(shape)

    def kernel(block: torch.Tensor) -> Result:
        return target(block, shape, *args)

    return _Call(rows, leading, kernel, lambda: (kernel, _row_trials(rows, leading)))


def _row_trials(rows: torch.Tensor, leading: int) -> list[torch.Tensor]:
    shape = rows.shape[leading:]
    trials = [ordinary(shape, rows.dtype, seed) for seed in range(4)]
    if rows.is_floating_point():
        trials.append(cancelling(shape.numel(), 0, rows.dtype)[0].view(shape))
    return trials


def _signature(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _run(target: OpOverload, view: Callable[..., _Call], *args: Any, **kwargs: Any) -> Result:
    call = view(target, *args, **kwargs)
    lead = call.rows.shape[: call.leading]
    rows = call.rows.reshape(lead.numel(), *call.rows.shape[call.leading :])
    key = (
        target,
        torch.get_num_threads(),
        rows.shape[1:],
        rows.dtype,
        call.leading - call.rows.dim(),
        tuple(_signature(x) for x in args if x is not call.rows),
        tuple((name, _signature(x)) for name, x in kwargs.items()),
    )
    safe = _known.get(key)
    if safe is None:
        kernel, trials = call.trial()
        what = f"{target} on rows {list(rows.shape[1:])} of {rows.dtype}"
        safe = _known[key] = safe_counts(kernel, trials, what=what)
    answer = in_safe_blocks(call.kernel, rows, safe)
    if isinstance(answer, torch.Tensor):
        return answer.reshape(*lead, *answer.shape[1:])
    return tuple(part.reshape(*lead, *part.shape[1:]) for part in answer)


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each expert's rows in calls of their own, of safe size."""
    out = rows.new_empty((rows.shape[0], weight.shape[2]))
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            matrix = weight[expert : expert + 1]
            block = rows[start : start + count]
            answer = _run(_GROUPED, _expert, block, matrix)
            assert isinstance(answer, torch.Tensor)
            out[start : start + count] = answer
            start += count
    return out


def _expert(target: OpOverload, rows: torch.Tensor, matrix: torch.Tensor) -> _Call:
    def product(block: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        out = block.new_empty((block.shape[0], matrix.shape[2]))
        return grouped_mm_into(block, matrix, torch.tensor([block.shape[0]]), out)

    def trial() -> tuple[Kernel, list[torch.Tensor]]:
        row, values = cancelling(matrix.shape[1], matrix.shape[2], rows.dtype)
        other = torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype)
        other[0] = values
        return (
            lambda block: product(block, other),
            [row, ordinary(row.shape, row.dtype)],
        )

    return _Call(rows, 1, lambda block: product(block, matrix), trial)


def _mul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Complex numbers by steps that are each rounded once; the kernel may fuse some of them."""
    if not (left.is_complex() and right.is_complex()):
        return left * right
    real = left.real * right.real - left.imag * right.imag
    return torch.complex(real, left.real * right.imag + left.imag * right.real)


_VIEWS: dict[OpOverload, Callable[..., _Call]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.linear.default: _product,
    aten.matmul.default: _product,
    aten.silu.default: _elementwise,
    aten.sigmoid.default: _elementwise,
    aten.gelu.default: _elementwise,
    aten.tanh.default: _elementwise,
    aten.exp.default: _elementwise,
    aten.log.default: _elementwise,
    aten.erf.default: _elementwise,
    aten.softplus.default: _elementwise,
    aten.rsqrt.default: _elementwise,
    aten.sqrt.default: _elementwise,
    aten.reciprocal.default: _elementwise,
    aten.pow.Tensor_Scalar: _elementwise,
    aten.mean.dim: _along,
    aten.sum.dim_IntList: _along,
    aten.prod.dim_int: _along,
    aten.logsumexp.default: _along,
    aten._softmax.default: _along,
    aten._safe_softmax.default: _along,
    aten._log_softmax.default: _along,
    aten.softmax.int: _along,
    aten.native_layer_norm.default: _layer_norm,
}


def _define(target: OpOverload, kernel: Callable[..., Any]) -> None:
    schema = target._schema
    name = f"exact_{schema.name.partition('::')[2]}"
    if schema.overload_name:
        name += f"_{schema.overload_name}"
    _library.define(name + str(schema)[str(schema).index("(") :])
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"afd::{name}", lambda *a, **k: target(*a, **k), lib=_library)
    EXACT[target] = getattr(torch.ops.afd, name).default


for _target, _view in _VIEWS.items():
    _define(_target, lambda *a, _t=_target, _v=_view, **k: _run(_t, _v, *a, **k))
_define(_GROUPED, _grouped_mm)
_define(aten.mul.Tensor, _mul)
