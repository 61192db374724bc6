"""What every command does that runs a rank of the FFN role: serve, show its state, end."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import click

from afd_graph.cli.output import note
from afd_graph.cli.signals import Signals, Told, end
from afd_graph.errors import AFDError

_WORLD_OPTIONS = (
    click.option("--dtype", help="Of weights and rows.  [default: the checkpoint's]"),
    click.option("--dynamic-quant", is_flag=True, help="Send int8 rows with one scale each."),
    click.option(
        "--credits",
        "credit_count",
        type=click.IntRange(1),
        default=2,
        show_default=True,
        help="Dispatches in flight.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=float,
        default=60.0,
        show_default=True,
        help="Seconds after which a rank that does not respond is an error.",
    ),
    click.option(
        "--connect-timeout",
        "connect_timeout_s",
        type=float,
        default=600.0,
        show_default=True,
        help="Seconds that all ranks may take to start and load.",
    ),
    click.option(
        "--threads", type=click.IntRange(1), default=1, show_default=True, help="Of this rank."
    ),
)
_STATE_S = 1.0  # how often the state on a terminal is renewed


def world_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the options on which the ranks of a world must agree, and its threads."""
    for option in reversed(_WORLD_OPTIONS):
        command = option(command)
    return command


def serve_experts(world: Any, experts: Any, policy: str) -> None:
    """Serve until all attention ranks have left or a signal comes; SIGUSR1 prints the state.

    Args:
        world: the world.
        experts: weights of this rank.
        policy: split policy that the attention ranks must have; empty accepts any.

    Raises:
        ConnectorError: the world failed.
    """
    from afd_graph.ffn.server import FFNServer

    server = FFNServer(world, experts, policy)
    signal.signal(signal.SIGUSR1, lambda *_: note(json.dumps(asdict(server.status()))))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: server.stop(signal.Signals(n).name))
    with _state_line(lambda: _state(world, server)):
        server.serve()
    note(_state(world, server))


def run_rank(ctx: click.Context, run: Callable[[Signals], None], *, at_once: bool = False) -> None:
    """Run one rank to its end and leave the process: 0, 1 with a message, or by the signal.

    Args:
        ctx: of the command.
        run: the rank.
        at_once: it makes a group that is not the default one (:func:`afd_graph.cli.signals.end`).
    """
    with Signals() as signals:
        try:
            run(signals)
        except (Told, Exception) as error:
            if signals.name is not None:
                note(f"afd-graph: told to stop by {signals.name}")
                end(ctx, 128 + signal.Signals[signals.name], at_once=at_once)
            # What happens while Dynamo compiles comes inside of an error of its own.
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, AFDError):
                traceback.print_exc()
            click.secho(f"afd-graph: {inner}", fg="red", err=True)
            end(ctx, 1, at_once=at_once)
        end(ctx, 0, at_once=at_once)


def _state(world: Any, server: Any) -> str:
    status = server.status()
    return (
        f"{world.name}: {status.items} items, {status.rows} rows, busy {status.busy_share:.0%}, "
        f"queue {status.queue}, {status.attention_ranks} attention ranks"
    )


@contextlib.contextmanager
def _state_line(state: Any) -> Iterator[None]:
    """Keep one line up to date while something runs, where somebody can see it."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(_STATE_S):
            click.echo(f"\r\033[K{state()}", nl=False, err=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        click.echo("\r\033[K", nl=False, err=True)
