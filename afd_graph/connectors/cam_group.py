"""The ranks of a CAM group, and the arguments of its operators.

The operators are stateless: every call carries the whole topology. The same values are passed by
the connector, by the FFN side and by the operators that a lowering puts into a graph, so they are
made in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.lowering.ascend.ir_table import CANN, FORMS, MAX_ROWS, Operator, Package

COMM_ID = 0
"""Reserved by the operators."""


@dataclass(frozen=True)
class CamGroup:
    """One rank's view of the group: attention ranks first, FFN ranks after them.

    Attributes:
        attention_ranks: number of attention ranks, all replicas together.
        ffn_ranks: number of FFN ranks; each owns an equal share of the experts, rounded up.
        rank: this process's rank in the group.
        max_tokens: largest number of tokens of one replica's step, equal on all ranks of both
            roles: it sizes the windows.
        tp_size: attention ranks of one replica. The FFN side serves a replica when all of them
            have dispatched.
        dynamic_quant: int8 rows with one scale each on the way to the experts.
        operators: package of the operators, ``afd_ascend`` or ``umdk_cam_op_lib``; or ``cann``,
            CANN's own, for graphs only.
        group_name: HCCL's name of the group.
    """

    attention_ranks: int
    ffn_ranks: int
    rank: int
    max_tokens: int
    tp_size: int = 1
    dynamic_quant: bool = False
    operators: str = "afd_ascend"
    group_name: str = ""

    def __post_init__(self) -> None:
        for name in ("attention_ranks", "ffn_ranks", "max_tokens", "tp_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name}={value!r} is not a positive number", remedy="use 1 or more"
                )
        if self.operators not in FORMS:
            raise ConfigError(
                f"operators={self.operators!r} is not known", remedy=f"use one of {tuple(FORMS)}"
            )
        if self.attention_ranks % self.tp_size:
            raise ConfigError(
                f"tp_size={self.tp_size} does not divide attention_ranks={self.attention_ranks}",
                remedy="tp_size is the number of attention ranks of one replica",
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} is not in a group of {self.world_size}",
                remedy="attention ranks count from 0, FFN ranks follow them",
            )
        if not self.tp_size <= self.max_tokens <= MAX_ROWS:
            raise ConfigError(
                f"max_tokens={self.max_tokens} is not in {self.tp_size}..{MAX_ROWS}",
                remedy="set the largest number of tokens that one replica's step may have",
            )

    @property
    def world_size(self) -> int:
        """Ranks of both roles."""
        return self.attention_ranks + self.ffn_ranks

    @property
    def is_attention(self) -> bool:
        """Whether this rank has the attention role."""
        return self.rank < self.attention_ranks

    @property
    def package(self) -> Package:
        """The operators."""
        return FORMS[self.operators]

    @property
    def is_cann(self) -> bool:
        """Whether the operators are CANN's own, which have a schedule context as input."""
        return self.package.name == CANN.name

    @property
    def rows_per_dispatch(self) -> int:
        """Most rows that one rank may dispatch at once: it shares the window with its replica."""
        return self.max_tokens // self.tp_size

    def experts_per_rank(self, num_experts: int) -> int:
        """Experts that an FFN rank owns; the last one may own fewer."""
        return -(-num_experts // self.ffn_ranks)

    def first_expert(self, num_experts: int) -> int:
        """The first expert of this FFN rank."""
        return (self.rank - self.attention_ranks) * self.experts_per_rank(num_experts)

    def check_rows(self, rows: int, *, layer: int | None = None, stage: int | None = None) -> None:
        """Refuse a dispatch that the window cannot hold, or that sends nothing.

        Raises:
            ConnectorError: no rows, or more than :attr:`rows_per_dispatch`.
        """
        if not 1 <= rows <= self.rows_per_dispatch:
            raise ConnectorError(
                f"a dispatch of {rows} rows does not fit: 1 to {self.rows_per_dispatch} "
                f"(max_tokens={self.max_tokens} over tp_size={self.tp_size})",
                layer=layer,
                stage=stage,
                remedy="raise max_tokens on all ranks of both roles, or lower the batch",
            )

    def arguments(
        self, operator: Operator, tensors: Mapping[str, Any], **sizes: Any
    ) -> tuple[Any, ...]:
        """Positional arguments of ``operator``.

        Args:
            operator: one of the group's package.
            tensors: by name of the CANN input.
            sizes: ``hidden_size``, ``top_k``, ``num_experts``, and where the operator takes them
                ``rows`` and ``layer``.
        """
        values = {
            "hiddenSize": sizes["hidden_size"],
            "topk": sizes["top_k"],
            "moeRankNum": self.ffn_ranks,
            "attnRankNum": self.attention_ranks,
            "routeExpertNumPerMoe": self.experts_per_rank(sizes["num_experts"]),
            "attnRankId": self.rank,
            "moeRankId": self.rank,
            "worldSize": self.world_size,
            "tpSize": self.tp_size,
            "dynamicQuant": int(self.dynamic_quant),
            "hccl_group_name": self.group_name,
            "maxSeqLen": self.max_tokens,
            # The FFN side sizes its windows where the attention side counts its rows.
            "batchSize": sizes.get("rows", self.max_tokens),
            "layerIndex": sizes.get("layer"),
        }
        inputs = dict(operator.inputs)
        names = {argument: ir for argument, ir in operator.attributes if argument is not None}
        return tuple(
            tensors[inputs[argument]]
            if argument in inputs
            else COMM_ID
            if argument == "comm_id"
            else values[names[argument]]
            for argument in operator.argument_names
        )


def comm_args(device: torch.device | str) -> torch.Tensor:
    """The placeholder that every operator takes; its contents are not read."""
    return torch.zeros(1, dtype=torch.float16, device=device)
