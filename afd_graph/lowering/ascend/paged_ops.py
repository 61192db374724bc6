"""Attention over a paged latent cache as the NPU has it: scattered writes, one fused kernel.

``afd.paged_mla_attention`` becomes

    cache  = npu_scatter_nd_update_(cache, slots, rows)         in place, on the input itself
    latent = npu_fused_infer_attention_score(q @ key half of kv_b_proj, cache, block_table, ...)
    out    = latent @ value half of kv_b_proj

The kernel takes the lengths of the step as device tensors, so no number of the step is a constant
of the graph. What the kernels do not do for us:

* a write cannot be left out. A row without a slot repeats the write of the first row that has one,
  or, when none has, writes back what the cache holds: equal values, in any order;
* all rows must belong to a request. The padding rows are one more request, without a context;
  whatever comes out for them is replaced by zeros;
* the order of two calls on one cache: the writes are chained by their results, and the second
  waits for the attention of the first.

Between the products the rows have the dtype of the model, where the operator keeps fp32.
"""

from __future__ import annotations

import importlib
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from afd_graph import _compat
from afd_graph.errors import ConfigError, UnsupportedError
from afd_graph.lowering.ascend.emitter import Emitter
from afd_graph.paged_attention import PAGED_OPERATORS, earlier_call
from afd_graph.passes.shapes import propagate_shapes

aten = torch.ops.aten

_CAUSAL_BY_REQUEST = 3
"""Sparse mode: causal, aligned to the last query and the last key of every request."""

_MASK_SIZE = 2048
"""Side of the mask that the sparse modes of the kernel take, whatever the sizes are."""


def lower_paged_attention(graph: fx.Graph, route: str) -> int:
    """Rewrite ``graph`` in place; returns how many attentions were lowered.

    Args:
        graph: a scheduled attention program.
        route: one of :data:`afd_graph.lowering.ascend.streams.ROUTES`.

    Raises:
        ConfigError: torch_npu is not there.
        UnsupportedError: a cache that cannot be written in place, or a captured graph, whose
            kernel takes the lengths as numbers of the host.
    """
    calls = [node for node in graph.nodes if _is_paged(node)]
    if not calls:
        return 0
    if route != "ge":
        raise UnsupportedError(
            "a captured graph fixes the lengths of the requests",
            node=calls[0].name,
            remedy="compile paged attention with CompilerConfig().mode = 'max-autotune'",
        )
    if not hasattr(torch.ops.npu, "npu_scatter_nd_update_"):
        raise ConfigError(
            "paged attention needs npu_scatter_nd_update_, which torch_npu brings",
            remedy="install CANN and torch_npu, and import torch_npu first",
        )
    importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
    propagate_shapes(graph)
    writer = _Writer(graph)
    for call in calls:
        writer.rewrite(call)
    return len(calls)


def _is_paged(node: fx.Node) -> bool:
    if node.target is _compat.auto_functionalized and node.args[0] in PAGED_OPERATORS:
        raise UnsupportedError(
            "its KV cache cannot be written in place: something else reads or writes it",
            node=node.name,
            remedy="give every layer a cache of its own, which only its attention uses",
        )
    return node.op == "call_function" and node.target in PAGED_OPERATORS


@dataclass
class _Step:
    """What all layers of a stage share; nodes.

    Attributes:
        real: whether a row is that of a token, ``[T]``.
        source: row whose write each row makes, ``[T]``.
        slots: block and offset of that write, ``[T, 2]``.
        writes_any: whether any row has a slot, ``[1]``.
        query_ends: row behind each request, the padding rows being one more, ``[R + 1]``.
        lengths: tokens of each request, ``[R + 1]``.
        block_table: ``[R + 1, blocks]``.
    """

    real: fx.Node
    source: fx.Node
    slots: fx.Node
    writes_any: fx.Node
    query_ends: fx.Node
    lengths: fx.Node
    block_table: fx.Node


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.steps: dict[tuple[Any, ...], _Step] = {}
        self.written: dict[fx.Node, fx.Node] = {}
        self.mask: fx.Node | None = None

    def rewrite(self, node: fx.Node) -> None:
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        given: dict[str, Any] = dict(zip(names, node.args, strict=False))
        self._check(node, given)
        with self.graph.inserting_before(node):
            emit = Emitter(self.graph, node)
            step = self._step(emit, given)
            cache = self._write(emit, node, step, given)
            out = self._attention(emit, step, cache, given)
        node.replace_all_uses_with(out)
        out.meta["val"] = node.meta["val"]
        self.graph.erase_node(node)

    @staticmethod
    def _check(node: fx.Node, given: dict[str, Any]) -> None:
        cache, query = given["kv_cache"], given["query"].meta["val"]
        if cache.op != "placeholder":
            raise UnsupportedError(
                f"its KV cache is {cache.target}, a part of another tensor, which a graph copies",
                node=node.name,
                remedy="pass one cache tensor per layer",
            )
        if cache.meta["val"].dtype is not query.dtype:
            raise UnsupportedError(
                f"rows of {query.dtype} over a KV cache of {cache.meta['val'].dtype}",
                node=node.name,
                remedy="use caches of the dtype of the model",
            )

    def _step(self, emit: Emitter, given: dict[str, Any]) -> _Step:
        key = (
            *(given[n] for n in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")),
            str(given["query"].meta["val"].shape[0]),
            int(given["kv_cache"].meta["val"].shape[1]),
        )
        if key not in self.steps:
            self.steps[key] = self._new_step(emit, given)
        return self.steps[key]

    def _new_step(self, emit: Emitter, given: dict[str, Any]) -> _Step:
        starts = _cast(emit, given["query_start_loc"], torch.int64)
        lengths = _cast(emit, given["seq_lens"], torch.int64)
        rows = emit.size(given["query"], 0)
        numbers = emit(aten.arange.default, rows, device=given["query"].meta["val"].device)
        real = emit(aten.lt.Tensor, numbers, emit(aten.select.int, starts, 0, -1))
        slots = _cast(emit, self._slots(emit, given, numbers), torch.int64)
        writes = emit(aten.logical_and.default, real, emit(aten.ge.Scalar, slots, 0))
        counted = emit(aten._to_copy.default, writes, dtype=torch.int32)
        first = emit(aten.argmax.default, counted, 0, True)
        source = emit(aten.where.self, writes, numbers, first)
        slots = emit(aten.clamp_min.default, emit(aten.index_select.default, slots, 0, source), 0)
        block_size = int(given["kv_cache"].meta["val"].shape[1])
        places = [
            emit(aten.floor_divide.default, slots, block_size),
            emit(aten.remainder.Scalar, slots, block_size),
        ]
        end = emit(aten.full.default, [1], rows, dtype=torch.int64, device=_device(given))
        none = emit(aten.full.default, [1], 0, dtype=torch.int64, device=_device(given))
        table = _cast(emit, given["block_table"], torch.int32)
        unused = emit(aten.full_like.default, emit(aten.slice.Tensor, table, 0, 0, 1), 0)
        return _Step(
            real=real,
            source=source,
            slots=emit(aten.stack.default, places, 1),
            writes_any=emit(aten.any.dim, writes, 0, True),
            query_ends=emit(
                aten.cat.default, [emit(aten.slice.Tensor, starts, 0, 1, 2**63 - 1), end]
            ),
            lengths=emit(aten.cat.default, [lengths, none]),
            block_table=emit(aten.cat.default, [table, unused]),
        )

    @staticmethod
    def _slots(emit: Emitter, given: dict[str, Any], numbers: fx.Node) -> fx.Node:
        """One slot for each row; rows behind the end of the mapping are padding."""
        slots = given["slot_mapping"]
        length, rows = slots.meta["val"].shape[0], given["query"].meta["val"].shape[0]
        if _compat.statically_true(length == rows):
            return slots
        last = emit.size(slots, 0)
        last = last - 1 if isinstance(last, int) else emit(operator.sub, last, 1)
        end = emit(aten.full.default, [1], last, dtype=torch.int64, device=_device(given))
        return emit(aten.index_select.default, slots, 0, emit(aten.minimum.default, numbers, end))

    def _write(self, emit: Emitter, node: fx.Node, step: _Step, given: dict[str, Any]) -> fx.Node:
        cache = given["kv_cache"]
        rows = emit(aten.cat.default, [given["kv_c_normed"], given["k_pe"]], 1)
        rows = emit(aten.index_select.default, rows, 0, step.source)
        held = self.written.get(cache, cache)
        old = emit(aten.select.int, emit(aten.select.int, held, 0, 0), 0, 0)
        rows = emit(aten.where.self, step.writes_any, rows, old)
        before = earlier_call(node)
        if before is not None:
            emit(torch.ops.air.wait.default, [before])
        written = emit(torch.ops.npu.npu_scatter_nd_update_.default, held, step.slots, rows)
        self.written[cache] = written
        return written

    def _attention(
        self, emit: Emitter, step: _Step, cache: fx.Node, given: dict[str, Any]
    ) -> fx.Node:
        query, weight = given["query"], given["kv_b_proj"]
        heads, width = (int(query.meta["val"].shape[d]) for d in (1, 2))
        rank = int(given["kv_c_normed"].meta["val"].shape[1])
        nope = width - int(given["k_pe"].meta["val"].shape[1])
        halves = int(weight.meta["val"].shape[0]) // heads
        weight = emit(aten.reshape.default, weight, [heads, halves, rank])
        keys = emit(aten.slice.Tensor, weight, 1, 0, nope)
        values = emit(aten.slice.Tensor, weight, 1, nope, halves)
        absorbed = emit(aten.slice.Tensor, query, 2, 0, nope)
        absorbed = emit(aten.bmm.default, emit(aten.transpose.int, absorbed, 0, 1), keys)
        latents = emit(aten.slice.Tensor, cache, 2, 0, rank)
        fused = emit(
            torch.ops.air.npu_fused_infer_attention_score.default,
            emit(aten.transpose.int, absorbed, 0, 1),
            latents,
            latents,
            query_rope=emit(aten.slice.Tensor, query, 2, nope, width),
            key_rope=emit(aten.slice.Tensor, cache, 2, rank, rank + width - nope),
            atten_mask=self._mask(emit, given),
            actual_seq_lengths=step.query_ends,
            actual_seq_lengths_kv=step.lengths,
            block_table=step.block_table,
            num_heads=heads,
            num_key_value_heads=1,
            scale=float(given["scale"]),
            input_layout="TND_NTD",
            sparse_mode=_CAUSAL_BY_REQUEST,
            block_size=int(given["kv_cache"].meta["val"].shape[1]),
        )
        latent = emit(operator.getitem, fused, 0)
        out = emit(aten.bmm.default, latent, emit(aten.transpose.int, values, 1, 2))
        out = emit(aten.transpose.int, out, 0, 1)
        real = emit(aten.unsqueeze.default, emit(aten.unsqueeze.default, step.real, 1), 2)
        return emit(aten.masked_fill.Scalar, out, emit(aten.logical_not.default, real), 0)

    def _mask(self, emit: Emitter, given: dict[str, Any]) -> fx.Node:
        if self.mask is None:
            shape = [_MASK_SIZE, _MASK_SIZE]
            ones = emit(aten.full.default, shape, 1, dtype=torch.int8, device=_device(given))
            self.mask = emit(aten.triu.default, ones, 1)
        return self.mask


def _device(given: dict[str, Any]) -> torch.device:
    return given["query"].meta["val"].device


def _cast(emit: Emitter, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype is dtype:
        return value
    return emit(aten._to_copy.default, value, dtype=dtype)
