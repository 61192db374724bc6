"""Pictures: well-formed, complete, readable for long schedules."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from afd_graph.errors import PlanError
from afd_graph.picture import to_svg, write_png, write_svg
from afd_graph.schedule_ir import StageCosts, receive_first, send_first
from afd_graph.simulate import simulate
from afd_graph.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"
COSTS = StageCosts(1e-3, 1e-3, 0.25e-3, 0.25e-3)


def draw(*args, **kwargs):
    return ET.fromstring(to_svg(*args, **kwargs))


def boxes(root):
    return Counter(shape.get("class") for shape in root.iter(f"{SVG}rect"))


def links(root):
    return Counter(shape.get("class") for shape in root.iter(f"{SVG}line"))


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


class TestSvg:
    @pytest.mark.parametrize("stages", [2, 3])
    def test_one_box_per_work_item_and_side(self, stages):
        root = draw(simulate(send_first(5, stages), COSTS))
        items = 5 * stages
        assert boxes(root) == {"attention": items, "ffn": items, "idle": 2, "legend": stages + 1}
        assert links(root)["link-out"] == links(root)["link-back"] == items
        labels = Counter(texts(root))
        assert all(labels[str(layer)] >= 2 * stages for layer in range(5))

    def test_tells_total_utilisation_and_unit(self):
        root = draw(simulate(receive_first(2), COSTS, title="receive-first"), title="A step")
        assert "total 7 ms · attention busy 57.1 % · FFN busy 57.1 %" in texts(root)
        assert {"A step", "receive-first", "time in ms", "stage 0", "stage 1", "dispatch"} <= set(
            texts(root)
        )
        assert root.find(f"{SVG}title").text == "A step"

    @pytest.mark.parametrize(("a", "unit"), [(10.0, "s"), (1e-2, "ms"), (1e-5, "µs")])
    def test_units(self, a, unit):
        assert f"time in {unit}" in texts(draw(simulate(receive_first(2), StageCosts(a, a))))

    def test_tips_name_the_work(self):
        root = draw(simulate(receive_first(1), COSTS))
        tips = [box.findtext(f"{SVG}title") for box in root.iter(f"{SVG}rect")]
        assert "ffn, layer 0, stage 1: 2.75 to 3.75 ms" in tips

    def test_boxes_lie_inside_the_picture(self):
        root = draw(simulate(send_first(61), COSTS))
        width, height = float(root.get("width")), float(root.get("height"))
        for box in root.iter(f"{SVG}rect"):
            assert float(box.get("x")) >= 0
            assert float(box.get("x")) + float(box.get("width")) <= width
            assert float(box.get("y")) + float(box.get("height")) <= height

    def test_long_schedules_show_both_ends(self):
        root = draw(simulate(receive_first(61), COSTS))
        shown = texts(root)
        assert "6 to 54" in shown
        for layer in (0, 1, 5, 55, 60):
            assert str(layer) in shown
        assert "30" not in shown
        assert 22 <= boxes(root)["attention"] <= 26
        assert boxes(root)["idle"] == 4  # two lanes in two windows

    def test_all_layers_on_request(self):
        root = draw(simulate(receive_first(61), COSTS), max_layers=61)
        assert boxes(root)["attention"] == 122

    def test_predicted_and_measured_share_the_axis(self):
        predicted = simulate(receive_first(3), COSTS, title="predicted")
        measured = simulate(receive_first(3), COSTS.scaled(2), title="measured")
        root = draw([predicted, measured])
        assert boxes(root)["attention"] == 12
        widths = [
            float(box.get("width")) + 1
            for box in root.iter(f"{SVG}rect")
            if box.get("class") == "attention"
        ]
        assert sum(widths[6:]) == pytest.approx(2 * sum(widths[:6]), rel=1e-3)

    def test_very_different_timelines_are_not_cut(self):
        slow, fast = (simulate(receive_first(20), COSTS.scaled(k)) for k in (20, 1))
        assert "drawn" not in texts(draw([slow, fast]))
        close = simulate(receive_first(20), COSTS.scaled(1.05))
        assert "drawn" in texts(draw([fast, close]))

    def test_markup_in_titles_is_text(self):
        root = draw(simulate(receive_first(1), COSTS, title="<b> & co"), title="1 < 2")
        assert {"<b> & co", "1 < 2"} <= set(texts(root))

    def test_is_deterministic_and_self_contained(self):
        timeline = simulate(send_first(4), COSTS)
        text = to_svg(timeline)
        assert text == to_svg(timeline)
        assert "href" not in text
        assert "url(" not in text

    def test_stage_colours_have_contrast(self):
        from afd_graph.picture import _STAGE_COLOURS

        def luminance(colour):
            channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
            return sum(k * c for k, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

        for fill, ink in _STAGE_COLOURS:
            dark, light = sorted((luminance(fill), luminance(ink)))
            assert (light + 0.05) / (dark + 0.05) >= 4.5

    def test_refusals(self):
        with pytest.raises(PlanError, match=r"nothing to draw.*takes time"):
            to_svg(Timeline(()))
        with pytest.raises(PlanError, match="max_layers=1 is too few"):
            to_svg(simulate(receive_first(3), COSTS), max_layers=1)


class TestFiles:
    def test_svg(self, tmp_path):
        timeline = simulate(receive_first(3), COSTS)
        write_svg(timeline, tmp_path / "step.svg", title="step")
        assert (tmp_path / "step.svg").read_text(encoding="utf-8") == to_svg(timeline, title="step")

    def test_png(self, tmp_path):
        pytest.importorskip("matplotlib")
        write_png(simulate(receive_first(3), COSTS), tmp_path / "step.png", title="step")
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


class TestDocumentation:
    """docs/pipeline.md shows what the code computes today."""

    docs = Path(__file__).parents[1] / "docs"

    @pytest.fixture
    def source(self):
        return runpy.run_path(str(self.docs / "make_pipeline_figures.py"))

    def test_figures_are_up_to_date(self, source):
        text = (self.docs / "pipeline.md").read_text(encoding="utf-8")
        for name, svg in source["figures"]().items():
            assert (self.docs / "figures" / name).read_text(encoding="utf-8") == svg
            assert f"(figures/{name})" in text

    def test_golden_table_is_up_to_date(self, source):
        text = (self.docs / "pipeline.md").read_text(encoding="utf-8")
        assert "\n".join(source["golden_table"]()) in text

    def test_the_cuts_take_what_is_said(self, source):
        totals = [source["causal_prompt"](share, 58).total_s for share in (0.5, 0.618, 0.707)]
        said = ", ".join(f"{1e3 * total:.1f}" for total in totals[:2])
        text = (self.docs / "pipeline.md").read_text(encoding="utf-8")
        assert f"take {said} and {1e3 * totals[2]:.1f} ms" in text
