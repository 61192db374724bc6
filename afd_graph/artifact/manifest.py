"""The manifest of an artifact: what it is, what it was made with, and the hash of every file.

It is read first, with a checksum of its own; nothing else is opened before its size and hash
agree. What differs from this process is said by name: another format, version or configuration.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from afd_graph._version import __version__
from afd_graph.artifact.errors import ArtifactError
from afd_graph.config import AFDConfig
from afd_graph.cost_model import CostModel
from afd_graph.errors import AFDError, ConfigError
from afd_graph.validation import check_known_keys

KIND = "afd-graph artifact"
FORMAT = 1
NAME = "manifest.json"
MAX_MANIFEST = 2**24

RUNTIME_OPTIONS = frozenset(
    (
        *("connector", "connector_options", "timeout_s", "check_answers"),
        *("layout_log", "min_split_tokens", "costs"),
    )
)
"""Options that are not compiled into an artifact: whoever loads it may set them."""


@dataclass(frozen=True)
class Manifest:
    """What is said about an artifact.

    Attributes:
        model: name and fingerprint of the model, dtype of the rows that enter its experts.
        config: the configuration that it was compiled with.
        credits: un-received dispatches that its order needs.
        ffn_ranks: number of FFN ranks that the experts are dealt out to.
        programs: name of each program -> its inputs, for people.
        files: name -> size in bytes and SHA-256.
        versions: of this package and of PyTorch.
    """

    model: Mapping[str, Any]
    config: AFDConfig
    credits: int
    ffn_ranks: int
    programs: Mapping[str, list[str]]
    files: Mapping[str, tuple[int, str]]
    versions: Mapping[str, str] = field(default_factory=lambda: current_versions())

    def encode(self) -> bytes:
        """The file, with its checksum."""
        body = {
            "kind": KIND,
            "format": FORMAT,
            "versions": dict(self.versions),
            "model": dict(self.model),
            "config": config_to_json(self.config),
            "config_digest": self.config.digest(),
            "topology": {"credits": self.credits, "ffn_ranks": self.ffn_ranks},
            "programs": dict(self.programs),
            "files": {name: list(entry) for name, entry in self.files.items()},
        }
        return encode({**body, "checksum": _checksum(body)})

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read and check a manifest.

        Raises:
            ArtifactError: foreign, damaged, of another format or made by another version; says
                which.
        """
        body = decode(data, NAME)
        if not isinstance(body, dict) or body.get("kind") != KIND:
            raise ArtifactError(
                "this is no artifact of afd-graph",
                remedy="name the folder or file that afd-graph compile wrote",
            )
        if body.get("format") != FORMAT:
            raise ArtifactError(
                f"the artifact has format {str(body.get('format'))[:20]}, this version reads "
                f"{FORMAT}",
                remedy="compile it again with this version",
            )
        checksum = body.pop("checksum", None)
        if checksum is None or checksum != _checksum(body):
            raise ArtifactError(
                "the manifest was changed after it was written: its checksum differs",
                remedy="compile the artifact again",
            )
        try:
            return cls._of(body)
        except AFDError:
            raise
        except Exception as error:  # a malformed body fails in many ways
            raise ArtifactError(
                f"the manifest is malformed: {type(error).__name__}: {error}",
                remedy="compile the artifact again",
            ) from error

    @classmethod
    def _of(cls, body: dict[str, Any]) -> Manifest:
        versions = body["versions"]
        for name, ours in current_versions().items():
            if _series(versions[name]) != _series(ours):
                raise ArtifactError(
                    f"the artifact was made with {name} {versions[name]}, this is {ours}",
                    remedy="compile it again with this version",
                )
        config = config_from_json(body["config"])
        if config.digest() != body["config_digest"] and versions == current_versions():
            raise ArtifactError(
                "the configuration of the artifact does not have the digest that it says",
                remedy="it was changed after it was compiled; compile it again",
            )
        files = {str(name): (entry[0], entry[1]) for name, entry in body["files"].items()}
        if not all(type(s) is int and s >= 0 and type(h) is str for s, h in files.values()):
            raise ValueError("the list of files is malformed")
        topology = body["topology"]
        credits, ranks = topology["credits"], topology["ffn_ranks"]
        if type(credits) is not int or type(ranks) is not int or credits < 1 or ranks < 1:
            raise ValueError("the topology is malformed")
        model = {key: body["model"][key] for key in ("name", "fingerprint", "dtype")}
        if not all(type(value) is str for value in model.values()):
            raise ValueError("the model is malformed")
        programs = {str(name): [str(x) for x in lines] for name, lines in body["programs"].items()}
        return cls(model, config, credits, ranks, programs, files, dict(versions))


def current_versions() -> dict[str, str]:
    """Versions that an artifact depends on."""
    return {"afd_graph": __version__, "torch": str(torch.__version__)}


def config_to_json(config: AFDConfig) -> dict[str, Any]:
    """The configuration as JSON values; paths of this machine are left out.

    Raises:
        ConfigError: an option holds something that JSON has not.
    """
    values: dict[str, Any] = {}
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if option.name in ("dump_dir", "layout_log", "trace"):
            continue
        if isinstance(value, CostModel):
            value = dataclasses.asdict(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        elif isinstance(value, tuple):
            value = list(value)
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{option.name} cannot be stored in an artifact: {error}",
                remedy="leave it out and set it when the artifact is loaded",
            ) from error
        values[option.name] = value
    return values


def config_from_json(stored: Mapping[str, Any]) -> AFDConfig:
    """Read what :func:`config_to_json` wrote."""
    values = dict(stored)
    if values.get("costs") is not None:
        values["costs"] = CostModel(**values["costs"])
    return AFDConfig(**values)


def with_options(config: AFDConfig, options: Mapping[str, Any]) -> AFDConfig:
    """The configuration of an artifact with what whoever loads it wants otherwise.

    Raises:
        ConfigError: an option that is compiled in has another value; says both.
    """
    check_known_keys("AFDConfig", options, [f.name for f in dataclasses.fields(config)])
    changed = config.replace(**options) if options else config
    for name in options:
        have, want = getattr(config, name), getattr(changed, name)
        if name not in RUNTIME_OPTIONS and have != want:
            raise ConfigError(
                f"the artifact was compiled with {name}={have!r}, not {want!r}",
                remedy="compile it again with that option; when loading, only "
                f"{', '.join(sorted(RUNTIME_OPTIONS))} may be set",
            )
    return changed


def encode(value: Any) -> bytes:
    """JSON bytes of a file of the artifact."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes, name: str) -> Any:
    """JSON values of a file.

    Raises:
        ArtifactError: it is no JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{name} is not what was written: {type(error).__name__}",
            remedy="the artifact is truncated or was changed; compile it again",
        ) from error


def sha256(data: bytes) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(data).hexdigest()


def _checksum(body: Mapping[str, Any]) -> str | None:
    try:
        return sha256(encode(body))
    except (ValueError, RecursionError):  # values that are no JSON, which we never write
        return None


def _series(version: str) -> list[str]:
    return str(version).split("+")[0].split(".")[:2]
