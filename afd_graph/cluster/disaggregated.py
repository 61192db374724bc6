"""All attention replicas against all expert ranks: the pipeline model of docs/pipeline.md at scale.

A replica is one engine that walks the order of its credits (:mod:`afd_graph.schedule_ir`), with a
link out and a link in. An expert rank is one engine that serves items in the order in which they
were sent, with a link in and a link out. An item is done when its last rank is done. Every engine
and link does one thing at a time; transfers through two links at once take the slower one's time.

Items are served in batches of NumPy operations. A batch holds the items that arrive before
anything that the first of them causes can arrive, so the order is that of one event at a time:

1. *send*: every replica goes on until it waits for an answer that is not known;
2. *serve*: the batch runs through all ranks, a queue being a running maximum;
3. repeat; a replica whose step has ended asks for its next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from afd_graph.cluster.costs import StepCosts
from afd_graph.cluster.routing import VARIANTS
from afd_graph.timeline import Interval

Floats = npt.NDArray[np.float64]


class BegunStep(Protocol):
    """What the engine needs of a step."""

    @property
    def ready_s(self) -> float:
        """When it can begin."""

    @property
    def costs(self) -> StepCosts:
        """What its stages cost."""


@dataclass
class Fleet:
    """Replicas and ranks, and what they did.

    Args:
        layers: MoE layers.
        stages: most stages of a step.
        credits: un-received dispatches per replica.
        shares: ``[layers, VARIANTS, ranks]``, see :mod:`routing`.
        next_step: asked for the next step of (replica, time free); ``None`` ends the replica.
        end_step: told (replica, time) at the end of a step.
        replica_slowness: factor on the attention time of each replica.
        rank_slowness: factor on the expert time of each rank.
        jitter: standard deviation of the logarithm of attention times.
        generator: of the jitter.
        watch: replica whose first steps are recorded, and how many of them.

    Attributes:
        attention_busy_s: per replica.
        ffn_busy_s: per rank.
        end_s: per replica, when its last step ended.
        intervals: of the watched replica, and of rank 0 for its items.
    """

    layers: int
    stages: int
    credits: int
    shares: Floats
    next_step: Callable[[int, float], BegunStep | None]
    end_step: Callable[[int, float], None]
    replica_slowness: Floats
    rank_slowness: Floats
    jitter: float = 0.0
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    watch: tuple[int, int] = (0, 0)
    intervals: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        count, ranks = len(self.replica_slowness), len(self.rank_slowness)
        self._slots = min(self.credits, self.stages)
        per_stage = (count, self.stages)
        self._costs = {
            name: np.zeros(per_stage)
            for name in (
                *("attention", "after", "out", "back"),
                *("ffn", "ffn_floor", "take_in", "give_back"),
            )
        }
        self._latency_out, self._latency_back = np.zeros(count), np.zeros(count)
        self._fixed, self._tail = np.zeros(count), np.zeros(count)
        self._soonest = np.full(count, np.inf)  # least time from an arrival to one it causes
        # Items of the step, its stages, and the credits that they can use.
        self._item, self._items = np.zeros(count, int), np.zeros(count, int)
        self._of_step, self._held = np.ones(count, int), np.ones(count, int)
        self._step_number = np.zeros(count, int)
        self._now = np.zeros(count)
        self._sending, self._taking = np.zeros(count), np.zeros(count)
        self._answers = np.full((count, self._slots), -np.inf)
        self._arrivals = np.full((count, self._slots), np.inf)
        self._sent_item = np.zeros((count, self._slots), int)
        self._begun = np.zeros((count, self._slots, 2))  # attention of a sent item, when watched
        self._share_of = np.ascontiguousarray(self.shares.reshape(-1, ranks).T)
        self._rank_in, self._rank, self._rank_out = np.zeros((3, ranks))
        self.attention_busy_s, self.ffn_busy_s = np.zeros(count), np.zeros(ranks)
        self.end_s = np.zeros(count)

    def run(self) -> None:
        """Play until no replica has a step left."""
        for replica in range(len(self._now)):
            self._begin(replica)
        everyone = np.arange(len(self._now))
        self._send(everyone)
        while True:
            soonest = self._arrivals.min()
            if soonest == np.inf:
                return
            horizon = soonest + self._soonest.min()
            chosen = np.flatnonzero((self._arrivals < horizon) | (self._arrivals == soonest))
            times = self._arrivals.ravel()[chosen]
            served = self._serve(chosen[np.argsort(times, kind="stable")])
            self._send(served)
            for replica in served[self._item[served] == self._items[served]]:
                if not np.isnan(self._answers[replica]).any() and self._items[replica]:
                    self._end(int(replica))

    def _begin(self, replica: int) -> None:
        step = self.next_step(replica, float(self._now[replica]))
        if step is None:
            self._items[replica] = self._item[replica] = 0
            self._soonest[replica] = np.inf
            return
        costs = step.costs
        stages = costs.stages
        for name, values in self._costs.items():
            values[replica, :stages] = getattr(costs, name)
        slowness = self.replica_slowness[replica]
        self._costs["attention"][replica, :stages] *= slowness
        self._costs["after"][replica, :stages] *= slowness
        self._latency_out[replica] = costs.latency_out
        self._latency_back[replica] = costs.latency_back
        self._fixed[replica], self._tail[replica] = costs.ffn_fixed, costs.tail * slowness
        self._of_step[replica], self._items[replica] = stages, stages * self.layers
        self._held[replica] = min(self.credits, stages)
        self._item[replica] = 0
        self._answers[replica] = -np.inf
        head = costs.head * slowness
        self._now[replica] = max(self._now[replica], step.ready_s) + head
        self.attention_busy_s[replica] += head
        ranks = len(self.rank_slowness)
        experts = min(
            max(floor, ffn / ranks) for floor, ffn in zip(costs.ffn_floor, costs.ffn, strict=True)
        )
        attends_first = self._held[replica] < stages or self.jitter > 0
        attention = 0.0 if attends_first else min(costs.attention) * slowness
        self._soonest[replica] = (
            costs.latency_out
            + costs.latency_back
            + costs.ffn_fixed
            + experts
            + min(costs.out)
            + attention
        )

    def _end(self, replica: int) -> None:
        now = max(self._now[replica], self._answers[replica].max()) + self._tail[replica]
        self.attention_busy_s[replica] += self._tail[replica]
        self._now[replica] = self.end_s[replica] = now
        self._step_number[replica] += 1
        self.end_step(replica, float(now))
        self._begin(replica)
        self._send(np.array([replica]))

    def _send(self, replicas: npt.NDArray[np.int64]) -> None:
        """Attend and dispatch until every replica waits for an unknown answer."""
        while True:
            item = self._item[replicas]
            needed = item - self._held[replicas]
            slot = item % self._slots
            answer = np.where(needed >= 0, self._answers[replicas, needed % self._slots], -np.inf)
            able = (item < self._items[replicas]) & ~np.isnan(answer)
            if not able.any():
                return
            replicas, item, slot, answer = (x[able] for x in (replicas, item, slot, answer))
            stage = item % self._of_step[replicas]
            attention = self._costs["attention"][replicas, stage]
            if self.jitter:
                drawn = self.generator.standard_normal(len(replicas))
                attention = attention * np.exp(self.jitter * drawn)
            now = self._now[replicas]
            # With as many credits as stages the answer due is this stage's own.
            own = self._held[replicas] == self._of_step[replicas]
            begin = np.where(own, np.maximum(now, answer), now)
            attended = begin + attention
            ready = np.where(own, attended, np.maximum(attended, answer))
            sent = np.maximum(ready, self._sending[replicas]) + self._costs["out"][replicas, stage]
            after = self._costs["after"][replicas, stage]
            self._sending[replicas] = sent
            self._now[replicas] = ready + after
            self.attention_busy_s[replicas] += attention + after
            self._answers[replicas, slot] = np.nan
            self._arrivals[replicas, slot] = sent + self._latency_out[replicas]
            self._sent_item[replicas, slot] = item
            self._begun[replicas, slot, 0], self._begun[replicas, slot, 1] = begin, attended
            self._item[replicas] += 1

    def _serve(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Run items, given in order of arrival, through all ranks; returns their replicas."""
        replica, slot = np.divmod(chosen, self._slots)
        item = self._sent_item[replica, slot]
        arrival = self._arrivals[replica, slot]
        stages = self._of_step[replica]
        layer, stage = np.divmod(item, stages)
        variant = (self._step_number[replica] + replica + stage) % VARIANTS
        # Ranks are rows and items columns: a queue then runs along contiguous memory.
        share = np.take(self._share_of, layer * VARIANTS + variant, axis=1)
        work = np.maximum(
            share * self._costs["ffn"][replica, stage], self._costs["ffn_floor"][replica, stage]
        )
        work = (work + self._fixed[replica]) * self.rank_slowness[:, None]
        there = _transfers(arrival, share * self._costs["take_in"][replica, stage], self._rank_in)
        done = _queue(there, work, self._rank)
        given = _queue(done, share * self._costs["give_back"][replica, stage], self._rank_out)
        self.ffn_busy_s += work.sum(axis=1)
        answer = given.max(axis=0) + self._latency_back[replica]
        # A replica may have several items here; its link takes them in one after the other.
        back = self._costs["back"][replica, stage]
        occurrence = _occurrence(replica, item, len(self._now))
        for number in range(self._slots):
            turn = np.flatnonzero(occurrence == number)
            if not turn.size:
                break
            who = replica[turn]
            answer[turn] = np.maximum(answer[turn], self._taking[who] + back[turn])
            self._taking[who] = answer[turn]
        self._answers[replica, slot] = answer
        self._arrivals[replica, slot] = np.inf
        watched = np.flatnonzero(
            (replica == self.watch[0]) & (self._step_number[replica] < self.watch[1])
        )
        for place in watched:
            self._record(
                (int(layer[place]), int(stage[place])),
                self._begun[replica[place], slot[place]],
                float(arrival[place]),
                float(done[0, place] - work[0, place]),
                float(done[0, place]),
                float(answer[place]),
            )
        return np.unique(replica)

    def _record(
        self,
        item: tuple[int, int],
        attention: Floats,
        arrival: float,
        begin: float,
        end: float,
        answer: float,
    ) -> None:
        begun, attended = (float(time) for time in attention)
        self.intervals += [
            Interval("attention", *item, begun, attended),
            Interval("link out", *item, attended, arrival),
            Interval("ffn", *item, begin, end),
            Interval("link back", *item, end, answer),
        ]


def _queue(ready: Floats, work: Floats, free: Floats) -> Floats:
    """Ends of jobs that engines do one after the other; rows are engines, columns jobs.

    ``end[i] = max(ready[i], end[i - 1]) + work[i]``, as a sum and a running maximum. ``free`` is
    when each engine is free before, and becomes when it is free after.
    """
    total = np.cumsum(work, axis=1)
    waited = np.maximum.accumulate(ready - (total - work), axis=1)
    end = np.maximum(waited, free[:, None]) + total
    free[:] = end[:, -1]
    return np.asarray(end)


def _transfers(ready: Floats, work: Floats, free: Floats) -> Floats:
    """Ends of transfers that another link feeds: ``end[i] = max(ready[i], end[i - 1] + work[i])``.

    ``ready`` is when the feeding link is through with the transfer.
    """
    total = np.cumsum(work, axis=1)
    waited = np.maximum.accumulate(ready - total, axis=1)
    end = np.maximum(waited, free[:, None]) + total
    free[:] = end[:, -1]
    return np.asarray(end)


def _occurrence(
    replica: npt.NDArray[np.int64], item: npt.NDArray[np.int64], replicas: int
) -> npt.NDArray[np.int64]:
    """How many items of the same replica in this batch come before each one."""
    first = np.full(replicas, np.iinfo(np.int64).max)
    np.minimum.at(first, replica, item)
    return np.asarray(item - first[replica])
