"""Copy the token-dependent region of a graph once per stage.

Before: the unsplit AFD graph and its token flow. After: a new graph in which every staged node
has one copy per stage (``meta["afd_stage"]``), sizes substituted. The cut, the number of tokens (or
requests) in stage 0, is its last input, or half of the axis, computed in the graph.

1. values outside the flow are copied once and sliced where a stage needs its part of them;
2. a staged node is copied for stage 0 and stage 1; along a key axis (see :mod:`token_flow`) once
   more for what was cached before;
3. attention of stage ``s`` gets the keys of the cache and of stages ``0..s``, and the rows of the
   mask that belong to its queries;
4. where a value is needed whole again, the stages are put together: by concatenation along the
   token axis, by the cache update along a key axis;
5. with sequence parallelism, the nodes of :mod:`sequence_parallel` run on this rank's rows: sums
   are scattered, rows are gathered where all of a stage are needed.

The order of the new graph is any topological one; :mod:`schedule` decides the real one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from afd_graph.errors import PassError
from afd_graph.passes.extents import Extent
from afd_graph.passes.rank_rows import RankRows
from afd_graph.passes.sequence_parallel import SUM, WAIT
from afd_graph.passes.sizes import product, shape_of
from afd_graph.passes.tensor_parallel import OWN_ROWS, TensorParallel
from afd_graph.passes.token_flow import (
    ATTENTION,
    DISPATCH,
    RECEIVE,
    Append,
    TokenFlow,
)
from afd_graph.passes.token_layout import Axis, Layout, TokenDim

aten = torch.ops.aten

CACHED = -1
"""The part of a key axis that was there before the step; the others are the stages."""

CUT = "afd_cut"
"""Name of the input that holds the cut."""


def split_stages(
    graph: fx.Graph,
    flow: TokenFlow,
    *,
    cut: torch.SymInt | None,
    num_stages: int = 2,
    group: TensorParallel | None = None,
    local: Collection[fx.Node] = (),
    check_values: bool = False,
) -> fx.Graph:
    """Return the two-stage graph.

    Args:
        graph: the unsplit AFD graph; not changed.
        flow: its token flow.
        cut: symbolic extent of stage 0 along the token axis, which makes it an input; None for
            half of the axis (:func:`half_rounds_up`), which needs no symbol of its own.
        num_stages: two; one gives the unsplit graph, for sequence parallelism alone.
        group: the tensor-parallel group, when ``local`` is given.
        local: staged nodes that run on this rank's rows.
        check_values: emit the checks of :mod:`afd_graph.checks`.
    """
    return Splitter(graph, flow, cut, num_stages, group, local, check_values).run()


def half_rounds_up(flow: TokenFlow) -> bool:
    """Which stage gets the odd one: the planner gives a token to stage 0, a request to stage 1."""
    tokens_per_entry = product(
        size
        for dim, size in enumerate(shape_of(flow.seed.meta["val"])[:-1])
        if dim != flow.seed_dim
    )
    return flow.mode != "batch" or tokens_per_entry.is_one


class Splitter(RankRows):
    """What :func:`split_stages` does; a step of another kind overrides where it differs."""

    def __init__(
        self,
        graph: fx.Graph,
        flow: TokenFlow,
        cut: torch.SymInt | None,
        num_stages: int,
        group: TensorParallel | None,
        local: Collection[fx.Node],
        check_values: bool = False,
    ) -> None:
        super().__init__(flow, group, local, check_values)
        self.old = graph
        self.cut = cut
        self.stages = range(num_stages)
        self.checked: set[tuple[fx.Node, int]] = set()
        self.env: dict[fx.Node, fx.Node] = {}
        self.parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self.slices: dict[tuple[Any, ...], fx.Node] = {}
        self.joined: dict[tuple[fx.Node, int], fx.Node] = {}

    def run(self) -> fx.Graph:
        """Emit the new graph."""
        placeholders = [node for node in self.old.nodes if node.op == "placeholder"]
        for node in placeholders:
            self._whole_copy(node)
        total = self._tokens()
        first: Extent
        if len(self.stages) == 1:
            first = total
        elif self.cut is None:
            first = self.extents.half(total, half_rounds_up(self.flow))
        else:
            first = self.graph.placeholder(CUT)
            first.meta["val"] = self.cut
        self.starts: list[Extent] = [0, first]
        self.lengths = [first, self.extents.subtract(total, first)]
        size = 1 if self.group is None else self.group.size
        self.shares = [self.extents.divide_up(n, size) for n in self.lengths[: len(self.stages)]]
        for node in self.old.nodes:
            if node.op == "placeholder":
                continue
            if not self.flow.staged(node):
                self._whole_copy(node)
                continue
            if node is self.flow.seed:
                self._whole_copy(node)
                continue
            if node in self.flow.appends:
                self._append_parts(node)
                continue
            if node in self.flow.windows:
                continue  # Made where attention needs it.
            for part in self._part_numbers(node):
                self._copy_part(node, part)
        return self.graph

    def _tokens(self) -> Extent:
        """Extent of the axis that the stages tile; may add inputs in front of the cut."""
        return self.extents.of(self.flow.axis.extent)

    # -- values that are the same in every stage ------------------------------------------------

    def _whole_copy(self, node: fx.Node) -> None:
        self.stage = None
        new = self.graph.node_copy(node, self._whole)
        self.env[node] = new
        self.extents.learn(new)

    def _whole(self, node: fx.Node) -> fx.Node:
        """The unsplit value of ``node``; put together from the stages when it is staged."""
        if node not in self.env:
            layout = self.flow.layouts[node]
            if not isinstance(layout, dict) or len(layout) != 1:
                raise PassError("a value without one token axis is needed whole", node=node.name)
            (dim, entry), *_ = layout.items()
            self.env[node] = self._restore(node, dim, entry)
        return self.env[node]

    def _restore(self, node: fx.Node, dim: int, entry: TokenDim) -> fx.Node:
        if entry.axis.appended_to is not None:
            return self._keys(node, dim, self.stages[-1])
        pieces = [self._rows(node, stage, local=False) for stage in self.stages]
        self.stage = None
        if len(pieces) == 1:
            # What follows was captured on a contiguous value; gathered rows need not be.
            return self._call(aten.contiguous.default, (pieces[0],), like=node)
        unfolded = [
            self._unfold(node, piece, dim, entry, length)[0]
            for piece, length in zip(pieces, self.lengths, strict=True)
        ]
        at = dim if entry.outer.is_one else dim + 1
        joined = self._call(aten.cat.default, (unfolded, at), like=node)
        return self._fold(node, joined, dim, entry, self.extents.of(entry.axis.extent))

    # -- values with a copy per stage ------------------------------------------------------------

    def _part_numbers(self, node: fx.Node) -> list[int]:
        return [CACHED, *self.stages] if self._key_axis(node) is not None else [*self.stages]

    def _key_axis(self, node: fx.Node) -> Axis | None:
        layout = self.flow.layouts.get(node, {})
        for entries in layout if isinstance(layout, tuple) else (layout,):
            for entry in entries.values():
                if entry.axis.appended_to is not None:
                    return entry.axis
        return None

    def _part(self, node: fx.Node, part: int) -> fx.Node:
        """The copy of a staged node for one part."""
        if (node, part) not in self.parts:
            if node is not self.flow.seed:
                raise PassError("a stage copy is missing", node=node.name)
            layout = self.flow.layouts[node]
            assert isinstance(layout, dict)
            self.parts[node, part] = self._sliced(node, layout, part)
        return self.parts[node, part]

    def _copy_part(self, node: fx.Node, part: int) -> None:
        self.stage = None if part == CACHED else part
        if node.target is ATTENTION and self.flow.mode == "sequence":
            self.parts[node, part] = self._attention(node, part)
            return
        outcome = self.flow.outcomes[node]
        local = node in self.local
        if local and node.target is SUM:
            self.parts[node, part] = self._scattered_sum(node, part)
            return
        if local and node.target is WAIT:
            self.parts[node, part] = self._part(node.all_input_nodes[0], part)
            return

        def argument(n: fx.Node) -> fx.Node:
            if self.flow.staged(n):
                return self._rows(n, part, local)
            need = outcome.inputs.get(n)
            if not need:
                return self._whole(n)
            sliced = self._sliced(n, need, part)
            return self._own_rows(n, sliced, need, part) if local else sliced

        lengths = {
            position: {at: self._length(entry, part, local) for at, entry in entries.items()}
            for position, entries in outcome.sizes.items()
        }
        new = self.graph.node_copy(node, argument)
        if node.target in (aten.view.default, aten._unsafe_view.default):
            # A slice of a whole value is not contiguous, so not every view of it exists.
            new.target = aten.reshape.default
        arguments = list(new.args)
        for position, replaced in lengths.items():
            sizes: list[Any] = list(arguments[position])  # type: ignore[arg-type]
            for at, length in replaced.items():
                sizes[at] = length
            arguments[position] = sizes
        for position, value in outcome.replace.items():
            if position < len(arguments):
                arguments[position] = value
        if node.target in (DISPATCH, RECEIVE):
            arguments[3 if node.target is DISPATCH else 4] = part
        new.args = tuple(arguments)
        self._mark(new)
        if local:
            new.meta[OWN_ROWS] = True
        self.parts[node, part] = new

    def _append_parts(self, node: fx.Node) -> None:
        append = self.flow.appends[node]
        base = [self._whole(n) for n in append.base]
        self.stage = None
        self.parts[node, CACHED] = (
            base[0]
            if len(base) == 1
            else self._call(aten.cat.default, (base, append.dim), like=node)
        )
        for stage in self.stages:
            self.parts[node, stage] = self._rows(append.part, stage, local=False)

    def _attention(self, node: fx.Node, stage: int) -> fx.Node:
        query, key, value, mask = node.args[:4]
        assert isinstance(query, fx.Node)
        keys = [self._all_keys(operand, stage) for operand in (key, value)]
        own = self.flow.layouts[query]
        assert isinstance(own, dict)
        if isinstance(mask, fx.Node):
            if self.check_values:
                self._check_mask(mask, own[2], key, stage)
            mask = self._mask_rows(mask, own[2], key, stage)
        self.stage = stage
        new = self._call(
            ATTENTION,
            (self._rows(query, stage, local=False), *keys, mask, *node.args[4:]),
            like=node,
        )
        new.meta["afd_later_keys"] = self._later_keys(key, stage)
        return new

    def _later_keys(self, key: Any, stage: int) -> Extent:
        """How many keys the stages behind ``stage`` add."""
        if not self.flow.staged(key) or stage == self.stages[-1]:
            return 0
        layout = self.flow.layouts[key]
        assert isinstance(layout, dict)
        axis = layout[2].axis
        append = self._append_of(axis)
        if append is not None and append.index is not None:
            return 0  # The cache has its full size from the start.
        return self.lengths[stage + 1]

    def _check_mask(self, mask: fx.Node, rows: TokenDim, key: Any, stage: int) -> None:
        """Check that the stage's queries do not see the keys of the next one."""
        if (mask, stage) in self.checked or not self.flow.staged(key) or stage == self.stages[-1]:
            return
        self.checked.add((mask, stage))
        layout = self.flow.layouts[key]
        assert isinstance(layout, dict)
        append = self._append_of(layout[2].axis)
        sliced = self._sliced(mask, {2: rows}, stage)
        self.stage = stage
        if append is not None and append.index is not None:
            later = self._sliced(append.index, {0: TokenDim(self.flow.axis)}, stage + 1)
            self.stage = None  # The check looks from one stage at the other.
            columns = self._call(aten.index_select.default, (sliced, 3, later), like=mask)
        else:
            visible = self.extents.add(self.starts[stage], self.lengths[stage])
            if append is not None:
                visible = self.extents.add(self.extents.of(append.base_size), visible)
            end = torch.iinfo(torch.int64).max
            columns = self._call(aten.slice.Tensor, (sliced, 3, visible, end), like=mask)
        self._call(torch.ops.afd.check_masked.default, (columns, mask.name), like=mask)

    def _append_of(self, axis: Axis) -> Append | None:
        """The cache update that starts a key axis; None for the token axis and for windows."""
        return None if axis.appended_to is None else self.flow.appends.get(axis.appended_to)

    def _all_keys(self, operand: Any, stage: int) -> fx.Node:
        """Keys or values that stage ``stage`` may see."""
        assert isinstance(operand, fx.Node)
        if not self.flow.staged(operand):
            return self._whole(operand)
        return self._keys(operand, 2, stage)

    def _keys(self, node: fx.Node, dim: int, stage: int) -> fx.Node:
        """Cached entries and those of stages ``0..stage``, joined along ``dim``."""
        if (node, stage) in self.joined:
            return self.joined[node, stage]
        if node in self.flow.windows:
            cache = self._keys(self.flow.windows[node], dim, stage)
            visible = self.extents.add(self.starts[stage], self.lengths[stage])
            self.stage = stage
            window = self._call(aten.slice.Tensor, (cache, dim, 0, visible), like=node)
            self.joined[node, stage] = window
            return window
        layout = self.flow.layouts[node]
        assert isinstance(layout, dict)
        axis = layout[dim].axis
        append = None if axis.appended_to is None else self.flow.appends[axis.appended_to]
        before: fx.Node | None
        if stage > 0:
            before = self._keys(node, dim, stage - 1)
        else:
            before = None if append is None else self.parts[node, CACHED]
        own = self._rows(node, stage, local=False)
        if before is None:
            result = own
        elif append is None or append.index is None:
            self.stage = stage
            result = self._call(aten.cat.default, ([before, own], dim), like=node)
        else:
            index = self._sliced(append.index, {0: TokenDim(self.flow.axis)}, stage)
            self.stage = stage
            result = self._call(aten.index_copy.default, (before, dim, index, own), like=node)
        self.joined[node, stage] = result
        return result

    def _mask_rows(self, mask: fx.Node, rows: TokenDim, key: Any, stage: int) -> fx.Node:
        """The rows of the mask for the stage's queries, and the columns for the keys it sees."""
        same_for_all = shape_of(mask.meta["val"])[2].is_one
        sliced = self._sliced(mask, {} if same_for_all else {2: rows}, stage)
        if not self.flow.staged(key) or stage == self.stages[-1]:
            return sliced
        layout = self.flow.layouts[key]
        assert isinstance(layout, dict)
        axis = layout[2].axis
        visible = self.extents.add(self.starts[stage], self.lengths[stage])
        if axis.appended_to is not None and axis.appended_to not in self.flow.windows:
            append = self.flow.appends[axis.appended_to]
            if append.index is not None:
                return sliced  # The cache has its full size from the start.
            visible = self.extents.add(self.extents.of(append.base_size), visible)
        self.stage = stage
        return self._call(aten.slice.Tensor, (sliced, 3, 0, visible), like=mask)

    # -- slicing -----------------------------------------------------------------------------------

    def _sliced(self, node: fx.Node, layout: Layout, part: int) -> fx.Node:
        """The rows of a whole value that belong to one part."""
        key = (node, part, tuple(sorted((dim, id(entry.axis)) for dim, entry in layout.items())))
        if key not in self.slices:
            value = self._whole(node)
            for dim, entry in layout.items():
                value = self._slice_dim(node, value, dim, entry, part)
            self.slices[key] = value
        return self.slices[key]

    def _slice_dim(
        self, node: fx.Node, value: fx.Node, dim: int, entry: TokenDim, part: int
    ) -> fx.Node:
        self.stage = None if part == CACHED else part
        append = None
        if entry.axis.appended_to is not None:
            append = self.flow.appends[entry.axis.appended_to]
        if append is not None and append.index is not None:
            if part == CACHED:
                return value
            if not entry.plain:
                raise PassError("a folded cache axis cannot be sliced", node=node.name)
            index = self._sliced(append.index, {0: TokenDim(self.flow.axis)}, part)
            return self._call(aten.index_select.default, (value, dim, index), like=node)
        start: Extent
        if append is None:
            start, tokens = self.starts[part], self.lengths[part]
        elif part == CACHED:
            start, tokens = 0, self.extents.of(append.base_size)
        else:
            base = self.extents.of(append.base_size)
            start, tokens = self.extents.add(base, self.starts[part]), self.lengths[part]
        inner = self.extents.of(entry.inner)
        start, length = self.extents.multiply(start, inner), self.extents.multiply(tokens, inner)
        stop = self.extents.add(start, length)
        unfolded, at = self._unfold(node, value, dim, entry, self.extents.of(entry.axis.extent))
        cut = self._call(aten.slice.Tensor, (unfolded, at, start, stop), like=node)
        return self._fold(node, cut, dim, entry, tokens)

    # -- sizes and nodes ---------------------------------------------------------------------------

    def _length(self, entry: TokenDim, part: int, local: bool = False) -> Extent:
        """Size of a token dimension within one part."""
        append = None
        if entry.axis.appended_to is not None:
            append = self.flow.appends[entry.axis.appended_to]
        if part == CACHED:
            assert append is not None
            length = self.extents.of(append.base_size)
        else:
            length = self.shares[part] if local else self.lengths[part]
        factors = self.extents.multiply(self.extents.of(entry.outer), self.extents.of(entry.inner))
        return self.extents.multiply(factors, length)
