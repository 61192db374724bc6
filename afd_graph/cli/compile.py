"""``afd-graph compile``: a model compiled ahead of time, written as a serving artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from afd_graph.cli.output import json_option, note, print_json
from afd_graph.errors import ConfigError


@click.command()
@click.argument("model")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder, or a file that ends in .afd.",
)
@click.option(
    "--programs",
    help="Comma-separated: prefill, extend, decode, each also with _batch.  [default: all six]",
)
@click.option("--ffn-ranks", default=1, show_default=True, type=click.IntRange(1), metavar="N")
@click.option("--dtype", metavar="NAME", help="Of the weights.  [default: the configuration's]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="OPTION=VALUE",
    help="An option of AFDConfig, such as split=request or credits=1; may be repeated.",
)
@click.option("--force", is_flag=True, help="Replace an artifact that is there.")
@json_option
def command(
    model: str,
    output: Path,
    programs: str | None,
    ffn_ranks: int,
    dtype: str | None,
    settings: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Compile MODEL ahead of time into an artifact.

    MODEL is a folder with a config.json, such a file, or the name of a preset (afd-graph inspect
    --list). The model is never run and its weights are not loaded: they are hashed where they
    are, and the artifact refers to them. Without safetensors in the folder the artifact refers to
    weights that are named when it is loaded.

    The programs of an artifact: prefill (a prompt), extend (more tokens over a cache) and decode
    (the next token) for one request, and the same for a batch with an attention mask (_batch).
    The experts are dealt out to --ffn-ranks FFN ranks.

    \b
    Examples:
      afd-graph compile ./DeepSeek-V2-Lite -o lite.afd
      afd-graph compile ./DeepSeek-V2-Lite -o lite --ffn-ranks 4 --set split=request
      python -c 'import afd_graph; m = afd_graph.load("lite.afd")'
    """
    from afd_graph import hf
    from afd_graph.artifact.store import check_target
    from afd_graph.artifact.write import save

    config = parse_settings(settings)
    wanted = hf.PROGRAMS if programs is None else tuple(programs.split(","))
    for name in wanted:
        hf.check_program(name)
    check_target(output, force)
    note(f"building {model} without its weights")
    described = hf.load_config(model)
    empty, mode = hf.empty_model(described, parse_dtype(dtype))
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    checkpoint = hf.find_checkpoint(folder, empty) if Path(model).exists() else None
    if checkpoint is None:
        note("no safetensors here: whoever loads the artifact must name the weights")
    module = hf.ServingModule(empty)
    manifest = save(
        output,
        module,
        dict(hf.serving_examples(module, mode, wanted)),
        config=config,
        checkpoint=checkpoint,
        ffn_ranks=ffn_ranks,
        prefix=hf.PREFIX,
        name=hf.model_name(described),
        overwrite=force,
        progress=note,
    )
    size = sum(size for size, _ in manifest.files.values())
    if as_json:
        print_json(
            {
                "path": str(output),
                "model": manifest.model,
                "programs": manifest.programs,
                "ffn_ranks": manifest.ffn_ranks,
                "credits": manifest.credits,
                "bytes": size,
                "weights": None if checkpoint is None else str(checkpoint.folder),
            }
        )
        return
    click.echo(f"{output}: {manifest.model['name']}, {size / 2**20:.1f} MiB without weights")
    for name, lines in manifest.programs.items():
        click.echo(f"  {name:14} {lines[0]}" + (f" and {len(lines) - 1} more" * (len(lines) > 1)))


def parse_settings(settings: tuple[str, ...]) -> Any:
    """A configuration from ``OPTION=VALUE``; a value is JSON, or text as it stands.

    Raises:
        ConfigError: no ``=``, or not an option with such a value.
    """
    from afd_graph.config import AFDConfig

    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {setting} is no OPTION=VALUE", remedy="write --set split=request"
            )
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return AFDConfig.from_options(options)


def parse_dtype(name: str | None) -> Any:
    """The floating-point type of that name; None for None.

    Raises:
        ConfigError: there is none.
    """
    if name is None:
        return None
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"--dtype {name} is no floating-point type", remedy="write bfloat16 or float32"
        )
    return found
