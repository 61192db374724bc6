"""How unevenly experts are used: the share of a stage's rows that each expert rank gets.

The planner's knob is what load balancers report, the load of the fullest rank over the mean
(1 is perfect). Which rank is full differs by layer, and a little by step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

VARIANTS = 8


def draw_shares(
    layers: int, ranks: int, hottest: float, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """``[layers, VARIANTS, ranks]`` shares that add to 1; the largest is ``hottest / ranks``.

    A share is an exponential function of a normal number, with the scale that gives the maximum.
    """
    shares = np.full((layers, VARIANTS, ranks), 1 / ranks)
    if hottest <= 1 or ranks == 1:
        return shares
    # A rank's popularity belongs to its layer; a step changes it by a tenth.
    base = generator.standard_normal((layers, 1, ranks))
    logits = base + 0.1 * generator.standard_normal((layers, VARIANTS, ranks))
    logits -= logits.max(axis=-1, keepdims=True)
    low = np.zeros((layers, VARIANTS, 1))
    high = np.full_like(low, 1.0)
    for _ in range(60):  # until even the flattest row is steep enough
        steep = _largest(logits * high) * ranks >= hottest
        if steep.all():
            break
        high = np.where(steep, high, 2 * high)
    for _ in range(60):
        middle = (low + high) / 2
        above = _largest(logits * middle) * ranks >= hottest
        high = np.where(above, middle, high)
        low = np.where(above, low, middle)
    weights = np.exp(logits * high)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _largest(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits)
    return np.asarray(
        weights.max(axis=-1, keepdims=True) / weights.sum(axis=-1, keepdims=True),
    )
