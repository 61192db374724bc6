"""Writes the figures of docs/pipeline.md and prints its golden table.

python docs/make_pipeline_figures.py
"""

from __future__ import annotations

from pathlib import Path

from afd_graph.picture import to_svg
from afd_graph.schedule_ir import StageCosts, receive_first, send_first, unsplit
from afd_graph.simulate import REFERENCE_COSTS, simulate
from afd_graph.timeline import Timeline

FIGURES = Path(__file__).parent / "figures"
LAYERS = 58


def costs(a: float, f: float, c: float, d: float) -> StageCosts:
    """Costs of one stage in milliseconds."""
    return StageCosts(a * 1e-3, f * 1e-3, c * 1e-3, d * 1e-3)


def credits_figure() -> str:
    """One and two credits against the unsplit step."""
    stage = costs(1, 1, 0.25, 0.25)
    return to_svg(
        [
            simulate(unsplit(5), stage.scaled(2), title="unsplit"),
            simulate(receive_first(5), stage, title="receive-first: one credit"),
            simulate(send_first(5), stage, title="send-first: two credits"),
        ],
        title="The same work: one stage, one credit, two credits",
    )


def regimes_figure() -> str:
    """What limits the send-first order."""
    rows = (
        ("attention-bound: a = 1, f = 0.5, c = d = 0.2", costs(1, 0.5, 0.2, 0.2)),
        ("ffn-bound: a = 0.5, f = 1, c = d = 0.2", costs(0.5, 1, 0.2, 0.2)),
        ("latency-bound: a = 1, f = 0.6, c = d = 0.6", costs(1, 0.6, 0.6, 0.6)),
    )
    return to_svg(
        [simulate(send_first(5), stage, title=title) for title, stage in rows],
        title="Three regimes of send-first",
    )


def stages_figure() -> str:
    """Links hidden by a third stage: the same batch in two and in three parts."""
    return to_svg(
        [
            simulate(send_first(4, 2), costs(1.5, 1.5, 0.75, 0.75), title="two stages"),
            simulate(send_first(4, 3), costs(1, 1, 0.5, 0.5), title="three stages"),
        ],
        title="c = d = a / 2: the links need a third stage",
    )


def causal_prompt(share: float, layers: int, title: str = "") -> Timeline:
    """One causal prompt, attention purely quadratic, cut after ``share`` of its tokens."""
    attention = (2 * share**2 * 1e-3, 2 * (1 - share**2) * 1e-3)
    tokens = (2 * share, 2 * (1 - share))
    stage = StageCosts(
        lambda _, s: attention[s],
        lambda _, s: tokens[s] * 1e-3,
        lambda _, s: tokens[s] * 0.05e-3,
        lambda _, s: tokens[s] * 0.05e-3,
    )
    return simulate(send_first(layers), stage, title=title)


def cut_figure() -> str:
    """Where a causal prompt is cut."""
    return to_svg(
        [
            causal_prompt(0.5, 5, "equal tokens: 50 %"),
            causal_prompt(0.618, 5, "each side's work meets the other's: 61.8 %"),
            causal_prompt(0.707, 5, "equal attention: 70.7 %"),
        ],
        title="One causal prompt, quadratic attention",
    )


def long_figure() -> str:
    """A whole model."""
    return to_svg(
        simulate(receive_first(LAYERS), costs(1, 1, 0.1, 0.1)),
        title=f"{LAYERS} MoE layers, receive-first",
    )


def golden_table() -> list[str]:
    """Rows of the golden table, simulated, as Markdown."""
    lines = ["| a, f, c, d per stage | T1 | send-first | receive-first |", "|---|---|---|---|"]
    for stage in REFERENCE_COSTS:
        times = (
            simulate(unsplit(LAYERS), stage.scaled(2)),
            simulate(send_first(LAYERS), stage),
            simulate(receive_first(LAYERS), stage),
        )
        inputs = ", ".join(f"{value:g}" for value in stage.uniform())
        lines.append(f"| {inputs} | " + " | ".join(f"{t.total_s:g}" for t in times) + " |")
    return lines


def figures() -> dict[str, str]:
    """File name to SVG."""
    return {
        "pipeline-credits.svg": credits_figure(),
        "pipeline-regimes.svg": regimes_figure(),
        "pipeline-stages.svg": stages_figure(),
        "pipeline-cut.svg": cut_figure(),
        "pipeline-long.svg": long_figure(),
    }


def main() -> None:
    """Write the figures, print the table."""
    FIGURES.mkdir(exist_ok=True)
    for name, svg in figures().items():
        (FIGURES / name).write_text(svg, encoding="utf-8")
        print(f"wrote {FIGURES / name}")
    print("\n".join(golden_table()))


if __name__ == "__main__":
    main()
