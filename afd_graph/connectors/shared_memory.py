"""Anonymous shared memory that grows, seen as tensors by two processes (Linux).

A segment is a ``memfd``: it has no name, so nothing is left behind when a process is killed, and
it is freed with its last descriptor and mapping. It can grow but never shrink (sealed), so that a
mapping that was valid stays valid.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

ALIGNMENT = 64


def aligned(size: int) -> int:
    """Round ``size`` bytes up so that a tensor may start there."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Segment:
    """One shared segment and this process's mapping of it.

    Args:
        descriptor: of the memory; owned by the segment from here on.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str) -> Segment:
        """Make an empty segment; ``name`` is only shown by ``/proc``."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(descriptor)

    @property
    def mapped(self) -> int:
        """Bytes that this process has mapped."""
        return 0 if self._mapping is None else len(self._mapping)

    def grow(self, size: int) -> None:
        """Make the memory at least ``size`` bytes long and map it.

        Tensors of an earlier mapping stay valid and show the same memory.
        """
        if size > self.mapped:
            # In steps of a quarter, so that growing lengths do not map at every step.
            size = max(size, self.mapped + self.mapped // 4)
            if size > os.fstat(self.descriptor).st_size:
                os.ftruncate(self.descriptor, size)
            self._mapping = mmap.mmap(self.descriptor, size)

    def map(self, size: int) -> None:
        """Map at least ``size`` bytes of what the other process has grown.

        Raises:
            ValueError: the memory is shorter.
        """
        if size > self.mapped:
            length = os.fstat(self.descriptor).st_size
            if size > length:
                raise ValueError(f"{size} bytes of shared memory expected, {length} are there")
            self._mapping = mmap.mmap(self.descriptor, length)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """View memory at byte ``offset`` as a contiguous tensor; it keeps the mapping alive."""
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(*shape, dtype=dtype)
        assert self._mapping is not None
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset).view(*shape)

    def write(self, offset: int, data: bytes) -> None:
        """Put ``data`` at byte ``offset``."""
        assert self._mapping is not None
        self._mapping[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> bytes:
        """Copy ``size`` bytes from byte ``offset``."""
        assert self._mapping is not None
        return self._mapping[offset : offset + size]

    def unmap(self) -> None:
        """Drop the mapping; it ends with the last tensor over it. The memory stays."""
        self._mapping = None

    def close(self) -> None:
        """Drop mapping and descriptor; idempotent."""
        self._mapping = None
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
