"""Emit what sequence parallelism needs: one rank's rows from all rows of a stage, and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

import torch
from torch import fx

from afd_graph.passes.extents import Extent
from afd_graph.passes.sequence_parallel import WAIT
from afd_graph.passes.stage_builder import StageBuilder
from afd_graph.passes.tensor_parallel import TensorParallel
from afd_graph.passes.token_flow import TokenFlow
from afd_graph.passes.token_layout import Layout, TokenDim

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class RankRows(StageBuilder):
    """Conversions between all rows of a stage and this rank's share of them.

    Args:
        flow: the token flow.
        group: the tensor-parallel group; None without one.
        local: staged nodes that run on this rank's rows.
        check_values: check that dropped padding is zero.

    Attributes:
        lengths: extent of the token axis in each stage.
        shares: the part of it that each rank holds, padding included.
    """

    lengths: list[Extent]
    shares: list[Extent]

    def __init__(
        self,
        flow: TokenFlow,
        group: TensorParallel | None,
        local: Collection[fx.Node],
        check_values: bool,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.group = group
        self.local = set(local)
        self.check_values = check_values
        self.converted: dict[tuple[fx.Node, int], fx.Node] = {}

    @abstractmethod
    def _part(self, node: fx.Node, part: int) -> fx.Node:
        """The copy of a staged node for one part, on the rows that the node runs on."""

    def _rows(self, node: fx.Node, part: int, local: bool) -> fx.Node:
        """The copy of a staged node for one part, on this rank's rows or on all of the part."""
        value = self._part(node, part)
        if (node in self.local) == local:
            return value
        key = (node, part)
        if key not in self.converted:
            layout = self.flow.layouts[node]
            assert isinstance(layout, dict)
            convert = self._own_rows if local else self._gathered
            self.converted[key] = convert(node, value, layout, part)
        return self.converted[key]

    def _own_rows(self, node: fx.Node, value: fx.Node, layout: Layout, part: int) -> fx.Node:
        """This rank's share of the rows, padded with zeros."""
        assert self.group is not None
        for dim, entry in layout.items():
            unfolded, at = self._unfold(node, value, dim, entry, self.lengths[part])
            padded = self._padded(node, unfolded, at, entry, part)
            share = self.extents.multiply(self.shares[part], self.extents.of(entry.inner))
            begin = self.extents.multiply(share, self.group.rank)
            end = self.extents.add(begin, share)
            self.stage = part
            own = self._call(aten.slice.Tensor, (padded, at, begin, end), like=node)
            value = self._fold(node, own, dim, entry, self.shares[part])
        return value

    def _gathered(self, node: fx.Node, value: fx.Node, layout: Layout, part: int) -> fx.Node:
        """All rows of a part, from the shares of the ranks."""
        assert self.group is not None
        (dim, entry), *_ = layout.items()
        unfolded, at = self._unfold(node, value, dim, entry, self.shares[part])
        self.stage = part
        turned = self._call(aten.transpose.int, (unfolded, 0, at), like=node)
        dense = self._call(aten.contiguous.default, (turned,), like=node)
        shares = self._call(
            c10d.all_gather_into_tensor.default,
            (dense, self.group.size, self.group.group),
            like=node,
        )
        waited = self._call(WAIT, (shares,), like=node)
        back = self._call(aten.transpose.int, (waited, 0, at), like=node)
        length = self.extents.multiply(self.lengths[part], self.extents.of(entry.inner))
        if self.check_values:
            end = torch.iinfo(torch.int64).max
            padding = self._call(aten.slice.Tensor, (back, at, length, end), like=node)
            self._call(torch.ops.afd.check_zero.default, (padding, node.name), like=node)
        real = self._call(aten.slice.Tensor, (back, at, 0, length), like=node)
        return self._fold(node, real, dim, entry, self.lengths[part])

    def _scattered_sum(self, node: fx.Node, part: int) -> fx.Node:
        """The sum over ranks of this rank's rows."""
        assert self.group is not None
        source, operation, name = node.args
        assert isinstance(source, fx.Node)
        layout = self.flow.layouts[node]
        assert isinstance(layout, dict)
        (dim, entry), *_ = layout.items()
        value = self._rows(source, part, local=False)
        unfolded, at = self._unfold(node, value, dim, entry, self.lengths[part])
        padded = self._padded(node, unfolded, at, entry, part)
        self.stage = part
        turned = self._call(aten.transpose.int, (padded, 0, at), like=node)
        dense = self._call(aten.contiguous.default, (turned,), like=node)
        scattered = self._call(
            c10d.reduce_scatter_tensor.default,
            (dense, operation, self.group.size, name),
            like=node,
        )
        waited = self._call(WAIT, (scattered,), like=node)
        back = self._call(aten.transpose.int, (waited, 0, at), like=node)
        return self._fold(node, back, dim, entry, self.shares[part])

    def _padded(
        self, node: fx.Node, value: fx.Node, at: int, entry: TokenDim, part: int
    ) -> fx.Node:
        assert self.group is not None
        whole = self.extents.multiply(self.shares[part], self.group.size)
        missing = self.extents.subtract(whole, self.lengths[part])
        pad = self.extents.multiply(missing, self.extents.of(entry.inner))
        rank = node.meta["val"].dim() + (0 if entry.outer.is_one else 1)
        self.stage = part
        return self._call(
            aten.constant_pad_nd.default, (value, [0, 0] * (rank - 1 - at) + [0, pad]), like=node
        )
