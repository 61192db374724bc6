"""CANN's own exchange operators on the CPU, with the semantics that matter.

A :class:`World` is one HCCL group. The schedule context of a rank is a tensor whose first entries
are its group's and its own number; the windows lie in the world. As on the device

* a send writes rows for every choice of a token, and one more for the shared expert, to the FFN
  rank that the table names, and returns at once;
* batching waits for all attention ranks, and returns the rows ordered by local expert;
* an answer goes to the place of its token and choice;
* combine waits until *all* places of the window are filled, then empties it.

A shared expert lives on several ranks: a token takes the copy that its number selects.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

PATIENCE_S = 300.0


class World:
    """The windows of one group."""

    def __init__(self, attention_ranks: int, ffn_ranks: int) -> None:
        self.number = next(_numbers)
        self.name = f"cann{self.number}"
        self.attention_ranks, self.ffn_ranks = attention_ranks, ffn_ranks
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        self.answers: dict[int, torch.Tensor] = {}
        self.filled: dict[int, torch.Tensor] = {}
        _worlds[self.number] = _by_name[self.name] = self

    def context(self, rank: int) -> torch.Tensor:
        """The schedule context of a rank."""
        context = torch.zeros(1024, dtype=torch.int8)
        context[0], context[1] = self.number, rank
        return context

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        if not self.changed.wait_for(ready, PATIENCE_S):
            raise RuntimeError(f"507014: {what} timed out")


_numbers = itertools.count(1)
_worlds: dict[int, World] = {}
_by_name: dict[str, World] = {}


def attention_to_ffn(
    x: torch.Tensor,
    session_id: torch.Tensor,
    micro_batch_id: torch.Tensor,
    layer_id: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_rank_table: torch.Tensor,
    group: str,
    world_size: int,
    info_shape: list[int],
    data_shape: list[int],
    answer_shape: list[int],
    moe_expert_num: int,
    *,
    quant_mode: int = 0,
    ffn_start_rank_id: int = 0,
    **_: Any,
) -> None:
    world = _by_name[group]
    session, layer = int(session_id), int(layer_id)
    _, rows, width = x.shape
    slots = expert_ids.shape[2] + 1
    assert int(micro_batch_id) == 0
    assert quant_mode == 0
    assert (world_size, ffn_start_rank_id) == (
        world.attention_ranks + world.ffn_ranks,
        world.attention_ranks,
    )
    assert info_shape == [world.attention_ranks, 1, 2 + rows * slots]
    assert data_shape == [world.attention_ranks, 1, rows, slots, width]
    assert answer_shape == [1, rows, slots]
    assert expert_rank_table.shape[1] == moe_expert_num + 1
    shared = torch.full((rows, 1), moe_expert_num)
    chosen = torch.cat([expert_ids[0].long(), shared], 1)
    for_rank: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(world.ffn_ranks)}
    for token, offset in itertools.product(range(rows), range(slots)):
        copies, *pairs = expert_rank_table[layer, chosen[token, offset]].tolist()
        rank, local = pairs[2 * (token % copies) :][:2]
        for_rank[rank].append((local, session, token, offset, x[0, token]))
    with world.changed:
        assert session not in world.filled, "a dispatch before the last one was received"
        world.answers[session] = x.new_empty(rows, slots, width)
        world.filled[session] = torch.zeros(rows, slots, dtype=torch.bool)
        for rank, items in for_rank.items():
            world.sent[rank, session] = items
        world.changed.notify_all()


def ffn_worker_batching(
    schedule_context: torch.Tensor,
    expert_num: int,
    max_out_shape: list[int],
    *,
    token_dtype: int = 0,
    need_schedule: int = 0,
    layer_num: int = 0,
) -> tuple[torch.Tensor, ...]:
    world, rank = _of(schedule_context)
    rank -= world.attention_ranks
    sessions = range(world.attention_ranks)
    with world.changed:
        world.wait_for(lambda: all((rank, s) in world.sent for s in sessions), "batching")
        items = [item for s in sessions for item in world.sent.pop((rank, s))]
    items.sort(key=lambda item: item[0])
    room, width = max_out_shape[0] * max_out_shape[1] * max_out_shape[2], max_out_shape[3]
    assert need_schedule == 1
    assert len(items) <= room
    y = torch.full((room, width), float("nan"))  # fp32, which the tests compare in
    numbers = torch.full((4, room), -1, dtype=torch.int32)
    counts: dict[int, int] = {}
    for i, (local, session, token, offset, row) in enumerate(items):
        assert 0 <= local < expert_num
        y[i] = row
        numbers[:, i] = torch.tensor([session, 0, token, offset])
        counts[local] = counts.get(local, 0) + 1
    pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
    for i, pair in enumerate(counts.items()):
        pairs[i] = torch.tensor(pair)
    return y, pairs, *numbers, torch.zeros(room), torch.tensor([len(items)])


def ffn_to_attention(
    x: torch.Tensor,
    session_ids: torch.Tensor,
    micro_batch_ids: torch.Tensor,
    token_ids: torch.Tensor,
    expert_offsets: torch.Tensor,
    actual_token_num: torch.Tensor,
    group: str,
    world_size: int,
    info_shape: list[int],
    data_shape: list[int],
    *,
    attn_rank_table: torch.Tensor | None = None,
) -> None:
    world = _by_name[group]
    assert attn_rank_table is not None
    assert attn_rank_table.tolist() == list(range(world.attention_ranks))
    with world.changed:
        for i in range(int(actual_token_num)):
            session, token, offset = (
                int(ids[i]) for ids in (session_ids, token_ids, expert_offsets)
            )
            assert not world.filled[session][token, offset]
            world.answers[session][token, offset] = x[i]
            world.filled[session][token, offset] = True
        world.changed.notify_all()


def attention_worker_combine(
    schedule_context: torch.Tensor,
    expert_scales: torch.Tensor,
    layer_id: torch.Tensor,
    hidden_size: int,
    *,
    token_dtype: int = 0,
    need_schedule: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    world, session = _of(schedule_context)
    assert need_schedule == 1
    with world.changed:
        world.wait_for(
            lambda: session in world.filled and bool(world.filled[session].all()), "combine"
        )
        answers = world.answers.pop(session)
        del world.filled[session]
    assert expert_scales.shape == (answers.shape[0], answers.shape[1] - 1)
    routed = (answers[:, :-1] * expert_scales[..., None]).sum(1)
    return routed + answers[:, -1], layer_id + 1


def _of(schedule_context: torch.Tensor) -> tuple[World, int]:
    assert schedule_context.shape == (1024,)
    return _worlds[int(schedule_context[0])], int(schedule_context[1])


def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor,
    split_item: int,
    group_type: int,
    group_list_type: int,
) -> list[torch.Tensor]:
    """``npu_grouped_matmul`` over counts; rows behind the last group mean nothing."""
    assert (split_item, group_type, group_list_type) == (3, 0, 1)
    out = torch.full((len(x[0]), weight[0].shape[2]), float("nan"))
    start = 0
    for expert, count in enumerate(group_list.tolist()):
        out[start : start + count] = x[0][start : start + count] @ weight[0][expert]
        start += count
    return [out]


def install() -> None:
    """Register the kernels; the operators must be defined."""
    library = torch.library.Library("npu", "FRAGMENT")
    for name, kernel in (
        ("npu_attention_to_ffn", attention_to_ffn),
        ("npu_ffn_worker_batching", ffn_worker_batching),
        ("npu_ffn_to_attention", ffn_to_attention),
        ("npu_attention_worker_combine", attention_worker_combine),
        ("npu_grouped_matmul", grouped_matmul),
    ):
        library.impl(name, kernel, "CPU")
    _kept.append(library)


_kept: list[torch.library.Library] = []
