"""The task of the small model: addition, written as text, one token a character.

A problem reads ``417+85=`` and its answer ``502.``, where ``.`` ends an answer. The highest digit
comes first, so a model has to look ahead for carries. Prompts have different lengths; a batch of
them is padded on the left with ``_``.

Which problems are held out is decided by the problem itself, so that training and evaluation
agree without a file: those whose digest is divisible by ten were never trained on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

CHARACTERS = "_.0123456789+="
"""The vocabulary: the id of a character is its place here."""

PAD, END = CHARACTERS.index("_"), CHARACTERS.index(".")

MAX_DIGITS = 4
"""Most digits of one number."""


@dataclass(frozen=True)
class Problem:
    """Two numbers to add."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the model is given."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """What it shall continue with, the end character included."""
        return f"{self.a + self.b}."

    @property
    def held_out(self) -> bool:
        """Whether training never shows this problem."""
        return zlib.crc32(self.prompt.encode()) % 10 == 0


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Random problems without end; every number of digits is equally likely, for each number."""
    generator = random.Random(seed)
    while True:
        a, b = (generator.randrange(10 ** generator.randint(1, MAX_DIGITS)) for _ in range(2))
        problem = Problem(a, b)
        if problem.held_out == held_out:
            yield problem


def held_out_problems(count: int, seed: int = 0) -> list[Problem]:
    """``count`` different problems that were never trained on; the same for equal arguments."""
    found: dict[Problem, None] = {}
    for problem in problems(seed, held_out=True):
        if len(found) == count:
            break
        found[problem] = None
    return list(found)


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [CHARACTERS.index(character) for character in text]


def decode(ids: list[int]) -> str:
    """The text of token ids."""
    return "".join(CHARACTERS[i] for i in ids)
