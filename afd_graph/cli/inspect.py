"""``afd-graph inspect``: what the compiler would make of a model, without its weights."""

from __future__ import annotations

from typing import Any

import click

from afd_graph.cli.model_options import (
    dtype_option,
    ffn_ranks_option,
    parse_dtype,
    parse_settings,
    settings_option,
)
from afd_graph.cli.output import json_option, note, print_json

REFUSED = 3
_SHOWN = 12


@click.command()
@click.argument("model", required=False)
@click.option("--list", "only_list", is_flag=True, help="List the presets and end.")
@click.option(
    "--programs",
    default="prefill",
    show_default=True,
    help="Comma-separated: prefill, extend, decode, each also with _batch.",
)
@click.option(
    "--tokens",
    default="2,1024,4096",
    show_default=True,
    metavar="N,...",
    help="Plan steps of these sizes: tokens of a request, or requests where they are not cut.",
)
@dtype_option
@ffn_ranks_option
@settings_option
@click.option("--full-order", is_flag=True, help="Print the order of all layers.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    only_list: bool,
    programs: str,
    tokens: str,
    dtype: str | None,
    ffn_ranks: int,
    settings: tuple[str, ...],
    full_order: bool,
    as_json: bool,
) -> None:
    """Say what would be matched, planned, scheduled and refused of MODEL, and why.

    MODEL is a folder with a config.json, such a file, or the name of a preset (--list). Nothing
    is downloaded, no weight is read: models of any size are captured on fake tensors and go
    through the same passes as torch.compile.

    \b
    Examples:
      afd-graph inspect deepseek-v3
      afd-graph inspect ./my-model --programs prefill,decode_batch --set split=request
      afd-graph inspect deepseek-v2 --set credits=1 --json

    \b
    Exit codes:
      0  every program would be compiled
      1  the model cannot be read
      2  misuse of the command line
      3  a program would be refused; the report says why
    """
    from afd_graph import hf

    if only_list:
        _list(as_json)
        return
    if model is None:
        raise click.UsageError("name a model, or --list")
    sizes = _sizes(tokens)
    from afd_graph.connectors import create_connector
    from afd_graph.inspection import inspect_program, to_json, weight_bytes

    config = parse_settings(settings)
    names = tuple(programs.split(","))
    for name in names:
        hf.check_program(name)
    connector = create_connector(config.connector, config.connector_options)
    credits = config.credits or connector.credits
    connector.close()
    described = hf.load_config(model)
    note(f"building {hf.model_name(described)} without weights")
    empty, mode = hf.empty_model(described, parse_dtype(dtype))
    module = hf.ServingModule(empty)
    found = [
        inspect_program(
            name,
            module,
            example,
            config,
            credits=credits,
            prefix=hf.PREFIX,
            tokens=sizes,
            progress=note,
        )
        for name, example in hf.serving_examples(module, mode, names)
    ]
    parameters, size = weight_bytes(empty)
    experts = sum(len(kind.layers) * kind.bytes for kind in found[0].kinds)
    summary: dict[str, Any] = {
        "model": hf.model_name(described),
        "parameters": parameters,
        "bytes": size,
        "expert_bytes": experts,
        "expert_bytes_per_ffn_rank": experts // ffn_ranks,
        "credits": credits,
        "policy": config.split,
    }
    if as_json:
        print_json({**summary, "programs": [to_json(program) for program in found]})
    else:
        _print(summary, found, ffn_ranks, full_order)
    if any(program.refusal for program in found):
        ctx.exit(REFUSED)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise click.BadParameter(f"{text!r} is no list of positive numbers", param_hint="--tokens")
    return sizes


def _list(as_json: bool) -> None:
    from afd_graph import hf

    sources = {name: hf.preset_source(name) for name in hf.preset_names()}
    if as_json:
        print_json(sources)
        return
    for name, source in sources.items():
        click.echo(f"{name:18} {source}")


def _print(summary: dict[str, Any], found: list[Any], ffn_ranks: int, full_order: bool) -> None:
    gib = 2**30
    click.secho(summary["model"], bold=True)
    rest = summary["bytes"] - summary["expert_bytes"]
    click.echo(
        f"  {summary['parameters'] / 1e9:.1f} billion parameters, "
        f"{summary['bytes'] / gib:.1f} GiB: {rest / gib:.1f} GiB with attention, "
        f"{summary['expert_bytes'] / gib:.1f} GiB of experts"
        + (f", {summary['expert_bytes_per_ffn_rank'] / gib:.1f} a rank" * (ffn_ranks > 1))
    )
    for program in found:
        click.echo()
        click.secho(program.name, bold=True, nl=False)
        click.echo(
            f": {program.nodes_before} nodes captured, {program.nodes_after} emitted, "
            f"{program.seconds:.1f} s"
        )
        if program.refusal:
            click.secho(f"  refused: {program.refusal}", fg="red")
            continue
        for kind in program.kinds:
            shared = f", {kind.shared} shared" if kind.shared else ""
            click.echo(
                f"  matched  {len(kind.layers)} layers {kind.layers[0]} to {kind.layers[-1]}: "
                f"top {kind.top_k} of {kind.experts} experts{shared}, rows of {kind.hidden_size}, "
                f"{kind.bytes / gib:.2f} GiB each"
            )
        for text in program.no_match:
            click.secho(f"  not matched  {text}", fg="yellow")
        if program.unsplit_reason:
            click.secho(f"  unsplit  {program.unsplit_reason}", fg="yellow")
        else:
            where = {"sequence": "through every sequence", "batch": "between requests"}
            click.echo(f"  split    {where.get(program.mode, program.mode)}, {summary['policy']}")
        for plan in program.plans:
            how = (
                f"{plan.stages[0]} + {plan.stages[1]}" if plan.stages else f"unsplit: {plan.reason}"
            )
            click.echo(f"  plan     a step of {plan.tokens}: {how}")
        order = [str(step) for step in program.order]
        shown = order if full_order else order[:_SHOWN]
        more = f" ... {len(order) - len(shown)} more" if len(order) > len(shown) else ""
        click.echo(
            f"  order    {summary['credits']} credits, (layer,stage): {' '.join(shown)}{more}"
        )
