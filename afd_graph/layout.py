"""Where rows live on tensor-parallel ranks: in the parent, in a stage, at the dispatch boundary.

Two layouts (semantics 4), both plain integers with tensor operations that follow them:

* :class:`StageLayout` (4.1, 4.3): parent rows to stage rows before the first MoE layer, and back
  after the last. With sequence parallelism the parent's shards become stage shards; without it
  every rank holds every row.
* :class:`DispatchLayout` (4.4): without sequence parallelism the ranks hold the same rows, so each
  dispatches its own share and gathers the answers.

Row ids are parent rows; ``ZERO_ROW`` marks a row of zeros. The all-gather is an argument: a
callable that takes this rank's rows and returns those of all ranks, concatenated in rank order. A
rank whose rows are all padding takes part in every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from afd_graph.errors import PlanError
from afd_graph.planner import Stage, StagePlan, check_stages

ZERO_ROW = -1
"""Row id of a row of zeros."""

AllGather = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, ...]`` of this rank to ``[ranks * rows, ...]``, in rank order."""


@dataclass(frozen=True)
class StageRows:
    """Rows of one stage on one rank.

    Attributes:
        hidden: ``[local_rows, hidden_size]``.
        residual: the same shape, or ``None`` for a model that has none here.
    """

    hidden: torch.Tensor
    residual: torch.Tensor | None = None


@dataclass(frozen=True)
class StageLayout:
    """Rows of a two-stage step on one tensor-parallel rank (semantics 4.1 to 4.3).

    Attributes:
        plan: the stages.
        parent_tokens: physical rows ``P`` of the parent batch, its padding included. Rows
            ``[N, P)`` are not computed by the stages and come back as zeros.
        tensor_parallel_size: ranks ``T`` of the tensor-parallel group.
        tensor_parallel_rank: this rank.
        sequence_parallel: whether rank ``r`` holds rows ``[r*P/T, (r+1)*P/T)`` of the parent, or
            every rank holds all of them.

    Raises:
        PlanError: extents that the ranks cannot share evenly, a parent without room for the plan,
            or a rank outside the group.
    """

    plan: StagePlan
    parent_tokens: int
    tensor_parallel_size: int
    tensor_parallel_rank: int
    sequence_parallel: bool

    def __post_init__(self) -> None:
        _check_rank(self.tensor_parallel_size, self.tensor_parallel_rank)
        size, parent = self.tensor_parallel_size, self.parent_tokens
        if self.sequence_parallel and (size <= 1 or parent % size):
            raise PlanError(
                "invalid sequence-parallel layout: "
                f"parent_tokens={parent}, tensor_parallel_size={size}",
                remedy="pad the parent to a multiple of two or more tensor-parallel ranks",
            )
        check_stages(self.plan.stages)
        for number, stage in enumerate(self.plan.stages):
            if self.sequence_parallel and stage.input_tokens % size:
                raise PlanError(
                    "a stage's rows must be divisible by the tensor-parallel size: "
                    f"token_slice={stage.token_slice}, tensor_parallel_size={size}, "
                    f"input_tokens={stage.input_tokens}",
                    stage=number,
                    remedy="plan the step with sequence_parallel=True",
                )
            if not self.sequence_parallel and stage.padding:
                raise PlanError(
                    "a stage must not be padded without sequence parallelism: "
                    f"token_slice={stage.token_slice}, input_tokens={stage.input_tokens}",
                    stage=number,
                    remedy="use plan.without_sequence_parallel()",
                )
        self.plan.check_parent(parent)

    # -- integers --------------------------------------------------------------------------------

    @property
    def parent_rows(self) -> range:
        """Parent rows that this rank holds outside the stages."""
        if not self.sequence_parallel:
            return range(self.parent_tokens)
        share = self.parent_tokens // self.tensor_parallel_size
        return range(self.tensor_parallel_rank * share, (self.tensor_parallel_rank + 1) * share)

    def local_rows(self, stage: int | Stage) -> list[int]:
        """Parent row of each of this rank's rows of ``stage``, ``ZERO_ROW`` for padding.

        Args:
            stage: the stage, or its index.
        """
        real, padding = self._local_extent(self._stage(stage))
        return [*real, *[ZERO_ROW] * padding]

    def local_input_tokens(self, stage: int | Stage) -> int:
        """Physical rows of ``stage`` on this rank; never zero."""
        real, padding = self._local_extent(self._stage(stage))
        return len(real) + padding

    def local_actual_tokens(self, stage: int | Stage) -> int:
        """Real rows of ``stage`` on this rank; zero for a rank that holds padding only."""
        return len(self._local_extent(self._stage(stage))[0])

    def restored_rows(self) -> list[int]:
        """Parent row of each of this rank's rows after the restore, ``ZERO_ROW`` for zeros."""
        real = self.plan.num_tokens
        return [row if row < real else ZERO_ROW for row in self.parent_rows]

    def _stage(self, stage: int | Stage) -> Stage:
        return stage if isinstance(stage, Stage) else self.plan.stages[stage]

    def _local_extent(self, stage: Stage) -> tuple[range, int]:
        """Real parent rows on this rank, and the number of zero rows after them."""
        tokens = stage.token_slice
        if not self.sequence_parallel:
            return range(tokens.start, tokens.stop), 0
        share = stage.input_tokens // self.tensor_parallel_size
        start = tokens.start + self.tensor_parallel_rank * share
        real = range(min(start, tokens.stop), min(start + share, tokens.stop))
        return real, share - len(real)

    # -- tensors ---------------------------------------------------------------------------------

    def build(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, all_gather: AllGather
    ) -> list[StageRows]:
        """Turn this rank's parent rows into its rows of every stage.

        With sequence parallelism this is one gather, for hidden and residual together (one each
        if their dtypes differ); without, none.

        Args:
            hidden: ``[len(parent_rows), hidden_size]``.
            residual: the same shape, or ``None``.
            all_gather: the tensor-parallel all-gather.

        Raises:
            PlanError: a tensor has another number of rows than the layout, before or after the
                gather.
        """
        given = [hidden] if residual is None else [hidden, residual]
        for name, tensor in zip(("hidden states", "residual"), given, strict=False):
            if len(tensor) != len(self.parent_rows):
                raise PlanError(
                    f"{name} must have this rank's rows of the parent batch: "
                    f"rows={len(tensor)}, expected={len(self.parent_rows)}",
                    remedy="pass the rows in the parent's layout",
                )
        if self.sequence_parallel:
            given = _gather_together(given, self.parent_tokens, all_gather)
        return [
            StageRows(*(self._take(tensor, stage, axis=0) for tensor in given))
            for stage in self.plan.stages
        ]

    def shard_positions(self, positions: torch.Tensor, stage: int | Stage) -> torch.Tensor:
        """Take this rank's rows of ``stage`` from positions that every rank holds in full.

        Args:
            positions: ``[parent_tokens]`` or ``[axes, parent_tokens]``.
            stage: the stage, or its index.
        """
        return self._take(positions, self._stage(stage), self.token_axis(positions))

    def shard_scaling(
        self, scaling: torch.Tensor, positions: torch.Tensor, stage: int | Stage
    ) -> torch.Tensor:
        """Take the rows of ``stage`` from a per-token scaling that every rank holds in full.

        The scaling's token axis is that of ``positions`` where its extent fits, otherwise the
        first that fits; a scaling without a token axis is returned as it is.
        """
        preferred = self.token_axis(positions)
        for axis in (preferred, 1, 0):
            if axis < scaling.dim() and scaling.shape[axis] == self.parent_tokens:
                return self._take(scaling, self._stage(stage), axis)
        return scaling

    def token_axis(self, positions: torch.Tensor) -> int:
        """Token axis of a full positions tensor: axis 1 before axis 0.

        Axis 1 comes first so that a square ``[axes, parent_tokens]`` is not misread.

        Raises:
            PlanError: neither axis has ``parent_tokens`` entries.
        """
        for axis in (1, 0):
            if axis < positions.dim() and positions.shape[axis] == self.parent_tokens:
                return axis
        raise PlanError(
            f"positions must have {self.parent_tokens} tokens on axis 0 or 1: "
            f"shape={tuple(positions.shape)}",
            remedy="pass positions of the whole parent batch",
        )

    def restore(
        self, stages: Sequence[StageRows], all_gather: AllGather
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn this rank's rows of every stage back into its parent rows; the inverse of `build`.

        With sequence parallelism this is one gather per stage, for hidden and residual together
        (one each if their dtypes differ), so that stage 0 can be gathered while stage 1 is still
        with the experts.

        Args:
            stages: the outputs of the stages, in order.
            all_gather: the tensor-parallel all-gather.

        Returns:
            Hidden and residual, ``[len(parent_rows), hidden_size]``; rows ``[N, P)`` are zero.

        Raises:
            PlanError: another number of stages, of rows, or a residual in some stages only.
        """
        if len(stages) != len(self.plan.stages):
            raise PlanError(
                f"the layout has {len(self.plan.stages)} stages, got outputs of {len(stages)}",
                remedy="restore after every stage has been received",
            )
        if len({rows.residual is None for rows in stages}) != 1:
            raise PlanError(
                "some stages have a residual and others do not",
                remedy="pass the residual of every stage, or of none",
            )
        columns: list[list[torch.Tensor]] = []
        for number, (stage, rows) in enumerate(zip(self.plan.stages, stages, strict=True)):
            given = [rows.hidden] if rows.residual is None else [rows.hidden, rows.residual]
            expected = self.local_input_tokens(stage)
            for tensor in given:
                if len(tensor) != expected:
                    raise PlanError(
                        f"a stage output has {len(tensor)} rows, its layout {expected}",
                        stage=number,
                        remedy="return one row per row of the stage",
                    )
            if self.sequence_parallel:
                given = _gather_together(given, stage.input_tokens, all_gather)
            columns.append([tensor[: stage.actual_tokens] for tensor in given])
        restored = [self._parent_share(parts) for parts in zip(*columns, strict=True)]
        return restored[0], restored[1] if len(restored) > 1 else None

    def _parent_share(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows, real = self.parent_rows, self.plan.num_tokens
        whole = torch.cat(list(parts))
        kept = whole[min(rows.start, real) : min(rows.stop, real)]
        return _zero_pad(kept, len(rows), axis=0)

    def _take(self, tensor: torch.Tensor, stage: Stage, axis: int) -> torch.Tensor:
        real, padding = self._local_extent(stage)
        kept = tensor.narrow(axis, real.start, len(real))
        return _zero_pad(kept, len(real) + padding, axis)

    # -- diagnostics -----------------------------------------------------------------------------

    def diagnostic(self, stage: int) -> str:
        """One line about a stage's attention, with the reference's fields (semantics 8)."""
        planned = self.plan.stages[stage]
        tokens = planned.token_slice
        return (
            f"AFD Async CAM stage attention; stage={stage} actual_tokens={planned.actual_tokens} "
            f"token_slice=({tokens.start},{tokens.stop}) input_tokens={planned.input_tokens} "
            f"local_tokens={self.local_input_tokens(stage)} "
            f"sequence_parallel={self.sequence_parallel} "
            f"context_num_tokens={planned.actual_tokens} context_pad_size={planned.padding}"
        )


@dataclass(frozen=True)
class DispatchLayout:
    """Rows that one rank dispatches and gets back (semantics 4.4).

    Without sequence parallelism every rank holds all ``rows``: rank ``r`` dispatches share ``r``,
    so that each real row crosses once, and gathers the answers. Otherwise nothing moves. A share
    is never empty: a rank without real rows dispatches padding, since the experts wait for every
    rank of the group.

    Attributes:
        rows: rows ``n`` that enter the boundary on this rank.
        tensor_parallel_size: ranks ``T`` of the tensor-parallel group.
        tensor_parallel_rank: this rank.
        sequence_parallel: whether the ranks already hold different rows.

    Raises:
        PlanError: no rows, or a rank outside the group.
    """

    rows: int
    tensor_parallel_size: int
    tensor_parallel_rank: int
    sequence_parallel: bool

    def __post_init__(self) -> None:
        _check_rank(self.tensor_parallel_size, self.tensor_parallel_rank)
        if self.rows < 1:
            raise PlanError(
                f"a dispatch needs at least one row: rows={self.rows}",
                remedy="run an empty step without dispatch",
            )

    # -- integers --------------------------------------------------------------------------------

    @property
    def requires_all_gather(self) -> bool:
        """Whether the answers of the other ranks have to be gathered."""
        return not self.sequence_parallel and self.tensor_parallel_size > 1

    @property
    def local_tokens(self) -> int:
        """Physical rows that this rank dispatches."""
        if not self.requires_all_gather:
            return self.rows
        return -(-self.rows // self.tensor_parallel_size)

    @property
    def padded_tokens(self) -> int:
        """Rows of all ranks together (of this rank, when nothing is gathered)."""
        if not self.requires_all_gather:
            return self.rows
        return self.local_tokens * self.tensor_parallel_size

    @property
    def local_slice(self) -> slice:
        """This rank's share of the padded rows."""
        if not self.requires_all_gather:
            return slice(0, self.rows)
        start = self.tensor_parallel_rank * self.local_tokens
        return slice(start, start + self.local_tokens)

    def local_rows(self) -> list[int]:
        """Entering row of each row that this rank dispatches, ``ZERO_ROW`` for padding."""
        share = self.local_slice
        return [row if row < self.rows else ZERO_ROW for row in range(share.start, share.stop)]

    def restored_rows(self) -> list[int]:
        """Entering row of each row after the restore: every one of them, in order."""
        return list(range(self.rows))

    # -- tensors ---------------------------------------------------------------------------------

    def shard(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Take this rank's share of everything that is dispatched.

        Padding rows are zeros: expert 0 with weight 0. When nothing moves, the very same tensors
        are returned.

        Args:
            tensors: by name, each ``[rows, ...]``: hidden states, top-k ids, top-k weights and
                what else travels with a row.

        Raises:
            PlanError: a tensor has another number of rows, named.
        """
        for name, tensor in tensors.items():
            if len(tensor) != self.rows:
                raise PlanError(
                    f"{name} must match the hidden states on axis 0: "
                    f"rows={len(tensor)}, expected={self.rows}",
                    remedy="dispatch one entry per row",
                )
        if not self.requires_all_gather:
            return tensors
        start = min(self.local_slice.start, self.rows)
        stop = min(self.local_slice.stop, self.rows)
        return {
            name: _zero_pad(tensor[start:stop], self.local_tokens, axis=0)
            for name, tensor in tensors.items()
        }

    def restore(self, received: torch.Tensor, all_gather: AllGather) -> torch.Tensor:
        """Gather the ranks' answers and drop the padding; the inverse of `shard`.

        Args:
            received: ``[local_tokens, ...]`` answers to this rank's share.
            all_gather: the tensor-parallel all-gather; every rank must take part.

        Returns:
            ``[rows, ...]``.

        Raises:
            PlanError: ``received`` has another number of rows than were dispatched.
        """
        if len(received) != self.local_tokens:
            raise PlanError(
                "the answer does not match the dispatched rows: "
                f"rows={len(received)}, expected={self.local_tokens}",
                remedy="restore with the layout that was used to dispatch",
            )
        if not self.requires_all_gather:
            return received
        (gathered,) = _gather_together([received], self.padded_tokens, all_gather)
        return gathered[: self.rows]

    # -- diagnostics -----------------------------------------------------------------------------

    def diagnostic(self, phase: str) -> str:
        """One line about this boundary crossing, with the reference's fields (semantics 8).

        Args:
            phase: ``dispatch`` or ``restore``.
        """
        share = self.local_slice
        return (
            f"AFD Async CAM layout; phase={phase} sequence_parallel={self.sequence_parallel} "
            f"tp_rank={self.tensor_parallel_rank} tp_size={self.tensor_parallel_size} "
            f"parent_tokens={self.rows} padded_tokens={self.padded_tokens} "
            f"local_slice=({share.start},{share.stop}) local_tokens={self.local_tokens} "
            f"tp_all_gather={self.requires_all_gather}"
        )


def _check_rank(size: int, rank: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise PlanError(
            "tensor_parallel_rank must lie in the group: "
            f"tensor_parallel_rank={rank}, tensor_parallel_size={size}",
            remedy="pass the rank and size of the same tensor-parallel group",
        )


def _zero_pad(tensor: torch.Tensor, rows: int, axis: int) -> torch.Tensor:
    missing = rows - tensor.shape[axis]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def _gather_together(
    tensors: list[torch.Tensor], expected_rows: int, all_gather: AllGather
) -> list[torch.Tensor]:
    """Gather several ``[rows, ...]`` tensors, in one collective if their dtypes allow."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [_gather_together([tensor], expected_rows, all_gather)[0] for tensor in tensors]
    widths = [tensor.shape[-1] for tensor in tensors]
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)
    gathered = all_gather(joined.contiguous())
    if len(gathered) != expected_rows:
        raise PlanError(
            f"the all-gather returned {len(gathered)} rows, expected {expected_rows}",
            remedy="pass the all-gather of this tensor-parallel group",
        )
    return [gathered] if len(tensors) == 1 else list(gathered.split(widths, dim=-1))
