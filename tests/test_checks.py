"""The run-time checks of what the compiler takes for granted: ``check_values=True``."""

from __future__ import annotations

import pytest
import torch

from afd_graph import AFDBackend, AFDConfig, AFDError
from afd_graph.checks import _library  # noqa: F401  (registers the operators)
from tiny_models import deepseek_v2


def run(mask: torch.Tensor | None, **options: object) -> None:
    torch._dynamo.reset()
    model = deepseek_v2()
    with torch.no_grad(), AFDBackend(AFDConfig(check_values=True, **options)) as backend:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        ids = torch.arange(8).view(1, 8)
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        got = compiled(ids, attention_mask=mask, use_cache=False).logits
        assert backend.report().steps_split == 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_causal_mask_passes() -> None:
    run(None)
    run(torch.ones(1, 8, dtype=torch.long))


def test_an_assumed_mask_that_is_causal_passes() -> None:
    run(torch.ones(8, 8, dtype=torch.bool).tril().view(1, 1, 8, 8), assume_causal=True)


def test_an_assumed_mask_that_is_not_causal_is_an_error() -> None:
    with pytest.raises(AFDError, match=r"lets stage 0 see keys of stage 1.*assume_causal"):
        run(torch.ones(1, 1, 8, 8, dtype=torch.bool), assume_causal=True)


def test_padding_rows_must_be_zero() -> None:
    torch.ops.afd.check_zero(torch.zeros(2, 3), "node")
    with pytest.raises(AFDError, match=r"padding rows are not zero.*node=node"):
        torch.ops.afd.check_zero(torch.tensor([[0.0, 1.0]]), "node")


def test_float_masks_are_checked_too() -> None:
    torch.ops.afd.check_masked(torch.full((1, 1, 2, 2), -torch.inf), "mask")
    with pytest.raises(AFDError, match="node=mask"):
        torch.ops.afd.check_masked(torch.zeros(1, 1, 2, 2), "mask")
