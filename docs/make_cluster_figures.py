"""Writes the figures and the tables of docs/cluster.md.

python docs/make_cluster_figures.py
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from afd_graph.cluster import HARDWARE, MODELS, Deployment, Workload, simulate_cluster
from afd_graph.cluster.published import ROWS, TOLERANCE
from afd_graph.cluster.search import best_division, where_split_pays
from afd_graph.picture import to_svg

HERE = Path(__file__).parent
V3 = Deployment(MODELS["deepseek-v3"], HARDWARE["ascend-910c"], tensor_parallel=4)
DIVIDED = dataclasses.replace(V3, replicas=64, expert_ranks=128)
LOAD = Workload("lognormal:2048:0.8", 16384)


def step_figure() -> str:
    """One step of one of 64 replicas, as its own engines saw it."""
    timelines = []
    for stages, credits in ((1, 1), (2, 1), (2, 2)):
        deployment = dataclasses.replace(
            DIVIDED, replicas=24, expert_ranks=64, stages=stages, credits=credits
        )
        result = simulate_cluster(deployment, LOAD, steps=1)
        assert result.timeline is not None
        timelines.append(result.timeline)
    return to_svg(
        timelines,
        title="Replica 0 of 24, expert rank 0 of 64: one step of DeepSeek-V3",
        max_layers=6,
    )


def published_table() -> list[str]:
    """Rows of :mod:`afd_graph.cluster.published`."""
    lines = ["| published | value | predicted | off by | |", "|---|---|---|---|---|"]
    for row in ROWS:
        predicted = row.predict()
        error = predicted / row.value - 1
        verdict = "reproduced" if abs(error) <= TOLERANCE else f"not reproduced: {row.gap}"
        lines.append(
            f"| {row.name} ({row.source}) | {row.value:g} {row.unit} | {predicted:.3g} "
            f"| {error:+.0%} | {verdict} |"
        )
    return lines


def division_table() -> list[str]:
    """The best divisions of 384 dies."""
    lines = [
        "| replicas of 4 | expert ranks | tokens/s | attention busy | experts busy |",
        "|---|---|---|---|---|",
    ]
    for c in best_division(V3, LOAD, 384):
        lines.append(
            f"| {c.replicas} | {c.expert_ranks} | {c.tokens_per_s:,.0f} "
            f"| {c.attention_busy:.0%} | {c.ffn_busy:.0%} |"
        )
    return lines


def split_table() -> list[str]:
    """Where the split pays."""
    lines = [
        "| tokens of a step | unsplit | two stages | speed-up | AFD, a die | conventional, a die |",
        "|---|---|---|---|---|---|",
    ]
    for gain in where_split_pays(DIVIDED, LOAD, (512, 2048, 8192, 16384, 32768, 65536)):
        together = gain.colocated_tokens_per_device_s
        best = max(gain.split_tokens_per_device_s, gain.unsplit_tokens_per_device_s)
        lines.append(
            f"| {gain.step_tokens} | {gain.unsplit_s * 1e3:.0f} ms | {gain.split_s * 1e3:.0f} ms "
            f"| {gain.speedup:.2f} | {best:,.0f} tokens/s "
            f"| {'does not fit' if together is None else f'{together:,.0f} tokens/s'} |"
        )
    return lines


def hardware_table() -> list[str]:
    """Presets with the source of every number."""
    lines = ["| | value | source |", "|---|---|---|"]
    for name, hardware in HARDWARE.items():
        lines.append(f"| **{name}** | | |")
        for field, source in hardware.sources.items():
            lines.append(f"| `{field}` | {getattr(hardware, field):.4g} | {source} |")
    return lines


TABLES = {
    "hardware": hardware_table,
    "published": published_table,
    "division": division_table,
    "split": split_table,
}


def with_tables(text: str) -> str:
    """``text`` with every table between its marks made anew."""
    for name, make in TABLES.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        table = "\n".join(make())
        text, count = mark.subn(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", text)
        assert count == 1, name
    return text


def main() -> None:
    """Write the figure and the tables."""
    (HERE / "figures" / "cluster-step.svg").write_text(step_figure(), encoding="utf-8")
    page = HERE / "cluster.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
