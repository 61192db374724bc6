"""A loaded artifact in the place of a Hugging Face model, for :mod:`afd_graph.generate`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from afd_graph.artifact.model import LoadedModel
from afd_graph.errors import ConfigError


class TensorCache:
    """The key-value cache of a batch: what the last step returned."""

    def __init__(self) -> None:
        self.tensors: Any = None


class ServedModel:
    """Calls the program that a step needs.

    One request without padding runs the programs for one request, everything else those for a
    batch with a mask. Positions count from the first column, padding included, which rotary
    embeddings do not see.

    Args:
        model: with the programs that :mod:`afd_graph.hf` names.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: TensorCache,
        **_: Any,
    ) -> Any:
        """One step: ``logits`` of ``input_ids``, and the cache grows."""
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if past_key_values.tensors is not None:
            inputs["cache"] = past_key_values.tensors
        if input_ids.shape[0] > 1:
            inputs["attention_mask"] = attention_mask
        elif not bool(attention_mask.all()):
            raise ConfigError(
                "the only request of a batch is padded", remedy="leave its padding out"
            )
        out = self._model(**inputs)
        past_key_values.tensors = out["cache"]
        return SimpleNamespace(logits=out["logits"])
