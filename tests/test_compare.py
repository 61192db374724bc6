"""``afd-graph compare`` and what it computes, against counts made by hand."""

from __future__ import annotations

import json
from fractions import Fraction
from math import comb

import pytest
import torch
from click.testing import CliRunner

from afd_graph import AFDBackend, AFDConfig
from afd_graph.activation import StepLog
from afd_graph.cli.group import afd_graph
from afd_graph.compare import activation, compare, mcnemar
from afd_graph.errors import ResultsError
from afd_graph.results import Document, Run, Step, write_results
from tiny_models import PlainModel

SPLIT = Step("token", True, rows=(4, 4))
UNSPLIT = Step(None, False, "single_token", rows=(4, 0))


def make(
    answers: str,
    mode: str = "token",
    policy: str = "token",
    steps: tuple[Step, ...] = (SPLIT, SPLIT),
    name: str = "run",
    expected: str | None = "a",
) -> Run:
    """A run with one document for each character of ``answers``; ``a`` is right."""
    return Run(
        name,
        tuple(
            Document(
                id=str(i),
                prompt=f"prompt {i}",
                tokens=(ord(answer), 1),
                text=answer,
                policy_requested=policy,
                mode=mode,
                steps=steps,
                expected=expected,
            )
            for i, answer in enumerate(answers)
        ),
    )


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (0, 5, 0.0625),
        (5, 0, 0.0625),
        (1, 9, 0.021484375),
        (3, 3, 1.0),
        (6, 16, 2 * 110056 / 2**22),  # twice the sum of C(22, 0..6)
        (10, 10, 1.0),
    ],
)
def test_mcnemar_known_values(only_a, only_b, p):
    assert mcnemar(only_a, only_b) == pytest.approx(p, rel=1e-12)


def test_mcnemar_is_the_two_sided_binomial_test():
    for n in range(1, 40):
        for k in range(n + 1):
            # By its other definition: all outcomes that are at most as likely as this one.
            likely = sum(comb(n, i) for i in range(n + 1) if comb(n, i) <= comb(n, k))
            assert mcnemar(k, n - k) == pytest.approx(float(Fraction(likely, 2**n)), rel=1e-12)


def test_mcnemar_of_many():
    assert mcnemar(5000, 5000) == 1.0
    assert 0 < mcnemar(4800, 5200) < 1e-4
    assert mcnemar(0, 5000) == 0.0  # below what a float holds


def test_flips_and_verdicts():
    a, b = make("aabbcab"), make("abacbab", mode="none", policy="none", steps=(UNSPLIT,))
    comparison = compare([a, b])
    (pair,) = comparison.pairs
    assert (pair.both_right, pair.only_a, pair.only_b, pair.both_wrong) == (2, 1, 1, 3)
    assert pair.flips == comparison.flips == 4  # two of them wrong answers to wrong answers
    assert [d.id for d in pair.divergences] == ["1", "2", "3", "4"]
    assert pair.p_value == 1.0
    assert [mode.right for mode in comparison.modes] == [(3,), (3,)]
    assert not comparison.never_active


def test_first_diverging_token():
    def run(*tokens: int, mode: str) -> Run:
        steps = (SPLIT, UNSPLIT, SPLIT)
        document = Document("x", "p", tokens, "", "token", steps, mode=mode)
        return Run(mode, (document,))

    (found,) = compare([run(1, 2, 3, mode="A"), run(1, 5, 3, mode="B")]).pairs[0].divergences
    assert (found.position, found.tokens, found.steps) == (1, (2, 5), (UNSPLIT, UNSPLIT))
    (found,) = compare([run(1, mode="A"), run(1, 5, mode="B")]).pairs[0].divergences
    assert (found.position, found.tokens) == (1, (None, 5))
    assert found.right == (None, None)
    (found,) = compare([run(1, 2, 3, 4, mode="A"), run(1, 2, 3, mode="B")]).pairs[0].divergences
    assert (found.position, found.steps) == (3, (None, None))


def test_repeated_runs_are_noise():
    runs = [make("aaa", name="A1"), make("aab", mode="B", name="B1")]
    runs += [make("aac", mode="B", name="B2"), make("aaa", name="A2")]
    comparison = compare(runs)
    assert [pair.runs for pair in comparison.pairs] == [
        ("A1", "B1"),
        ("A1", "B2"),
        ("A2", "B1"),
        ("A2", "B2"),
    ]
    a, b = comparison.modes
    assert [(pair.runs, pair.flips) for pair in a.noise] == [(("A1", "A2"), 0)]
    assert [(pair.runs, pair.flips) for pair in b.noise] == [(("B1", "B2"), 1)]
    assert (a.right, b.right) == ((3, 3), (2, 2))
    assert (a.unstable, b.unstable) == (set(), {"2"})


def test_runs_of_one_mode_only():
    comparison = compare([make("aab"), make("abb")])
    assert not comparison.pairs
    assert comparison.modes[0].noise[0].flips == comparison.flips == 1


def test_without_expected_answers():
    comparison = compare([make("ab", expected=None), make("aa", mode="B", expected=None)])
    assert comparison.pairs[0].p_value is None
    assert comparison.pairs[0].flips == 1
    assert comparison.modes[0].right == (None,)


def test_runs_that_do_not_belong_together():
    with pytest.raises(ResultsError, match="one run cannot be compared"):
        compare([make("a")])
    with pytest.raises(ResultsError, match=r"short lacks 2 documents of the other file: '1', '2'"):
        compare([make("aaa"), make("a", name="short")])
    with pytest.raises(ResultsError, match=r"run lacks 7 documents .*'5', \.\.\."):
        compare([make("a"), make("aaaaaaaa", name="long")])
    with pytest.raises(ResultsError, match="the expected of 1 documents differs: '0'"):
        compare([make("a"), make("a", expected="b")])
    with pytest.raises(ResultsError, match="3 modes: 'x', 'y', 'z'"):
        compare([make("a", mode=mode) for mode in "xyz"])


def steps_of(*steps: Step, policy: str = "token"):
    return activation(make("a", steps=steps, policy=policy))


def test_activation_counts_steps_once():
    shared = Step("token", True, rows=(4, 4), id="7")
    found = activation(make("aaa", steps=(shared, UNSPLIT)))
    assert (found.steps, found.active, found.unsplit) == (4, 1, {"single_token": 3})


@pytest.mark.parametrize(
    ("policy", "step", "active"),
    [
        ("token", SPLIT, True),
        ("token", UNSPLIT, False),
        ("token", Step("request", True), False),
        ("token", Step("token", True, rows=(4, 0)), False),
        ("token", Step("token", True, rows=(4,)), False),
        ("token", Step("token", True), True),
        ("request", SPLIT, False),
        ("auto", SPLIT, True),
        ("auto", UNSPLIT, False),
        ("none", UNSPLIT, True),
        ("none", SPLIT, False),
    ],
)
def test_active_is_what_was_asked_for_and_done(policy, step, active):
    found = steps_of(step, policy=policy)
    assert found.active == active
    assert found.never != active
    assert found.documents_without == (not active)


def test_activation_says_what_happened_instead():
    one_sided = Step("token", True, rows=(4, 0))
    found = steps_of(SPLIT, UNSPLIT, UNSPLIT, one_sided, Step("request", True))
    assert (found.steps, found.active, found.one_sided) == (5, 1, 1)
    assert (found.other, found.unsplit) == ({"request": 1}, {"single_token": 2})


def test_a_run_without_steps():
    assert steps_of(policy="token").never
    assert not steps_of(policy="none").never  # the plain model


@pytest.fixture
def files(tmp_path):
    def write(**runs: Run) -> list[str]:
        for name, run in runs.items():
            write_results(tmp_path / f"{name}.jsonl", run.documents)
        return [str(tmp_path / f"{name}.jsonl") for name in runs]

    return write


def run_command(*args: str):
    return CliRunner().invoke(afd_graph, ["compare", *args])


def test_command(files):
    a = make("aabbcab", steps=(SPLIT, UNSPLIT))
    b = make("abacbab", mode="unsplit", policy="none", steps=(UNSPLIT,))
    answer = run_command(*files(a=a, b=b, again=make("aabbcaa")), "--limit", "2")
    assert answer.exit_code == 0, answer.output
    text = " ".join(answer.output.split())
    assert "A: token (policy 'token')" in text
    assert "policy active in 7 of 14 steps (7 unsplit: single_token)" in text
    assert "right 3 of 7 (42.9%)" in text
    assert "flips of both right only A only B both wrong McNemar p" in text
    assert "4 7 2 1 1 3 1 " in text
    assert "repeated runs of A (noise)" in text
    assert "6: first differs at token 0: 98 / 97; wrong / right; split by token / split by" in text
    assert "between runs of" not in text
    assert "1: first differs at token 0: 97 / 98; right / wrong; split by token / unsplit:" in text
    assert "... 2 more" in text
    assert "NEVER" not in text


def test_command_says_which_flips_are_noise(files):
    runs = {"a": make("aab"), "b": make("abb", mode="B"), "again": make("abb", name="again")}
    answer = run_command(*files(**runs))
    line = next(x for x in answer.output.splitlines() if x.startswith("   1: first"))
    assert line.endswith("also between runs of A")


def test_one_mode_name_with_two_policies_is_two_modes():
    a, b = make("a", mode="x", policy="token"), make("b", mode="x", policy="none")
    assert [mode.policy for mode in compare([a, b]).modes] == ["token", "none"]


def test_command_shouts_when_the_policy_was_never_active(files):
    a, b = make("aa", steps=(UNSPLIT,)), make("aa", mode="unsplit", policy="none", steps=(UNSPLIT,))
    paths = files(a=a, b=b)
    answer = run_command(*paths)
    assert answer.exit_code == 3
    first = answer.output.splitlines()[0]
    assert "POLICY 'token' WAS NEVER ACTIVE" in first
    assert "2 steps, 2 unsplit: single_token" in first
    assert paths[0] in first
    assert "nothing was recorded" in run_command(*files(a=make("aa", steps=()), b=b)).output


def test_command_as_json(files):
    a, b = make("ab", steps=(UNSPLIT,)), make("aa", mode="B")
    answer = run_command("--json", *files(a=a, b=b))
    assert answer.exit_code == 3
    value = json.loads(answer.stdout)
    assert (value["documents"], value["flips"]) == (2, 1)
    assert [name.rsplit("/")[-1] for name in value["never_active"]] == ["a.jsonl"]
    (pair,) = value["pairs"]
    assert (pair["both_right"], pair["only_a"], pair["only_b"], pair["both_wrong"]) == (1, 0, 1, 0)
    assert pair["p_value"] == 1.0
    assert pair["divergences"][0]["tokens"] == [ord("b"), ord("a")]
    assert pair["divergences"][0]["steps"][0]["reason"] == "single_token"
    assert value["modes"][0]["runs"][0]["unsplit"] == {"single_token": 2}


def test_command_exit_codes(files, tmp_path):
    a, b = files(a=make("aa"), b=make("ab", mode="B"))
    assert run_command(a, b).exit_code == 0
    assert run_command(a, b, "--fail-on-flips").exit_code == 4
    assert run_command(a, a, "--fail-on-flips").exit_code == 0
    assert run_command(a).exit_code == 2
    (tmp_path / "bad.jsonl").write_text("{}\n")
    answer = run_command(a, str(tmp_path / "bad.jsonl"), "--json")
    assert answer.exit_code == 1
    assert "bad.jsonl:1: id is missing" in json.loads(answer.stdout)["error"]


def test_a_policy_that_was_only_configured_is_caught(tmp_path):
    """From the counters of a real backend: every step is smaller than what is worth cutting."""
    ids = torch.arange(14).view(2, 7)
    paths = []
    for name, least in (("small", 100), ("large", 2)):
        config = AFDConfig(split="token", min_split_tokens=least)
        with AFDBackend(config) as backend, torch.no_grad():
            compiled = torch.compile(PlainModel(), backend=backend, dynamic=True)
            with StepLog(backend).record() as steps:
                token = int(compiled(ids)[0, -1].argmax())
        paths.append(tmp_path / f"{name}.jsonl")
        document = Document("0", "ids", (token,), "", "token", tuple(steps), mode=name)
        write_results(paths[-1], [document])
    answer = run_command(*map(str, paths))
    assert answer.exit_code == 3
    assert f"NEVER ACTIVE in {paths[0]}: 1 steps, 1 unsplit: below_min_tokens" in answer.output
    assert answer.output.count("NEVER ACTIVE") == 1
    assert "policy active in 1 of 1 steps" in answer.output
