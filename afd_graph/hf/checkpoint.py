"""Which tensors of a folder's safetensors files a Hugging Face model's parameters are made of.

The library's own conversion is followed, by name and not by value: its renamings, and the pieces
that it stacks and concatenates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afd_graph.checkpoint import Checkpoint, Recipe
from afd_graph.errors import ConfigError, UnsupportedError
from afd_graph.hf.config import load_config, read_config
from afd_graph.hf.model import meta_model

_INDEX = "model.safetensors.index.json"


def open_checkpoint(
    folder: str | Path, dtype: torch.dtype | None = None, model: nn.Module | None = None
) -> Checkpoint:
    """The weights in ``folder``; reads headers of its files and no values.

    Args:
        folder: with ``config.json`` and safetensors files.
        dtype: what floating-point tensors are converted to; None leaves them.
        model: whose parameters are looked for, with or without values; that of ``config.json``
            when None.

    Raises:
        ConfigError: no such folder, or not all weights of the model are in it.
        UnsupportedError: the weights are stored in a form that only the library can convert.
    """
    folder = Path(folder)
    config = read_config(folder)
    if "quantization_config" in config:
        raise UnsupportedError(
            f"the weights in {folder} are quantised",
            remedy="convert them to a floating-point type and leave quantization_config out",
        )
    files = _files(folder)
    if not files:
        raise ConfigError(
            f"{folder} has no safetensors files",
            remedy="name the folder of a checkpoint with safetensors files",
        )
    recipes: dict[str, Recipe] = {}  # filled below, from what the checkpoint stores
    checkpoint = Checkpoint(folder, files, recipes, config, dtype)
    stored = checkpoint.stored()
    if model is None:
        model = meta_model(load_config(str(folder)))
    recipes.update(_recipes(stored, model))
    _share_tied(recipes, model)
    for name, tensor in model.state_dict().items():
        if name not in recipes:
            raise ConfigError(
                f"the checkpoint {folder} has no values for {name!r}",
                remedy="name the folder of a complete checkpoint",
            )
        _check_shape(checkpoint, name, tuple(tensor.shape))
    return checkpoint


def _files(folder: Path) -> tuple[str, ...]:
    """The safetensors files of a model; a folder may hold others beside those of its index."""
    index = folder / _INDEX
    if not index.is_file():
        return tuple(sorted(path.name for path in folder.glob("*.safetensors")))
    try:
        return tuple(sorted(set(json.loads(index.read_text())["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index} cannot be read as an index of safetensors files ({error})",
            remedy="get the checkpoint again",
        ) from error


def _check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    try:
        found = checkpoint.shape(checkpoint.recipes[name])
    except ValueError as error:
        raise ConfigError(
            f"the pieces of the weight {name!r} do not fit together: {error}",
            remedy="get the checkpoint again",
        ) from error
    if found != expected:
        raise ConfigError(
            f"the weight {name!r} is of shape {found} in the checkpoint and of {expected} in the "
            "model",
            remedy="name the folder of a complete checkpoint, with its own config.json",
        )


def _recipes(where: Mapping[str, int], model: nn.Module) -> dict[str, Recipe]:
    """Follow the library's own conversion, by name and not by value."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    grouped: dict[str, dict[str | None, list[Any]]] = {}
    for name in sorted(where, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, getattr(model, "base_model_prefix", ""), state
        )
        if target not in state:
            continue  # such as the layers that predict further tokens
        piece = {"file": where[name], "name": name}
        grouped.setdefault(target, {}).setdefault(pattern, []).append(piece)
    recipes: dict[str, Recipe] = {}
    for target, groups in grouped.items():
        patterns = [pattern for pattern in groups if pattern is not None]
        if not patterns:
            recipes[target] = groups[None][0]
            continue
        converter = by_pattern[patterns[0]]
        lists = [groups[pattern] for pattern in converter.source_patterns if pattern in groups]
        made: list[Any] = [parts[0] if len(parts) == 1 else parts for parts in lists]
        for operation in converter.operations:
            if isinstance(operation, MergeModulelist) and operation.dim == 0:
                made = [{"stack": p if isinstance(p, list) else [p]} for p in made]
            elif isinstance(operation, Concatenate):
                made = [{"concat": made, "dim": operation.dim}]
            else:
                raise UnsupportedError(
                    f"the weight {target!r} needs {type(operation).__name__} to be loaded",
                    remedy="save the model again with "
                    "model.save_pretrained(FOLDER, save_original_format=False)",
                )
        (recipes[target],) = made
    return recipes


def _share_tied(recipes: dict[str, Recipe], model: nn.Module) -> None:
    """A parameter that the model ties to another is where that one is."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        stored = next((recipes[name] for name in tied if name in recipes), None)
        if stored is not None:
            recipes.update({name: stored for name in tied if name not in recipes})
