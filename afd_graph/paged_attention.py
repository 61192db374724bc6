"""Attention over a paged latent KV cache, as one operator: the form that serving uses.

All requests of a step lie behind each other on one token axis. ``afd::paged_mla_attention`` writes
the step's rows to the cache, then every token attends causally to its request's context through
the block table. What it knows of the step comes in as tensors, never from a global: so a stage of
a step is the same operator with the stage's rows and the stage's metadata
(:class:`afd_graph.metadata.AttentionMetadata`).

The cache is mutated. ``after`` takes the result of the call that must have written the cache
before; the kernel does not read it. It puts the order of two calls on one cache into the data
flow, where no compiler can lose it.

1. write ``[kv_c_normed, k_pe]`` of every real token to its slot; a negative slot writes nothing;
2. per request, gather its cached rows, score the absorbed queries against them, mask what lies
   behind each query, and bring the mixed latents out through the value half of ``kv_b_proj``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import fx

_library = torch.library.Library("afd", "FRAGMENT")
_library.define(
    "paged_mla_attention(Tensor query, Tensor kv_c_normed, Tensor k_pe, Tensor(a!) kv_cache, "
    "Tensor kv_b_proj, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
    "Tensor slot_mapping, float scale, Tensor? after=None) -> Tensor"
)


def _paged_mla_attention(
    query: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_b_proj: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the step's rows to the cache and attend to each request's context.

    With ``T`` rows, ``N <= T`` of them real, ``h`` heads and ``R`` requests:

    Args:
        query: ``[T, h, nope + rope]``.
        kv_c_normed: ``[T, rank]``, the latent of each token.
        k_pe: ``[T, rope]``, its rotated key part.
        kv_cache: ``[num_blocks, block_size, rank + rope]``, written.
        kv_b_proj: ``[h * (nope + v), rank]``, keys and values out of the latent.
        query_start_loc: integer ``[R + 1]``; its last entry is ``N``.
        seq_lens: integer ``[R]``, tokens of each request, this step's included.
        block_table: integer ``[R, max_blocks]``.
        slot_mapping: integer, at least ``N``; ``block * block_size + offset``, or -1.
        scale: of the scores.
        after: what must have been computed before; not read.

    Returns:
        ``[T, h, v]`` in the dtype of ``query``, computed in fp32 (fp64 for fp64); zero in the
        rows ``[N, T)``.

    Raises:
        RuntimeError: metadata that does not fit the rows or the cache.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    tokens, heads = starts[-1], query.shape[1]
    torch._check(
        len(starts) == len(lengths) + 1 == len(block_table) + 1,
        lambda: f"{len(starts)} starts, {len(lengths)} lengths, {len(block_table)} block rows",
    )
    torch._check(
        tokens <= min(len(query), len(slot_mapping)),
        lambda: f"{tokens} tokens, {len(query)} rows, {len(slot_mapping)} slots",
    )
    _write(kv_cache, kv_c_normed[:tokens], k_pe[:tokens], slot_mapping[:tokens])

    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rank, rope = kv_c_normed.shape[1], k_pe.shape[1]
    nope = query.shape[2] - rope
    keys, values = (
        kv_b_proj.to(wide)
        .view(heads, -1, rank)
        .split_with_sizes([nope, kv_b_proj.shape[0] // heads - nope], 1)
    )
    out = query.new_zeros(query.shape[0], heads, values.shape[1])
    block_size = kv_cache.shape[1]
    for request, ((start, stop), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        if start == stop:
            continue
        blocks = -(-length // block_size)
        torch._check(
            length >= stop - start and blocks <= block_table.shape[1],
            lambda start=start, stop=stop, length=length: (
                f"{stop - start} new tokens of a request of {length}, in "
                f"{block_table.shape[1]} blocks of {block_size}"
            ),
        )
        cached = kv_cache[block_table[request, :blocks].long()].flatten(0, 1)[:length].to(wide)
        latent, rotated = cached.split_with_sizes([rank, rope], 1)
        rows = query[start:stop].to(wide)
        absorbed = torch.einsum("qhn,hnr->hqr", rows[..., :nope], keys)
        scores = absorbed @ latent.T + rows[..., nope:].transpose(0, 1) @ rotated.T
        seen = torch.ones(stop - start, length, dtype=torch.bool, device=query.device)
        seen = seen.tril(length - (stop - start))
        weights = (scores * scale).masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hqr,hvr->qhv", weights @ latent, values).to(query.dtype)
    return out


def _write(
    kv_cache: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor
) -> None:
    real = slots >= 0
    slots = slots[real].long()
    rows = torch.cat([kv_c_normed, k_pe], 1)[real].to(kv_cache.dtype)
    block_size = kv_cache.shape[1]
    # Indexed by block and offset, so that a cache that is a strided view is written in place.
    kv_cache[slots // block_size, slots % block_size] = rows


def _paged_mla_attention_fake(
    query: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_b_proj: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    torch._check(query.dim() == 3, lambda: "query must be [tokens, heads, nope + rope]")
    torch._check(
        kv_c_normed.dim() == k_pe.dim() == 2, lambda: "latents must be [tokens, rank], [., rope]"
    )
    torch._check(
        kv_cache.dim() == 3 and kv_cache.shape[2] == kv_c_normed.shape[1] + k_pe.shape[1],
        lambda: "the cache must be [blocks, block_size, rank + rope]",
    )
    for rows in (kv_c_normed, k_pe):
        torch._check(rows.shape[0] == query.shape[0], lambda: "one latent per query row")
    heads = query.shape[1]
    nope = query.shape[2] - k_pe.shape[1]
    return query.new_empty(query.shape[0], heads, kv_b_proj.shape[0] // heads - nope)


_library.impl("paged_mla_attention", _paged_mla_attention, "CompositeExplicitAutograd")
torch.library.register_fake("afd::paged_mla_attention", _paged_mla_attention_fake, lib=_library)

STAGE_EXTENTS: Mapping[str, str] = MappingProxyType(
    {
        "query_start_loc": "starts",
        "seq_lens": "requests",
        "block_table": "requests",
        "slot_mapping": "tokens",
    }
)
"""What the first dimension of a metadata tensor counts: ``starts`` is one more than requests."""


@dataclass(frozen=True)
class PagedOperator:
    """Which argument of a paged attention operator means what; positions in its schema.

    Attributes:
        tokens: arguments with one row per token; the query first.
        cache: the mutated KV cache.
        metadata: argument to field of :class:`afd_graph.metadata.AttentionMetadata`.
        after: the argument that orders two calls on one cache.
    """

    tokens: tuple[int, ...]
    cache: int
    metadata: Mapping[int, str]
    after: int


PAGED_OPERATORS: Mapping[object, PagedOperator] = MappingProxyType(
    {
        torch.ops.afd.paged_mla_attention.default: PagedOperator(
            tokens=(0, 1, 2),
            cache=3,
            metadata=MappingProxyType(
                {5: "query_start_loc", 6: "seq_lens", 7: "block_table", 8: "slot_mapping"}
            ),
            after=10,
        )
    }
)
"""The operators that the passes split as paged attention."""


def paged_operator(node: fx.Node) -> PagedOperator | None:
    """The description of a paged attention node, or None for any other node."""
    return PAGED_OPERATORS.get(node.target) if node.op == "call_function" else None


def earlier_call(node: fx.Node) -> fx.Node | None:
    """The call that ``node``, a paged attention, says it comes after."""
    operator = PAGED_OPERATORS[node.target]
    found = node.args[operator.after] if len(node.args) > operator.after else None
    return found if isinstance(found, fx.Node) else None
