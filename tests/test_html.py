"""The page of a run: what is in it, that it needs nothing else, and that a browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from afd_graph import AFDBackend, AFDConfig, Report
from afd_graph.cli.group import afd_graph
from afd_graph.errors import PlanError
from afd_graph.html import Content, from_files, from_report, to_html
from afd_graph.tracing import Trace
from tiny_models import PlainModel

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
REQUIRED = os.environ.get("AFD_BROWSER") == "required"
"""Whether a machine without a Chromium fails these tests, as in CI, or skips some."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Report, str]:
    """A traced and dumped run: its directory, its report, and the page of the live report."""
    folder = tmp_path_factory.mktemp("run")
    ids = torch.arange(14).view(2, 7)
    config = AFDConfig(trace=True, dump_dir=str(folder), credits=1)
    with AFDBackend(config) as backend, torch.no_grad():
        compiled = torch.compile(PlainModel(layers=3), backend=backend, dynamic=True)
        for _ in range(3):
            compiled(ids)
        compiled(ids[:1, :1].clone())
        report = backend.report()
        report.html(folder / "live.html", title="live <run>")
    return folder, report, (folder / "live.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Checks that elements close, and keeps what could load something."""

    VOID = frozenset({"meta", "input", "br", "link", "img", "hr"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "action", "data"):
                self.references.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] in ("script", "style", "title", "h1"):
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + text


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


class TestPage:
    def test_is_one_file_that_loads_nothing(self, run):
        _, _, page = run
        reader = read(page)
        assert reader.open == []
        assert all(reference.startswith("#") for reference in reader.references)
        assert {r[1:] for r in reader.references} <= set(reader.ids)
        assert "default-src 'none'" in page
        assert "@import" not in page
        assert not re.search(r"url\(", reader.texts["style"])

    def test_every_element_that_the_script_asks_for_is_there(self, run):
        reader = read(run[2])
        asked = set(re.findall(r'byId\("([\w-]+)"\)', reader.texts["script"]))
        assert asked - {"-count"} <= set(reader.ids)

    def test_text_cannot_become_markup(self):
        page = to_html(Content('</script><script>alert("x")</script>', Report()))
        reader = read(page)
        assert page.count("<script") == 2
        assert reader.texts["title"] == '</script><script>alert("x")</script>'
        assert data_of(page)["title"] == reader.texts["title"]

    def test_data(self, run):
        _, report, page = run
        data = data_of(page)
        assert data["report"]["steps_unsplit"] == {"single_token": 1}
        assert [layer["name"] for layer in data["report"]["layers"]] == [
            f"blocks.{i}.moe" for i in range(3)
        ]
        assert [(s["policy"], s["reason"]) for s in data["steps"]] == [("token", None)] * 3 + [
            (None, "single_token")
        ]
        assert data["steps"][1]["rows"] == [8, 6]
        titles = [panel["title"] for panel in data["steps"][1]["panels"]]
        assert titles == ["predicted", "measured"]
        for panel in data["steps"][1]["panels"]:
            assert len(panel["intervals"]) >= 4 * 3 * 2
        names = [p["name"] for p in data["graphs"][0]["passes"]]
        assert {"normalize", "match", "insert", "token_flow", "split", "schedule"} <= set(names)
        assert report.as_dict() == data["report"]

    def test_files_give_what_the_live_report_gave(self, run):
        folder, report, page = run
        content = from_files([folder], "live <run>")
        assert content.report == report
        assert len(content.traces) == 1
        live, filed = data_of(page), data_of(to_html(content))
        assert filed == live

    def test_without_a_trace_the_schedule_is_shown(self, run):
        _, report, _ = run
        (step,) = data_of(to_html(Content("compile", report)))["steps"]
        assert [panel["title"] for panel in step["panels"]] == ["schedule, equal costs"]

    def test_with_nothing_at_all(self):
        data = data_of(to_html(Content("nothing")))
        assert (data["report"], data["steps"], data["graphs"]) == (None, [], [])

    def test_refusals(self, tmp_path, run):
        with pytest.raises(PlanError, match="holds no report, trace or graph"):
            from_files([tmp_path])
        with pytest.raises(PlanError, match="two traces are of one rank"):
            from_files([run[0], run[0] / "trace.rank0.json"])
        (tmp_path / "report.json").write_text('{"layers": [{}]}')
        with pytest.raises(PlanError, match="is not a report"):
            from_files([tmp_path])

    def test_a_live_report_without_trace_or_dump(self):
        content = from_report(Report())
        assert (content.traces, content.graphs) == ((), ())


class TestCommand:
    def call(self, *args):
        return CliRunner().invoke(afd_graph, ["report", *map(str, args)])

    def test_page_pictures_and_perfetto(self, run, tmp_path):
        made = [tmp_path / name for name in ("run.html", "run.json", "step.svg")]
        answer = self.call(
            run[0], "-o", made[0], "--perfetto", made[1], "--picture", made[2], "--step", "1"
        )
        assert answer.exit_code == 0, answer.output
        read(made[0].read_text(encoding="utf-8"))
        events = json.loads(made[1].read_text())["traceEvents"]
        processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert {"step 0: attention rank 0", "step 2: FFN rank 0"} <= processes
        assert {e["ph"] for e in events} >= {"X", "s", "f"}
        svg = made[2].read_text(encoding="utf-8")
        assert "predicted" in svg
        assert "measured" in svg

    def test_ranks_are_merged(self, run, tmp_path):
        trace = Trace.read(run[0] / "trace.rank0.json")
        Trace(trace.steps, trace.credits, rank=1).write(tmp_path / "one.json")
        answer = self.call(run[0], tmp_path / "one.json", "--perfetto", tmp_path / "both.json")
        assert answer.exit_code == 0, answer.output
        text = (tmp_path / "both.json").read_text()
        assert "attention rank 1" in text

    def test_text_and_json(self, run):
        answer = self.call(run[0])
        assert "steps unsplit: 1 (single_token)" in answer.stdout
        assert "rank 0: 4 steps traced" in answer.stdout
        found = json.loads(self.call(run[0], "--json").stdout)
        assert found["traces"][0]["steps"][3]["reason"] == "single_token"
        assert "insert" in found["graphs"]["graph_0"]

    @pytest.mark.parametrize(
        ("args", "code", "message"),
        [
            ((), 2, "Missing argument"),
            (("nowhere",), 2, "does not exist"),
            (("{run}", "--picture", "x.gif"), 1, "cannot be drawn in x.gif"),
            (("{run}", "--picture", "x.svg", "--step", "9"), 1, "step 9 of 4"),
            (("{empty}",), 1, "holds no report"),
        ],
    )
    def test_misuse(self, run, tmp_path, args, code, message):
        answer = self.call(*(a.format(run=run[0], empty=tmp_path) for a in args))
        assert answer.exit_code == code
        assert message in answer.output


# What a reader does, done by the page itself; the answers are left in the document.
ACTIONS = """
const answers = {};
async function settled() { await new Promise((done) => setTimeout(done, 400)); }
async function act() {
  while (document.body.dataset.ready !== "yes") await new Promise((done) => setTimeout(done, 20));
  answers.boxes = document.querySelectorAll("#drawing rect.attention").length;
  answers.experts = document.querySelectorAll("#drawing rect.ffn").length;
  answers.links = document.querySelectorAll("#drawing line.link").length;
  answers.rows = document.querySelectorAll("#plans tr").length - 1;
  byId("closer").click(); byId("closer").click();
  answers.closer = document.querySelectorAll("#drawing rect.attention").length;
  byId("fit").click();
  answers.fit = document.querySelectorAll("#drawing rect.attention").length;
  const box = document.querySelector("#drawing rect.ffn");
  box.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
  answers.tip = byId("tip").textContent;
  byId("filter").value = "single_token";
  byId("filter").dispatchEvent(new Event("input"));
  const shown = [...document.querySelectorAll("#plans tr")].filter((r) => !r.hidden);
  answers.filtered = shown.length - 1;
  document.querySelector("#plans tr[data-step='0']").click();
  answers.chosen = byId("step").value;
  byId("query").value = "cam_dispatch";
  byId("query").dispatchEvent(new Event("input"));
  await settled();
  answers.hits = document.querySelectorAll("#after mark").length;
  answers.first = byId("hits").textContent;
  byId("next").click();
  answers.second = byId("hits").textContent;
  byId("changed").click();
  await settled();
  answers.changed = document.querySelectorAll("#after .line").length
    - document.querySelectorAll("#after .added").length;
  byId("pass").value = String(byId("pass").options.length - 1);
  byId("pass").dispatchEvent(new Event("change"));
  await settled();
  answers.lines = byId("before-count").textContent;
  answers.svg = svgURL().length;
  document.body.dataset.answers = JSON.stringify(answers);
}
act().catch((error) => console.error(error));
"""


@pytest.mark.skipif(
    CHROMIUM is None and not REQUIRED, reason="no Chromium here: make browser-setup"
)
class TestInABrowser:
    @pytest.fixture(autouse=True)
    def has_a_browser(self):
        assert CHROMIUM is not None, "AFD_BROWSER=required, and no Chromium: make browser-setup"

    def browse(self, page: str, tmp_path: Path, script: str = "") -> tuple[str, list[str]]:
        """The document after its scripts ran, and what the console said."""
        path = tmp_path / "page.html"
        path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
        answer = subprocess.run(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}"),
                *("--window-size=1400,900", "--virtual-time-budget=20000"),
                *("--enable-logging=stderr", "--dump-dom", path.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        return answer.stdout, [line for line in answer.stderr.splitlines() if "CONSOLE" in line]

    def test_loads_without_a_word_and_does_what_readers_do(self, run, tmp_path):
        document, console = self.browse(run[2], tmp_path, ACTIONS)
        assert console == []
        found = re.search(r'data-answers="([^"]*)"', document)
        assert found, "the page did not get to the end"
        answers = json.loads(found[1].replace("&quot;", '"'))
        assert answers["boxes"] >= 2 * 3 * 2
        assert answers["experts"] == 2 * 3 * 2
        assert answers["links"] == 2 * 2 * 3 * 2
        assert answers["rows"] == 4
        assert 0 < answers["closer"] < answers["boxes"] == answers["fit"]
        assert re.match(r"ffn, layer 0, stage 0, rank 0: .* from .*", answers["tip"])
        assert answers["filtered"] == 1
        assert answers["chosen"] == "0"
        assert answers["hits"] >= 3
        assert answers["first"].startswith("1 of ")
        assert answers["second"].startswith("2 of ")
        assert answers["changed"] == 0
        assert re.match(r"\d+ lines, \d+ not on the other side", answers["lines"])
        assert answers["svg"] > 2000

    @pytest.mark.parametrize("what", ["nothing", "schedule"])
    def test_pages_with_less_load_too(self, run, tmp_path, what):
        content = Content(what, run[1] if what == "schedule" else None)
        document, console = self.browse(to_html(content), tmp_path)
        assert console == []
        assert 'data-ready="yes"' in document

    def test_an_error_would_be_seen(self, run, tmp_path):
        _, console = self.browse(run[2], tmp_path, "undefinedFunction();")
        assert any("undefinedFunction" in line for line in console)
