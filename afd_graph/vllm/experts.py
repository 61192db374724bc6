"""vLLM's fused experts for CPU as an FFN program: what runs in the FFN process.

    afd::vllm_experts(rows [m, hidden], counts [experts], w13, w2, bias13, bias2, act, isa)

calls ``_C::cpu_fused_moe``, the kernel that vLLM itself would call, with every row as a token of
its own that chose one expert with weight one. The weighted sum over a token's choices is taken
where its answer is received. The FFN process imports this module for the operator; the weights
stay packed as vLLM packed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.ffn.executor import WRITES_OUT
from afd_graph.ffn.program import Expression, FFNProgram

_library = torch.library.Library("afd", "FRAGMENT")
_library.define(
    "vllm_experts(Tensor rows, Tensor counts, Tensor w13, Tensor w2, Tensor? bias13, "
    "Tensor? bias2, str activation, str isa) -> Tensor"
)


@cache
def load_kernels() -> None:
    """Load vLLM's kernels for this CPU into the process; again does nothing."""
    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    # vLLM's kernels do not ask: in a worker, PyTorch's matrix products before them have done so.
    _compat.allow_amx()


def _experts(rows: torch.Tensor, *others: Any) -> torch.Tensor:
    given: tuple[Any, ...] = (rows, *others, torch.empty_like(rows))
    return _experts_into(*given)


def _experts_into(
    rows: torch.Tensor,
    counts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    activation: str,
    isa: str,
    out: torch.Tensor,
) -> torch.Tensor:
    load_kernels()
    chosen = torch.repeat_interleave(
        torch.arange(len(counts), dtype=torch.int32), counts, output_size=len(rows)
    )
    torch.ops._C.cpu_fused_moe(
        out,
        rows,
        w13,
        w2,
        bias13,
        bias2,
        torch.ones((len(rows), 1), dtype=torch.float32),
        chosen[:, None],
        False,
        activation,
        isa,
    )
    return out


_library.impl("vllm_experts", _experts, "CPU")
WRITES_OUT[torch.ops.afd.vllm_experts.default] = _experts_into


@torch.library.register_fake("afd::vllm_experts", lib=_library)
def _experts_fake(rows: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(rows)


def expert_program(
    layer: int,
    name: str,
    weights: Sequence[torch.Tensor | None],
    activation: str,
    isa: str,
) -> FFNProgram:
    """The routed experts of a layer.

    Args:
        layer: number of the layer.
        name: its module path.
        weights: w13 ``[experts, 2 * width, hidden]``, w2 ``[experts, hidden, width]`` and their
            biases or None, packed for ``isa``; called ``<name>.w13.<isa>`` and so on.
        activation: vLLM's name of the activation.
        isa: vLLM's name of the kernel.
    """
    graph = fx.Graph()
    rows, counts = graph.placeholder("rows"), graph.placeholder("counts")
    given: list[tuple[str, torch.Tensor]] = []
    values: list[fx.Node | None] = []
    for title, weight in zip(("w13", "w2", "bias13", "bias2"), weights, strict=True):
        values.append(None if weight is None else graph.placeholder(title))
        if weight is not None:
            given.append((f"{name}.{title}.{isa}", weight.detach()))
    answer = graph.call_function(
        torch.ops.afd.vllm_experts.default, (rows, counts, *values, activation, isa)
    )
    graph.output(answer)
    w13, w2 = weights[:2]
    assert w13 is not None
    assert w2 is not None
    return FFNProgram(
        layer=layer,
        name=name,
        num_experts=w13.shape[0],
        hidden_size=w2.shape[1],
        dtype=w13.dtype,
        routed=Expression(graph, given),
        key=f"layer {layer}",
    )
