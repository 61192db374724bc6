"""Complex arithmetic as pairs of real tensors: equal values, nothing complex left, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from afd_graph.errors import UnsupportedError
from afd_graph.passes.lower_rope import lower_rope

X = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
ANGLES = torch.linspace(0.1, 2.0, 20).view(5, 4)


def rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    frequencies = torch.polar(torch.ones_like(angles), angles) * 1.5
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * frequencies.unsqueeze(0)).flatten(-2)


def sums(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    total = pairs[:, :, :2] + pairs[:, :, 2:4] - pairs[:, :, 1:3].transpose(0, 0)
    return torch.view_as_real(total)


def given_complex(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * frequencies)


def lowered(function, *inputs: torch.Tensor) -> tuple[fx.GraphModule, int]:
    gm = make_fx(function)(*inputs)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value
    gone = lower_rope(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm, gone


@pytest.mark.parametrize(
    ("function", "second"),
    [
        (rotary, ANGLES),
        (sums, ANGLES),
        (given_complex, torch.polar(torch.ones_like(ANGLES), ANGLES)),
    ],
)
def test_equal_in_value_without_complex_tensors(function, second):
    gm, gone = lowered(function, X, second)
    assert gone > 1
    torch.testing.assert_close(gm(X, second), function(X, second), rtol=1e-6, atol=1e-6)
    made = {node.target for node in gm.graph.nodes if node.op == "call_function"}
    aten = torch.ops.aten
    assert not made & {aten.polar.default, aten.view_as_complex.default, aten.complex.default}


def test_a_graph_without_complex_values_is_left_alone():
    gm, gone = lowered(lambda x: x * 2, X)
    assert gone == 0
    assert len(gm.graph.nodes) == 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a: torch.polar(torch.ones_like(a), a), "a complex value leaves the graph"),
        (
            lambda a: torch.view_as_real(torch.polar(a, a).exp()),
            r"aten.exp.default of a complex value has no rule.*cos and sin",
        ),
    ],
)
def test_refusals(function, message):
    with pytest.raises(UnsupportedError, match=message):
        lowered(function, ANGLES)
