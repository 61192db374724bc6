"""Copy everything that depends on the tokens once per stage.

vLLM batches requests of any kind in one step, so it demands of its models what a split needs: but
for attention, a token's result does not depend on which other tokens are in the batch. Attention
gets its tokens from metadata. So the graph is cut at its inputs, and no value inside has to be
traced: each stage runs the whole model on its rows, with buffers of its own, which is also what
in-place writes need.

Before: the unsplit graph, whose token axis is one symbol. After: a new graph with two more inputs,

    afd_first       tokens A of stage 0
    afd_second      tokens B of stage 1; rows [A + B, P) of the inputs are padding

1. inputs with a token axis are sliced: ``[0, A)`` and ``[A, A + B)``; inputs that *are* the number
   of tokens become that of the stage. Each stage has an input of its own, so that every size in
   it is a multiple of one symbol, for whoever compiles the graph in pieces;
2. what depends on them is copied per stage (``meta["afd_stage"]``), the rest once;
3. cache updates and attention become their forms with a stage argument (:mod:`stage_ops`);
4. outputs are put together again, with zeros in the rows ``[A + B, P)``.

A size that is not a multiple of the number of tokens, or more than one symbol, is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from afd_graph.errors import UnsupportedError
from afd_graph.passes.graph_tools import source_line
from afd_graph.passes.token_flow import DISPATCH, RECEIVE
from afd_graph.vllm.operators import (
    STAGED,
    arguments,
    layer_name,
    operator_name,
    overload,
    reads_context,
)
from afd_graph.vllm.stage_ops import stage_op

_library = torch.library.Library("afd", "FRAGMENT")
_library.define("join_stages(Tensor first, Tensor second, int dim, SymInt rows) -> Tensor")

LENGTHS = ("afd_first", "afd_second")
_STAGES = (0, 1)


def split_stages(graph: fx.Graph) -> fx.Graph:
    """Return the two-stage graph of ``graph``: all of stage 0, then all of stage 1.

    Raises:
        UnsupportedError: the graph has no single token axis; says where.
    """
    return _Splitter(graph).run()


class _Splitter:
    def __init__(self, graph: fx.Graph) -> None:
        self.old = graph
        self.new = fx.Graph()
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.symbol = _token_symbol(self.inputs)
        self.whole: dict[fx.Node, fx.Node] = {}
        self.parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self.staged: set[fx.Node] = set()
        self.rows: fx.Node | None = None

    def run(self) -> fx.Graph:
        for node in self.inputs:
            self.whole[node] = self.new.node_copy(node)
        first, second = (self.new.placeholder(name) for name in LENGTHS)
        for length in (first, second):
            length.meta["example_value"] = 1
        self.starts, self.lengths = (0, first), (first, second)
        for node in self.inputs:
            self._slice_input(node)
        for node in self.old.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if any(source in self.staged for source in node.all_input_nodes):
                self.staged.add(node)
                _check_sizes(node, self.symbol)
            else:
                self.whole[node] = self.new.node_copy(node, self.whole.__getitem__)
        copied = [n for n in self.old.nodes if n.op not in ("placeholder", "output")]
        for stage in _STAGES:
            for node in copied:
                if node in self.staged:
                    self._copy(node, stage)
        self._output(next(node for node in self.old.nodes if node.op == "output"))
        return self.new

    def _slice_input(self, node: fx.Node) -> None:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            self.staged.add(node)
            for stage in _STAGES:
                self.parts[node, stage] = self.lengths[stage]
            return
        dim = self._token_dim(node)
        if dim is None:
            return
        self.staged.add(node)
        for stage in _STAGES:
            part = self.new.call_function(
                torch.narrow, (self.whole[node], dim, self.starts[stage], self.lengths[stage])
            )
            part.meta["afd_stage"] = stage
            self.parts[node, stage] = part

    def _token_dim(self, node: fx.Node) -> int | None:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            return None
        dims = [
            dim
            for dim, size in enumerate(value.shape)
            if isinstance(size, torch.SymInt) and size.node.expr == self.symbol
        ]
        _check_sizes(node, self.symbol)
        return dims[0] if dims else None

    def _copy(self, node: fx.Node, stage: int) -> None:
        def mine(source: fx.Node) -> fx.Node:
            found = self.parts.get((source, stage))
            return self.whole[source] if found is None else found

        if reads_context(node):
            raise _refused(f"{operator_name(node)} may depend on the step's other tokens", node)
        if operator_name(node) in STAGED:
            new = self._staged_call(node, stage, mine)
        else:
            new = self.new.node_copy(node, mine)
        if node.target in (DISPATCH, RECEIVE):
            new.args = (*new.args[:-2], stage, new.args[-1])
        new.meta["afd_stage"] = stage
        self.parts[node, stage] = new

    def _staged_call(self, node: fx.Node, stage: int, mine: Any) -> fx.Node:
        original = overload(node)
        given = arguments(node)
        name = layer_name(given["layer_name"], node)
        values = [
            name if argument.name == "layer_name" else fx.map_arg(given[argument.name], mine)
            for argument in original._schema.arguments
        ]
        new = self.new.call_function(stage_op(original), (stage, *values))
        new.meta = dict(node.meta)
        return new

    def _output(self, node: fx.Node) -> None:
        def joined(source: fx.Node) -> fx.Node:
            if source not in self.staged:
                return self.whole[source]
            dim = self._token_dim(source)
            if dim is None:
                raise _refused("an output depends on the tokens and has no token axis", source)
            pieces = [self.parts[source, stage] for stage in _STAGES]
            return self.new.call_function(
                torch.ops.afd.join_stages.default, (*pieces, dim, self._rows())
            )

        self.new.output(fx.map_arg(node.args[0], joined))

    def _rows(self) -> fx.Node:
        """Rows that the caller expects, padding included."""
        if self.rows is None:
            for node in self.inputs:
                dim = self._token_dim(node)
                if dim is not None:
                    self.rows = self.new.call_method("size", (self.whole[node], dim))
                    break
        assert self.rows is not None
        return self.rows


def _token_symbol(inputs: list[fx.Node]) -> Any:
    """The symbol of the token axis, which must be the only free one."""
    symbols: dict[Any, fx.Node] = {}
    for node in inputs:
        value = node.meta.get("example_value")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                for symbol in size.node.expr.free_symbols:
                    symbols.setdefault(symbol, node)
    if not symbols:
        raise UnsupportedError(
            "the graph has no dynamic number of tokens",
            remedy="leave the model's dynamic dimensions as vLLM marks them",
        )
    if len(symbols) > 1:
        names = ", ".join(f"{symbol} of {node.name}" for symbol, node in symbols.items())
        raise UnsupportedError(
            f"the graph has more than one dynamic size: {names}",
            remedy="only the number of tokens may be dynamic",
        )
    return next(iter(symbols))


def _check_sizes(node: fx.Node, symbol: Any) -> None:
    """Refuse a size that is not a whole multiple of the number of tokens."""
    value = node.meta.get("example_value")
    for part in value if isinstance(value, (tuple, list)) else (value,):
        for size in part.shape if isinstance(part, torch.Tensor) else (part,):
            if isinstance(size, torch.SymInt):
                each = size.node.expr / symbol
                if size.node.expr.free_symbols and not each.is_Integer:
                    raise _refused(f"size {size} is no multiple of the tokens", node)


def _refused(what: str, node: fx.Node) -> UnsupportedError:
    return UnsupportedError(
        what,
        node=node.name,
        source=source_line(node),
        remedy="report the model; on_unsupported='fallback' runs it unsplit",
    )


def _join_stages(first: torch.Tensor, second: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """Both stages behind each other along ``dim``, with zeros up to ``rows``."""
    padding = rows - first.shape[dim] - second.shape[dim]
    if padding == 0:
        return torch.cat((first, second), dim)
    shape = list(first.shape)
    shape[dim] = padding
    return torch.cat((first, second, first.new_zeros(shape)), dim)


def _join_stages_fake(
    first: torch.Tensor, second: torch.Tensor, dim: int, rows: int
) -> torch.Tensor:
    shape = list(first.shape)
    shape[dim] = rows
    return first.new_empty(shape)


_library.impl("join_stages", _join_stages, "CompositeExplicitAutograd")
torch.library.register_fake("afd::join_stages", _join_stages_fake, lib=_library)
