"""Whether all ranks of the world are alive, and the one failure that ends them all.

Every rank writes a beat to the store and reads those of the others, on a thread of its own. A rank
whose beat does not change was stopped or is cut off. A dead one is seen sooner, by its connections.

Whoever finds a failure puts it in the store; the first one stands, and every rank raises that one.
Otherwise a rank that dies of a failure would look like the cause of the next. A rank that cannot
reach the store raises what it knows itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from afd_graph.connectors.torch_distributed_world import World
from afd_graph.errors import ConnectorError

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often a wait for something else looks whether the world has ended."""

_FAILURE = "failure"
_PARTS = 10  # beats in one timeout
_LONGEST_PAUSE_S = 1.0
_RANKS_PER_S = 64  # beats that a rank reads in a second, so that the store can serve a large world
_SILENT = 0.6  # share of the timeout after which a rank without a beat is lost
_LEAVING_S = 0.05  # pause between beats of a rank that is about to leave
_DECIDE_S = 2.0  # longest wait for the store to say which failure was first


@dataclass(frozen=True)
class Failure:
    """What ended the world.

    Attributes:
        what: one sentence, naming the rank that failed.
        reporter: name of the rank that found it.
        layer: MoE layer that the reporter was in.
        stage: token stage.
        remedy: what to do.
    """

    what: str
    reporter: str
    layer: int | None = None
    stage: int | None = None
    remedy: str | None = None

    def error(
        self, here: str, layer: int | None = None, stage: int | None = None
    ) -> ConnectorError:
        """As an error on rank ``here``, which was in ``layer`` and ``stage``."""
        known = self.reporter == here or self.reporter in self.what
        told = "" if known else f" (found by {self.reporter})"
        return ConnectorError(
            self.what + told,
            layer=self.layer if layer is None else layer,
            stage=self.stage if stage is None else stage,
            remedy=self.remedy or "restart the processes of both roles",
        )


def cause(error: BaseException) -> str:
    """What gloo says in one phrase, without the place in its source and its advice."""
    text = str(error).splitlines()[0] if str(error) else repr(error)
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", text)
    return text.partition(". This is typically")[0].removesuffix(".")


class Watch:
    """One rank's view of the others.

    Args:
        world: whose ranks are watched; all have agreed.
        status: what this rank tells about itself in every beat, as JSON values.

    Attributes:
        checks: called at every beat; a failure that one returns ends the world.
        listeners: called once when the world has failed.
    """

    def __init__(self, world: World, status: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self._world = world
        self._store = world.store()
        self._timeout_s = world.config.timeout_s
        self._status = status or dict
        self._store.set_timeout(timedelta(seconds=self._timeout_s))
        self.checks: list[Callable[[], Failure | None]] = []
        self.listeners: list[Callable[[], None]] = []
        self._failure: Failure | None = None
        self._candidate: Failure | None = None
        self._decided = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._beats = 0
        self._left = False
        self._all_began = False
        self._ended = False
        self._told: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._round_s = time.monotonic()
        pause_s = max(_LONGEST_PAUSE_S, world.ranks.size / _RANKS_PER_S)
        self._pause_s = min(self._timeout_s / _PARTS, pause_s)
        self._store_holder = world.store_holder
        self._keys = [f"beat {rank}" for rank in range(world.ranks.size)]
        self._beat()
        self._thread = threading.Thread(target=self._run, name="afd-watch", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Failure | None:
        """What ended the world; None while it lives."""
        return self._failure

    def fail(
        self,
        what: str,
        layer: int | None = None,
        stage: int | None = None,
        remedy: str | None = None,
    ) -> Failure:
        """End the world, unless something else has; returns what did."""
        with self._lock:
            if self._candidate is None:
                self._candidate = Failure(what, self._world.name, layer, stage, remedy)
        self._wake.set()
        if threading.current_thread() is not self._thread and not self._decided.wait(_DECIDE_S):
            self._decide(self._without_store(self._candidate))
        return self._failure or self._candidate

    def _without_store(self, failure: Failure) -> Failure:
        """``failure``, and that the store is silent: its holder may be the cause."""
        silent = time.monotonic() - self._round_s
        if silent < _SILENT * self._timeout_s or self._store_holder in failure.what:
            return failure
        told = f"the store in {self._store_holder} has not answered for {silent:.1f} s"
        return replace(failure, what=f"{told}; {failure.what}")

    def wait_for_failure(self, seconds: float) -> None:
        """Give another rank's failure time to come."""
        self._wake.set()
        self._decided.wait(seconds)

    def raise_failure(self, layer: int | None = None, stage: int | None = None) -> None:
        """Raise what ended the world, if something has."""
        if self._failure is not None:
            raise self._failure.error(self._world.name, layer, stage)

    def check_store(self) -> None:
        """End the world when the store has not answered for too long."""
        silent = time.monotonic() - self._round_s
        if not self._ended and self._failure is None and silent > self._timeout_s:
            self.fail(f"the store in {self._store_holder} has not answered for {silent:.1f} s")

    def status_of(self, rank: int) -> dict[str, Any]:
        """What ``rank`` told in its last beat that was seen here."""
        return dict(self._told.get(rank, {}).get("status", {}))

    def leave(self, wait_for_all: bool) -> None:
        """Say that this rank needs the world no more.

        Args:
            wait_for_all: return when all ranks have left or know that the world has failed; for
                the rank whose process may hold the store.
        """
        self._left = True
        self._wake.set()
        while wait_for_all and self._failure is None and not self._ended:
            told = dict(self._told)
            others = [r for r in range(self._world.ranks.size) if r != self._world.rank]
            if all(told.get(rank, {}).get("left") for rank in others):
                break
            time.sleep(_LEAVING_S)
        if wait_for_all and self._failure is not None:
            self._wait_for_the_others()
        deadline = time.monotonic() + _DECIDE_S
        while not self._ended and time.monotonic() < deadline:
            if self._failure is not None or self._told.get(self._world.rank, {}).get("left"):
                break
            time.sleep(0.01)
        self._ended = True
        self._wake.set()
        self._thread.join(_DECIDE_S)

    def _run(self) -> None:
        while not self._ended and self._failure is None:
            try:
                self._round()
            except RuntimeError as error:
                if self._ended or (self._left and self._candidate is None):
                    return
                # Whatever else was noticed comes after the end of the process with the store.
                also = "" if self._candidate is None else f"; {self._candidate.what}"
                what = f"the store in {self._store_holder} is gone: {cause(error)}{also}"
                self._decide(Failure(what, self._world.name))
            self._wake.wait(_LEAVING_S if self._left else self._pause_s)
            self._wake.clear()

    def _round(self) -> None:
        """One beat, and a look at everybody else's."""
        for check in self.checks:
            found = check()
            if found is not None and self._candidate is None:
                self._candidate = found
        self._beat()
        if self._candidate is not None:
            said = self._store.compare_set(_FAILURE, "", json.dumps(asdict(self._candidate)))
            self._learn(said)
            return
        if self._store.check([_FAILURE]):
            self._learn(self._store.get(_FAILURE))
            return
        now = time.monotonic()
        paused = now - self._round_s > _SILENT * self._timeout_s
        for rank, told in enumerate(self._read_beats()):
            self._told[rank] = told
            beat, since = self._seen.setdefault(rank, (-1, now))
            # After a pause of this process itself, the others' clocks start anew.
            if told["beat"] != beat or told["left"] or paused:
                self._seen[rank] = told["beat"], now
            elif now - since > _SILENT * self._timeout_s and self._candidate is None:
                self._candidate = Failure(
                    f"{self._world.ranks.name(rank)} has not responded for {now - since:.1f} s",
                    self._world.name,
                    remedy="see what that process is doing: stopped, swapping or cut off",
                )
                self._wake.set()
        self._round_s = time.monotonic()

    def _learn(self, text: bytes) -> None:
        """Take the failure from the store, and say so."""
        self._store.set(_learnt(self._world.rank), "")
        self._decide(Failure(**json.loads(text)))

    def _wait_for_the_others(self) -> None:
        """Keep the store alive for a moment, so that the others learn what happened."""
        keys = [_learnt(r) for r in range(self._world.ranks.size) if r != self._world.rank]
        deadline = time.monotonic() + 2 * self._pause_s + _LEAVING_S
        with contextlib.suppress(RuntimeError):
            store = self._world.store()
            while time.monotonic() < deadline and not store.check(keys):
                time.sleep(_LEAVING_S)

    def _read_beats(self) -> list[dict[str, Any]]:
        """What every rank tells; a rank without a first beat tells beat -1."""
        if not self._all_began:
            self._all_began = self._store.check(self._keys)
        if self._all_began:
            return [json.loads(text) for text in self._store.multi_get(self._keys)]
        return [
            json.loads(self._store.get(key))
            if self._store.check([key])
            else {"beat": -1, "left": False}
            for key in self._keys
        ]

    def _beat(self) -> None:
        self._beats += 1
        told = {"beat": self._beats, "left": self._left, "status": dict(self._status())}
        self._store.set(self._keys[self._world.rank], json.dumps(told))

    def _decide(self, failure: Failure | None) -> None:
        with self._lock:
            if self._failure is not None or failure is None:
                return
            self._failure = failure
        self._decided.set()
        log.error("%s: %s", self._world.name, failure.what)
        for listener in self.listeners:
            listener()


def _learnt(rank: int) -> str:
    return f"learnt {rank}"
