"""Runs a small model, and writes screenshots of its page for docs/reports.md.

    python docs/make_report_figures.py

Needs Chromium (``make browser-setup``). The timeline is that of the step of the run that came
closest to its prediction; other work on the machine can only add to the others.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _models import Compiled, deepseek_v2, one_core_a_side  # noqa: E402

from afd_graph.html import from_report, to_html  # noqa: E402

# What is taken away from the page before each picture, and how high the picture is.
SHOTS = {
    "report-timeline.png": ("#steps, #model, #graphs", 830),
    "report-graphs.png": ("#run, #timeline, #steps, #model", 900),
}
_PREPARE = """<script>setTimeout(() => {{
  for (const section of document.querySelectorAll({away!r})) section.style.display = "none";
  byId("query").value = "cam_";
  showPass();
}}, 1500);</script></body>"""


def page(folder: Path) -> str:
    """The page of a run of eight MoE layers with a step of each kind."""
    _, theirs = one_core_a_side()
    model = deepseek_v2(num_hidden_layers=8, hidden_size=512, num_attention_heads=8,
                        n_routed_experts=8, moe_intermediate_size=256, kv_lora_rank=128,
                        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=96)  # fmt: skip
    compiled = Compiled(
        model,
        trace=True,
        dump_dir=str(folder),
        connector="process",
        connector_options={"threads": 1, "cpus": theirs},
        shared_experts="ffn",
    )
    ids = torch.randint(0, 256, (1, 512))
    with torch.no_grad(), compiled.backend as backend:
        for _ in range(12):
            compiled(ids, split=True)
        compiled(ids, split=False)
        content = from_report(
            backend.report(), "DeepseekV2, 8 MoE layers, 512 tokens, two CPU cores"
        )
    # Where packages are installed concerns nobody.
    graphs = tuple(
        dataclasses.replace(
            graph,
            passes=tuple(
                dataclasses.replace(p, before=shorter(p.before), after=shorter(p.after))
                for p in graph.passes
            ),
        )
        for graph in content.graphs
    )
    (trace,) = content.traces
    split = [n for n, step in enumerate(trace.steps) if step.policy is not None]
    best = min(split, key=lambda n: trace.timeline(n).total_s / trace.predicted(n).total_s)
    steps = (trace.steps[best], trace.steps[-1], trace.steps[best])
    return to_html(
        dataclasses.replace(
            content, graphs=graphs, traces=(dataclasses.replace(trace, steps=steps),)
        )
    )


def shorter(text: str) -> str:
    """``text`` with paths of modules that begin at their package."""
    return re.sub(r"/\S*/site-packages/", "", text)


def main() -> None:
    """Write the screenshots."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("Chromium is needed: make browser-setup")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "page.html"
        text = page(folder / "dump")
        for shot, (away, height) in SHOTS.items():
            file.write_text(text.replace("</body>", _PREPARE.format(away=away)), encoding="utf-8")
            subprocess.run(
                [
                    *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu"),
                    *("--hide-scrollbars", f"--window-size=1300,{height}"),
                    *("--virtual-time-budget=5000", f"--screenshot={HERE / 'figures' / shot}"),
                    file.as_uri(),
                ],
                check=True,
                capture_output=True,
            )
            print(f"wrote {shot}")


if __name__ == "__main__":
    main()
