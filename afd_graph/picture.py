"""Timelines as a picture: attention above, experts below, dispatches and returns between them.

1. :func:`_layout` turns timelines into rectangles, lines and texts, all on one time axis;
2. :func:`to_svg` writes them as self-contained SVG;
3. :func:`write_png` draws the same with matplotlib (extra ``plot``).

A box is one stage of one MoE layer and carries the layer's number; grey is idle. Of a schedule
with many layers the first and the last are drawn, with a break between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape

from afd_graph.errors import PlanError
from afd_graph.timeline import Interval, Timeline

# (box, text on the box): pairs with a contrast of at least 4.5, told apart in greyscale too.
_STAGE_COLOURS = (
    ("#1f5a99", "#ffffff"),
    ("#f2a33a", "#1a1a1a"),
    ("#2e7d5b", "#ffffff"),
    ("#d9b3e6", "#1a1a1a"),
)
_INK, _MUTED, _IDLE, _RULE = "#1a1a1a", "#555555", "#e9ebee", "#c4c8ce"

_WIDTH, _LEFT, _RIGHT = 1200.0, 96.0, 24.0
_LANE, _LANE_GAP, _LINKS = 30.0, 4.0, 40.0
_BREAK = 46.0
_FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class _Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    kind: str
    tip: str = ""


@dataclass(frozen=True)
class _Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    kind: str
    dashed: bool = False
    width: float = 1.0


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    colour: str = _INK
    bold: bool = False


_Shape: TypeAlias = _Rect | _Line | _Text


def to_svg(
    timelines: Timeline | Sequence[Timeline], *, title: str = "", max_layers: int = 12
) -> str:
    """Draw one or several timelines, such as predicted and measured, below one another.

    Args:
        timelines: what to draw; all begin at the left edge and share the time axis.
        title: heading of the picture.
        max_layers: with more layers than this, draw the first and the last half of so many.

    Returns:
        A self-contained SVG document.

    Raises:
        PlanError: there is nothing to draw, or ``max_layers`` is below 2.
    """
    height, shapes = _layout(timelines, title, max_layers)
    body = "\n".join(_svg(shape) for shape in shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'width="{_WIDTH:g}" height="{height:g}" font-family="{_FONT}">\n'
        f"<title>{escape(title or 'AFD timeline')}</title>\n{body}\n</svg>\n"
    )


def write_svg(
    timelines: Timeline | Sequence[Timeline],
    path: str | PathLike[str],
    *,
    title: str = "",
    max_layers: int = 12,
) -> None:
    """Write :func:`to_svg` to ``path``."""
    Path(path).write_text(to_svg(timelines, title=title, max_layers=max_layers), encoding="utf-8")


def write_png(
    timelines: Timeline | Sequence[Timeline],
    path: str | PathLike[str],
    *,
    title: str = "",
    max_layers: int = 12,
    dpi: int = 144,
) -> None:
    """Write the picture of :func:`to_svg` as PNG; needs the extra ``plot``.

    Raises:
        PlanError: as :func:`to_svg`.
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    height, shapes = _layout(timelines, title, max_layers)
    pixel = 72 / 100  # the figure is laid out at 100 pixels per inch, matplotlib counts points
    figure = Figure(figsize=(_WIDTH / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    for shape in shapes:
        if isinstance(shape, _Rect):
            axes.add_patch(
                Rectangle((shape.x, shape.y), shape.width, shape.height, facecolor=shape.fill)
            )
        elif isinstance(shape, _Line):
            axes.plot(
                (shape.x1, shape.x2),
                (shape.y1, shape.y2),
                color=shape.colour,
                linewidth=shape.width * pixel,
                linestyle="--" if shape.dashed else "-",
            )
        else:
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size * pixel,
                color=shape.colour,
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                weight="bold" if shape.bold else "normal",
            )
    FigureCanvasAgg(figure).print_figure(path, dpi=dpi, format="png")


@dataclass(frozen=True)
class _Axis:
    """Time in seconds to x, over one window, or over two with a break between them."""

    windows: tuple[tuple[float, float], ...]

    @property
    def scale(self) -> float:
        """Pixels per second."""
        room = _WIDTH - _LEFT - _RIGHT - _BREAK * (len(self.windows) - 1)
        return room / sum(end - begin for begin, end in self.windows)

    def left(self, window: int) -> float:
        """Left edge of a window."""
        before = sum(end - begin for begin, end in self.windows[:window])
        return _LEFT + before * self.scale + _BREAK * window

    def x(self, window: int, time_s: float) -> float:
        """Position of a time within a window."""
        return self.left(window) + (time_s - self.windows[window][0]) * self.scale

    def spans(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Visible parts of an interval, as ``(x, width)``."""
        parts = []
        for number, (first, last) in enumerate(self.windows):
            begin, end = max(begin_s, first), min(end_s, last)
            if end > begin:
                parts.append((self.x(number, begin), (end - begin) * self.scale))
        return parts

    def window_of(self, begin_s: float, end_s: float) -> int | None:
        """The window that holds all of an interval, if one does."""
        for number, (first, last) in enumerate(self.windows):
            if first <= begin_s and end_s <= last:
                return number
        return None


def _layout(
    timelines: Timeline | Sequence[Timeline], title: str, max_layers: int
) -> tuple[float, list[_Shape]]:
    panels = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not any(panel.total_s for panel in panels):
        raise PlanError("there is nothing to draw", remedy="give a timeline that takes time")
    if max_layers < 2:
        raise PlanError(
            f"max_layers={max_layers} is too few", remedy="draw at least the first and the last"
        )
    axis, left_out = _axis(panels, max_layers)
    unit, per_second = _unit(max(panel.total_s for panel in panels))
    shapes: list[_Shape] = [_Text(_LEFT, 26, title, 16, bold=True)] if title else []
    y = 38.0 if title else 10.0
    _legend(shapes, y, sorted({stage for panel in panels for stage in panel.stages}))
    y += 24
    top = y
    for panel in panels:
        y = _panel(shapes, y, panel, axis, unit, per_second)
    _ruler(shapes, top, y, axis, unit, per_second)
    if left_out:
        x = axis.left(1) - _BREAK / 2
        shapes += [
            _Text(x, top + 12 * line, text, 10, "middle", _MUTED)
            for line, text in enumerate(left_out, start=1)
        ]
        shapes.append(_Text(x, y + 14, "· · ·", 12, "middle", _MUTED))
    return y + 34, shapes


def _axis(panels: Sequence[Timeline], max_layers: int) -> tuple[_Axis, tuple[str, ...]]:
    """The axis, and what is left out of it (two lines of text), if anything."""
    longest = max(panel.total_s for panel in panels)
    layers = sorted({layer for panel in panels for layer in panel.layers})
    if len(layers) <= max_layers:
        return _Axis(((0, longest),)), ()
    half = max_layers // 2
    hidden, last = layers[half], layers[-half]
    cut = max(_first_begin(panel, hidden) for panel in panels)
    resume = min(_first_begin(panel, last) for panel in panels)
    if resume <= cut:  # timelines too different in speed to leave out the same layers
        return _Axis(((0, longest),)), ()
    # Timelines of different speed hide different layers, so only one can name them.
    note = ("layers", f"{hidden} to {layers[-half - 1]}") if len(panels) == 1 else ("not", "drawn")
    return _Axis(((0, cut), (resume, longest))), note


def _first_begin(panel: Timeline, layer: int) -> float:
    """Seconds from the panel's begin to the first interval of a layer."""
    begins = [i.begin_s for i in panel.intervals if i.layer == layer]
    return min(begins, default=panel.end_s) - panel.begin_s


def _legend(shapes: list[_Shape], y: float, stages: Sequence[int]) -> None:
    x = _LEFT
    for stage in stages:
        shapes.append(_Rect(x, y, 14, 12, _colours(stage)[0], "legend"))
        shapes.append(_Text(x + 20, y + 10, f"stage {stage}"))
        x += 84
    for name, dashed in (("dispatch", False), ("return", True)):
        shapes.append(_Line(x, y + 6, x + 22, y + 6, _INK, "legend", dashed, 1.6))
        shapes.append(_Text(x + 28, y + 10, name))
        x += 100
    shapes.append(_Rect(x, y, 14, 12, _IDLE, "legend"))
    shapes.append(_Text(x + 20, y + 10, "idle"))
    shapes.append(_Text(x + 66, y + 10, "number in a box: MoE layer", colour=_MUTED))


def _panel(
    shapes: list[_Shape], y: float, panel: Timeline, axis: _Axis, unit: str, per_second: float
) -> float:
    """Draw one timeline from ``y`` on; returns where it ends."""
    origin, total = panel.begin_s, panel.total_s
    if panel.title:
        shapes.append(_Text(_LEFT, y + 14, panel.title, 13, bold=True))
    y += 20 if panel.title else 2
    lanes: dict[tuple[str, int], float] = {}
    for engine in ("attention", "ffn"):
        for rank in panel.ranks(engine):
            lanes[engine, rank] = y
            y += _LANE + _LANE_GAP
        if engine == "attention":
            y += _LINKS - 2 * _LANE_GAP
    for (engine, rank), lane in lanes.items():
        ranks = panel.ranks(engine)
        name = ("attention" if engine == "attention" else "FFN") + (
            f" {rank}" if len(ranks) > 1 else ""
        )
        shapes.append(_Text(_LEFT - 8, lane + _LANE / 2 + 4, name, 12, "end"))
        shapes += [_Rect(x, lane, width, _LANE, _IDLE, "idle") for x, width in axis.spans(0, total)]
        for interval in panel.lane(engine, rank):
            begin, end = interval.begin_s - origin, interval.end_s - origin
            for x, width in axis.spans(begin, end):
                _box(shapes, x, lane, width, interval, _tip(interval, begin, end, unit, per_second))
    upper = max((lane + _LANE for (e, _), lane in lanes.items() if e == "attention"), default=y)
    lower = min((lane for (e, _), lane in lanes.items() if e == "ffn"), default=y)
    for interval in panel.intervals:
        if interval.engine.startswith("link"):
            begin, end = interval.begin_s - origin, interval.end_s - origin
            window = axis.window_of(begin, end)
            if window is not None:
                out = interval.engine == "link out"
                from_y, to_y = (upper, lower) if out else (lower, upper)
                x1, x2 = axis.x(window, begin), axis.x(window, end)
                colour = _colours(interval.stage)[0]
                kind = interval.engine.replace(" ", "-")
                shapes.append(_Line(x1, from_y, x2, to_y, colour, kind, not out, 1.6))
    busy = " · ".join(
        f"{name} busy {100 * _mean(panel, engine):.1f} %"
        for engine, name in (("attention", "attention"), ("ffn", "FFN"))
        if panel.ranks(engine)
    )
    caption = f"total {total * per_second:.4g} {unit} · {busy}"
    shapes.append(_Text(_LEFT, y + 13, caption, 12, colour=_MUTED))
    return y + 26


def _mean(panel: Timeline, engine: str) -> float:
    ranks = panel.ranks(engine)
    return sum(panel.utilisation(engine, rank) for rank in ranks) / len(ranks)


def _tip(interval: Interval, begin: float, end: float, unit: str, per_second: float) -> str:
    return (
        f"{interval.engine}, layer {interval.layer}, stage {interval.stage}: "
        f"{begin * per_second:.4g} to {end * per_second:.4g} {unit}"
    )


def _box(
    shapes: list[_Shape], x: float, y: float, width: float, interval: Interval, tip: str
) -> None:
    fill, ink = _colours(interval.stage)
    # A hairline between neighbours of one stage; boxes thinner than that keep their full width.
    inset = 0.5 if width > 3 else 0
    shapes.append(_Rect(x + inset, y, width - 2 * inset, _LANE, fill, interval.engine, tip))
    label = str(interval.layer)
    if width >= 7 * len(label) + 5:
        shapes.append(_Text(x + width / 2, y + _LANE / 2 + 4, label, 11, "middle", ink))


def _ruler(
    shapes: list[_Shape], top: float, y: float, axis: _Axis, unit: str, per_second: float
) -> None:
    step = _tick(70 / axis.scale * per_second) / per_second
    for number, (begin, end) in enumerate(axis.windows):
        left, right = axis.left(number), axis.x(number, end)
        shapes.append(_Line(left, y, right, y, _INK, "axis"))
        for tick in range(math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9) + 1):
            x = axis.x(number, tick * step)
            label = f"{tick * step * per_second:g}"
            shapes.append(_Line(x, y, x, y + 4, _INK, "axis"))
            shapes.append(_Text(x, y + 17, label, 11, "middle", _MUTED))
    if len(axis.windows) > 1:
        for x in (axis.x(0, axis.windows[0][1]), axis.left(1)):
            shapes.append(_Line(x, top, x, y, _RULE, "break", dashed=True))
    shapes.append(_Text(_LEFT - 8, y + 17, f"time in {unit}", 11, "end", _MUTED))


def _tick(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _unit(longest_s: float) -> tuple[str, float]:
    """A unit in which the longest time is readable, and how many make one second."""
    if longest_s >= 10:
        return "s", 1.0
    return ("ms", 1e3) if longest_s >= 1e-3 else ("µs", 1e6)


def _colours(stage: int) -> tuple[str, str]:
    return _STAGE_COLOURS[stage % len(_STAGE_COLOURS)]


def _svg(shape: _Shape) -> str:
    return _WRITERS[type(shape)](shape)


def _svg_rect(shape: _Rect) -> str:
    tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
    return (
        f'<rect class="{shape.kind}" x="{shape.x:.2f}" y="{shape.y:.2f}" '
        f'width="{shape.width:.2f}" height="{shape.height:.2f}" fill="{shape.fill}">{tip}</rect>'
    )


def _svg_line(shape: _Line) -> str:
    dash = ' stroke-dasharray="4 3"' if shape.dashed else ""
    return (
        f'<line class="{shape.kind}" x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" '
        f'y2="{shape.y2:.2f}" stroke="{shape.colour}" stroke-width="{shape.width:g}"{dash}/>'
    )


def _svg_text(shape: _Text) -> str:
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" '
        f'text-anchor="{shape.anchor}" fill="{shape.colour}"{weight}>{escape(shape.text)}</text>'
    )


_WRITERS: dict[type, Callable[..., str]] = {
    _Rect: _svg_rect,
    _Line: _svg_line,
    _Text: _svg_text,
}
