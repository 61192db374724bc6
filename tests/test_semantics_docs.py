"""docs/semantics.md shows what the code computes today, and names every reason."""

from __future__ import annotations

import runpy
from pathlib import Path

from afd_graph.planner import POLICIES, NoSplitReason

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "semantics.md").read_text(encoding="utf-8")


def test_figures_are_up_to_date():
    figures = runpy.run_path(str(DOCS / "make_semantics_figures.py"))["figures"]()
    for name, svg in figures.items():
        assert (DOCS / "figures" / name).read_text(encoding="utf-8") == svg
        assert f"(figures/{name})" in TEXT


def test_every_reason_and_policy_is_documented():
    for name in (*NoSplitReason, *POLICIES):
        assert f"`{name}`" in TEXT
