"""What every command prints in the same way: JSON for machines, failures, colours."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import click

from afd_graph.errors import AFDError

_JSON = "afd_graph.json"


def _remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.find_root().meta[_JSON] = value
    return value


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    callback=_remember,
    is_eager=True,
    help="Print one JSON object on standard output, no text.",
)
"""Add to a command whose answer a machine may read; the value arrives as ``as_json``."""


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON object, keys in the order given."""
    click.echo(json.dumps(value, indent=2, default=str))


def note(text: str) -> None:
    """Print a line about progress on standard error, so that the answer can be piped."""
    click.echo(text, err=True)


def fail(ctx: click.Context, error: AFDError) -> NoReturn:
    """Print ``error`` and end with code 1; under ``--json`` also as an object."""
    if ctx.find_root().meta.get(_JSON):
        print_json({"error": str(error), "remedy": error.remedy})
    click.secho(f"afd-graph: {error}", fg="red", err=True)
    ctx.exit(1)
