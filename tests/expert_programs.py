"""Small expert programs, and the dense loop that they must equal."""

from __future__ import annotations

from collections.abc import Callable

import expert_ops  # noqa: F401  (registers afdtest)
import torch
from torch import fx

import afd_graph.ops  # noqa: F401  (registers afd)
from afd_graph.ffn.program import Expression, FFNProgram

aten = torch.ops.aten
grouped_mm = torch.ops.afd.grouped_mm.default


def swiglu_program(
    layer: int = 0,
    *,
    experts: int = 4,
    hidden: int = 16,
    inner: int = 24,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    shared: bool = False,
    seed: int = 0,
) -> FFNProgram:
    """Gate and up in one product, silu, down; weights as parameters, ``[e, n, k]`` if asked."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.nn.Parameter:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5
        if transposed and len(shape) == 3:
            values = values.transpose(1, 2).contiguous()
        return torch.nn.Parameter(values.to(dtype))

    up, down = weight(experts, hidden, 2 * inner), weight(experts, inner, hidden)
    graph = fx.Graph()
    rows, counts = graph.placeholder("rows"), graph.placeholder("counts")
    matrices = [graph.placeholder("up"), graph.placeholder("down")]
    if transposed:
        matrices = [graph.call_function(aten.transpose.int, (w, 1, 2)) for w in matrices]
    both = graph.call_function(grouped_mm, (rows, matrices[0], counts))
    graph.output(
        graph.call_function(grouped_mm, (_swiglu(graph, both, inner), matrices[1], counts))
    )
    routed = Expression(graph, [("experts.up", up), ("experts.down", down)])
    return FFNProgram(
        layer,
        f"layers.{layer}.mlp",
        experts,
        hidden,
        dtype,
        routed,
        _shared_swiglu(weight(hidden, 2 * inner), weight(inner, hidden)) if shared else None,
        key=f"layer{layer}",
    )


def one_op_program(
    build: Callable[[fx.Graph, fx.Node], fx.Node | None],
    layer: int = 0,
    *,
    experts: int = 4,
    hidden: int = 16,
    dtype: torch.dtype = torch.float32,
) -> FFNProgram:
    """Experts that do to their rows what ``build`` says; None answers the rows themselves."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    graph.placeholder("counts")
    graph.output(build(graph, rows) or rows)
    name = f"layers.{layer}.mlp"
    return FFNProgram(
        layer, name, experts, hidden, dtype, Expression(graph, ()), key=f"layer{layer}"
    )


def echo_program(layer: int = 0, **sizes: int) -> FFNProgram:
    return one_op_program(lambda graph, rows: None, layer, **sizes)


def pause_program(seconds: float, layer: int = 0) -> FFNProgram:
    pause = torch.ops.afdtest.pause.default
    return one_op_program(lambda graph, rows: graph.call_function(pause, (rows, seconds)), layer)


def failing_program(layer: int = 0) -> FFNProgram:
    fail = torch.ops.afdtest.fail.default
    return one_op_program(lambda graph, rows: graph.call_function(fail, (rows,)), layer)


def threads_program(layer: int = 0) -> FFNProgram:
    """Experts that answer the number of intra-op threads that they may use."""
    threads = torch.ops.afdtest.threads.default
    return one_op_program(lambda graph, rows: graph.call_function(threads, (rows,)), layer)


def dense_experts(program: FFNProgram, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The routed experts of :func:`swiglu_program`, one expert after the other, in fp64."""
    up, down = (w.detach().double() for _, w in program.routed.weights)
    if up.shape[1] != program.hidden_size:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    parts = rows.double().split(counts)
    return torch.cat([_dense_swiglu(p, up[e], down[e]) for e, p in enumerate(parts)])


def dense_shared(program: FFNProgram, rows: torch.Tensor) -> torch.Tensor:
    assert program.shared is not None
    return _dense_swiglu(rows.double(), *(w.detach().double() for _, w in program.shared.weights))


def dense_layer(
    program: FFNProgram, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The whole MoE layer, token by token, in fp64."""
    answer = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in range(program.num_experts):
        counts = [0] * program.num_experts
        counts[expert] = hidden.shape[0]
        share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
        answer += share * dense_experts(program, hidden, counts)
    if program.shared is not None:
        answer += dense_shared(program, hidden)
    return answer


def _swiglu(graph: fx.Graph, both: fx.Node, inner: int) -> fx.Node:
    gate = graph.call_function(aten.slice.Tensor, (both, 1, 0, inner))
    up = graph.call_function(aten.slice.Tensor, (both, 1, inner, 2 * inner))
    return graph.call_function(
        aten.mul.Tensor, (graph.call_function(aten.silu.default, (gate,)), up)
    )


def _shared_swiglu(up: torch.Tensor, down: torch.Tensor) -> Expression:
    graph = fx.Graph()
    rows, up_node, down_node = (graph.placeholder(name) for name in ("rows", "up", "down"))
    both = graph.call_function(aten.mm.default, (rows, up_node))
    activated = _swiglu(graph, both, down.shape[0])
    graph.output(graph.call_function(aten.mm.default, (activated, down_node)))
    return Expression(graph, [("shared.up", up), ("shared.down", down)])


def _dense_swiglu(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, value = (rows @ up).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * value) @ down
