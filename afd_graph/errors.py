"""Every error of this package: one base class; each says what, where and what to do."""

from __future__ import annotations


class AFDError(RuntimeError):
    """Base of all errors raised here.

    Args:
        what: what went wrong, one sentence.
        node: name of the graph node concerned, if any.
        layer: index of the MoE layer concerned, if any.
        stage: token stage concerned, if any.
        source: the user's source line that produced the node, if known.
        remedy: what the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        node: str | None = None,
        layer: int | None = None,
        stage: int | None = None,
        source: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.node = node
        self.layer = layer
        self.stage = stage
        self.source = source
        self.remedy = remedy
        where = ", ".join(
            f"{name}={value}"
            for name, value in (("layer", layer), ("stage", stage), ("node", node))
            if value is not None
        )
        parts = [what]
        if where:
            parts.append(f"[{where}]")
        if source:
            parts.append(f"(at {source})")
        if remedy:
            parts.append(f"Remedy: {remedy}")
        super().__init__(" ".join(parts))


class ConfigError(AFDError, ValueError):
    """An option is unknown, has an impossible value, or contradicts another option."""


class TrainingError(AFDError):
    """The backend was asked to compile a graph that needs gradients."""


class UnsupportedError(AFDError):
    """A graph cannot be split: a value mixes tokens without a rule, or is not causal."""


class PassError(AFDError):
    """A pass broke an invariant of the graph; always a defect of this package."""


class ExactError(AFDError):
    """Exact mode cannot promise equal bits: a kernel here, or an operator of the model."""


class ConnectorError(AFDError):
    """A dispatch or receive failed: dead or stalled peer, wrong answer, misuse of credits."""


class ResultsError(AFDError, ValueError):
    """A result file is malformed, or result files do not belong together."""


class PlanError(AFDError, ValueError):
    """A stage plan, stage layout or stage metadata is inconsistent."""
