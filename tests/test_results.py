"""Result files: what is written is read, and what is not a result file is refused by line."""

from __future__ import annotations

import json

import pytest
import torch

from afd_graph import AFDBackend, AFDConfig
from afd_graph.activation import StepLog
from afd_graph.errors import ResultsError
from afd_graph.results import Document, ResultWriter, Step, read_results, write_results
from tiny_models import PlainModel

SPLIT = Step("token", True, rows=(4, 3), id="0")
UNSPLIT = Step(None, False, "single_token", rows=(1, 0), id="1")


def document(name: str = "a", **changes: object) -> Document:
    values: dict[str, object] = {
        "id": name,
        "prompt": "1+1=",
        "tokens": (4, 1),
        "text": "2",
        "policy_requested": "token",
        "steps": (SPLIT, UNSPLIT),
        "expected": "2",
        "mode": "token, sequence parallel",
    }
    return Document(**{**values, **changes})


def line(**changes: object) -> str:
    value = {
        "id": "b",
        "prompt": "1+1=",
        "tokens": [4, 1],
        "text": "2",
        "policy_requested": "token",
        "steps": [],
    }
    value.update(changes)
    return json.dumps({k: v for k, v in value.items() if v is not ...})


def test_what_is_written_is_read(tmp_path):
    written = [document("a"), document("ä", expected=None, steps=(), tokens=(), text="\n\u2028")]
    write_results(tmp_path / "run.jsonl", written)
    run = read_results(tmp_path / "run.jsonl")
    assert list(run.documents) == written
    assert (run.mode, run.policy) == ("token, sequence parallel", "token")


def test_every_document_is_on_disk_at_once(tmp_path):
    with ResultWriter(tmp_path / "run.jsonl") as writer:
        writer.write(document())
        assert len(read_results(tmp_path / "run.jsonl").documents) == 1


def test_only_what_is_needed_has_to_be_there(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("\n" + line(id=3, timing=0.5) + "\n\n")
    (found,) = read_results(path).documents
    assert (found.id, found.expected, found.right, found.mode) == ("3", None, None, "token")


@pytest.mark.parametrize(
    ("text", "expected", "right"), [("2", "2", True), (" 2\n", "2", True), ("20", "2", False)]
)
def test_right_is_the_whole_answer(text, expected, right):
    assert document(text=text, expected=expected).right is right


GOOD = line(id="a")
STEP = {"policy": "token", "split": True, "reason": None}
BAD = {
    "not JSON": ('{"id": ', "not JSON: Expecting value"),
    "not an object": ("[1]", "the line must be an object, not [1]"),
    "no tokens": (line(tokens=...), "tokens is missing"),
    "no steps": (line(steps=...), "steps is missing"),
    "no id": (line(id=None), "id must be text or a whole number, not null"),
    "a bool is no id": (line(id=True), "id must be text or a whole number, not true"),
    "tokens are numbers": (line(tokens=[1, "2"]), 'tokens must be a whole number, not "2"'),
    "tokens are a list": (line(tokens="12"), 'tokens must be a list, not "12"'),
    "expected is text": (line(expected=2), "expected must be text or null, not 2"),
    "a step is an object": (line(steps=[STEP, 1]), "steps[1] must be an object, not 1"),
    "a step says whether": (line(steps=[{"policy": "token"}]), "steps[0].split is missing"),
    "a bool, no number": (line(steps=[{**STEP, "split": 1}]), "steps[0].split must be true or"),
    "a policy, no reason": (line(steps=[{**STEP, "policy": None}]), "steps[0]: a split step has"),
    "a reason, no policy": (line(steps=[{**STEP, "split": False}]), "steps[0]: a split step has"),
    "rows": (line(steps=[{**STEP, "rows": [1.5]}]), "rows must be a whole number, not 1.5"),
    "another policy": (line(policy_requested="none"), "policy_requested is 'none', line 1 has"),
    "another mode": (line(mode="x"), "mode is 'x', line 1 has 'token'"),
    "the same document": (line(id="a"), "document 'a' is also on line 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_lines_are_refused_by_number(tmp_path, case):
    bad, message = BAD[case]
    path = tmp_path / "run.jsonl"
    path.write_text(f"{GOOD}\n{bad}\n")
    with pytest.raises(ResultsError) as caught:
        read_results(path)
    assert f"{path}:2: {message}" in str(caught.value)
    assert caught.value.remedy


def test_unusable_files(tmp_path):
    with pytest.raises(ResultsError, match="cannot be read"):
        read_results(tmp_path / "missing.jsonl")
    with pytest.raises(ResultsError, match="cannot be read"):
        read_results(tmp_path)
    with pytest.raises(ResultsError, match="cannot be written"):
        ResultWriter(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ResultsError, match="holds no documents"):
        read_results(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ResultsError, match="cannot be read: 'utf-8'"):
        read_results(tmp_path / "latin.jsonl")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(ResultsError, match=r"deep\.jsonl:1: not JSON"):
        read_results(tmp_path / "deep.jsonl")


def test_steps_are_what_the_backend_did():
    """Three kinds of step of one model; rows per stage are those of every layer."""
    ids = torch.arange(14).view(2, 7)
    with AFDBackend(AFDConfig()) as backend, torch.no_grad():
        compiled = torch.compile(PlainModel(layers=2), backend=backend, dynamic=True)
        log = StepLog(backend, prefix="0.")
        with log.record() as first:
            compiled(ids)
            compiled(ids[:1, :1].clone())
        with log.record() as second:
            compiled(ids[:, :1].clone())
        compiled(ids)
        assert not backend.channel.observers
        assert not backend.report().observers
    assert first == [
        Step("token", True, rows=(2 * 2 * 4, 2 * 2 * 3), id="0.0"),
        Step(None, False, "single_token", rows=(2,), id="0.1"),
    ]
    # One token each: the cut of the token policy lies between both requests.
    assert second == [Step("token", True, rows=(2, 2), id="0.2")]


@pytest.mark.parametrize(
    ("options", "plan", "policy"),
    [({"split": "request"}, None, "request"), ({}, lambda extent, tokens: 2, "given")],
)
def test_a_step_names_the_policy_that_made_its_cut(options, plan, policy):
    with AFDBackend(AFDConfig(**options), plan=plan) as backend, torch.no_grad():
        compiled = torch.compile(PlainModel(), backend=backend, dynamic=True)
        with StepLog(backend).record() as steps:
            compiled(torch.arange(12).view(3, 4))
    assert [step.policy for step in steps] == [policy]


def test_a_failed_step_is_not_recorded():
    with AFDBackend(AFDConfig(), plan=lambda extent, tokens: 99) as backend, torch.no_grad():
        compiled = torch.compile(PlainModel(), backend=backend, dynamic=True)
        with StepLog(backend).record() as steps, pytest.raises(Exception, match="cuts an axis"):
            compiled(torch.arange(12).view(3, 4))
        assert steps == []
        assert not backend.report().observers
