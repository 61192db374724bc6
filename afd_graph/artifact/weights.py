"""Weights by reference: which tensor of which safetensors file each parameter is, and its hash.

An artifact duplicates no weight. It names files and tensors, and how a parameter is put together
where the file holds it in pieces (:mod:`afd_graph.checkpoint`).

Files are mapped; what does not lie as PyTorch's own memory does is copied, so that a model
computes the same bits wherever its weights come from. Every tensor that is read is compared with
the hash taken when the artifact was made.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from afd_graph.artifact.errors import ArtifactError
from afd_graph.checkpoint import Recipe, make, open_safetensors, pieces
from afd_graph.errors import ConfigError
from afd_graph.stored_graph import constant, constant_name

MAX_DEPTH = 4
_ALIGNMENT = 64
OWN = "own"
"""Folder of a weights file that was written with the artifact and moves with it."""


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file.

    Attributes:
        name: of the file.
        folder: ``own``, or the absolute folder of a checkpoint when the artifact was made; None
            when only whoever loads knows.
        hashes: SHA-256 of each tensor that is used, by name.
    """

    name: str
    folder: str | None
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer: what it must be, and where it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    recipe: Recipe


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the values of a tensor on CPU, in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


class WeightReader:
    """Reads weights from the files that an artifact refers to.

    Args:
        files: of the artifact.
        weights: by parameter name.
        own: folder of the artifact's own file.
        given: where whoever loads says that the files are, instead of where they were.
        verify: compare hashes.
        device: where the tensors go.
    """

    def __init__(
        self,
        files: Sequence[WeightFile],
        weights: Mapping[str, Weight],
        *,
        own: Path,
        given: str | os.PathLike[str] | None = None,
        verify: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self._files = files
        self._weights = weights
        self._own = own
        self._given = None if given is None else Path(given)
        self._verify = verify
        self._device = torch.device(device)
        self._open: dict[int, Any] = {}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The weight ``name``, or the part ``rows`` of its first dimension.

        Raises:
            ArtifactError: the file, the tensor, or a value of it is not what the artifact refers
                to; says which and how it differs.
        """
        weight = self._weights.get(name)
        if weight is None:
            raise self._unknown(name)
        found = make(weight.recipe, partial(self._piece, name), rows)
        shape = weight.shape
        if rows is not None:
            shape = (rows[1] - rows[0], *shape[1:])
        if found.dtype != weight.dtype or tuple(found.shape) != shape:
            raise ArtifactError(
                f"the weight {name!r} is {found.dtype} {tuple(found.shape)}, the artifact was made "
                f"for {weight.dtype} {shape}",
                remedy="use the checkpoint that the artifact was compiled from, or compile again",
            )
        return found.to(self._device)

    def without_values(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """What :meth:`read` returns, as a tensor on the meta device: the other side has it."""
        weight = self._weights.get(name)
        if weight is None:
            raise self._unknown(name)
        shape = weight.shape if rows is None else (rows[1] - rows[0], *weight.shape[1:])
        return torch.empty(shape, dtype=weight.dtype, device="meta")

    @staticmethod
    def _unknown(name: str) -> ArtifactError:
        return ArtifactError(
            f"the artifact does not say where the weight {name!r} is",
            remedy="it is damaged, or of another model; compile it again",
        )

    def _piece(
        self, name: str, position: int, tensor: str, rows: tuple[int, int] | None
    ) -> torch.Tensor:
        file = self._files[position]
        opened, path = self._opened(position)
        if tensor not in opened.keys():  # noqa: SIM118  (the handle is no mapping)
            raise ArtifactError(
                f"{path} has no tensor {tensor!r}, of which the weight {name!r} is made",
                remedy="it was renamed or the file is another one; compile again",
            )
        value = opened.get_tensor(tensor)
        expected = file.hashes.get(tensor)
        if self._verify and expected is not None and digest(value) != expected:
            raise ArtifactError(
                f"the values of {tensor!r} in {path} are not those that the artifact was made for",
                remedy="the file is damaged or of another training; compile again",
            )
        if rows is not None:
            value = value[slice(*rows)]
        # Kernels round differently over memory that is not aligned, and a mapped file seldom is.
        return value if value.data_ptr() % _ALIGNMENT == 0 else value.clone()

    def _opened(self, position: int) -> tuple[Any, Path]:
        if position not in self._open:
            path = self._find(self._files[position])
            try:
                self._open[position] = open_safetensors(path), path
            except ConfigError as error:
                raise ArtifactError(error.what, remedy=error.remedy) from error
        return self._open[position]

    def _find(self, file: WeightFile) -> Path:
        folders = []
        if self._given is not None:
            if self._given.is_file():
                return self._given
            folders.append(self._given)
        else:
            folders.append(self._own)
            if file.folder not in (OWN, None):
                folders.append(Path(str(file.folder)))
        for folder in folders:
            if (folder / file.name).is_file():
                return folder / file.name
        raise ArtifactError(
            f"the weights file {file.name!r} is not in {' or '.join(map(str, folders))}",
            remedy="put it beside the artifact, or say where it is: load(..., weights=FOLDER), "
            "--weights FOLDER",
        )


def weights_to_json(files: Sequence[WeightFile], weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Describe weights by JSON values."""
    return {
        "files": [
            {"name": file.name, "folder": file.folder, "sha256": dict(file.hashes)}
            for file in files
        ],
        "weights": {
            name: {
                "dtype": constant_name(weight.dtype),
                "shape": list(weight.shape),
                "from": weight.recipe,
            }
            for name, weight in weights.items()
        },
    }


def weights_from_json(stored: Any) -> tuple[list[WeightFile], dict[str, Weight]]:
    """Read what :func:`weights_to_json` wrote; what is malformed raises any exception."""
    files = []
    for entry in stored["files"]:
        name, folder = entry["name"], entry["folder"]
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"a weights file is called {name!r}")
        if folder is not None and not isinstance(folder, str):
            raise ValueError(f"a weights file lies in {folder!r}")
        files.append(WeightFile(name, folder, dict(entry["sha256"])))
    weights = {}
    for name, entry in stored["weights"].items():
        shape = tuple(entry["shape"])
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"the shape of {name!r} is malformed")
        _check_recipe(entry["from"], len(files), MAX_DEPTH)
        weights[name] = Weight(constant("dtype", entry["dtype"]), shape, entry["from"])
    return files, weights


def _check_recipe(recipe: Any, files: int, depth: int) -> None:
    parts = None if not isinstance(recipe, dict) else recipe.get("stack", recipe.get("concat"))
    if depth and isinstance(recipe, dict) and isinstance(recipe.get("name"), str):
        file = recipe.get("file")
        if set(recipe) == {"file", "name"} and type(file) is int and 0 <= file < files:
            return
    elif depth and isinstance(parts, list) and parts:
        keys = {"stack"} if "stack" in recipe else {"concat", "dim"}
        if set(recipe) == keys and (recipe.get("dim", 0) in (0, 1, 2)):
            for part in parts:
                _check_recipe(part, files, depth - 1)
            return
    raise ValueError("where a weight comes from is malformed")


def hash_pieces(
    files: Sequence[tuple[str, str | None, Path]],
    weights: Mapping[str, Weight],
    progress: Callable[[str], None] = lambda _: None,
) -> list[WeightFile]:
    """Hash every tensor of ``files`` (name, folder, where it is now) that the weights use."""
    used: dict[int, set[str]] = {}
    for weight in weights.values():
        for position, name in pieces(weight.recipe):
            used.setdefault(position, set()).add(name)
    found = []
    for position, (file, folder, path) in enumerate(files):
        names = sorted(used.get(position, ()))
        if names:
            progress(f"hashing {len(names)} tensors of {file}")
        opened = open_safetensors(path) if names else None
        hashes = {name: digest(opened.get_tensor(name)) for name in names} if opened else {}
        found.append(WeightFile(file, folder, hashes))
    return found
