"""Runs the expert programs on work items; the same on a thread, in a process, on another machine.

1. :meth:`FFNExecutor.add` compiles each expression of a program once into a Python callable; an
   operator of :data:`WRITES_OUT` at its end writes to memory that the caller chooses.
2. :meth:`FFNExecutor.run` checks the item against its program, answers empty inputs without a
   launch, and runs the rest without autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from afd_graph.connectors.base import WorkItem
from afd_graph.connectors.refusals import is_known, misfit, wrong_item
from afd_graph.errors import ConnectorError
from afd_graph.exact_ops import EXACT  # Registers all operators that the programs call.
from afd_graph.ffn.grouped_mm import grouped_mm_into
from afd_graph.ffn.program import Expression, FFNProgram

WRITES_OUT: dict[object, Callable[..., torch.Tensor]] = {
    torch.ops.afd.grouped_mm.default: grouped_mm_into
}
"""Operators whose answer can go right into given memory -> what computes it there and returns it:
called with the operator's arguments and that memory."""


@dataclass(frozen=True)
class _Compiled:
    """An expression with its weights bound.

    Attributes:
        forward: called with the inputs and the weights, after ``out`` if that is written.
        weights: trailing arguments.
        writes_out: whether ``forward`` writes its answer to its first argument.
    """

    forward: Callable[..., torch.Tensor]
    weights: tuple[torch.Tensor, ...]
    writes_out: bool

    def __call__(self, out: torch.Tensor | None, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the answer, shaped like the first input; it is ``out`` where that is given."""
        expected = inputs[0]
        if self.writes_out:
            if out is None:
                out = torch.empty_like(expected, memory_format=torch.contiguous_format)
            return self.forward(out, *inputs, *self.weights)
        answer = self.forward(*inputs, *self.weights)
        if answer.shape != expected.shape or answer.dtype != expected.dtype:
            raise ValueError(
                f"they answered {tuple(answer.shape)} {answer.dtype} for "
                f"{tuple(expected.shape)} {expected.dtype}"
            )
        return answer if out is None else out.copy_(answer)


class FFNExecutor:
    """The experts of every layer that was added, and what runs them.

    Weights are held by reference. One caller at a time: the executor keeps no lock.
    """

    def __init__(self) -> None:
        self._programs: dict[int, FFNProgram] = {}
        self._routed: dict[int, _Compiled] = {}
        self._shared: dict[int, _Compiled] = {}

    def add(self, program: FFNProgram) -> bool:
        """Take the experts of one layer; return whether they were new.

        A program of equal ``layer`` and ``key`` is known already and left out.

        Raises:
            ConnectorError: the layer has other experts, or a graph does not fit its weights.
            ExactError: the experts are exact ones, and a kernel here cannot hold it.
        """
        if is_known(program, self._programs.get(program.layer)):
            return False
        self._routed[program.layer] = _compile(program, program.routed, inputs=2)
        if program.shared is not None:
            self._shared[program.layer] = _compile(program, program.shared, inputs=1)
        if any(node.target in EXACT.values() for node in program.routed.graph.nodes):
            self._try_kernels(program)
        self._programs[program.layer] = program
        return True

    def _try_kernels(self, program: FFNProgram) -> None:
        """Let the exact operators find their safe counts before the first step."""
        rows = torch.zeros(program.num_experts, program.hidden_size, dtype=program.dtype)
        counts = torch.ones(program.num_experts, dtype=torch.int64)
        with torch.no_grad():
            self._routed[program.layer](None, rows, counts)
            if program.shared is not None:
                self._shared[program.layer](None, rows[:1])

    def run(
        self,
        item: WorkItem,
        out: torch.Tensor | None = None,
        shared_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``item``; returns ``(rows [m, hidden], shared rows [n, hidden] or None)``.

        Args:
            item: rows grouped by expert, with their counts.
            out: ``[m, hidden]`` memory for the routed answer, which is then ``out`` itself.
            shared_out: ``[n, hidden]`` memory for the shared answer, likewise.

        Raises:
            ConnectorError: the item does not fit the layer's program, or the experts failed;
                carries layer and stage.
        """
        program = self._checked(item)
        try:
            with torch.no_grad():
                rows = item.rows
                if rows.shape[0]:
                    counts = torch.tensor(item.counts, dtype=torch.int64, device=rows.device)
                    rows = self._routed[item.layer](out, rows, counts)
                shared = item.shared_rows
                if shared is not None and shared.shape[0]:
                    shared = self._shared[item.layer](shared_out, shared)
        except Exception as error:
            raise ConnectorError(
                f"the experts of {program.name or 'the layer'} failed: "
                f"{type(error).__name__}: {error}",
                layer=item.layer,
                stage=item.stage,
            ) from error
        return rows, shared

    def _checked(self, item: WorkItem) -> FFNProgram:
        problem = misfit(item, self._programs)
        if problem is not None:
            raise wrong_item(item, problem)
        program = self._programs[item.layer]
        if sum(item.counts) != item.rows.shape[0] or min(item.counts, default=0) < 0:
            problem = f"counts sum to {sum(item.counts)} for {item.rows.shape[0]} rows"
        elif item.shared_rows is not None and program.shared is None:
            problem = "shared rows for a layer whose shared experts are not on this side"
        if problem is not None:
            raise wrong_item(item, problem)
        return program


def _compile(program: FFNProgram, expression: Expression, inputs: int) -> _Compiled:
    placeholders = expression.graph.find_nodes(op="placeholder")
    if len(placeholders) != inputs + len(expression.weights):
        raise ConnectorError(
            f"an expert program has {len(placeholders)} placeholders for {inputs} inputs and "
            f"{len(expression.weights)} weights",
            layer=program.layer,
            remedy="this is a defect of the pass that carves out the experts; please report it",
        )
    graph = fx.Graph()
    out = graph.placeholder("out")
    answer = graph.graph_copy(expression.graph, val_map={})
    writes_out = isinstance(answer, fx.Node) and answer.target in WRITES_OUT
    if writes_out:
        assert isinstance(answer, fx.Node)
        answer = graph.call_function(WRITES_OUT[answer.target], (*answer.args, out))
    else:
        graph.erase_node(out)
    graph.output(answer)
    graph.eliminate_dead_code()
    module = fx.GraphModule(torch.nn.Module(), graph)
    weights = tuple(weight for _, weight in expression.weights)
    return _Compiled(module.forward, weights, writes_out)
