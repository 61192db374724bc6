"""Draw the figures of semantics.md from what the planner and the layouts return.

Usage: python docs/make_semantics_figures.py    (writes docs/figures/*.svg)
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from afd_graph.layout import ZERO_ROW, StageLayout
from afd_graph.planner import StagePlan, plan_stages

FIGURES = Path(__file__).parent / "figures"

REQUESTS = ("#cfe3f7", "#fbe0c3", "#d5efd0", "#ead7f2")
STAGES = ("#2f6db5", "#c8641b")
STAGE_FILLS = ("#cfe3f7", "#fbe0c3")
PAD = "#eeeeee"
CONTEXT = "#e3e3e3"
INK = "#222222"
CELL = 26


class Drawing:
    """An SVG under construction; coordinates in pixels, origin at the top left."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def cell(
        self,
        x: float,
        y: float,
        text: object = "",
        *,
        fill: str,
        size: int = CELL,
        dash: bool = False,
    ) -> None:
        """A square with a text in its middle."""
        style = ' stroke-dasharray="3 2"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{fill}" '
            f'stroke="#888888"{style}/>'
        )
        self.text(x + size / 2, y + size / 2 + 4, text, anchor="middle")

    def text(
        self, x: float, y: float, text: object, *, anchor: str = "start", color: str = INK
    ) -> None:
        """A line of text on the baseline ``y``."""
        if text != "":
            self.parts.append(
                f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{text}</text>'
            )

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = INK) -> None:
        """A straight line."""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="2"/>'
        )

    def brace(self, x1: float, x2: float, y: float, text: str, color: str) -> None:
        """A bracket under ``[x1, x2]`` with a label below it."""
        self.line(x1 + 1, y, x2 - 1, y, color)
        self.line(x1 + 1, y - 5, x1 + 1, y, color)
        self.line(x2 - 1, y - 5, x2 - 1, y, color)
        self.text((x1 + x2) / 2, y + 16, text, anchor="middle", color=color)

    def svg(self) -> str:
        """The finished picture."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def planned(counts: list[int], split: str, tensor_parallel_size: int = 1) -> StagePlan:
    """A plan, sequence parallel when there is more than one rank."""
    plan = plan_stages(
        counts,
        split=split,
        sequence_parallel=tensor_parallel_size > 1,
        tensor_parallel_size=tensor_parallel_size,
    )
    assert isinstance(plan, StagePlan)
    return plan


def step_cut(counts: list[int]) -> str:
    """One step under the token and the request policy."""
    total = sum(counts)
    left = 110
    drawing = Drawing(left + total * CELL + 30, 200)
    starts = list(accumulate(counts, initial=0))
    for row, split in enumerate(("token", "request")):
        y = 34 + row * 100
        plan = planned(counts, split)
        drawing.text(10, y + 17, f'split="{split}"')
        for request, count in enumerate(counts):
            for token in range(starts[request], starts[request] + count):
                drawing.cell(left + token * CELL, y, token, fill=REQUESTS[request])
            if row == 0:
                middle = left + (starts[request] + count / 2) * CELL
                drawing.text(middle, y - 10, f"request {request}", anchor="middle")
        for number, stage in enumerate(plan.stages):
            tokens, requests = stage.token_slice, stage.request_slice
            drawing.brace(
                left + tokens.start * CELL,
                left + tokens.stop * CELL,
                y + CELL + 12,
                f"stage {number}: requests [{requests.start}, {requests.stop})",
                STAGES[number],
            )
    return drawing.svg()


def rows_per_rank(counts: list[int], parent_tokens: int, size: int) -> str:
    """Sequence-parallel rows of every rank: parent, both stages, restored."""
    plan = planned(counts, "token", size)
    ranks = [StageLayout(plan, parent_tokens, size, rank, True) for rank in range(size)]
    share = parent_tokens // size
    widths = [share, *(stage.input_tokens // size for stage in plan.stages), share]
    titles = ["parent", "stage 0", "stage 1", "restored"]
    gap, left, top = 44, 70, 50
    lefts = [left + sum(width * CELL + gap for width in widths[:column]) for column in range(4)]
    drawing = Drawing(int(lefts[-1] + widths[-1] * CELL + 30), top + size * (CELL + 12) + 40)
    real = plan.num_tokens
    cut = plan.stages[1].token_slice.start

    def fill_of(row: int) -> str:
        return PAD if row == ZERO_ROW or row >= real else STAGE_FILLS[row >= cut]

    for x, title in zip(lefts, titles, strict=True):
        drawing.text(x, top - 14, title)
    for layout in ranks:
        y = top + layout.tensor_parallel_rank * (CELL + 12)
        drawing.text(14, y + 17, f"rank {layout.tensor_parallel_rank}")
        columns = [
            list(layout.parent_rows),
            layout.local_rows(0),
            layout.local_rows(1),
            layout.restored_rows(),
        ]
        for x, rows in zip(lefts, columns, strict=True):
            for place, row in enumerate(rows):
                pad = row == ZERO_ROW or row >= real
                text = "" if row == ZERO_ROW else row
                drawing.cell(x + place * CELL, y, text, fill=fill_of(row), dash=pad)
    drawing.text(
        14,
        top + size * (CELL + 12) + 20,
        f"{real} real tokens in {parent_tokens} parent rows; dashed: padding, back as zeros",
    )
    return drawing.svg()


def request_cut(cached: int, new: int) -> str:
    """Queries against keys of one request that is cut in the middle."""
    plan = planned([new], "token")
    size = 18
    left, top = 90, 60
    total = cached + new
    drawing = Drawing(left + total * size + 120, top + new * size + 60)
    cut = plan.stages[1].token_slice.start
    drawing.text(left + total * size / 2, 20, "keys (KV cache positions)", anchor="middle")
    for key in range(total):
        drawing.text(left + (key + 0.5) * size, top - 8, key, anchor="middle")
    for query in range(new):
        y = top + query * size
        color = STAGES[int(query >= cut)]
        drawing.text(left - 8, y + 13, cached + query, anchor="end", color=color)
        for key in range(cached + query + 1):
            written_now = key >= cached
            fill = STAGE_FILLS[int(key - cached >= cut)] if written_now else CONTEXT
            drawing.cell(left + key * size, y, fill=fill, size=size)
    drawing.text(14, top - 8, "queries")
    boundary = top + cut * size
    drawing.line(left - 30, boundary, left + (total + 1) * size, boundary)
    for number, stage in enumerate(plan.stages):
        tokens = stage.token_slice
        y = top + (tokens.start + 1) * size
        x = left + (total + 1) * size
        drawing.text(x, y, f"stage {number}", color=STAGES[number])
        drawing.text(x, y + 16, f"context {cached + tokens.start}", color=STAGES[number])
        drawing.text(x, y + 32, f"query {stage.actual_tokens}", color=STAGES[number])
        drawing.text(x, y + 48, f"sequence {cached + tokens.stop}", color=STAGES[number])
    y = top + new * size + 12
    drawing.brace(left, left + cached * size, y, "cached before", "#666666")
    drawing.brace(
        left + cached * size, left + (cached + cut) * size, y, "written by stage 0", STAGES[0]
    )
    drawing.brace(
        left + (cached + cut) * size, left + total * size, y, "written by stage 1", STAGES[1]
    )
    return drawing.svg()


def figures() -> dict[str, str]:
    """Every figure of semantics.md by file name."""
    return {
        "semantics-step-cut.svg": step_cut([3, 6, 2, 5]),
        "semantics-rows-per-rank.svg": rows_per_rank([9], parent_tokens=12, size=4),
        "semantics-request-cut.svg": request_cut(cached=6, new=16),
    }


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for name, svg in figures().items():
        (FIGURES / name).write_text(svg, encoding="utf-8")
