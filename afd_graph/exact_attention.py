"""Attention that gives a query the same bits in a stage and in the whole step.

What could differ between the two, and how it is held:

* *the keys*: a stage does not have the keys of later ones yet. They are masked for its queries and
  would add exact zeros, but sums over another number of keys are rounded in another order; so their
  place is kept by zero rows, and both variants work on the same number of keys;
* *the number of queries*: blocks of safe size (:mod:`afd_graph.exact`), as for every other kernel;
* *the kernel*: a causal flag skips keys, a mask does not, and a value width of its own takes
  another kernel; there is always a mask here, and the widths are made equal with zero columns;
* *memory*: keys and values are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from afd_graph.exact import SafeCounts, ordinary, safe_counts

_library = torch.library.Library("afd", "FRAGMENT")
_library.define(
    "exact_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
    "float? scale, bool enable_gqa, SymInt later_keys) -> Tensor"
)

# The fused kernel takes 32 queries at a time, and 512 keys.
_QUERIES = tuple(range(1, 33))
_KEYS = (*range(1, 41), 63, 64, 65, 100, 127, 128, 129, 255, 300, 511, 512, 513, 640, 1025)

_known: dict[object, SafeCounts] = {}


def _exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    later_keys: int,
) -> torch.Tensor:
    """``afd::attention`` with ``later_keys`` further keys that none of the queries sees."""
    batch, heads, queries, width = query.shape
    value_width, visible = value.shape[-1], key.shape[-2]
    scale = width**-0.5 if scale is None else scale
    size = max(width, value_width)
    key = F.pad(key, (0, size - width, 0, later_keys)).contiguous()
    value = F.pad(value, (0, size - value_width, 0, later_keys)).contiguous()
    mask = _full_mask(mask, causal, queries, visible, later_keys, query.device)
    query = F.pad(query, (0, size - width))
    safe = _safe(heads, key.shape[1], size, query.dtype)
    out = query.new_empty(batch, queries, heads, value_width).transpose(1, 2)
    for start in range(0, queries, safe.largest):
        count = min(safe.largest, queries - start)
        padded = safe.padded(count)
        block = F.pad(query.narrow(2, start, count), (0, 0, 0, padded - count)).contiguous()
        rows = F.pad(mask.narrow(2, start, count), (0, 0, 0, padded - count)).contiguous()
        answer = F.scaled_dot_product_attention(
            block, key, value, rows, scale=scale, enable_gqa=enable_gqa
        )
        out.narrow(2, start, count).copy_(answer[:, :, :count, :value_width])
    return out


def _full_mask(
    mask: torch.Tensor | None,
    causal: bool,
    queries: int,
    visible: int,
    later_keys: int,
    device: torch.device,
) -> torch.Tensor:
    """The mask ``[..., queries, keys]`` of all keys, the later ones masked."""
    if mask is None:
        mask = torch.ones(queries, visible, dtype=torch.bool, device=device)
        mask = (mask.tril(visible - queries) if causal else mask)[None, None]
    mask = mask.expand(*mask.shape[:-2], queries, visible)
    return F.pad(mask, (0, later_keys), value=0.0 if mask.dtype == torch.bool else -torch.inf)


def _safe(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> SafeCounts:
    key = (heads, key_heads, size, dtype, torch.get_num_threads())
    found = _known.get(key)
    if found is None:
        found = _known[key] = _try(heads, key_heads, size, dtype)
    return found


def _try(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> SafeCounts:
    what = f"attention of {heads} heads of {size} in {dtype}"
    safe = SafeCounts(_QUERIES)
    queries = [4 * ordinary((heads, size), dtype, seed) for seed in range(2)]
    cancelling = _cancelling_queries(heads, size, dtype)
    for keys in _KEYS:
        for trial, rows in (
            (_value_trial(key_heads, size, keys, dtype), queries),
            (_score_trial(key_heads, size, keys, dtype), cancelling),
        ):
            safe = safe_counts(trial, rows, what=f"{what} over {keys} keys", tried=safe.counts)
    return safe


def _cancelling_queries(heads: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries whose products with the keys of :func:`_score_trial` are nothing but rounding.

    They are as large as it takes to see that in weights of ``dtype``.
    """
    largest = 2**12 if dtype in (torch.bfloat16, torch.float16) else 2**6
    halves = [largest * ordinary((heads, size // 2), dtype, seed) for seed in range(2)]
    return [_mixed(half, -half, size) for half in halves]


def _mixed(left: torch.Tensor, right: torch.Tensor, size: int) -> torch.Tensor:
    """Both side by side in ``size`` columns of any order, the same for all."""
    columns = torch.cat([left, right, left.new_zeros(*left.shape[:-1], size % 2)], -1)
    return columns[..., torch.randperm(size, generator=torch.Generator().manual_seed(size))]


@dataclass(frozen=True)
class _Trial:
    """Attention over given keys, called with rows ``[count, heads, size]``, the queries.

    Computed for a batch of one and of two, which must agree too: the batch is what a cut between
    requests changes.

    Attributes:
        key: ``[1, key heads, keys, size]``.
        value: likewise.
        mask: which keys are seen, ``[keys]``.
    """

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The answers of a batch of one, then of two."""
        count, heads = rows.shape[:2]
        query = rows.transpose(0, 1).contiguous()
        answers = [
            F.scaled_dot_product_attention(
                query.expand(batch, *query.shape).contiguous(),
                self.key.expand(batch, -1, -1, -1).contiguous(),
                self.value.expand(batch, -1, -1, -1).contiguous(),
                self.mask.expand(1, 1, count, -1).contiguous(),
                scale=0.25,
                enable_gqa=heads != self.key.shape[1],
            )
            .transpose(1, 2)
            .flatten(0, 1)
            for batch in (1, 2)
        ]
        return torch.cat(answers)


def _value_trial(key_heads: int, size: int, keys: int, dtype: torch.dtype) -> _Trial:
    """Pairs of equal keys with opposite values: what is left is the rounding of their sum."""
    half = -(-keys // 2)
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(keys))[:keys]
    key, value = (ordinary((1, key_heads, half, size), dtype, seed) for seed in (1, 2))
    return _Trial(
        torch.cat([key, key], 2)[:, :, order].contiguous(),
        torch.cat([value, -value], 2)[:, :, order].contiguous(),
        torch.cat([torch.arange(half) % 3 != 1] * 2)[order],
    )


def _score_trial(key_heads: int, size: int, keys: int, dtype: torch.dtype) -> _Trial:
    """Scores that are nothing but rounding errors, which the weights then show.

    For :func:`_cancelling_queries`. The sums of :func:`_value_trial` do not show how scores are
    rounded: its keys are in pairs, which get equal scores however that is done.
    """
    half = ordinary((1, key_heads, keys, size // 2), dtype, 1)
    value = ordinary((1, key_heads, keys, size), dtype, 2)
    return _Trial(_mixed(half, half, size), value, torch.ones(keys, dtype=torch.bool))


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    later_keys: int,
) -> torch.Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)


_library.impl("exact_attention", _exact_attention, "CPU")
torch.library.register_fake("afd::exact_attention", _fake, lib=_library)
