"""Real requests: greedy tokens equal Hugging Face's, whatever is split where.

``AFD_VLLM_MATRIX=full`` runs all policies with 1 to 8 concurrent requests; without it a part.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from conftest import mixed_requests

POLICIES = ("none", "token", "request", "cost", "auto")
FULL = os.environ.get("AFD_VLLM_MATRIX") == "full"
FORMS = {
    "v2-mla": ("deepseek_v2", {}, {}),
    "v3-mla": ("deepseek_v3", {}, {}),
    "v3-opaque": ("deepseek_v3", {}, {"AFD_TEST_OPAQUE": "1"}),
    # MLA on CPU has neither prefix caching nor chunked prefill; plain attention has both.
    "v2-mha-caching-chunked": (
        "deepseek_v2",
        {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "block_size": 32},
        {"VLLM_MLA_DISABLE": "1"},
    ),
    "v3-mha-chunked": (
        "deepseek_v3",
        {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "block_size": 32},
        {"VLLM_MLA_DISABLE": "1"},
    ),
}
if not FULL:
    del FORMS["v3-mha-chunked"]


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
    return family, engine.run(
        checkpoint(family), workloads, engine=options, environment=environment
    )


def test_tokens_equal_hugging_face(served: Any, reference: Any) -> None:
    family, results = served
    expected = reference(family)
    wrong = {
        name: [i for i, row in enumerate(run["tokens"]) if row != expected[i]]
        for name, run in results["runs"].items()
        if run["tokens"] != expected
    }
    assert not wrong


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
