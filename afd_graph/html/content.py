"""What a page shows, collected from a running backend or from the files that one left.

A dump directory holds ``report.json``, ``trace.rank<N>.json`` and a folder ``graph_<N>`` for every
captured graph with the graph before and after each pass (:mod:`afd_graph.dump`). Any part may be
missing; the page then says so in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from afd_graph.errors import PlanError
from afd_graph.report import Report
from afd_graph.tracing import Trace

_PASS = re.compile(r"(\d+)_(\w+)\.before\.txt")


@dataclass(frozen=True)
class PassText:
    """One pass over one graph.

    Attributes:
        name: of the pass.
        before: the graph as text.
        after: the same after the pass.
        difference: operators whose number changed.
    """

    name: str
    before: str
    after: str
    difference: str


@dataclass(frozen=True)
class GraphText:
    """One captured graph and its passes in order; ``match`` is the match report."""

    name: str
    passes: tuple[PassText, ...]
    match: str = ""


@dataclass(frozen=True)
class Content:
    """Everything that a page is made of.

    Attributes:
        title: heading.
        report: what was compiled and counted.
        traces: of the attention ranks.
        graphs: dumped graphs.
    """

    title: str
    report: Report | None = None
    traces: tuple[Trace, ...] = ()
    graphs: tuple[GraphText, ...] = field(default=())


def from_report(report: Report, title: str = "afd-graph") -> Content:
    """What a live report knows: its trace, if its backend traces, and its dumped graphs."""
    traces = (report.trace(),) if report.trace is not None else ()
    graphs = _graphs(Path(report.dump_dir)) if report.dump_dir is not None else ()
    return Content(title, report, traces, graphs)


def from_files(paths: Sequence[str | PathLike[str]], title: str = "") -> Content:
    """What dump directories and trace files hold, together.

    Raises:
        PlanError: a path is neither, or holds nothing of ours.
    """
    report: Report | None = None
    traces: list[Trace] = []
    graphs: list[GraphText] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(path.glob("trace.rank*.json"))
            texts = _graphs(path)
            if (path / "report.json").exists():
                report = _read_report(path / "report.json")
            elif not found and not texts:
                raise PlanError(
                    f"{path} holds no report, trace or graph of this package",
                    remedy="give a directory that AFDConfig(dump_dir=...) wrote, which happens "
                    "when the backend is closed: in a server of vLLM only with --shutdown-timeout",
                )
            traces += [Trace.read(file) for file in found]
            graphs += texts
        else:
            traces.append(Trace.read(path))
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) != len(ranks):
        raise PlanError(
            f"two traces are of one rank: {sorted(ranks)}",
            remedy="give the traces of one run, one of each rank",
        )
    names = ", ".join(Path(path).name for path in paths)
    return Content(title or names, report, tuple(traces), tuple(graphs))


def _read_report(path: Path) -> Report:
    try:
        return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(
            f"{path} is not a report: {error!r}",
            remedy="give a directory that AFDConfig(dump_dir=...) of this version wrote",
        ) from error


def _graphs(directory: Path) -> tuple[GraphText, ...]:
    folders = [path for path in directory.glob("graph_*") if path.is_dir()]
    return tuple(
        _graph(folder) for folder in sorted(folders, key=lambda p: int(p.name.split("_")[1]))
    )


def _graph(folder: Path) -> GraphText:
    passes = []
    for path in sorted(folder.glob("*.before.txt")):
        found = _PASS.fullmatch(path.name)
        if found is not None:
            stem = folder / f"{found[1]}_{found[2]}"
            passes.append(
                PassText(
                    found[2],
                    path.read_text(encoding="utf-8"),
                    _text(stem.with_name(f"{stem.name}.after.txt")),
                    _text(stem.with_name(f"{stem.name}.diff.txt")),
                )
            )
    return GraphText(folder.name, tuple(passes), _text(folder / "match.txt"))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
