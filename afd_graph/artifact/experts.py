"""The FFN side of an artifact: the program of each MoE layer, and which experts a rank owns.

The graphs of all layers of a model are mostly one and the same: each is stored once. A rank's
file says which experts of which layer are its own, in blocks of equal size in ascending order, as
expert parallelism places them; its weights are read for those alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from afd_graph.artifact.operators import check_allowed, graph_of
from afd_graph.errors import ConfigError
from afd_graph.ffn.program import Expression, FFNProgram
from afd_graph.stored_graph import constant, constant_name, graph_to_dict

ReadWeight = Callable[[str, "tuple[int, int] | None"], torch.Tensor]
"""Name of a weight, and the rows of it that are wanted (None for all), to the tensor."""


@dataclass(frozen=True)
class StoredExpression:
    """A graph and the names of the weights that its trailing inputs stand for."""

    graph: fx.Graph
    weights: tuple[str, ...]


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one MoE layer; attributes as of :class:`~afd_graph.ffn.program.FFNProgram`.

    Attributes:
        top_k: choices per token.
        shared_experts: shared experts of the model, wherever they run.
    """

    layer: int
    name: str | None
    num_experts: int
    top_k: int
    shared_experts: int
    hidden_size: int
    dtype: torch.dtype
    routed: StoredExpression
    shared: StoredExpression | None = None

    @classmethod
    def of(cls, program: FFNProgram, top_k: int, shared_experts: int) -> ExpertLayer:
        """What to store of a program that the passes carved out."""

        def stored(expression: Expression) -> StoredExpression:
            check_allowed(expression.graph)
            names = tuple(name for name, _ in expression.weights)
            return StoredExpression(expression.graph, names)

        return cls(
            program.layer,
            program.name,
            program.num_experts,
            top_k,
            shared_experts,
            program.hidden_size,
            program.dtype,
            stored(program.routed),
            None if program.shared is None else stored(program.shared),
        )

    def program(
        self, read: ReadWeight, shapes: Mapping[str, Sequence[int]], share: Share, key: str
    ) -> FFNProgram:
        """The program of one rank's share, with its weights read."""
        rows = (share.first, share.first + share.count)

        def of_experts(name: str) -> bool:
            shape = shapes.get(name)
            return bool(shape) and shape[0] == self.num_experts  # type: ignore[index]

        routed = [
            (name, read(name, rows if of_experts(name) and share.is_part else None))
            for name in self.routed.weights
        ]
        shared = self.shared
        return FFNProgram(
            self.layer,
            self.name,
            share.count,
            self.hidden_size,
            self.dtype,
            Expression(self.routed.graph, routed),
            None
            if shared is None
            else Expression(shared.graph, [(name, read(name, None)) for name in shared.weights]),
            key=f"{key} layer {self.layer} experts {rows[0]}..{rows[1]}",
        )


@dataclass(frozen=True)
class Share:
    """The experts ``first .. first + count`` of a layer; ``is_part`` when that is not all."""

    layer: int
    first: int
    count: int
    is_part: bool


def shares_of(layers: Sequence[ExpertLayer], rank: int, ranks: int) -> list[Share]:
    """What rank ``rank`` of ``ranks`` FFN ranks owns.

    Raises:
        ConfigError: the experts of a layer cannot be dealt out in equal blocks.
    """
    shares = []
    for layer in layers:
        if layer.num_experts % ranks:
            raise ConfigError(
                f"layer {layer.name or layer.layer} has {layer.num_experts} experts, which "
                f"{ranks} FFN ranks cannot share equally",
                remedy="choose a number of ranks that divides the number of experts",
            )
        count = layer.num_experts // ranks
        shares.append(Share(layer.layer, rank * count, count, ranks > 1))
    return shares


def experts_to_json(layers: Sequence[ExpertLayer]) -> dict[str, Any]:
    """JSON values; equal graphs are stored once."""
    graphs: list[dict[str, Any]] = []

    def number(expression: StoredExpression) -> dict[str, Any]:
        stored = graph_to_dict(expression.graph)
        if stored not in graphs:
            graphs.append(stored)
        return {"graph": graphs.index(stored), "weights": list(expression.weights)}

    entries = [
        {
            "layer": layer.layer,
            "name": layer.name,
            "num_experts": layer.num_experts,
            "top_k": layer.top_k,
            "shared_experts": layer.shared_experts,
            "hidden_size": layer.hidden_size,
            "dtype": constant_name(layer.dtype),
            "routed": number(layer.routed),
            "shared": None if layer.shared is None else number(layer.shared),
        }
        for layer in layers
    ]
    return {"graphs": graphs, "layers": entries}


def experts_from_json(stored: Any) -> list[ExpertLayer]:
    """Read what :func:`experts_to_json` wrote; what is malformed raises any exception."""

    def expression(entry: Any, inputs: int) -> StoredExpression:
        # A graph of its own for each layer: whoever runs it may compile it in place.
        position = entry["graph"]
        if type(position) is not int or position < 0:
            raise ValueError("the graph of experts is malformed")
        graph = graph_of(stored["graphs"][position])
        names = tuple(str(name) for name in entry["weights"])
        if len(graph.find_nodes(op="placeholder")) != inputs + len(names):
            raise ValueError("experts do not have the inputs that they should")
        return StoredExpression(graph, names)

    layers = []
    for position, entry in enumerate(stored["layers"]):
        sizes = [entry[key] for key in ("layer", "num_experts", "top_k", "hidden_size")]
        if not all(type(size) is int and 0 <= size < 2**31 for size in sizes):
            raise ValueError("the sizes of a layer are malformed")
        if entry["layer"] != position:
            raise ValueError("the layers are not numbered in order")
        name = entry["name"]
        layers.append(
            ExpertLayer(
                sizes[0],
                None if name is None else str(name),
                sizes[1],
                sizes[2],
                int(entry["shared_experts"]),
                sizes[3],
                constant("dtype", entry["dtype"]),
                expression(entry["routed"], 2),
                None if entry["shared"] is None else expression(entry["shared"], 1),
            )
        )
    return layers


def shares_to_json(shares: Sequence[Share]) -> dict[str, Any]:
    """JSON values."""
    return {"shares": [[s.layer, s.first, s.count] for s in shares]}


def shares_from_json(stored: Any, layers: Sequence[ExpertLayer]) -> list[Share]:
    """Read what :func:`shares_to_json` wrote; what is malformed raises any exception."""
    shares = []
    for layer, first, count in stored["shares"]:
        if not all(type(value) is int for value in (layer, first, count)):
            raise ValueError("a share of experts is malformed")
        if not (0 <= layer < len(layers) and first >= 0 and count > 0):
            raise ValueError("a share of experts is malformed")
        if first + count > layers[layer].num_experts:
            raise ValueError("a share has experts that the layer has not")
        shares.append(Share(layer, first, count, count < layers[layer].num_experts))
    if [share.layer for share in shares] != [layer.layer for layer in layers]:
        raise ValueError("a rank does not have a share of every layer")
    return shares
