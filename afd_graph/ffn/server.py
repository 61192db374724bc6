"""The FFN role of a torch.distributed world: owns a share of the experts and serves dispatches.

1. :class:`FFNServer` meets the other ranks; a thread per attention rank receives (:mod:`.inlet`).
2. Attention ranks announce their programs: the experts of a layer as a graph and the weights by
   name. This rank's share of the weights comes from its own source, usually the checkpoint
   (:mod:`.checkpoint`).
3. :meth:`FFNServer.serve` computes what is complete, in the order in which it became complete:
   replicas, layers and stages interleave freely. An item without rows is answered without a
   computation. Sending is asynchronous; the next item starts at once.
4. It ends when every attention rank has said goodbye, when it is told to, or when the world fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch

from afd_graph.connectors.base import WorkItem
from afd_graph.connectors.torch_distributed_watch import Failure, Watch, cause
from afd_graph.connectors.torch_distributed_wire import NO_SHARED_ROWS, GarbageError, Header, Kind
from afd_graph.connectors.torch_distributed_world import World
from afd_graph.errors import AFDError, ConfigError, ConnectorError
from afd_graph.ffn.assembly import MergedItem, Replicas
from afd_graph.ffn.executor import FFNExecutor
from afd_graph.ffn.inlet import Inlet, Part
from afd_graph.ffn.serialize import program_from_dict

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # how often an idle server looks whether the world has ended
_PATIENCE = 0.8  # share of the timeout that the ranks of a replica may be apart


class Weights(Protocol):
    """Where an FFN rank gets its experts' weights."""

    def routed(self, name: str, first: int, last: int) -> torch.Tensor:
        """Experts ``first`` to ``last`` (exclusive) of the stacked parameter ``name``."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """The parameter ``name``, of a shared expert or of something equal for all experts."""
        ...


class ModelWeights:
    """Weights from a model's parameters in this process.

    Args:
        tensors: by parameter name, such as ``dict(model.named_parameters())``.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def routed(self, name: str, first: int, last: int) -> torch.Tensor:
        """A view of the stacked parameter."""
        return self.whole(name)[first:last]

    def whole(self, name: str) -> torch.Tensor:
        """The parameter itself."""
        try:
            return self._tensors[name].detach()
        except KeyError:
            raise ConnectorError(
                f"this FFN rank has no weight {name!r}",
                remedy="give both roles the same model",
            ) from None


@dataclass(frozen=True)
class FFNStatus:
    """What an FFN rank has done since it started to serve.

    Attributes:
        layers: MoE layers that it has programs of.
        items: items answered.
        empty_items: those of them without rows.
        rows: rows computed.
        busy_share: share of the time in which it computed.
        queue: items that are complete and wait.
        attention_ranks: attention ranks that have not said goodbye.
    """

    layers: int
    items: int
    empty_items: int
    rows: int
    busy_share: float
    queue: int
    attention_ranks: int


class FFNServer:
    """One FFN rank.

    Args:
        world: the world; this rank has the FFN role.
        weights: source of this rank's weights.
        policy: split policy that the attention ranks must have; empty accepts any.

    Attributes:
        observers: called with every item when its experts have ended and before it is answered,
            and with when they began and ended, in nanoseconds of :func:`time.perf_counter_ns`.

    Raises:
        ConfigError: this rank has the attention role, or the ranks' settings differ.
        ConnectorError: ranks did not come.
    """

    def __init__(self, world: World, weights: Weights, policy: str = "") -> None:
        if not world.ranks.is_ffn(world.rank):
            raise ConfigError(
                f"{world.name} has the attention role",
                remedy="compile the model on it with connector='torch_distributed'",
            )
        self._world = world
        self._weights = weights
        self._executor = FFNExecutor()
        self._rows: dict[int, tuple[int, torch.dtype]] = {}
        self._digests: dict[int, str] = {}
        self._replicas = Replicas(world.ranks.tp)
        self._lock = threading.Lock()  # of the replicas, never held for long
        self._binding = threading.Lock()  # of programs and weights
        self._ready: queue.SimpleQueue[list[Part] | None] = queue.SimpleQueue()
        self._present = set(range(world.ranks.attention))
        self._stopped: str | None = None
        self._last_item: tuple[int | None, int | None] = None, None
        self.observers: list[Callable[[WorkItem, int, int], None]] = []
        self._counted: Counter[str] = Counter()
        self._busy_ns = 0
        self._begin_ns = time.perf_counter_ns()
        world.agree(policy)
        self._watch = Watch(world, lambda: asdict(self.status()))
        self._watch.checks.append(self._overdue)
        self._watch.listeners.append(self._wake)
        self._inlets = [
            Inlet(
                world,
                rank,
                self._watch,
                layout=self._layout,
                take_item=self._take_item,
                take_program=self._take_program,
                take_leave=self._take_leave,
            )
            for rank in range(world.ranks.attention)
        ]

    def serve(self) -> None:
        """Serve until all attention ranks have left or :meth:`stop` is called.

        Raises:
            ConnectorError: the world failed.
        """
        self._begin_ns = time.perf_counter_ns()
        try:
            self._serve()
        except Exception as error:
            self._watch.fail(f"{self._world.name} failed: {error!r}", *self._last_item)
            raise
        if self._stopped is not None and self._present and self._watch.failure is None:
            self._watch.fail(f"{self._world.name} was told to stop: {self._stopped}")
            return
        if self._stopped is None:
            self._watch.raise_failure(*self._last_item)
        self._watch.leave(wait_for_all=False)

    def _serve(self) -> None:
        while self._present and self._stopped is None:
            try:
                parts = self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                self._watch.check_store()
                parts = None
            if self._watch.failure is not None:
                break
            if parts is not None:
                self._compute(MergedItem(parts))

    def stop(self, why: str = "stop() was called") -> None:
        """Make :meth:`serve` return; attention ranks that are still there fail with ``why``.

        May be called from a signal handler or another thread.
        """
        self._stopped = why
        self._wake()

    def status(self) -> FFNStatus:
        """What this rank has done so far."""
        elapsed = max(1, time.perf_counter_ns() - self._begin_ns)
        counted = self._counted
        return FFNStatus(
            layers=len(self._rows),
            items=counted["items"],
            empty_items=counted["empty"],
            rows=counted["rows"],
            busy_share=round(self._busy_ns / elapsed, 4),
            queue=self._ready.qsize(),
            attention_ranks=len(self._present),
        )

    # -- on the threads of the inlets --------------------------------------------------------------

    def _layout(self, layer: int) -> tuple[int, torch.dtype]:
        try:
            return self._rows[layer]
        except KeyError:
            raise GarbageError(
                f"an item of layer {layer}, of which no program was announced"
            ) from None

    def _take_item(self, part: Part) -> None:
        ranks, rank = self._world.ranks, part.inlet.rank
        replica = ranks.replica(rank)
        try:
            with self._lock:
                parts = self._replicas.add(replica, rank - ranks.replica_ranks(replica)[0], part)
                if parts is not None:
                    self._ready.put(parts)
        except ConnectorError as error:
            self._fail(error)

    def _take_program(self, rank: int, text: bytes) -> None:
        try:
            with self._binding:
                self._bind(rank, text)
        except ConnectorError as error:
            self._fail(error)

    def _take_leave(self, rank: int) -> None:
        self._present.discard(rank)
        self._wake()

    def _wake(self) -> None:
        self._ready.put(None)

    # -- inside ------------------------------------------------------------------------------------

    def _fail(self, error: ConnectorError) -> None:
        """End the world, with no lock held: its watch asks what is overdue before it tells."""
        self._watch.fail(error.what, error.layer, error.stage, error.remedy)

    def _bind(self, rank: int, text: bytes) -> None:
        """Take the program that attention rank ``rank`` announced, unless another one did.

        Raises:
            ConnectorError: this rank cannot run it, or another one announced another.
        """
        described = json.loads(text)
        layer = described["program"]["layer"]
        digest = hashlib.sha256(text).hexdigest()
        if self._digests.get(layer, digest) != digest:
            raise ConnectorError(
                f"{self._world.ranks.name(rank)} announced other experts or another program for "
                "this layer than a rank before",
                layer=layer,
                remedy="compile the same model on all attention ranks",
            )
        if layer in self._digests:
            return
        try:
            self._add(described)
        except AFDError as error:
            raise ConnectorError(
                f"{self._world.name} cannot run the experts: {error.what}",
                layer=layer,
                remedy=error.remedy,
            ) from error
        self._digests[layer] = digest

    def _add(self, described: dict) -> None:
        """Bind the weights of this rank to a program and compile it."""
        stored = described["program"]
        experts = stored["num_experts"]
        first, last = self._world.ranks.expert_range(self._world.rank, experts)
        wanted = self._world.config.dtype
        if wanted and stored["dtype"] != wanted:
            raise ConnectorError(
                f"rows are {stored['dtype']}, this FFN rank serves {wanted}",
                remedy="use the same dtype on all ranks",
            )
        tensors: dict[str, torch.Tensor] = {}
        for part in ("routed", "shared"):
            for weight in (stored[part] or {"weights": []})["weights"]:
                key, name = weight["tensor"], weight["name"]
                shape = described["weights"][key]["shape"]
                stacked = part == "routed" and shape and shape[0] == experts
                if stacked:
                    shape = [last - first, *shape[1:]]
                    tensor = self._weights.routed(name, first, last)
                else:
                    tensor = self._weights.whole(name)
                dtype = getattr(torch, described["weights"][key]["dtype"])
                if list(tensor.shape) != shape or tensor.dtype != dtype:
                    raise ConnectorError(
                        f"weight {name!r} is {list(tensor.shape)} {tensor.dtype} here, the "
                        f"attention ranks expect {shape} {dtype}",
                        remedy="give both roles the same checkpoint and dtype",
                    )
                tensors[key] = tensor.to(self._world.config.device)
        program = replace(program_from_dict(stored, tensors), num_experts=last - first)
        self._executor.add(program)
        self._rows[program.layer] = program.hidden_size, program.dtype

    def _compute(self, merged: MergedItem) -> None:
        """Run an item and start sending its answers."""
        item = merged.item
        self._last_item = item.layer, item.stage
        begin = time.perf_counter_ns()
        error: ConnectorError | None = None
        shared: Sequence[torch.Tensor | None] = [
            None if part.shared_rows is None else torch.empty_like(part.shared_rows)
            for part in merged.parts
        ]
        if item.rows.shape[0] or item.shared_rows is not None:
            try:
                rows, shared_rows = self._executor.run(item, merged.out())
                shared = merged.scatter(rows, shared_rows)
            except ConnectorError as failed:
                error = failed
        end = time.perf_counter_ns()
        self._busy_ns += end - begin
        self._counted["items"] += 1
        self._counted["rows"] += item.rows.shape[0]
        self._counted["empty"] += not item.rows.shape[0]
        for observer in self.observers:
            observer(item, begin, end)
        for part, part_shared in zip(merged.parts, shared, strict=True):
            asked = part.header
            answer = Header(
                Kind.ANSWER if error is None else Kind.ERROR,
                asked.sequence,
                asked.layer,
                asked.stage,
                asked.rows,
                asked.shared_rows if part_shared is not None else NO_SHARED_ROWS,
                begin_ns=begin,
                end_ns=end,
                text="" if error is None else error.what,
            )
            try:
                part.inlet.answer(part, answer, part_shared)
            except RuntimeError as gone:
                name = self._world.ranks.name(part.inlet.rank)
                self._watch.fail(f"{name} is gone: {cause(gone)}", item.layer, item.stage)
                return

    def _overdue(self) -> Failure | None:
        """A replica whose ranks are too far apart."""
        limit = _PATIENCE * self._world.config.timeout_s
        with self._lock:
            found = self._replicas.overdue(time.monotonic() - limit)
        if found is None:
            return None
        part, places = found
        ranks = self._world.ranks
        members = ranks.replica_ranks(ranks.replica(part.inlet.rank))
        missing = ", ".join(ranks.name(members[place]) for place in places)
        return Failure(
            f"{missing} did not dispatch within {limit:.1f} s of {ranks.name(part.inlet.rank)}",
            self._world.name,
            part.header.layer,
            part.header.stage,
            remedy="see what that rank is doing; raise timeout_s if its steps take so long",
        )
