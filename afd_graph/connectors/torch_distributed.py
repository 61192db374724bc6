"""The experts on other ranks of one torch.distributed world; the attention side.

1. All ranks of both roles meet, compare their settings and measure their clocks
   (:mod:`torch_distributed_world`).
2. A program is announced to every FFN rank: the experts as a graph and their weights by name. The
   FFN ranks have loaded their shares from the checkpoint themselves (:mod:`afd_graph.ffn.server`).
3. A dispatch groups its rows by expert, and an FFN rank owns consecutive experts, so what it gets
   is a slice: sent from where it lies, while the receive of its answer is posted in the place
   where the answer belongs.
4. A thread per FFN rank waits for the answers (:mod:`torch_distributed_peer`); a receive waits
   for the threads. gloo moves the data on threads of its own, so transfers overlap with compute.
5. Anything wrong with a rank ends the world, on all ranks with the same cause
   (:mod:`torch_distributed_watch`). An error of the experts themselves concerns its item alone.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from afd_graph.connectors import row_quantisation as quantisation
from afd_graph.connectors.base import Connector, WorkItem
from afd_graph.connectors.refusals import is_known, misfit, no_credit, wrong_item
from afd_graph.connectors.torch_distributed_peer import Flight, Peer
from afd_graph.connectors.torch_distributed_watch import LOOK_S, Watch, cause
from afd_graph.connectors.torch_distributed_wire import (
    NO_PARENT_ROWS,
    NO_SHARED_ROWS,
    Header,
    Kind,
    Memory,
    Tag,
)
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.program import FFNProgram
from afd_graph.ffn.serialize import program_to_dict

if TYPE_CHECKING:
    from afd_graph.config import AFDConfig

_GRACE_S = 1.0  # how long a failed collective waits for another rank to say why


@dataclass(frozen=True)
class _Layer:
    key: str
    hidden_size: int
    dtype: torch.dtype
    num_experts: int


class _Slot:
    """One credit: memory for an item and for its answer."""

    def __init__(self, device: str) -> None:
        self.item, self.packed = Memory(device), Memory(device)
        self.answer, self.shared = Memory(device), Memory(device)
        self.flight: Flight | None = None


class TorchDistributedConnector(Connector):
    """Sends rows to the FFN ranks of a torch.distributed world.

    Args:
        world: the world, where it exists already (its tensor-parallel mesh was needed before);
            else the options of :class:`WorldConfig` make one.
        options: see :class:`WorldConfig`.

    Raises:
        ConfigError: impossible options, or this rank has the FFN role.
    """

    def __init__(self, world: World | None = None, **options: Any) -> None:
        if world is not None and options:
            raise ConfigError(
                f"options {sorted(options)} beside a world that exists",
                remedy="give them to the WorldConfig of the world",
            )
        self._world = world or World(WorldConfig(**options))
        if self._world.ranks.is_ffn(self._world.rank):
            raise ConfigError(
                f"{self._world.name} has the FFN role",
                remedy="run afd_graph.ffn.server.FFNServer on it, or afd-graph serve --role ffn",
            )
        config = self._world.config
        self.credits = config.credits
        self._slots = [_Slot(config.device) for _ in range(config.credits)]
        self._layers: dict[int, _Layer] = {}
        self._peers: list[Peer] = []
        self._watch: Watch | None = None
        self._changed = threading.Condition()
        self._next_sequence = 0
        self._by_ticket: dict[int, Flight] = {}
        self._prepared: torch.Tensor | None = None
        self._last_item: tuple[int | None, int | None] = None, None
        self._closed = False

    @property
    def world(self) -> World:
        """The world of both roles."""
        return self._world

    def configured(self, config: AFDConfig) -> None:
        """Meet the other ranks; the split policy is one of the settings that must agree."""
        self.open(config.split)

    def check_group(self, size: int) -> None:
        """Refuse a model whose tensor-parallel group is not a replica of the world."""
        expected = self._world.config.tp_size
        if size != expected:
            raise ConfigError(
                f"the model's tensor-parallel group has {size} ranks, the world's replicas "
                f"{expected}",
                remedy="parallelize the model over World.tp_mesh(), or set tp_size",
            )

    def open(self, policy: str = "") -> None:
        """Meet the other ranks and measure the FFN ranks' clocks; idempotent.

        Raises:
            ConfigError: settings differ; the same message on all ranks.
            ConnectorError: ranks did not come.
        """
        if self._watch is not None:
            return
        world = self._world
        world.agree(policy)
        self._watch = Watch(world)
        self._watch.listeners.append(self._notify)
        for rank in world.ranks.ffn_ranks:
            self._peers.append(Peer(world, rank, self._watch, self._take))
        for peer in self._peers:
            try:
                peer.measure_clock()
            except ConnectorError:
                raise
            except RuntimeError as error:
                self._lost(peer, error, None, None)

    def add_program(self, program: FFNProgram) -> None:
        """Announce the experts of one layer; their weights stay with the FFN ranks.

        The model's own expert weights are not read and may have no memory.
        """
        self.open()
        self._check_usable(program.layer, None)
        if is_known(program, self._layers.get(program.layer)):
            return
        self._world.ranks.expert_range(self._world.ranks.attention, program.num_experts)
        stored, tensors = program_to_dict(program)
        shapes = {
            key: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for key, tensor in tensors.items()
        }
        text = json.dumps({"program": stored, "weights": shapes}).encode()
        for peer in self._peers:
            try:
                peer.announce(program.layer, text)
            except ConnectorError:
                raise
            except RuntimeError as error:
                self._lost(peer, error, program.layer, None)
        self._layers[program.layer] = _Layer(
            program.key, program.hidden_size, program.dtype, program.num_experts
        )

    def row_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[rows, width]`` memory that the rows are sent from."""
        self._check_usable(None, None)
        self._prepared = self._free_slot().item.rows(rows, width, dtype)
        return self._prepared

    def send(self, item: WorkItem) -> int:
        """Start sending ``item``: to each FFN rank the rows of its experts, and how many."""
        self._check_usable(item.layer, item.stage)
        self._check_item(item)
        slot = self._free_slot()
        source = item.rows
        if source is not self._prepared:
            source = slot.item.like(source).copy_(source)
        self._prepared = None
        count, width = source.shape
        shared_answer = None
        if item.shared_rows is not None:
            shared_answer = slot.shared.like(item.shared_rows)
        flight = Flight(
            self._next_sequence,
            item,
            slot.answer.rows(count, width, source.dtype),
            shared_answer,
            {peer.rank for peer in self._peers},
        )
        self._next_sequence += 1
        self._last_item = item.layer, item.stage
        slot.flight = flight
        self._by_ticket[flight.sequence] = flight
        ranks = self._world.ranks
        quantised = self._world.config.dynamic_quant
        packed = slot.packed.bytes(quantisation.packed_size(count, width) if quantised else 0)
        shared_bounds = _even_bounds(
            0 if item.shared_rows is None else item.shared_rows.shape[0], len(self._peers)
        )
        begin = 0
        for index, peer in enumerate(self._peers):
            first, last = ranks.expert_range(peer.rank, len(item.counts))
            counts = item.counts[first:last]
            end = begin + sum(counts)
            rows = source[begin:end]
            if quantised and end > begin:
                bounds = (quantisation.packed_size(n, width) for n in (begin, end))
                part = packed[slice(*bounds)]
                quantisation.pack_rows(rows, part)
                rows = part
            shared = None
            if item.shared_rows is not None:
                bounds_of_shared = slice(shared_bounds[index], shared_bounds[index + 1])
                shared = item.shared_rows[bounds_of_shared].contiguous()
            header = Header(
                Kind.ITEM,
                flight.sequence,
                item.layer,
                item.stage,
                end - begin,
                NO_SHARED_ROWS if shared is None else shared.shape[0],
                NO_PARENT_ROWS if item.parent_rows is None else item.parent_rows,
                counts=counts,
            )
            answers = [(flight.rows[begin:end], Tag.ANSWER_ROWS)]
            if shared_answer is not None:
                answers.append((shared_answer[bounds_of_shared], Tag.ANSWER_SHARED))
            try:
                peer.send_item(flight, header, rows, shared, answers)
            except ConnectorError:
                raise
            except RuntimeError as error:
                self._lost(peer, error, item.layer, item.stage)
            begin = end
        return flight.sequence

    def wait(self, ticket: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the answer of ``ticket``, valid until :meth:`release`."""
        flight = self._by_ticket.get(ticket)
        if flight is None:
            self._check_usable(None, None)
            raise ConnectorError(f"ticket {ticket} is not outstanding: {sorted(self._by_ticket)}")
        item = flight.item
        if not self._wait_until(lambda: not flight.missing, timeout_s, item):
            assert self._watch is not None
            names = ", ".join(self._world.ranks.name(rank) for rank in sorted(flight.missing))
            self._watch.fail(
                f"{names} did not answer within {timeout_s:g} s",
                item.layer,
                item.stage,
                remedy="raise timeout_s if one expert layer may take longer",
            )
            self._watch.raise_failure(item.layer, item.stage)
        if flight.error is not None:
            raise ConnectorError(flight.error, layer=item.layer, stage=item.stage)
        return flight.rows, flight.shared_rows

    def ffn_times(self, ticket: int) -> tuple[int, int] | None:
        """When the first FFN rank began and the last one ended, on this process's clock."""
        flight = self._by_ticket[ticket]
        if flight.begin_ns is None or flight.end_ns is None:
            return None
        return flight.begin_ns, flight.end_ns

    def ffn_status(self) -> dict[int, dict[str, Any]]:
        """Of every FFN rank, by world rank, what it last told: see :class:`FFNStatus`."""
        if self._watch is None:
            return {}
        return {rank: self._watch.status_of(rank) for rank in self._world.ranks.ffn_ranks}

    def release(self, ticket: int) -> None:
        """Give the slot of ``ticket`` back, at once or when its answers have come."""
        flight = self._by_ticket.pop(ticket, None)
        if flight is None:
            return
        with self._changed:
            flight.abandoned = True
            if not flight.missing:
                self._free(flight)

    def abandon(self) -> None:
        """Forget every item; the FFN ranks still answer what they have, and nobody looks."""
        for ticket in list(self._by_ticket):
            self.release(ticket)

    def failure_behind(self, error: BaseException) -> ConnectorError | None:
        """The end of the world, when that is why ``error`` was raised outside the connector.

        A collective of the model fails with words of its own when a rank is gone. And when a step
        fails on one rank of a tensor-parallel replica, the others are in the middle of it and
        cannot go on: the world ends with what went wrong here.
        """
        if self._watch is None:
            return None
        if self._world.ranks.tp > 1 and self._watch.failure is None:
            what = f"a step failed on {self._world.name}: {type(error).__name__}: {cause(error)}"
            if "gloo" in str(error):
                # Who is gone is told by the ranks with a connection of their own to it.
                self._watch.wait_for_failure(_GRACE_S)
                mates = set(self._world.ranks.replica_ranks(self._world.replica))
                names = [self._world.ranks.name(r) for r in sorted(mates - {self._world.rank})]
                what = (
                    f"{', '.join(names)} did not complete a collective with {self._world.name}: "
                    f"{cause(error)}"
                )
            self._watch.fail(
                what,
                *self._last_item,
                remedy="see what went wrong on that rank, then restart both roles",
            )
        failure = self._watch.failure
        if failure is None or isinstance(error, ConnectorError):
            return None
        return failure.error(self._world.name, *self._last_item)

    def gather(self, values: list[str]) -> list[list[str]]:
        """Collect what every attention rank gives; on rank 0 by rank, nothing elsewhere.

        For results, once at the end: they travel through the process group's store.
        """
        assert self._watch is not None
        world, store = self._world, self._world.store()
        store.set(f"gathered {world.rank}", json.dumps(values))
        if world.rank != 0:
            return []
        keys = [f"gathered {rank}" for rank in range(world.ranks.attention)]
        while not store.check(keys):
            self._watch.raise_failure()
            time.sleep(LOOK_S)
        return [json.loads(text) for text in store.multi_get(keys)]

    def on_failure(self, call: Callable[[str], None]) -> None:
        """Call ``call`` with what happened, on another thread, when the world has failed."""
        assert self._watch is not None
        watch = self._watch
        watch.listeners.append(lambda: call(watch.failure.what if watch.failure else ""))

    def stop(self, why: str) -> None:
        """End the world because this rank was told to; the other ranks raise ``why``."""
        if self._watch is not None:
            self._watch.fail(f"{self._world.name} was told to stop: {why}")

    def close(self) -> None:
        """Say goodbye to the FFN ranks and leave the world; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watch is None:
            return
        for peer in self._peers:
            peer.say_goodbye()
        self._watch.leave(wait_for_all=self._world.rank == 0)
        self._notify()
        for peer in self._peers:
            peer.end()
        self._layers.clear()

    # -- inside ------------------------------------------------------------------------------------

    def _check_usable(self, layer: int | None, stage: int | None) -> None:
        if self._closed:
            raise ConnectorError(
                "the torch_distributed connector is closed",
                layer=layer,
                stage=stage,
                remedy="restart the processes of both roles",
            )
        if self._watch is not None:
            self._watch.raise_failure(layer, stage)

    def _check_item(self, item: WorkItem) -> None:
        config, problem = self._world.config, misfit(item, self._layers)
        most = config.rows_per_dispatch
        if problem is None and item.tokens is not None and item.tokens > most:
            problem = (
                f"{item.tokens} tokens are more than {most} "
                f"(max_tokens={config.max_tokens} over tp_size={config.tp_size})"
            )
        if problem is not None:
            raise wrong_item(
                item,
                problem,
                "check that both sides run the same model, or raise max_tokens on all ranks",
            )

    def _free_slot(self) -> _Slot:
        """The slot of the next item: they are used in turn, as the FFN ranks do."""
        slot = self._slots[self._next_sequence % self.credits]
        if slot.flight is not None and slot.flight.abandoned:
            limit = self._world.config.timeout_s
            if not self._wait_until(lambda: slot.flight is None, limit, None):
                assert self._watch is not None
                self._watch.fail(f"an abandoned item was not answered within {limit:g} s")
        self._check_usable(None, None)
        if slot.flight is not None:
            raise no_credit(self.credits)
        return slot

    def _free(self, flight: Flight) -> None:
        """With the lock held: the answers have come, so everything was sent as well."""
        for _, work in flight.sending:
            with contextlib.suppress(RuntimeError):  # the connection was closed since
                work.wait()
        flight.sending.clear()
        self._slots[flight.sequence % self.credits].flight = None

    def _take(self, peer: Peer, flight: Flight, header: Header) -> None:
        """Note the answer of one FFN rank; called by its thread."""
        with self._changed:
            flight.missing.discard(peer.rank)
            if header.kind is Kind.ERROR and flight.error is None:
                flight.error = f"{self._world.ranks.name(peer.rank)}: {header.text}"
            if header.begin_ns:
                begin, end = header.begin_ns - peer.offset_ns, header.end_ns - peer.offset_ns
                flight.begin_ns = begin if flight.begin_ns is None else min(flight.begin_ns, begin)
                flight.end_ns = end if flight.end_ns is None else max(flight.end_ns, end)
            if flight.abandoned and not flight.missing:
                self._free(flight)
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_until(
        self, done: Callable[[], bool], timeout_s: float, item: WorkItem | None
    ) -> bool:
        """Wait for ``done()``; False after ``timeout_s``; raises what ended the world."""
        layer, stage = (None, None) if item is None else (item.layer, item.stage)
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: done() or self._closed or (self._watch and self._watch.failure), timeout_s
            )
        if done():
            return True
        self._check_usable(layer, stage)
        return bool(in_time)

    def _lost(self, peer: Peer, error: BaseException, layer: int | None, stage: int | None) -> None:
        assert self._watch is not None
        self._watch.fail(
            f"{self._world.ranks.name(peer.rank)} is gone: {cause(error)}", layer, stage
        )
        self._watch.raise_failure(layer, stage)


def _even_bounds(rows: int, parts: int) -> list[int]:
    """Bounds of ``parts`` contiguous parts, the first ones one row longer."""
    return [part * (rows // parts) + min(part, rows % parts) for part in range(parts + 1)]
