"""How a benchmark says what it found: one line a claim, which ``afd-graph bench`` reads."""

from __future__ import annotations


def verdict(claim: str, value: float, bound: str, holds: bool) -> bool:
    """Print ``verdict: CLAIM = VALUE (BOUND): yes|NO``; returns ``holds``.

    Args:
        claim: what the value is, such as ``two stages over unsplit AFD``.
        value: the worst one seen, a ratio where there is something to compare with.
        bound: what it should be, such as ``at least 1.7``.
        holds: whether it is.
    """
    print(f"verdict: {claim} = {value:.4g} ({bound}): {'yes' if holds else 'NO'}", flush=True)
    return holds
