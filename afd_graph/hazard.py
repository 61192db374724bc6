"""The prefix-cache hazard: a step in which stage 0 reads KV entries that stage 1 writes.

Unsplit, every layer first writes the keys and values of all new tokens and then attends. Split,
stage 0 attends before stage 1 has written. With prefix caching a request may be scheduled with a
context whose blocks another request of the *same* step computes; if the reader falls in stage 0
and the writer in stage 1, the reader would attend to what the blocks held before.

Ownership of a block is not enough to decide: a request that is cut in the middle of a block reads
the front of it in stage 0 and writes the rest of it in stage 1, which is harmless. So the check
compares, per block, how far stage 0 reads with where stage 1 starts to write.

Linear in scheduled tokens, block-table entries and the range of block ids that stage 1 writes; no
Python loop over any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afd_graph.errors import PlanError
from afd_graph.metadata import AttentionMetadata
from afd_graph.planner import StagePlan


@dataclass(frozen=True)
class HazardReport:
    """What stage 0 would read too early.

    Attributes:
        block_ids: KV blocks concerned, ascending.
        readers: requests of stage 0 that read them, by batch index.
        writers: requests of stage 1 that write them, by batch index.
    """

    block_ids: tuple[int, ...]
    readers: tuple[int, ...]
    writers: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"requests {list(self.readers)} of stage 0 read KV blocks {list(self.block_ids)} "
            f"that requests {list(self.writers)} write in stage 1 of the same step"
        )


class PrefixHazard:
    """The hazard check of one step, prepared once and asked about any candidate plan.

    Pass it as ``plan_stages(..., hazards=PrefixHazard(...))``. All inputs are host memory, so that
    asking does not wait for a device.

    Args:
        query_start_loc: ``[num_reqs + 1]`` starts of the requests on the token axis.
        seq_lens: ``[num_reqs]`` KV length of each request, this step's tokens included.
        block_table: ``[num_reqs, max_blocks]`` KV block ids of each request.
        slot_mapping: ``[num_tokens]`` slot that each token writes, ``block * block_size + offset``;
            negative for tokens that write nothing.
        block_size: tokens per KV block.

    Raises:
        PlanError: the shapes disagree, or a tensor lies on another device than the CPU.
    """

    def __init__(
        self,
        *,
        query_start_loc: torch.Tensor | Sequence[int],
        seq_lens: torch.Tensor | Sequence[int],
        block_table: torch.Tensor | Sequence[Sequence[int]],
        slot_mapping: torch.Tensor | Sequence[int],
        block_size: int,
    ) -> None:
        self._starts = _host_tensor("query_start_loc", query_start_loc, 1)
        self._seq_lens = _host_tensor("seq_lens", seq_lens, 1)
        self._block_table = _host_tensor("block_table", block_table, 2)
        self._slots = _host_tensor("slot_mapping", slot_mapping, 1)
        self._block_size = block_size
        if block_size < 1:
            raise PlanError(
                f"block_size must be positive: block_size={block_size}",
                remedy="pass the tokens per KV block",
            )
        requests = len(self._starts) - 1
        if not requests == len(self._seq_lens) == len(self._block_table):
            raise PlanError(
                "hazard inputs disagree on the number of requests: "
                f"query_start_loc={requests}, seq_lens={len(self._seq_lens)}, "
                f"block_table={len(self._block_table)}",
                remedy="pass the fields of one step",
            )
        if len(self._slots) < int(self._starts[-1]):
            raise PlanError(
                f"slot_mapping has {len(self._slots)} entries for {int(self._starts[-1])} tokens",
                remedy="pass the fields of one step",
            )

    @classmethod
    def from_metadata(cls, metadata: AttentionMetadata, *, block_size: int) -> PrefixHazard:
        """Prepare the check from the full-batch metadata of a step.

        Raises:
            PlanError: a field is missing, or its only copy lies on a device.
        """

        def first(*names: str) -> torch.Tensor:
            for name in names:
                if metadata.get(name) is not None:
                    return metadata.get(name)
            raise PlanError(
                f"metadata field {names[0]!r} is missing",
                remedy=f"give one of {', '.join(names)}",
            )

        return cls(
            query_start_loc=first("query_start_loc_cpu", "query_start_loc"),
            seq_lens=first("seq_lens_cpu", "_seq_lens_cpu", "seq_lens"),
            block_table=first("block_table", "block_table_tensor"),
            slot_mapping=first("slot_mapping"),
            block_size=block_size,
        )

    def __call__(self, plan: StagePlan) -> HazardReport | None:
        """Report what stage 0 of ``plan`` would read too early, or ``None``.

        Raises:
            PlanError: the plan has another number of stages than two, or does not fit the step.
        """
        if len(plan.stages) != 2:
            raise PlanError(
                f"the prefix hazard is defined for two stages, got {len(plan.stages)}",
                remedy="build plans with plan_stages",
            )
        if plan.num_tokens > len(self._slots):
            raise PlanError(
                f"the plan has {plan.num_tokens} tokens, the step {len(self._slots)}",
                remedy="prepare the hazard check from the step that is planned",
            )
        first, second = plan.stages
        written = self._slots[second.token_slice]
        written_blocks = torch.where(
            written < 0, -1, written.div(self._block_size, rounding_mode="floor")
        )
        last_written = int(written_blocks.max())
        if last_written < 0:
            return None
        # Smallest written block, over the tokens that write at all.
        base = int(torch.where(written_blocks < 0, last_written, written_blocks).min())

        # Per block id from base on: the lowest offset that stage 1 writes (block_size: none).
        # Tokens that write nothing and reads outside the range land in a spare last entry.
        spare = last_written - base + 1
        first_write = torch.full((spare + 1,), self._block_size, dtype=torch.int64)
        where = torch.where(written_blocks < 0, spare, written_blocks - base)
        first_write.scatter_reduce_(0, where, written.remainder(self._block_size), "amin")
        first_write[spare] = self._block_size

        # Per table entry of stage 0: how many tokens of the block it reads.
        requests = first.request_slice.stop
        blocks = self._block_table[:requests]
        lengths = self._seq_lens[:requests].clone()
        lengths[-1] -= self._starts[requests] - first.token_slice.stop
        offsets = torch.arange(blocks.shape[1]) * self._block_size
        extents = (lengths[:, None] - offsets).clamp_(0, self._block_size)
        inside = (blocks >= base) & (blocks <= last_written)
        too_early = extents > first_write[torch.where(inside, blocks - base, spare)]
        if not bool(too_early.any()):
            return None
        return self._report(too_early, blocks, written_blocks, second.token_slice.start)

    def _report(
        self,
        too_early: torch.Tensor,
        blocks: torch.Tensor,
        written_blocks: torch.Tensor,
        second_start: int,
    ) -> HazardReport:
        read = blocks[too_early].unique()
        tokens = torch.isin(written_blocks, read).nonzero()[:, 0] + second_start
        writers = torch.searchsorted(self._starts, tokens, right=True) - 1
        return HazardReport(
            block_ids=tuple(read.tolist()),
            readers=tuple(too_early.any(dim=1).nonzero()[:, 0].tolist()),
            writers=tuple(writers.unique().tolist()),
        )


def _host_tensor(name: str, value: torch.Tensor | Sequence, dimensions: int) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    if tensor.device.type != "cpu":
        raise PlanError(
            f"hazard input {name} lies on {tensor.device}",
            remedy="pass the host copy; reading a device tensor here would stall every step",
        )
    if tensor.dim() != dimensions:
        raise PlanError(
            f"hazard input {name} has shape {tuple(tensor.shape)}, expected {dimensions} axes",
            remedy="pass the fields of one step",
        )
    return tensor.to(torch.int64)
