"""Greedy generation over a compiled model, and what every step of it really did.

Prompts of one batch are padded on the left and share a key-value cache. A step is one call of the
model: the prompt, then one token a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from afd_graph.activation import StepLog
from afd_graph.errors import ConfigError
from afd_graph.results import Document, Step


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
    log: StepLog | None,
    how: Generation,
    logits: dict[str, torch.Tensor] | None = None,
) -> Iterator[Document]:
    """Complete ``prompts`` greedily, a batch at a time.

    Args:
        model: the compiled model, called like one of Hugging Face.
        new_cache: makes an empty key-value cache.
        prompts: in the order in which the completions come.
        log: over the backend that compiled the model; None records no steps.
        how: what to do.
        logits: filled with the fp32 logits ``[tokens, vocabulary]`` that chose the tokens of each
            document, by its id.
    """
    for begin in range(0, len(prompts), how.batch_size):
        batch = prompts[begin : begin + how.batch_size]
        rows: list[list[int]] = [[] for _ in batch]
        chosen_by: list[torch.Tensor] = []
        with _recording(log) as steps:
            for scores in _greedy_steps(model, new_cache(), batch):
                if logits is not None:
                    chosen_by.append(scores.float())
                for row, token in zip(rows, scores.argmax(-1).tolist(), strict=True):
                    if not _is_complete(row, how):
                        row.append(token)
                if all(_is_complete(row, how) for row in rows):
                    break
        for number, (prompt, tokens) in enumerate(zip(batch, rows, strict=True)):
            if logits is not None:
                logits[prompt.id] = torch.stack(chosen_by)[: len(tokens), number].clone()
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


def _recording(log: StepLog | None) -> AbstractContextManager[list[Step]]:
    return nullcontext([]) if log is None else log.record()


def _is_complete(row: Sequence[int], how: Generation) -> bool:
    return len(row) >= how.max_new_tokens or (bool(row) and row[-1] in how.end_tokens)


def _greedy_steps(
    model: Callable[..., Any], cache: Any, batch: Sequence[Prompt]
) -> Iterator[torch.Tensor]:
    """Logits ``[batch, vocabulary]`` of the next token, step by step, without end."""
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
        scores = out.logits[:, -1]
        ids = scores.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        yield scores
