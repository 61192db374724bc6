"""Real requests: greedy tokens equal Hugging Face's, whatever is split where.

``AFD_VLLM_MATRIX=full`` runs all forms, each with every policy and 1 to 8 concurrent requests, and
compares each with vLLM without the backend as well; without it a part. A form's totals are printed
(``pytest -s``).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from conftest import PLAIN, mixed_requests

POLICIES = ("none", "token", "request", "cost", "auto")
FULL = os.environ.get("AFD_VLLM_MATRIX") == "full"
OPAQUE = {"AFD_TEST_OPAQUE": "1"}


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
    workloads = [
        {
            "name": _name(policy, most),
            "prompts": prompts,
            "lengths": lengths,
            "split": policy,
            "max_num_seqs": most,
        }
        for policy, most in _matrix()
    ]
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


@pytest.mark.skipif(not FULL, reason="equality with Hugging Face implies it: AFD_VLLM_MATRIX=full")
def test_tokens_equal_vllm_without_the_backend(served: Any, engine: Any, checkpoint: Any) -> None:
    form, results = served
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
    for name, run in results["runs"].items():
        assert run["tokens"] == plain["runs"]["plain"]["tokens"], name


def test_steps_were_really_split(served: Any) -> None:
    runs = served[1]["runs"]
    total = {"split": 0, "mid_request": 0}
    for name, run in runs.items():
        counters = run["counters"]
        policy = name.split("-")[0]
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
        assert counters.get("split", 0) > 0 or (policy, "1") == ("request", name[-1])
    assert total["split"] >= 100
    assert total["mid_request"] >= 20


def test_weights_live_in_the_ffn_process_alone(served: Any) -> None:
    assert served[1]["weights_here"] == [0] * 6
