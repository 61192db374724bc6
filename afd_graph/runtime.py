"""Channels: what the inserted operators call at run time.

A channel belongs to one backend. It groups rows by expert, keeps the credit account, pairs every
dispatch with its receive, combines the answers, and notes begin and end of both for the log.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from afd_graph.config import AFDConfig
from afd_graph.connectors.base import Connector, WorkItem, create_connector
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.layout import DispatchLayout
from afd_graph.routing import combine, group_by_expert, has_nan

log = logging.getLogger(__name__)

_channels: dict[str, Channel] = {}
_names = itertools.count()
_stored_names: ContextVar[Mapping[str, Channel] | None] = ContextVar("stored_names", default=None)


@contextmanager
def channel_named(name: str, opened: Channel) -> Iterator[None]:
    """Inside, programs that were stored with the channel ``name`` use ``opened``."""
    token = _stored_names.set({**(_stored_names.get() or {}), name: opened})
    try:
        yield
    finally:
        _stored_names.reset(token)


def channel(name: str) -> Channel:
    """Look up the open channel ``name``, or what stands for it here (:func:`channel_named`)."""
    try:
        return _channels.get(name) or (_stored_names.get() or {})[name]
    except KeyError:
        raise ConnectorError(
            f"channel {name!r} is not open in this process",
            remedy="the backend was closed; compile the model again with a new backend",
        ) from None


def open_channel(
    config: AFDConfig,
    connector: Connector | None = None,
    credits: int | None = None,
    channel_type: type[Channel] | None = None,
) -> Channel:
    """Open the attention side of a connector.

    Args:
        config: names the connector, when none is given, and says how to use it.
        connector: already built.
        credits: that the programs were scheduled for, when they are compiled already.
        channel_type: kind of channel; the connector's own when None.

    Raises:
        ConfigError: the connector does not hold as many items as are wanted.
    """
    connector = connector or create_connector(config.connector, config.connector_options)
    try:
        connector.configured(config)
        granted = check_credits(config, connector, credits)
    except BaseException:
        connector.close()
        raise
    opened: Channel = (channel_type or connector.channel_type or Channel)(
        connector,
        credits=granted,
        timeout_s=config.timeout_s,
        check_answers=config.check_answers,
        layout_log=config.layout_log,
    )
    opened.exact = config.exact
    return opened


def check_credits(config: AFDConfig, connector: Connector, credits: int | None = None) -> int:
    """The credits that ``connector`` is used with; arguments as for :func:`open_channel`.

    Raises:
        ConfigError: the connector does not hold as many items as are wanted.
    """
    wanted = credits or config.credits
    if wanted is not None and wanted > connector.credits:
        raise ConfigError(
            f"credits={wanted} is more than connector {config.connector!r} holds "
            f"({connector.credits})",
            remedy=f"set credits to {connector.credits} or less"
            + ("" if credits is None else " and compile again"),
        )
    return wanted or connector.credits


@dataclass
class _Pending:
    ticket: int
    layer: int
    stage: int
    tokens: int
    top_k: int
    position: torch.Tensor  # int64 [n * k]: row of the answer that belongs to (token, choice)
    shared: bool


@dataclass(frozen=True)
class Event:
    """One boundary crossing: ``kind`` is ``dispatch`` or ``receive``; times in nanoseconds.

    ``ffn_ns`` of a receive says when its experts began and ended, where the connector knows.
    """

    kind: str
    layer: int
    stage: int
    begin_ns: int
    end_ns: int
    rows: int
    ffn_ns: tuple[int, int] | None = None


class Channel:
    """The attention side of one connector.

    Args:
        connector: moves the rows.
        credits: un-received dispatches allowed; at most the connector's own.
        timeout_s: longest wait for one answer, in seconds.
        check_answers: look for NaN in every result.
        layout_log: log one line per crossing, with the fields of the reference.

    Attributes:
        name: what the operators carry to find this channel.
        num_experts: number of experts of each MoE layer that may be dispatched to.
        tensor_parallel: ranks of the tensor-parallel group, and this one; for the log.
        exact: give a token the same bits whatever the number of tokens.
        stage_lines: what the log says about the attention of each stage of this step.
        shared_layers: MoE layers whose shared experts run on the FFN side.
        observers: called with an :class:`Event` after every crossing.
        step_began_ns: when the running step was entered; kept only while somebody observes.
    """

    def __init__(
        self,
        connector: Connector,
        *,
        credits: int,
        timeout_s: float,
        check_answers: bool = True,
        layout_log: bool = False,
    ) -> None:
        self.name = f"afd{next(_names)}"
        self.connector = connector
        self.credits = credits
        self.timeout_s = timeout_s
        self.check_answers = check_answers
        self.layout_log = layout_log
        self.tensor_parallel = (1, 0)
        self.stage_lines: Sequence[str] = ()
        self.exact = False
        self.shared_layers: set[int] = set()
        self.num_experts: dict[int, int] = {}
        self.observers: list[Callable[[Event], None]] = []
        self.step_began_ns = 0
        self._pending: deque[_Pending] = deque()
        _channels[self.name] = self

    @staticmethod
    def now_ns() -> int:
        """The clock of the events."""
        return time.perf_counter_ns()

    def begin_step(self) -> None:
        """Note that a step is entered."""
        if self.observers:
            self.step_began_ns = self.now_ns()

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        layer: int,
        stage: int,
        parent_rows: int | None = None,
    ) -> int:
        """Send ``hidden [n, h]`` to the experts ``topk_ids [n, k]``; returns the ticket.

        Args:
            hidden: rows.
            topk_ids: chosen experts, integer.
            layer: MoE layer.
            stage: token stage.
            parent_rows: the rows of the whole group, when ``hidden`` is this rank's share.

        Raises:
            ConnectorError: no credit left, or the connector failed.
        """
        begin = time.perf_counter_ns() if self.observers else 0
        if len(self._pending) >= self.credits:
            waiting = [(p.layer, p.stage) for p in self._pending]
            raise ConnectorError(
                f"dispatch without a credit: {self.credits} allowed, un-received {waiting}",
                layer=layer,
                stage=stage,
                remedy="this is a defect of the schedule; please report it",
            )
        experts = self.num_experts.get(layer)
        if experts is None:
            raise ConnectorError(
                f"no experts for this layer; layers here: {sorted(self.num_experts)}",
                layer=layer,
                stage=stage,
                remedy="this is a defect of the backend; please report it",
            )
        tokens, top_k = topk_ids.shape
        source, counts, position = group_by_expert(topk_ids, experts)
        if len(counts) > experts:
            raise ConnectorError(
                f"the gate chose expert {len(counts) - 1} of {experts}",
                layer=layer,
                stage=stage,
                remedy="check the model's gate",
            )
        shared = layer in self.shared_layers
        try:
            rows = self.connector.row_buffer(source.numel(), hidden.shape[1], hidden.dtype)
            torch.index_select(hidden, 0, source, out=rows)
            ticket = self.connector.send(
                WorkItem(
                    layer, stage, rows, counts, hidden if shared else None, tokens, parent_rows
                )
            )
        except ConnectorError as error:
            raise _located(error, layer, stage) from error
        self._pending.append(_Pending(ticket, layer, stage, tokens, top_k, position, shared))
        if self.layout_log:
            if stage < len(self.stage_lines):
                log.warning("%s", self.stage_lines[stage])
            self._log_layout("dispatch", tokens, parent_rows)
        if self.observers:
            self._observe(Event("dispatch", layer, stage, begin, time.perf_counter_ns(), tokens))
        return ticket

    def receive(
        self,
        ticket: int,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        layer: int,
        stage: int,
        parent_rows: int | None = None,
    ) -> torch.Tensor:
        """Wait for ``ticket`` and return the weighted sum over the chosen experts, ``[n, h]``.

        The sum is taken in fp32 (fp64 for fp64 models) and rounded once to the dtype of
        ``hidden``. The result is a fresh tensor.

        Raises:
            ConnectorError: wrong pairing, dead or stalled peer, wrong shape, NaN.
        """
        begin = time.perf_counter_ns() if self.observers else 0
        pending = self._pending[0] if self._pending else None
        if pending is None or (pending.ticket, pending.layer, pending.stage) != (
            ticket,
            layer,
            stage,
        ):
            raise ConnectorError(
                f"receive of ticket {ticket} does not match the oldest dispatch {pending}",
                layer=layer,
                stage=stage,
                remedy="this is a defect of the schedule; please report it",
            )
        try:
            rows, shared = self.connector.wait(ticket, self.timeout_s)
        except ConnectorError as error:
            raise _located(error, layer, stage) from error
        self._pending.popleft()
        ffn = self.connector.ffn_times(ticket) if self.observers else None
        try:
            _check_answer("rows", rows, pending.tokens * pending.top_k, hidden, layer, stage)
            if pending.shared:
                _check_answer("shared rows", shared, pending.tokens, hidden, layer, stage)
            out = combine(
                rows, pending.position, topk_weights, hidden.dtype, shared, exact=self.exact
            )
        finally:
            self.connector.release(ticket)
        if self.check_answers and has_nan(out) and not has_nan(hidden):
            raise ConnectorError(
                "the experts answered NaN for finite rows",
                layer=layer,
                stage=stage,
                remedy="check the experts' weights; check_answers=False lets NaN pass",
            )
        if self.layout_log:
            self._log_layout("restore", pending.tokens, parent_rows)
        if self.observers:
            end = time.perf_counter_ns()
            self._observe(Event("receive", layer, stage, begin, end, pending.tokens, ffn))
        return out

    def abandon(self) -> None:
        """Forget what a failed step left un-received."""
        if self._pending:
            self._pending.clear()
            self.connector.abandon()

    @property
    def outstanding(self) -> int:
        """Number of un-received dispatches."""
        return len(self._pending)

    def close(self) -> None:
        """Close the connector; idempotent."""
        _channels.pop(self.name, None)
        self._pending.clear()
        self.connector.close()

    def _observe(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)

    def _log_layout(self, phase: str, tokens: int, parent_rows: int | None) -> None:
        size, rank = self.tensor_parallel
        sharded = parent_rows is None  # These rows are this rank's own, not a share of all.
        layout = DispatchLayout(
            tokens if parent_rows is None else parent_rows,
            size,
            rank,
            sequence_parallel=sharded and size > 1,
        )
        log.warning("%s", layout.diagnostic(phase))


def _check_answer(
    what: str,
    answer: torch.Tensor | None,
    rows: int,
    hidden: torch.Tensor,
    layer: int,
    stage: int,
) -> None:
    expected = (rows, hidden.shape[1])
    if answer is not None and answer.shape == expected and answer.dtype == hidden.dtype:
        return
    got = "none" if answer is None else f"{tuple(answer.shape)} {answer.dtype}"
    raise ConnectorError(
        f"wrong answer: expected {what} {expected} {hidden.dtype}, got {got}",
        layer=layer,
        stage=stage,
        remedy="check that both sides run the same model and version",
    )


def _located(error: ConnectorError, layer: int, stage: int) -> ConnectorError:
    return type(error)(
        error.what,
        layer=layer if error.layer is None else error.layer,
        stage=stage if error.stage is None else error.stage,
        remedy=error.remedy,
    )
