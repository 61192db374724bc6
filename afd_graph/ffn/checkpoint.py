"""The experts of a checkpoint that one FFN rank owns."""

from __future__ import annotations

from collections.abc import Callable

import torch

from afd_graph.checkpoint import Checkpoint
from afd_graph.errors import ConfigError


class LoadedExperts:
    """The share of the experts that one FFN rank owns, of every MoE layer of a checkpoint.

    Args:
        checkpoint: where they come from.
        share: from the number of experts of a layer to the first and last (exclusive) one owned.

    Raises:
        ConfigError: the checkpoint has no experts.
    """

    def __init__(self, checkpoint: Checkpoint, share: Callable[[int], tuple[int, int]]) -> None:
        self._checkpoint = checkpoint
        self._loaded: dict[str, tuple[int, int, torch.Tensor]] = {}
        for name, experts in checkpoint.routed_names().items():
            first, last = share(experts)
            self._loaded[name] = first, last, checkpoint.routed(name, first, last)
        if not self._loaded:
            raise ConfigError(
                f"the checkpoint {checkpoint.folder} has no routed experts",
                remedy="name the checkpoint of a mixture-of-experts model",
            )

    def routed(self, name: str, first: int, last: int) -> torch.Tensor:
        """What was loaded of the stacked parameter ``name``."""
        loaded = self._loaded.get(name)
        if loaded is None or loaded[:2] != (first, last):
            return self._checkpoint.routed(name, first, last)
        return loaded[2]

    def whole(self, name: str) -> torch.Tensor:
        """Any other tensor of the checkpoint."""
        return self._checkpoint.whole(name)

    def summary(self) -> str:
        """``experts 0 to 31 of 26 layers, 3.10 GiB``."""
        first, last, _ = next(iter(self._loaded.values()))
        layers = {name.rpartition(".")[0] for name in self._loaded}
        size = sum(tensor.nbytes for _, _, tensor in self._loaded.values())
        return f"experts {first} to {last - 1} of {len(layers)} layers, {size / 2**30:.2f} GiB"
