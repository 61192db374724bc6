"""From tokens to rows grouped by expert, and from the experts' rows back to tokens."""

from __future__ import annotations

import torch

# Below this many values embedding_bag is not worth it with several intra-op threads: it starts them
# all whatever the size, which costs milliseconds when their cores are busy.
_ONE_PASS_VALUES = 1 << 18


def group_by_expert(
    topk_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Order the (token, choice) pairs of ``topk_ids [n, k]`` by expert, stably.

    Returns:
        ``source`` int64 ``[n * k]``: token of each row; ``counts``: rows per expert, longer than
        ``num_experts`` when an id lies beyond; ``position`` int64 ``[n * k]``: row of each pair.
    """
    chosen = topk_ids.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=num_experts).tolist()
    position = torch.empty_like(order)
    position.scatter_(0, order, torch.arange(order.numel(), device=order.device))
    source = order.div_(topk_ids.shape[1], rounding_mode="floor")
    return source, counts, position


def combine(
    rows: torch.Tensor,
    position: torch.Tensor,
    topk_weights: torch.Tensor,
    dtype: torch.dtype,
    shared: torch.Tensor | None,
    exact: bool = False,
) -> torch.Tensor:
    """Weighted sum over the choices of each token, in order of choice.

    Args:
        rows: ``[n * k, h]``, the experts' answers.
        position: int64 ``[n * k]`` of :func:`group_by_expert`.
        topk_weights: ``[n, k]``, any float dtype.
        dtype: dtype of the result; the sum is taken in fp32, or fp64 for fp64.
        shared: ``[n, h]``, added with weight one.
        exact: give a token the same bits whatever the number of tokens.

    Returns:
        ``[n, h]``, rounded once to ``dtype``; never an alias of an input.
    """
    tokens, top_k = topk_weights.shape
    wide = torch.promote_types(dtype, torch.float32)
    weights = topk_weights.to(wide)
    if (
        not exact
        and rows.dtype is dtype is torch.float32
        and (rows.numel() >= _ONE_PASS_VALUES or torch.get_num_threads() == 1)
        and rows.device.type == "cpu"
    ):
        # Gathers and sums in one pass over the rows, three to six times as fast.
        starts = torch.arange(0, tokens * top_k, top_k)
        total = torch.nn.functional.embedding_bag(
            position, rows, starts, mode="sum", per_sample_weights=weights.reshape(-1)
        )
        return total if shared is None else total.add_(shared)
    position = position.view(tokens, top_k)
    total = rows.new_zeros((tokens, rows.shape[1]), dtype=wide)
    if shared is not None:
        total.add_(shared)
    for choice in range(top_k):
        part = rows.index_select(0, position[:, choice])
        weight = weights[:, choice : choice + 1]
        if exact:
            # Rounded before it is added: whether addcmul fuses the two depends on the place.
            total.add_(part.to(wide).mul_(weight))
        else:
            total.addcmul_(part.to(wide), weight)
    return total.to(dtype)


def has_nan(values: torch.Tensor) -> bool:
    """Whether any value is NaN; reads the values.

    A sum carries every NaN and costs a twentieth of ``isnan``; only a sum that is NaN, which
    infinities of both signs give as well, is looked at again.
    """
    return bool(values.sum().isnan()) and bool(values.isnan().any())
