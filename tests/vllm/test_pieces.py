"""What vLLM's own split makes of our graphs: which values cross, and in which order pieces run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from test_graphs import Capture, _two_layers, kernels  # noqa: F401
from torch import fx

from afd_graph.config import AFDConfig
from afd_graph.errors import AFDError, PassError
from afd_graph.vllm import artifact, piece_sizes, piecewise
from afd_graph.vllm.piece_inputs import keep_views_inside
from afd_graph.vllm.piece_order import (
    check_order,
    compare_orders,
    cut_order,
    executed_order,
    graph_order,
)
from afd_graph.vllm.programs import build_programs

# Stands for what runs between the pieces: it doubles its input, in place.
_library = torch.library.Library("afd_test", "DEF")
_library.define("cut(Tensor(a!) x) -> ()")


def _cut(x: torch.Tensor) -> None:
    x.mul_(2)


_library.impl("cut", _cut, "CPU")
torch.library.register_fake("afd_test::cut", lambda x: None, lib=_library)
CUT = "afd_test::cut"


def _splits(*names: str) -> Callable[[fx.Node], bool]:
    from vllm.compilation.partition_rules import should_split

    return lambda node: should_split(node, list(names))


def _valued(gm: fx.GraphModule) -> fx.GraphModule:
    from afd_graph import _compat

    _compat.propagate_example_values(gm)
    return gm


def _views_across() -> fx.GraphModule:
    """A buffer with views of four kinds; a later piece writes the buffer and reads the views."""
    capture = Capture()
    capture.graph.placeholder("s0").meta["example_value"] = capture.tokens
    x = capture.input("x", capture.tokens, 8)
    buffer = capture.call(torch.empty_like, x)
    low = capture.call(operator.getitem, buffer, (Ellipsis, slice(None, 4)))
    high = capture.call("narrow", buffer, -1, 4, 4)
    flat = capture.call("view", capture.call("unsqueeze", buffer, 1), -1, 8)
    halves = capture.call("chunk", buffer, 2, -1)
    last = capture.call(operator.getitem, halves, 1)
    doubled = capture.call(operator.mul, x, 3)
    capture.call(torch.ops.afd_test.cut, doubled)
    capture.call(operator.setitem, buffer, slice(None), doubled)
    scaled = capture.call(operator.imul, buffer, 2)
    capture.call(torch.ops.afd_test.cut, x)
    total = capture.call(operator.add, low, high)
    total = capture.call(operator.add, total, last)
    more = capture.call(operator.add, flat, scaled)
    return _valued(capture.module(total, more))


def _pieces(gm: fx.GraphModule, *names: str) -> tuple[fx.GraphModule, list[Any]]:
    from vllm.compilation.backends import split_graph

    return split_graph(gm, list(names))


def _shared_inputs(piece: fx.GraphModule) -> bool:
    memory = [
        node.meta["example_value"].untyped_storage()._cdata
        for node in piece.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["example_value"], torch.Tensor)
    ]
    return len(set(memory)) < len(memory)


def test_no_piece_gets_a_buffer_and_a_view_of_it() -> None:
    _, before = _pieces(_views_across(), CUT)
    assert any(_shared_inputs(item.graph) for item in before if not item.is_splitting_graph)

    gm = _views_across()
    assert keep_views_inside(gm.graph, _splits(CUT)) == 6
    gm.graph.lint()
    gm.recompile()
    cut, items = _pieces(gm, CUT)
    assert [item.is_splitting_graph for item in items] == [False, True, False, True, False]
    assert not any(_shared_inputs(item.graph) for item in items if not item.is_splitting_graph)
    x = torch.randn(5, 8)
    expected = _views_across()(5, x.clone())
    for got, want in zip(cut(5, x.clone()), expected, strict=True):
        assert torch.equal(got, want)


def test_no_size_crosses_from_piece_to_piece() -> None:
    capture = Capture()
    tokens = capture.graph.placeholder("s0")
    tokens.meta["example_value"] = capture.tokens
    x = capture.input("x", capture.tokens, 8)
    size = capture.call(torch.Size, [tokens, 4])
    buffer = capture.call(torch.empty, size, dtype=torch.float32)
    capture.call(torch.ops.afd_test.cut, x)
    low = capture.call(operator.getitem, x, (Ellipsis, slice(None, 4)))
    capture.call(operator.setitem, buffer, slice(None), low)
    gm = _valued(capture.module(capture.call("reshape", buffer, size)))
    keep_views_inside(gm.graph, _splits(CUT))
    gm.graph.lint()
    gm.recompile()
    cut, items = _pieces(gm, CUT)
    for item in items:
        for value in item.graph.graph.output_node().all_input_nodes:
            assert not isinstance(value.meta["example_value"], torch.Size)
    x = torch.randn(5, 8)
    (got,) = cut(5, x.clone())
    assert torch.equal(got, 2 * x[:, :4])


def _executed(gm: fx.GraphModule, names: list[str]) -> str:
    """vLLM's code for a graph whose pieces are compiled."""
    from vllm.compilation.codegen import generate_execution_code

    cut, items = _pieces(gm, *names)
    for item in items:
        if not item.is_splitting_graph:
            cut.__dict__[item.submod_name] = object()
    return generate_execution_code(cut)[0]


@pytest.fixture
def two_stages() -> tuple[fx.GraphModule, list[str]]:
    programs = build_programs(_two_layers(), AFDConfig(), credits=2)
    assert programs.split is not None
    piece_sizes.give_values(programs.split, programs.unsplit)
    return programs.split, [*piecewise.OURS, "afd::stage_mla_forward"]


def test_splitting_operators_run_in_the_order_of_the_schedule(two_stages: Any) -> None:
    gm, names = two_stages
    order = graph_order(gm.graph, _splits(*names))
    keep_views_inside(gm.graph, _splits(*names))
    gm.recompile()
    code = _executed(gm, names)
    check_order(code, order)
    cut, items = _pieces(gm, *names)
    compare_orders(cut_order(cut, items, _splits(*names)), order)
    short = [
        "piece" if isinstance(call, int) else f"{call[0].split('_')[-1]} {call[1][:2]}"
        for call in executed_order(code)
    ]
    assert short == [
        *("piece", "forward (0, 'layers.0.self_attn')", "piece", "dispatch (0, 0)"),
        *("piece", "forward (1, 'layers.0.self_attn')", "piece", "dispatch (0, 1)"),
        *("piece", "receive (0, 0)", "piece", "forward (0, 'layers.1.self_attn')"),
        *("piece", "dispatch (1, 0)", "piece", "receive (0, 1)"),
        *("piece", "forward (1, 'layers.1.self_attn')", "piece", "dispatch (1, 1)"),
        *("piece", "receive (1, 0)", "piece", "receive (1, 1)", "piece"),
    ]


def test_an_operator_inside_a_compiled_piece_is_refused(two_stages: Any) -> None:
    gm, names = two_stages
    order = graph_order(gm.graph, _splits(*names))
    inside = _executed(gm, [name for name in names if name != "afd::cam_receive"])
    with pytest.raises(PassError, match=r"run afd::stage_mla_forward.* has afd::cam_receive\(0, 0"):
        check_order(inside, order)


def test_another_order_is_refused(two_stages: Any) -> None:
    gm, names = two_stages
    order = graph_order(gm.graph, _splits(*names))
    code = _executed(gm, names)
    number = next(i for i, call in enumerate(order) if call[0] == "afd::cam_dispatch")
    other = [*order]
    other[number], other[number + 1] = other[number + 1], other[number]
    with pytest.raises(PassError, match=f"as splitting operator {number}"):
        check_order(code, other)
    with pytest.raises(PassError, match="has nothing"):
        check_order(code, order[:-1])
    with pytest.raises(PassError, match="no function"):
        check_order("def other(): pass", order)


def test_assumptions_about_the_lengths_are_refused() -> None:
    capture = Capture()
    x = capture.input("x", capture.tokens)
    first, second = piece_sizes.new_lengths(capture.module(x).graph, capture.tokens)
    p, a, b = (size.node.expr for size in (capture.tokens, first, second))
    inputs = [capture.tokens]
    true = [sympy.Le(a, p), sympy.Le(a, p - b), sympy.Ge(p - a, 0), sympy.Ne(p, 0)]
    piece_sizes.refuse_assumptions(true, inputs, (first, second))
    for condition in (sympy.Le(a, b), sympy.Ge(a + b, p), sympy.Ge(a, 2), sympy.Eq(a, b)):
        with pytest.raises(PassError, match="assumed"):
            piece_sizes.refuse_assumptions([condition], inputs, (first, second))


def test_a_damaged_or_foreign_entry_is_refused() -> None:
    made_by = {"source": "this"}
    stored = artifact.seal(b"never read", {"source": "other"})
    with pytest.raises(AFDError, match="source was other, is this"):
        piecewise.PiecewisePrograms.load(stored, made_by)
    damaged = stored[:-1] + bytes([stored[-1] ^ 1])
    with pytest.raises(AFDError, match="damaged"):
        piecewise.PiecewisePrograms.load(damaged, made_by)
