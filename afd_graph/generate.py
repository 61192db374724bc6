"""Greedy generation over a compiled model, and what every step of it really did.

Prompts of one batch are padded on the left and share a key-value cache. A step is one call of the
model: the prompt, then one token a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from afd_graph.activation import StepLog
from afd_graph.errors import ConfigError
from afd_graph.results import Document


@dataclass(frozen=True)
class Prompt:
    """One document.

    Attributes:
        id: what results are matched by.
        text: the prompt; empty when only tokens were given.
        tokens: its token ids.
        expected: the right answer, where it is known.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    expected: str | None = None


def read_prompts(lines: Iterable[str], tokenizer: Any = None) -> list[Prompt]:
    """Read prompts, one a line.

    A line is a JSON object with ``prompt`` or ``prompt_tokens`` and, if it likes, ``id`` and
    ``expected``; any other line is a prompt itself. A prompt without ``id`` has its number, from 0.

    Args:
        lines: without the prompts' own line breaks; empty ones are left out.
        tokenizer: of the model; may be None when every line has ``prompt_tokens``.

    Raises:
        ConfigError: a line that cannot be used, with its number.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        fields: dict[str, Any] = {"prompt": line}
        if line.lstrip().startswith("{"):
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"line {number} of the prompts is not JSON: {error}",
                    remedy='write {"id": ..., "prompt": ...}, or a line that begins otherwise',
                ) from error
        text, tokens = fields.get("prompt", ""), fields.get("prompt_tokens")
        if tokens is None and tokenizer is not None:
            tokens = tokenizer(text)["input_ids"]
        if not tokens or not all(isinstance(token, int) for token in tokens):
            raise ConfigError(
                f"line {number} of the prompts gives no tokens",
                remedy="give a prompt and a checkpoint with a tokenizer, or prompt_tokens",
            )
        name = str(fields.get("id", len(prompts)))
        prompts.append(Prompt(name, text, tuple(tokens), fields.get("expected")))
    return prompts


@dataclass(frozen=True)
class Generation:
    """How prompts are completed.

    Attributes:
        policy: the split policy that was asked for.
        mode: name of the configuration, for result files; the policy when empty.
        max_new_tokens: most tokens of one completion.
        batch_size: prompts of one batch.
        end_tokens: ids that end a text.
        decode: from token ids to text, end tokens left out.
    """

    policy: str
    mode: str = ""
    max_new_tokens: int = 32
    batch_size: int = 8
    end_tokens: frozenset[int] = frozenset()
    decode: Callable[[list[int]], str] = lambda tokens: ""


def generate(
    model: Callable[..., Any],
    new_cache: Callable[[], Any],
    prompts: Sequence[Prompt],
    log: StepLog,
    how: Generation,
) -> Iterator[Document]:
    """Complete ``prompts`` greedily, a batch at a time.

    Args:
        model: the compiled model, called like one of Hugging Face.
        new_cache: makes an empty key-value cache.
        prompts: in the order in which the completions come.
        log: over the backend that compiled the model.
        how: what to do.
    """
    for begin in range(0, len(prompts), how.batch_size):
        batch = prompts[begin : begin + how.batch_size]
        rows: list[list[int]] = [[] for _ in batch]
        with log.record() as steps:
            for new in _greedy_steps(model, new_cache(), batch):
                for row, token in zip(rows, new, strict=True):
                    if not _is_complete(row, how):
                        row.append(token)
                if all(_is_complete(row, how) for row in rows):
                    break
        for prompt, tokens in zip(batch, rows, strict=True):
            yield Document(
                id=prompt.id,
                prompt=prompt.text,
                tokens=tuple(tokens),
                text=how.decode([t for t in tokens if t not in how.end_tokens]),
                policy_requested=how.policy,
                # Every step gives each row one token, whatever graphs it took.
                steps=tuple(steps[: len(tokens)]),
                expected=prompt.expected,
                mode=how.mode,
            )


def _is_complete(row: Sequence[int], how: Generation) -> bool:
    return len(row) >= how.max_new_tokens or (bool(row) and row[-1] in how.end_tokens)


def _greedy_steps(
    model: Callable[..., Any], cache: Any, batch: Sequence[Prompt]
) -> Iterator[list[int]]:
    """The next token of every row, step by step, without end."""
    width = max(len(prompt.tokens) for prompt in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch):
        ids[row, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        mask[row, width - len(prompt.tokens) :] = 1
    while True:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        yield ids[:, 0].tolist()
