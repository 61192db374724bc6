"""MoE layers are found by structure: in captured, hand-built and stripped graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import Captured, capture, relative_error, run_programs, transform
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from afd_graph import AFDConfig
from afd_graph.passes.match import match_moe_layers
from afd_graph.passes.normalize import normalize
from tiny_models import PlainModel, PlainMoE, deepseek_v2, grouped_mm, qwen2_moe

SPELLINGS = ("grouped", "batched")


def traced(module: nn.Module, *inputs: torch.Tensor, symbolic: bool = True) -> Captured:
    """A graph built by hand: no module stack, no source lines, weights as plain inputs."""
    parameters = dict(module.named_parameters())

    def function(*flat: torch.Tensor) -> torch.Tensor:
        weights = dict(zip(parameters, flat, strict=False))
        return functional_call(module, weights, flat[len(weights) :])

    values = [p.detach() for p in parameters.values()]
    with torch.no_grad():
        functional = torch.func.functionalize(function)
        gm = make_fx(functional, tracing_mode="symbolic" if symbolic else "fake")(*values, *inputs)
    placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    names = zip(placeholders, parameters.items(), strict=False)
    found = Captured(gm, {node: (name, value) for node, (name, value) in names}, [*values, *inputs])
    for node in gm.graph.nodes:
        assert not node.meta.get("nn_module_stack")
    return found


def exported(module: nn.Module, *inputs: torch.Tensor) -> Captured:
    """The second front end: ``torch.export``, with ``linear`` kept."""
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(module, inputs, dynamic_shapes=({0: tokens},))
    program = program.run_decompositions({})
    state, weights, values = program.state_dict, {}, []
    for spec in program.graph_signature.input_specs:
        if spec.target is not None:
            weights[spec.arg.name] = (spec.target, state[spec.target])
            values.append(state[spec.target].detach())
    return Captured(program.graph_module, weights, [*values, *inputs])


def matches_of(captured: Captured, **how: bool):
    graph = captured.fresh(**how).graph
    normalize(graph)
    return match_moe_layers(graph)


@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("front_end", [traced, exported])
def test_hand_built_layer(front_end, spelling, shared):
    torch.manual_seed(1)
    module = PlainMoE(32, 6, 2, spelling, shared)
    rows = torch.randn(11, 32)
    captured = front_end(module, rows)
    matches, failures = matches_of(captured)
    assert failures == []
    (match,) = matches
    assert (match.num_experts, match.top_k, match.width) == (6, 2, 24)
    assert match.shared_experts == (2 if shared else 0)
    if front_end is traced:
        assert match.name is None
    with torch.no_grad():
        expected = module(rows)
    for side in ("attention", "ffn"):
        config = AFDConfig(shared_experts=side)
        for cut in (None, 1, 4, 10):
            (got,) = as_tuple(run_programs(captured, captured.inputs, cut, config))
            assert relative_error(got, expected) < 1e-5


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@pytest.mark.parametrize("build", [deepseek_v2, qwen2_moe], ids=["v2", "qwen2"])
def test_without_metadata_the_same_layers_match(build):
    """Module paths label layers, they never decide."""
    captured = capture(
        build(), input_ids=torch.arange(14).view(2, 7), use_cache=False, dynamic=False
    )
    named, failed = matches_of(captured)
    bare, also_failed = matches_of(captured, metadata=False)
    assert failed == also_failed == []
    assert [match.name for match in named] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert [match.name for match in bare] == [None, None]

    def facts(matches):
        return [
            (m.hidden.name, m.output.name, m.num_experts, m.top_k, m.width, m.shared_experts)
            for m in matches
        ]

    assert facts(bare) == facts(named)
    split = transform(captured, metadata=False).split
    assert split is not None


def test_stripped_graph_computes_the_same():
    model = PlainModel(spelling="grouped", shared=24)
    ids = torch.arange(14).view(2, 7)
    captured = capture(model, ids)
    with torch.no_grad():
        expected = model(ids)
    for metadata in (True, False):
        got = run_programs(captured, captured.inputs, 3, metadata=metadata)
        assert relative_error(got[0], expected) < 1e-5


class WithExperts(PlainMoE):
    """A layer whose experts do something else between or after their products."""

    def __init__(self, change: str) -> None:
        torch.manual_seed(0)
        super().__init__(32, 6, 2, "batched", 0)
        self.change = change

    def _batched(self, rows, ids, weights):
        flat = ids.reshape(-1)
        repeated = rows.repeat_interleave(self.top_k, dim=0)
        inner = torch.bmm(repeated.unsqueeze(1), self.up[flat]).squeeze(1)
        if self.change == "mixes rows inside":
            inner = inner.cumsum(0)
        if self.change == "another activation":
            inner = F.softplus(inner).square() * 0.5
        out = torch.bmm(F.gelu(inner).unsqueeze(1), self.down[flat]).squeeze(1)
        if self.change == "no weights":
            return out.view(rows.shape[0], self.top_k, -1).sum(1)
        out = out * weights.reshape(-1, 1)
        if self.change == "rows in another order":
            out = out.flip(0)
        out = out.view(rows.shape[0], self.top_k, -1)
        if self.change == "largest instead of sum":
            return out.amax(1)
        return out.sum(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("mixes rows inside", "not row-wise between the expert products"),
        ("no weights", "summed without weights"),
        ("rows in another order", "aten.flip.default after the expert products is not known"),
        ("largest instead of sum", "aten.amax.default after the expert products is not known"),
    ],
)
def test_what_does_not_fit_says_why(change, reason):
    matches, failures = matches_of(traced(WithExperts(change), torch.randn(5, 32)))
    assert matches == []
    (failure,) = failures
    assert reason in str(failure)
    assert failure.nodes


def test_activation_is_taken_from_the_graph():
    module = WithExperts("another activation")
    rows = torch.randn(9, 32)
    captured = traced(module, rows)
    with torch.no_grad():
        expected = module(rows)
    (got,) = as_tuple(run_programs(captured, captured.inputs, 4))
    assert relative_error(got, expected) < 1e-5


class Gathered(PlainMoE):
    """Sorts the rows by expert and puts the results back, in one of many ways."""

    def __init__(self, way: str, top_k: int = 2) -> None:
        torch.manual_seed(0)
        super().__init__(32, 6, top_k, "batched" if "tiled" in way else "grouped", 0)
        self.way = way

    def _grouped(self, rows, ids, weights):
        k, count = self.top_k, rows.shape[0] * self.top_k
        flat, order = ids.reshape(-1).sort()
        experts = self.up.shape[0]
        counts = torch.histc(flat.float(), experts, 0, experts - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        taken = {
            "tokens by table": lambda: torch.arange(count).div(k, rounding_mode="floor")[order],
            "rows of other tokens": lambda: order % rows.shape[0],
            "rows unsorted": lambda: torch.arange(count) // k,
        }.get(self.way, lambda: order // k)()
        inner = grouped_mm(rows[taken], self.up, offsets)
        out = grouped_mm(F.gelu(inner), self.down, offsets)
        back = {
            "back by argsort": lambda: order.argsort(),
            "back by sort": lambda: order.sort()[1],
            "back by scatter": lambda: torch.empty_like(order).scatter(
                0, order, torch.arange(count)
            ),
            "back by the order itself": lambda: order,
            "back downwards": lambda: order.argsort(descending=True),
        }.get(self.way, lambda: torch.empty_like(order).index_put((order,), torch.arange(count)))()
        if self.way == "weights afterwards":
            out = out[back] * weights.reshape(-1, 1)
        elif self.way == "weights unsorted":
            out = (out * weights.reshape(-1, 1))[back]
        elif self.way == "weights by expert":
            out = (out * weights.reshape(-1)[flat].unsqueeze(-1))[back]
        elif self.way == "left sorted":
            out = out * weights.reshape(-1)[order].unsqueeze(-1)
        else:
            out = (out * weights.reshape(-1)[order].unsqueeze(-1))[back]
        return out.view(rows.shape[0], k, rows.shape[1]).sum(1)

    def _batched(self, rows, ids, weights):
        flat = ids.reshape(-1)
        tiled = rows.unsqueeze(0).expand(self.top_k, *rows.shape).reshape(-1, rows.shape[1])
        inner = torch.bmm(tiled.unsqueeze(1), self.up[flat]).squeeze(1)
        out = torch.bmm(F.gelu(inner).unsqueeze(1), self.down[flat]).squeeze(1)
        out = out * weights.reshape(-1, 1)
        return out.view(rows.shape[0], self.top_k, rows.shape[1]).sum(dim=1)


@pytest.mark.parametrize(
    ("way", "top_k"),
    [
        ("as usual", 2),
        ("as usual", 1),
        ("tokens by table", 2),
        ("back by argsort", 2),
        ("back by sort", 3),
        ("back by scatter", 2),
        ("weights afterwards", 2),
    ],
)
def test_ways_to_sort_by_expert_and_back(way, top_k):
    module, rows = Gathered(way, top_k), torch.randn(9, 32)
    captured = traced(module, rows)
    with torch.no_grad():
        expected = module(rows)
    (got,) = as_tuple(run_programs(captured, captured.inputs, 4))
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_as_many_tokens_as_choices_or_fewer(spelling, tokens):
    """Small static sizes that a reshape cannot be told by."""
    module, rows = PlainMoE(32, 6, 2, spelling, 0), torch.randn(tokens, 32)
    captured = traced(module, rows, symbolic=False)
    with torch.no_grad():
        expected = module(rows)
    (got,) = as_tuple(run_programs(captured, captured.inputs, None))
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("rows of other tokens", "the rows of the experts are not gathered by the token of sorted"),
        ("rows unsorted", "not gathered by the token of sorted choice, but by token"),
        ("rows tiled", "the rows of the experts are not in the order of their ids"),
        ("weights unsorted", "the weights are not in the order of the expert results"),
        ("weights by expert", "the weights are not gathered by the sorted choice"),
        ("back by the order itself", "not gathered by the place of choice, but by sorted choice"),
        ("back downwards", "the expert results are not gathered by the place of choice"),
        ("left sorted", "the expert results are not brought back to the tokens"),
    ],
)
def test_another_order_is_not_a_moe_layer(way, reason):
    """What comes out is a sum over other tokens' rows: it must not be taken for a MoE layer."""
    matches, failures = matches_of(traced(Gathered(way), torch.randn(9, 32)))
    assert matches == []
    assert reason in str(failures[0])


def test_weights_of_a_layer_are_those_of_the_model():
    """The program of a layer holds the model's own parameters, by their names."""
    model = PlainModel(spelling="batched")
    captured = capture(model, torch.arange(14).view(2, 7))
    programs = transform(captured).ffn
    parameters = dict(model.named_parameters())
    for layer, program in enumerate(programs):
        weights = dict(program.routed.weights)
        assert set(weights) == {f"blocks.{layer}.moe.up", f"blocks.{layer}.moe.down"}
        for name, value in weights.items():
            assert value is parameters[name]
    assert copy.deepcopy(programs[0]).key == "layer 0"
