"""Start, watch and stop the FFN process; say how it died."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from afd_graph.connectors import wire
from afd_graph.connectors.wire import Message
from afd_graph.errors import ConnectorError

_BOOT = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options['path']; "
    "from afd_graph.connectors.ffn_process import main; main(options)"
)
_EXIT_S = 2.0  # a closed socket ends an idle FFN process at once; a busy one is killed after this
_SEND_S = 5.0  # messages are small and few: only a process that reads none for long blocks a send
# An answer that is about to come is awaited awake, which saves going to sleep and waking up.
_AWAKE_S = 1e-4
_STATES = {"T": "stopped", "t": "traced", "Z": "dead", "D": "in uninterruptible sleep"}
_COMPUTES = "raise timeout_s if one expert layer may take longer"
_STARTS = "see its messages on stderr; connector_options can raise start_timeout_s"

_Result = TypeVar("_Result")


class _SilentError(ConnectorError):
    """No message within the time limit."""


class ChildProcess:
    """One FFN process and the socket to it.

    Args:
        options: for :func:`afd_graph.connectors.ffn_process.main`, less those of the process.
        command: program and arguments before the JSON options; for tests.
    """

    def __init__(self, options: Mapping[str, Any], command: Sequence[str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            told = {
                **options,
                "descriptor": theirs.fileno(),
                "parent": os.getpid(),
                "path": sys.path,
            }
            try:
                self._process = subprocess.Popen(
                    [*(command or (sys.executable, "-c", _BOOT)), json.dumps(told)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                ours.close()
                raise ConnectorError(f"the FFN process cannot be started: {error}") from error
        ours.setblocking(False)
        self._socket = ours

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            ConnectorError: the process is dead, or has not taken messages for too long.
        """
        self._within(
            _SEND_S,
            time.monotonic(),
            select.POLLOUT,
            lambda: wire.send(self._socket, message, descriptors),
        )

    def receive(self, timeout_s: float, since_s: float) -> Message:
        """Wait for one message.

        Args:
            timeout_s: longest wait, in seconds.
            since_s: when the wait began, on the monotonic clock.

        Raises:
            ConnectorError: the process died, answered garbage, or not within ``timeout_s``.
        """
        try:
            message = self._within(
                timeout_s, since_s, select.POLLIN, lambda: wire.receive(self._socket)
            )
        except wire.GarbageError as error:
            raise ConnectorError(
                f"the FFN process (pid {self.pid}) answered garbage: {error}",
                remedy="check that both sides run the same version",
            ) from error
        if message is None:
            raise self._gone()
        return message

    def receive_at_start(self, timeout_s: float) -> Message:
        """Wait for one message of a process that starts or takes in a program.

        A busy machine may give it no processor for long. What is limited is the processor time
        that it takes, and the time in which it takes none at all.

        Raises:
            ConnectorError: as :meth:`receive`.
        """
        begin = last = self._processor_s()
        while True:
            try:
                return self.receive(timeout_s, time.monotonic())
            except _SilentError:
                now = self._processor_s()
                if now == last or now - begin >= timeout_s:
                    of = "" if now == last else " of processor time"
                    raise self._silent(f"{timeout_s:g} s{of}", _STARTS) from None
                last = now

    def _processor_s(self) -> float:
        """Processor time of the process so far, in seconds."""
        user, system = _stat(self.pid)[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _within(
        self, timeout_s: float, since_s: float, event: int, call: Callable[[], _Result]
    ) -> _Result:
        """Call until it does not block: awake for a moment, then asleep until ``event``."""
        deadline = since_s + timeout_s
        awake_until = min(time.monotonic() + _AWAKE_S, deadline)
        poller = None
        try:
            while True:
                try:
                    return call()
                except BlockingIOError:
                    now = time.monotonic()
                    if now < awake_until:
                        continue
                if poller is None:
                    poller = select.poll()
                    poller.register(self._socket, event)
                if now >= deadline or not poller.poll(max((deadline - now) * 1e3, 1.0)):
                    raise self._silent(f"{timeout_s:g} s", _COMPUTES)
        except (OSError, ValueError) as error:
            raise self._gone() from error

    def stop(self) -> None:
        """End the process and reap it; idempotent."""
        # Shutting down wakes a thread that waits on the socket; closing alone would not.
        with contextlib.suppress(OSError):  # the other side may be gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process, stopped or not, and reap it; idempotent."""
        self._process.kill()
        self._process.wait()

    def _silent(self, limit: str, remedy: str) -> ConnectorError:
        state = _STATES.get(_stat(self.pid)[0], "running")
        return _SilentError(
            f"the FFN process (pid {self.pid}) did not answer within {limit}; it is {state}",
            remedy="continue it (SIGCONT) and compile again" if state == "stopped" else remedy,
        )

    def _gone(self) -> ConnectorError:
        try:
            status = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"exited with status {status}"
            )
        return ConnectorError(
            f"the FFN process (pid {self.pid}) {how}",
            remedy="see its messages on stderr; compile with a new backend, or start vLLM again",
        )


def _stat(pid: int) -> list[str]:
    """What the kernel says of the process, from its state on; that of a dead one if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return ["Z", *["0"] * 12]
