"""What ``afd_graph.load`` returns: callables of the attention side, and the experts of a rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from afd_graph.artifact.errors import GuardError
from afd_graph.artifact.experts import ReadWeight
from afd_graph.artifact.manifest import Manifest
from afd_graph.artifact.program import StoredProgram
from afd_graph.config import AFDConfig
from afd_graph.errors import TrainingError
from afd_graph.ffn.executor import FFNExecutor
from afd_graph.ffn.program import FFNProgram
from afd_graph.report import Report
from afd_graph.runtime import Channel
from afd_graph.structure import StructureError, fit, unflatten


class LoadedProgram:
    """One program of an artifact, called with the keyword arguments that it was captured with.

    Every call decides between the two-stage and the unsplit program as a compiled model does.

    Attributes:
        name: of the program.
    """

    def __init__(
        self,
        name: str,
        stored: StoredProgram,
        tensors: Sequence[torch.Tensor | None],
        channel: Channel,
        config: AFDConfig,
        report: Report,
        plan: Callable[[int, int], int | str] | None,
    ) -> None:
        self.name = name
        self._input_template = stored.input_template
        self._output_template = stored.output_template
        self._describe = stored.guards.describe
        self._check = stored.guards.checker()
        self._bound = list(tensors)
        self._positions = stored.step_positions()
        self._graph = stored.variants.compiled(report, channel, config, plan)

    def __call__(self, **inputs: Any) -> Any:
        """Run one step.

        Raises:
            GuardError: inputs that the program was not captured for; says which and why.
            TrainingError: an input needs gradients.
            ConnectorError: the experts failed.
        """
        leaves = self.accept(inputs)
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            raise TrainingError(
                "artifacts run inference only, and an input needs gradients",
                remedy="call it under torch.no_grad()",
            )
        return self.run(leaves)

    def accept(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of ``inputs``, if the program was captured for them; else GuardError."""
        try:
            leaves = fit(self._input_template, dict(inputs))
        except StructureError as error:
            raise GuardError(error.what, remedy=self._expects()) from error
        try:
            self._check(leaves)
        except GuardError as error:
            raise GuardError(error.what, remedy=self._expects()) from error
        return leaves

    def run(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Run one step with inputs that :meth:`accept` returned."""
        arguments = list(self._bound)
        for position, leaf in zip(self._positions, leaves, strict=True):
            arguments[position] = leaf
        with torch.no_grad():
            return unflatten(self._output_template, self._graph.run(arguments))

    def _expects(self) -> str:
        return f"{self.name} takes {'; '.join(self._describe())}"


class LoadedModel:
    """The attention side of an artifact, and with ``role="all"`` the experts as well.

    Attributes:
        programs: by name.
        manifest: of the artifact.
        config: in force: the artifact's, with the options of ``load``.
    """

    def __init__(
        self,
        manifest: Manifest,
        config: AFDConfig,
        channel: Channel,
        programs: Mapping[str, LoadedProgram],
        report: Report,
    ) -> None:
        self.manifest = manifest
        self.config = config
        self.programs = dict(programs)
        self.channel = channel
        self._report = report
        self._finalizer = weakref.finalize(self, channel.close)

    def __call__(self, **inputs: Any) -> Any:
        """Run one step with the first program that was captured for such inputs.

        Raises:
            GuardError: none was; says why, program by program.
        """
        refusals = []
        for program in self.programs.values():
            try:
                leaves = program.accept(inputs)
            except GuardError as error:
                refusals.append(f"{program.name}: {error.what}")
                continue
            return program(**inputs) if torch.is_grad_enabled() else program.run(leaves)
        raise GuardError(
            "no program of the artifact was captured for these inputs: " + "; ".join(refusals),
            remedy="afd-graph compile --programs says what can be captured",
        )

    def __getattr__(self, name: str) -> LoadedProgram:
        programs = self.__dict__.get("programs", {})
        if name in programs:
            found: LoadedProgram = programs[name]
            return found
        raise AttributeError(f"no program {name!r}; there are {sorted(programs)}")

    def report(self) -> Report:
        """What was compiled and what ran so far."""
        return self._report

    def close(self) -> None:
        """Stop the FFN side and free what it holds; idempotent."""
        self._finalizer()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LoadedExperts:
    """The experts of one FFN rank.

    Attributes:
        programs: one a layer, with this rank's weights; ``num_experts`` is what the rank owns.
        first_experts: number of the first expert of each layer that the rank owns.
        manifest: of the artifact.
        rank: of this process among ``manifest.ffn_ranks``.
    """

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        programs: Sequence[FFNProgram],
        first_experts: Sequence[int],
        read: ReadWeight,
    ) -> None:
        self.manifest = manifest
        self.rank = rank
        self.programs = list(programs)
        self.first_experts = list(first_experts)
        self._read = read
        self._known = {
            (name, first, first + program.num_experts): weight
            for program, first in zip(programs, first_experts, strict=True)
            for name, weight in program.routed.weights
        }

    def routed(self, name: str, first: int, last: int) -> torch.Tensor:
        """Experts ``first`` to ``last`` (exclusive) of the stacked weight ``name``."""
        known = self._known.get((name, first, last))
        return self._read(name, (first, last)) if known is None else known

    def whole(self, name: str) -> torch.Tensor:
        """The weight ``name``, of a shared expert or of something equal for all experts."""
        return self._read(name, None)

    def summary(self) -> str:
        """``experts 0 to 31 of 26 layers, 3.10 GiB``."""
        first, program = self.first_experts[0], self.programs[0]
        weights = [t for p in self.programs for e in p.expressions() for _, t in e.weights]
        size = sum(weight.nbytes for weight in weights) / 2**30
        last = first + program.num_experts - 1
        return f"experts {first} to {last} of {len(self.programs)} layers, {size:.2f} GiB"

    def executor(self) -> FFNExecutor:
        """What runs work items of these experts."""
        executor = FFNExecutor()
        for program in self.programs:
            executor.add(program)
        return executor
