"""What is asked of a deployment: requests with lengths and arrival times, drawn from a seed.

Lengths come from a distribution written as ``fixed:4096``, ``uniform:128:4096``,
``lognormal:MEDIAN:SIGMA`` or ``file:PATH`` (one number a line, or a JSON list). Requests arrive at
``rate`` per second (Poisson), or are all there from the beginning (``rate=None``), which measures
capacity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afd_graph.errors import PlanError
from afd_graph.validation import check_choice

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Workload:
    """Requests and how a step takes them.

    Attributes:
        lengths: distribution of prompt lengths in tokens; in decoding, of what the cache holds.
        step_tokens: most tokens that one attention replica takes in one step. Prompts that do not
            fit are continued in the next step. In decoding: requests per replica.
        phase: ``prefill`` or ``decode``.
        rate: requests per second for the whole deployment; ``None`` for as many as can be served.
        seed: of lengths and arrivals.

    Raises:
        PlanError: a length or number that is not positive, an unknown distribution, no file.
    """

    lengths: str = "fixed:4096"
    step_tokens: int = 16384
    phase: str = "prefill"
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("phase", self.phase, PHASES)
        if self.step_tokens < 1 or (self.rate is not None and not self.rate > 0):
            raise PlanError(
                f"step_tokens={self.step_tokens}, rate={self.rate} are not positive",
                remedy="give tokens of a step and requests per second",
            )
        if self.phase == "decode" and self.rate is not None:
            raise PlanError(
                "decoding is simulated with a constant number of requests, it takes no rate",
                remedy="leave the rate out, or simulate the prefill phase",
            )
        draw_lengths(self.lengths, np.random.default_rng(self.seed))

    def requests(self) -> Iterator[tuple[float, int]]:
        """Endless ``(arrival in seconds, tokens)`` of the whole deployment, in order of arrival."""
        generator = np.random.default_rng([self.seed, 1])
        draw = draw_lengths(self.lengths, generator)
        arrival = 0.0
        while True:
            lengths = draw(256)
            gaps = generator.exponential(1 / self.rate, 256) if self.rate else np.zeros(256)
            for length, gap in zip(lengths, gaps, strict=True):
                arrival += float(gap)
                yield arrival, int(length)


def draw_lengths(
    text: str, generator: np.random.Generator
) -> Callable[[int], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """A function that draws so many lengths from the distribution ``text``.

    Raises:
        PlanError: as :class:`Workload`.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        values = _read(Path(rest))
        return lambda count: generator.choice(values, count)
    try:
        numbers = [float(part) for part in rest.split(":")]
        expected = {"fixed": 1, "uniform": 2, "lognormal": 2}[kind]
        if len(numbers) != expected or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise ValueError
        if numbers[0] < 1 or (kind == "uniform" and numbers[1] < numbers[0]):
            raise ValueError
    except (KeyError, ValueError):
        raise PlanError(
            f"lengths={text!r} is not a distribution of lengths",
            remedy="write fixed:4096, uniform:128:4096, lognormal:2000:0.8 or file:PATH",
        ) from None
    if kind == "fixed":
        return lambda count: np.full(count, int(numbers[0]))
    if kind == "uniform":
        low, high = int(numbers[0]), int(numbers[1])
        return lambda count: generator.integers(low, high, count, endpoint=True)
    median, sigma = numbers
    return lambda count: np.maximum(
        1, np.rint(median * np.exp(sigma * generator.standard_normal(count)))
    ).astype(np.int64)


def _read(path: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    try:
        text = path.read_text(encoding="utf-8")
        numbers = json.loads(text) if text.lstrip().startswith("[") else text.split()
        values = np.array([int(number) for number in numbers], dtype=np.int64)
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(
            f"lengths cannot be read from {path}: {error}",
            remedy="give one number of tokens a line, or a JSON list of them",
        ) from error
    if not values.size or values.min() < 1:
        raise PlanError(
            f"{path} holds no lengths, or one that is not positive",
            remedy="give one number of tokens a line, or a JSON list of them",
        )
    return values
