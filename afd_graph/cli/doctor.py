"""``afd-graph doctor``: what is installed, in which versions, and what works on this machine."""

from __future__ import annotations

import dataclasses
import platform

import click

from afd_graph._version import __version__
from afd_graph.cli import probes
from afd_graph.cli.output import json_option, note, print_json

_COLOURS = {"ok": "green", "note": "yellow", "no": "red"}


@click.command()
@click.option("--run", "with_step", is_flag=True, help="Also compile and run a tiny model.")
@json_option
@click.pass_context
def command(ctx: click.Context, with_step: bool, as_json: bool) -> None:
    """Say what is installed and try what this machine can do.

    Exits with 1 when the compiler and its runtime cannot work here. Optional parts that are
    missing are only named. --run compiles a tiny model over two processes and compares it to the
    eager one (half a minute; needs the extra 'hf').
    """
    parts = {
        part: {name: probes.version_of(name) for name in names}
        for part, names in probes.PARTS.items()
    }
    wanted = probes.requirements()
    findings = []
    for probe in (*probes.QUICK, *((probes.step,) if with_step else ())):
        if probe in (probes.gloo, probes.step):
            note(f"trying: {(probe.__doc__ or '').splitlines()[0]}")
        findings.append(probe())
    broken = any(f.status == "no" and (f.needed or f.name == "a split step") for f in findings)
    if as_json:
        print_json(
            {
                "afd_graph": __version__,
                "python": platform.python_version(),
                "works": not broken,
                "parts": parts,
                "wanted": wanted,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
    else:
        _print(parts, wanted, findings)
    ctx.exit(1 if broken else 0)


def _print(
    parts: dict[str, dict[str, str | None]],
    wanted: dict[str, str],
    findings: list[probes.Finding],
) -> None:
    click.echo(f"afd-graph {__version__}, Python {platform.python_version()}")
    click.echo("installed")
    for part, versions in parts.items():
        shown = []
        status = "ok"
        for name, version in versions.items():
            bounds = wanted.get(name)
            if version is None:
                status = "note"
                shown.append(f"{name} missing")
            elif bounds is not None and not probes.satisfies(version, bounds):
                status = "no"
                shown.append(f"{name} {version}, wanted {bounds}")
            else:
                shown.append(f"{name} {version}")
        click.echo(f"  {_coloured(status)} {part:22} {', '.join(shown)}")
    click.echo("this machine")
    for finding in findings:
        click.echo(f"  {_coloured(finding.status)} {finding.name:22} {finding.detail}")
        if finding.remedy:
            click.echo(f"{'':31}{finding.remedy}")


def _coloured(status: str) -> str:
    return click.style(f"{status:5}", fg=_COLOURS[status])
