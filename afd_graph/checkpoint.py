"""Safetensors files that hold a model's weights, and how each parameter is made of their tensors.

A *recipe* says where one parameter is; it is a JSON value, so artifacts store it as it is::

    {"file": 0, "name": "model.norm.weight"}
    {"stack": [{...}, {...}]}                   one tensor an expert
    {"concat": [{...}, {...}], "dim": 1}        gate and up projection in one

Published checkpoints hold experts in pieces, the library's own form holds them stacked. A rank
reads its own experts only: stacked ones stay memory-mapped, so that the kernel reads a page when
an expert is first used and ranks of one machine share it; pieces are put together in memory,
because a grouped product wants one tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from afd_graph.errors import ConfigError

Recipe = dict[str, Any]
Rows = tuple[int, int] | None
"""First and last (exclusive) index of the first dimension; all of it when None."""

# What config.json says beside the architecture.
_INCIDENTAL = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
_SAMPLE = 32


def pieces(recipe: Recipe) -> Iterator[tuple[int, str]]:
    """File number and name of each tensor that a recipe reads."""
    if "name" in recipe:
        yield recipe["file"], recipe["name"]
    for part in recipe.get("stack") or recipe.get("concat") or ():
        yield from pieces(part)


def make(recipe: Recipe, piece: Callable[[int, str, Rows], torch.Tensor], rows: Rows = None) -> Any:
    """Put a parameter together, or its ``rows``, reading no piece that they do not need.

    Args:
        recipe: of the parameter.
        piece: gives rows of a tensor of a file.
        rows: of the parameter's first dimension.
    """
    if "name" in recipe:
        return piece(recipe["file"], recipe["name"], rows)
    if "stack" in recipe:
        parts = recipe["stack"] if rows is None else recipe["stack"][slice(*rows)]
        return torch.stack([make(part, piece) for part in parts])
    dim = recipe["dim"]
    if rows is not None and dim == 0:
        return torch.cat([make(part, piece) for part in recipe["concat"]])[slice(*rows)]
    return torch.cat([make(part, piece, rows) for part in recipe["concat"]], dim)


def _shape_of(recipe: Recipe, piece: Callable[[int, str], tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of what :func:`make` returns.

    Raises:
        ValueError: the pieces do not fit together.
    """
    if "name" in recipe:
        return piece(recipe["file"], recipe["name"])
    parts = recipe["stack"] if "stack" in recipe else recipe["concat"]
    first, *others = [list(_shape_of(part, piece)) for part in parts]
    dim = recipe.get("dim")
    for other in others:
        if len(other) != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(first, other, strict=True)) if i != dim
        ):
            raise ValueError(f"pieces of {first} and {other}")
    if dim is None:
        return (len(parts), *first)
    first[dim] += sum(other[dim] for other in others)
    return tuple(first)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Safetensors files that hold the weights of a model.

    Attributes:
        folder: where they are.
        files: their names.
        recipes: how each parameter is made of their tensors; names files by position.
        config: what ``config.json`` says, if there is one.
        dtype: what tensors are converted to when they are stored as another floating-point type;
            None leaves them. Converted tensors are copies, all others are mapped.
    """

    folder: Path
    files: tuple[str, ...]
    recipes: Mapping[str, Recipe]
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    _open: dict[int, Any] = field(default_factory=dict, init=False, repr=False)

    def row_dtype(self) -> torch.dtype:
        """The dtype that the model runs in.

        Raises:
            ConfigError: ``config.json`` names one that PyTorch does not have.
        """
        if self.dtype is not None:
            return self.dtype
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        found = getattr(torch, str(name), None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(
                f"{self.folder} is of dtype {name!r}, which is not known", remedy="give --dtype"
            )
        return found

    def whole(self, name: str) -> torch.Tensor:
        """The parameter ``name``.

        Raises:
            ConfigError: it is not in the checkpoint.
        """
        return self._made(name, None)

    def routed(self, name: str, first: int, last: int) -> torch.Tensor:
        """Experts ``first`` to ``last`` (exclusive) of the stacked parameter ``name``.

        Raises:
            ConfigError: it is not in the checkpoint.
        """
        return self._made(name, (first, last))

    def routed_names(self) -> dict[str, int]:
        """The stacked parameters of routed experts -> number of experts."""
        return {
            name: self.shape(recipe)[0] for name, recipe in self.recipes.items() if is_routed(name)
        }

    def stored(self) -> dict[str, int]:
        """Name of each tensor of the files -> position of its file."""
        return {name: i for i in range(len(self.files)) for name in self._opened(i).keys()}  # noqa: SIM118

    def shape(self, recipe: Recipe) -> tuple[int, ...]:
        """The shape of a parameter.

        Raises:
            ValueError: its pieces do not fit together.
        """
        return _shape_of(recipe, self._shape)

    def fingerprint(self) -> str:
        """Hex digest that ranks compare: architecture, names, types, shapes, samples of values.

        Reads some bytes of every tensor, so that another training state is another model.
        """
        digest = hashlib.sha256()
        config = {k: v for k, v in self.config.items() if k not in _INCIDENTAL}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        stored = self.stored()
        for name in sorted(stored):
            tensor = self._opened(stored[name]).get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            values = tensor.reshape(-1)
            middle = values.numel() // 2
            for sample in (values[:_SAMPLE], values[middle : middle + _SAMPLE]):
                digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _made(self, name: str, rows: Rows) -> torch.Tensor:
        recipe = self.recipes.get(name)
        if recipe is None:
            owner = name.rpartition(".")[0]
            near = [known for known in self.recipes if known.startswith(owner)][:3]
            raise ConfigError(
                f"the checkpoint {self.folder} has no weight {name!r}; it has "
                f"{near or 'other layers'}",
                remedy="give both roles the checkpoint of the model that is compiled",
            )
        made: torch.Tensor = make(recipe, self._piece, rows)
        return made

    def _piece(self, position: int, name: str, rows: Rows) -> torch.Tensor:
        opened = self._opened(position)
        value = opened.get_tensor(name) if rows is None else opened.get_slice(name)[slice(*rows)]
        if self.dtype is not None and value.is_floating_point():
            value = value.to(self.dtype)
        return value

    def _shape(self, position: int, name: str) -> tuple[int, ...]:
        return tuple(self._opened(position).get_slice(name).get_shape())

    def _opened(self, position: int) -> Any:
        if position not in self._open:
            self._open[position] = open_safetensors(self.folder / self.files[position])
        return self._open[position]


def is_routed(name: str) -> bool:
    """Whether a parameter belongs to routed experts: it is one of a module called ``experts``."""
    return name.rpartition(".")[0].endswith(".experts")


def open_safetensors(path: Path) -> Any:
    """Map a safetensors file.

    Raises:
        ConfigError: it is none, or the library is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigError(
            "weights are read with safetensors, which is not installed",
            remedy="pip install 'afd-graph[artifact]'",
        ) from error
    try:
        return safe_open(str(path), framework="pt")
    except Exception as error:  # the library has its own exception, and raises OSError as well
        raise ConfigError(
            f"{path} is no safetensors file: {error}",
            remedy="it is missing, truncated or something else; get the checkpoint again",
        ) from error
