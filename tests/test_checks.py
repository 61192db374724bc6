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


CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril().view(1, 1, 8, 8)
SEES_ONE_LATER_KEY = CAUSAL.clone()
SEES_ONE_LATER_KEY[0, 0, 3, 4] = True


def as_float(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (CAUSAL, True),
        (as_float(CAUSAL), True),
        (SEES_ONE_LATER_KEY, False),
        (as_float(SEES_ONE_LATER_KEY), False),
        (torch.zeros(1, 1, 8, 8), False),
    ],
)
def test_a_mask_from_outside_is_looked_at_in_every_step(mask: torch.Tensor, causal: bool) -> None:
    model = deepseek_v2()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad(), AFDBackend() as backend:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for given in (mask, as_float(CAUSAL) if mask.is_floating_point() else CAUSAL):
            expected = model(ids, attention_mask=given, use_cache=False).logits
            got = compiled(ids, attention_mask=given, use_cache=False).logits
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        report = backend.report()
    assert report.steps_split == (2 if causal else 1)
    assert dict(report.steps_unsplit) == ({} if causal else {"mask_not_causal": 1})


def test_padding_rows_must_be_zero() -> None:
    torch.ops.afd.check_zero(torch.zeros(2, 3), "node")
    with pytest.raises(AFDError, match=r"padding rows are not zero.*node=node"):
        torch.ops.afd.check_zero(torch.tensor([[0.0, 1.0]]), "node")


def test_float_masks_are_checked_too() -> None:
    torch.ops.afd.check_masked(torch.full((1, 1, 2, 2), -torch.inf), "mask")
    with pytest.raises(AFDError, match="node=mask"):
        torch.ops.afd.check_masked(torch.zeros(1, 1, 2, 2), "mask")
