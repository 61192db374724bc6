"""The contract between attention and experts: work items, and what a connector must do.

A :class:`Connector` moves rows. Credits, pairing of dispatch and receive, the layout log and the
timeline are kept by :class:`afd_graph.runtime.Channel`, the same for every connector.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from afd_graph.errors import ConfigError, ConnectorError

if TYPE_CHECKING:
    from afd_graph.config import AFDConfig
    from afd_graph.ffn.program import FFNProgram


@dataclass
class WorkItem:
    """What the experts of one layer compute for one stage.

    Attributes:
        layer: index of the MoE layer.
        stage: token stage, 0 or 1 (0 for an unsplit step).
        rows: ``[m, hidden]``, grouped by expert in ascending order; ``m`` may be 0.
        counts: rows per expert, ``sum(counts) == m``.
        shared_rows: ``[n, hidden]`` input of the shared experts when they run on this side.
        tokens: number of tokens that the rows are of, where the sender knows.
        parent_rows: tokens of the stage on all ranks of a tensor-parallel group, when the rows are
            of this rank's share.
    """

    layer: int
    stage: int
    rows: torch.Tensor
    counts: Sequence[int]
    shared_rows: torch.Tensor | None = None
    tokens: int | None = None
    parent_rows: int | None = None


class Connector(ABC):
    """Moves work items to the experts and their answers back, in order.

    Attributes:
        credits: un-received dispatches that the connector can hold.
        channel_type: takes the place of :class:`afd_graph.runtime.Channel` for a connector that
            moves tokens and not rows.
        frees_weights: whether it frees the memory of weights that it takes, which then must be
            memory of their own and no mapped file.
    """

    credits: int = 2
    channel_type: Any = None
    frees_weights: bool = False

    def configured(self, config: AFDConfig) -> None:  # noqa: B027  (few need it)
        """Take note of the backend's configuration, before anything is compiled.

        Connectors whose other side was configured by somebody else compare the two here.
        """

    def check_group(self, size: int) -> None:  # noqa: B027  (few need it)
        """Refuse a model whose tensor-parallel group of ``size`` ranks cannot be served."""

    def failure_behind(self, error: BaseException) -> ConnectorError | None:
        """The failure of this connector that made ``error`` of a step happen elsewhere."""
        return None

    @abstractmethod
    def add_program(self, program: FFNProgram) -> None:
        """Hand the experts of one layer to the FFN side; takes ownership of their weights.

        Called before the first dispatch of that layer. A second call with a program of equal
        ``key`` does nothing.
        """

    @abstractmethod
    def row_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised ``[rows, width]`` tensor to fill for the next :meth:`send`.

        A connector with a wire returns memory that the FFN side sees, so that gathering the rows
        is the only copy.
        """

    @abstractmethod
    def send(self, item: WorkItem) -> int:
        """Start ``item`` and return its ticket at once; never blocks on the experts."""

    @abstractmethod
    def wait(self, ticket: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(rows, shared_rows)`` of the answer; valid until :meth:`release`.

        Raises:
            ConnectorError: the FFN side died, failed or did not answer within ``timeout_s``.
        """

    def ffn_times(self, ticket: int) -> tuple[int, int] | None:
        """When the experts of the answered ``ticket`` began and ended, before :meth:`release`.

        Nanoseconds on the clock of this process's :func:`time.perf_counter_ns`; ``None`` when the
        connector does not know.
        """
        return None

    @abstractmethod
    def release(self, ticket: int) -> None:
        """Give the buffers of ``ticket`` back."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget every unanswered item, after a failed step; later steps start clean."""

    @abstractmethod
    def close(self) -> None:
        """Stop the FFN side and free everything; idempotent."""


_BUILT_IN = {
    "local": "afd_graph.connectors.local:LocalConnector",
    "process": "afd_graph.connectors.process:ProcessConnector",
    "emulated": "afd_graph.connectors.emulated:EmulatedConnector",
    "cam": "afd_graph.connectors.cam:CamConnector",
    "torch_distributed": "afd_graph.connectors.torch_distributed:TorchDistributedConnector",
}
_registered: dict[str, Callable[..., Connector]] = {}


def register_connector(name: str, factory: Callable[..., Connector]) -> None:
    """Make ``AFDConfig(connector=name)`` build ``factory(**connector_options)``."""
    _registered[name] = factory


def connector_names() -> tuple[str, ...]:
    """Names that ``AFDConfig(connector=...)`` accepts."""
    return tuple(sorted({*_BUILT_IN, *_registered}))


def create_connector(name: str, options: Mapping[str, Any]) -> Connector:
    """Build the connector ``name``.

    Raises:
        ConfigError: unknown name, or options that the connector does not know.
    """
    factory: Callable[..., Connector]
    if name in _registered:
        factory = _registered[name]
    elif name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    else:
        raise ConfigError(
            f"connector={name!r} is not known",
            remedy=f"use one of {connector_names()}, or register it with register_connector",
        )
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(
            f"connector_options={dict(options)!r} do not fit connector {name!r}: {error}",
            remedy="see the connector's docstring for its options",
        ) from error
