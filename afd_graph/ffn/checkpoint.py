"""A Hugging Face checkpoint read by name: memory-mapped safetensors, experts in both forms.

A model's stacked expert parameters may be stored as they are (the library's own form since
version 5), or one matrix per expert, projection by projection, as most published checkpoints are::

    layers.3.mlp.experts.gate_up_proj            [experts, 2 * inner, hidden]
    layers.3.mlp.experts.17.gate_proj.weight     [inner, hidden]
    layers.3.mlp.experts.17.up_proj.weight       [inner, hidden]

A rank reads its own experts only. Stored in the first form they stay memory-mapped: the kernel
reads a page when an expert is first used, and ranks of one machine share it. The second form is
stacked in memory, because a grouped product wants one tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from afd_graph.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
"""Stored names of published checkpoints -> the model's."""
_STACKED: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Stacked parameter -> the projections that it is made of, in order; spellings of them."""
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
# What config.json says beside the architecture.
_INCIDENTAL = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
_SAMPLE = 32


class Checkpoint:
    """A directory with ``config.json`` and safetensors files.

    Args:
        path: the directory.
        dtype: what tensors are converted to when they are stored as another floating-point type;
            ``None`` leaves them. Converted tensors are copies.

    Raises:
        ConfigError: no such directory, or a file that is missing or damaged.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        self.path = Path(path)
        self.dtype = dtype
        self.config: dict[str, Any] = json.loads(_read_text(self.path / "config.json"))
        self._open: dict[str, Any] = {}
        self._stored: dict[str, tuple[str, str]] = {}
        for name, file in self._files():
            self._stored[_model_name(name)] = file, name

    def row_dtype(self) -> torch.dtype:
        """The dtype that the model runs in."""
        if self.dtype is not None:
            return self.dtype
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        found = getattr(torch, str(name), None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(
                f"{self.path} is of dtype {name!r}, which is not known", remedy="give --dtype"
            )
        return found

    def names(self) -> list[str]:
        """Names of all tensors, as the model calls them; experts as they are stored."""
        return list(self._stored)

    def is_routed(self, name: str) -> bool:
        """Whether a name of :meth:`names` belongs to routed experts."""
        owner, _, last = name.rpartition(".")
        return bool(_ONE_EXPERT.search(name)) or (owner.endswith(".experts") and last in _STACKED)

    def whole(self, name: str) -> torch.Tensor:
        """The tensor ``name``.

        Raises:
            ConfigError: it is not in the checkpoint.
        """
        file, stored = self._find(name)
        return self._converted(self._opened(file).get_tensor(stored))

    def routed(self, name: str, first: int, last: int) -> torch.Tensor:
        """Experts ``first`` to ``last`` (exclusive) of the stacked parameter ``name``.

        Raises:
            ConfigError: the checkpoint has neither the parameter nor its experts' matrices.
        """
        if name in self._stored:
            file, stored = self._stored[name]
            return self._converted(self._opened(file).get_slice(stored)[first:last])
        owner, _, parameter = name.rpartition(".")
        for parts in _STACKED.get(parameter, ()):
            if f"{owner}.{first}.{parts[0]}.weight" in self._stored:
                return self._stacked(owner, parts, first, last)
        raise self._missing(name)

    def stacked_names(self) -> dict[str, int]:
        """Stacked expert parameters, stored so or matrix by matrix -> number of experts."""
        found: dict[str, int] = {}
        parameters = {
            part: name
            for name, spellings in _STACKED.items()
            for parts in spellings
            for part in parts
        }
        for name in self._stored:
            one = _ONE_EXPERT.search(name)
            if one is not None:
                owner, projection = name[: one.start()], name[one.end() :].split(".")[0]
                if projection in parameters:
                    stacked = f"{owner}.experts.{parameters[projection]}"
                    number = int(one.group().split(".")[2])
                    found[stacked] = max(found.get(stacked, 0), number + 1)
            elif self.is_routed(name):
                file, stored = self._stored[name]
                found[name] = self._opened(file).get_slice(stored).get_shape()[0]
        return found

    def _stacked(self, owner: str, parts: tuple[str, ...], first: int, last: int) -> torch.Tensor:
        out: torch.Tensor | None = None
        for expert in range(first, last):
            matrices = [self.whole(f"{owner}.{expert}.{part}.weight") for part in parts]
            if out is None:
                rows = sum(matrix.shape[0] for matrix in matrices)
                out = matrices[0].new_empty((last - first, rows, matrices[0].shape[1]))
            torch.cat(matrices, out=out[expert - first])
        assert out is not None
        return out

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.dtype)

    def _files(self) -> Iterable[tuple[str, str]]:
        """Every stored name and the file that it is in."""
        index = self.path / _INDEX
        if index.exists():
            return list(json.loads(_read_text(index))["weight_map"].items())
        return [(name, _SINGLE) for name in self._opened(_SINGLE).keys()]  # noqa: SIM118

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{self.path / file} cannot be read: {error}",
                    remedy="name the directory of a checkpoint with safetensors files",
                ) from error
        return self._open[file]

    def _find(self, name: str) -> tuple[str, str]:
        try:
            return self._stored[name]
        except KeyError:
            raise self._missing(name) from None

    def _missing(self, name: str) -> ConfigError:
        owner = name.rpartition(".")[0]
        near = [known for known in self._stored if known.startswith(owner)][:3]
        return ConfigError(
            f"the checkpoint {self.path} has no weight {name!r}; it has {near or 'other layers'}",
            remedy="give both roles the checkpoint of the model that is compiled",
        )


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
        for name, experts in checkpoint.stacked_names().items():
            first, last = share(experts)
            self._loaded[name] = first, last, checkpoint.routed(name, first, last)
        if not self._loaded:
            raise ConfigError(
                f"the checkpoint {checkpoint.path} has no routed experts",
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


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hex digest that two ranks compare: architecture, names, types, shapes, samples of values.

    Reads some bytes of every tensor, so that another training state is another model.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in checkpoint.config.items() if k not in _INCIDENTAL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(checkpoint.names()):
        file, stored = checkpoint._find(name)
        tensor = checkpoint._opened(file).get_tensor(stored)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        middle = values.numel() // 2
        for sample in (values[:_SAMPLE], values[middle : middle + _SAMPLE]):
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _model_name(stored: str) -> str:
    for old, new in _RENAMED:
        stored = stored.replace(old, new)
    return stored


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            remedy="name the directory of a Hugging Face checkpoint",
        ) from error
