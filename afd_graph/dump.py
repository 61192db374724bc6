"""Write what the compiler did to a directory: graphs around each pass, matches, the schedule.

<directory>/graph_0/
    00_captured.txt
    01_normalize.before.txt  01_normalize.after.txt  01_normalize.diff.txt
    ...
    match.txt  schedule.svg  schedule.trace.json  report.txt
<directory>/report.json    what was compiled, and how steps ran until the backend was closed
<directory>/trace.rank0.json    with AFDConfig(trace=True), when the backend is closed
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

from torch import fx

from afd_graph.picture import write_svg
from afd_graph.pipeline import Programs
from afd_graph.report import GraphReport, Report
from afd_graph.schedule_ir import StageCosts
from afd_graph.simulate import simulate
from afd_graph.trace import write_trace


class GraphDump:
    """Collects the files of one graph.

    Args:
        directory: where dumps of this process go; a new numbered folder is made in it.
        root: module that the graph's attributes live in.
    """

    def __init__(self, directory: str, root: fx.GraphModule) -> None:
        base = Path(directory)
        base.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            self.folder = base / f"graph_{number}"
            try:
                self.folder.mkdir()
                break
            except FileExistsError:
                continue
        self._root = root
        self._number = 0
        self._write("00_captured.txt", self._readable(root.graph))

    def after_pass(self, name: str, before: fx.Graph, after: fx.Graph) -> None:
        """Write the graph before and after a pass, and how the operator counts differ."""
        self._number += 1
        stem = f"{self._number:02d}_{name}"
        self._write(f"{stem}.before.txt", self._readable(before))
        self._write(f"{stem}.after.txt", self._readable(after))
        self._write(f"{stem}.diff.txt", count_difference(before, after))

    def finish(self, programs: Programs, report: GraphReport) -> None:
        """Write the match report and the schedule as a picture and as a trace."""
        lines = [
            f"layer {number}: {match.name or '?'}: {match.num_experts} experts, "
            f"top-{match.top_k}, {match.shared_experts} shared, width {match.width}\n"
            f"  rows {match.hidden}, ids {match.topk_ids}, weights {match.topk_weights}, "
            f"result {match.output}"
            for number, match in zip(report.layers, programs.matches, strict=True)
        ]
        lines += [f"no match: {text}" for text in report.no_match]
        self._write("match.txt", "\n".join(lines or ["no MoE layer"]) + "\n")
        self._write("report.txt", f"{report}\n")
        if programs.order:
            # Equal costs on both sides: the picture shows the order, not a prediction.
            timeline = simulate(programs.order, StageCosts(1.0, 1.0), title="schedule, equal costs")
            write_svg(timeline, self.folder / "schedule.svg")
            write_trace(timeline, self.folder / "schedule.trace.json")

    def _readable(self, graph: fx.Graph) -> str:
        gm = fx.GraphModule(self._root, graph)
        return gm.print_readable(print_output=False)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


def write_report(report: Report, directory: str) -> None:
    """Write what is known so far; called after every graph and at the end."""
    path = Path(directory) / "report.json"
    path.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")


def write_run(report: Report, directory: str) -> None:
    """Write what a run counted and, if it was traced, its measured steps; called at its end."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_report(report, directory)
    if report.trace is not None:
        trace = report.trace()
        trace.write(Path(directory) / f"trace.rank{trace.rank}.json")


def count_difference(before: fx.Graph, after: fx.Graph) -> str:
    """Operators whose number changed, one a line, and the totals."""
    counts = [
        Counter(str(n.target) for n in g.nodes if n.op == "call_function") for g in (before, after)
    ]
    lines = [f"nodes: {len(before.nodes)} -> {len(after.nodes)}"]
    for name in sorted(counts[0] | counts[1]):
        old, new = counts[0][name], counts[1][name]
        if old != new:
            lines.append(f"{new - old:+5d}  {name} ({old} -> {new})")
    return "\n".join(lines) + "\n"
