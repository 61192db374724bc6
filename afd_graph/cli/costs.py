"""``afd-graph costs``: what the policies ``cost`` and ``auto`` reckon with, from a traced run."""

from __future__ import annotations

from pathlib import Path

import click

from afd_graph.cli.output import json_option, note, print_json


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
    one JSON object, for the key costs of the options. The runs should hold steps of several sizes,
    with and without a split.

    \b
    Example:
      afd-graph costs DIR/token DIR/none
    """
    from afd_graph.fit_costs import DECODING_CONTEXT, fit_costs, pays_from
    from afd_graph.html import from_files

    # One by one: these may be several runs of one rank.
    found = fit_costs([trace for path in paths for trace in from_files([path]).traces])
    costs = found.costs
    fields = {name: value for name, value in vars(costs).items() if name != "context_lens"}
    first = {
        "one prompt": pays_from(costs, prompt=True),
        f"decoding behind {DECODING_CONTEXT} tokens": pays_from(costs, prompt=False),
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
        when = f"from {tokens} tokens on" if tokens else "at no size that was looked at"
        note(f"{what}: a split is predicted to pay {when}")
