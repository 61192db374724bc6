"""CANN's own operators as the form of the exchange: lowered, checked, refused where they cannot."""

from __future__ import annotations

import types
import warnings

import loader
import pytest
import session
import torch
from ge_graph import GeGraph, faults

import afd_graph
import afd_graph.connectors.cam
from afd_graph import AFDConfig
from afd_graph.errors import ConfigError
from afd_graph.lowering.ascend.ir_table import CANN
from tiny_models import VOCABULARY, deepseek_v2

warnings.filterwarnings("ignore")
torchair = session.start()
LAYERS = 2


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """A window of nobody's memory."""

    def open_window(*_, **__):
        return types.SimpleNamespace(
            context=torch.zeros(1024, dtype=torch.int8), close=lambda: None
        )

    monkeypatch.setattr(afd_graph.connectors.cam, "open_window", open_window)
    monkeypatch.setattr(afd_graph.connectors.cam, "missing_kernel", lambda *_: None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_programs_lower_and_keep_the_rules(dynamic):
    network = deepseek_v2(num_hidden_layers=1 + LAYERS, first_k_dense_replace=1).bfloat16()
    programs = session.lowered(
        torchair,
        lambda ids: network(input_ids=ids, use_cache=False).logits,
        torch.randint(0, VOCABULARY, (1, 12)),
        dynamic=dynamic,
        operators="cann",
        ranks=(1, 2, 1),
    )
    unsplit, split = (GeGraph(program.ge()) for program in programs)
    assert faults(unsplit) == []
    assert faults(split) == []
    assert [(e.layer, e.stage) for e in split.exchanges()] == [
        (layer, stage) for layer in range(LAYERS) for stage in (0, 1)
    ]
