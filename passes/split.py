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
   token axis, by the cache update along a key axis.

The order of the new graph is any topological one; :mod:`schedule` decides the real one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from afd_graph.errors import PassError
from afd_graph.passes.extents import Extent, Extents
from afd_graph.passes.sizes import product, shape_of, size_of
from afd_graph.passes.token_flow import (
    ATTENTION,
    DISPATCH,
    RECEIVE,
    TokenFlow,
)
from afd_graph.passes.token_layout import Axis, Layout, TokenDim

aten = torch.ops.aten

CACHED = -1
"""The part of a key axis that was there before the step; the others are the stages."""

CUT = "afd_cut"
"""Name of the input that holds the cut."""


def split_stages(
    graph: fx.Graph, flow: TokenFlow, *, cut: torch.SymInt | None, num_stages: int = 2
) -> fx.Graph:
    """Return the two-stage graph.

    Args:
        graph: the unsplit AFD graph; not changed.
        flow: its token flow.
        cut: symbolic extent of stage 0 along the token axis, which makes it an input; None for
            half of the axis (:func:`half_rounds_up`), which needs no symbol of its own.
        num_stages: two.
    """
    return _Splitter(graph, flow, cut, num_stages).run()


def half_rounds_up(flow: TokenFlow) -> bool:
    """Which stage gets the odd one: the planner gives a token to stage 0, a request to stage 1."""
    tokens_per_entry = product(
        size
        for dim, size in enumerate(shape_of(flow.seed.meta["val"])[:-1])
        if dim != flow.seed_dim
    )
    return flow.mode != "batch" or tokens_per_entry.is_one


class _Splitter:
    def __init__(
        self, graph: fx.Graph, flow: TokenFlow, cut: torch.SymInt | None, num_stages: int
    ) -> None:
        self.old = graph
        self.flow = flow
        self.cut = cut
        self.stages = range(num_stages)
        self.graph = fx.Graph()
        self.extents = Extents(self.graph)
        self.env: dict[fx.Node, fx.Node] = {}
        self.parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self.slices: dict[tuple[Any, ...], fx.Node] = {}
        self.joined: dict[tuple[fx.Node, int], fx.Node] = {}
        self.stage: int | None = None

    def run(self) -> fx.Graph:
        placeholders = [node for node in self.old.nodes if node.op == "placeholder"]
        for node in placeholders:
            self._whole_copy(node)
        total = self.extents.of(self.flow.axis.extent)
        first: Extent
        if self.cut is None:
            first = self.extents.half(total, half_rounds_up(self.flow))
        else:
            first = self.graph.placeholder(CUT)
            first.meta["val"] = self.cut
        self.starts: list[Extent] = [0, first]
        self.lengths: list[Extent] = [first, self.extents.subtract(total, first)]
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
        pieces = [self._part(node, stage) for stage in self.stages]
        self.stage = None
        if entry.outer.is_one:
            return self._call(aten.cat.default, (pieces, dim), like=node)
        # The token axis lies inside the dimension: bring it out, join, fold it back.
        shape = [self._size(node, d) for d in range(node.meta["val"].dim())]
        outer, inner = self.extents.of(entry.outer), self.extents.of(entry.inner)
        unfolded = [
            self._call(
                aten.reshape.default,
                (
                    piece,
                    [*shape[:dim], outer, self.extents.multiply(length, inner), *shape[dim + 1 :]],
                ),
                like=node,
            )
            for piece, length in zip(pieces, self.lengths, strict=True)
        ]
        joined = self._call(aten.cat.default, (unfolded, dim + 1), like=node)
        return self._call(aten.reshape.default, (joined, shape), like=node)

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

        def argument(n: fx.Node) -> fx.Node:
            if self.flow.staged(n):
                return self._part(n, part)
            need = outcome.inputs.get(n)
            return self._sliced(n, need, part) if need else self._whole(n)

        lengths = {
            position: {at: self._length(entry, part) for at, entry in entries.items()}
            for position, entries in outcome.sizes.items()
        }
        new = self.graph.node_copy(node, argument)
        arguments = list(new.args)
        for position, replaced in lengths.items():
            sizes = list(arguments[position])
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
            self.parts[node, stage] = self._part(append.part, stage)

    def _attention(self, node: fx.Node, stage: int) -> fx.Node:
        query, key, value, mask = node.args[:4]
        assert isinstance(query, fx.Node)
        keys = [self._all_keys(operand, stage) for operand in (key, value)]
        own = self.flow.layouts[query]
        assert isinstance(own, dict)
        if isinstance(mask, fx.Node):
            mask = self._mask_rows(mask, own[2], key, stage)
        self.stage = stage
        return self._call(
            ATTENTION, (self._part(query, stage), *keys, mask, *node.args[4:]), like=node
        )

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
        own = self._part(node, stage)
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
        sliced = self._sliced(mask, {2: rows}, stage)
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
            start, length = self.starts[part], self.lengths[part]
        elif part == CACHED:
            start, length = 0, self.extents.of(append.base_size)
        else:
            base = self.extents.of(append.base_size)
            start, length = self.extents.add(base, self.starts[part]), self.lengths[part]
        inner = self.extents.of(entry.inner)
        start, length = self.extents.multiply(start, inner), self.extents.multiply(length, inner)
        stop = self.extents.add(start, length)
        if entry.outer.is_one:
            return self._call(aten.slice.Tensor, (value, dim, start, stop), like=node)
        shape = [self._size(node, d) for d in range(node.meta["val"].dim())]
        outer = self.extents.of(entry.outer)
        full = self.extents.multiply(self.extents.of(entry.axis.extent), inner)
        unfolded = self._call(
            aten.reshape.default, (value, [*shape[:dim], outer, full, *shape[dim + 1 :]]), like=node
        )
        cut = self._call(aten.slice.Tensor, (unfolded, dim + 1, start, stop), like=node)
        shape[dim] = self.extents.multiply(outer, length)
        return self._call(aten.reshape.default, (cut, shape), like=node)

    # -- sizes and nodes ---------------------------------------------------------------------------

    def _length(self, entry: TokenDim, part: int) -> Extent:
        """Size of a token dimension within one part."""
        append = None
        if entry.axis.appended_to is not None:
            append = self.flow.appends[entry.axis.appended_to]
        if part == CACHED:
            assert append is not None
            length = self.extents.of(append.base_size)
        else:
            length = self.lengths[part]
        factors = self.extents.multiply(self.extents.of(entry.outer), self.extents.of(entry.inner))
        return self.extents.multiply(factors, length)

    def _size(self, node: fx.Node, dim: int) -> Extent:
        return self.extents.of(size_of(node.meta["val"].shape[dim]))

    def _call(self, target: Any, arguments: tuple[Any, ...], *, like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, arguments)
        new.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
        self._mark(new)
        return new

    def _mark(self, new: fx.Node) -> None:
        # The shape of the unsplit value does not hold for a part of it.
        new.meta.pop("val", None)
        if self.stage is not None:
            new.meta["afd_stage"] = self.stage
