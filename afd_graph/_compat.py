"""Everything private of PyTorch that this package relies on, and nothing else.

Tested against the PyTorch version that ``pyproject.toml`` pins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload as OpOverload


def has_fast_mm(dtype: torch.dtype) -> bool:
    """Whether ``mm`` on this CPU has a kernel of its own for ``dtype``."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def aot_compile(
    gm: fx.GraphModule, example_inputs: list[Any], compiler: Callable[..., Any]
) -> Callable[..., Any]:
    """Run AOTAutograd for inference and hand the functional ATen graph to ``compiler``.

    Input mutations (static caches) stay in the graph as ``copy_`` nodes.
    """
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        keep_inference_input_mutations=True,
    )(gm, example_inputs)


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes its inputs as one list."""

    def call(inputs: list[Any]) -> Any:
        return function(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def input_source(node: fx.Node) -> str | None:
    """Where Dynamo took a graph input from, such as ``L['self']._modules['model']...``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


def real_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors are computed with, even while AOTAutograd traces with fakes."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake tensor mode of the graph's metadata."""
    from torch._dynamo.utils import detect_fake_mode

    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    return detect_fake_mode([v for v in values if v is not None])


def new_size_symbol(graph: fx.Graph, name: str, hint: int) -> torch.SymInt:
    """A fresh symbolic size that takes the value of an extra graph input."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    mode = fake_mode_of(graph)
    env = mode.shape_env if mode is not None and mode.shape_env is not None else ShapeEnv()
    source = ConstantSource(f"{name}_{len(env.source_to_var)}")
    symbol = env.create_symbol(
        hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    return env.create_symintnode(symbol, hint=hint, source=source)


def trace_graph(name: str, gm: fx.GraphModule) -> None:
    """Write a graph to ``TORCH_TRACE`` (tlparse) when that is on."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "graph_dump",
        metadata_fn=lambda: {"name": name},
        payload_fn=lambda: gm.print_readable(
            print_output=False, include_stride=True, include_device=True
        ),
    )


def backend_of(compiled: Any) -> Any:
    """The backend that ``torch.compile`` was given, from what it returned; None if unknown."""
    context = getattr(compiled, "dynamo_ctx", None)
    current = getattr(context, "callback", None)
    while current is not None:
        inner = getattr(current, "_torchdynamo_orig_backend", None) or getattr(
            current, "compiler_fn", None
        )
        if inner is None:
            return current
        current = inner
    return None


def inductor_compile(gm: fx.GraphModule, inputs: list[Any], mode: Any) -> Callable[..., Any]:
    """Decompose ``gm`` for Inductor and compile it; ``inputs`` are fake, the result is boxed."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, torch.no_grad():
        traced = make_fx(gm, decomposition_table=select_decomp_table(), tracing_mode="real")(
            *inputs
        )
    # AOTAutograd's own context takes the strides of one graph; we compile two variants of it.
    with tracing(TracingContext(mode)):
        return compile_fx_inner(traced, inputs)
