"""What ``torch.compile`` gets back for a graph: both variants, chosen between at every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from afd_graph.errors import ConnectorError
from afd_graph.layout import StageLayout
from afd_graph.paged_step import PagedStepChooser
from afd_graph.report import Report, StepTaken
from afd_graph.runtime import Channel
from afd_graph.step import StepChooser

log = logging.getLogger(__name__)


class CompiledGraph:
    """Both variants of one graph, and the choice between them.

    Args:
        report: where steps are counted.
        channel: the attention side's channel.
        unsplit: the unsplit program, lowered.
        split: the two-stage program, lowered; None without one.
        chooser: decides for each step; None without a two-stage program.
        unsplit_reason: why there is none.
        moved: ids of the weights that the FFN side took.
    """

    def __init__(
        self,
        report: Report,
        channel: Channel,
        unsplit: Callable[[Sequence[Any]], Any],
        split: Callable[[Sequence[Any]], Any] | None,
        chooser: StepChooser | PagedStepChooser | None,
        unsplit_reason: str | None,
        moved: set[int],
    ) -> None:
        self._report = report
        self._channel = channel
        self._unsplit = unsplit
        self._split = split
        self._chooser = chooser
        self._unsplit_reason = unsplit_reason or ""
        self.moved = moved

    def run(self, inputs: list[Any]) -> Any:
        """Run one step; what it sent and did not receive is forgotten when it fails."""
        self._channel.begin_step()
        chosen = self._unsplit_reason if self._chooser is None else self._chooser.choose(inputs)
        try:
            self._channel.stage_lines = ()
            if isinstance(chosen, str):
                outputs = self._unsplit(inputs)
                if chosen not in self._report.steps_unsplit:
                    log.info("a step runs unsplit: %s (counted from now on)", chosen)
                step = StepTaken(policy=None, reason=chosen)
            else:
                assert self._split is not None
                assert self._chooser is not None
                if self._channel.layout_log:
                    self._describe_stages()
                outputs = self._split([*inputs, *chosen])
                step = StepTaken(self._chooser.policy, mid_request=self._chooser.cuts_request)
        except BaseException as error:
            failure = self._channel.connector.failure_behind(error)
            self._channel.abandon()
            if failure is not None:
                raise failure from error
            raise
        self._report.count(step)
        return [_without_base(output) for output in outputs]

    def _describe_stages(self) -> None:
        assert self._chooser is not None
        plan = self._chooser.last_plan
        if plan is None:
            return
        size, rank = self._channel.tensor_parallel
        parent = -(-plan.num_tokens // size) * size
        layout = StageLayout(plan, parent, size, rank, plan.sequence_parallel)
        self._channel.stage_lines = [layout.diagnostic(s) for s in range(len(plan.stages))]


def _without_base(output: Any) -> Any:
    """The same values as no view: a cache that is one makes Dynamo compile the next step anew.

    Its guards of a view look at the tensor behind it, and what the next step returns has none.
    """
    if isinstance(output, torch.Tensor) and output._base is not None:
        return output.detach()
    return output


def without_cut(program: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """For a two-stage program that computes the cut itself."""
    return lambda inputs: program(inputs[:-1])


def guarded(runner: Callable[..., Any], experts: Mapping[int, torch.Tensor]) -> Callable[..., Any]:
    """Refuse a step whose expert weights are not the ones that the FFN side holds."""
    bound = tuple(experts.items())

    def run(*inputs: Any) -> Any:
        for position, weight in bound:
            if inputs[position] is not weight:
                raise ConnectorError(
                    "an expert weight was replaced after the model was compiled",
                    remedy="load weights before the first call, or compile again with a new "
                    "backend after torch.compiler.reset()",
                )
        return runner(*inputs)

    return run
