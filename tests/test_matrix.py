"""The matrix: one configuration over four processes for real, and the judge on doctored results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from afd_graph.results import Step, read_results, write_results
from evaluation.configurations import CONFIGURATIONS, Settings
from evaluation.matrix import ADDITION, answer_alone, judge, relative_error
from evaluation.promises import promised_steps

ROOT = Path(__file__).parent.parent
PROMPTS = [("1+1=", "2"), ("417+85=", "502"), ("9+99=", "108"), ("4000+271=", "4271")]
LAYERS, BATCH = 2, 3


def promised(name: str, lengths: list[int], steps: int = 2) -> list[Step]:
    return promised_steps(CONFIGURATIONS[name], lengths, steps, ranks=2, layers=LAYERS)


@pytest.mark.parametrize(
    ("name", "lengths", "prompt", "decode"),
    [
        # 7 columns cut in 4 and 3, of 3 prompts; then 3 single tokens cut in 2 and 1.
        ("token-tp", [4, 7, 5], ("token", (6, 5)), ("token", (1, 1))),
        ("token-sp", [4, 7, 5], ("token", (3 * 2, 3 * 2)), ("token", (1, 1))),
        # Prompts cut in 1 and 2 (the earlier one on a tie), of 7 padded columns each.
        ("request-tp", [4, 7, 5], ("request", (4, 7)), ("request", (1, 1))),
        ("request-sp", [4, 7, 5], ("request", (7, 7)), ("request", (1, 1))),
        ("none-tp", [4, 7, 5], ("disabled", (11,)), ("disabled", (2,))),
        ("none-sp", [4, 7, 5], ("disabled", (3 * 4,)), ("disabled", (2,))),
        ("token-tp", [7], ("token", (2, 2)), ("single_token", (1,))),
        ("request-tp", [7], ("single_request", (4,)), ("single_token", (1,))),
        ("request-sp", [7], ("single_request", (4,)), ("single_token", (1,))),
    ],
)
def test_promises(name, lengths, prompt, decode):
    """What the rules say, worked out by hand for two ranks."""
    for step, (what, rows) in zip(promised(name, lengths), (prompt, decode), strict=True):
        assert what in (step.policy, step.reason)
        assert step.split == (what in ("token", "request"))
        assert step.rows == tuple(LAYERS * count for count in rows)


def test_relative_error_counts_each_step_by_its_own_size():
    wanted = torch.tensor([[100.0, 0.0], [0.0, 1.0]])
    assert relative_error(wanted + torch.tensor([[0.0], [1e-3]]), wanted) == pytest.approx(
        1e-3, rel=1e-3
    )
    # Behind a token that flipped, the model was given something else.
    flipped = torch.tensor([[0.0, 1.0], [3.0, 7.0]])
    assert relative_error(flipped, torch.tensor([[1.0, 0.0], [9.0, 9.5]])) == 1.0
    assert relative_error(flipped[:1], flipped) == 0.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Settings, the eager model's answers and their logits."""
    out = tmp_path_factory.mktemp("matrix")
    prompts = out / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": str(i), "prompt": prompt, "expected": expected}) + "\n"
            for i, (prompt, expected) in enumerate(PROMPTS)
        )
    )
    settings = Settings(model=ADDITION / "model", prompts=prompts, out=out, replicas=1, batch=BATCH)
    return settings, *answer_alone(settings)


def test_the_reference_answers_alone(reference):
    _, run, logits = reference
    assert [document.text for document in run.documents] == [answer for _, answer in PROMPTS]
    assert all(document.right for document in run.documents)
    assert {i: tuple(rows.shape) for i, rows in logits.items()} == {
        "0": (2, 14),
        "1": (4, 14),
        "2": (4, 14),
        "3": (5, 14),
    }


def doctored(reference, name="token-tp", change=lambda document: document, scale=1.0):
    """Judge results that are the reference's with what the planner promises, changed."""
    settings, run, logits = reference
    steps = promised(name, [4, 7, 5], 4) + promised(name, [9], 5)
    documents = [
        change(
            replace(
                document,
                mode=name,
                policy_requested=CONFIGURATIONS[name].split,
                steps=tuple((steps[:4] if i < BATCH else steps[4:])[: len(document.tokens)]),
            )
        )
        for i, document in enumerate(run.documents)
    ]
    write_results(settings.results(name, 0), documents)
    folder = settings.logits(name, 0)
    folder.mkdir(exist_ok=True)
    save_file({i: rows * scale for i, rows in logits.items()}, folder / "replica0.safetensors")
    return judge(settings, name, 0, run, logits)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_judge_passes_what_is_promised(reference, name):
    verdict = doctored(reference, name)
    assert not verdict.faults
    assert (verdict.flips, verdict.error, verdict.right) == (0, 0.0, len(PROMPTS))


def only(name: str, **changes: object):
    return lambda document: replace(document, **changes) if document.id == name else document


def steps_changed(**changes: object):
    return lambda document: replace(
        document,
        steps=tuple(replace(step, **changes) if step.split else step for step in document.steps),
    )


UNSPLIT = {"policy": None, "split": False, "reason": "single_token"}
FAULTS = {
    "an answer flipped": (only("1", tokens=(7, 3, 4, 1)), "1 answers flipped"),
    "a step ran unsplit": (
        lambda document: replace(
            document, steps=(replace(document.steps[0], **UNSPLIT), *document.steps[1:])
        ),
        "4 steps not as promised: document 0, step 0",
    ),
    "no step was split": (steps_changed(**UNSPLIT), "the policy was never active"),
    "another policy": (steps_changed(policy="request"), "not as promised"),
    "a row too many": (only("3", steps=(Step("token", True, rows=(22, 20)),) * 5), "5 steps not"),
    "steps are missing": (only("2", steps=()), "1 steps not as promised: document 2: 0 steps"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_judge_finds(reference, case):
    change, message = FAULTS[case]
    faults = doctored(reference, change=change).faults
    assert any(message in fault for fault in faults), faults


def test_judge_finds_logits_that_differ(reference):
    (fault,) = doctored(reference, scale=1 + 2e-5).faults
    assert fault.startswith("logits differ by 2.0")
    assert not doctored(reference, scale=1 + 5e-6).faults


@pytest.mark.timeout(1300)
def test_one_configuration_for_real(tmp_path):
    """Two tensor-parallel ranks and two FFN ranks; ``make matrix`` runs all of it."""
    # Two steps a batch: the prompt's and a decode step. The last batch is smaller.
    arguments = ["--size", "5", "--batch", "3", "--most", "2", "--replicas", "1"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "evaluation.matrix", *arguments),
            *("--configurations", "token-sp", "--out", str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| token-sp"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    name, _, flips, error, steps, split, unsplit = cells
    assert (name, flips, steps, split, unsplit) == ("token-sp", "0", "4", "4", "0")
    assert 0 < float(error) < 1e-5
    run, alone = (read_results(tmp_path / f"{x}.jsonl") for x in ("token-sp.0", "reference"))
    assert [document.text for document in run.documents] == [
        document.text for document in alone.documents
    ]
    assert all(step.policy == "token" for document in run.documents for step in document.steps)
