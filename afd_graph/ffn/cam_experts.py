"""An FFN rank of a CAM group: receive a chunk, run this rank's experts, send the rows back.

One loop serves all replicas, layers and stages; every chunk says which layer it is of. What a
dispatch_recv returns is as large as its window: only the rows that the counts announce mean
anything. The info tensor goes back as it came. A chunk without rows is answered too, or the
attention side would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from afd_graph.connectors.base import WorkItem
from afd_graph.connectors.cam import SHUTDOWN_LAYER, joined
from afd_graph.connectors.cam_group import CamGroup, comm_args
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.ffn.executor import FFNExecutor
from afd_graph.ffn.program import Expression, FFNProgram

_LAYER = 2  # place of the layer in the info tensor


@dataclass
class _Chunk:
    """What one dispatch_recv brought, in numbers of the host."""

    layer: int
    counts: list[int]
    shared_rows: int
    ends_replica: bool
    source: int


class CamExperts:
    """The experts of one FFN rank.

    Args:
        group: this rank's view; all ranks of both roles have the same sizes in theirs.
        hidden_size: width of the rows.
        top_k: choices per token.
        num_experts: routed experts of a layer, of all FFN ranks together.
        dtype: of the rows.
        device: of rows and weights.
        host, port, buffer_mb: to make the group, when it has no name yet.
    """

    def __init__(
        self,
        group: CamGroup,
        *,
        hidden_size: int,
        top_k: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "npu",
        host: str = "127.0.0.1",
        port: int = 29600,
        buffer_mb: int = 4096,
    ) -> None:
        if group.is_attention:
            raise ConfigError(
                f"rank {group.rank} of {group.world_size} is an attention rank",
                remedy=f"FFN ranks count from {group.attention_ranks}",
            )
        self.group, self._process_group = joined(
            group, host=host, port=port, buffer_mb=buffer_mb, device=device
        )
        self._sizes = {"hidden_size": hidden_size, "top_k": top_k, "num_experts": num_experts}
        self._num_experts = num_experts
        self._hidden = hidden_size
        self._dtype = dtype
        self._comm_args = comm_args(device)
        self._anchor = torch.zeros(1, dtype=dtype, device=device)
        self._executor = FFNExecutor()
        self._shared_layers: set[int] = set()
        self._gone: set[int] = set()

    def add_program(self, program: FFNProgram) -> None:
        """Take this rank's share of the experts of one layer.

        Raises:
            ConfigError: the layer does not fit the group's sizes, or its operators.
        """
        if (program.num_experts, program.hidden_size) != (self._num_experts, self._hidden):
            raise ConfigError(
                f"layer {program.layer} has {program.num_experts} experts of width "
                f"{program.hidden_size}, the group {self._num_experts} of {self._hidden}",
                remedy="all MoE layers of one group have equal sizes",
            )
        check_shared([program], self.group)
        first = self.group.first_expert(self._num_experts)
        self._executor.add(share_of(program, first, self.group.experts_per_rank(self._num_experts)))
        if program.shared is not None:
            self._shared_layers.add(program.layer)

    def serve(self) -> int:
        """Serve until every replica has said goodbye; returns the number of chunks."""
        chunks = 0
        while len(self._gone) < self.group.attention_ranks // self.group.tp_size:
            self.serve_one()
            chunks += 1
        return chunks

    def serve_one(self) -> int:
        """Receive one chunk, compute and answer; returns its layer.

        Raises:
            ConnectorError: a layer or rows that this rank has no experts for.
        """
        receive = self.group.package.dispatch_recv
        tensors = {"x": self._anchor, "commArgs": self._comm_args}
        received = receive.overload(*self.group.arguments(receive, tensors, **self._sizes))
        named = dict(zip(receive.outputs, received, strict=True))
        chunk = self._read(named)
        answers = self._answers(chunk, named)
        send = self.group.package.combine_send
        tensors = {**answers, "commArgs": self._comm_args, "batchInfo": named["batchInfo"]}
        send.overload(*self.group.arguments(send, tensors, **self._sizes))
        if chunk.layer == SHUTDOWN_LAYER and chunk.ends_replica:
            self._gone.add(chunk.source // self.group.tp_size)
        return chunk.layer

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self._process_group is not None:
            self._process_group.shutdown()
            self._process_group = None

    def _read(self, received: dict[str, torch.Tensor]) -> _Chunk:
        """Everything that the host must know, in one transfer."""
        header = received["batchInfo"][:5]
        counts = received["epRecvCountRouted"]
        shared = received.get("epRecvCountShared", counts[:0])
        numbers = torch.cat([header, shared, counts]).tolist()
        ends = numbers[4] == counts.numel() - 1
        return _Chunk(
            layer=numbers[_LAYER],
            counts=numbers[5 + shared.numel() :],
            shared_rows=numbers[5] if shared.numel() else 0,
            ends_replica=ends,
            source=numbers[1],
        )

    def _answers(self, chunk: _Chunk, received: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = self._rows(received, "", sum(chunk.counts))
        shared = self._rows(received, "Shared", chunk.shared_rows)
        if chunk.layer != SHUTDOWN_LAYER:
            wants_shared = chunk.layer in self._shared_layers
            local = chunk.counts[: self._local_experts()]
            if sum(local) != sum(chunk.counts):
                raise ConnectorError(
                    f"rows for experts that this rank does not have: {chunk.counts}",
                    layer=chunk.layer,
                    remedy="check that both roles have the same number of experts",
                )
            item = WorkItem(chunk.layer, 0, rows, local, shared if wants_shared else None)
            rows, shared_out = self._executor.run(item)
            shared = torch.zeros_like(shared) if shared_out is None else shared_out
        answers = {"expandX": self._at_least_one_row(rows)}
        if self.group.package.carries_shared:
            answers["expandXShared"] = self._at_least_one_row(shared)
        return answers

    def _local_experts(self) -> int:
        per_rank = self.group.experts_per_rank(self._num_experts)
        return max(0, min(per_rank, self._num_experts - self.group.first_expert(self._num_experts)))

    def _rows(self, received: dict[str, torch.Tensor], kind: str, count: int) -> torch.Tensor:
        """The valid rows in the dtype of the experts."""
        if f"expandX{kind}" not in received:
            return self._anchor.new_zeros((0, self._hidden))
        rows = received[f"expandX{kind}"][:count]
        if not self.group.dynamic_quant:
            return rows
        scales = received[f"dynamicScales{kind}"][:count]
        return (rows.float() * scales[:, None]).to(self._dtype)

    def _at_least_one_row(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0]:
            return rows.contiguous()
        return self._anchor.new_zeros((1, self._hidden))


def check_shared(programs: Sequence[FFNProgram], group: CamGroup) -> None:
    """Refuse shared experts whose rows the operators do not carry.

    Raises:
        ConfigError: there are some.
    """
    for program in programs:
        if program.shared is not None and not group.package.carries_shared:
            raise ConfigError(
                f"{group.operators} carries routed rows only, layer {program.layer} has shared "
                "experts",
                remedy="set shared_experts='attention', or use operators='umdk_cam_op_lib'",
            )


def share_of(program: FFNProgram, first: int, count: int) -> FFNProgram:
    """The experts ``first .. first + count`` of a layer; the weights are views."""
    stop = min(first + count, program.num_experts)

    def cut(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        of_experts = weight.dim() and weight.shape[0] == program.num_experts
        return name, weight[first:stop] if of_experts else weight

    weights = [cut(name, weight) for name, weight in program.routed.weights]
    return replace(
        program, num_experts=stop - first, routed=Expression(program.routed.graph, weights)
    )
