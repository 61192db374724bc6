"""Content to one HTML file: the data as JSON, the style and the script put inside.

Graph texts are compressed and unpacked by the page when they are looked at; the graph after one
pass is the graph before the next, and is stored once.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from afd_graph._version import __version__
from afd_graph.errors import PlanError
from afd_graph.html.content import Content, GraphText
from afd_graph.report import Report
from afd_graph.schedule_ir import StageCosts, by_credits
from afd_graph.simulate import simulate
from afd_graph.timeline import ENGINES, Timeline
from afd_graph.tracing import Trace, merge

DRAWN_STEPS = 32
"""Newest steps whose timeline is in the page; all are in its table."""


def write_html(content: Content, path: str | PathLike[str]) -> None:
    """Write :func:`to_html` to ``path``."""
    Path(path).write_text(to_html(content), encoding="utf-8")


def to_html(content: Content) -> str:
    """The page."""
    data = json.dumps(_data(content), separators=(",", ":"))
    files = resources.files("afd_graph.html")
    style, script, body = (
        files.joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js", "report.html")
    )
    return body.format(
        title=escape(content.title),
        style=style,
        script=script,
        # No text can end the script element, or begin another.
        data=data.replace("<", "\\u003c"),
    )


def _data(content: Content) -> dict[str, Any]:
    texts: dict[str, int] = {}
    graphs = [_graph_data(graph, texts) for graph in content.graphs]
    report = content.report
    return {
        "title": content.title,
        "version": __version__,
        "engines": ENGINES,
        "report": None if report is None else report.as_dict(),
        "steps": _steps(content.traces) or _schedule(report),
        "graphs": graphs,
        "texts": [_packed(text) for text in texts],
    }


def _graph_data(graph: GraphText, texts: dict[str, int]) -> dict[str, Any]:
    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    return {
        "name": graph.name,
        "match": graph.match,
        "passes": [
            {
                "name": step.name,
                "before": number(step.before),
                "after": number(step.after),
                "difference": step.difference,
            }
            for step in graph.passes
        ],
    }


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _steps(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """One entry per step that all ranks have, oldest first."""
    if not traces:
        return []
    merged = merge(traces)
    steps = []
    for number, measured in zip(range(-len(merged), 0), merged, strict=True):
        first = traces[0].steps[number]
        panels = []
        if number >= -DRAWN_STEPS and measured.intervals:
            panels = [_panel(timeline) for timeline in (_predicted(traces, number), measured)]
        steps.append(
            {
                "number": len(merged) + number,
                "policy": first.policy,
                "reason": first.reason,
                "rows": first.rows,
                "ms": max(t.steps[number].end_ns - t.steps[number].begin_ns for t in traces) * 1e-6,
                "busy": {engine: _mean_busy(measured, engine) for engine in ("attention", "ffn")},
                "panels": [panel for panel in panels if panel is not None],
            }
        )
    return steps


def _predicted(traces: Sequence[Trace], number: int) -> Timeline | None:
    """All ranks' predictions, beside one another; None when the experts' times are not known."""
    parts = []
    for trace in traces:
        try:
            parts.append(trace.predicted(number))
        except PlanError:
            return None
    return Timeline(tuple(i for part in parts for i in part.intervals), "predicted")


def _schedule(report: Report | None) -> list[dict[str, Any]]:
    """Without a trace: the order of the split graph, with equal costs on both sides."""
    graph = next((g for g in report.graphs if g.mode), None) if report is not None else None
    if report is None or graph is None or not graph.layers or not report.credits:
        return []
    order = by_credits(len(graph.layers), report.credits, 2)
    timeline = simulate(order, StageCosts(1e-3, 1e-3), title="schedule, equal costs")
    panel = _panel(timeline)
    return [
        {
            "number": None,
            "policy": None,
            "reason": None,
            "rows": [],
            "ms": None,
            "busy": {engine: _mean_busy(timeline, engine) for engine in ("attention", "ffn")},
            "panels": [panel],
        }
    ]


def _mean_busy(timeline: Timeline, engine: str) -> float | None:
    ranks = timeline.ranks(engine)
    if not ranks:
        return None
    return sum(timeline.utilisation(engine, rank) for rank in ranks) / len(ranks)


def _panel(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None or not timeline.intervals:
        return None
    begin = timeline.begin_s
    lanes = [
        {
            "engine": engine,
            "rank": rank,
            "busy": timeline.utilisation(engine, rank),
            "bubbles": [
                [_micro(start - begin), _micro(end - begin)]
                for start, end in timeline.bubbles(engine, rank)
            ],
        }
        for engine in ("attention", "ffn")
        for rank in timeline.ranks(engine)
    ]
    return {
        "title": timeline.title,
        "total": _micro(timeline.total_s),
        "lanes": lanes,
        "intervals": [
            [
                ENGINES.index(i.engine),
                i.layer,
                i.stage,
                _micro(i.begin_s - begin),
                _micro(i.end_s - begin),
                i.rank,
            ]
            for i in timeline.intervals
        ],
    }


def _micro(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
