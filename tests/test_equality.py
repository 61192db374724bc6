"""The compiled model against the unsplit eager one: at the logits, at every MoE layer, in the caches.

A model is compiled once per kind of step, with dynamic shapes. Random plans (batch, lengths,
padding, cache fill, cut) then run over those few graphs; that no length recompiles is checked by
counting them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from harness import Pair, Step, new_cache, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import EXPECTED_LAYERS, MODELS, VOCABULARY, deepseek_v2, deepseek_v3, mixtral

from afd_graph import AFDConfig

KINDS = ("none", "padded", "dynamic empty", "dynamic filled", "static empty", "static filled")
KINDS_OF = {"v2": KINDS, "mixtral": KINDS}
SOME_KINDS = ("padded", "dynamic filled")
PLANS = {"v2": 60, "mixtral": 40}
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
        plan = Plan(kind, 3, 7, 5, (0, 2, 4, 0), True, 3, 0)
        pair.step(cut=3, **plan.inputs(pair))


def assert_close(step: Step, tolerance: float) -> None:
    errors = step.errors()
    assert max(errors.values()) < tolerance, errors


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request):
    pair = Pair(MODELS[request.param]())
    pair.name = request.param
    pair.kinds = KINDS_OF.get(request.param, SOME_KINDS)
    warm_up(pair, pair.kinds)
    yield pair
    pair.close()
    torch._dynamo.reset()


def test_every_layer_is_matched(pair):
    first, layers, experts, top_k, shared = EXPECTED_LAYERS[pair.name]
    found = [(layer.name, layer.experts, layer.top_k, layer.shared) for layer in pair.report.layers]
    assert found == [
        (f"model.layers.{first + i}.mlp", experts, top_k, shared) for i in range(layers)
    ]
    assert not any(graph.no_match for graph in pair.report.graphs)


def test_random_plans(pair):
    compared = set()

    @settings(
        max_examples=PLANS.get(pair.name, FEWER_PLANS),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=plans(pair.kinds))
    def check(plan: Plan) -> None:
        step = pair.step(cut=plan.cut, **plan.inputs(pair))
        assert step.split
        assert_close(step, FP32)
        compared.add(plan)

    check()
    assert len(compared) >= 0.9 * PLANS.get(pair.name, FEWER_PLANS)
    # No length, batch, padding or cut compiled anything new.
    assert len(pair.report.graphs) == len(pair.kinds)
    assert {graph.mode for graph in pair.report.graphs} == {"sequence"}


def test_every_cut_of_one_prompt(pair):
    plan = Plan("padded", 2, 6, 0, (0, 4, 0, 0), True, 1, 7)
    for cut in range(1, 6):
        step = pair.step(cut=cut, **plan.inputs(pair))
        assert step.stages == 2
        assert_close(step, FP32)
    assert pair.step(cut=6 // 2, **plan.inputs(pair)).layers[0].shape[:2] == (2, 6)
