"""The ways that serving calls a Hugging Face model: the programs of an artifact.

A batch of one request without padding, and a batch of many with a mask; each without a cache, over
a cache, and for the next token. Caches go in and out as lists of ``[key, value]``, one a layer,
so that whoever calls the program needs no library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from afd_graph import _compat
from afd_graph.capture import Example
from afd_graph.errors import ConfigError

PROGRAMS = ("prefill", "extend", "decode", "prefill_batch", "extend_batch", "decode_batch")
PREFIX = "model."
"""What :class:`ServingModule` puts in front of the names of the model's weights."""


class ServingModule(nn.Module):
    """A causal language model with its cache as lists of tensors.

    Args:
        model: of the library.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: list[list[torch.Tensor]] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """One step.

        Args:
            input_ids: ``int64 [batch, tokens]``.
            cache: key and value of each layer, ``[batch, heads, cached, width]``.
            attention_mask: ``int64 [batch, cached + tokens]``, 0 for padding.

        Returns:
            ``logits [batch, tokens, vocabulary]`` and the ``cache`` with this step's tokens.
        """
        from transformers import DynamicCache

        past = DynamicCache() if cache is None else DynamicCache([(k, v) for k, v in cache])
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past,
            use_cache=True,
        )
        layers: Any = past.layers
        caches = [[layer.keys, layer.values] for layer in layers]
        return {"logits": out.logits, "cache": caches}


def serving_examples(
    module: ServingModule, mode: Any, names: Sequence[str] = PROGRAMS
) -> Iterator[tuple[str, Example]]:
    """The programs ``names``, each with an example of its inputs.

    Args:
        module: with real or fake parameters.
        mode: the fake tensor mode of the parameters; None if they are real.
        names: some of :data:`PROGRAMS`.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names:
        check_program(name)
        yield name, _example(module, mode, name)


def check_program(name: str) -> None:
    """Refuse a name that is not in :data:`PROGRAMS`."""
    if name not in PROGRAMS:
        raise ConfigError(
            f"there is no program {name!r}", remedy=f"choose from {', '.join(PROGRAMS)}"
        )


def _example(module: ServingModule, mode: Any, name: str) -> Example:
    kind, _, many = name.partition("_")
    auto = torch.export.Dim.AUTO
    batch, tokens = (2 if many else 1), (1 if kind == "decode" else 7)
    cached = 0 if kind == "prefill" else 5
    dynamic: dict[str, Any] = {"input_ids": {}}
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, tokens, dtype=torch.int64)}
    if tokens > 1:
        dynamic["input_ids"][1] = auto
    if cached:
        inputs["cache"] = _zeros(_cache_shapes(module, mode, batch, cached))
        dynamic["cache"] = [[{2: auto} for _ in pair] for pair in inputs["cache"]]
    if many:
        inputs["attention_mask"] = torch.ones(batch, cached + tokens, dtype=torch.int64)
        dynamic["attention_mask"] = {1: auto}
        for sizes in [dynamic["input_ids"], dynamic["attention_mask"]] + [
            sizes for pair in dynamic.get("cache", ()) for sizes in pair
        ]:
            sizes[0] = auto
    if mode is not None:
        inputs = _compat.as_fake(mode, inputs)
    return Example(inputs, dynamic)


def _cache_shapes(module: ServingModule, mode: Any, batch: int, cached: int) -> Any:
    """The cache after a step, computed without values."""
    ids = torch.zeros(batch, cached, dtype=torch.int64)
    config: Any = module.model.config
    before = config._experts_implementation
    config._experts_implementation = "batched_mm"  # the other form has shapes only in bf16
    try:
        with torch.no_grad(), mode or _compat.new_fake_mode() as fakes:
            out = module(_compat.as_fake(fakes, ids))
    finally:
        config._experts_implementation = before
    return [[(tuple(t.shape), t.dtype) for t in pair] for pair in out["cache"]]


def _zeros(shapes: Any) -> Any:
    return [[torch.zeros(shape, dtype=dtype) for shape, dtype in pair] for pair in shapes]
