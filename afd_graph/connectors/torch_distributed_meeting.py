"""Where ranks meet that have no process group in common: a store at an address, and a group.

For attention ranks inside a program with a process group of its own, such as a server's workers.
Attention rank 0 listens at the address and all others connect to it, in any order. Each takes its
place under its number, so that a rank that was started twice, or belongs to another run, is
refused before a group is made.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from afd_graph.errors import ConfigError, ConnectorError

_TRY_S = 2.0  # longest single attempt to connect
_PAUSE_S = 0.2


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"address={address!r} is not HOST:PORT", remedy="use an address as 127.0.0.1:29600"
        )
    return host.strip("[]"), int(port)


def open_store(address: str, *, listen: bool, timeout_s: float) -> dist.Store:
    """The store at ``address``, held by this process or by another one.

    Args:
        address: ``HOST:PORT``.
        listen: whether this process holds it.
        timeout_s: longest wait for the process that does.

    Raises:
        ConnectorError: nobody listens there in time, or somebody else does already.
    """
    host, port = parse_address(address)
    limit = timedelta(seconds=timeout_s)
    try:
        if not listen:
            _wait_for_listener(host, port, timeout_s)
        return dist.TCPStore(host, port, is_master=listen, timeout=limit, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        what = "cannot listen" if listen else "nobody listens"
        raise ConnectorError(
            f"{what} at {address}: {str(error).splitlines()[0]}",
            remedy="attention rank 0 listens at this address: give the same one, and a free one, "
            "to both roles",
        ) from error


def take_place(store: dist.Store, rank: int) -> None:
    """Be rank ``rank`` of those that meet at ``store``.

    Raises:
        ConnectorError: another process or thread is it already.
    """
    mine = f"{socket.gethostname()} process {os.getpid()} thread {threading.get_native_id()}"
    found = store.compare_set(f"place {rank}", "", mine).decode()
    if found != mine:
        raise ConnectorError(
            f"rank {rank} is there already: {found}, and now {mine}",
            remedy="start every rank once, with a number of its own",
        )


def make_group(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of all ranks that nothing else in this process knows.

    Raises:
        ConnectorError: the group was not made.
    """
    try:
        return dist.ProcessGroupGloo(  # type: ignore[return-value]
            dist.PrefixStore("group", store), rank, size, timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise ConnectorError(
            f"the group of {size} ranks was not made: {str(error).splitlines()[0]}",
            remedy="see the messages of the other ranks; all must reach each other",
        ) from error


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    # A plain connection, tried again and again: the store's own client cannot be interrupted.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), _TRY_S).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)
