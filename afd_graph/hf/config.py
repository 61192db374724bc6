"""Configurations of Hugging Face models: of a folder, a file, or a preset of this package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from afd_graph.errors import ConfigError

PRESETS = Path(__file__).parents[1] / "presets"
"""Configurations of published models, ``NAME.json``; each says where its values are published."""

_SOURCE = "_source"


def preset_names() -> list[str]:
    """Names that :func:`load_config` accepts besides paths."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def preset_source(name: str) -> str:
    """Where the values of a preset are published."""
    return str(json.loads((PRESETS / f"{name}.json").read_text())[_SOURCE])


def read_config(path: Path) -> dict[str, Any]:
    """What a ``config.json``, or the one in a folder, says.

    Raises:
        ConfigError: there is none.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} is no model: {file} cannot be read as a configuration ({error})",
            remedy="name a folder with config.json, such a file, or one of "
            f"{', '.join(preset_names())}",
        ) from error


def load_config(source: str) -> Any:
    """The configuration of a model.

    Args:
        source: name of a preset, a ``config.json``, or a folder that holds one.

    Raises:
        ConfigError: there is none, or the library does not know the kind of model.
    """
    transformers = library()
    path = PRESETS / f"{source}.json" if source in preset_names() else Path(source)
    values = read_config(path)
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{source!r} is no model: its kind is {kind!r}, which transformers does not know",
            remedy="install a version that has it; code from a model's folder is never run",
        )
    values.pop(_SOURCE, None)
    values.pop("auto_map", None)
    # Published fp8 weights are another form of the same layers.
    values.pop("quantization_config", None)
    return transformers.CONFIG_MAPPING[kind](
        **{key: value for key, value in values.items() if key != "model_type"}
    )


def model_name(config: Any) -> str:
    """Name of a model for people: its class and number of layers."""
    kinds = getattr(config, "architectures", None) or [config.model_type]
    return f"{re.sub(r'[^A-Za-z0-9_]', '', str(kinds[0]))}, {config.num_hidden_layers} layers"


def library() -> Any:
    """The module ``transformers``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "Hugging Face models need transformers, which is not installed",
            remedy="pip install 'afd-graph[hf]'",
        ) from error
    transformers.utils.logging.set_verbosity_error()
    return transformers
