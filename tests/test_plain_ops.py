"""Rewrites to operators that torchair converts: equal in value, and nothing else is left."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

import afd_graph.attention  # noqa: F401  (registers the operator)
from afd_graph.lowering.ascend.plain_ops import lower_to_plain_ops

aten = torch.ops.aten


def check(target, *arguments, tolerance=1e-6) -> set[object]:
    """Rewrite a graph of one operator and compare; returns the operators of the new graph."""
    graph = fx.Graph()
    mode = torch._subclasses.FakeTensorMode()

    def given(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(value)
        return node

    with mode:
        graph.output(graph.call_function(target, tuple(given(value) for value in arguments)))
    assert lower_to_plain_ops(graph) > 0
    gm = fx.GraphModule(torch.nn.Module(), graph)
    got = gm(*(value for value in arguments if isinstance(value, torch.Tensor)))
    expected = target(*arguments)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert (got - expected).abs().max() <= tolerance
    return {node.target for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("order", [(2, 0), (3,), (0, 1, 2, 3)])
def test_index_copy(dim, order):
    base = torch.arange(64.0).view(4, 4, 4)
    index = torch.tensor(order)
    source = -torch.rand(base.index_select(dim, index).shape)
    used = check(aten.index_copy.default, base, dim, index, source, tolerance=0)
    assert aten.index_copy.default not in used


def test_index_copy_of_one_dimension():
    check(aten.index_copy.default, torch.zeros(5), 0, torch.tensor([4, 1]), torch.ones(2))


def masks(queries: int, keys: int):
    visible = torch.rand(2, 1, queries, keys) > 0.3
    visible[0, 0, 1] = False  # a row that sees nothing is zero
    yield None
    yield visible
    yield torch.zeros(2, 1, queries, keys).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (1, 4)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention(queries, keys, heads, scale):
    torch.manual_seed(0)
    query = torch.randn(2, heads[0], queries, 6)
    key, value = torch.randn(2, heads[1], keys, 6), torch.randn(2, heads[1], keys, 5)
    variants = [(mask, False) for mask in masks(max(queries, 2), keys) if queries > 1]
    for mask, causal in [*variants, (None, True), (None, False)]:
        used = check(
            torch.ops.afd.attention.default,
            *(query, key, value, mask, causal, scale, heads[0] != heads[1]),
            tolerance=2e-6,
        )
        assert torch.ops.afd.attention.default not in used


def test_views_keep_their_values():
    for shape in itertools.permutations((2, 3, 4)):
        used = check(aten.view.default, torch.randn(24), list(shape), tolerance=0)
        assert used == {aten.reshape.default}
