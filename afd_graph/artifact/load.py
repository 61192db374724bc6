"""Open an artifact: check everything, execute nothing, and return callables.

1. read the manifest, and compare format and versions with this process's;
2. read every file that the role needs, compare its size and hash;
3. build the graphs from operators that artifacts may call, and verify their schedule;
4. map the weights that the role needs and compare their hashes;
5. open the connector.

The model's Python code is not needed, nor is the library that it came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from afd_graph.artifact.errors import ArtifactError
from afd_graph.artifact.experts import (
    ExpertLayer,
    ReadWeight,
    Share,
    experts_from_json,
    shares_from_json,
)
from afd_graph.artifact.manifest import (
    MAX_MANIFEST,
    NAME,
    Manifest,
    decode,
    sha256,
    with_options,
)
from afd_graph.artifact.model import LoadedExperts, LoadedModel, LoadedProgram
from afd_graph.artifact.program import StoredProgram, program_from_json
from afd_graph.artifact.store import Store
from afd_graph.artifact.weights import WeightReader, weights_from_json
from afd_graph.artifact.write import CONSTANTS, EXPERTS, WEIGHTS
from afd_graph.capture import CONSTANT, INPUT
from afd_graph.connectors import Connector
from afd_graph.errors import AFDError, ConfigError
from afd_graph.report import LayerReport, Report
from afd_graph.runtime import Channel, open_channel

ROLES = ("all", "attention", "ffn")


def load(
    path: str | os.PathLike[str],
    *,
    role: str = "all",
    rank: int = 0,
    device: torch.device | str = "cpu",
    weights: str | os.PathLike[str] | None = None,
    connector: Connector | None = None,
    options: Mapping[str, Any] | None = None,
    plan: Callable[[int, int], int | str] | None = None,
    programs: list[str] | None = None,
    verify_weights: bool = True,
) -> Any:
    """Open the artifact at ``path``.

    Args:
        path: a folder or file that ``afd-graph compile`` or :func:`afd_graph.artifact.save` wrote.
        role: ``attention`` needs a connector that reaches the experts; ``ffn`` is the experts of
            one rank; ``all`` is both in this process, by the connector that the options name.
        rank: of the FFN ranks, for ``ffn``.
        device: where tensors live.
        weights: folder or file of the weights, when they are not where they were.
        connector: an open connector instead of the options' one.
        options: of :class:`~afd_graph.AFDConfig`; those that are compiled in must be equal.
        plan: a policy of the user, as :class:`~afd_graph.AFDBackend` takes it.
        programs: names of the programs to open; all when None.
        verify_weights: compare the hash of every weight that is read.

    Returns:
        :class:`~afd_graph.artifact.LoadedModel`, or :class:`~afd_graph.artifact.LoadedExperts`
        for ``ffn``.

    Raises:
        ArtifactError: damaged, foreign, of another version, or its weights are missing or others.
        ConfigError: options that contradict what was compiled.
    """
    if role not in ROLES:
        raise ConfigError(f"role={role!r} is not known", remedy=f"use one of {ROLES}")
    if role == "attention" and connector is None:
        raise ConfigError(
            "role='attention' has no experts in this process",
            remedy="pass connector=, one that reaches the FFN side, or use role='all'",
        )
    opened = _Artifact(path, torch.device(device), weights, verify_weights)
    if role == "ffn":
        return opened.experts(rank)
    return opened.model(role, connector, options or {}, plan, programs)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """What is said about the artifact at ``path``; opens nothing else.

    Raises:
        ArtifactError: there is none, or it is damaged or of another version.
    """
    with Store(path) as store:
        return Manifest.decode(_limited(store))


class _Artifact:
    """An artifact while it is opened."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: torch.device,
        weights: str | os.PathLike[str] | None,
        verify_weights: bool,
    ) -> None:
        self._device = device
        self._path = Path(path)
        with Store(path) as store:
            self.manifest = Manifest.decode(_limited(store))
            self._files = {
                name: self._checked(store, name, size, digest)
                for name, (size, digest) in self.manifest.files.items()
            }
            folder = store.folder
        self.layers: list[ExpertLayer] = self._read(EXPERTS, experts_from_json)
        files, table = self._read(WEIGHTS, weights_from_json)
        self._shapes = {name: weight.shape for name, weight in table.items()}
        self._weights = WeightReader(
            files, table, own=folder, given=weights, verify=verify_weights, device=device
        )

    def experts(self, rank: int) -> LoadedExperts:
        """The experts of one rank."""
        ranks = self.manifest.ffn_ranks
        if type(rank) is not int or not 0 <= rank < ranks:
            raise ConfigError(
                f"rank={rank!r}: the artifact was compiled for {ranks} FFN ranks",
                remedy="compile it again with --ffn-ranks, or start as many ranks as it has",
            )
        shares: list[Share] = self._read(
            f"ffn/rank-{rank:04}.json", lambda stored: shares_from_json(stored, self.layers)
        )
        key = str(self.manifest.model["fingerprint"])
        programs = [
            layer.program(self._weights.read, self._shapes, share, key)
            for layer, share in zip(self.layers, shares, strict=True)
        ]
        firsts = [share.first for share in shares]
        return LoadedExperts(self.manifest, rank, programs, firsts, self._weights.read)

    def model(
        self,
        role: str,
        connector: Connector | None,
        options: Mapping[str, Any],
        plan: Callable[[int, int], int | str] | None,
        names: list[str] | None,
    ) -> LoadedModel:
        """The attention side, with all experts if the role is ``all``."""
        config = with_options(self.manifest.config, options)
        wanted = list(self.manifest.programs) if names is None else names
        unknown = [name for name in wanted if name not in self.manifest.programs]
        if unknown:
            raise ConfigError(
                f"the artifact has no program {unknown[0]!r}",
                remedy=f"it has {', '.join(self.manifest.programs)}",
            )
        stored = {name: self._program(name) for name in wanted}
        tensors = {name: self._tensors(program) for name, program in stored.items()}
        channel = open_channel(config, connector, self.manifest.credits)
        try:
            self._introduce(channel, with_experts=role == "all")
            report = self._report(stored)
            loaded = {
                name: LoadedProgram(name, program, tensors[name], channel, config, report, plan)
                for name, program in stored.items()
            }
        except BaseException as error:
            channel.close()
            if isinstance(error, AFDError) or not isinstance(error, Exception):
                raise
            raise _malformed("a graph", error) from error
        return LoadedModel(self.manifest, config, channel, loaded, report)

    def _introduce(self, channel: Channel, with_experts: bool) -> None:
        key = str(self.manifest.model["fingerprint"])
        channel.connector.check_group(1)
        read: ReadWeight = self._weights.without_values
        if with_experts and channel.connector.frees_weights:
            read = lambda name, rows: self._weights.read(name, rows).clone()  # noqa: E731
        elif with_experts:
            read = self._weights.read
        for layer in self.layers:
            whole = Share(layer.layer, 0, layer.num_experts, is_part=False)
            channel.connector.add_program(layer.program(read, self._shapes, whole, key))
            channel.num_experts[layer.layer] = layer.num_experts
            if layer.shared is not None:
                channel.shared_layers.add(layer.layer)

    def _program(self, name: str) -> StoredProgram:
        credits = self.manifest.credits
        program: StoredProgram = self._read(
            f"programs/{name}.json", lambda stored: program_from_json(stored, credits)
        )
        known = {layer.layer for layer in self.layers}
        if not known.issuperset(program.variants.report.layers):
            raise ArtifactError(
                f"the program {name} dispatches to layers that have no experts",
                remedy="the artifact is damaged; compile it again",
            )
        _move(program, self._device)
        return program

    def _tensors(self, program: StoredProgram) -> list[torch.Tensor | None]:
        """What each input of a program is bound to; None for inputs of a step and unread ones."""
        if not hasattr(self, "_constants"):
            self._constants = self._read_constants()
            self._read_weights: dict[str, torch.Tensor] = {}
        found: list[torch.Tensor | None] = []
        for position, (kind, name) in enumerate(program.inputs):
            if kind == INPUT or position not in program.used:
                found.append(None)
            elif kind == CONSTANT:
                if name not in self._constants:
                    raise ArtifactError(
                        f"the constant {name!r} is missing",
                        remedy="the artifact is damaged; compile it again",
                    )
                found.append(self._constants[name])
            else:
                if name not in self._read_weights:
                    self._read_weights[name] = self._weights.read(name)
                found.append(self._read_weights[name])
        return found

    def _read_constants(self) -> dict[str, torch.Tensor]:
        from afd_graph.artifact.write import _safetensors

        try:
            loaded = _safetensors().load(self._files[CONSTANTS])
        except ConfigError:
            raise
        except Exception as error:  # the library has its own exception
            raise ArtifactError(
                f"{CONSTANTS} is no safetensors file: {error}", remedy="compile it again"
            ) from error
        return {name: tensor.to(self._device) for name, tensor in loaded.items()}

    def _report(self, programs: Mapping[str, StoredProgram]) -> Report:
        credits = self.manifest.credits
        order = "receive-first" if credits == 1 else "send-first"
        report = Report(credits=credits, order=order)
        report.layers = [
            LayerReport(x.layer, x.name, x.num_experts, x.top_k, x.shared_experts)
            for x in self.layers
        ]
        report.graphs = [program.variants.report for program in programs.values()]
        report.nodes_before = sum(graph.nodes_before for graph in report.graphs)
        report.nodes_after = sum(graph.nodes_after for graph in report.graphs)
        return report

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        """Decode one file; whatever is malformed in it becomes one kind of error."""
        if name not in self._files:
            raise ArtifactError(
                f"the artifact lacks {name}", remedy="it is damaged; compile it again"
            )
        stored = decode(self._files[name], name)
        try:
            return read(stored)
        except AFDError as error:
            raise ArtifactError(
                f"{name}: {error.what}", node=error.node, layer=error.layer, remedy=error.remedy
            ) from error
        except Exception as error:  # malformed values fail in many ways
            raise _malformed(name, error) from error

    @staticmethod
    def _checked(store: Store, name: str, size: int, digest: str) -> bytes:
        data = store.read(name, size)
        if sha256(data) != digest:
            raise ArtifactError(
                f"{name} of {store.path} was changed after it was written: its hash differs",
                remedy="compile the artifact again",
            )
        return data


def _malformed(what: str, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"{what} is malformed: {type(error).__name__}: {str(error)[:200]}",
        remedy="the artifact is damaged; compile it again",
    )


def _limited(store: Store) -> bytes:
    data = store.read(NAME)
    if len(data) > MAX_MANIFEST:
        raise ArtifactError(f"the manifest has {len(data)} bytes", remedy="compile it again")
    return data


def _move(program: StoredProgram, device: torch.device) -> None:
    """Let the graphs make their tensors on ``device``."""
    for graph in program.variants.graphs():
        for node in graph.nodes:
            if isinstance(node.kwargs.get("device"), torch.device):
                node.update_kwarg("device", device)
