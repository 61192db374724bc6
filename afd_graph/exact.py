"""Which row counts give every row the same bits, found by trying the kernel itself.

A kernel that treats rows alike may still round a row differently when it is called with another
number of rows: small products take another kernel, a vectorised loop ends in a scalar tail, threads
share the rows out. :func:`safe_counts` calls the kernel with copies of one row and keeps the counts
at which all copies, wherever they lie, get the bits that they get in the largest call.
:func:`in_safe_blocks` then calls the kernel with such counts only: rows beyond the largest in
blocks, a block of an unsafe count padded with zero rows up to the next safe one.

The rows tried are those whose rounding shows most: sums that cancel, so that nothing but their
rounding errors is left, and arguments at which the vectorised and the scalar function differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from afd_graph._compat import OpOverload
from afd_graph.errors import ExactError

Result = torch.Tensor | tuple[torch.Tensor, ...]
Kernel = Callable[[torch.Tensor], Result]
"""From ``[rows, ...]`` to one or several tensors ``[rows, ...]``."""

TRIED = (*range(1, 33), *range(48, 129, 16))
"""The counts that are tried by default; between 32 and 128 every sixteenth."""

_ALIGNMENT = 64  # what PyTorch's allocator gives; a kernel may treat other addresses differently
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SafeCounts:
    """Row counts at which a kernel gives every row the same bits, ascending; never empty."""

    counts: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The most rows that one call may have."""
        return self.counts[-1]

    def padded(self, rows: int) -> int:
        """The smallest safe count of at least ``rows``, which is at most :attr:`largest`."""
        return next(count for count in self.counts if count >= rows)

    def __and__(self, other: SafeCounts) -> SafeCounts | None:
        both = tuple(count for count in self.counts if count in other.counts)
        return SafeCounts(both) if both else None


def safe_counts(
    kernel: Kernel,
    rows: Sequence[torch.Tensor],
    *,
    what: str,
    tried: Sequence[int] = TRIED,
) -> SafeCounts:
    """Find the safe counts of ``kernel`` among ``tried``.

    Args:
        kernel: called with copies of one row.
        rows: rows to try, each without the leading row dimension.
        what: name of the kernel for the error.
        tried: counts, ascending.

    Raises:
        ExactError: at no count do all rows get the same bits.
    """
    safe = set(tried)
    for row in rows:
        answers = {count: _common_bits(kernel, row, count) for count in tried}
        uniform = [count for count in tried if answers[count] is not None]
        if not uniform:
            raise ExactError(
                f"exactness cannot be promised here: {what} with {torch.get_num_threads()} "
                f"threads gives equal rows different bits at every count tried, "
                f"{tried[0]} to {tried[-1]}",
                remedy="use exact=False, another dtype, or another number of threads",
            )
        expected = answers[uniform[-1]]
        safe &= {count for count in uniform if _equal(answers[count], expected)}
    if not safe:
        raise ExactError(
            f"exactness cannot be promised here: {what} has no row count that is safe for all "
            f"rows tried, with {torch.get_num_threads()} threads",
            remedy="use exact=False, another dtype, or another number of threads",
        )
    return SafeCounts(tuple(sorted(safe)))


def in_safe_blocks(kernel: Kernel, rows: torch.Tensor, safe: SafeCounts) -> Result:
    """Call ``kernel`` on ``rows [n, ...]`` with safe counts only."""
    total = rows.shape[0]
    if total <= safe.largest:
        return _block(kernel, rows, safe)
    pieces = [
        _block(kernel, rows[start : start + safe.largest], safe)
        for start in range(0, total, safe.largest)
    ]
    if isinstance(pieces[0], torch.Tensor):
        return torch.cat(pieces)  # type: ignore[arg-type]
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def _block(kernel: Kernel, rows: torch.Tensor, safe: SafeCounts) -> Result:
    count = rows.shape[0]
    if count == 0:
        return kernel(rows)
    padded = safe.padded(count)
    if padded == count and rows.is_contiguous() and rows.data_ptr() % _ALIGNMENT == 0:
        return kernel(rows)
    block = rows.new_zeros((padded, *rows.shape[1:]))
    block[:count] = rows
    answer = kernel(block)
    if isinstance(answer, torch.Tensor):
        return answer[:count]
    return tuple(part[:count] for part in answer)


def _common_bits(kernel: Kernel, row: torch.Tensor, count: int) -> tuple[torch.Tensor, ...] | None:
    """The bits that all of ``count`` copies of ``row`` get, or None if they differ."""
    answer = kernel(row.expand(count, *row.shape).contiguous())
    parts = (answer,) if isinstance(answer, torch.Tensor) else answer
    bits = tuple(_bits(part) for part in parts)
    if all(torch.equal(part, part[:1].expand_as(part)) for part in bits):
        return tuple(part[0].clone() for part in bits)
    return None


def _equal(left: tuple[torch.Tensor, ...] | None, right: tuple[torch.Tensor, ...] | None) -> bool:
    if left is None or right is None:
        return False
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _bits(values: torch.Tensor) -> torch.Tensor:
    # Compared as integers: 0.0 and -0.0 are equal numbers, and a NaN equals nothing.
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_BITS[values.dtype.itemsize])


def cancelling(size: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A row ``[size]`` and a matrix ``[size, columns]`` whose product is zero but for rounding.

    Every term comes twice, with both signs, at places far apart and of very different magnitude:
    another order of the sum leaves another remainder.
    """
    generator = torch.Generator().manual_seed(size)
    half = size // 2
    # Values drawn in fp32 would make products and sums in fp64 exact, and hide the order.
    drawn = torch.promote_types(dtype, torch.float32)

    def wide(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-5, 6, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=drawn) * torch.exp2(exponents)

    row, matrix = wide(half), wide(half, columns)
    order = torch.randperm(2 * half, generator=generator)
    row, matrix = torch.cat([row, -row])[order], torch.cat([matrix, matrix])[order]
    if size % 2:
        row, matrix = torch.cat([row, row.new_zeros(1)]), torch.cat([matrix, wide(1, columns)])
    return row.to(dtype), matrix.to(dtype)


def ordinary(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.promote_types(dtype, torch.float32)
    return torch.randn(tuple(shape), generator=generator, dtype=drawn).to(dtype)


def sensitive(kernel: Kernel, dtype: torch.dtype) -> torch.Tensor:
    """Arguments at which an element-wise kernel's vectorised and scalar paths differ, if any.

    All values of a 16-bit dtype are tried, a sample of others. A strided tensor takes the scalar
    path.
    """
    if dtype.itemsize == 2:
        values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        values = values[values.isfinite()]
    else:
        values = ordinary((1 << 16,), dtype) * 3
    vectorised, scalar = kernel(values), kernel(_strided(values))
    assert isinstance(vectorised, torch.Tensor)
    assert isinstance(scalar, torch.Tensor)
    return values[_bits(vectorised) != _bits(scalar)]


@cache
def check_elementwise(target: OpOverload, dtype: torch.dtype) -> None:
    """Try whether arithmetic of two operands is rounded alike on the vectorised and scalar path.

    Raises:
        ExactError: it is not.
    """
    left, right = (ordinary((1 << 14,), dtype, seed) for seed in (0, 1))
    by_number = target._schema.arguments[1].type.kind() == "NumberType"
    vectorised = target(left, 0.7 if by_number else right)
    scalar = target(_strided(left), 0.7 if by_number else _strided(right))
    if not torch.equal(_bits(vectorised), _bits(scalar)):
        raise ExactError(
            f"exactness cannot be promised here: {target} in {dtype} rounds elements at the end "
            "of a tensor in another way than those before",
            remedy="use exact=False, or another dtype",
        )


def _strided(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(values.numel(), 2)[:, 0].copy_(values)
