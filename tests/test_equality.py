"""The compiled model against the unsplit eager one: logits, every MoE layer, caches.

A model is compiled once per kind of step, with dynamic shapes. Random plans (batch, lengths,
padding, cache fill, cut) then run over those few graphs; that no length recompiles is checked by
counting them.
"""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass

import pytest
import torch
from harness import Pair, Step, new_cache, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from afd_graph import AFDBackend, AFDConfig
from tiny_models import (
    EXPECTED_LAYERS,
    MODELS,
    VOCABULARY,
    deepseek_v2,
    deepseek_v3,
    mixtral,
    qwen2_moe,
)

KINDS = ("none", "padded", "dynamic empty", "dynamic filled", "static empty", "static filled")
KINDS_OF = {"v2": KINDS, "mixtral": ("none", "padded", "dynamic filled", "static filled")}
SOME_KINDS = ("padded", "dynamic filled")
PLANS = {"v2": 80, "mixtral": 50}
FEWER_PLANS = 20
FP32 = 1e-5
CACHE_LENGTH = 40


def test_enough_plans():
    assert sum(PLANS.get(name, FEWER_PLANS) for name in MODELS) >= 200


@dataclass(frozen=True)
class Plan:
    """One step; ``keep`` logits, 0 for all; ``cut`` is the extent of stage 0."""

    kind: str
    batch: int
    length: int
    past: int
    pads: tuple[int, ...]
    left: bool
    cut: int
    seed: int

    def inputs(self, pair: Pair) -> dict[str, object]:
        generator = torch.Generator().manual_seed(self.seed)

        def ids(length: int) -> torch.Tensor:
            return torch.randint(VOCABULARY, (self.batch, length), generator=generator)

        if self.kind == "none":
            return {"input_ids": ids(self.length), "use_cache": False}
        if self.kind == "padded":
            mask = torch.ones(self.batch, self.length, dtype=torch.long)
            for row, pad in enumerate(self.pads[: self.batch]):
                pad %= self.length
                if pad:
                    mask[row, slice(0, pad) if self.left else slice(-pad, None)] = 0
            return {"input_ids": ids(self.length), "attention_mask": mask, "use_cache": False}
        cache_kind, fill = self.kind.split()
        cache = new_cache(cache_kind, pair.model.config, CACHE_LENGTH)
        if fill == "filled":
            pair.fill(cache, ids(self.past))
        return {"input_ids": ids(self.length), "past_key_values": cache, "use_cache": True}


@st.composite
def plans(draw: st.DrawFn, kinds: tuple[str, ...]) -> Plan:
    length = draw(st.integers(2, 16))
    return Plan(
        kind=draw(st.sampled_from(kinds)),
        batch=draw(st.integers(2, 4)),
        length=length,
        past=draw(st.integers(2, 12)),
        pads=tuple(draw(st.lists(st.integers(0, 15), min_size=4, max_size=4))),
        left=draw(st.booleans()),
        cut=draw(st.integers(1, length - 1)),
        seed=draw(st.integers(0, 2**20)),
    )


def warm_up(pair: Pair, kinds: tuple[str, ...]) -> None:
    """Compile every kind once, on sizes that are all different."""
    for kind in kinds:
        plan = Plan(kind, 3, 7, 5, (0, 2, 4, 0), True, 2, 0)
        pair.step(cut=2, **plan.inputs(pair))


def assert_close(step: Step, tolerance: float) -> None:
    errors = step.errors()
    assert max(errors.values()) < tolerance, errors


def check_matched_layers(pair: Pair, name: str) -> None:
    first, layers, experts, top_k, shared = EXPECTED_LAYERS[name]
    found = [(layer.name, layer.experts, layer.top_k, layer.shared) for layer in pair.report.layers]
    assert found == [
        (f"model.layers.{first + i}.mlp", experts, top_k, shared) for i in range(layers)
    ]
    assert not any(graph.no_match for graph in pair.report.graphs)


def check_random_plans(pair: Pair, kinds: tuple[str, ...], count: int) -> None:
    compared = set()

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=plans(kinds))
    def check(plan: Plan) -> None:
        step = pair.step(cut=plan.cut, **plan.inputs(pair))
        assert step.split
        assert_close(step, FP32)
        compared.add(plan)

    check()
    assert len(compared) >= 0.9 * count


def check_every_cut(pair: Pair) -> None:
    plan = Plan("padded", 2, 6, 0, (0, 4, 0, 0), True, 1, 7)
    for cut in range(1, 6):
        step = pair.step(cut=cut, **plan.inputs(pair))
        assert step.stages == 2
        assert_close(step, FP32)


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    kinds = KINDS_OF.get(name, SOME_KINDS)
    pair = Pair(MODELS[name]())
    warm_up(pair, kinds)
    check_matched_layers(pair, name)
    check_random_plans(pair, kinds, PLANS.get(name, FEWER_PLANS))
    check_every_cut(pair)
    # No length, batch, padding or cut compiled anything new.
    assert len(pair.report.graphs) == len(kinds)
    assert {graph.mode for graph in pair.report.graphs} == {"sequence"}
    pair.close()


# -- kinds of steps beyond the common ones ---------------------------------------------------------


@pytest.fixture(scope="module")
def v2_pair():
    pair = Pair(deepseek_v2())
    yield pair
    pair.close()
    torch._dynamo.reset()


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_logits_to_keep(v2_pair):
    for keep, cut in ((1, 3), (2, 6), (5, 3)):
        step = v2_pair.step(
            cut=cut, input_ids=random_ids(3, 7, keep), use_cache=False, logits_to_keep=keep
        )
        assert step.split
        assert step.logits.shape[1] == keep
        assert_close(step, FP32)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_padding_over_a_filled_cache(v2_pair, kind):
    for past, length, pads, cut in ((5, 7, (0, 3, 6), 3), (9, 4, (8, 1, 0), 1)):
        cache = new_cache(kind, v2_pair.model.config)
        mask = torch.ones(3, past + length, dtype=torch.long)
        for row, pad in enumerate(pads):
            mask[row, :pad] = 0
        v2_pair.fill(cache, random_ids(3, past, 1), attention_mask=mask[:, :past])
        step = v2_pair.step(
            cut=cut,
            input_ids=random_ids(3, length, 2),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        assert step.split
        assert_close(step, FP32)


def test_one_request(v2_pair):
    for length, cut in ((9, 4), (2, 1), (5, 4)):
        step = v2_pair.step(cut=cut, input_ids=random_ids(1, length, length), use_cache=False)
        assert step.split
        assert_close(step, FP32)


def test_embeddings_instead_of_ids(v2_pair):
    embeddings = v2_pair.model.get_input_embeddings()(random_ids(3, 7)).detach()
    step = v2_pair.step(cut=4, inputs_embeds=embeddings, use_cache=False)
    assert step.split
    assert_close(step, FP32)


def test_given_positions(v2_pair):
    """Packed sequences: the positions start again, and tokens only see their own sequence.

    The mask compares the given positions, so whether it is causal is known to the caller only.
    """
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]] * 3)
    inputs = {"input_ids": random_ids(3, 7), "position_ids": positions, "use_cache": False}
    with pytest.raises(BackendCompilerFailed, match=r"not known to be causal.*assume_causal=True"):
        v2_pair.step(cut=5, **inputs)
    pair = Pair(deepseek_v2(num_hidden_layers=1), AFDConfig(assume_causal=True))
    step = pair.step(cut=5, **inputs)
    assert step.split
    assert_close(step, FP32)
    pair.close()


def test_hidden_states_of_every_layer(v2_pair):
    """What leaves the model between the layers is put together from the stages."""
    ids = random_ids(3, 7, 5)
    v2_pair.cut = 2
    with torch.no_grad():
        v2_pair.model(ids, use_cache=False, output_hidden_states=True)  # installs hooks
        expected = v2_pair.eager(ids, use_cache=False, output_hidden_states=True)
        got = v2_pair.compiled(ids, use_cache=False, output_hidden_states=True)
    assert len(got.hidden_states) == 3
    for a, b in zip(got.hidden_states, expected.hidden_states, strict=True):
        assert relative_error(a, b) < FP32


def test_router_logits_and_auxiliary_loss():
    pair = Pair(mixtral(), observe=False)
    pair.cut = 3
    with torch.no_grad():
        pair.model(random_ids(3, 7), use_cache=False, output_router_logits=True)  # installs hooks
        expected = pair.eager(random_ids(3, 7), use_cache=False, output_router_logits=True)
        got = pair.compiled(random_ids(3, 7), use_cache=False, output_router_logits=True)
    assert pair.report.steps_split == 1
    for a, b in zip(got.router_logits, expected.router_logits, strict=True):
        assert relative_error(a, b) < FP32
    assert relative_error(got.aux_loss, expected.aux_loss) < FP32
    pair.close()


def test_lengths_do_not_recompile_with_the_default_settings():
    """Automatic dynamic shapes: one graph for the first length, one for all the others."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=False):
        pair = Pair(qwen2_moe(), dynamic=None)
        for length in (5, 7, 12, 3, 9, 11):
            step = pair.step(input_ids=random_ids(2, length), use_cache=False)
            assert step.split
            assert_close(step, FP32)
    assert len(pair.report.graphs) == 2
    pair.close()


@pytest.mark.parametrize("build", [deepseek_v2, mixtral], ids=["v2", "mixtral"])
def test_growing_caches_with_the_default_settings(build):
    """Automatic dynamic shapes give the cache of every layer a length symbol of its own."""
    torch._dynamo.reset()
    pair = Pair(build(), dynamic=None)
    for past, length, cut in ((5, 7, 3), (6, 9, 2), (3, 4, 1), (11, 6, 5)):
        plan = Plan("dynamic filled", 3, length, past, (0,), True, cut, length)
        step = pair.step(cut=cut, **plan.inputs(pair))
        assert step.split
        assert_close(step, FP32)
    assert len(pair.report.graphs) == 2
    pair.close()


def test_sizes_that_happen_to_be_equal():
    """Batch, tokens, heads and top-k are all 4 or 2, in one static graph each."""
    pair = Pair(deepseek_v2(num_hidden_layers=1), dynamic=False)
    for batch, length in ((4, 4), (2, 2)):
        for cut in range(1, length):
            step = pair.step(cut=cut, input_ids=random_ids(batch, length), use_cache=False)
            assert step.split
            assert_close(step, FP32)
    pair.close()


def test_equal_symbols():
    """A first call with batch == tokens shares one symbol; the cut must stay on the tokens."""
    pair = Pair(deepseek_v2(num_hidden_layers=1))
    for size in (3, 5):
        step = pair.step(cut=2, input_ids=random_ids(size, size), use_cache=False)
        assert step.split
        assert_close(step, FP32)
    pair.close()


def test_request_policy():
    pair = Pair(deepseek_v2(), AFDConfig(split="request"))
    kinds = ("padded", "dynamic filled")
    warm_up(pair, kinds)
    for kind in kinds:
        for batch, length, cut in ((2, 5, 1), (4, 3, 3), (3, 8, 1), (4, 6, 2)):
            plan = Plan(kind, batch, length, 4, (0, 2, 1, 0), batch % 2 == 0, cut, length)
            step = pair.step(cut=cut, **plan.inputs(pair))
            assert step.split
            assert_close(step, FP32)
    assert {graph.mode for graph in pair.report.graphs} == {"batch"}
    assert len(pair.report.graphs) == 2
    pair.close()


# -- precision -------------------------------------------------------------------------------------


def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))


def _deepseek_router(self, hidden: torch.Tensor):
    logits = hidden.view(-1, self.hidden_dim) @ self.weight.t()
    weights, ids = torch.topk(logits.softmax(-1), k=self.top_k, dim=-1, sorted=False)
    return logits, weights * self.routed_scaling_factor, ids


def _mixtral_router(self, hidden: torch.Tensor):
    logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.t()
    weights, ids = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    return logits, weights / weights.sum(dim=-1, keepdim=True), ids


def all_fp64(model: nn.Module, router) -> nn.Module:
    """Norms and routers of the library compute in fp32; these do not."""
    for module in model.double().modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = types.MethodType(_norm, module)
        elif name.endswith(("TopkRouter", "TopKRouter")):
            module.forward = types.MethodType(router, module)
    return model


@pytest.mark.parametrize(
    ("build", "tolerance"),
    [
        pytest.param(lambda: deepseek_v2().double(), 1e-6, id="v2"),
        pytest.param(lambda: deepseek_v3().double(), 1e-6, id="v3"),
        pytest.param(lambda: all_fp64(deepseek_v2(), _deepseek_router), 1e-10, id="v2 all fp64"),
        pytest.param(lambda: all_fp64(mixtral(), _mixtral_router), 1e-10, id="mixtral all fp64"),
    ],
)
def test_fp64(build, tolerance):
    pair = Pair(build(), dynamic=False)
    for seed, cut in enumerate((1, 3, 5, 8)):
        plan = Plan("padded", 3, 9, 0, (0, 3, 1, 0), seed % 2 == 0, cut, seed)
        step = pair.step(cut=cut, **plan.inputs(pair))
        assert step.split
        assert_close(step, tolerance)
    pair.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("build", [deepseek_v2, mixtral], ids=["v2", "mixtral"])
def test_half_precision(build, dtype):
    """No worse than twice the error of the unsplit compiled model, against fp64."""
    model = build().to(dtype)
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "batched_mm"
    errors = {}
    for split in ("token", "none"):
        backend = AFDBackend(AFDConfig(split=split))
        compiled = torch.compile(
            copy.deepcopy(model), backend=backend, fullgraph=True, dynamic=False
        )
        squares, largest, count = 0.0, 0.0, 0
        for seed in range(20):
            ids = random_ids(3, 11, seed)
            with torch.no_grad():
                difference = compiled(ids, use_cache=False).logits.double()
                difference -= exact(ids, use_cache=False).logits
            squares += difference.pow(2).sum().item()
            largest = max(largest, difference.abs().max().item())
            count += difference.numel()
        errors[split] = (squares / count) ** 0.5, largest
        report = backend.report()
        assert (report.steps_split, sum(report.steps_unsplit.values())) == (
            (20, 0) if split == "token" else (0, 20)
        )
        backend.close()
    for mine, unsplit in zip(errors["token"], errors["none"], strict=True):
        assert 0 < mine <= 2 * unsplit, errors
