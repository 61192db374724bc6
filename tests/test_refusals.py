"""What is refused, by which name, and what to do about it; and what runs unsplit with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import Pair, relative_error
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from afd_graph import (
    AFDBackend,
    AFDConfig,
    AFDError,
    ConfigError,
    ConnectorError,
    PlanError,
    TrainingError,
    UnsupportedError,
)
from tiny_models import DenseModel, PlainModel

IDS = torch.arange(14).view(2, 7)


def compiled_pair(model: nn.Module, **options: object) -> Pair:
    return Pair(model, AFDConfig(**options), observe=False, dynamic=False)


def refusal_of(model: nn.Module, ids: torch.Tensor = IDS, **options: object) -> AFDError:
    """The error that compiling raises; the pieces of its message belong to the error."""
    pair = compiled_pair(model, **options)
    try:
        with pytest.raises(BackendCompilerFailed) as raised:
            pair.step(ids)
    finally:
        pair.close()
    error = raised.value.inner_exception
    assert isinstance(error, AFDError)
    assert str(error) in str(raised.value)
    return error


def running_sum(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * x.cumsum(dim=1)  # this is the line that a refusal must name


def mean_over_tokens(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(dim=1, keepdim=True)


def shifted_tokens(x: torch.Tensor) -> torch.Tensor:
    return x + F.pad(x[:, :-1], (0, 0, 1, 0))


def reversed_tokens(x: torch.Tensor) -> torch.Tensor:
    return x + x.flip(1)


def softmax_over_tokens(x: torch.Tensor) -> torch.Tensor:
    return x + x.softmax(dim=1)


def line_of(function) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + 1}"


MIXERS = {
    running_sum: ("aten.cumsum.default", "works along dimension 1, the token axis"),
    mean_over_tokens: ("aten.mean.dim", "works along dimension 1, the token axis"),
    shifted_tokens: ("aten.slice.Tensor", "takes a part of the token axis (dimension 1)"),
    reversed_tokens: ("aten.flip.default", "the operator has no rule"),
    softmax_over_tokens: ("aten._softmax.default", "works along dimension 1, the token axis"),
}


@pytest.mark.parametrize("mix", MIXERS, ids=lambda mix: mix.__name__)
def test_a_value_that_mixes_tokens_is_refused_by_name(mix):
    operator, reason = MIXERS[mix]
    error = refusal_of(PlainModel(mix=mix))
    assert isinstance(error, UnsupportedError)
    assert error.what.startswith(operator)
    assert reason in error.what
    assert error.node
    assert error.layer == 0
    assert error.source == line_of(mix)
    assert "on_unsupported='fallback'" in error.remedy
    for part in (error.what, f"node={error.node}", "layer=0", error.source, error.remedy):
        assert part in str(error)


def test_the_layer_of_a_refusal_is_counted():
    class Later(nn.Module):
        calls = 0

        def forward(self, x):
            return running_sum(x)

    model = PlainModel()
    model.blocks[1].mix = Later()
    assert refusal_of(model).layer == 1


def test_fallback_runs_unsplit_with_that_reason_counted():
    pair = compiled_pair(PlainModel(mix=running_sum), on_unsupported="fallback")
    for _ in range(3):
        assert relative_error(pair.step(IDS).logits, pair.eager(IDS)) < 1e-5
    assert pair.report.steps_split == 0
    ((reason, count),) = pair.report.steps_unsplit.items()
    assert count == 3
    assert reason.startswith("unsupported: aten.cumsum.default cannot be split by tokens")
    assert line_of(running_sum) in reason
    assert pair.report.layers
    assert reason in str(pair.report)
    pair.close()


def test_mixing_behind_the_last_experts_is_no_hindrance():
    """There the stages are put together again."""

    class Pooled(PlainModel):
        def forward(self, ids):
            return super().forward(ids).cumsum(dim=1)

    pair = compiled_pair(Pooled())
    step = pair.step(IDS, cut=3)
    assert step.split
    assert step.errors()["logits"] < 1e-5
    pair.close()


def test_mixing_before_the_first_experts_is_no_hindrance():
    """The stages begin at the first MoE layer's attention."""

    class Summed(PlainModel):
        def forward(self, ids):
            x = running_sum(self.embed(ids))
            for block in self.blocks:
                x = block(x, None)
            return self.head(x)

    pair = compiled_pair(Summed())
    step = pair.step(IDS, cut=2)
    assert step.split
    assert step.errors()["logits"] < 1e-5
    pair.close()


class Prefixed(PlainModel):
    """Learnt vectors in front of every prompt."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 4, 32))
        self.again = again

    def forward(self, ids):
        prefix = self.prefix.expand(ids.shape[0], 4, 32)
        x = torch.cat([prefix, self.embed(ids)], dim=1)
        for block in self.blocks:
            x = block(x, None)
            if self.again:
                x = torch.cat([prefix, x], dim=1)
        return self.head(x)


def test_tokens_in_front_of_the_prompt_are_tokens():
    """The axis that is cut is as long as prefix and prompt together, a sum of sizes."""
    pair = Pair(Prefixed(again=False), observe=False)
    for length, cut in ((7, 5), (9, 2), (3, 6)):
        step = pair.step(torch.arange(2 * length).view(2, length), cut=cut)
        assert step.split
        assert step.errors()["logits"] < 1e-5
    assert len(pair.report.graphs) == 1
    pair.close()


@pytest.mark.parametrize("dynamic", [True, False])
def test_tokens_that_join_between_the_layers_are_refused(dynamic):
    pair = Pair(Prefixed(again=True), observe=False, dynamic=dynamic)
    with pytest.raises(BackendCompilerFailed, match="query holds more tokens than") as raised:
        pair.step(IDS)
    assert isinstance(raised.value.inner_exception, UnsupportedError)
    pair.close()


# -- causality -----------------------------------------------------------------------------------


def everything(ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def one_ahead(ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril(1)[None, None]


def padding_only(ids: torch.Tensor) -> torch.Tensor:
    return (ids > 0)[:, None, None, :]


def triangle(ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def flat_triangle(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


@pytest.mark.parametrize("make_mask", [everything, one_ahead, padding_only])
def test_attention_that_is_not_causal_is_refused(make_mask):
    error = refusal_of(PlainModel(make_mask=make_mask))
    assert isinstance(error, UnsupportedError)
    assert "attention is not known to be causal" in error.what
    assert error.node
    assert error.source
    assert "assume_causal=True" in error.remedy
    assert "split='request'" in error.remedy


@pytest.mark.parametrize("make_mask", [everything, one_ahead, padding_only, triangle])
def test_between_requests_any_mask_may_be_cut(make_mask):
    pair = compiled_pair(PlainModel(make_mask=make_mask), split="request")
    step = pair.step(IDS + 1, cut=1)
    assert step.split
    assert step.errors()["logits"] < 1e-5
    pair.close()


@pytest.mark.parametrize("make_mask", [triangle, flat_triangle])
def test_a_causal_mask_is_proven(make_mask):
    pair = compiled_pair(PlainModel(make_mask=make_mask))
    for cut in (1, 3, 6):
        step = pair.step(IDS, cut=cut)
        assert step.split
        assert step.errors()["logits"] < 1e-5
    pair.close()


class Memory(nn.Module):
    """Attention of every token to the same few vectors, some of them masked: not causal."""

    def __init__(self, mask_rank: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(1, 4, 5, 8))
        self.mask_rank = mask_rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        keys = self.keys.expand(b, 4, 5, 8)
        mask = torch.tensor([True, True, False, True, True])
        mask = mask.view([1] * (self.mask_rank - 1) + [5])
        q = x.view(b, s, 4, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, keys, keys, mask)
        return x + y.transpose(1, 2).reshape(b, s, h)


@pytest.mark.parametrize(("mask_rank", "layers"), [(4, (0, 1)), (4, (1,)), (2, (0,))])
def test_attention_to_something_else_needs_no_causal_mask(mask_rank, layers):
    torch.manual_seed(0)
    model = PlainModel()
    for layer in layers:
        model.blocks[layer].mix = Memory(mask_rank)
    pair = compiled_pair(model)
    for cut in (1, 4):
        step = pair.step(IDS, cut=cut)
        assert step.split
        assert step.errors()["logits"] < 1e-5
    pair.close()


def test_a_wrong_assumption_is_the_users():
    """``assume_causal`` on a mask that is not: the first stage misses keys, the second does not."""
    pair = compiled_pair(PlainModel(make_mask=everything), assume_causal=True)
    step = pair.step(IDS, cut=3)
    assert step.split
    assert step.errors()["logits"] > 1e-3
    pair.close()


# -- training, configuration, plans --------------------------------------------------------------


def test_training_is_an_error():
    model = PlainModel(layers=1)
    with AFDBackend() as backend:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with pytest.raises(BackendCompilerFailed, match=r"inference only.*torch\.no_grad") as error:
            compiled(IDS)
        assert isinstance(error.value.inner_exception, TrainingError)
        with torch.inference_mode():
            compiled(IDS)
        assert backend.report().steps_split == 1


def test_frozen_parameters_are_no_training():
    model = PlainModel(layers=1).requires_grad_(False)
    with AFDBackend() as backend:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert relative_error(compiled(IDS), model(IDS)) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spit": "token"}, r"unknown AFDConfig field\(s\): spit Remedy: did you mean 'split'\?"),
        ({"min_split_token": 4}, r"did you mean 'min_split_tokens'\?"),
        ({"zzz": 1}, r"unknown AFDConfig field\(s\): zzz Remedy: known fields: .*split"),
        ({"split": "tokens"}, r"split='tokens' .*use one of .*token"),
        ({"num_stages": 3}, r"exactly two stages .*num_stages=3"),
        ({"min_split_tokens": 1}, r"min_split_tokens must be at least 2: min_split_tokens=1"),
        ({"credits": 0}, r"credits=0 .*set credits to 1 or more"),
        ({"timeout_s": 0}, r"timeout_s=0 is not a positive number"),
        ({"on_unsupported": "ignore"}, r"on_unsupported='ignore'"),
        ({"assume_causal": "perhaps"}, r"assume_causal='perhaps'"),
        ({"connector_options": 3}, r"must be a mapping .*connector_options=3"),
    ],
)
def test_options_are_checked_and_named(options, message):
    with pytest.raises(ConfigError, match=message):
        AFDConfig.from_options(options)


def test_options_of_torch_compile_are_checked():
    compiled = torch.compile(PlainModel(layers=1), backend="afd", options={"spilt": "token"})
    with torch.no_grad(), pytest.raises(Exception, match="did you mean 'split'"):
        compiled(IDS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AFDConfig(credits=3), r"credits=3 is more than connector 'local' holds \(2\)"),
        (AFDConfig(connector="lokal"), r"connector='lokal' is not known .*'local'"),
        (AFDConfig(connector_options={"speed": 1}), r"do not fit connector 'local'.*speed"),
    ],
)
def test_connectors_are_checked(config, message):
    with pytest.raises(ConfigError, match=message):
        AFDBackend(config)


@pytest.mark.parametrize("cut", [0, 7, -1])
def test_a_plan_that_leaves_a_stage_empty_is_an_error(cut):
    pair = compiled_pair(PlainModel(layers=1))
    with pytest.raises(PlanError, match=f"cuts an axis of 7 at {cut} Remedy: .*1 to 6"):
        pair.step(IDS, cut=cut)
    assert pair.step(IDS, cut=3).split  # the backend still works
    pair.close()


def test_expert_weights_may_not_be_replaced_after_compilation():
    model = PlainModel(layers=1)
    pair = compiled_pair(model)
    pair.step(IDS, cut=3)
    moe = model.blocks[0].moe
    with torch.no_grad():
        moe.up.mul_(0.5)  # in place: the experts hold the same memory
        assert relative_error(pair.compiled(IDS), model(IDS)) < 1e-5
        moe.up = nn.Parameter(moe.up * 2)
        with pytest.raises(ConnectorError, match=r"replaced after the model was compiled.*Remedy"):
            pair.compiled(IDS)
    pair.close()


def test_a_closed_backend_says_so():
    pair = compiled_pair(PlainModel(layers=1))
    pair.step(IDS, cut=3)
    pair.close()
    with torch.no_grad():
        with pytest.raises(ConnectorError, match="compile the model again with a new backend"):
            pair.compiled(IDS)
        other = torch.compile(PlainModel(layers=1), backend=pair.backend)
        with pytest.raises(BackendCompilerFailed, match="this backend was closed"):
            other(IDS)


def test_nan_from_the_experts_is_an_error():
    model = PlainModel(layers=1)
    pair = compiled_pair(model)
    with torch.no_grad():
        model.blocks[0].moe.down.fill_(float("nan"))
        with pytest.raises(ConnectorError, match=r"answered NaN.*layer=0, stage=0"):
            pair.compiled(IDS)
        model.blocks[0].moe.down.normal_()
        assert relative_error(pair.compiled(IDS), model(IDS)) < 1e-5
    pair.close()


# -- models without experts, faults of others ----------------------------------------------------


def test_a_model_without_experts_compiles_and_says_so():
    model = DenseModel()
    with AFDBackend() as backend, torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert relative_error(compiled(IDS), model(IDS)) < 1e-6
        report = backend.report()
    assert report.layers == []
    assert dict(report.steps_unsplit) == {"no_moe_layer": 1}
    assert "no MoE layer was matched: the graphs run as they were captured" in str(report)


def test_experts_that_do_not_match_are_reported_not_split():
    class Odd(PlainModel):
        def forward(self, ids):
            x = self.embed(ids)
            moe = self.blocks[0].moe
            rows = x.view(-1, x.shape[-1])
            _, chosen = moe.gate(rows).softmax(-1).topk(2)
            out = torch.bmm(rows.repeat_interleave(2, 0).unsqueeze(1), moe.up[chosen.reshape(-1)])
            return out.squeeze(1).view(ids.shape[0], -1, 2, 24).amax(2)

    model = Odd(layers=1)
    with AFDBackend() as backend, torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert relative_error(compiled(IDS), model(IDS)) < 1e-6
        report = backend.report()
    ((failure,),) = [graph.no_match for graph in report.graphs]
    assert "not known" in failure or "does not" in failure
    assert f"not matched: {failure}" in str(report)


@pytest.mark.parametrize(
    ("length", "reason", "cut"),
    [(1, "single_token", None), (2, None, 1), (3, None, 2), (5, None, 3), (8, None, 4)],
)
def test_fault_5_short_and_odd_steps(length, reason, cut):
    """One token cannot be cut; odd counts give stage 0 the larger part."""
    model = PlainModel(layers=1)
    with AFDBackend() as backend, torch.no_grad():
        rows = []
        receive = backend.channel.receive

        def watched(ticket, hidden, *rest):
            rows.append(hidden.shape[0])
            return receive(ticket, hidden, *rest)

        backend.channel.receive = watched
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        ids = torch.arange(length).view(1, length)
        assert relative_error(compiled(ids), model(ids)) < 1e-5
        report = backend.report()
    if reason is not None:
        assert dict(report.steps_unsplit) == {reason: 1}
        assert rows == [1]
    else:
        assert report.steps_split == 1
        assert rows == [cut, length - cut]


def test_fault_5_no_token_at_all():
    model = PlainModel(layers=1)
    with AFDBackend() as backend, torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        ids = torch.empty(1, 0, dtype=torch.long)
        assert compiled(ids).shape == model(ids).shape
        assert backend.report().steps_split == 0
        assert dict(backend.report().steps_unsplit) == {"no_tokens": 1}


def test_below_the_threshold_is_counted():
    with AFDBackend(AFDConfig(min_split_tokens=9)) as backend, torch.no_grad():
        compiled = torch.compile(PlainModel(layers=1), backend=backend, dynamic=True)
        for length in (3, 4, 5, 6):
            compiled(torch.zeros(2, length, dtype=torch.long))
        report = backend.report()
    assert report.steps_split == 2  # 10 and 12 tokens
    assert dict(report.steps_unsplit) == {"below_min_tokens": 2}


def test_fault_7_a_size_from_before_the_experts_is_used_behind_them():
    """``s = x.size(); ...; y.view(s)`` around the experts; every block here does it."""
    pair = Pair(PlainModel(spelling="batched", shared=24), observe=False)
    for length, cut in ((7, 3), (5, 1), (11, 10)):
        step = pair.step(torch.arange(2 * length).view(2, length), cut=cut)
        assert step.split
        assert step.errors()["logits"] < 1e-5
    assert len(pair.report.graphs) == 1
    pair.close()


def test_fault_15_experts_see_the_hidden_state_behind_the_previous_experts():
    """A pipeline that fed attention the state from before the experts' result would be seen."""
    pair = Pair(PlainModel(layers=3), observe=False)
    rows: dict[tuple[int, int], torch.Tensor] = {}
    dispatch = pair.backend.channel.dispatch

    def watched(hidden, ids, layer, stage, *rest):
        rows[layer, stage] = hidden.clone()
        return dispatch(hidden, ids, layer, stage, *rest)

    pair.backend.channel.dispatch = watched
    expected = []
    for block in pair.eager.blocks:
        block.norm2.register_forward_hook(lambda m, a, out: expected.append(out))
    pair.step(IDS, cut=3)
    for layer, whole in enumerate(expected):
        got = torch.cat([rows[layer, s].view(2, -1, whole.shape[-1]) for s in (0, 1)], dim=1)
        assert relative_error(got, whole) < 1e-5
    pair.close()
