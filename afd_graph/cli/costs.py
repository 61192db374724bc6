"""``afd-graph costs``: what the policies ``cost`` and ``auto`` reckon with, from a traced run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from afd_graph.cli.output import json_option, note, print_json

if TYPE_CHECKING:
    from afd_graph.cost_model import CostModel

_CONTEXT = 512
_SIZES = [2, *range(4, 64, 4), *range(64, 512, 32), *range(512, 4097, 256)]


@click.command()
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH...",
)
@json_option
def command(paths: tuple[Path, ...], as_json: bool) -> None:
    """Fit costs to the traces of a run, for the policies cost and auto.

    PATH is a directory that a run with trace and dump_dir wrote, or a trace file. The costs are
    one JSON object, for the key costs of the options. The run should hold steps of several sizes,
    with and without a split.

    \b
    Example:
      afd-graph costs DIR
    """
    from afd_graph.fit_costs import fit_costs
    from afd_graph.html import from_files

    found = fit_costs(from_files(paths).traces)
    costs = found.costs
    fields = {name: value for name, value in vars(costs).items() if name != "context_lens"}
    first = {
        "one prompt": _pays_from(costs, prompt=True),
        f"decoding behind {_CONTEXT} tokens": _pays_from(costs, prompt=False),
    }
    if as_json:
        print_json(
            {
                "costs": fields,
                "samples": found.samples,
                "attention_error": found.attention_error,
                "experts_error": found.experts_error,
                "pays_from_tokens": first,
            }
        )
        return
    print_json(fields)
    note(
        f"{found.samples} stages; usual error: attention {found.attention_error:.1%}, "
        f"experts {found.experts_error:.1%}"
    )
    for what, tokens in first.items():
        when = f"from {tokens} tokens on" if tokens else f"at no size up to {_SIZES[-1]} tokens"
        note(f"{what}: a split is predicted to pay {when}")


def _pays_from(costs: CostModel, prompt: bool) -> int | None:
    """The least number of tokens from which on every larger step is cut by ``auto``."""
    from afd_graph.planner import NoSplit, plan_stages

    least: int | None = None
    for tokens in reversed(_SIZES):
        counts = [tokens] if prompt else [1] * tokens
        contexts = [0] if prompt else [_CONTEXT] * tokens
        step: Any = plan_stages(counts, split="auto", costs=replace(costs, context_lens=contexts))
        if isinstance(step, NoSplit):
            break
        least = tokens
    return least
