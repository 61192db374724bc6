"""The CAM operators on Ascend: tokens go to the experts and come back combined, on the device.

The operators route and combine themselves, so this connector moves tokens where the others move
rows that are grouped already: :class:`CamChannel` takes the place of
:class:`afd_graph.runtime.Channel`. What the operators promise, and what they do not:

* one window and one statistics area per attention rank: a dispatch before the last one was
  received corrupts it. Hence one credit, checked here on every call;
* a dispatch returns at once and proves nothing; a receive blocks on the device without a time
  limit of ours;
* no dispatch is empty, and none is larger than :attr:`CamGroup.rows_per_dispatch`;
* every rank of a replica must dispatch, for every layer and stage;
* an error between a dispatch and its receive leaves the peers waiting: the group is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from afd_graph.connectors.base import Connector, WorkItem
from afd_graph.connectors.cam_group import CamGroup, comm_args
from afd_graph.connectors.cann_window import Window, open_window
from afd_graph.errors import ConfigError, ConnectorError
from afd_graph.lowering.ascend.register import missing_kernel, register
from afd_graph.routing import has_nan
from afd_graph.runtime import Channel, Event

if TYPE_CHECKING:
    from afd_graph.ffn.program import FFNProgram

SHUTDOWN_LAYER = 32767
"""Layer index of the dispatch that says goodbye; the operators carry 16 bits."""

GROUP = "afd_async_cam"
"""Name under which the ranks of both roles meet."""


@dataclass(frozen=True)
class Traffic:
    """What the rows of a group look like.

    Attributes:
        hidden_size: width of a row.
        top_k: choices per row.
        num_experts: of a layer, of all FFN ranks together.
        dtype: of the rows.
    """

    hidden_size: int
    top_k: int
    num_experts: int
    dtype: torch.dtype = torch.bfloat16


@dataclass
class _Pending:
    """A dispatch; its tensors stay alive until the receive."""

    ticket: int
    layer: int
    stage: int
    hidden: torch.Tensor
    ids: torch.Tensor


class CamChannel(Channel):
    """The attention side: dispatch and receive by the operators of the connector's group."""

    connector: CamConnector

    def __init__(self, connector: CamConnector, **options: Any) -> None:
        super().__init__(connector, **options)
        self._tickets = itertools.count()
        self._sent: _Pending | None = None
        self._is_lost = False

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        layer: int,
        stage: int,
        parent_rows: int | None = None,
    ) -> int:
        """Send ``hidden [n, h]`` to the experts ``topk_ids [n, k]``; returns the ticket.

        Raises:
            ConnectorError: no credit left, rows that do not fit, or a lost group.
        """
        begin = time.perf_counter_ns() if self.observers else 0
        self._check_usable(layer, stage)
        if self._sent is not None:
            raise ConnectorError(
                f"dispatch without a credit: layer {self._sent.layer}, stage {self._sent.stage} "
                "is un-received, and a rank has one window",
                layer=layer,
                stage=stage,
                remedy="this is a defect of the schedule; please report it",
            )
        experts = self.num_experts[layer]
        self.connector.dispatch_send(hidden, topk_ids, layer, stage, experts)
        self._sent = _Pending(next(self._tickets), layer, stage, hidden, topk_ids)
        if self.layout_log:
            self._log_layout("dispatch", hidden.shape[0], parent_rows)
        if self.observers:
            self._observe(
                Event("dispatch", layer, stage, begin, time.perf_counter_ns(), hidden.shape[0])
            )
        return self._sent.ticket

    def receive(
        self,
        ticket: int,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        layer: int,
        stage: int,
        parent_rows: int | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum over the chosen experts, ``[n, h]``, summed in fp32.

        Raises:
            ConnectorError: wrong pairing, a lost group, or NaN.
        """
        begin = time.perf_counter_ns() if self.observers else 0
        self._check_usable(layer, stage)
        sent = self._sent
        if sent is None or (sent.ticket, sent.layer, sent.stage) != (ticket, layer, stage):
            raise ConnectorError(
                f"receive of ticket {ticket} does not match the dispatch {sent and sent.ticket}",
                layer=layer,
                stage=stage,
                remedy="this is a defect of the schedule; please report it",
            )
        out = self.connector.combine_recv(
            sent.hidden, sent.ids, topk_weights, layer, stage, self.num_experts[layer]
        )
        self._sent = None
        if self.check_answers and has_nan(out) and not has_nan(hidden):
            raise ConnectorError(
                "the experts answered NaN for finite rows",
                layer=layer,
                stage=stage,
                remedy="check the experts' weights; check_answers=False lets NaN pass",
            )
        if self.layout_log:
            self._log_layout("restore", hidden.shape[0], parent_rows)
        if self.observers:
            end = time.perf_counter_ns()
            self._observe(Event("receive", layer, stage, begin, end, hidden.shape[0]))
        return out

    def abandon(self) -> None:
        """An un-received dispatch cannot be taken back: the group is lost."""
        if self._sent is not None:
            self._sent = None
            self._is_lost = True
            self.connector.abandon()

    @property
    def outstanding(self) -> int:
        """Number of un-received dispatches."""
        return int(self._sent is not None)

    def _check_usable(self, layer: int, stage: int) -> None:
        if self._is_lost:
            raise ConnectorError(
                "the group is lost: a step failed between a dispatch and its receive",
                layer=layer,
                stage=stage,
                remedy="restart the processes of both roles",
            )


class CamConnector(Connector):
    """Attention rank of a CAM group.

    Args:
        attention_ranks, ffn_ranks, rank, max_tokens, tp_size, dynamic_quant, operators: see
            :class:`CamGroup`.
        group_name: HCCL's name of a group that exists already; else one is made.
        host, port: where the ranks of both roles meet to make the group.
        buffer_mb: HCCL buffer of the group, which holds the windows.
        device: of the rows.
    """

    credits = 1
    channel_type = CamChannel

    def __init__(
        self,
        attention_ranks: int,
        ffn_ranks: int,
        rank: int,
        max_tokens: int,
        tp_size: int = 1,
        dynamic_quant: bool = False,
        operators: str = "afd_ascend",
        group_name: str = "",
        host: str = "127.0.0.1",
        port: int = 29600,
        buffer_mb: int = 4096,
        device: str = "npu",
    ) -> None:
        self.group = CamGroup(
            attention_ranks,
            ffn_ranks,
            rank,
            max_tokens,
            tp_size,
            dynamic_quant,
            operators,
            group_name,
        )
        if not self.group.is_attention:
            raise ConnectorError(
                f"rank {rank} of {self.group.world_size} is an FFN rank",
                remedy="FFN ranks run afd_graph.ffn.cam_experts.CamExperts",
            )
        self.group, self._process_group = joined(
            self.group, host=host, port=port, buffer_mb=buffer_mb, device=device
        )
        self._comm_args = comm_args(device)
        self._traffic: Traffic | None = None
        self._window: Window | None = None
        self._is_lost = False
        self._is_closed = False

    def add_program(self, program: FFNProgram) -> None:
        """Note the sizes; the FFN ranks hold the experts themselves."""
        if program.shared is not None and not self.group.package.carries_shared:
            raise ConnectorError(
                f"{self.group.operators} carries routed rows only",
                layer=program.layer,
                remedy="set shared_experts='attention', or use operators='umdk_cam_op_lib'",
            )

    def schedule_context(self, traffic: Traffic) -> torch.Tensor:
        """The schedule context of CANN's own operators; the window is opened once.

        Raises:
            ConfigError: other rows than the window was opened for.
        """
        if self._window is None:
            self._window = open_window(
                self.group, self._process_group, **dataclasses.asdict(traffic)
            )
            self._traffic = traffic
        if traffic != self._traffic:
            raise ConfigError(
                f"the window was opened for {self._traffic}, a graph wants {traffic}",
                remedy="use one connector per model",
            )
        return self._window.context

    def exchanged(self, traffic: Traffic) -> None:
        """Note that rows were exchanged, by this object or by a graph: peers expect a goodbye."""
        self._traffic = traffic

    def dispatch_send(
        self, hidden: torch.Tensor, ids: torch.Tensor, layer: int, stage: int, num_experts: int
    ) -> None:
        """Start the exchange of ``hidden [n, h]``."""
        if self.group.is_cann:
            raise ConnectorError(
                "operators='cann' run in graphs only",
                remedy="use lowering='torchair', or another package of operators",
            )
        self.group.check_rows(hidden.shape[0], layer=layer, stage=stage)
        if hidden.dtype not in self.group.package.dtypes:
            raise ConnectorError(
                f"{self.group.operators} carries {self.group.package.dtypes}, the rows are "
                f"{hidden.dtype}",
                layer=layer,
                stage=stage,
                remedy="load the model in bfloat16 or float16",
            )
        operator = self.group.package.dispatch_send
        tensors = {
            "x": hidden.contiguous(),
            "expertIds": ids.to(torch.int32).contiguous(),
            "commArgs": self._comm_args,
        }
        sizes = self._sizes(hidden, ids, num_experts)
        operator.overload(*self.group.arguments(operator, tensors, layer=layer, **sizes))
        self.exchanged(Traffic(hidden.shape[1], ids.shape[1], num_experts, hidden.dtype))

    def combine_recv(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        layer: int,
        stage: int,
        num_experts: int,
    ) -> torch.Tensor:
        """Wait for the answer to the last dispatch and return the combined rows."""
        operator = self.group.package.combine_recv
        tensors = {
            "expandX": hidden.new_zeros(1),
            "expertIds": ids.to(torch.int32).contiguous(),
            "expertScales": weights.to(torch.float32).contiguous(),
            "commArgs": self._comm_args,
        }
        sizes = self._sizes(hidden, ids, num_experts)
        return operator.overload(*self.group.arguments(operator, tensors, **sizes))

    @staticmethod
    def _sizes(hidden: torch.Tensor, ids: torch.Tensor, num_experts: int) -> dict[str, int]:
        return {
            "rows": hidden.shape[0],
            "hidden_size": hidden.shape[1],
            "top_k": ids.shape[1],
            "num_experts": num_experts,
        }

    def row_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Not of this connector, see the module."""
        raise self._no_rows()

    def send(self, item: WorkItem) -> int:
        """Not of this connector, see the module."""
        raise self._no_rows()

    def wait(self, ticket: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Not of this connector, see the module."""
        raise self._no_rows()

    def release(self, ticket: int) -> None:
        """Not of this connector, see the module."""
        raise self._no_rows()

    @staticmethod
    def _no_rows() -> ConnectorError:
        return ConnectorError("the CAM operators group and combine rows themselves")

    def abandon(self) -> None:
        """The group is lost: the experts may be blocked, and no goodbye is possible."""
        self._is_lost = True

    def close(self) -> None:
        """Say goodbye to the FFN ranks, wait for their answer, leave the group; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._window is not None:
            self._window.close()
            self._window = None
        elif self._traffic is not None and not self._is_lost:
            say_goodbye(self.group, self._traffic, self._comm_args.device)
        if self._process_group is not None:
            self._process_group.shutdown()
            self._process_group = None


def say_goodbye(group: CamGroup, traffic: Traffic, device: torch.device | str = "npu") -> None:
    """Tell the FFN ranks that this attention rank is done, and wait for their answer.

    The connector does it when it is closed. A graph that was compiled with the hook has no
    connector: there every attention rank calls this once, behind its last step.

    Args:
        group: this rank's view, with the name of the group.
        traffic: what its rows look like.
        device: where the operators run.
    """
    send, receive = group.package.dispatch_send, group.package.combine_recv
    # One row for every expert rank in turn would need many dispatches; the operators announce a
    # dispatch to all ranks, also to those that get no row of it.
    ids = torch.arange(traffic.top_k, dtype=torch.int32, device=device).view(1, -1)
    rows = torch.zeros(1, traffic.hidden_size, dtype=traffic.dtype, device=device)
    tensors = {
        "x": rows,
        "expandX": rows.new_zeros(1),
        "expertIds": ids,
        "expertScales": torch.zeros(1, traffic.top_k, device=device),
        "commArgs": comm_args(device),
    }
    sizes = {
        "rows": 1,
        "hidden_size": traffic.hidden_size,
        "top_k": traffic.top_k,
        "num_experts": traffic.num_experts,
    }
    send.overload(*group.arguments(send, tensors, layer=SHUTDOWN_LAYER, **sizes))
    receive.overload(*group.arguments(receive, tensors, **sizes))


def group_from_options(options: Mapping[str, Any]) -> CamGroup:
    """The group that the options of a ``cam`` connector describe, without joining it.

    Raises:
        ConfigError: options that a group lacks, or no name of a group that exists already.
    """
    fields = {field.name for field in dataclasses.fields(CamGroup)}
    given = {name: value for name, value in options.items() if name in fields}
    if not given.get("group_name"):
        raise ConfigError(
            "connector_options lack group_name, and nobody makes a group here",
            remedy="make the HCCL group first and pass its name",
        )
    try:
        return CamGroup(**given)
    except TypeError as error:
        raise ConfigError(
            f"connector_options={dict(options)!r} do not describe a group: {error}",
            remedy="see afd_graph.connectors.cam.CamConnector",
        ) from error


def joined(
    group: CamGroup, *, host: str, port: int, buffer_mb: int, device: str
) -> tuple[CamGroup, Any]:
    """``group`` with its operators checked and its HCCL name; and the process group made for it.

    Raises:
        ConnectorError: the operators, or torch_npu, are not installed.
    """
    register(group.package)
    try:
        missing = missing_kernel(group.package, torch.device(device))
    except RuntimeError:
        raise ConnectorError(
            f"this process has no device {device!r}",
            remedy="install CANN and torch_npu, and import torch_npu first",
        ) from None
    if missing is not None:
        raise ConnectorError(
            f"operator {missing} has no kernel for {device}",
            remedy=f"install and import the package of {group.operators!r}, see docs/ascend.md",
        )
    if group.group_name:
        return group, None
    process_group = _hccl_group(group, host, port, buffer_mb)
    name = process_group.get_hccl_comm_name(group.rank)
    return dataclasses.replace(group, group_name=name), process_group


def _hccl_group(group: CamGroup, host: str, port: int, buffer_mb: int) -> Any:
    from datetime import timedelta

    try:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL
    except ImportError as error:
        raise ConnectorError(
            f"an HCCL group needs torch_npu: {error}",
            remedy="install CANN and torch_npu, or pass the group_name of a group that exists",
        ) from error
    timeout = timedelta(minutes=30)
    store = torch.distributed.TCPStore(
        host, port, group.world_size, is_master=group.rank == 0, timeout=timeout
    )
    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": buffer_mb}
    return ProcessGroupHCCL(
        torch.distributed.PrefixStore(GROUP, store), group.rank, group.world_size, options
    )
