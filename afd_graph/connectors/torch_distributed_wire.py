"""What travels between an attention rank and an FFN rank, and how it is checked.

A message is a *header* and, where there are rows, one or two *payloads*::

    attention -> FFN   ITEM    counts of this rank's experts | rows | shared rows
                       PROGRAM                               | description as JSON
                       PING, BYE
    FFN -> attention   ANSWER  when the experts ran          | rows | shared rows
                       ERROR   what the experts said         | (anything) | (anything)
                       PONG

Headers are host memory and travel over gloo, also where rows live on a device. The receiver of a
header knows from it how large the payloads are, so nothing is sent padded. Answers are as large as
what they answer: their receives are posted when the item is sent, and the transfer needs no
agreement when the answer comes. All messages of a kind between two ranks arrive in order.

gloo completes a receive whose message was too short without a word. Hence every header carries its
length and a checksum, and every buffer that rows are received into is *armed*: its last bytes are
drawn at random, and a message that leaves them as they were was cut short.
"""

from __future__ import annotations

import enum
import os
import struct
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from afd_graph.errors import ConnectorError

MAGIC = 0x41464447
MAX_HEADER = 1 << 15
"""Bytes; some 4,000 experts a rank."""
NO_SHARED_ROWS = -1
NO_PARENT_ROWS = -1

_FIXED = struct.Struct("<12q")
_CHECKSUM = struct.Struct("<q")
_CANARY = 8
# Receives of headers stay posted while a rank is idle; gloo's own limit would end them.
_FOR_EVER = timedelta(days=365)


class Tag(enum.IntEnum):
    """Tags of point-to-point messages; devices without tags rely on the order alone."""

    REQUEST = 1
    REQUEST_ROWS = 2
    REQUEST_SHARED = 3
    ANSWER = 4
    ANSWER_ROWS = 5
    ANSWER_SHARED = 6


class Kind(enum.IntEnum):
    """What a message is."""

    ITEM = 1
    PROGRAM = 2
    PING = 3
    BYE = 4
    ANSWER = 5
    ERROR = 6
    PONG = 7


class GarbageError(ConnectorError):
    """A message that no rank of ours would send."""


@dataclass
class Header:
    """The header of a message.

    Attributes:
        kind: what it is.
        sequence: number of the item, counted by each attention rank for itself.
        layer: MoE layer; -1 without one.
        stage: token stage.
        rows: rows in the payload; bytes of a description.
        shared_rows: rows for the shared experts; :data:`NO_SHARED_ROWS` without them.
        parent_rows: tokens of the stage on all ranks of the replica together, where each sends a
            share of them; else :data:`NO_PARENT_ROWS`.
        begin_ns: when the experts began; the FFN rank's clock.
        end_ns: when they ended, or what the clock says in a PONG.
        sent_ns: when this message was sent; the sender's clock.
        counts: rows per expert of the FFN rank.
        text: what went wrong.
    """

    kind: Kind
    sequence: int = 0
    layer: int = -1
    stage: int = 0
    rows: int = 0
    shared_rows: int = NO_SHARED_ROWS
    parent_rows: int = NO_PARENT_ROWS
    begin_ns: int = 0
    end_ns: int = 0
    sent_ns: int = 0
    counts: Sequence[int] = field(default_factory=list)
    text: str = ""

    def encode(self) -> torch.Tensor:
        """As uint8."""
        if self.text:
            tail = self.text.encode()[: MAX_HEADER - 256]
        else:
            tail = array("q", self.counts).tobytes()
        fixed = _FIXED.pack(
            *(MAGIC, self.kind, self.sequence, self.layer, self.stage, self.rows),
            *(self.shared_rows, self.parent_rows, self.begin_ns, self.end_ns, self.sent_ns),
            len(tail),
        )
        content = fixed + tail
        whole = bytearray(content + _CHECKSUM.pack(zlib.crc32(content)))
        if len(whole) > MAX_HEADER:
            raise ConnectorError(
                f"{len(self.counts)} experts on one FFN rank do not fit a header",
                layer=self.layer,
                remedy="use more FFN ranks",
            )
        return torch.frombuffer(whole, dtype=torch.uint8)

    @classmethod
    def decode(cls, received: torch.Tensor) -> Header:
        """From uint8.

        Raises:
            GarbageError: not a header, or one that was cut short.
        """
        data = received.numpy().tobytes()
        magic, kind, *numbers, tail_size = _FIXED.unpack_from(data)
        end = _FIXED.size + tail_size
        if magic != MAGIC or not 0 <= tail_size <= len(data) - _FIXED.size - _CHECKSUM.size:
            raise GarbageError(f"a message began with {data[:16].hex()}, which is no header")
        (checksum,) = _CHECKSUM.unpack_from(data, end)
        if checksum != zlib.crc32(data[:end]) or kind not in Kind._value2member_map_:
            raise GarbageError("a header was cut short or changed on its way")
        header = cls(Kind(kind), *numbers)
        tail = data[_FIXED.size : end]
        if header.kind is Kind.ERROR:
            header.text = tail.decode(errors="replace")
        else:
            header.counts = array("q", tail).tolist()
        return header


def arm(buffer: torch.Tensor) -> bytes:
    """Write random bytes to the end of what a message will fill; returns them."""
    if buffer.device.type != "cpu" or not buffer.numel():
        return b""
    end = buffer.view(torch.uint8).view(-1)[-_CANARY:]
    canary = os.urandom(end.numel())
    end.copy_(torch.frombuffer(bytearray(canary), dtype=torch.uint8))
    return canary


def is_whole(buffer: torch.Tensor, canary: bytes) -> bool:
    """Whether a message filled ``buffer`` to its end."""
    if not canary:
        return True
    return bytes(buffer.view(torch.uint8).view(-1)[-len(canary) :].tolist()) != canary


@dataclass
class Posted:
    """A posted receive of a header or of rows."""

    buffer: torch.Tensor
    work: dist.Work
    canary: bytes

    def wait(self) -> None:
        """Wait for the message, however long.

        Raises:
            RuntimeError: the other side is gone.
            GarbageError: the message was too short.
        """
        self.work.wait(_FOR_EVER)
        if not is_whole(self.buffer, self.canary):
            raise GarbageError(f"a message of {self.buffer.nbytes} bytes was cut short")


class Link:
    """The two directions between this rank and one other.

    Args:
        peer: the other's world rank.
        requests: process group that requests travel in.
        answers: process group that answers travel in.
        latency_s: delay every header by this many seconds.
    """

    def __init__(
        self,
        peer: int,
        requests: dist.ProcessGroup,
        answers: dist.ProcessGroup,
        latency_s: float = 0.0,
    ) -> None:
        self.peer = peer
        self._requests, self._answers = requests, answers
        self._latency_ns = round(latency_s * 1e9)

    def send(self, tensor: torch.Tensor, tag: Tag) -> dist.Work:
        """Start sending ``tensor``, contiguous; keep it until the work is done."""
        return self._group(tag).send([tensor], self.peer, tag)

    def send_header(self, header: Header, tag: Tag) -> tuple[torch.Tensor, dist.Work]:
        """Start sending ``header``; keep both returned values until the work is done."""
        header.sent_ns = time.perf_counter_ns()
        encoded = header.encode()
        return encoded, self.send(encoded, tag)

    def post(self, buffer: torch.Tensor, tag: Tag) -> Posted:
        """Post the receive of rows into ``buffer``, which they fill."""
        canary = arm(buffer)
        return Posted(buffer, self._group(tag).recv([buffer], self.peer, tag), canary)

    def post_header(self, buffer: torch.Tensor, tag: Tag) -> Posted:
        """Post the receive of a header into ``buffer`` of :data:`MAX_HEADER` bytes."""
        buffer[: _FIXED.size].zero_()
        return Posted(buffer, self._group(tag).recv([buffer], self.peer, tag), b"")

    def read_header(self, posted: Posted) -> Header:
        """Wait for a header and decode it; with an emulated latency, not before its time."""
        posted.wait()
        header = Header.decode(posted.buffer)
        if self._latency_ns:
            # Ranks of one machine read one clock.
            rest = header.sent_ns + self._latency_ns - time.perf_counter_ns()
            time.sleep(max(0.0, rest * 1e-9))
        return header

    def _group(self, tag: Tag) -> dist.ProcessGroup:
        return self._answers if tag >= Tag.ANSWER else self._requests


def header_buffer() -> torch.Tensor:
    """Memory to receive a header in."""
    return torch.zeros(MAX_HEADER, dtype=torch.uint8)


class Memory:
    """Bytes that grow when needed and are used again."""

    def __init__(self, device: str) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def rows(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The first bytes as ``[rows, width]``."""
        return self.bytes(rows * width * dtype.itemsize).view(dtype).view(rows, width)

    def like(self, rows: torch.Tensor) -> torch.Tensor:
        """The first bytes with shape and dtype of ``rows``."""
        return self.bytes(rows.nbytes).view(rows.dtype).view(rows.shape)

    def bytes(self, size: int) -> torch.Tensor:
        """The first ``size`` bytes; the values are lost when they must grow."""
        if self._bytes.numel() < size:
            self._bytes = self._bytes.new_empty(size)
        return self._bytes[:size]
