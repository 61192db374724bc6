"""Hugging Face models without their weights, and the ways that serving calls them.

``empty_model`` builds a model of any size in a second: its parameters are fake tensors, its
tables (rotary frequencies) are computed. ``serving_examples`` are the programs of an artifact: a
batch of one request without padding, and a batch of many with a mask; each without a cache, over
a cache, and for the next token. Caches go in and out as lists of ``[key, value]``, one a layer,
so that whoever calls the program needs no library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afd_graph import _compat
from afd_graph.artifact.write import Checkpoint
from afd_graph.capture import Example
from afd_graph.errors import ConfigError, UnsupportedError

PRESETS = Path(__file__).parent / "presets"
"""Configurations of published models, ``NAME.json``; each says where its values are published."""

PROGRAMS = ("prefill", "extend", "decode", "prefill_batch", "extend_batch", "decode_batch")
PREFIX = "model."
"""What :class:`ServingModule` puts in front of the names of the model's weights."""

_SOURCE = "_source"


def preset_names() -> list[str]:
    """Names that :func:`load_config` accepts besides paths."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def preset_source(name: str) -> str:
    """Where the values of a preset are published."""
    return str(json.loads((PRESETS / f"{name}.json").read_text())[_SOURCE])


def load_config(source: str) -> Any:
    """The configuration of a model.

    Args:
        source: name of a preset, a ``config.json``, or a folder that holds one.

    Raises:
        ConfigError: there is none, or the library does not know the kind of model.
    """
    transformers = _transformers()
    path = Path(source)
    if source in preset_names():
        path = PRESETS / f"{source}.json"
    elif path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text())
        kind = values["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{source!r} is no model: {path} cannot be read as a configuration ({error})",
            remedy="name a folder with config.json, such a file, or one of "
            f"{', '.join(preset_names())}",
        ) from error
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{path} is of a kind {kind!r} that transformers does not know",
            remedy="install a version that has it; code from a model's folder is never run",
        )
    values.pop(_SOURCE, None)
    values.pop("auto_map", None)
    # Published fp8 weights are another form of the same layers.
    values.pop("quantization_config", None)
    return transformers.CONFIG_MAPPING[kind](
        **{key: value for key, value in values.items() if key != "model_type"}
    )


def empty_model(config: Any, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    """A model whose parameters have no values, and the mode in which its fake tensors live.

    Args:
        config: of :func:`load_config`; changed: attention and experts in the forms that we match.
        dtype: of the parameters; the configuration's when None.

    Raises:
        ConfigError: the library has no causal language model of this kind.
    """
    transformers = _transformers()
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    config.use_cache = True
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(
            f"transformers has no causal language model for {config.model_type!r}",
            remedy="name the configuration of a language model",
        ) from error
    mode = _compat.new_fake_mode()
    _compute_tables(model)
    with mode:
        known: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in known:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    known[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = known[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model.eval(), mode


def _compute_tables(model: nn.Module) -> None:
    """Give buffers that are in no checkpoint their values."""
    for module in model.modules():
        tables = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        }
        if not tables:
            continue
        for name, buffer in tables.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        with torch.no_grad():
            model._init_weights(module)  # type: ignore[operator]


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


def find_checkpoint(folder: Path, model: nn.Module) -> Checkpoint | None:
    """The safetensors files in ``folder``, and how the model's parameters are made of them.

    Returns:
        None when the folder holds none.

    Raises:
        UnsupportedError: the weights are stored in a form that only the library can convert.
    """
    files = tuple(sorted(path.name for path in folder.glob("*.safetensors")))
    if not files:
        return None
    from afd_graph.artifact.weights import open_safetensors

    where: dict[str, int] = {}
    for position, file in enumerate(files):
        for name in open_safetensors(folder / file).keys():  # noqa: SIM118
            where[name] = position
    recipes = _recipes(where, model)
    _share_tied(recipes, model)
    return Checkpoint(folder, files, recipes)


def _recipes(where: Mapping[str, int], model: nn.Module) -> dict[str, Any]:
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
        piece = {"file": where[name], "name": name}
        grouped.setdefault(target, {}).setdefault(pattern, []).append(piece)
    recipes: dict[str, Any] = {}
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


def _share_tied(recipes: dict[str, Any], model: nn.Module) -> None:
    """A parameter that the model ties to another is where that one is."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        stored = next((recipes[name] for name in tied if name in recipes), None)
        for name in tied if stored is not None else ():
            recipes.setdefault(name, stored)


def model_name(config: Any) -> str:
    """Name of a model for people: its class and number of layers."""
    kinds = getattr(config, "architectures", None) or [config.model_type]
    return f"{re.sub(r'[^A-Za-z0-9_]', '', str(kinds[0]))}, {config.num_hidden_layers} layers"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "Hugging Face models need transformers, which is not installed",
            remedy="pip install 'afd-graph[hf]'",
        ) from error
    transformers.utils.logging.set_verbosity_error()
    return transformers
