"""``afd-graph simulate``: what a cluster would reach, and how to divide it."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from afd_graph.cli.output import json_option, note, print_json
from afd_graph.errors import ConfigError

if TYPE_CHECKING:
    from afd_graph.cluster import Deployment, Workload
    from afd_graph.cluster.published import Published
    from afd_graph.cluster.search import Candidate, SplitGain
    from afd_graph.cluster.simulation import Result


class _Grid(click.ParamType):
    """``DPxTP``, such as ``24x8``; ``24`` is ``24x1``."""

    name = "DPxTP"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", str(value))
        if found is None:
            self.fail(f"{value!r} is not DPxTP, such as 24x8", param, ctx)
        return int(found[1]), int(found[2] or 1)


class _Numbers(click.ParamType):
    """Numbers with commas between them."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} is not a list of positive numbers", param, ctx)
        return numbers


@click.command()
@click.argument("model", default="deepseek-v3")
@click.option("--hardware", default="ascend-910c", show_default=True, metavar="NAME|FILE")
@click.option("--ffn-hardware", metavar="NAME|FILE", help="Expert devices, if they are others.")
@click.option(
    "--attention", type=_Grid(), default="8x8", show_default=True, help="Replicas x tensor parallel"
)
@click.option("--ffn", "expert_ranks", type=int, default=32, show_default=True, help="Expert ranks")
@click.option("--colocated", is_flag=True, help="No AFD: all devices attend and hold experts.")
@click.option("--stages", type=int, default=2, show_default=True)
@click.option("--credits", type=int, default=2, show_default=True)
@click.option(
    "--cut", type=click.Choice(["token", "request", "cost"]), default="token", show_default=True
)
@click.option("--min-split-tokens", type=int, default=2, show_default=True)
@click.option(
    "--shared-experts",
    type=click.Choice(["attention", "ffn"]),
    default="attention",
    show_default=True,
)
@click.option("--redundant-experts", type=int, default=0, show_default=True)
@click.option("--weights-bits", type=click.Choice(["8", "16"]), default="8", show_default=True)
@click.option(
    "--lengths",
    default="lognormal:2048:0.8",
    show_default=True,
    help="Prompt lengths: fixed:N, uniform:A:B, lognormal:MEDIAN:SIGMA or file:PATH.",
)
@click.option("--step-tokens", type=int, default=16384, show_default=True, help="Of one replica.")
@click.option(
    "--decode", is_flag=True, help="Decoding: --step-tokens requests a replica, one token each."
)
@click.option("--rate", type=float, help="Requests per second; without it, as many as can be.")
@click.option("--hottest", type=float, default=1.0, show_default=True, help="Fullest rank / mean.")
@click.option("--stragglers", type=float, default=0.0, show_default=True, help="Share of devices.")
@click.option("--slowdown", type=float, default=1.5, show_default=True, help="Of a straggler.")
@click.option("--jitter", type=float, default=0.0, show_default=True, help="Of attention times.")
@click.option("--steps", type=int, default=50, show_default=True, help="Steps of every replica.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--best-ratio", type=int, metavar="DEVICES", help="Find the best division of so many."
)
@click.option("--sweep", type=_Numbers(), help="Say where the split pays, for these step sizes.")
@click.option("--published", is_flag=True, help="Check the model against published measurements.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the first step of replica 0: .svg, .png or .json (Perfetto).",
)
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Predict throughput, time to first token and utilisation of MODEL on a cluster.

    MODEL is a preset (deepseek-v2, deepseek-v2-lite, deepseek-v3, deepseek-v3.2), a Hugging Face
    config.json or its folder. --hardware is a preset (ascend-910c, h800) or a JSON file. One
    Ascend device is one die. docs/cluster.md has the formulas and the source of every number.

    \b
    Examples:
      afd-graph simulate deepseek-v3 --attention 24x8 --ffn 64
      afd-graph simulate deepseek-v3 --attention 1x4 --best-ratio 384
      afd-graph simulate deepseek-v2 --sweep 256,1024,4096,16384
      afd-graph simulate --published
    """
    try:
        import numpy  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "the cluster simulator needs numpy", remedy="pip install 'afd-graph[cluster]'"
        ) from None
    if options["published"]:
        _published(as_json)
        return
    deployment, workload = _described(options)
    if options["best_ratio"] is not None:
        _best(deployment, workload, options["best_ratio"], as_json)
    elif options["sweep"]:
        _sweep(deployment, workload, options["sweep"], as_json)
    else:
        _one(deployment, workload, options["steps"], options["picture"], as_json)


def _described(options: dict[str, Any]) -> tuple[Deployment, Workload]:
    from afd_graph.cluster import Deployment, Workload, load_hardware, load_model

    replicas, tensor_parallel = options["attention"]
    ffn_hardware = options["ffn_hardware"]
    expert_ranks = options["expert_ranks"]
    if options["best_ratio"] is not None:
        replicas = expert_ranks = 1  # the search chooses them
    deployment = Deployment(
        load_model(options["model"]),
        load_hardware(options["hardware"]),
        replicas=replicas,
        tensor_parallel=tensor_parallel,
        expert_ranks=expert_ranks,
        placement="colocated" if options["colocated"] else "disaggregated",
        ffn_hardware=load_hardware(ffn_hardware) if ffn_hardware else None,
        weights_bits=int(options["weights_bits"]),
        **{
            name: options[name]
            for name in (
                *("redundant_experts", "stages", "credits", "cut", "min_split_tokens"),
                *("shared_experts", "stragglers", "slowdown", "jitter"),
            )
        },
    )
    deployment = dataclasses.replace(deployment, hottest=min(options["hottest"], expert_ranks))
    workload = Workload(
        options["lengths"],
        options["step_tokens"],
        "decode" if options["decode"] else "prefill",
        options["rate"],
        options["seed"],
    )
    return deployment, workload


def _one(
    deployment: Deployment, workload: Workload, steps: int, picture: Path | None, as_json: bool
) -> None:
    from afd_graph.cluster import simulate_cluster

    with click.progressbar(
        length=steps * deployment.replicas,
        label="steps",
        file=sys.stderr,
        hidden=as_json or not sys.stderr.isatty(),
    ) as bar:
        result = simulate_cluster(deployment, workload, steps=steps, progress=bar.update)
    if picture is not None:
        _draw(result, picture)
    if as_json:
        print_json({"devices": deployment.devices, **result.as_dict()})
        return
    where = f"{deployment.devices} x {deployment.hardware.name}"
    if deployment.placement == "colocated":
        click.echo(f"{deployment.model.name} on {where}, all attend and hold experts")
    else:
        click.echo(
            f"{deployment.model.name} on {where}: {deployment.replicas} replicas x "
            f"{deployment.tensor_parallel} attend, {deployment.expert_ranks} hold experts"
        )
    a, f, c, d = (result.costs[name] * 1e3 for name in "afcd")
    rows = [
        ("throughput", f"{result.tokens_per_s:,.0f} tokens/s"),
        ("per device", f"{result.tokens_per_device_s:,.0f} tokens/s"),
        ("step", f"{result.step_s * 1e3:,.1f} ms, {result.layer_s * 1e3:.2f} ms a layer"),
        ("attention busy", f"{result.attention_busy:.1%}"),
        ("experts busy", f"{result.ffn_busy:.1%}"),
        ("one stage", f"a {a:.3f}, f {f:.3f}, c {c:.3f}, d {d:.3f} ms a layer"),
        ("steps", f"{result.steps}, {result.split_steps} split"),
        (
            "weights",
            f"{result.attention_memory / 1e9:.1f} GB on an attention device, "
            f"{result.expert_memory / 1e9:.1f} GB of experts on a rank",
        ),
    ]
    if result.first_token_s:
        waits = ", ".join(f"{name} {value:.3f} s" for name, value in result.first_token_s.items())
        what = "first token" if workload.rate else "prompt served"
        rows.insert(2, (what, waits))
    rows += [("not split", f"{count} steps: {reason}") for reason, count in result.unsplit.items()]
    _print_rows(rows)


def _draw(result: Result, path: Path) -> None:
    from afd_graph.picture import write_png, write_svg
    from afd_graph.trace import write_trace

    writers = {".svg": write_svg, ".png": write_png, ".json": write_trace}
    if path.suffix not in writers or result.timeline is None:
        raise ConfigError(
            f"{path} cannot be drawn"
            + ("" if result.timeline else ": the colocated form has no two sides"),
            remedy="name a file .svg, .png or .json, of a deployment that is not colocated",
        )
    writers[path.suffix](result.timeline, path)
    note(f"wrote {path}")


def _best(deployment: Deployment, workload: Workload, devices: int, as_json: bool) -> None:
    from afd_graph.cluster.search import best_division

    found = best_division(deployment, workload, devices)
    if as_json:
        print_json({"devices": devices, "divisions": [dataclasses.asdict(c) for c in found]})
        return
    best = found[0]
    attending = best.replicas * deployment.tensor_parallel
    click.echo(
        f"best of {devices} devices: {attending} attend ({best.replicas} x "
        f"{deployment.tensor_parallel}), {best.expert_ranks} hold experts, "
        f"{attending / best.expert_ranks:.2f} to 1"
    )
    _print_table(
        ("replicas", "expert ranks", "idle", "tokens/s", "attention busy", "experts busy"),
        _division_rows(found),
    )


def _division_rows(found: Sequence[Candidate]) -> list[tuple[str, ...]]:
    return [
        (
            str(c.replicas),
            str(c.expert_ranks),
            str(c.idle_devices),
            f"{c.tokens_per_s:,.0f}",
            f"{c.attention_busy:.0%}",
            f"{c.ffn_busy:.0%}",
        )
        for c in found
    ]


def _sweep(
    deployment: Deployment, workload: Workload, tokens: Sequence[int], as_json: bool
) -> None:
    from afd_graph.cluster.search import where_split_pays

    gains = where_split_pays(deployment, workload, tokens)
    paying = [gain.step_tokens for gain in gains if gain.speedup > 1]
    if as_json:
        rows = [{**dataclasses.asdict(gain), "speedup": gain.speedup} for gain in gains]
        print_json({"steps": rows, "split_pays_at": paying})
        return
    _print_table(
        ("step tokens", "unsplit", "split", "speed-up", "split/device", "colocated/device"),
        [_gain_row(gain) for gain in gains],
    )
    if paying:
        click.echo(f"the split pays at {', '.join(str(size) for size in paying)} tokens")
    else:
        click.echo("the split pays at none of these sizes")


def _gain_row(gain: SplitGain) -> tuple[str, ...]:
    together = gain.colocated_tokens_per_device_s
    return (
        str(gain.step_tokens),
        f"{gain.unsplit_s * 1e3:.1f} ms",
        f"{gain.split_s * 1e3:.1f} ms",
        f"{gain.speedup:.3f}",
        f"{gain.split_tokens_per_device_s:,.0f} tok/s",
        "does not fit" if together is None else f"{together:,.0f} tok/s",
    )


def _published(as_json: bool) -> None:
    from afd_graph.cluster.published import ROWS, TOLERANCE

    rows = [(row, row.predict()) for row in ROWS]
    if as_json:
        print_json({"tolerance": TOLERANCE, "rows": [_published_row(*pair) for pair in rows]})
        return
    for row, predicted in rows:
        error = predicted / row.value - 1
        verdict = "reproduced" if abs(error) <= TOLERANCE else "NOT reproduced"
        click.echo(
            f"{row.name}\n  published {row.value:g} {row.unit}, predicted {predicted:.4g} "
            f"({error:+.1%}): {verdict}\n  source: {row.source}"
        )
        if row.gap:
            click.echo(f"  gap: {row.gap}")


def _published_row(row: Published, predicted: float) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "published": row.value,
        "predicted": predicted,
        "source": row.source,
        "gap": row.gap or None,
    }


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    for name, text in rows:
        click.echo(f"  {name:15} {text}")


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  " + "  ".join(cells))
