"""Options of the commands that take a model to the compiler, and what their values mean."""

from __future__ import annotations

import json
from typing import Any

import click

from afd_graph.errors import ConfigError

settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="OPTION=VALUE",
    help="An option of AFDConfig, such as split=request or credits=1; may be repeated.",
)
ffn_ranks_option = click.option(
    "--ffn-ranks", default=1, show_default=True, type=click.IntRange(1), metavar="N"
)
dtype_option = click.option(
    "--dtype", metavar="NAME", help="Of the weights.  [default: the configuration's]"
)


def parse_settings(settings: tuple[str, ...]) -> Any:
    """A configuration from ``OPTION=VALUE``; a value is JSON, or text as it stands.

    Raises:
        ConfigError: no ``=``, or not an option with such a value.
    """
    from afd_graph.config import AFDConfig

    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {setting} is no OPTION=VALUE", remedy="write --set split=request"
            )
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return AFDConfig.from_options(options)


def parse_dtype(name: str | None) -> Any:
    """The floating-point type of that name; None for None.

    Raises:
        ConfigError: there is none.
    """
    if name is None:
        return None
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"--dtype {name} is no floating-point type", remedy="write bfloat16 or float32"
        )
    return found
