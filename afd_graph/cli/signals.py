"""How a command that runs until it is told ends: by a signal, past threads that wait in gloo."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import click


class Told(BaseException):
    """A signal asked this process to end."""


class Signals:
    """SIGINT and SIGTERM while this is entered.

    A signal raises :class:`Told` in the main thread, which ends whatever that is waiting for. An
    exception that comes while an object is freed is lost, so the signal is also remembered, and
    :attr:`tell` is called.

    Attributes:
        name: of the signal that came; None before.
        tell: called with the name, on a thread of its own.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.tell: Callable[[str], None] = lambda name: None
        self._before: dict[int, Any] = {}

    def _came(self, number: int, _: Any) -> None:
        self.name = signal.Signals(number).name
        threading.Thread(target=self.tell, args=(self.name,), daemon=True).start()
        raise Told

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def end(ctx: click.Context, code: int, *, at_once: bool = False) -> NoReturn:
    """End with ``code``, at once where threads wait in gloo.

    They cannot be woken, and gloo aborts a process whose interpreter ends under them.

    Args:
        ctx: of the command.
        code: exit code.
        at_once: there are such threads, in a group that is not the default one.
    """
    import torch.distributed as dist

    if at_once or dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    ctx.exit(code)
