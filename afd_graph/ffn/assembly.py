"""From the parts of a replica's ranks to one work item, and from its answer back to the parts.

Every rank of a tensor-parallel replica dispatches its share of the tokens. An FFN rank computes
them together, so that the weights of an expert are read once for all of them. Within a rank's
part rows are grouped by expert already; together they are merged by expert, then by rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from afd_graph.connectors.base import WorkItem
from afd_graph.errors import ConnectorError
from afd_graph.ffn.inlet import Part


class Replicas:
    """Collects the parts of every replica's items; each item is ready when all ranks sent theirs.

    Args:
        tp: ranks of a replica.
    """

    def __init__(self, tp: int) -> None:
        self._tp = tp
        self._waiting: dict[int, list[deque[Part]]] = {}

    def add(self, replica: int, place: int, part: Part) -> list[Part] | None:
        """Take a part from the rank at ``place``; returns the item's parts when it is complete.

        Raises:
            ConnectorError: the ranks of the replica dispatched different items.
        """
        waiting = self._waiting.setdefault(replica, [deque() for _ in range(self._tp)])
        waiting[place].append(part)
        if not all(waiting):
            return None
        parts = [parts_of_rank.popleft() for parts_of_rank in waiting]
        headers = [p.header for p in parts]
        if len({(h.sequence, h.layer, h.stage, h.parent_rows) for h in headers}) > 1:
            told = ", ".join(
                f"rank {p.inlet.rank} layer {p.header.layer} stage {p.header.stage}"
                + (f" of {p.header.parent_rows} tokens" if p.header.parent_rows >= 0 else "")
                for p in parts
            )
            raise ConnectorError(
                f"the ranks of one replica dispatched different items: {told}",
                layer=parts[0].header.layer,
                stage=parts[0].header.stage,
                remedy="run the same steps on all ranks of a replica",
            )
        return parts

    def overdue(self, since_s: float) -> tuple[Part, list[int]] | None:
        """The oldest part from before ``since_s`` whose item is incomplete, and who is missing.

        Returns:
            The part, and the places of the ranks that it waits for.
        """
        for waiting in self._waiting.values():
            there = [parts[0] for parts in waiting if parts]
            if there and min(part.arrived_s for part in there) < since_s:
                oldest = min(there, key=lambda part: part.arrived_s)
                return oldest, [place for place, parts in enumerate(waiting) if not parts]
        return None


class MergedItem:
    """The parts of one item, to be computed as one.

    Args:
        parts: of each rank of the replica.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        first = parts[0]
        self._order: torch.Tensor | None = None
        counts: Sequence[int] = first.header.counts
        rows = first.rows
        if len(parts) > 1:
            counts = [sum(each) for each in zip(*(p.header.counts for p in parts), strict=True)]
            rows = torch.cat([part.rows for part in parts])
            self._order = _by_expert([part.header.counts for part in parts], rows.device)
            rows = rows.index_select(0, self._order)
        shared = None
        if first.shared_rows is not None:
            shared = torch.cat([p.shared_rows for p in parts if p.shared_rows is not None])
        self.item = WorkItem(first.header.layer, first.header.stage, rows, counts, shared)

    def out(self) -> torch.Tensor | None:
        """Memory that the experts may answer into, where that is the answer to one rank."""
        return None if self._order is not None else _answer_of(self.parts[0])

    def scatter(self, rows: torch.Tensor, shared: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Put every rank's rows into its answer memory; returns their shared rows.

        Args:
            rows: the experts' answer to :attr:`item`.
            shared: the shared experts' answer.
        """
        if self._order is None:
            answer = _answer_of(self.parts[0])
            if rows.data_ptr() != answer.data_ptr():
                answer.copy_(rows)
        else:
            place = torch.empty_like(self._order)
            place[self._order] = torch.arange(self._order.numel(), device=place.device)
            begin = 0
            for part in self.parts:
                end = begin + part.rows.shape[0]
                torch.index_select(rows, 0, place[begin:end], out=_answer_of(part))
                begin = end
        if shared is None:
            return [None] * len(self.parts)
        sizes = [0 if p.shared_rows is None else p.shared_rows.shape[0] for p in self.parts]
        return list(shared.split(sizes))


def _answer_of(part: Part) -> torch.Tensor:
    return part.slot.answer.like(part.rows)


def _by_expert(counts: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Order of rows that lie by rank, then by expert, so that they lie by expert, then by rank."""
    repeats = torch.tensor(counts, dtype=torch.int64)
    experts = torch.arange(repeats.shape[1]).repeat(repeats.shape[0])
    of_rows = experts.repeat_interleave(repeats.reshape(-1))
    return of_rows.argsort(stable=True).to(device)
