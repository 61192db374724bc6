"""Real requests: greedy tokens equal Hugging Face's, whatever is split where.

``AFD_VLLM_MATRIX=full`` runs all forms, each with every policy and 1 to 8 concurrent requests;
without it a part. A form's totals are printed (``pytest -rP``).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from conftest import FULL, PLAIN, mixed_requests
from random_deepseek import COMMON

POLICIES = ("none", "token", "request", "cost", "auto")
# Rows and requests more than there are.
PADDED = {"padded rows": (5, 0), "padded rows and requests": (5, 2)}
EXPERTS_PER_TOKEN, HIDDEN = COMMON["num_experts_per_tok"], COMMON["hidden_size"]
# vLLM's cache does not know of this change of a test: it would load the other form.
OPAQUE = {"AFD_TEST_OPAQUE": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"}


def _plain_attention(*, caching: bool, chunked: bool) -> tuple[dict[str, Any], dict[str, str]]:
    options = {
        "enable_prefix_caching": caching,
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": 64 if chunked else 512,
        "block_size": 32,
    }
    return options, {"VLLM_MLA_DISABLE": "1"}


def _forms() -> dict[str, tuple[str, dict[str, Any], dict[str, str]]]:
    """Model family, options of the engine and environment, by name."""
    forms: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {}
    for version in ("v2", "v3"):
        family = f"deepseek_{version}"
        forms[f"{version}-mla"] = (family, {}, {})
        forms[f"{version}-opaque"] = (family, {}, OPAQUE)
        # MLA on CPU has neither prefix caching nor chunked prefill; plain attention has both.
        for caching in (True, False):
            for chunked in (True, False):
                name = f"{version}-mha" + "-caching" * caching + "-chunked" * chunked
                forms[name] = (family, *_plain_attention(caching=caching, chunked=chunked))
    return forms


FORMS = _forms()
if not FULL:
    chosen = ("v2-mla", "v3-mla", "v3-opaque", "v2-mha-caching-chunked")
    FORMS = {name: FORMS[name] for name in chosen}


def _matrix() -> list[tuple[str, int]]:
    if FULL:
        return [(policy, most) for policy in POLICIES for most in range(1, 9)]
    return [*((policy, 8) for policy in POLICIES), ("token", 1), ("token", 3), ("request", 5)]


def _name(policy: str, most: int) -> str:
    return f"{policy}-{most}"


@pytest.fixture(scope="module", params=FORMS)
def served(request: Any, engine: Any, checkpoint: Any) -> Any:
    family, options, environment = FORMS[request.param]
    prompts, lengths = mixed_requests()
    work = {"prompts": prompts, "lengths": lengths}
    workloads = [
        {**work, "name": _name(policy, most), "split": policy, "max_num_seqs": most}
        for policy, most in _matrix()
    ]
    for name, padding in PADDED.items():
        # Five of eight requests, so that there is room for more.
        run = {**work, "name": name, "split": "token", "max_num_seqs": 5}
        workloads.append({**run, "padding": padding, "dummy_steps": True})
    found = engine.run(checkpoint(family), workloads, engine=options, environment=environment)
    total: Counter[str] = Counter()
    for run in found["runs"].values():
        total.update(run["counters"])
    print(f"\n{request.param}: {len(workloads)} runs of {len(prompts)} requests, {dict(total)}")
    return request.param, found


def test_tokens_equal_hugging_face(served: Any, reference: Any) -> None:
    form, results = served
    expected = reference(FORMS[form][0])
    wrong = {
        name: [i for i, row in enumerate(run["tokens"]) if row != expected[i]]
        for name, run in results["runs"].items()
        if run["tokens"] != expected
    }
    assert not wrong


@pytest.mark.parametrize("form", FORMS if FULL else ("v3-mla", "v2-mha-caching-chunked"))
def test_vllm_without_the_backend_gives_the_same(
    form: str, engine: Any, checkpoint: Any, reference: Any
) -> None:
    """The other oracle of the tokens: they equal Hugging Face's, as those above do."""
    family, options, environment = FORMS[form]
    prompts, lengths = mixed_requests()
    plain = engine.run(
        checkpoint(family),
        [{"name": "plain", "prompts": prompts, "lengths": lengths}],
        compilation=PLAIN,
        engine=options,
        environment=environment,
    )
    assert "AFD" not in plain["log"]
    assert not plain["reports"]
    assert plain["runs"]["plain"]["tokens"] == reference(family)


def test_steps_were_really_split(served: Any) -> None:
    runs = served[1]["runs"]
    total = {"split": 0, "mid_request": 0}
    for policy, most in _matrix():
        counters = runs[_name(policy, most)]["counters"]
        if policy == "none":
            assert set(counters) == {"disabled"}
            continue
        for key in total:
            total[key] += counters.get(key, 0)
        if policy == "request":
            assert "mid_request" not in counters
        # Every other step says why it was not split.
        allowed = {"single_token", "single_request", "prefix_hazard", "unsplit_faster"}
        assert set(counters) <= {"split", "mid_request"} | allowed
        assert counters.get("split", 0) > 0 or (policy, most) == ("request", 1)
    assert total["split"] >= 100
    assert total["mid_request"] >= 20


def test_report_and_log_say_what_the_layers_are(served: Any) -> None:
    form, results = served
    where = "opened from the opaque operator" if "opaque" in form else "from the graph"
    (report,) = results["reports"]
    assert f"gate and top-k: attention side, {where}" in report.splitlines()
    assert f"gate and top-k: attention side, {where}\n" in results["log"]
    layers = [line.split()[2:] for line in report.splitlines() if ".mlp.experts" in line]
    assert layers == [["8", "2", "1"]] * 3  # experts, top-k, shared experts


@pytest.mark.parametrize("name", PADDED)
def test_padded_and_dummy_steps(name: str, served: Any) -> None:
    """Their tokens are among those that are compared; here, that there were such steps."""
    counters = dict(served[1]["runs"][name]["counters"])
    assert counters.pop("profile_run") == counters.pop("dummy_run") == 1
    split, padded, _ = (counters.pop(key) for key in ("split", "padded", "mid_request"))
    assert split > 0
    # More steps were padded than ran unsplit: the others were padded and split.
    assert padded - sum(counters.values()) >= 10


def test_profile_run_sizes_the_connector_for_unsplit_steps(served: Any) -> None:
    _, results = served
    (profiled,) = results["row_memory"]["profiled"]
    assert profiled >= results["most_tokens"] * EXPERTS_PER_TOKEN * HIDDEN * 4
    assert results["row_memory"]["in_the_end"] == [profiled]


def test_weights_live_in_the_ffn_process_alone(served: Any) -> None:
    assert served[1]["weights_here"] == [0] * 6
