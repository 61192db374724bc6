"""What the two sides did in real steps: traced, written, and good enough to fit costs to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from afd_graph.cli.group import afd_graph
from afd_graph.fit_costs import fit_costs
from afd_graph.html import from_files, write_html
from afd_graph.report import Report
from afd_graph.tracing import Trace
from conftest import mixed_requests
from openai_server import AFD, serving

PROMPTS, LENGTHS = mixed_requests(12)
LAYERS = 3
OUTSIDE = str(Path(__file__).parent / "outside.py")


@pytest.fixture(scope="module")
def traced(engine: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    dump = tmp_path_factory.mktemp("traced")
    runs = [
        {"name": split, "split": split, "prompts": PROMPTS, "lengths": LENGTHS}
        for split in ("none", "token")
    ]
    found = engine.run(
        checkpoint("deepseek_v2"),
        runs,
        afd={"trace": True, "dump_dir": str(dump)},
        engine={"disable_log_stats": True},
    )
    (file,) = dump.glob("trace.rank*.json")
    return {**found, "dump": dump, "trace": Trace.read(file)}


def test_every_step_is_traced_with_its_stages(traced: Any) -> None:
    steps = traced["trace"].steps
    counted = traced["runs"]["token"]["counters"]["split"]
    split = [step for step in steps if step.policy == "token"]
    assert len(split) == counted > 10
    for step in split:
        assert len(step.events) == 2 * 2 * LAYERS
        assert len(step.rows) == len(step.pairs) == 2
        # Every token attends at least to itself.
        assert all(pairs >= rows for pairs, rows in zip(step.pairs, step.rows, strict=True))
    disabled = [step for step in steps if step.reason == "disabled"]
    assert len(disabled) == sum(traced["runs"]["none"]["counters"].values())
    assert all(len(step.pairs) == 1 for step in disabled)


def test_pairs_are_those_of_the_prompts(traced: Any) -> None:
    """The first step of a run prefills its first requests from nothing."""
    first = next(step for step in traced["trace"].steps if step.policy == "token")
    whole = next(step for step in traced["trace"].steps if step.reason == "disabled")
    lengths = [len(prompt) for prompt in PROMPTS[:8]]
    assert sum(first.rows) == sum(whole.rows) == sum(lengths)
    assert sum(first.pairs) == sum(whole.pairs) == sum(n * (n + 1) // 2 for n in lengths)


def test_both_sides_work_in_the_timeline(traced: Any) -> None:
    trace = traced["trace"]
    number = next(i for i, step in enumerate(trace.steps) if step.policy == "token")
    timeline = trace.timeline(number)
    assert len(timeline.lane("ffn")) == 2 * LAYERS
    assert timeline.busy_s("attention") > 0
    assert timeline.busy_s("ffn") > 0
    assert trace.predicted(number).total_s > 0


def test_files_make_a_page_and_costs(traced: Any, tmp_path: Any) -> None:
    content = from_files([traced["dump"]])
    assert content.report is not None
    assert content.report.steps_split > 0
    write_html(content, tmp_path / "run.html")
    costs = fit_costs(content.traces).costs
    assert costs.num_layers == LAYERS
    assert costs.attention_overhead > 0
    assert costs.experts > 0


def test_costs_of_a_run_are_options_of_the_next(traced: Any, engine: Any, checkpoint: Any) -> None:
    answer = CliRunner().invoke(afd_graph, ["costs", str(traced["dump"])])
    assert answer.exit_code == 0, answer.output
    found = engine.run(
        checkpoint("deepseek_v2"),
        [{"name": "auto", "prompts": PROMPTS, "lengths": LENGTHS}],
        afd={"split": "auto", "costs": json.loads(answer.stdout)},
    )
    assert found["runs"]["auto"]["tokens"] == traced["runs"]["none"]["tokens"]
    counters = found["runs"]["auto"]["counters"]
    # Which steps are cut depends on this machine; that all were decided by the costs does not.
    assert counters.keys() <= {"split", "mid_request", "unsplit_faster", "single_token"}


def test_report_and_trace_of_an_engine_in_another_process(
    engine: Any, checkpoint: Any, tmp_path: Any
) -> None:
    answer = tmp_path / "outside.json"
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    subprocess.run(
        [sys.executable, OUTSIDE, str(checkpoint("deepseek_v2")), str(answer)],
        env={**os.environ, **engine.environment(), **environment},
        timeout=900,
        check=True,
    )
    found = Report.from_dict(json.loads(answer.read_text()))
    # Prompts, and three more tokens; requests may come in one step or in two.
    assert found.steps_split >= 4
    assert len(found.layers) == LAYERS
    # The worker wrote its trace when it ended.
    steps = Trace.read(tmp_path / "trace.rank0.json").steps
    assert sum(step.policy == "token" for step in steps) == found.steps_split


def test_a_server_with_a_shutdown_timeout_writes_its_trace(
    engine: Any, checkpoint: Any, tmp_path: Any
) -> None:
    """Without one vLLM 0.32 kills its workers at once."""
    options = {"afd": {"trace": True, "dump_dir": str(tmp_path / "dump")}}
    with serving(
        checkpoint("deepseek_v2"),
        [*AFD, "--additional-config", json.dumps(options), "--shutdown-timeout", "60"],
        tmp_path / "server.log",
        {**engine.environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ) as server:
        server.complete([5, 6, 7], 4)
    steps = Trace.read(tmp_path / "dump" / "trace.rank0.json").steps
    assert sum(step.policy == "token" for step in steps) >= 1
    assert (tmp_path / "dump" / "report.json").exists()
