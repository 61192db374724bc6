"""Expert weights as vLLM's fused kernel for CPU reads them: padded and packed for a kernel.

    w13 [experts, 2 * width, hidden]    gate and up projection, one above the other
    w2  [experts, hidden, width]        down projection

The width is padded with zeros to what the kernel's instruction set takes, each projection by
itself, and the values are put in the order that its instructions read. Shapes stay.
"""

from __future__ import annotations

from typing import Any

import torch

from afd_graph.errors import ConfigError
from afd_graph.vllm.experts import load_kernels


def padded_width(isa: str, width: int) -> int:
    """Width of an expert's inner rows when they are packed for ``isa``.

    Raises:
        ConfigError: this vLLM has no such kernel.
    """
    align: int = _kernel(isa)._intermediate_alignment()
    return -(-width // align) * align


def pack_w13(w13: torch.Tensor, isa: str) -> torch.Tensor:
    """``[experts, 2 * width, hidden]`` -> ``[experts, 2 * padded width, hidden]``, packed."""
    experts, rows, hidden = w13.shape
    width, padded = rows // 2, padded_width(isa, rows // 2)
    if padded != width:
        plain, w13 = w13, w13.new_zeros(experts, 2 * padded, hidden)
        w13[:, :width] = plain[:, :width]
        w13[:, padded : padded + width] = plain[:, width:]
    return _packed(w13, isa)


def pack_w2(w2: torch.Tensor, isa: str) -> torch.Tensor:
    """``[experts, hidden, width]`` -> ``[experts, hidden, padded width]``, packed."""
    missing = padded_width(isa, w2.shape[2]) - w2.shape[2]
    return _packed(torch.nn.functional.pad(w2, (0, missing)), isa)


def _packed(weight: torch.Tensor, isa: str) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    if not _kernel(isa)._supports_current_device():
        # vLLM would pack all the same, and the first step end the process.
        raise ConfigError(
            f"vLLM packed its experts for {isa!r}, which this processor does not have",
            remedy="run both sides on the same kind of processor",
        )
    load_kernels()
    try:
        packed: torch.Tensor = cpu_prepack_moe_weight(weight.contiguous(), isa)
    except RuntimeError as error:
        raise ConfigError(
            f"vLLM cannot pack experts {list(weight.shape)} {weight.dtype} for {isa!r} here: "
            f"{str(error).splitlines()[0]}",
            remedy="run both sides on the same kind of processor",
        ) from error
    return packed


def _kernel(isa: str) -> Any:
    """vLLM's class of the kernel for ``isa``."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    classes = (CPUUnquantizedExperts, *CPUUnquantizedExperts.__subclasses__())
    found = {kernel.isa: kernel for kernel in classes}
    if isa not in found:
        raise ConfigError(
            f"this vLLM packs experts for {sorted(found)}, not for {isa!r}",
            remedy="use the same version of vLLM on both sides",
        )
    return found[isa]
