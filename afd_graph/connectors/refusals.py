"""What every connector refuses: other experts for a known layer, wrong items, too many of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from afd_graph.connectors.base import WorkItem
from afd_graph.errors import ConnectorError
from afd_graph.ffn.program import FFNProgram


class ExpertLayer(Protocol):
    """What must be known of a layer's experts; an :class:`FFNProgram` is one."""

    @property
    def key(self) -> str:
        """Of the program; empty when it has none."""

    @property
    def hidden_size(self) -> int:
        """Width of a row."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""

    @property
    def num_experts(self) -> int:
        """Of the whole layer."""


def is_known(program: FFNProgram, known: ExpertLayer | None) -> bool:
    """Whether ``known`` is what the layer of ``program`` already has; False when it has none.

    Raises:
        ConnectorError: the layer has other experts.
    """
    if known is None:
        return False
    if known is program or (known.key and known.key == program.key):
        return True
    raise ConnectorError(
        f"the layer already has other experts (key {known.key!r}, now {program.key!r})",
        layer=program.layer,
        remedy="use one backend per model",
    )


def misfit(item: WorkItem, layers: Mapping[int, ExpertLayer]) -> str | None:
    """Why ``item`` does not fit the experts of its layer; None when it does."""
    layer = layers.get(item.layer)
    if layer is None:
        return f"no experts for this layer; layers here: {sorted(layers)}"
    if item.rows.dim() != 2 or item.rows.shape[1] != layer.hidden_size:
        return f"rows {tuple(item.rows.shape)} are not [m, {layer.hidden_size}]"
    if item.rows.dtype != layer.dtype:
        return f"rows are {item.rows.dtype}, the experts {layer.dtype}"
    if len(item.counts) != layer.num_experts:
        return f"{len(item.counts)} counts for {layer.num_experts} experts"
    return None


def wrong_item(
    item: WorkItem,
    problem: str,
    remedy: str = "check that both sides run the same model and version",
) -> ConnectorError:
    """The error of an item with ``problem``."""
    return ConnectorError(
        f"wrong work item: {problem}", layer=item.layer, stage=item.stage, remedy=remedy
    )


def no_credit(credits: int, item: WorkItem | None = None) -> ConnectorError:
    """The error of a send while ``credits`` items are under way."""
    return ConnectorError(
        f"send without a credit: {credits} items are un-received",
        layer=None if item is None else item.layer,
        stage=None if item is None else item.stage,
        remedy="receive and release an answer first",
    )
