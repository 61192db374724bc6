"""The grouped product on CPU: rows sorted by expert times each expert's own matrix.

One ``mm`` per expert that has rows, written into its slice of the answer. PyTorch's
``_grouped_mm`` does the same on CPU, no faster, and not for fp64. Where a 16-bit dtype has no
kernel of its own on this CPU, its plain ``mm`` takes up to 25 times as long as one in fp32; such
products are taken in fp32 and rounded once.
"""

from __future__ import annotations

from functools import cache

import torch

from afd_graph._compat import has_fast_mm


@cache
def _widened(dtype: torch.dtype) -> bool:
    return not has_fast_mm(dtype)


def grouped_mm_into(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write the products to ``out [m, n]`` and return it.

    Args:
        rows: ``[m, k]``, grouped by expert in ascending order.
        weight: ``[experts, k, n]``, any strides, dtype of ``rows``.
        counts: integer ``[experts]``, rows per expert; their sum is ``m``.
        out: ``[m, n]``, dtype of ``rows``; every row is written.

    Raises:
        RuntimeError: the counts do not fit the rows or the experts.
    """
    sizes = counts.tolist()
    torch._check(
        len(sizes) == weight.shape[0] and sum(sizes) == rows.shape[0],
        lambda: (
            f"grouped_mm: counts {sizes} do not fit {rows.shape[0]} rows and "
            f"{weight.shape[0]} experts"
        ),
    )
    product = _wide_mm if _widened(rows.dtype) else _mm
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            stop = start + size
            product(rows[start:stop], weight[expert], out[start:stop])
            start = stop
    return out


def _mm(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(rows, matrix, out=out)


def _wide_mm(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.mm(rows.float(), matrix.float()))
