"""What can be wrong with an artifact."""

from __future__ import annotations

from afd_graph.errors import AFDError


class ArtifactError(AFDError, ValueError):
    """An artifact is damaged, foreign, of another version, or does not fit what is asked of it."""


class GuardError(AFDError, ValueError):
    """The inputs of a step are none that a program of the artifact was captured for."""
