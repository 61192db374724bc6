"""``afd-graph report``: a run or a compile as a page, as pictures, as one Perfetto trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from afd_graph.cli.output import json_option, note, print_json
from afd_graph.errors import PlanError

if TYPE_CHECKING:
    from afd_graph.html.content import Content
    from afd_graph.timeline import Timeline

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH...",
)
@click.option("-o", "--output", type=_FILE, help="Write the page here, a .html file.")
@click.option("--title", default="", help="Heading of the page; the names of the paths otherwise.")
@click.option("--perfetto", type=_FILE, help="Write the traces of all ranks as one .json file.")
@click.option("--picture", type=_FILE, help="Draw one step, predicted and measured: .svg or .png.")
@click.option("--step", type=int, default=-1, show_default=True, help="Which step; -1 is the last.")
@json_option
def command(
    paths: tuple[Path, ...],
    output: Path | None,
    title: str,
    perfetto: Path | None,
    picture: Path | None,
    step: int,
    as_json: bool,
) -> None:
    """Show what dump directories and trace files hold.

    PATH is a directory that AFDConfig(dump_dir=...) wrote, or a trace file of one rank. Several
    ranks' traces are put on one clock. Perfetto (ui.perfetto.dev) opens the file of --perfetto.

    \b
    Examples:
      afd-graph report DIR -o run.html
      afd-graph report rank0/ rank1/ --perfetto run.json
      afd-graph report DIR --picture last-step.png
    """
    from afd_graph.html import from_files, write_html

    content = from_files(paths, title)
    if output is not None:
        write_html(content, output)
        note(f"wrote {output}")
    if perfetto is not None:
        from afd_graph.trace import write_trace

        write_trace(_all_steps(content), perfetto)
        note(f"wrote {perfetto}")
    if picture is not None:
        _draw(content, step, picture)
    if as_json:
        print_json(_summary(content))
    elif output is None and perfetto is None and picture is None:
        if content.report is not None:
            click.echo(str(content.report))
        for trace in content.traces:
            click.echo(f"rank {trace.rank}: {len(trace.steps)} steps traced")
        for graph in content.graphs:
            click.echo(f"{graph.name}: {', '.join(p.name for p in graph.passes) or 'no passes'}")


def _merged(content: Content) -> list[Timeline]:
    from afd_graph.tracing import merge

    if not content.traces:
        raise PlanError(
            "these paths hold no trace", remedy="run with AFDConfig(trace=True, dump_dir=...)"
        )
    return merge(content.traces)


def _all_steps(content: Content) -> list[Timeline]:
    return [
        dataclasses.replace(timeline, title=f"step {number}")
        for number, timeline in enumerate(_merged(content))
        if timeline.intervals
    ]


def _draw(content: Content, step: int, path: Path) -> None:
    from afd_graph.picture import write_png, write_svg

    writers = {".svg": write_svg, ".png": write_png}
    merged = _merged(content)
    if path.suffix not in writers or not -len(merged) <= step < len(merged):
        raise PlanError(
            f"step {step} of {len(merged)} cannot be drawn in {path}",
            remedy="name a .svg or .png file, and a step that was traced",
        )
    predicted = [] if len(content.traces) > 1 else [content.traces[0].predicted(step)]
    writers[path.suffix]([*predicted, merged[step]], path, title=f"step {step}")
    note(f"wrote {path}")


def _summary(content: Content) -> dict[str, Any]:
    return {
        "report": None if content.report is None else content.report.as_dict(),
        "traces": [
            {
                "rank": trace.rank,
                "steps": [
                    {
                        "policy": step.policy,
                        "reason": step.reason,
                        "rows": step.rows,
                        "seconds": (step.end_ns - step.begin_ns) * 1e-9,
                    }
                    for step in trace.steps
                ],
            }
            for trace in content.traces
        ],
        "graphs": {graph.name: [p.name for p in graph.passes] for graph in content.graphs},
    }
