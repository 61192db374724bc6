"""Greedy decoding: the same tokens as the eager model, prompt and every step after it."""

from __future__ import annotations

import pytest
import torch
from harness import new_cache, relative_error
from torch import nn

from afd_graph import AFDBackend, AFDConfig
from afd_graph.connectors.local import LocalConnector
from afd_graph.lowering import eager
from afd_graph.passes.cache_writes import write_caches_in_place
from tiny_models import MODELS, VOCABULARY, deepseek_v3, mixtral

STEPS = 32
PROMPT = 7


class Noting(LocalConnector):
    """Notes which expert programs it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[str] = []

    def add_program(self, program) -> None:
        self.programs.append(program.key)
        super().add_program(program)


def greedy(
    model: nn.Module, cache, prompt: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens ``[batch, STEPS]``, and the logits that chose them."""
    ids, tokens, logits = prompt, [], []
    with torch.no_grad():
        for _ in range(STEPS):
            more = {} if mask is None else {"attention_mask": mask}
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, **more)
            logits.append(out.logits[:, -1])
            ids = logits[-1].argmax(-1, keepdim=True)
            tokens.append(ids)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return torch.cat(tokens, dim=1), logits


def left_padding(batch: int) -> torch.Tensor:
    mask = torch.ones(batch, PROMPT, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return mask


# Every pair of cache kind, batch, credits and padding occurs.
CASES = [
    ("dynamic", 1, 2, False),
    ("dynamic", 3, 1, True),
    ("static", 1, 1, False),
    ("static", 3, 2, True),
    ("dynamic", 3, 2, False),
]


@pytest.mark.parametrize(("kind", "batch", "credits", "padded"), CASES)
def test_greedy_tokens(kind, batch, credits, padded, monkeypatch):
    in_place = []

    def counted(graph):
        in_place.append(write_caches_in_place(graph))
        return in_place[-1]

    monkeypatch.setattr(eager, "write_caches_in_place", counted)
    # Values of a dense layer before the experts leave the prompt step as a view.
    model = mixtral() if padded else MODELS["v3"]()
    prompt = torch.randint(
        VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)
    )
    mask = left_padding(batch) if padded else None
    connector = Noting()
    with AFDBackend(AFDConfig(credits=credits), connector=connector) as backend:
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        expected, wanted = greedy(model, new_cache(kind, model.config), prompt, mask)
        got, logits = greedy(compiled, new_cache(kind, model.config), prompt, mask)
        report = backend.report()
    assert torch.equal(got, expected)
    assert max(map(relative_error, logits, wanted)) < 1e-5
    # Something was decided: no row repeats one token for ever.
    assert all(len(set(row.tolist())) > 3 for row in expected)

    if batch == 1:
        assert report.steps_split == 1
        assert dict(report.steps_unsplit) == {"single_token": STEPS - 1}
    else:
        assert report.steps_split == STEPS
        assert not report.steps_unsplit
        assert {graph.mode for graph in report.graphs} == {"sequence", "batch"}
    assert report.credits == credits
    assert report.order == ("receive-first" if credits == 1 else "send-first")

    # Key and value of every layer, in one stage and in two; the prompt's graph makes the caches.
    caches = 2 * model.config.num_hidden_layers if kind == "static" else 0
    written = [caches] if batch == 1 else [caches, 2 * caches]
    assert in_place[-len(written) :] == written

    # Prompt and decode graphs share the experts: one program a layer, whatever was captured.
    assert len(report.graphs) == 2  # the prompt's and the next token's
    assert [layer.index for layer in report.layers] == [0, 1]
    assert all(graph.layers == [0, 1] for graph in report.graphs)
    assert set(connector.programs) == {"layer 0", "layer 1"}


@pytest.mark.parametrize(
    ("cache", "lowering"),
    [("dynamic", "eager"), ("static", "eager"), ("static", "inductor")],
)
def test_generate_of_the_library(cache, lowering):
    """The library's own loop, over a compiled forward; a static cache brings the mask along."""
    model = deepseek_v3(num_hidden_layers=1 if lowering == "inductor" else 2)
    prompt = torch.randint(1, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    expected = model.generate(prompt, **options)
    with AFDBackend(AFDConfig(lowering=lowering)) as backend:
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=True)
        got = model.generate(prompt, **options)
        assert backend.report().steps_split == 8
        assert not backend.report().steps_unsplit
    assert torch.equal(got, expected)
