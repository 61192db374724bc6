"""Experts that FFN ranks compute for vLLM: announced on one side, loaded on the other.

The attention side announces the program of :mod:`experts` over weights that have a shape and no
memory, whole experts whatever share of them its own rank has. An FFN rank reads its experts from
the checkpoint by these names, and packs them as vLLM does.
"""

from __future__ import annotations

import torch

from afd_graph.errors import ConfigError
from afd_graph.ffn.checkpoint import LoadedExperts
from afd_graph.ffn.program import FFNProgram
from afd_graph.vllm.experts import expert_program
from afd_graph.vllm.packing import pack_w2, pack_w13, padded_width

_OWN_NAMES = {".block_sparse_moe.": ".mlp."}
"""Parts of vLLM's module paths -> those of the model whose parameters the checkpoint holds."""

_PACKED = {"w13": ("gate_up_proj", pack_w13), "w2": ("down_proj", pack_w2)}


def announced_program(
    layer: int,
    name: str,
    experts: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    activation: str,
    isa: str,
    calls: str,
) -> FFNProgram:
    """The program of a layer whose weights an FFN rank has.

    Args:
        layer: number of the layer.
        name: its module path.
        experts: experts of the layer, on all FFN ranks together.
        width: inner width of a whole expert.
        hidden: width of the rows.
        dtype: of rows and weights.
        activation: vLLM's name of the activation.
        isa: vLLM's name of the kernel.
        calls: digest of the attention programs; an FFN rank refuses layers of different ones.
    """
    padded = padded_width(isa, width)
    shapes = (experts, 2 * padded, hidden), (experts, hidden, padded)
    w13, w2 = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    program = expert_program(layer, name, (w13, w2, None, None), activation, isa)
    program.key = f"layer {layer} of {calls}"
    return program


class PackedExperts(LoadedExperts):
    """This FFN rank's experts, read from a checkpoint at once and packed when they are announced.

    Args:
        checkpoint: where they come from.
        share: from the number of experts of a layer to the first and last (exclusive) one owned.

    Raises:
        ConfigError: the checkpoint has no experts.
    """

    def routed(self, name: str, first: int, last: int) -> torch.Tensor:
        """Experts ``first`` to ``last`` (exclusive) of ``<layer>.w13.<isa>`` or ``.w2.<isa>``.

        Raises:
            ConfigError: the checkpoint has no such layer, or vLLM no such kernel.
        """
        owner, kind, isa = name.rsplit(".", 2)
        if kind not in _PACKED:
            raise ConfigError(
                f"an FFN rank cannot load {name!r}",
                remedy="experts with biases are not supported on a rank of their own",
            )
        parameter, pack = _PACKED[kind]
        for theirs, own in _OWN_NAMES.items():
            owner = owner.replace(theirs, own)
        stored = f"{owner}.{parameter}"
        plain = super().routed(stored, first, last)
        # Only the packed form is kept.
        self._loaded.pop(stored, None)
        return pack(plain, isa)
