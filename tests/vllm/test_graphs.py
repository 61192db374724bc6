"""The passes on graphs written by hand: forms of names, in-place order, cuts, refusals."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from afd_graph.config import AFDConfig
from afd_graph.errors import UnsupportedError
from afd_graph.vllm.in_place import hidden_needs
from afd_graph.vllm.match import match_layers
from afd_graph.vllm.operators import layer_name
from afd_graph.vllm.programs import build_programs
from afd_graph.vllm.split import split_stages

# As vLLM-Ascend registers it: projections, cache update and attention of a layer in one.
_library = torch.library.Library("vllm", "FRAGMENT")
_library.define(
    "mla_forward(Tensor hidden_states, bool need_gather_q_kv, Tensor(a!) output, str layer_name)"
    " -> ()"
)
# Named as vLLM's kernel for quantised experts on a CPU, _C::fused_experts_cpu, which not all have.
_library.define("fused_experts_cpu(Tensor hidden_states) -> Tensor")


class Capture:
    """Builds a graph over a token axis of one symbol, with values as Dynamo notes them."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        source = ConstantSource("tokens")
        symbol = self.env.create_symbol(8, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        self.tokens = self.env.create_symintnode(symbol, hint=8, source=source)
        self.graph = fx.Graph()

    def input(self, name: str, *shape: Any, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["example_value"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, like: Any = None, **kwargs: Any) -> fx.Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        if like is not None:
            node.meta["example_value"] = (
                like.meta["example_value"] if isinstance(like, fx.Node) else like
            )
        return node

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def _two_layers() -> fx.GraphModule:
    """Attention of Ascend and inline experts, twice."""
    capture = Capture()
    n = capture.tokens
    size = capture.graph.placeholder("s0")
    size.meta["example_value"] = n
    x = capture.input("x", n, 16)
    weights = [
        (capture.input(f"w13_{i}", 4, 32, 16), capture.input(f"w2_{i}", 4, 16, 16))
        for i in range(2)
    ]
    for i, (w13, w2) in enumerate(weights):
        out = capture.call(torch.empty_like, x, like=x)
        capture.call(torch.ops.vllm.mla_forward, x, False, out, f"layers.{i}.self_attn")
        hidden = capture.call(operator.add, x, out, like=x)
        scores = capture.call("softmax", hidden, -1, like=x)
        top = capture.call("topk", scores, 2)
        with capture.mode:
            small = torch.empty((n, 2)), torch.empty((n, 2), dtype=torch.int64)
        top_weights = capture.call(operator.getitem, top, 0, like=small[0])
        ids = capture.call(operator.getitem, top, 1, like=small[1])
        shared = capture.call(torch.nn.functional.silu, hidden, like=x)
        experts = capture.call(torch.empty_like, hidden, like=x)
        capture.call(
            torch.ops._C.cpu_fused_moe,
            *(experts, hidden, w13, w2, None, None, top_weights, ids, False, "silu", "vec"),
        )
        scaled = capture.call(operator.imul, experts, 2.5, like=x)
        x = capture.call(operator.add, shared, scaled, like=x)
    return capture.module(x)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    from vllm import LLM  # noqa: F401  (in this order; the other way round is a circular import)
    from vllm.model_executor.layers.fused_moe.runner import moe_runner  # noqa: F401

    from afd_graph.vllm.experts import load_kernels

    load_kernels()


def _names(graph: fx.Graph) -> list[str]:
    """Dispatch, receive and attention in order, as ``kind layer.stage``."""
    found = []
    for node in graph.nodes:
        target = str(node.target)
        if "cam_" in target:
            kind = "dispatch" if "dispatch" in target else "receive"
            found.append(f"{kind} {node.args[-3]}.{node.args[-2]}")
        elif "mla_forward" in target:
            stage, name = node.args[0], str(node.args[4])
            found.append(f"attention {name.split('.')[1]}.{stage}")
    return found


def test_order_of_the_two_stage_program() -> None:
    programs = build_programs(_two_layers(), AFDConfig(), credits=2)
    assert programs.split is not None
    assert _names(programs.split.graph) == [
        *("attention 0.0", "dispatch 0.0", "attention 0.1", "dispatch 0.1"),
        *("receive 0.0", "attention 1.0", "dispatch 1.0"),
        *("receive 0.1", "attention 1.1", "dispatch 1.1", "receive 1.0", "receive 1.1"),
    ]


def test_one_credit_receives_first() -> None:
    programs = build_programs(_two_layers(), AFDConfig(), credits=1)
    assert programs.split is not None
    names = [name for name in _names(programs.split.graph) if "attention" not in name]
    assert names[:4] == ["dispatch 0.0", "receive 0.0", "dispatch 0.1", "receive 0.1"]


def test_shared_experts_run_while_the_rows_are_away() -> None:
    programs = build_programs(_two_layers(), AFDConfig(), credits=2)
    order = [str(node.target) for node in programs.unsplit.graph.nodes]
    dispatch = next(i for i, name in enumerate(order) if "cam_dispatch" in name)
    receive = next(i for i, name in enumerate(order) if "cam_receive" in name)
    assert any("silu" in name for name in order[dispatch:receive])


def test_edit_counts_and_sources() -> None:
    programs = build_programs(_two_layers(), AFDConfig(), credits=2)
    assert programs.report.edits["match"] == 2
    assert programs.report.edits["insert"] == 4
    assert programs.experts[1].inputs == (4, 5, None, None)
    assert programs.experts[0].top_k == 2


def test_a_view_is_written_before_its_base_is_read() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    base = capture.call(torch.empty_like, x, like=x)
    view = capture.call("view", base, -1, 2, 4)
    part = capture.call(operator.getitem, view, (Ellipsis, slice(2, None)))
    before = capture.call("clone", base)
    write = capture.call(operator.setitem, part, slice(None), 1.0)
    after = capture.call("clone", base)
    needs = hidden_needs(capture.module(before, after).graph)
    assert needs[write] >= {before, view, part}
    assert write in needs[after]
    assert before not in needs


def test_an_operator_writes_what_its_schema_says() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    out = capture.call(torch.empty_like, x, like=x)
    write = capture.call(torch.ops.vllm.mla_forward, x, False, out, "layers.0.self_attn")
    read = capture.call("clone", out)
    needs = hidden_needs(capture.module(read).graph)
    assert needs[read] == {write}


def test_an_unknown_callable_is_refused_by_name() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    node = capture.call(_two_layers, x)
    with pytest.raises(UnsupportedError, match="_two_layers"):
        hidden_needs(capture.module(node).graph)


def test_names_in_three_forms() -> None:
    from vllm.utils.torch_utils import LayerName

    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    call = capture.call(torch.ops.vllm.mla_forward, x, False, x, "layers.0")
    named = capture.graph.placeholder("name")
    named.meta["example_value"] = LayerName("layers.1")
    assert layer_name("layers.0", call) == "layers.0"
    assert layer_name(LayerName("layers.1"), call) == "layers.1"
    assert layer_name(named, call) == "layers.1"


def test_names_that_count_calls_are_refused() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    capture.call(torch.ops.vllm.moe_forward, x, x, None, None, "from_forward_context", 0)
    with pytest.raises(UnsupportedError, match="fast_moe_cold_start"):
        match_layers(capture.module(x).graph)


@pytest.mark.parametrize("op", ["moe_forward", "moe_forward_shared"])
def test_opaque_layers_are_opened(op: str) -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    call = capture.call(getattr(torch.ops.vllm, op), x, x, None, None, "layers.0.experts", 0)
    if op == "moe_forward":
        gm = capture.module(call)
    else:
        parts = [capture.call(operator.getitem, call, i, like=x) for i in range(2)]
        gm = capture.module(capture.call(operator.add, *parts, like=x))
    call.meta["example_value"] = x.meta["example_value"]
    programs = build_programs(gm, AFDConfig(), credits=2)
    assert programs.split is not None
    targets = [str(node.target) for node in programs.split.graph.nodes]
    assert sum("vllm_route" in name for name in targets) == 2
    assert sum("vllm_shared" in name for name in targets) == (2 if op.endswith("shared") else 0)
    assert not any("moe_forward" in name for name in targets)
    assert programs.experts[0].name == "layers.0.experts"


def test_experts_of_another_form_are_refused() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    ids = capture.input("ids", capture.tokens, 2, dtype=torch.int32)
    w = capture.input("w", 4, 8, 8)
    top = capture.input("top", capture.tokens, 2)
    out = capture.call(torch.empty_like, x, like=x)
    given = (out, x, w, w, None, None, top, ids, True, "silu", "vec")
    capture.call(torch.ops._C.cpu_fused_moe, *given)
    gm = capture.module(out)
    with pytest.raises(UnsupportedError, match="applied before the experts"):
        build_programs(gm, AFDConfig(), credits=2)


def test_two_dynamic_sizes_are_refused() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    other = Capture().tokens
    node = capture.graph.placeholder("s9")
    node.meta["example_value"] = other * 1
    source = ConstantSource("second")
    symbol = capture.env.create_symbol(9, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    node.meta["example_value"] = capture.env.create_symintnode(symbol, hint=9, source=source)
    with pytest.raises(UnsupportedError, match="more than one dynamic size"):
        split_stages(capture.module(x).graph)


def test_a_size_that_is_no_multiple_of_the_tokens_is_refused() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 8)
    with capture.mode:
        longer = torch.empty((capture.tokens + 1, 8))
    node = capture.call(torch.nn.functional.pad, x, (0, 0, 0, 1), like=longer)
    with pytest.raises(UnsupportedError, match="no multiple of the tokens"):
        split_stages(capture.module(node).graph)


def test_padding_rows_come_back_as_zeros() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens, 3)
    double = capture.call(operator.mul, x, 2.0, like=x)
    gm = capture.module(double)
    two = fx.GraphModule(torch.nn.Module(), split_stages(gm.graph))
    rows = torch.arange(18.0).view(6, 3)
    (out,) = two.forward(rows, 2, 3)
    assert torch.equal(out[:5], rows[:5] * 2)
    assert not out[5:].any()


def test_a_size_is_no_memory() -> None:
    capture = Capture()
    size = capture.graph.placeholder("s0")
    size.meta["example_value"] = capture.tokens
    a, b = (capture.input(name, capture.tokens, 4) for name in "ab")
    part = capture.call(torch.narrow, a, 0, 0, size)
    capture.call(operator.setitem, part, 0, 1.0)
    other = capture.call(torch.narrow, b, 0, 0, size)
    capture.module(part, other)
    assert other not in hidden_needs(capture.graph)


def test_quantised_experts_are_not_taken_for_a_model_without_experts() -> None:
    def model() -> fx.GraphModule:
        capture = Capture()
        x = capture.input("x", capture.tokens, 16)
        return capture.module(capture.call(torch.ops.vllm.fused_experts_cpu, x, like=x))

    with pytest.raises(UnsupportedError, match="fused_experts_cpu computes experts in a form"):
        build_programs(model(), AFDConfig(), credits=2)
    programs = build_programs(model(), AFDConfig(on_unsupported="fallback"), credits=2)
    assert programs.report.unsplit_reason == "experts_not_matched"
