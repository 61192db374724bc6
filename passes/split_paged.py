"""Copy the token-dependent region once per stage, for a step of many requests over paged caches.

As :mod:`split`, with what such a step adds. Its rows are those of ``P`` padded tokens, of which
``N`` are real; the two-stage program has these inputs behind those of the step:

    afd_tokens                            N
    afd_<field>_<stage>                   metadata of each stage, stage by stage
    afd_cut                               tokens of stage 0

1. the stages tile the real tokens ``[0, N)``; where a value is needed whole again, rows
   ``[N, P)`` are zero;
2. a paged attention of stage ``s`` takes the metadata of stage ``s``;
3. it comes after that of stage ``s - 1`` on the same cache, by a data edge: stage 1 attends to
   what stage 0 wrote in the same layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.errors import PassError
from afd_graph.paged_attention import STAGE_EXTENTS, paged_operator
from afd_graph.passes.extents import Extent
from afd_graph.passes.split import Splitter
from afd_graph.passes.tensor_parallel import TensorParallel
from afd_graph.passes.token_flow import TokenFlow
from afd_graph.passes.token_layout import TokenDim

aten = torch.ops.aten

TOKENS = "afd_tokens"
"""Name of the input that holds the number of real tokens."""


@dataclass(frozen=True)
class PagedSizes:
    """Symbolic sizes of the inputs that the two-stage program adds.

    Attributes:
        tokens: real tokens of the step.
        cut: tokens of stage 0.
        requests: requests of each stage.
    """

    tokens: torch.SymInt
    cut: torch.SymInt
    requests: tuple[torch.SymInt, torch.SymInt]

    @property
    def symbols(self) -> tuple[torch.SymInt, ...]:
        """All of them."""
        return self.tokens, self.cut, *self.requests

    def of(self, field: str, stage: int) -> torch.SymInt:
        """Size of dimension 0 of a metadata field."""
        if STAGE_EXTENTS[field] == "tokens":
            return self.tokens - self.cut if stage else self.cut
        return self.requests[stage] + (STAGE_EXTENTS[field] == "starts")


def split_paged_stages(
    graph: fx.Graph,
    flow: TokenFlow,
    *,
    sizes: PagedSizes,
    group: TensorParallel | None = None,
    local: Collection[fx.Node] = (),
    check_values: bool = False,
) -> fx.Graph:
    """Return the two-stage graph.

    Args:
        graph: the unsplit AFD graph; not changed.
        flow: its token flow, of mode ``paged``.
        sizes: symbols for the inputs that are added.
        group: the tensor-parallel group, when ``local`` is given.
        local: staged nodes that run on this rank's rows.
        check_values: check at run time what the values of the graph promise.
    """
    return _PagedSplitter(graph, flow, sizes, group, local, check_values).run()


class _PagedSplitter(Splitter):
    def __init__(
        self,
        graph: fx.Graph,
        flow: TokenFlow,
        sizes: PagedSizes,
        group: TensorParallel | None,
        local: Collection[fx.Node],
        check_values: bool,
    ) -> None:
        super().__init__(graph, flow, sizes.cut, 2, group, local, check_values)
        self.sizes = sizes
        self.metadata: dict[tuple[str, int], fx.Node] = {}

    def _tokens(self) -> Extent:
        tokens = self.graph.placeholder(TOKENS)
        tokens.meta["val"] = self.sizes.tokens
        for stage in self.stages:
            for field, whole in self.flow.metadata.items():
                given = self.graph.placeholder(f"afd_{field}_{stage}")
                size = self.sizes.of(field, stage)
                given.meta["val"] = _compat.resized(whole.meta["val"], size)
                given.meta["afd_stage"] = stage
                self.metadata[field, stage] = given
        return tokens

    def _copy_part(self, node: fx.Node, part: int) -> None:
        super()._copy_part(node, part)
        operator = paged_operator(node)
        if operator is None:
            return
        new = self.parts[node, part]
        arguments = list(new.args)
        for position, field in operator.metadata.items():
            arguments[position] = self.metadata[field, part]
        if part > 0:
            arguments[operator.after] = self.parts[node, part - 1]
        new.args = tuple(arguments)

    def _restore(self, node: fx.Node, dim: int, entry: TokenDim) -> fx.Node:
        """The real rows of both stages, and zeros in the rows of the step's padding."""
        if not entry.outer.is_one:
            raise PassError("padding rows lie inside a dimension", node=node.name)
        real = super()._restore(node, dim, entry)
        value = node.meta["val"]
        zeros = self._call(aten.full.default, (self._sizes(node), 0), like=node)
        zeros.kwargs = {"dtype": value.dtype, "device": value.device}
        tokens = self.extents.add(self.starts[-1], self.lengths[-1])
        end = self.extents.multiply(tokens, self.extents.of(entry.inner))
        return self._call(aten.slice_scatter.default, (zeros, real, dim, 0, end), like=node)
