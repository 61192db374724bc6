"""What the two processes of the ``process`` connector say to each other.

Every message is one packet of a ``SOCK_SEQPACKET`` socket pair: a fixed header, a text where the
kind has one (the cause of an error), and file descriptors where it has some. Rows never travel
here; they lie in a slot of shared memory whose layout follows from the header:

    to the experts    rows [m, h] | counts int64 [experts] | shared rows [n, h]
    back              rows [m, h] | shared rows [n, h]
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from afd_graph.connectors.shared_memory import aligned

_MAGIC = b"AFD1"
_HEADER = struct.Struct("<4s4i5q")
_MAX_TEXT = 4096
_MAX_DESCRIPTORS = 64
NO_SHARED_ROWS = -1


class Kind(enum.IntEnum):
    """Kinds of messages; the comment says who sends it and what travels along."""

    SLOTS = 1  # attention: descriptors, of the slots to the experts and then of those back
    PROGRAM = 2  # attention: rows = bytes of the description; descriptor of program and weights
    ITEM = 3  # attention
    READY = 4  # experts: running
    KNOWN = 5  # experts: the program of ``layer`` can run
    ANSWER = 6  # experts
    ERROR = 7  # experts: text; the item or program of ``layer`` failed, the process goes on


class Message(NamedTuple):
    """A header; fields that a kind has no use for are 0.

    ``begin_ns`` and ``end_ns`` say when the experts computed an answer. Both processes read the
    same monotonic clock.
    """

    kind: Kind
    layer: int = 0
    stage: int = 0
    slot: int = 0
    ticket: int = 0
    rows: int = 0
    shared_rows: int = NO_SHARED_ROWS
    begin_ns: int = 0
    end_ns: int = 0
    text: str = ""


class GarbageError(Exception):
    """A packet is no message."""


class ItemLayout(NamedTuple):
    """Byte offsets in the slots of one item, and how long the slots must be."""

    counts: int
    shared: int
    size: int
    answer_shared: int
    answer_size: int


def item_layout(rows: int, shared_rows: int, width: int, itemsize: int, experts: int) -> ItemLayout:
    """Lay out an item of ``rows`` (and ``shared_rows`` or NO_SHARED_ROWS) of ``width`` values."""
    row_bytes = aligned(rows * width * itemsize)
    shared_bytes = aligned(max(shared_rows, 0) * width * itemsize)
    shared = row_bytes + aligned(8 * experts)
    return ItemLayout(row_bytes, shared, shared + shared_bytes, row_bytes, row_bytes + shared_bytes)


def send(wire: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message; raises OSError when the other side is gone."""
    packet = _HEADER.pack(_MAGIC, *message[:-1]) + message.text.encode()[:_MAX_TEXT]
    if descriptors:
        socket.send_fds(wire, [packet], descriptors)
    else:
        wire.send(packet)


def receive(wire: socket.socket) -> Message | None:
    """Receive one message without descriptors; None when the other side is gone.

    Raises:
        GarbageError: the packet is no message.
        TimeoutError: nothing came within the socket's timeout.
    """
    return _parse(wire.recv(_HEADER.size + _MAX_TEXT + 1))


def receive_with_descriptors(wire: socket.socket) -> tuple[Message | None, list[int]]:
    """Receive one message and the descriptors that travel with it; raises as :func:`receive`."""
    packet, descriptors, _, _ = socket.recv_fds(
        wire, _HEADER.size + _MAX_TEXT + 1, _MAX_DESCRIPTORS
    )
    return _parse(packet), descriptors


def _parse(packet: bytes) -> Message | None:
    if not packet:
        return None
    if len(packet) < _HEADER.size or len(packet) > _HEADER.size + _MAX_TEXT:
        raise GarbageError(f"a packet of {len(packet)} bytes")
    magic, kind, *fields = _HEADER.unpack_from(packet)
    if magic != _MAGIC or kind not in Kind._value2member_map_:
        raise GarbageError(f"a packet that starts with {packet[:8]!r}")
    text = packet[_HEADER.size :].decode(errors="replace")
    return Message._make((Kind(kind), *fields, text))
