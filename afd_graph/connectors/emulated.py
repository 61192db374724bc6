"""An FFN that computes nothing and takes given times: for benchmarks and the simulator's proof.

One engine serves the items in order, one at a time; the two links delay every item by a fixed
time and are not contended::

    arrival = send + dispatch_s          begin = max(arrival, end of the item before)
    end     = begin + ffn_s              answer ready = end + return_s

The times are known at send, so there is no thread: a receive waits until its answer is ready.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from afd_graph.connectors.base import Connector, WorkItem
from afd_graph.connectors.refusals import no_credit
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.program import FFNProgram

_SPIN_S = 3e-4  # a sleeping thread wakes late by less than this; the rest is waited for awake


@dataclass(frozen=True)
class _Flight:
    item: WorkItem
    begin_s: float
    end_s: float
    ready_s: float


class EmulatedConnector(Connector):
    """Answers every item with its own rows, after the time that real experts would take.

    Args:
        ffn_s: seconds that the engine takes for one item.
        dispatch_s: seconds from the send until the engine has the item.
        return_s: seconds from the engine's end until the answer can be received.
        credits: un-received items that the connector holds.
        per_rows: number of rows that the three times are for; items with more or fewer rows take
            proportionally longer or shorter. ``None`` gives every item the same times.
    """

    def __init__(
        self,
        ffn_s: float = 0.0,
        dispatch_s: float = 0.0,
        return_s: float = 0.0,
        credits: int = 2,
        per_rows: int | None = None,
    ) -> None:
        for name, value in (("ffn_s", ffn_s), ("dispatch_s", dispatch_s), ("return_s", return_s)):
            if value < 0:
                raise ConfigError(f"{name}={value!r} is negative", remedy="give it in seconds")
        for name, count in (("credits", credits), ("per_rows", per_rows)):
            if count is not None and count < 1:
                raise ConfigError(f"{name}={count!r} is not positive", remedy="set 1 or more")
        self.credits = credits
        self._ffn_s = ffn_s
        self._dispatch_s = dispatch_s
        self._return_s = return_s
        self._per_rows = per_rows
        self._engine_free_s = 0.0
        self._flights: dict[int, _Flight] = {}
        self._next_ticket = 0
        self._closed = False

    def add_program(self, program: FFNProgram) -> None:
        """Ignore the experts; their weights stay where they are."""

    def row_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return fresh memory."""
        return torch.empty(rows, width, dtype=dtype)

    def send(self, item: WorkItem) -> int:
        """Note when the answer of ``item`` will be ready, and return its ticket."""
        now = time.perf_counter()
        if self._closed:
            raise ConnectorError(
                "the emulated connector is closed", layer=item.layer, stage=item.stage
            )
        if len(self._flights) >= self.credits:
            raise no_credit(self.credits, item)
        share = 1.0 if self._per_rows is None else item.rows.shape[0] / self._per_rows
        begin = max(now + self._dispatch_s * share, self._engine_free_s)
        self._engine_free_s = begin + self._ffn_s * share
        ticket = self._next_ticket
        self._next_ticket += 1
        end = self._engine_free_s
        self._flights[ticket] = _Flight(item, begin, end, end + self._return_s * share)
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Wait until the answer is ready; it is the item's rows themselves."""
        flight = self._flights.get(ticket)
        if flight is None:
            raise ConnectorError(f"ticket {ticket} is not outstanding: {sorted(self._flights)}")
        item = flight.item
        deadline = time.perf_counter() + timeout_s
        sleep_until(min(flight.ready_s, deadline))
        if flight.ready_s > deadline:
            raise ConnectorError(
                f"the emulated experts did not answer within {timeout_s:g} s",
                layer=item.layer,
                stage=item.stage,
                remedy="raise timeout_s above the emulated times",
            )
        return item.rows, item.shared_rows

    def ffn_times(self, ticket: int) -> tuple[int, int]:
        """When the engine had ``ticket``."""
        flight = self._flights[ticket]
        return round(flight.begin_s * 1e9), round(flight.end_s * 1e9)

    def release(self, ticket: int) -> None:
        """Drop the answer of ``ticket``."""
        self._flights.pop(ticket, None)

    def abandon(self) -> None:
        """Forget every item; the engine is free at once."""
        self._flights.clear()
        self._engine_free_s = 0.0

    def close(self) -> None:
        """Refuse further items; idempotent."""
        self._closed = True
        self._flights.clear()


def sleep_until(moment_s: float) -> None:
    """Return at ``moment_s`` of :func:`time.perf_counter`, within some microseconds."""
    rest = moment_s - time.perf_counter() - _SPIN_S
    if rest > 0:
        time.sleep(rest)
    while time.perf_counter() < moment_s:
        pass
