"""Faults that users of this field have reported, by their number in the project's list.

Those that belong to one part are tested beside it, under the same names (``fault_<number>``).
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from afd_graph import AFDBackend, AFDConfig
from tiny_models import PlainModel, deepseek_v2

_library = torch.library.Library("afd_test", "DEF")
_library.define("add_norm_(Tensor(a!) x, Tensor(b!) residual) -> ()")


def _add_norm_(x: torch.Tensor, residual: torch.Tensor) -> None:
    residual.add_(x)
    x.copy_(torch.nn.functional.layer_norm(residual, residual.shape[-1:]))


_library.impl("add_norm_", _add_norm_, "CPU")
torch.library.register_fake("afd_test::add_norm_", lambda x, residual: None, lib=_library)


def fused_in_place(x: torch.Tensor) -> torch.Tensor:
    normed, residual = torch.zeros_like(x), x.clone()
    torch.ops.afd_test.add_norm_(normed, residual)
    return residual + 0.1 * normed


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def test_fault_8_a_fused_in_place_operator_on_a_stage_is_refused_by_name() -> None:
    model = PlainModel(mix=fused_in_place).eval()
    ids = torch.arange(12).view(1, 12)
    with (
        torch.no_grad(),
        AFDBackend(AFDConfig()) as backend,
        pytest.raises(BackendCompilerFailed, match=r"auto_functionalized.*cannot be split"),
    ):
        torch.compile(model, backend=backend, fullgraph=True)(ids)


def test_fault_8_a_fused_in_place_operator_runs_unsplit_and_is_counted() -> None:
    model = PlainModel(mix=fused_in_place).eval()
    ids = torch.arange(12).view(1, 12)
    config = AFDConfig(on_unsupported="fallback")
    with torch.no_grad(), AFDBackend(config) as backend:
        expected = model(ids)
        got = torch.compile(model, backend=backend, fullgraph=True)(ids)
        (reason,) = backend.report().steps_unsplit
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert "auto_functionalized" in reason


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("split", ["token", "none"])
def test_fault_10_no_dispatch_is_lost_by_a_lowering(lowering: str, split: str) -> None:
    model = deepseek_v2()
    crossings: list[tuple[str, int, int]] = []
    config = AFDConfig(lowering=lowering, split=split)
    with torch.no_grad(), AFDBackend(config) as backend:
        backend.channel.observers.append(
            lambda event: crossings.append((event.kind, event.layer, event.stage))
        )
        torch.compile(model, backend=backend, fullgraph=True)(
            torch.arange(10).view(1, 10), use_cache=False
        )
    stages = (0, 1) if split == "token" else (0,)
    for kind in ("dispatch", "receive"):
        made = [(layer, stage) for k, layer, stage in crossings if k == kind]
        assert made == [(layer, stage) for layer in (0, 1) for stage in stages]


def test_fault_13_the_scaling_factor_holds_where_experts_get_no_rows() -> None:
    """Two tokens leave most of eight experts empty; fp16 and a factor of 2.5."""
    reference = deepseek_v2(routed_scaling_factor=2.5)
    model = deepseek_v2(routed_scaling_factor=2.5).half()
    counts: list[int] = []
    with torch.no_grad(), AFDBackend(AFDConfig(connector_options={"threads": 1})) as backend:
        send = backend.channel.connector.send
        backend.channel.connector.send = lambda item: (counts.extend(item.counts), send(item))[1]
        ids = torch.tensor([[3, 5]])
        got = torch.compile(model, backend=backend, fullgraph=True)(ids, use_cache=False).logits
        eager = model(ids, use_cache=False).logits
        assert backend.report().steps_split == 1
    assert counts.count(0) >= 4 * 2 * 2, "every item leaves experts without rows"
    expected = reference(ids, use_cache=False).logits
    error = (got.float() - expected).abs().max()
    assert error <= 2 * (eager.float() - expected).abs().max() + 1e-3 * expected.abs().max()
