"""The CAM operators on CPU, with the semantics that matter and the names of the real ones.

A :class:`World` is one HCCL group. Every rank runs on its own thread and calls
``torch.ops.<package>.<operator>`` like on the device:

* each attention rank has *one slot* in the window of every FFN rank and *one statistics area*;
  dispatch_send writes them and returns, whatever they held: a second dispatch before the receive
  corrupts the first;
* dispatch_recv waits until all ranks of a replica have dispatched, serves replicas in turn, and
  returns *chunks*: an interval of experts, as many as its capacity takes;
* combine_recv waits for as many rows as the statistics of the *last* dispatch announce;
* both receives fail after ``patience_s``, the way a device gives up.

Rows are grouped by local expert, then by source rank. Int8 rows carry one scale each.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from afd_graph.lowering.ascend import ir_table
from afd_graph.lowering.ascend.ir_table import PACKAGES, Operator, info_length
from afd_graph.lowering.ascend.register import register

_names = itertools.count()
worlds: dict[str, World] = {}


@dataclass
class _Slot:
    """The window of one attention rank at one FFN rank."""

    layer: int
    rows: torch.Tensor
    scales: torch.Tensor
    experts: torch.Tensor  # local expert of each row
    places: torch.Tensor  # token * top_k + choice of each row
    shared: torch.Tensor
    shared_scales: torch.Tensor
    shared_start: int


@dataclass
class _Statistics:
    """What combine_recv knows of the last dispatch."""

    serial: int
    rows: int
    shared_rows: int


@dataclass
class _Answers:
    """Where combine_send puts rows for one attention rank."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    shared: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class World:
    """One group: its windows, and what was seen in it.

    Attributes:
        log: (operator, rank, layer, rows) in the order of the calls.
        overwritten: dispatches that found their slot unread.
    """

    attention_ranks: int
    ffn_ranks: int
    tp_size: int = 1
    patience_s: float = 20.0
    chunk_rows: int = 1 << 30
    name: str = ""
    log: list[tuple[str, int, int, int]] = field(default_factory=list)
    overwritten: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or f"emulated{next(_names)}"
        self.changed = threading.Condition()
        self.slots: dict[tuple[int, int], _Slot] = {}
        self.statistics: dict[int, _Statistics] = {}
        self.answers = {rank: _Answers() for rank in range(self.attention_ranks)}
        self.begun: dict[int, tuple[int, list[_Slot], int]] = {}
        self.sent: dict[tuple[int, tuple[int, ...]], tuple[list[_Slot], bool]] = {}
        self.turn: dict[int, int] = {}
        self.serials = itertools.count()
        worlds[self.name] = self

    def wait_for(self, ready: Callable[[], Any], what: str) -> Any:
        """Block until ``ready()`` is true; fails the way a device gives up."""
        if not self.changed.wait_for(ready, self.patience_s):
            raise RuntimeError(f"507014: {what} timed out after {self.patience_s:g} s")
        return ready()


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


class _Call:
    """The arguments of one call under the names of the CANN operator, checked."""

    def __init__(self, operator: Operator, arguments: tuple[Any, ...]) -> None:
        given = dict(zip(operator.argument_names, arguments, strict=True))
        self.tensors = {ir: given[argument] for argument, ir in operator.inputs}
        self.sizes = {ir: given[argument] for argument, ir in operator.attributes if argument}
        package = PACKAGES[operator.name.split("::")[0]]
        self.package = package
        self.hidden, self.top_k = self.sizes["hiddenSize"], self.sizes["topk"]
        self.experts = self.sizes["routeExpertNumPerMoe"]
        self.world = worlds[self.sizes["hccl_group_name"]]
        a, f = self.sizes["attnRankNum"], self.sizes["moeRankNum"]
        _expect((a, f) == (self.world.attention_ranks, self.world.ffn_ranks), "ranks differ")
        _expect(self.sizes["worldSize"] == a + f, "world_size must equal attn + moe ranks")
        _expect(1 <= self.top_k <= f * self.experts, "top_k out of range")
        first = next(iter(self.tensors.values()))
        _expect(first.dtype in package.dtypes, f"input must have one of {package.dtypes}")
        for name, tensor in self.tensors.items():
            _expect(tensor.is_contiguous(), f"{name} must be contiguous")
            _expect(not tensor.requires_grad, f"{name}: inference only")
        _expect(self.tensors["commArgs"].dtype == torch.float16, "comm_args must be float16")
        if "tpSize" in self.sizes:
            _expect(self.sizes["tpSize"] == self.world.tp_size, "tp_size differs")

    def check_routing(self) -> torch.Tensor:
        ids = self.tensors["expertIds"]
        rows = self.sizes["batchSize"]
        _expect(ids.dtype == torch.int32, "expert_ids must be int32")
        _expect(tuple(ids.shape) == (rows, self.top_k), "expert_ids must be [batch_size, top_k]")
        _expect(bool((ids >= 0).all()), "expert_ids must be valid")
        _expect(int(ids.max()) < self.experts * self.world.ffn_ranks, "expert_ids must be valid")
        return ids


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and one scale each: ``amax / 127``."""
    scale = rows.float().abs().amax(dim=1).clamp_min(1e-30) / 127
    return (rows.float() / scale[:, None]).round().to(torch.int8), scale


def _dispatch_send(call: _Call) -> torch.Tensor:
    x, ids, world = call.tensors["x"], call.check_routing(), call.world
    rows, rank, layer = call.sizes["batchSize"], call.sizes["attnRankId"], call.sizes["layerIndex"]
    _expect(tuple(x.shape) == (rows, call.hidden), "x must be [batch_size, hidden_size]")
    limit = call.sizes["maxSeqLen"] // world.tp_size
    _expect(1 <= rows <= limit, "batch_size must be in [1, max_seq_len / tp_size]")
    _expect(0 <= rank < world.attention_ranks, "attn_rank_id must be an attention rank")
    _expect(layer >= 0, "layer_index must be nonnegative")
    if call.sizes["dynamicQuant"]:
        data, scales = quantised(x)
    else:
        data, scales = x.clone(), torch.ones(rows)
    flat = ids.reshape(-1).long()
    shared = call.package.carries_shared
    split = [rows // world.ffn_ranks + (i < rows % world.ffn_ranks) for i in range(world.ffn_ranks)]
    with world.changed:
        for ffn in range(world.ffn_ranks):
            places = (flat // call.experts == ffn).nonzero()[:, 0]
            tokens = places // call.top_k
            start = sum(split[:ffn])
            part = slice(start, start + split[ffn]) if shared else slice(0, 0)
            world.overwritten += (rank, ffn) in world.slots
            world.slots[rank, ffn] = _Slot(
                layer,
                data[tokens],
                scales[tokens],
                flat[places] % call.experts,
                places,
                data[part],
                scales[part],
                start,
            )
        world.statistics[rank] = _Statistics(
            next(world.serials), rows * call.top_k, rows if shared else 0
        )
        world.log.append(("dispatch", rank, layer, rows))
        world.changed.notify_all()
    return torch.zeros(1, dtype=torch.int8)


def _ready_replica(world: World, ffn: int) -> int | None:
    replicas = world.attention_ranks // world.tp_size
    for step in range(replicas):
        replica = (world.turn.get(ffn, 0) + step) % replicas
        ranks = range(replica * world.tp_size, (replica + 1) * world.tp_size)
        if all((rank, ffn) in world.slots for rank in ranks):
            return replica
    return None


def _dispatch_recv(call: _Call) -> tuple[torch.Tensor, ...] | list[torch.Tensor]:
    world, anchor = call.world, call.tensors["x"]
    ffn = call.sizes["moeRankId"] - world.attention_ranks
    _expect(0 <= ffn < world.ffn_ranks, "moe_rank_id must be an FFN rank")
    _expect(tuple(anchor.shape) == (1,), "x must be a one-element anchor")
    with world.changed:
        if ffn not in world.begun:
            world.wait_for(lambda: _ready_replica(world, ffn) is not None, "dispatch_recv")
            replica = _ready_replica(world, ffn)
            assert replica is not None
            ranks = range(replica * world.tp_size, (replica + 1) * world.tp_size)
            world.begun[ffn] = (replica, [world.slots.pop((rank, ffn)) for rank in ranks], 0)
            world.turn[ffn] = replica + 1
        replica, slots, start = world.begun[ffn]
        capacity = min(ir_table.capacity(), world.chunk_rows)
        counts = torch.stack([torch.bincount(s.experts, minlength=call.experts) for s in slots])
        stop, taken = start, 0
        while stop < call.experts and taken + int(counts[:, stop].sum()) <= capacity:
            taken += int(counts[:, stop].sum())
            stop += 1
        _expect(stop > start, "the rows of one expert do not fit a chunk")
        first = start == 0
        if stop == call.experts:
            del world.begun[ffn]
        else:
            world.begun[ffn] = (replica, slots, stop)
        world.log.append(("recv", world.attention_ranks + ffn, slots[0].layer, taken))
    return _chunk(call, slots, replica, start, stop, counts, first)


def _chunk(
    call: _Call,
    slots: list[_Slot],
    replica: int,
    start: int,
    stop: int,
    counts: torch.Tensor,
    first: bool,
) -> tuple[torch.Tensor, ...] | list[torch.Tensor]:
    world, anchor = call.world, call.tensors["x"]
    quant = call.sizes["dynamicQuant"]
    operator = call.package.dispatch_recv
    given = {argument: call.sizes[ir] for argument, ir in operator.attributes if argument}
    outputs = list(operator.shapes(x=anchor, **given))
    for output in outputs:  # what was not written holds anything
        output.fill_(77)
    rows, scales = outputs[0], outputs[2 if call.package.carries_shared else 1]
    info, expert_counts = outputs[-3:-1] if call.package.carries_shared else outputs[-2:]
    position = 0
    for expert in range(start, stop):
        for slot in slots:
            mine = slot.experts == expert
            n = int(mine.sum())
            rows[position : position + n] = slot.rows[mine]
            if quant:
                scales[position : position + n] = slot.scales[mine]
            position += n
    expert_counts.zero_()
    expert_counts[start:stop] = counts[:, start:stop].sum(dim=0)
    prefixes = counts.sum(dim=1).cumsum(0)
    head = [int(counts.sum()), replica * world.tp_size, slots[0].layer, start, stop - 1]
    info.copy_(torch.cat([torch.tensor(head), prefixes, counts.t().reshape(-1)]))
    _expect(info.numel() == info_length(world.tp_size, call.experts), "info length")
    if call.package.carries_shared:
        n = 0
        for slot in slots if first else []:
            outputs[1][n : n + len(slot.shared)] = slot.shared
            if quant:
                outputs[3][n : n + len(slot.shared)] = slot.shared_scales
            n += len(slot.shared)
        outputs[-1].fill_(n)
    with world.changed:
        world.sent[call.sizes["moeRankId"], tuple(info.tolist())] = (slots, first)
    return outputs if not call.package.carries_shared else tuple(outputs)


def _combine_send(call: _Call) -> torch.Tensor:
    world, rank = call.world, call.sizes["moeRankId"]
    x, info = call.tensors["expandX"], call.tensors["batchInfo"]
    _expect(x.dim() == 2 and x.shape[1] == call.hidden, "expand_x must be [rows, hidden_size]")
    _expect(x.dtype in call.package.dtypes, "expand_x must be floating point")
    key = (rank, tuple(info.tolist()))
    _expect(key in world.sent, "batch_info is not what dispatch_recv returned")
    slots, first = world.sent.pop(key)
    start, stop = int(info[3]), int(info[4]) + 1
    position = 0
    with world.changed:
        for expert in range(start, stop):
            for i, slot in enumerate(slots):
                places = slot.places[slot.experts == expert].tolist()
                answers = world.answers[int(info[1]) + i]
                for place in places:
                    answers.rows[place] = x[position].clone()
                    position += 1
        if call.package.carries_shared and first:
            position = 0
            for i, slot in enumerate(slots):
                answers = world.answers[int(info[1]) + i]
                for row in range(len(slot.shared)):
                    answers.shared[slot.shared_start + row] = call.tensors["expandXShared"][
                        position
                    ].clone()
                    position += 1
        world.log.append(("combine", rank, int(info[2]), position))
        world.changed.notify_all()
    return torch.zeros(1, dtype=torch.int8)


def _combine_recv(call: _Call) -> torch.Tensor:
    world, rank = call.world, call.sizes["attnRankId"]
    anchor, weights = call.tensors["expandX"], call.tensors["expertScales"]
    call.check_routing()
    rows = call.sizes["batchSize"]
    _expect(tuple(anchor.shape) == (1,), "expand_x must be a one-element anchor")
    _expect(weights.dtype == torch.float32, "expert_scales must be float32")
    _expect(tuple(weights.shape) == (rows, call.top_k), "expert_scales must be [batch, top_k]")
    with world.changed:
        _expect(rank in world.statistics, "combine_recv without a dispatch")
        statistics, answers = world.statistics[rank], world.answers[rank]
        world.wait_for(
            lambda: (
                len(answers.rows) >= statistics.rows
                and len(answers.shared) >= statistics.shared_rows
            ),
            "combine_recv",
        )
        total = torch.zeros(rows, call.hidden)
        for k in range(call.top_k):
            part = torch.stack([answers.rows[t * call.top_k + k].float() for t in range(rows)])
            total += weights[:, k : k + 1] * part
        if call.package.carries_shared:
            total += torch.stack([answers.shared[t].float() for t in range(rows)])
        world.answers[rank] = _Answers()
        world.log.append(("receive", rank, -1, rows))
    return total.to(anchor.dtype)


_PHASES = {
    "dispatch_send": _dispatch_send,
    "dispatch_recv": _dispatch_recv,
    "combine_send": _combine_send,
    "combine_recv": _combine_recv,
}
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give the operators of both packages their kernels on CPU; once a process."""
    if _libraries:
        return
    for package in PACKAGES.values():
        register(package)
        library = torch.library.Library(package.name, "FRAGMENT")
        _libraries.append(library)
        for phase, function in _PHASES.items():
            operator = getattr(package, phase)
            library.impl(operator.name.split("::")[1], _kernel(operator, function), "CPU")


def _kernel(operator: Operator, function: Callable[[_Call], Any]) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        return function(_Call(operator, arguments))

    return kernel
