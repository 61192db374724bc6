"""Tensor parallelism: each rank dispatches its share of the rows; the model's own sum joins them.

All ranks of a replica hold the same rows, and a MoE layer of vLLM ends with a sum over the ranks:
of the shared experts' part and, as every rank has a slice of every expert, of the routed part. FFN
ranks have whole experts, so a row must be computed for one rank only:

    hidden [n, h] ─ rows [r*L, (r+1)*L) ─ dispatch ... receive ─ zeros but for these rows ─ sum

With ``L = ceil(n / ranks)``, as in the core (:mod:`afd_graph.passes.tensor_parallel`): a rank whose
share is padding still dispatches it, as zeros for expert 0 with weight 0. :func:`check_sums` proves
that the sum is there, and that nothing but sums and scaling lies between.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from afd_graph.errors import UnsupportedError
from afd_graph.passes.graph_tools import source_line
from afd_graph.passes.token_flow import RECEIVE
from afd_graph.runtime import Channel
from afd_graph.vllm.operators import operator_name

_SUMS_IN_PLACE = ("_C::shm_allreduce",)
_SUMS = (*_SUMS_IN_PLACE, "vllm::all_reduce")
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_PRODUCTS = (operator.mul, operator.imul, torch.mul)
_VIEWS = ("view", "reshape", "contiguous")


class SharedRowsChannel(Channel):
    """A channel whose dispatches take this rank's share, and whose receives have zeros elsewhere.

    :attr:`tensor_parallel` says which share that is.
    """

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        layer: int,
        stage: int,
        parent_rows: int | None = None,
    ) -> int:
        """Send this rank's share of ``hidden [n, h]``; raises as :meth:`Channel.dispatch`."""
        rows = hidden.shape[0]
        return super().dispatch(self._own(hidden), self._own(topk_ids), layer, stage, rows)

    def receive(
        self,
        ticket: int,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        layer: int,
        stage: int,
        parent_rows: int | None = None,
    ) -> torch.Tensor:
        """Return ``[n, h]`` with this rank's rows; raises as :meth:`Channel.receive`."""
        rows = hidden.shape[0]
        own = super().receive(
            ticket, self._own(hidden), self._own(topk_weights), layer, stage, rows
        )
        begin, end, _ = self._share(rows)
        whole = torch.zeros_like(hidden)
        whole[begin:end] = own[: end - begin]
        return whole

    def _share(self, rows: int) -> tuple[int, int, int]:
        """First and last row, exclusive, of this rank, and the rows of a share with padding."""
        size, rank = self.tensor_parallel
        share = -(-rows // size)
        return min(rows, rank * share), min(rows, (rank + 1) * share), share

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        begin, end, share = self._share(rows.shape[0])
        if end - begin == share:
            return rows[begin:end]
        own = rows.new_zeros((share, *rows.shape[1:]))
        own[: end - begin] = rows[begin:end]
        return own


def check_sums(graph: fx.Graph) -> None:
    """Require that every received value is summed over the ranks before it is used otherwise.

    Raises:
        UnsupportedError: one is not; says which.
    """
    for received in graph.find_nodes(op="call_function", target=RECEIVE):
        problem = _unsummed(received)
        if problem is not None:
            raise UnsupportedError(
                "rows of the experts are not summed over the tensor-parallel ranks before "
                f"{problem.name} uses them",
                node=received.name,
                source=source_line(received),
                remedy="run this model with connector='process', or without tensor parallelism",
            )


def _unsummed(value: fx.Node) -> fx.Node | None:
    """A user of ``value``, a part of a sum, that needs the whole one; None if there is none."""
    users = sorted(value.users)
    for position, user in enumerate(users):
        if operator_name(user) in _SUMS_IN_PLACE:
            # Behind it the value is whole.
            users = users[:position]
            break
    else:
        if not users:
            return value
    for user in users:
        if operator_name(user) in _SUMS:
            continue
        if not _keeps_parts(user, value):
            return user
        # The node of a change in place may have no users: the value itself goes on.
        problem = _unsummed(user) if user.users or not _in_place(user) else None
        if problem is not None:
            return problem
    return None


def _keeps_parts(node: fx.Node, value: fx.Node) -> bool:
    """Whether the sum over ranks of ``node`` is the same of the sum over ranks of ``value``."""
    if node.op == "call_method":
        return node.target in _VIEWS and node.args[0] is value
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return node.args[0] is value
    if node.target in _ADDITIONS:
        return all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs
    if node.target in _PRODUCTS:
        return any(isinstance(a, (int, float)) for a in node.args)
    return False


def _in_place(node: fx.Node) -> bool:
    targets: tuple[Any, ...] = (operator.iadd, operator.imul)
    return node.target in targets
