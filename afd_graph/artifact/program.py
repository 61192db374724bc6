"""One captured program in an artifact: both variants, its inputs and outputs, and its guards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from afd_graph.artifact.guards import Guards
from afd_graph.artifact.variants import Variants
from afd_graph.capture import CONSTANT, INPUT, WEIGHT, Captured
from afd_graph.pipeline import Programs
from afd_graph.report import GraphReport
from afd_graph.structure import count_leaves


@dataclass
class StoredProgram:
    """What is stored of one program.

    Attributes:
        variants: both attention programs.
        inputs: kind and name of each graph input.
        used: positions of the weights and constants that a variant reads.
        input_template, output_template: nesting of keyword arguments and outputs.
        guards: on the inputs of a step.
    """

    variants: Variants
    inputs: list[tuple[str, str]]
    used: set[int]
    input_template: Any
    output_template: Any
    guards: Guards

    def step_positions(self) -> list[int]:
        """Positions of the inputs of a step among the graph's inputs."""
        return [i for i, (kind, _) in enumerate(self.inputs) if kind == INPUT]


def stored_program(captured: Captured, programs: Programs, report: GraphReport) -> StoredProgram:
    """What to store of a captured program that went through the passes.

    Raises:
        UnsupportedError: variants that cannot be stored (:meth:`Variants.of`), or sizes that an
            artifact cannot check.
    """
    variants = Variants.of(programs, report)
    names = [(i, found.name) for i, found in enumerate(captured.inputs) if found.kind == INPUT]
    used: set[int] = set()
    for graph in variants.graphs():
        nodes = graph.find_nodes(op="placeholder")
        used.update(i for i, _ in enumerate(captured.inputs) if nodes[i].users)
    return StoredProgram(
        variants,
        inputs=[(found.kind, found.name) for found in captured.inputs],
        used=used,
        input_template=captured.input_template,
        output_template=captured.output_template,
        guards=Guards.of(programs.unsplit.graph, names),
    )


def program_to_json(program: StoredProgram) -> dict[str, Any]:
    """JSON values."""
    return {
        "inputs": [
            [kind, name, int(i in program.used)] for i, (kind, name) in enumerate(program.inputs)
        ],
        "input_template": program.input_template,
        "output_template": program.output_template,
        "guards": program.guards.to_json(),
        "variants": program.variants.to_json(),
    }


def program_from_json(stored: Any, credits: int) -> StoredProgram:
    """Read and verify what :func:`program_to_json` wrote.

    Raises:
        AFDError: what :meth:`Variants.from_json` refuses.
        Exception: of any kind, for what is malformed.
    """
    inputs, used = [], set()
    for i, (kind, name, is_used) in enumerate(stored["inputs"]):
        if kind not in (WEIGHT, CONSTANT, INPUT) or not isinstance(name, str):
            raise ValueError(f"input {i} is malformed")
        inputs.append((kind, name))
        if is_used:
            used.add(i)
    variants = Variants.from_json(stored["variants"], inputs=len(inputs), credits=credits)
    guards = Guards.from_json(stored["guards"])
    steps = sum(kind == INPUT for kind, _ in inputs)
    template = stored["input_template"]
    if not isinstance(template, dict) or {count_leaves(template), len(guards.inputs)} != {steps}:
        raise ValueError("the program does not have the inputs that it says")
    if variants.outputs() != {count_leaves(stored["output_template"])}:
        raise ValueError("a graph does not have the outputs that the program says")
    return StoredProgram(variants, inputs, used, template, stored["output_template"], guards)
