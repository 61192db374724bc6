"""Serving artifacts: a model compiled once, opened in processes that do not have its code."""

from afd_graph.artifact.errors import ArtifactError, GuardError
from afd_graph.artifact.load import load, read_manifest
from afd_graph.artifact.manifest import Manifest
from afd_graph.artifact.model import LoadedExperts, LoadedModel, LoadedProgram
from afd_graph.artifact.operators import allow_operators
from afd_graph.artifact.write import save
from afd_graph.capture import Example
from afd_graph.checkpoint import Checkpoint

__all__ = [
    "ArtifactError",
    "Checkpoint",
    "Example",
    "GuardError",
    "LoadedExperts",
    "LoadedModel",
    "LoadedProgram",
    "Manifest",
    "allow_operators",
    "load",
    "read_manifest",
    "save",
]
