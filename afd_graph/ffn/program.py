"""The experts of one MoE layer, carved out of the model as a small program.

The routed program takes rows that are grouped by expert::

    routed(rows [m, hidden], counts int64 [experts], *weights) -> [m, hidden]

and the optional shared program the un-routed rows of the same tokens::

    shared(rows [n, hidden], *weights) -> [n, hidden]

Both are plain FX graphs over :mod:`torch.ops`: the two grouped products are
``afd::grouped_mm(rows, weight, counts)``; what lies between them (the activation, any scaling)
is copied from the model's own graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx


@dataclass
class Expression:
    """A graph and the weights that its trailing placeholders stand for.

    Attributes:
        graph: placeholders are the inputs named in the module docstring, then one per weight.
        weights: ``(name, tensor)`` in placeholder order; names are the model's parameter names
            where known.
    """

    graph: fx.Graph
    weights: Sequence[tuple[str, torch.Tensor]]


@dataclass
class FFNProgram:
    """The experts of one MoE layer.

    Attributes:
        layer: index of the MoE layer, in order of execution.
        name: module path of the layer, when the graph tells it.
        num_experts: number of routed experts.
        hidden_size: width of the rows, in and out.
        dtype: dtype of the rows, in and out.
        routed: program of the routed experts.
        shared: program of the shared experts, when they run on the FFN side.
    """

    layer: int
    name: str | None
    num_experts: int
    hidden_size: int
    dtype: torch.dtype
    routed: Expression
    shared: Expression | None = None
    key: str = field(default="")

    def expressions(self) -> list[Expression]:
        """The routed program, then the shared one if there is one."""
        return [self.routed] + ([self.shared] if self.shared is not None else [])
