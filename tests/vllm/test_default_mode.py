"""vLLM's default mode: our passes, then vLLM's split, Inductor for the pieces, and its caches.

vLLM's CPU platform replaces this mode; the engines here keep it. ``AFD_VLLM_MATRIX=full`` runs all
forms of model and attention with Inductor; without it one.
"""

from __future__ import annotations

from typing import Any

import pytest

from conftest import EAGER, FULL, INDUCTOR, mixed_requests

POLICIES = ("token", "cost", "request")
PLAIN_ATTENTION = (
    {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "block_size": 32},
    {"VLLM_MLA_DISABLE": "1"},
)
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "v3-mla": ("deepseek_v3", INDUCTOR, {}, {}),
    "v2-mha-caching-chunked-eager": ("deepseek_v2", EAGER, *PLAIN_ATTENTION),
}
if FULL:
    FORMS |= {
        "v2-mla": ("deepseek_v2", INDUCTOR, {}, {}),
        "v2-mha-caching-chunked": ("deepseek_v2", INDUCTOR, *PLAIN_ATTENTION),
        "v3-mha-caching-chunked": ("deepseek_v3", INDUCTOR, *PLAIN_ATTENTION),
        "v2-opaque": ("deepseek_v2", INDUCTOR, {}, {"AFD_TEST_OPAQUE": "1"}),
        "v3-opaque": ("deepseek_v3", INDUCTOR, {}, {"AFD_TEST_OPAQUE": "1"}),
    }


class Served:
    """Engines of one form with one cache."""

    def __init__(self, name: str, engine: Any, checkpoint: Any) -> None:
        self.family, self._compilation, self._options, self._environment = FORMS[name]
        # The router of layers that are one operator is compiled by vLLM apart, in every process.
        self.compiles_router = "AFD_TEST_OPAQUE" in self._environment
        self._engine, self._checkpoint = engine, checkpoint
        self._cache = engine.folder / f"default_mode_{name}"

    def start(self, *, afd: dict[str, Any] | None = None, **environment: str) -> Any:
        """Results of one start."""
        prompts, lengths = mixed_requests()
        return self._engine.run(
            self._checkpoint(self.family),
            [
                {"name": split, "prompts": prompts, "lengths": lengths, "split": split}
                for split in POLICIES
            ],
            compilation=self._compilation,
            afd=afd or {},
            engine=self._options,
            environment={
                "VLLM_CACHE_ROOT": str(self._cache),
                "AFD_TEST_RECORD": "1",
                **self._environment,
                **environment,
            },
        )


_started: dict[str, tuple[Served, Any]] = {}


@pytest.fixture
def cold(request: Any, engine: Any, checkpoint: Any) -> Any:
    """A form and its first start, which all its tests share."""
    if request.param not in _started:
        form = Served(request.param, engine, checkpoint)
        _started[request.param] = form, form.start()
    return _started[request.param]


every_form = pytest.mark.parametrize("cold", FORMS, indirect=True)
# vLLM stores nothing when its eager compiler is used.
every_stored_form = pytest.mark.parametrize(
    "cold", [name for name, form in FORMS.items() if form[1] is INDUCTOR], indirect=True
)


def _check_tokens(form: Served, found: Any, reference: Any) -> None:
    wrong = {
        name: [i for i, row in enumerate(run["tokens"]) if row != reference(form.family)[i]]
        for name, run in found["runs"].items()
    }
    assert not any(wrong.values()), wrong


@every_form
def test_tokens_equal_hugging_face(cold: Any, reference: Any) -> None:
    form, found = cold
    _check_tokens(form, found, reference)
    for name, run in found["runs"].items():
        assert run["counters"]["split"] >= 20
        assert ("mid_request" in run["counters"]) == (name != "request")
    assert found["weights_here"] == [0] * 6


def _schedule(cache_updates: bool) -> list[list[Any]]:
    """Two stages of four layers, of which the first has no experts; two credits."""

    def attention(layer: int, stage: int) -> list[list[Any]]:
        return [["cache", stage, layer]] * cache_updates + [["attention", stage, layer]]

    order = [*attention(0, 0), *attention(1, 0), ["dispatch", 0, 0]]
    order += [*attention(0, 1), *attention(1, 1), ["dispatch", 0, 1]]
    for moe in (0, 1):
        for stage in (0, 1):
            order += [["receive", moe, stage], *attention(moe + 2, stage)]
            order += [["dispatch", moe + 1, stage]]
    return [*order, ["receive", 2, 0], ["receive", 2, 1]]


def _short(call: list[Any]) -> list[Any]:
    name, *constants = call
    if name.startswith("stage_"):
        kind = "cache" if "kv_cache_update" in name else "attention"
        layer = next(a for a in constants if isinstance(a, str)).split(".")[2]
        return [kind, constants[0], int(layer)]
    return [name.removeprefix("cam_"), *constants[:2]]


@every_form
def test_what_runs_keeps_the_order_of_the_schedule(cold: Any) -> None:
    _, found = cold
    names = ("stage_unified", "cam_")
    calls = [_short(call) for call in found["order"] if call[0].startswith(names)]
    assert calls == _schedule(cache_updates=True)
    pieces = [call[1] for call in found["order"] if call[0] == "piece"]
    assert pieces == list(range(len(pieces)))
    assert len(pieces) >= 15


@every_stored_form
def test_second_start_compiles_nothing(cold: Any, reference: Any) -> None:
    form, first = cold
    second = form.start()
    _check_tokens(form, second, reference)
    assert second["order"] == first["order"]
    assert {n: r["counters"] for n, r in second["runs"].items()} == {
        n: r["counters"] for n, r in first["runs"].items()
    }
    assert first["compilations"]["num_aot_artifacts_saved"] == 1
    loaded = second["compilations"]
    assert loaded.pop("num_compiled_artifacts_loaded") > 0
    assert loaded == {"num_models_seen": 1, "num_aot_artifacts_loaded": 1}
    # Nothing was captured, and Inductor was not asked.
    if not form.compiles_router:
        assert not {"stats", "frames", "aot_autograd"} & set(second["pytorch"])
    assert "AFD loaded the model" in second["log"]
    assert "AFD compiled the model" not in second["log"]


@every_stored_form
def test_other_source_compiles_all_again(cold: Any, reference: Any) -> None:
    form, first = cold
    other = form.start(AFD_TEST_SOURCE="1")
    _check_tokens(form, other, reference)
    assert "compiled by something else: source was" in other["log"]
    for counter in ("num_inductor_compiles", "num_compiled_artifacts_saved"):
        assert other["compilations"][counter] == first["compilations"][counter]
    assert "num_compiled_artifacts_loaded" not in other["compilations"]
    # Not even PyTorch's caches, which know nothing of our operators' meaning, were of use.
    cached = other["pytorch"]["aot_autograd"]
    missed = first["pytorch"]["aot_autograd"]["autograd_cache_miss"]
    hit = cached.get("autograd_cache_hit", 0)
    assert (hit > 0) == form.compiles_router
    assert cached["autograd_cache_miss"] + hit == missed
