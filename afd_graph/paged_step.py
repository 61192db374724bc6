"""The choice before a step of many requests over paged caches, and the metadata of its stages.

The graph of such a step gets its metadata as inputs, and the host knows the same in integers. For
a split step the host also has to say what each stage's attention reads. So before it calls the
model it hands the step's :class:`~afd_graph.metadata.AttentionMetadata` over
(:meth:`afd_graph.AFDBackend.step_metadata`), and this module

1. plans the cut from the real per-request counts, by the configured policy, with the prefix-cache
   hazard checked (:mod:`planner`, :mod:`hazard`);
2. cuts the graph's own metadata inputs for both stages, by the host's integers, so that no stage
   shares a buffer with the other or with the step.

Without metadata, a plan, or a cut free of hazards, the step runs unsplit, with that reason.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import sympy
import torch
from torch import fx

from afd_graph.config import AFDConfig
from afd_graph.errors import PlanError
from afd_graph.hazard import PrefixHazard
from afd_graph.metadata import AttentionMetadata
from afd_graph.paged_attention import PAGED_OPERATORS, paged_operator
from afd_graph.passes.sizes import size_of, size_of_expression
from afd_graph.passes.token_flow import TokenFlow
from afd_graph.planner import GIVEN, NoSplit, NoSplitReason, StagePlan, plan_at, plan_stages
from afd_graph.step import SizeReader

log = logging.getLogger(__name__)

NOT_COMPILED = "sizes_not_compiled"
"""Reason of a step whose stages have sizes that the compiled code was not made for."""


class PagedStepChooser:
    """Decides for each step of one graph.

    Args:
        graph: the unsplit graph, whose inputs a step receives.
        flow: its token flow, of mode ``paged``.
        config: the split policy.
        metadata: returns what the host handed over for the step that is about to run, or None.
        plan: a policy of the user instead, from (real tokens, real tokens) to the cut, or to the
            reason for none.
        fits: whether the two-stage program was compiled for a step, given all its inputs.

    Attributes:
        policy: the policy that made the last cut.
        last_plan: the plan of the last split step.
    """

    def __init__(
        self,
        graph: fx.Graph,
        flow: TokenFlow,
        config: AFDConfig,
        metadata: Callable[[], AttentionMetadata | None],
        plan: Callable[[int, int], int | str] | None = None,
        fits: Callable[[Sequence[Any]], bool] | None = None,
    ) -> None:
        reader = SizeReader(graph)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._fields = {field: inputs.index(node) for field, node in flow.metadata.items()}
        self._rows = reader.read(flow.axis.extent)
        attention = next(node for node in graph.nodes if paged_operator(node))
        cache = attention.args[PAGED_OPERATORS[attention.target].cache]
        self._block_size = reader.read(size_of(cache.meta["val"].shape[1]))
        self._config = config
        self._metadata = metadata
        self._plan = plan
        self.policy = GIVEN if plan is not None else config.split
        self.last_plan: StagePlan | None = None
        self._fits = fits

    @property
    def cuts_request(self) -> bool:
        """Whether the last cut went through a request."""
        return self.last_plan is not None and self.last_plan.cuts_request

    def choose(self, args: Sequence[Any]) -> tuple[Any, ...] | str:
        """What the two-stage program takes behind the inputs of the step, or why not to run it.

        Raises:
            PlanError: the metadata is not that of the inputs, or lacks a field.
        """
        metadata = self._metadata()
        if metadata is None:
            return str(NoSplitReason.METADATA_MISSING)
        given = {field: args[position] for field, position in self._fields.items()}
        step = _HostStep.of(metadata, given)
        plan = self._planned(step, self._block_size(args))
        if isinstance(plan, NoSplit):
            log.debug("step of %s: unsplit, %s: %s", step.counts, plan.reason, plan.detail)
            return str(plan.reason)
        if isinstance(plan, str):
            return plan
        plan.check_parent(self._rows(args))
        self.last_plan, self.policy = plan, plan.policy
        log.debug(
            "step of %s: %s, stages %s",
            step.counts,
            plan.policy,
            [(stage.request_slice, stage.token_slice) for stage in plan.stages],
        )
        parent = AttentionMetadata(
            query_start_loc_cpu=step.starts, seq_lens_cpu=step.seq_lens, **given
        )
        stages = [parent.for_stage(stage) for stage in plan.stages]
        chosen = (
            plan.num_tokens,
            *(stage.get(field) for stage in stages for field in self._fields),
            plan.stages[0].actual_tokens,
        )
        if self._fits is not None and not self._fits([*args, *chosen]):
            return NOT_COMPILED
        return chosen

    def _planned(self, step: _HostStep, block_size: int) -> StagePlan | NoSplit | str:
        hazards = PrefixHazard(
            query_start_loc=step.starts,
            seq_lens=step.seq_lens,
            block_table=step.block_table,
            slot_mapping=step.slot_mapping,
            block_size=block_size,
        )
        if self._plan is not None:
            cut = self._plan(step.starts[-1], step.starts[-1])
            if isinstance(cut, str):
                return cut
            plan = plan_at(step.counts, cut)
            hazard = hazards(plan)
            return NoSplit(NoSplitReason.PREFIX_HAZARD, str(hazard)) if hazard else plan
        costs = self._config.costs
        if costs is not None:
            costs = dataclasses.replace(costs, context_lens=step.context_lens)
        return plan_stages(
            step.counts,
            split=self._config.split,
            min_tokens=self._config.min_split_tokens,
            costs=costs,
            hazards=hazards,
        )


class CompiledSizes:
    """Whether a step has the sizes that a compiler assumed for the inputs that the split adds.

    Args:
        graph: the two-stage graph.
        conditions: what the compiler assumed, over the graph's sizes.
    """

    def __init__(self, graph: fx.Graph, conditions: Sequence[sympy.Expr]) -> None:
        reader = SizeReader(graph)
        self._condition = sympy.And(*conditions)
        self._sizes = {
            symbol: reader.read(size_of_expression(symbol))
            for symbol in self._condition.free_symbols
        }
        self._known: dict[tuple[int, ...], bool] = {}

    def __call__(self, args: Sequence[Any]) -> bool:
        """Whether all conditions hold for the inputs of a step."""
        values = tuple(read(args) for read in self._sizes.values())
        if values not in self._known:
            numbers = map(sympy.Integer, values)
            replaced = dict(zip(self._sizes, numbers, strict=True))
            self._known[values] = bool(self._condition.xreplace(replaced))
        return self._known[values]


@dataclasses.dataclass(frozen=True)
class _HostStep:
    """The real requests of a step in host memory, without the padding of the inputs."""

    counts: list[int]
    starts: list[int]
    seq_lens: list[int]
    block_table: Any
    slot_mapping: Any

    @property
    def context_lens(self) -> list[int]:
        return [n - count for n, count in zip(self.seq_lens, self.counts, strict=True)]

    @classmethod
    def of(cls, metadata: AttentionMetadata, given: Mapping[str, torch.Tensor]) -> _HostStep:
        counts = list(metadata.query_lens)
        while counts and counts[-1] == 0:
            counts.pop()
        step = cls(
            counts=counts,
            starts=list(accumulate(counts, initial=0)),
            seq_lens=metadata.host_seq_lens()[: len(counts)],
            block_table=_first(metadata, given, "block_table", "block_table_tensor")[: len(counts)],
            slot_mapping=_first(metadata, given, "slot_mapping"),
        )
        for field, mine in (("query_start_loc", step.starts), ("seq_lens", step.seq_lens)):
            tensor = given[field]
            # Reading a device tensor here would wait for the step before.
            if tensor.device.type == "cpu" and tensor[: len(mine)].tolist() != mine:
                raise PlanError(
                    f"the metadata of this step is not that of its inputs: {field}={mine}, "
                    f"the graph was given {tensor.tolist()}",
                    remedy="hand over the metadata of the step that is being run",
                )
        return step


def _first(metadata: AttentionMetadata, given: Mapping[str, torch.Tensor], *names: str) -> Any:
    """The host's copy of a field, or the graph's input when the host gave none."""
    for name in names:
        if metadata.get(name) is not None:
            return metadata.get(name)
    return given[names[0]]
