"""Kernels on the CPU for the operators of torch_npu that our graphs call, as strict as the NPU's.

They take what the graphs pass and refuse the rest: the layout ``TND_NTD``, a paged latent cache,
causal by request. Rows of the query that see no key get NaN, for who forgets to replace them.
"""

from __future__ import annotations

import itertools
import math

import torch


def scatter_nd_update_(
    into: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """``npu_scatter_nd_update_``; the NPU writes in any order, so equal places need equal rows."""
    places = tuple(indices.unbind(-1))
    assert all((p >= 0).all() and (p < n).all() for p, n in zip(places, into.shape, strict=False))
    into.index_put_(places, updates)
    assert torch.equal(into[places], updates), "two different rows for one place"
    return into


def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    atten_mask: torch.Tensor,
    actual_seq_lengths: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor,
    block_table: torch.Tensor,
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_fused_infer_attention_score`` of torchair, whose lengths are tensors."""
    assert (input_layout, sparse_mode, num_key_value_heads) == ("TND_NTD", 3, 1)
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.int8).triu(1))
    assert actual_seq_lengths.dtype == actual_seq_lengths_kv.dtype == torch.int64
    assert block_table.dtype == torch.int32
    assert (query.shape[1], key.shape[1], key.dim()) == (num_heads, block_size, 3)
    ends, lengths = actual_seq_lengths.tolist(), actual_seq_lengths_kv.tolist()
    assert len(ends) == len(lengths) == len(block_table)
    assert ends[-1] == len(query), "the last request must end where the query ends"
    out = query.new_full((num_heads, len(query), value.shape[-1]), math.nan)
    for i, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
        assert stop >= start
        blocks = block_table[i, : -(-lengths[i] // block_size)].long()
        keys, rotated, values = (
            part[blocks].flatten(0, 1)[: lengths[i]] for part in (key, key_rope, value)
        )
        scores = torch.einsum("qhd,kd->hqk", query[start:stop], keys)
        scores = scores + torch.einsum("qhd,kd->hqk", query_rope[start:stop], rotated)
        seen = torch.ones(stop - start, lengths[i], dtype=torch.bool)
        seen = seen.tril(lengths[i] - (stop - start))
        weights = (scores * scale).masked_fill(~seen, -math.inf).softmax(-1)
        found = weights @ values
        out[:, start:stop] = found.masked_fill(~seen.any(-1)[None, :, None], math.nan)
    return out, query.new_empty(0, dtype=torch.float32)


def install() -> None:
    """Register the kernels; torchair must be loaded."""
    import torchair.ops._npu_fused_infer_attention_score  # noqa: F401

    for name, kernel in (
        ("npu::npu_scatter_nd_update_", scatter_nd_update_),
        ("air::npu_fused_infer_attention_score", fused_infer_attention_score),
    ):
        library = torch.library.Library(name.split("::")[0], "FRAGMENT")
        library.impl(name, kernel, "CPU", allow_override=True)
        _libraries.append(library)


_libraries: list[torch.library.Library] = []
