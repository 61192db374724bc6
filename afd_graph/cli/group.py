"""The group of commands, found by name, and how their failures become exit codes.

Exit codes: 0 done; 1 refused or failed, with one message on standard error (an object with
``error`` and ``remedy`` on standard output under ``--json``); 2 misuse of the command line;
130 interrupted.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from afd_graph._version import __version__
from afd_graph.cli.output import fail
from afd_graph.errors import AFDError

COMMANDS: dict[str, str] = {
    "inspect": "What would be matched, planned, scheduled and refused of a model, without weights.",
    "bench": "Run the benchmarks of this repository: measured ratios against their bounds.",
    "compile": "Compile a model ahead of time into an artifact that starts without its code.",
    "compare": "Which answers changed between two runs, and whether the split was really active.",
    "serve": "Run one rank of attention and FFN ranks over torch.distributed.",
    "vllm-ffn": "Run the experts of a model that vLLM serves, on a rank of their own.",
    "doctor": "What is installed, which versions, and what works on this machine.",
    "report": "A run or a compile as a page, as pictures, as one Perfetto trace.",
    "costs": "What the policies cost and auto reckon with, from a traced run.",
    "simulate": "Predict throughput, latency and the best division of a cluster.",
}
"""Name of each command -> one line of help. The command is the attribute ``command`` of the module
of that name, with underscores, in this package."""


class LazyGroup(click.Group):
    """Commands that are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; ``None`` for an unknown name, which click reports."""
        if cmd_name not in COMMANDS:
            return None
        module = f"afd_graph.cli.{cmd_name.replace('-', '_')}"
        command: click.Command = importlib.import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours ends it with code 1 and its message, no traceback."""
        try:
            return super().invoke(ctx)
        except AFDError as error:
            fail(ctx, error)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="afd-graph")
def afd_graph() -> None:
    """Attention-FFN disaggregation as a compiler: look into, compile, serve and plan MoE models."""
