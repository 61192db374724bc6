"""The passes in their order: one graph of vLLM in, the unsplit and the two-stage program out.

    match ▶ insert ▶ schedule ▶ unsplit program
                │
                └▶ split ▶ schedule ▶ two-stage program          (verify after each)

As :mod:`afd_graph.pipeline`, on a graph that is neither functional nor at the level of ATen: the
passes of the core that order and verify graphs are the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from afd_graph.config import AFDConfig
from afd_graph.errors import UnsupportedError
from afd_graph.passes.schedule import schedule
from afd_graph.passes.verify import verify
from afd_graph.report import GATE_IN_GRAPH, GATE_OPENED, GraphReport
from afd_graph.vllm.in_place import hidden_needs
from afd_graph.vllm.insert import insert_dispatch
from afd_graph.vllm.match import InlineLayer, OpaqueLayer, match_layers
from afd_graph.vllm.split import split_stages

CHANNEL = "vllm"
"""Channel name in all graphs, which may be stored: a model says which it is when it runs."""

_Result = TypeVar("_Result")

Observer = Callable[[str, fx.Graph], None]
"""Called after each pass with its name and the graph."""


@dataclass(frozen=True)
class ExpertSource:
    """Where the expert weights of a layer are when the program runs.

    Attributes:
        name: module path; for an opaque layer vLLM's own name of it.
        inputs: positions of w13, w2 and their biases among the inputs of the program; None where
            there is no bias. Empty for an opaque layer, whose module has them.
        activation: vLLM's name of the activation; empty for an opaque layer.
        isa: vLLM's name of the kernel; empty for an opaque layer.
        top_k: experts per token, 0 where the graph does not tell.
    """

    name: str
    inputs: tuple[int | None, ...]
    activation: str = ""
    isa: str = ""
    top_k: int = 0

    @property
    def gate(self) -> str:
        """Where gate and top-k run, and where they were found, for the report."""
        return GATE_IN_GRAPH if self.inputs else GATE_OPENED


@dataclass
class Programs:
    """What the passes make of one graph.

    Attributes:
        unsplit: one stage.
        split: two stages; its last inputs are the tokens of each. None without one.
        experts: where each layer's weights are.
        report: what was matched and what each pass took.
    """

    unsplit: fx.GraphModule
    split: fx.GraphModule | None
    experts: list[ExpertSource]
    report: GraphReport = field(default_factory=GraphReport)


def build_programs(
    gm: fx.GraphModule, config: AFDConfig, credits: int, observer: Observer | None = None
) -> Programs:
    """Transform ``gm``, whose graph is changed in place.

    Raises:
        UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
        PassError: a pass broke an invariant.
    """
    graph = gm.graph
    report = GraphReport(nodes_before=len(graph.nodes))
    programs = Programs(gm, None, [], report)
    passes = _Passes(report, observer)
    with_layers, failed = passes.run("match", graph, lambda: match_layers(graph))
    report.no_match = [str(failure) for failure in failed]
    report.edits["match"] = len(with_layers)
    report.layers = list(range(len(with_layers)))
    if not with_layers or failed:
        report.unsplit_reason = "no_moe_layer" if not failed else "experts_not_matched"
        if failed and config.on_unsupported == "error":
            raise UnsupportedError(
                f"{len(failed)} calls compute experts in a form that is not known, the first: "
                f"{failed[0]}",
                remedy="set on_unsupported='fallback' to run this model as vLLM does",
            )
        report.layers = []
        report.nodes_after = report.nodes_before
        return programs
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    programs.experts = [_source(layer, inputs) for layer in with_layers]
    passes.run("insert", graph, lambda: insert_dispatch(graph, with_layers, CHANNEL))
    report.edits["insert"] = 2 * len(with_layers)
    split = None
    if config.split == "none":
        report.unsplit_reason = "disabled"
    else:
        try:
            split = passes.run("split", None, lambda: split_stages(graph))
        except UnsupportedError as refusal:
            if config.on_unsupported == "error":
                raise
            report.unsplit_reason = f"unsupported: {refusal}"
    if split is not None:
        report.mode = "tokens"
        report.edits["split"] = len(split.nodes) - len(graph.nodes)
        _schedule(passes, "schedule", split, credits, 2)
        programs.split = fx.GraphModule(gm, split)
    _schedule(passes, "schedule_unsplit", graph, credits, 1)
    gm.recompile()
    report.nodes_after = len((programs.split or gm).graph.nodes)
    return programs


def digest(programs: Programs) -> str:
    """Hash of what both programs do and in which order, which all ranks of a model must share."""
    calls = hashlib.sha256()
    for gm in (programs.unsplit, programs.split):
        for node in () if gm is None else gm.graph.nodes:
            target = node._pretty_print_target(node.target)
            calls.update(f"{node.op} {target} {node.meta.get('afd_stage')}\n".encode())
    return calls.hexdigest()[:16]


def _schedule(passes: _Passes, name: str, graph: fx.Graph, credits: int, stages: int) -> None:
    def order() -> None:
        schedule(graph, credits=credits, num_stages=stages, needs=hidden_needs(graph))

    passes.run(name, graph, order)
    verify(graph, after=name, credits=credits)


def _source(layer: InlineLayer | OpaqueLayer, inputs: list[fx.Node]) -> ExpertSource:
    if isinstance(layer, OpaqueLayer):
        return ExpertSource(layer.name, ())
    positions = tuple(None if node is None else inputs.index(node) for node in layer.weights)
    top_k = int(layer.topk_ids.meta["example_value"].shape[1])
    return ExpertSource(layer.name, positions, layer.activation, layer.isa, top_k)


class _Passes:
    """Runs and times the passes, verifies and shows what they leave."""

    def __init__(self, report: GraphReport, observer: Observer | None) -> None:
        self._report = report
        self._observer = observer

    def run(self, name: str, graph: fx.Graph | None, work: Callable[[], _Result]) -> _Result:
        """Run the pass ``work``, which changes ``graph`` or returns a new one."""
        started = time.perf_counter()
        result = work()
        self._report.pass_seconds[name] = time.perf_counter() - started
        after = result if isinstance(result, fx.Graph) else graph
        if after is not None:
            verify(after, after=name)
            if self._observer is not None:
                self._observer(name, after)
        return result
