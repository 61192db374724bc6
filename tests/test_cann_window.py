"""The window that CANN's own operators exchange rows through: its size, its context, its peers."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.connectors.cann_window import open_window

ROWS, TOP_K, HIDDEN = 256, 6, 7168
SLOTS = TOP_K + 1


class ProcessGroup:
    """Notes what is registered."""

    def __init__(self) -> None:
        self.registered: tuple[int, list[int]] | None = None

    def _window_register_and_exchange(self, size: int, ranks: list[int]) -> None:
        self.registered = size, ranks

    def _get_window_mem(self) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.int8)


@pytest.fixture
def made(monkeypatch) -> dict[str, Any]:
    """What torch_npu is asked to make a context of."""
    asked: dict[str, Any] = {}

    def create_schedule_context_holder(**sizes: int) -> Any:
        asked.update(sizes)
        return types.SimpleNamespace(
            get_schedule_context_tensor=lambda: torch.zeros(1024, dtype=torch.int8),
            stop_schedule=lambda: asked.update(stopped=True),
        )

    module: Any = types.ModuleType("torch_npu._afd")
    module.create_schedule_context_holder = create_schedule_context_holder
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setitem(sys.modules, "torch_npu._afd", module)
    return asked


def opened(rank: int, quant: bool, process_group: ProcessGroup) -> Any:
    group = CamGroup(1, 1, rank, ROWS, dynamic_quant=quant, operators="cann")
    return open_window(
        group,
        process_group,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        num_experts=6,
        dtype=torch.bfloat16,
    )


def aligned(size: int) -> int:
    return (size + 511) // 512 * 512


@pytest.mark.parametrize("quant", [False, True])
def test_window_of_an_attention_rank(made, quant):
    process_group = ProcessGroup()
    window = opened(0, quant, process_group)
    answers = 2 * ROWS * SLOTS * HIDDEN  # never quantised
    assert process_group.registered == (aligned(4 * ROWS * SLOTS) + answers, [1])
    assert made["schedule_mode"] == 1
    assert made["attention_window_size"] == process_group.registered[0]
    assert not any(name.startswith("ffn_window") for name in made)
    window.close()
    assert made["stopped"]


@pytest.mark.parametrize(("quant", "row"), [(False, 2 * HIDDEN), (True, aligned(HIDDEN + 4))])
def test_window_of_an_ffn_rank(made, quant, row):
    process_group = ProcessGroup()
    opened(1, quant, process_group)
    size = aligned(4 * (2 + ROWS * SLOTS)) + aligned(ROWS * SLOTS * row)
    assert process_group.registered == (size, [0])
    assert {name: made[name] for name in made if "window" not in name} == {
        "schedule_mode": 0,
        "session_num": 1,
        "micro_batch_num": 1,
        "micro_batch_size": ROWS,
        "selected_expert_num": SLOTS,
        "expert_num": 7,
        "attn_to_ffn_token_size": row,
        "ffn_to_attn_token_size": 2 * HIDDEN,
    }
