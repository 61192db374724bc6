"""``afd-graph compile``: a model compiled ahead of time, written as a serving artifact."""

from __future__ import annotations

from pathlib import Path

import click

from afd_graph.cli.model_options import (
    dtype_option,
    ffn_ranks_option,
    parse_dtype,
    parse_settings,
    settings_option,
)
from afd_graph.cli.output import json_option, note, print_json


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
@ffn_ranks_option
@dtype_option
@settings_option
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
    checkpoint = None
    if Path(model).exists() and any(folder.glob("*.safetensors")):
        checkpoint = hf.open_checkpoint(folder, model=empty)
    else:
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
