"""Attention as one operator, so that the passes know what it means on every backend.

``scaled_dot_product_attention`` is a composite: by the time a functional ATen graph exists it has
become a dozen operators or a device kernel. :func:`keep_attention_whole` replaces it on the
captured graph by ``afd::attention``, which keeps its meaning and gains one: *causal* is aligned
to the last query and the last key, so a stage that holds the last queries of a request and all
keys before them is simply causal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_library = torch.library.Library("afd", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float? scale, "
    "bool enable_gqa) -> Tensor"
)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    queries, keys = query.shape[-2], key.shape[-2]
    if causal and queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        causal = False
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa
    )
    return _tokens_outside_heads(out)


def _tokens_outside_heads(out: torch.Tensor) -> torch.Tensor:
    # [batch, heads, tokens, width] stored as [batch, tokens, heads, width], what the fused
    # kernels write and what the transpose that follows in every model makes contiguous.
    return out.transpose(-3, -2).contiguous().transpose(-3, -2)


def _attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    torch._check(query.dim() == 4, lambda: "query must be [batch, heads, tokens, width]")
    batch, heads, tokens, _ = query.shape
    # Said out loud, so that symbolic shapes learn it: the caches of all layers are equally long.
    torch._check(key.shape[-2] == value.shape[-2], lambda: "keys and values differ in number")
    if mask is not None:
        for size, rows in ((mask.shape[-2], tokens), (mask.shape[-1], key.shape[-2])):
            if not (isinstance(size, int) and size == 1):
                torch._check(size == rows, lambda: "the mask does not fit queries and keys")
    return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("afd::attention", _attention_fake, lib=_library)

# As Dynamo writes it, and as torch.export does.
_SDPA = (
    torch._C._nn.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_PARAMETERS = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)


def keep_attention_whole(graph: fx.Graph) -> int:
    """Replace ``scaled_dot_product_attention`` by ``afd::attention``; returns how many.

    Left as they are, because their meaning differs: dropout, and a causal flag on a query and a
    key of different length (aligned to the first query there, to the last one here).
    """
    replaced = 0
    for node in [
        n for target in _SDPA for n in graph.find_nodes(op="call_function", target=target)
    ]:
        given: dict[str, Any] = dict(zip(_PARAMETERS, node.args, strict=False)) | node.kwargs
        causal = given.get("is_causal", False)
        if given.get("dropout_p", 0.0) != 0.0 or causal not in (True, False):
            continue
        query, key = (_fake(given[name]) for name in ("query", "key"))
        if query is None or query.dim() != 4:
            continue
        if causal and (key is None or not _same_length(query, key)):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(
                torch.ops.afd.attention.default,
                (
                    given["query"],
                    given["key"],
                    given["value"],
                    _four_dimensional(graph, given.get("attn_mask")),
                    causal,
                    given.get("scale"),
                    bool(given.get("enable_gqa", False)),
                ),
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        replaced += 1
    return replaced


def _four_dimensional(graph: fx.Graph, mask: Any) -> Any:
    """The mask as ``[batch, heads, queries, keys]``; leading dimensions may be missing."""
    value = _fake(mask) if isinstance(mask, fx.Node) else None
    if value is not None:
        for _ in range(value.dim(), 4):
            mask = graph.call_function(torch.unsqueeze, (mask, 0))
    return mask


def _fake(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, torch.Tensor) else None


def _same_length(query: torch.Tensor, key: torch.Tensor) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(query.shape[-2] == key.shape[-2])
