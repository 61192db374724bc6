"""A TCP port that stays free until whoever needs it has started."""

from __future__ import annotations

import contextlib
import random
import socket

# Linux hands out higher ones by itself, to any connection of any program.
_NEVER_HANDED_OUT = range(20_000, 32_000)


def free_port() -> int:
    """A port of this machine that nobody listens at, and that nobody gets unasked.

    Raises:
        RuntimeError: a hundred of them are taken.
    """
    for port in random.SystemRandom().sample(_NEVER_HANDED_OUT, 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports are taken")
