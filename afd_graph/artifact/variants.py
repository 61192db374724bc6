"""Both variants of one program as JSON values, and what decides between them at every step.

Stored are the graphs (:mod:`afd_graph.stored_graph`), the sizes that the choice reads and the
report. The name of the runtime channel, which the operators carry, is that of the process that
compiled: it is put in anew where the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from afd_graph.artifact.errors import ArtifactError
from afd_graph.artifact.operators import check_allowed, graph_of
from afd_graph.compiled_graph import CompiledGraph
from afd_graph.config import AFDConfig
from afd_graph.errors import UnsupportedError
from afd_graph.lowering import lower
from afd_graph.passes.token_flow import DISPATCH, RECEIVE
from afd_graph.passes.verify import verify
from afd_graph.pipeline import Programs
from afd_graph.report import GraphReport, Report
from afd_graph.runtime import Channel
from afd_graph.size_expressions import evaluator, positions
from afd_graph.step import StepChooser, StepSizes
from afd_graph.stored_graph import graph_to_dict

MODES = ("sequence", "batch", "rows")
_CHANNEL = {DISPATCH: 4, RECEIVE: 5}


@dataclass
class Variants:
    """Both attention programs of one captured graph.

    Attributes:
        unsplit: of one stage.
        split: of two stages, whose last input is the cut; None without one.
        sizes: what the choice reads; None without a two-stage program.
        report: what the compiler reported, with the reason for having none.
    """

    unsplit: fx.Graph
    split: fx.Graph | None
    sizes: StepSizes | None
    report: GraphReport

    @classmethod
    def of(cls, programs: Programs, report: GraphReport) -> Variants:
        """What to store of a graph that went through the passes.

        Raises:
            UnsupportedError: a step over paged caches or of a tensor-parallel model, or an
                operator that artifacts may not call.
        """
        if programs.sizes is not None:
            raise UnsupportedError(
                "a step over paged caches belongs to the engine that owns them",
                remedy="use the backend in the engine, which stores compiled code itself",
            )
        if programs.group is not None:
            raise UnsupportedError(
                "a tensor-parallel model is captured with the process group of one run",
                remedy="compile the model before parallelize_module, or use torch.compile",
            )
        split, sizes = None, None
        if programs.split is not None:
            assert programs.flow is not None
            split = programs.split.graph
            sizes = StepSizes.of(programs.unsplit.graph, programs.flow)
        made = cls(programs.unsplit.graph, split, sizes, report)
        for graph in made.graphs():
            check_allowed(graph)
        return made

    def graphs(self) -> list[fx.Graph]:
        """The graphs that there are."""
        return [self.unsplit] if self.split is None else [self.unsplit, self.split]

    def compiled(
        self,
        report: Report,
        channel: Channel,
        config: AFDConfig,
        plan: Callable[[int, int], int | str] | None = None,
    ) -> CompiledGraph:
        """A callable over the list of the graph's inputs, on ``channel``; counts in ``report``."""
        for graph in self.graphs():
            for node in graph.nodes:
                if node.target in _CHANNEL:
                    node.update_arg(_CHANNEL[node.target], channel.name)
        return CompiledGraph(
            report,
            channel,
            _lowered(self.unsplit),
            None if self.split is None else _lowered(self.split),
            None if self.sizes is None else StepChooser(self.sizes, config, plan),
            self.report.unsplit_reason,
            set(),
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        sizes, report = self.sizes, self.report
        return {
            "unsplit": graph_to_dict(self.unsplit),
            "split": None if self.split is None else graph_to_dict(self.split),
            "sizes": None
            if sizes is None
            else {
                "mode": sizes.mode,
                "extent": sizes.extent,
                "tokens": sizes.tokens,
                "equal": [list(pair) for pair in sizes.equal],
                "masks": [list(pair) for pair in sizes.masks],
            },
            "report": {
                "layers": report.layers,
                "mode": report.mode,
                "unsplit_reason": report.unsplit_reason,
                "no_match": report.no_match,
                "nodes_before": report.nodes_before,
                "nodes_after": report.nodes_after,
                "edits": report.edits,
            },
        }

    @classmethod
    def from_json(cls, stored: Any, *, inputs: int, credits: int) -> Variants:
        """Read and verify what :meth:`to_json` wrote.

        Args:
            stored: JSON values.
            inputs: number of inputs that the graphs must have.
            credits: that their order must keep to.

        Raises:
            AFDError: an operator that must not be called, or a schedule that breaks its rules.
            Exception: of any kind, for what is malformed.
        """
        report = GraphReport(**stored["report"])
        unsplit = graph_of(stored["unsplit"])
        split, sizes = None, None
        if stored["split"] is not None:
            split = graph_of(stored["split"])
            sizes = _sizes(stored["sizes"], inputs)
        elif not report.unsplit_reason or stored["sizes"] is not None:
            raise ArtifactError(
                "the program has no two-stage variant and no reason for that",
                remedy="it is damaged; compile it again",
            )
        made = cls(unsplit, split, sizes, report)
        for stages, graph in enumerate(made.graphs(), 1):
            if len(graph.find_nodes(op="placeholder")) != inputs + stages - 1:
                raise ValueError("a graph does not have the inputs that the program says")
            verify(graph, after="load", credits=credits)
            crossings = {(n.args[2], n.args[3]) for n in graph.nodes if n.target is DISPATCH}
            if crossings != {(layer, stage) for layer in report.layers for stage in range(stages)}:
                raise ValueError("a graph does not dispatch each layer and stage that it should")
        return made

    def outputs(self) -> set[int]:
        """Number of outputs of the graphs."""
        return {len(graph.output_node().args[0]) for graph in self.graphs()}  # type: ignore[arg-type]


def _lowered(graph: fx.Graph) -> Callable[[Sequence[Any]], Any]:
    return lower("eager", fx.GraphModule(torch.nn.Module(), graph))


def _sizes(stored: Any, inputs: int) -> StepSizes:
    equal = tuple((int(a), int(b)) for a, b in stored["equal"])
    masks = tuple((int(mask), offset) for mask, offset in stored["masks"])
    sizes = StepSizes(stored["mode"], stored["extent"], stored["tokens"], equal, masks)
    if sizes.mode not in MODES:
        raise ValueError(f"the mode {sizes.mode!r} is not known")
    read = {position for pair in equal for position in pair} | {mask for mask, _ in masks}
    for tree in (sizes.extent, sizes.tokens, *(offset for _, offset in masks)):
        evaluator(tree)
        read |= positions(tree)
    if not all(0 <= position < inputs for position in read):
        raise ValueError("the choice reads an input that is not there")
    return sizes
