"""Compile a model ahead of time and write the artifact.

1. capture each program (:mod:`afd_graph.capture`) and run the same passes as ``torch.compile``;
2. collect what the programs and the experts read: weights by reference, constants by value;
3. deal the experts out to the FFN ranks;
4. write everything at once (:mod:`store`), the manifest with the hash of every other file.

Nothing of the model is run, and nothing but operators and sizes is stored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afd_graph import _compat
from afd_graph.artifact.errors import ArtifactError
from afd_graph.artifact.experts import ExpertLayer, experts_to_json, shares_of, shares_to_json
from afd_graph.artifact.manifest import Manifest, encode, sha256
from afd_graph.artifact.program import StoredProgram, program_to_json, stored_program
from afd_graph.artifact.store import check_target, weights_name, write_store
from afd_graph.artifact.weights import (
    OWN,
    Weight,
    WeightFile,
    digest,
    hash_pieces,
    weights_to_json,
)
from afd_graph.capture import CONSTANT, WEIGHT, Example, LayerNumbers, capture, run_passes
from afd_graph.checkpoint import Checkpoint
from afd_graph.config import AFDConfig
from afd_graph.connectors import create_connector
from afd_graph.errors import ConfigError, UnsupportedError
from afd_graph.report import GraphReport
from afd_graph.stored_graph import constant_name

Progress = Callable[[str], None]

EXPERTS = "ffn/experts.json"
WEIGHTS = "weights.json"
CONSTANTS = "constants.safetensors"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    examples: Mapping[str, Example],
    *,
    config: AFDConfig | None = None,
    checkpoint: Checkpoint | None = None,
    ffn_ranks: int = 1,
    prefix: str = "",
    name: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Compile ``model`` and write an artifact to ``path``.

    Args:
        path: a folder, or a file ``*.afd``.
        model: in evaluation mode. With fake tensors the artifact refers to ``checkpoint``, or to
            weights that whoever loads it must name.
        examples: the programs: a name, and how the model is called.
        config: options of the compiler.
        checkpoint: refer to these files; else the model's own weights are written beside.
        ffn_ranks: number of ranks that the experts are dealt out to.
        prefix: left out in front of the names of weights.
        name: of the model, for people.
        overwrite: replace an artifact that is there.
        progress: called with one line about each piece of work.

    Raises:
        ArtifactError: ``path`` must not be written to.
        UnsupportedError: the model cannot be captured, split, or stored.
        ConfigError: options that an artifact cannot have.
    """
    config = config if config is not None else AFDConfig.from_options()
    _check_config(config)
    check_target(path, overwrite)
    made = _Compiler(model, config, prefix, progress)
    programs = {each: made.program(each, example) for each, example in examples.items()}
    layers = made.layers()
    files = {f"programs/{each}.json": encode(program_to_json(p)) for each, p in programs.items()}
    files[EXPERTS] = encode(experts_to_json(layers))
    for rank in range(ffn_ranks):
        shares = shares_of(layers, rank, ffn_ranks)
        files[f"ffn/rank-{rank:04}.json"] = encode(shares_to_json(shares))
    files[CONSTANTS] = _safetensors_bytes(made.constants(programs))
    weights, tensors = made.weights(programs, layers)
    own: dict[str, torch.Tensor] = {}
    if checkpoint is not None:
        weights = {each: _referred(each, weight, checkpoint) for each, weight in weights.items()}
        origin = str(checkpoint.folder.absolute())
        where = [(file, origin, checkpoint.folder / file) for file in checkpoint.files]
        found = hash_pieces(where, weights, progress)
    elif any(_compat.is_fake(tensor) for tensor in tensors.values()):
        found = [WeightFile(weights_name(path), None)]
    else:
        own = tensors
        progress(f"hashing {len(own)} weights")
        hashes = {each: digest(tensor) for each, tensor in own.items()}
        found = [WeightFile(weights_name(path), OWN, hashes)]
    files[WEIGHTS] = encode(weights_to_json(found, weights))
    manifest = Manifest(
        model={
            "name": name or type(model).__name__,
            "fingerprint": _fingerprint(files),
            "dtype": constant_name(layers[0].dtype),
        },
        config=config,
        credits=made.credits,
        ffn_ranks=ffn_ranks,
        programs={each: program.guards.describe() for each, program in programs.items()},
        files={each: (len(data), sha256(data)) for each, data in files.items()},
    )
    progress(f"writing {path}")
    write_store(
        path,
        {"manifest.json": manifest.encode(), **files},
        write_weights=(lambda to: _write_safetensors(own, to)) if own else None,
        overwrite=overwrite,
    )
    return manifest


class _Compiler:
    """Captures the programs of one model, and remembers their tensors and experts."""

    def __init__(
        self, model: nn.Module, config: AFDConfig, prefix: str, progress: Progress
    ) -> None:
        self._model = model
        self._config = config
        self._prefix = prefix
        self._progress = progress
        self._numbers = LayerNumbers()
        self._layers: dict[int, ExpertLayer] = {}
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}
        connector = create_connector(config.connector, config.connector_options)
        self.credits = config.credits or connector.credits
        connector.close()

    def program(self, name: str, example: Example) -> StoredProgram:
        """Capture one program and run the passes over it."""
        self._progress(f"capturing {name}")
        captured = capture(self._model, example, self._config, prefix=self._prefix)
        self._progress(f"splitting {name}")
        programs = run_passes(
            captured, self._config, credits=self.credits, channel="", numbers=self._numbers
        )
        for match, program in zip(programs.matches, programs.ffn, strict=True):
            layer = ExpertLayer.of(program, match.top_k, match.shared_experts)
            self._layers.setdefault(program.layer, layer)
            for expression in program.expressions():
                for weight, tensor in expression.weights:
                    self._tensors[WEIGHT, weight] = tensor
        for found in captured.inputs:
            if found.value is not None:
                self._tensors[found.kind, found.name] = found.value
        report = GraphReport.of(programs)
        how = f"two stages ({report.mode})" if programs.split else report.unsplit_reason
        self._progress(f"{name}: {len(report.layers)} MoE layers, {how}")
        return stored_program(captured, programs, report)

    def layers(self) -> list[ExpertLayer]:
        """The MoE layers of all programs, in order."""
        if not self._layers:
            raise UnsupportedError(
                "no MoE layer was matched: there is nothing to disaggregate",
                remedy="afd-graph inspect says what looked like experts and why it does not match",
            )
        return [self._layers[number] for number in sorted(self._layers)]

    def constants(self, programs: Mapping[str, StoredProgram]) -> dict[str, torch.Tensor]:
        """Tensors of the model that are in no checkpoint."""
        names = {
            program.inputs[i][1]
            for program in programs.values()
            for i in program.used
            if program.inputs[i][0] == CONSTANT
        }
        found = {name: self._tensors[CONSTANT, name] for name in sorted(names)}
        for name, tensor in found.items():
            if _compat.is_fake(tensor):
                raise UnsupportedError(
                    f"the constant {name!r} of the model has no values",
                    remedy="build the model with its non-persistent buffers on the CPU",
                )
        return found

    def weights(
        self, programs: Mapping[str, StoredProgram], layers: list[ExpertLayer]
    ) -> tuple[dict[str, Weight], dict[str, torch.Tensor]]:
        """Everything that programs and experts read from a checkpoint, by name."""
        names = {
            program.inputs[i][1]
            for program in programs.values()
            for i in program.used
            if program.inputs[i][0] == WEIGHT
        }
        for layer in layers:
            names.update(layer.routed.weights, layer.shared.weights if layer.shared else ())
        tensors = {name: self._tensors[WEIGHT, name] for name in sorted(names)}
        weights = {
            name: Weight(tensor.dtype, tuple(tensor.shape), {"file": 0, "name": name})
            for name, tensor in tensors.items()
        }
        return weights, tensors


def _check_config(config: AFDConfig) -> None:
    if config.lowering != "eager":
        raise ConfigError(
            f"an artifact holds graphs, lowering={config.lowering!r} makes code of this machine",
            remedy="compile with lowering='eager'",
        )


def _referred(name: str, weight: Weight, checkpoint: Checkpoint) -> Weight:
    recipe = checkpoint.recipes.get(name)
    if recipe is None:
        raise ArtifactError(
            f"the checkpoint in {checkpoint.folder} has no weight {name!r}",
            remedy="it is of another model, or of a form that cannot be referred to: save it "
            "again with model.save_pretrained(FOLDER, save_original_format=False)",
        )
    return Weight(weight.dtype, weight.shape, recipe)


def _fingerprint(files: Mapping[str, bytes]) -> str:
    """Of the weights and the experts, so that both sides of a connector can compare it."""
    return sha256(files[WEIGHTS] + files[EXPERTS] + files[CONSTANTS])[:32]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "an artifact keeps tensors as safetensors, which is not installed",
            remedy="pip install 'afd-graph[artifact]'",
        ) from error
    return safetensors.torch


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def _safetensors_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return bytes(_safetensors().save(_plain(tensors)))


def _write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    _safetensors().save_file(_plain(tensors), str(path))
