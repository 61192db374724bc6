"""Capture a model without running it: the functional ATen graph that the passes take.

``torch.export`` traces the model with fake tensors, so that neither weights nor memory are
needed; AOTAutograd then makes of its graph what the backend gets from Dynamo. What export knows
is kept: which input is which parameter, how inputs and outputs are nested, and what it assumed
about their sizes.

1. export, with the dynamic sizes that the caller names;
2. keep attention whole (:mod:`attention`) and drop assertions on dtypes, which inputs are checked
   for anyway;
3. make the graph functional, with the settings of :class:`~afd_graph.backend.AFDBackend`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

import afd_graph.ops  # noqa: F401  (registers operators)
from afd_graph import _compat
from afd_graph.attention import keep_attention_whole
from afd_graph.config import AFDConfig
from afd_graph.errors import UnsupportedError
from afd_graph.lowering import decompositions
from afd_graph.passes.graph_tools import root
from afd_graph.passes.match import Match
from afd_graph.pipeline import PassObserver, Pipeline, Programs
from afd_graph.structure import flatten

WEIGHT, CONSTANT, INPUT = "weight", "constant", "input"


@dataclass(frozen=True)
class Example:
    """One way to call a model.

    Attributes:
        inputs: keyword arguments; dictionaries, lists and tuples of tensors (fake ones will do).
        dynamic: which of their sizes vary, as ``torch.export`` takes it.
    """

    inputs: Mapping[str, Any]
    dynamic: Mapping[str, Any]


@dataclass(frozen=True)
class GraphInput:
    """What an input of a captured graph is.

    Attributes:
        kind: ``weight`` (in the state dict), ``constant`` (a tensor of the model that is not) or
            ``input``.
        name: of the parameter or buffer; of an input its path, such as ``cache[0][1]``.
        value: tensor of a weight or constant; fake or without data if the model's is.
    """

    kind: str
    name: str
    value: torch.Tensor | None = None


@dataclass
class Captured:
    """A functional ATen graph and what its inputs and outputs are.

    Attributes:
        gm: the graph.
        inputs: of the graph, in order.
        input_template: nesting of the keyword arguments (:mod:`structure`).
        output_template: nesting of the outputs.
    """

    gm: fx.GraphModule
    inputs: list[GraphInput]
    input_template: Any
    output_template: Any
    _by_node: dict[fx.Node, GraphInput] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        nodes = self.gm.graph.find_nodes(op="placeholder")
        self._by_node = dict(zip(nodes, self.inputs, strict=True))

    def weight_of(self, node: fx.Node) -> tuple[str, torch.Tensor] | None:
        """Name and tensor of a parameter or buffer; None for an input of the step."""
        found = self._by_node.get(node)
        return None if found is None or found.value is None else (found.name, found.value)


class LayerNumbers:
    """Numbers the MoE layers of a model, the same in every program captured from it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}

    def of(self, captured: Captured) -> Any:
        """The function from a match in ``captured`` to its number that the pipeline wants."""

        def number(match: Match) -> int:
            found = [captured.weight_of(root(product.weight)) for product in match.products]
            key = tuple("?" if weight is None else weight[0] for weight in found)
            return self._numbers.setdefault(key, len(self._numbers))

        return number


def capture(model: nn.Module, example: Example, config: AFDConfig, *, prefix: str = "") -> Captured:
    """Capture ``model``, called as ``example`` says.

    Args:
        model: in evaluation mode; its tensors may be fake.
        example: inputs.
        config: whose lowering says how far operators are decomposed.
        prefix: left out in front of the names of weights and modules.

    Raises:
        UnsupportedError: the model writes to its inputs or buffers, or cannot be exported.
    """
    template, leaves = flatten(dict(example.inputs))
    with torch.no_grad():
        try:
            exported = torch.export.export(
                model, (), dict(example.inputs), dynamic_shapes=dict(example.dynamic), strict=False
            )
        except torch._dynamo.exc.UserError as error:
            raise UnsupportedError(
                f"torch.export cannot capture the model: {error}",
                remedy="a size that is said to vary is fixed by the model, or the model decides "
                "by the values of its inputs",
            ) from error
        gm = exported.graph_module
        for node in gm.graph.find_nodes(
            op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
        ):
            gm.graph.erase_node(node)
        keep_attention_whole(gm.graph)
        gm.recompile()
        placeholders = gm.graph.find_nodes(op="placeholder")
        fakes = [node.meta["val"] for node in placeholders]
        functional = _compat.functional_graph(
            gm, fakes, decompositions(config.lowering, config.lowering_options)
        )
    names = iter(_paths(template, ""))
    values = {**exported.constants, **dict(model.named_buffers()), **dict(model.named_parameters())}
    inputs = []
    for kind, target in _compat.export_inputs(exported):
        if kind == INPUT:
            inputs.append(GraphInput(INPUT, next(names)))
        else:
            inputs.append(GraphInput(kind, str(target).removeprefix(prefix), values[target]))
    if sum(found.kind == INPUT for found in inputs) != len(leaves):
        raise UnsupportedError(
            "the captured graph does not have the inputs of the example",
            remedy="pass tensors only; numbers and flags belong into the model",
        )
    _refuse_writes(functional.graph, inputs)
    for node in functional.graph.nodes:
        _without_prefix(node, prefix)
    return Captured(functional, inputs, template, _compat.export_outputs(exported))


def run_passes(
    captured: Captured,
    config: AFDConfig,
    *,
    credits: int,
    channel: str,
    numbers: LayerNumbers,
    observer: PassObserver | None = None,
) -> Programs:
    """Run the passes over a captured graph, which is changed in place."""
    pipeline = Pipeline(
        config,
        channel=channel,
        credits=credits,
        cut_is_input=config.lowering == "eager",
        observer=observer,
    )
    return pipeline.run(captured.gm, captured.weight_of, numbers.of(captured))


def _refuse_writes(graph: fx.Graph, inputs: list[GraphInput]) -> None:
    """What is bound to an artifact is shared by all steps, and may be mapped from a file."""
    names = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = names.get(node.args[0])
        if written is not None:
            raise UnsupportedError(
                f"the model writes to {written.name}",
                node=node.name,
                remedy="let it return what is new, as a cache that grows does",
            )


def _paths(template: Any, where: str) -> list[str]:
    if template is None:
        return []
    if isinstance(template, int):
        return [where]
    if isinstance(template, dict) and template.keys() != {"tuple"}:
        parts = [(f"{where}.{key}" if where else key, part) for key, part in template.items()]
    else:
        listed = template["tuple"] if isinstance(template, dict) else template
        parts = [(f"{where}[{i}]", part) for i, part in enumerate(listed)]
    return [path for name, part in parts for path in _paths(part, name)]


def _without_prefix(node: fx.Node, prefix: str) -> None:
    stack = node.meta.get("nn_module_stack")
    if prefix and stack:
        node.meta["nn_module_stack"] = {
            key: (path.removeprefix(prefix), kind) for key, (path, kind) in stack.items()
        }
