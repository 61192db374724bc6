"""The configurations of the matrix, and the topology that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REFERENCE = "unsplit model, one process"


@dataclass(frozen=True)
class Configuration:
    """One way to run a step.

    Attributes:
        split: where steps are asked to be cut; ``none`` runs one stage.
        sequence_parallel: keep one rank's rows between the sums, instead of plain TP.
    """

    split: str
    sequence_parallel: bool

    @property
    def name(self) -> str:
        """Short name, also of its files."""
        return f"{self.split}-{'sp' if self.sequence_parallel else 'tp'}"


CONFIGURATIONS = {
    configuration.name: configuration
    for split in ("token", "request", "none")
    for configuration in (Configuration(split, True), Configuration(split, False))
}
"""Token and request policy in two stages, and one stage; each with SP and with plain TP."""


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        model: checkpoint directory.
        prompts: file of JSON lines with ``id``, ``prompt`` and ``expected``.
        out: directory for the result files.
        replicas: data-parallel replicas of the attention side.
        tensor_parallel: ranks of one replica.
        ffn_ranks: ranks that share the experts.
        batch: most prompts of one replica's step.
        most: most tokens of an answer.
        dtype: ``float32`` or ``bfloat16``.
        timeout_s: longest that a rank may not respond.
    """

    model: Path
    prompts: Path
    out: Path
    replicas: int = 3
    tensor_parallel: int = 2
    ffn_ranks: int = 2
    batch: int = 6
    most: int = 9
    dtype: str = "float32"
    timeout_s: float = 600.0

    @property
    def ranks(self) -> int:
        """Processes of both roles."""
        return self.replicas * self.tensor_parallel + self.ffn_ranks

    def results(self, configuration: str, run: int) -> Path:
        """The result file of one run of a configuration."""
        return self.out / f"{configuration}.{run}.jsonl"

    def logits(self, configuration: str, run: int) -> Path:
        """The folder of the logits of one run of a configuration."""
        return self.out / f"{configuration}.{run}.logits"
