"""One captured program in an artifact: both variants, its guards, and what the choice reads.

Stored as JSON values; see :mod:`afd_graph.stored_graph` for graphs. The name of the runtime
channel, which the operators carry, is that of the process that compiled: it is put in anew when
the program is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from afd_graph.artifact.errors import ArtifactError
from afd_graph.artifact.guards import Guards
from afd_graph.artifact.operators import check_allowed, find_allowed
from afd_graph.capture import CONSTANT, INPUT, WEIGHT, Captured
from afd_graph.errors import UnsupportedError
from afd_graph.passes.token_flow import DISPATCH, RECEIVE
from afd_graph.passes.verify import verify
from afd_graph.pipeline import Programs
from afd_graph.report import GraphReport
from afd_graph.size_expressions import evaluator, positions
from afd_graph.step import StepSizes
from afd_graph.stored_graph import graph_from_dict, graph_to_dict
from afd_graph.structure import count_leaves

MODES = ("sequence", "batch", "rows")
_CHANNEL = {DISPATCH: 4, RECEIVE: 5}


@dataclass
class StoredProgram:
    """What is stored of one program.

    Attributes:
        inputs: kind and name of each graph input.
        used: positions of the weights and constants that a variant reads.
        input_template, output_template: nesting of keyword arguments and outputs.
        guards: on the inputs of a step.
        unsplit: attention program of one stage.
        split: of two stages, whose last input is the cut; None without one.
        sizes: what the choice reads; None without a two-stage program.
        report: what the compiler reported.
    """

    inputs: list[tuple[str, str]]
    used: set[int]
    input_template: Any
    output_template: Any
    guards: Guards
    unsplit: fx.Graph
    split: fx.Graph | None
    sizes: StepSizes | None
    report: GraphReport

    def step_positions(self) -> list[int]:
        """Positions of the inputs of a step among the graph's inputs."""
        return [i for i, (kind, _) in enumerate(self.inputs) if kind == INPUT]

    def on_channel(self, name: str) -> None:
        """Let the operators call the channel ``name``."""
        for graph in (self.unsplit, self.split):
            for node in () if graph is None else graph.nodes:
                place = _CHANNEL.get(node.target)
                if place is not None:
                    node.update_arg(place, name)


def stored_program(captured: Captured, programs: Programs, report: GraphReport) -> StoredProgram:
    """What to store of a captured program that went through the passes.

    Raises:
        UnsupportedError: a step over paged caches or of a tensor-parallel model, an operator that
            artifacts may not call, or sizes that they cannot check.
    """
    if programs.sizes is not None:
        raise UnsupportedError(
            "a step over paged caches belongs to the engine that owns them",
            remedy="use the backend in the engine, which has a cache of its own for compiled code",
        )
    if programs.group is not None:
        raise UnsupportedError(
            "a tensor-parallel model is captured with the process group of one run",
            remedy="compile the model before parallelize_module, or use torch.compile",
        )
    graphs = [programs.unsplit.graph]
    if programs.split is not None:
        graphs.append(programs.split.graph)
    for graph in graphs:
        check_allowed(graph)
    names = [(i, found.name) for i, found in enumerate(captured.inputs) if found.kind == INPUT]
    assert programs.split is None or programs.flow is not None
    return StoredProgram(
        inputs=[(found.kind, found.name) for found in captured.inputs],
        used=_used(graphs, captured.inputs),
        input_template=captured.input_template,
        output_template=captured.output_template,
        guards=Guards.of(programs.unsplit.graph, names),
        unsplit=graphs[0],
        split=None if programs.split is None else graphs[1],
        sizes=None
        if programs.split is None or programs.flow is None
        else StepSizes.of(programs.unsplit.graph, programs.flow),
        report=report,
    )


def _used(graphs: list[fx.Graph], inputs: Any) -> set[int]:
    found: set[int] = set()
    for graph in graphs:
        nodes = graph.find_nodes(op="placeholder")
        found.update(i for i, _ in enumerate(inputs) if nodes[i].users)
    return found


def program_to_json(program: StoredProgram) -> dict[str, Any]:
    """JSON values."""
    sizes = program.sizes
    report = program.report
    return {
        "inputs": [
            [kind, name, int(i in program.used)] for i, (kind, name) in enumerate(program.inputs)
        ],
        "input_template": program.input_template,
        "output_template": program.output_template,
        "guards": program.guards.to_json(),
        "unsplit": graph_to_dict(program.unsplit),
        "split": None if program.split is None else graph_to_dict(program.split),
        "sizes": None
        if sizes is None
        else {
            "mode": sizes.mode,
            "extent": sizes.extent,
            "tokens": sizes.tokens,
            "equal": [list(pair) for pair in sizes.equal],
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


def program_from_json(stored: Any, credits: int) -> StoredProgram:
    """Read and verify what :func:`program_to_json` wrote.

    Raises:
        AFDError: an operator that must not be called, or a schedule that breaks its rules.
        Exception: of any kind, for what is malformed.
    """
    inputs, used = [], set()
    for i, (kind, name, is_used) in enumerate(stored["inputs"]):
        if kind not in (WEIGHT, CONSTANT, INPUT) or not isinstance(name, str):
            raise ValueError(f"input {i} is malformed")
        inputs.append((kind, name))
        if is_used:
            used.add(i)
    unsplit = graph_from_dict(stored["unsplit"], find_allowed)
    split = None if stored["split"] is None else graph_from_dict(stored["split"], find_allowed)
    guards = Guards.from_json(stored["guards"])
    report = GraphReport(**stored["report"])
    steps = sum(kind == INPUT for kind, _ in inputs)
    template = stored["input_template"]
    if not isinstance(template, dict) or {count_leaves(template), len(guards.inputs)} != {steps}:
        raise ValueError("the program does not have the inputs that it says")
    outputs = count_leaves(stored["output_template"])
    for graph, extra in ((unsplit, 0), (split, 1)):
        if graph is None:
            continue
        if len(graph.find_nodes(op="placeholder")) != len(inputs) + extra:
            raise ValueError("a graph does not have the inputs that the program says")
        if len(graph.output_node().args[0]) != outputs:  # type: ignore[arg-type]
            raise ValueError("a graph does not have the outputs that the program says")
        verify(graph, after="load", credits=credits)
        crossings = {(n.args[2], n.args[3]) for n in graph.nodes if n.target is DISPATCH}
        if crossings != {(layer, stage) for layer in report.layers for stage in range(1 + extra)}:
            raise ValueError("a graph does not dispatch each layer and stage that it should")
    if (split is None) != (stored["sizes"] is None) or (
        split is None and not report.unsplit_reason
    ):
        raise ArtifactError(
            "the program has no two-stage variant and no reason for that",
            remedy="the artifact is damaged; compile it again",
        )
    return StoredProgram(
        inputs,
        used,
        template,
        stored["output_template"],
        guards,
        unsplit,
        split,
        None if stored["sizes"] is None else _sizes(stored["sizes"], len(inputs)),
        report,
    )


def _sizes(stored: Any, inputs: int) -> StepSizes:
    equal = tuple((int(a), int(b)) for a, b in stored["equal"])
    sizes = StepSizes(stored["mode"], stored["extent"], stored["tokens"], equal)
    if sizes.mode not in MODES:
        raise ValueError(f"the mode {sizes.mode!r} is not known")
    read = {position for pair in equal for position in pair}
    for tree in (sizes.extent, sizes.tokens):
        evaluator(tree)
        read |= positions(tree)
    if not all(0 <= position < inputs for position in read):
        raise ValueError("the choice reads an input that is not there")
    return sizes
