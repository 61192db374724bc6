"""Ahead of time with PyTorch's own interface: what ``aot_compile`` saves of the backend's work.

    compiled = torch.compile(model, backend=AFDBackend(config), fullgraph=True)
    function = compiled.forward.aot_compile(((ids,), {}))
    function.save_compiled_function(path)
    ...
    function = torch.compiler.load_compiled_function(open(path, "rb"))
    function(model, ids)

PyTorch keeps guards and bytecode, and pickles them: load such a file only from whom you trust. Our
part is JSON: both programs, what the choice reads, and of the experts their programs and which
inputs of the graph their weights are. Weights are not in it, the model brings them; its experts
go to the FFN side with the first step. An artifact (:mod:`afd_graph.artifact`) needs neither the
model nor its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from afd_graph import _compat
from afd_graph.artifact.errors import ArtifactError
from afd_graph.artifact.experts import (
    ExpertLayer,
    Share,
    experts_from_json,
    experts_to_json,
)
from afd_graph.artifact.manifest import (
    config_from_json,
    config_to_json,
    current_versions,
    decode,
    encode,
)
from afd_graph.artifact.variants import Variants
from afd_graph.compiled_graph import guarded
from afd_graph.config import AFDConfig
from afd_graph.errors import AFDError, UnsupportedError
from afd_graph.pipeline import Programs
from afd_graph.report import GraphReport, LayerReport, Report
from afd_graph.runtime import Channel, open_channel

_NAME = "the saved function"


class SavedGraph(_compat.serializable_callable()):  # type: ignore[misc]
    """A compiled graph that can be saved.

    Args:
        run: called with the inputs of the graph.
        stored: what is saved, or the reason why it cannot be.
        report: of what ran.
        close: stops the FFN side.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        stored: bytes | AFDError,
        report: Report,
        close: Callable[[], None],
    ) -> None:
        self._run = run
        self._stored = stored
        self.report = report
        self.close = close

    def __call__(self, *inputs: Any) -> Any:
        """Run one step."""
        return self._run(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedGraph) -> bytes:
        """What is saved.

        Raises:
            AFDError: this graph cannot be.
        """
        if isinstance(fn._stored, AFDError):
            raise fn._stored
        return fn._stored

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedGraph:
        """Make a callable of what was saved, with a connector of its own.

        Raises:
            ArtifactError: saved by another version, or damaged.
        """
        stored = decode(data, _NAME)
        try:
            return _opened(stored, data)
        except AFDError:
            raise
        except Exception as error:  # malformed values fail in many ways
            raise ArtifactError(
                f"{_NAME} is malformed: {type(error).__name__}: {error}",
                remedy="compile and save it again",
            ) from error


def stored_graph(
    programs: Programs,
    report: GraphReport,
    config: AFDConfig,
    credits: int,
    weights: Mapping[int, int],
) -> bytes | AFDError:
    """What is saved of a graph, or why it cannot be.

    Args:
        programs: of the graph.
        report: about it.
        config: that it was compiled with.
        credits: of its order.
        weights: id of each tensor among the graph's inputs -> its position.
    """
    try:
        layers, positions = [], []
        for match, program in zip(programs.matches, programs.ffn, strict=True):
            layers.append(ExpertLayer.of(program, match.top_k, match.shared_experts))
            for expression in program.expressions():
                for name, tensor in expression.weights:
                    if id(tensor) not in weights:
                        raise UnsupportedError(
                            f"the expert weight {name} is no input of the graph",
                            remedy="make it a parameter of the model",
                        )
                    positions.append(weights[id(tensor)])
        return encode(
            {
                "versions": current_versions(),
                "config": config_to_json(config),
                "credits": credits,
                "inputs": len(programs.unsplit.graph.find_nodes(op="placeholder")),
                "experts": experts_to_json(layers),
                "weights": positions,
                "variants": Variants.of(programs, report).to_json(),
            }
        )
    except AFDError as error:
        return error


def _opened(stored: Any, data: bytes) -> SavedGraph:
    if stored["versions"] != current_versions():
        raise ArtifactError(
            f"{_NAME} was made with {stored['versions']}, this is {current_versions()}",
            remedy="compile and save it again",
        )
    config = config_from_json(stored["config"])
    credits = stored["credits"]
    variants = Variants.from_json(stored["variants"], inputs=stored["inputs"], credits=credits)
    layers = experts_from_json(stored["experts"])
    channel = open_channel(config, None, credits)
    whole = Report(credits=credits, order="receive-first" if credits == 1 else "send-first")
    whole.graphs.append(variants.report)
    whole.layers = [
        LayerReport(x.layer, x.name, x.num_experts, x.top_k, x.shared_experts) for x in layers
    ]
    graph = variants.compiled(whole, channel, config)
    bound: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        if not bound:
            _hand_over(channel, layers, [inputs[position] for position in stored["weights"]])
            experts = {position: inputs[position] for position in stored["weights"]}
            bound.append(guarded(lambda *flat: graph.run(list(flat)), experts))
        with torch.no_grad():
            return bound[0](*inputs)

    return SavedGraph(run, data, whole, channel.close)


def _hand_over(
    channel: Channel, layers: Sequence[ExpertLayer], weights: Sequence[torch.Tensor]
) -> None:
    """Give the experts to the FFN side; weights in the order of the layers' programs."""
    left = iter(weights)
    for layer in layers:
        whole = Share(layer.layer, 0, layer.num_experts, is_part=False)
        program = layer.program(lambda name, rows: next(left), {}, whole, "saved function")
        channel.connector.add_program(program)
        channel.num_experts[layer.layer] = layer.num_experts
        if layer.shared is not None:
            channel.shared_layers.add(layer.layer)
