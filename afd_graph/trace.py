"""Timelines as a trace that Perfetto and ``chrome://tracing`` open.

The format is the Chrome trace event format, JSON object form. A process is one rank of one side,
a thread one engine (for links, one stage of it: transfers of two stages may overlap, slices of
one thread may not). Flow arrows join what happens to one work item: its attention, the way out,
the experts, the way back, and the attention that continues with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from afd_graph.timeline import ENGINES, Interval, Timeline

_Event = dict[str, Any]


def to_trace(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """One or several timelines as a trace object; all begin at 0, times in microseconds."""
    panels = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    events: list[_Event] = []
    for number, panel in enumerate(panels):
        events += _panel(panel, _Ids(number, len(panels)))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(timelines: Timeline | Sequence[Timeline], path: str | PathLike[str]) -> None:
    """Write :func:`to_trace` to ``path`` as JSON."""
    Path(path).write_text(json.dumps(to_trace(timelines)) + "\n", encoding="utf-8")


class _Ids:
    """Process, thread and flow numbers of one timeline, apart from those of the others."""

    def __init__(self, number: int, timelines: int) -> None:
        self._number = number
        self._timelines = timelines

    def process(self, interval: Interval) -> int:
        """Attention ranks have odd numbers, FFN ranks even ones."""
        side = 2 if interval.engine == "ffn" else 1
        return (2 * interval.rank + side) * self._timelines + self._number

    def thread(self, interval: Interval) -> int:
        """Engines in order; the stages of a link one after the other."""
        stage = interval.stage if interval.engine.startswith("link") else 0
        return 100 * ENGINES.index(interval.engine) + stage

    def flow(self, item: int) -> int:
        """Number of a work item's flow."""
        return item * self._timelines + self._number


def _panel(panel: Timeline, ids: _Ids) -> Iterator[_Event]:
    origin = panel.begin_s
    intervals = sorted(panel.intervals, key=lambda i: (i.begin_s, i.end_s))
    yield from _names(panel, intervals, ids)
    for interval in intervals:
        begin = _microseconds(interval.begin_s - origin)
        end = _microseconds(interval.end_s - origin)
        yield {
            "ph": "X",
            "name": f"{interval.engine} L{interval.layer} S{interval.stage}",
            "cat": interval.engine,
            "pid": ids.process(interval),
            "tid": ids.thread(interval),
            "ts": begin,
            # From rounded times: slices that touch must not overlap by a rounding.
            "dur": round(end - begin, 3),
            "args": {"layer": interval.layer, "stage": interval.stage},
        }
    for number, path in enumerate(_work_items(intervals)):
        for hop, interval in enumerate(path):
            event: _Event = {
                "ph": "s" if hop == 0 else "f" if hop == len(path) - 1 else "t",
                "name": "work item",
                "cat": "work item",
                "id": ids.flow(number),
                "pid": ids.process(interval),
                "tid": ids.thread(interval),
                # A flow event belongs to the slice around it, so it must lie inside.
                "ts": _microseconds(interval.begin_s - origin + interval.duration_s / 2),
            }
            if event["ph"] == "f":
                event["bp"] = "e"
            yield event


def _names(panel: Timeline, intervals: Sequence[Interval], ids: _Ids) -> Iterator[_Event]:
    prefix = f"{panel.title}: " if panel.title else ""
    threads = {
        (ids.process(i), ids.thread(i)): (
            f"{prefix}{'FFN' if i.engine == 'ffn' else 'attention'} rank {i.rank}",
            f"{i.engine}, stage {i.stage}" if i.engine.startswith("link") else i.engine,
        )
        for i in intervals
    }
    named: set[int] = set()
    for (process, thread), (process_name, thread_name) in sorted(threads.items()):
        if process not in named:
            named.add(process)
            yield _metadata("process_name", process, 0, name=process_name)
            yield _metadata("process_sort_index", process, 0, sort_index=process)
        yield _metadata("thread_name", process, thread, name=thread_name)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(what: str, process: int, thread: int, **args: str | int) -> _Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _work_items(intervals: Sequence[Interval]) -> Iterator[list[Interval]]:
    """Per attention rank and work item, its slices in the order of the flow; two at least."""
    places: dict[tuple[str, int, int], list[Interval]] = {}
    for interval in intervals:
        places.setdefault((interval.engine, interval.layer, interval.stage), []).append(interval)
    layers = sorted({i.layer for i in intervals})
    following = dict(pairwise(layers))
    for (engine, layer, stage), served in places.items():
        if engine != "ffn":
            continue
        before = places.get(("attention", layer, stage), [])
        after = before + places.get(("attention", following.get(layer, -1), stage), [])
        for rank in sorted({i.rank for i in before}):
            mine = [i for i in served if i.source in (None, rank)]
            if not mine:
                continue
            begin = min(i.begin_s for i in mine)
            end = max(i.end_s for i in mine)
            way_out, way_back = (
                [i for i in places.get((link, layer, stage), []) if i.rank == rank]
                for link in ("link out", "link back")
            )
            path = [
                *[i for i in before if i.rank == rank and i.begin_s < begin][-1:],
                *way_out,
                *mine,
                *way_back,
                *[i for i in after if i.rank == rank and i.end_s > end][:1],
            ]
            # Nothing can be bound to a slice without a duration.
            path = [i for i in path if i.duration_s > 0]
            if len(path) > 1:
                yield path


def _microseconds(seconds: float) -> float:
    # Nanoseconds are what the recorder measures; more digits are rounding noise.
    return round(float(seconds) * 1e6, 3)
