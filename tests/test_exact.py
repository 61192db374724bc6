"""Exact mode: a split step equals the unsplit one bit for bit, at every MoE layer and the logits.

Each model is compiled once per kind of step, with dynamic shapes; random plans (batch, lengths,
padding, cache fill, cut) run over both programs of the backend, two-stage and unsplit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from harness import new_cache
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import afd_graph.exact_attention  # noqa: F401  (registers the operator)
from afd_graph import AFDBackend, AFDConfig
from afd_graph.errors import ConfigError, ExactError
from afd_graph.exact import SafeCounts, cancelling, in_safe_blocks, safe_counts
from afd_graph.exact_ops import EXACT
from tiny_models import MODELS, VOCABULARY, PlainModel, deepseek_v2

CASES = {
    # model, dtype, connector, kinds of steps
    "v2-fp32-local": ("v2", torch.float32, "local", ("padded", "dynamic", "static")),
    "v2-bf16-process": ("v2", torch.bfloat16, "process", ("none", "dynamic")),
    "v3-fp32-process": ("v3", torch.float32, "process", ("padded",)),
    "v3-bf16-local": ("v3", torch.bfloat16, "local", ("dynamic",)),
    "mixtral-fp32-local": ("mixtral", torch.float32, "local", ("none", "dynamic")),
    "mixtral-bf16-local": ("mixtral", torch.bfloat16, "local", ("padded",)),
    "qwen2-fp32-process": ("qwen2_moe", torch.float32, "process", ("padded",)),
    "qwen3-bf16-local": ("qwen3_moe", torch.bfloat16, "local", ("none",)),
}
PLANS = 27
CACHE_LENGTH = 64


@dataclass(frozen=True)
class Plan:
    """One step; ``cut`` is the extent of stage 0."""

    kind: str
    batch: int
    length: int
    past: int
    pad: int
    cut: int
    seed: int


@st.composite
def plans(draw: st.DrawFn, kinds: tuple[str, ...]) -> Plan:
    length = draw(st.integers(2, 40))
    return Plan(
        kind=draw(st.sampled_from(kinds)),
        batch=draw(st.integers(2, 4)),
        length=length,
        past=draw(st.integers(2, 12)),
        pad=draw(st.integers(0, length - 1)),
        cut=draw(st.integers(1, length - 1)),
        seed=draw(st.integers(0, 2**20)),
    )


class Programs:
    """Both programs of one compiled model, and what they received."""

    def __init__(self, model: torch.nn.Module, config: AFDConfig, eager=None) -> None:
        self.model = model
        self.eager = eager or copy.deepcopy(model)
        self.cut: int | str = "unsplit"
        self.backend = AFDBackend(config, plan=lambda extent, tokens: self.cut)
        self.compiled = torch.compile(model, backend=self.backend, fullgraph=True, dynamic=True)
        self.received: dict[tuple[int, int], torch.Tensor] = {}
        self.counts: set[int] = set()
        receive, send = self.backend.channel.receive, self.backend._connector.send

        def watched(ticket, hidden, weights, layer, stage, *more):
            result = receive(ticket, hidden, weights, layer, stage, *more)
            self.received[layer, stage] = result.clone()
            return result

        def counted(item):
            self.counts.update(item.counts)
            return send(item)

        self.backend.channel.receive = watched
        self.backend._connector.send = counted

    def inputs(self, plan: Plan) -> dict[str, object]:
        generator = torch.Generator().manual_seed(plan.seed)
        ids = torch.randint(VOCABULARY, (plan.batch, plan.past + plan.length), generator=generator)
        step = {"input_ids": ids[:, plan.past :], "use_cache": False}
        if plan.kind == "padded":
            step["attention_mask"] = torch.ones(plan.batch, plan.length, dtype=torch.long)
            step["attention_mask"][1, : plan.pad] = 0
        elif plan.kind in ("dynamic", "static"):
            cache = new_cache(plan.kind, self.model.config, CACHE_LENGTH)
            with torch.no_grad():
                self.eager(ids[:, : plan.past], past_key_values=cache, use_cache=True)
            step |= {"past_key_values": cache, "use_cache": True}
        return step

    def run(self, plan: Plan, cut: int | str) -> list[torch.Tensor]:
        """Received rows of every MoE layer in the order of the tokens, then the logits."""
        self.cut = cut
        self.received.clear()
        with torch.no_grad():
            logits = self.compiled(**self.inputs(plan)).logits
        assert {stage for _, stage in self.received} == ({0} if cut == "unsplit" else {0, 1})
        layers = []
        for layer in sorted({layer for layer, _ in self.received}):
            stages = [rows for (where, _), rows in sorted(self.received.items()) if where == layer]
            rows = [part.view(plan.batch, -1, part.shape[-1]) for part in stages]
            layers.append(torch.cat(rows, dim=1))
        return [*layers, logits.clone()]

    def equal(self, plan: Plan) -> list[bool]:
        whole, split = self.run(plan, "unsplit"), self.run(plan, plan.cut)
        assert len(whole) >= 2
        return [torch.equal(a, b) for a, b in zip(whole, split, strict=True)]


@pytest.fixture
def programs(request) -> Iterator[Programs]:
    model, dtype, connector, kinds = CASES[request.param]
    found = Programs(MODELS[model]().to(dtype), AFDConfig(exact=True, connector=connector))
    for kind in kinds:  # Compile every kind once, on sizes that are all different.
        found.run(Plan(kind, 3, 7, 5, 2, 3, 0), 3)
    yield found
    found.backend.close()
    torch._dynamo.reset()


def test_enough_plans():
    assert PLANS * len(CASES) >= 200


@pytest.mark.parametrize(
    ("programs", "case"), [(c, c) for c in CASES], indirect=["programs"], ids=[*CASES]
)
def test_split_and_unsplit_are_bitwise_equal(programs, case):
    seen = set()

    @settings(
        max_examples=PLANS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=plans(CASES[case][3]))
    def check(plan: Plan) -> None:
        assert all(programs.equal(plan))
        seen.add(plan)

    check()
    assert len(seen) >= 0.9 * PLANS
    assert {0, 1} <= programs.counts  # rows per expert
    assert len(programs.backend.report().graphs) == len(CASES[case][3])


def test_a_backend_that_never_splits_gives_the_same_bits():
    plan = Plan("padded", 3, 11, 2, 4, 3, 0)
    answers = []
    for split in ("token", "none"):
        programs = Programs(deepseek_v2(), AFDConfig(exact=True, split=split))
        answers.append(programs.run(plan, 3 if split == "token" else "unsplit"))
        programs.backend.close()
        torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_a_cut_between_requests_is_exact():
    programs = Programs(deepseek_v2(), AFDConfig(exact=True, split="request"))
    for cut in (1, 2):
        plan = Plan("none", 3, 7, 2, 0, cut, 5)
        whole, split = programs.run(plan, "unsplit")[-1], None
        programs.cut = cut
        with torch.no_grad():
            split = programs.compiled(**programs.inputs(plan)).logits
        assert torch.equal(whole, split)
    assert programs.backend.report().steps_split == 2
    programs.backend.close()
    torch._dynamo.reset()


def test_without_exact_mode_the_same_comparison_fails():
    programs = Programs(deepseek_v2(), AFDConfig())
    cuts = [programs.equal(Plan("padded", 2, 9, 2, 3, cut, 1)) for cut in (1, 4, 8)]
    programs.backend.close()
    torch._dynamo.reset()
    assert not all(all(equal) for equal in cuts)


# -- the kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["mm", "linear", "silu", "mean", "softmax", "grouped_mm"])
def test_an_exact_operator_gives_rows_the_same_bits_in_any_company(name, dtype):
    aten = torch.ops.aten
    rows, matrix = cancelling(64, 24, dtype)
    rows = rows * torch.linspace(0.5, 2, 301).to(dtype)[:, None]
    calls = {
        "mm": lambda x: EXACT[aten.mm.default](x, matrix),
        "linear": lambda x: EXACT[aten.linear.default](x, matrix.t().contiguous()),
        "silu": lambda x: EXACT[aten.silu.default](x[:, :25]),
        "mean": lambda x: EXACT[aten.mean.dim](x, [-1], True),
        "softmax": lambda x: EXACT[aten._softmax.default](x, -1, False),
        "grouped_mm": lambda x: EXACT[torch.ops.afd.grouped_mm.default](
            x, torch.stack([matrix] * 3), torch.tensor([0, x.shape[0] - 1, 1])
        ),
    }
    whole = calls[name](rows)
    for start, stop in ((0, 1), (1, 3), (2, 9), (7, 40), (100, 301)):
        assert torch.equal(calls[name](rows[start:stop]), whole[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (24, 16), (16, 24)])
def test_exact_attention_of_a_stage_is_that_of_the_step(width, value_width, dtype):
    generator = torch.Generator().manual_seed(0)
    length = 45
    query, key = (torch.randn(2, 4, length, width, generator=generator).to(dtype) for _ in "qk")
    value = torch.randn(2, 4, length, value_width, generator=generator).to(dtype)

    def attend(start, stop):
        return torch.ops.afd.exact_attention(
            query[:, :, start:stop],
            key[:, :, :stop],
            value[:, :, :stop],
            None,
            True,
            None,
            False,
            length - stop,
        )

    whole = attend(0, length)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(whole, expected, atol=1e-5 if dtype == torch.float32 else 2e-2)
    for cut in (1, 2, 13, 33, 44):
        assert torch.equal(attend(0, cut), whole[:, :, :cut])
        assert torch.equal(attend(cut, length), whole[:, :, cut:])


def test_counts_of_other_bits_are_avoided():
    def kernel(rows):
        wrong = rows.shape[0] in (1, 2, 3, 7)
        return rows + wrong

    safe = safe_counts(kernel, [torch.zeros(4)], what="test", tried=range(1, 11))
    assert safe.counts == (4, 5, 6, 8, 9, 10)
    assert [safe.padded(n) for n in (1, 4, 7)] == [4, 4, 8]
    called = []
    rows = torch.arange(92.0).view(23, 4)
    answer = in_safe_blocks(lambda x: called.append(x.shape[0]) or x * 2, rows, safe)
    assert torch.equal(answer, rows * 2)
    assert called == [10, 10, 4]
    assert in_safe_blocks(lambda x: x * 2, rows[:0], safe).shape == (0, 4)


def test_a_kernel_without_a_safe_count_is_refused():
    def kernel(rows):
        return rows + torch.arange(rows.shape[0])[:, None]

    with pytest.raises(ExactError, match=r"cannot be promised here: this kernel .*2 to 6"):
        safe_counts(kernel, [torch.zeros(4)], what="this kernel", tried=range(2, 7))


def test_the_smallest_counts_are_the_next_ones_up():
    assert SafeCounts((4, 8)).largest == 8


# -- refusals --------------------------------------------------------------------------------------


def test_an_operator_without_a_rule_is_refused_by_name():
    model = PlainModel(mix=lambda x: x.cumsum(-1))
    with AFDBackend(AFDConfig(exact=True)) as backend, torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with pytest.raises(Exception, match=r"exact mode has no rule for aten\.cumsum\.default"):
            compiled(torch.zeros(2, 5, dtype=torch.long))
    torch._dynamo.reset()


def test_a_compiler_that_chooses_kernels_is_refused():
    with pytest.raises(ConfigError, match="exact=True cannot be promised: lowering='inductor'"):
        AFDConfig(exact=True, lowering="inductor")
    with pytest.raises(ConfigError, match="sequence_parallel=True sums over ranks"):
        AFDConfig(exact=True, sequence_parallel=True)
    with pytest.raises(ConfigError, match="exact='perhaps'"):
        AFDConfig(exact="perhaps")
