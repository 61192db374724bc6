"""The choice made on the host before every step: two stages or one, and where the cut goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from afd_graph.config import AFDConfig
from afd_graph.cost_model import CostModel
from afd_graph.errors import PassError, PlanError
from afd_graph.passes.causality import Offset
from afd_graph.passes.sizes import Size, product, shape_of
from afd_graph.passes.token_flow import TokenFlow
from afd_graph.planner import GIVEN, NoSplit, NoSplitReason, StagePlan, plan_at, plan_stages
from afd_graph.size_expressions import SizeExpressionError, evaluator, tree_of

CACHES_DIFFER = "cache_lengths_differ"
"""Reason of a step whose caches do not hold the same number of tokens."""

MASK_NOT_CAUSAL = "mask_not_causal"
"""Reason of a step whose attention mask, an input, lets a query see a later key."""

NO_TOKENS = "no_tokens"
"""Reason of a step without any token."""


class SizeReader:
    """Reads symbolic sizes from the inputs of a step."""

    def __init__(self, graph: fx.Graph) -> None:
        # A symbol is an input of its own, or a dimension of an input.
        self.places: dict[Any, list[Any]] = {}
        values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
        for i, value in enumerate(values):
            if isinstance(value, torch.SymInt):
                self.places.setdefault(value.node.expr, ["input", i])
        for i, value in enumerate(values):
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt):
                    self.places.setdefault(size.node.expr, ["dim", i, dim])

    def tree(self, size: Size) -> Any:
        """Where ``size`` is read from, as JSON values (:mod:`size_expressions`)."""
        try:
            factors = [tree_of(factor, self.places) for factor in size.factors()]
        except SizeExpressionError as error:
            raise PassError(f"size {size} is not made of input sizes of the graph") from error
        return ["mul", size.coefficient, *factors] if factors else size.coefficient

    def offset(self, offset: Offset, terms: Sequence[int]) -> Any:
        """A number of keys, of which scalar inputs are ``terms``, as JSON values."""
        try:
            constant = tree_of(offset.constant, self.places)
        except SizeExpressionError as error:
            raise PassError(f"offset {offset.constant} is not made of input sizes") from error
        return ["add", constant, *(["input", term] for term in terms)] if terms else constant

    def read(self, size: Size) -> Callable[[Sequence[Any]], int]:
        """A function from the inputs of a step to the value of ``size``."""
        return evaluator(self.tree(size))


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What the choice needs to know of a graph; trees of :mod:`size_expressions`.

    Attributes:
        mode: of the token flow.
        extent: of the token axis.
        tokens: of the step.
        equal: pairs of scalar inputs that must be equal.
        masks: input masks that must be causal, and how many keys lie before the first query.
    """

    mode: str
    extent: Any
    tokens: Any
    equal: tuple[tuple[int, int], ...] = ()
    masks: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def of(cls, graph: fx.Graph, flow: TokenFlow) -> StepSizes:
        """The sizes of a graph, from its token flow."""
        reader = SizeReader(graph)
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        return cls(
            flow.mode,
            reader.tree(flow.axis.extent),
            reader.tree(product(shape_of(flow.seed.meta["val"])[:-1])),
            tuple((inputs.index(a), inputs.index(b)) for a, b in flow.equal_inputs),
            tuple(
                (
                    inputs.index(checked.mask),
                    reader.offset(checked.offset, [inputs.index(t) for t in checked.offset.terms]),
                )
                for checked in flow.checked_masks
            ),
        )


class StepChooser:
    """Decides for each step; the decision for equal sizes is remembered.

    Args:
        sizes: of the graph whose inputs a step receives.
        config: the split policy.
        plan: a policy of the user instead, from (extent of the token axis, tokens of the step)
            to the cut, or to the reason for none.
        group_size: ranks of the tensor-parallel group, for the log.

    Attributes:
        policy: the policy that made the last cut; that of the configuration, or what it comes to
            on this axis: between requests of equal length there is no other cut than ``request``,
            through all of them none but ``token``.
        last_plan: the plan of the last split step; kept only for the layout log.
        cuts_request: whether a cut goes through requests: through all, or none in ``batch`` mode.
    """

    def __init__(
        self,
        sizes: StepSizes,
        config: AFDConfig,
        plan: Callable[[int, int], int | str] | None = None,
        group_size: int = 1,
    ) -> None:
        self.group_size = group_size
        self._extent = evaluator(sizes.extent)
        self._tokens = evaluator(sizes.tokens)
        self._mode = sizes.mode
        self._config = config
        self._plan = plan
        self._decided: dict[tuple[int, int], tuple[int | str, str]] = {}
        self.policy = GIVEN if plan is not None else config.split
        self.last_plan: StagePlan | None = None
        self.cuts_request = sizes.mode != "batch"
        self._equal = sizes.equal
        self._masks = [(position, evaluator(offset)) for position, offset in sizes.masks]

    def choose(self, args: Sequence[Any]) -> tuple[Any, ...] | str:
        """What the two-stage program takes behind the inputs of the step, or why not to run it."""
        cut = self.cut(args)
        if isinstance(cut, str):
            return cut
        if not self._masks_are_causal(args):
            return MASK_NOT_CAUSAL
        if self._config.layout_log:
            self.last_plan = self._as_plan(cut, self._extent(args), self._tokens(args))
        return (cut,)

    def _masks_are_causal(self, args: Sequence[Any]) -> bool:
        """Look at the values of input masks, once a mask whatever number of layers it is for."""
        least: dict[int, int] = {}
        for position, offset in self._masks:
            value = offset(args)
            least[position] = min(value, least.get(position, value))
        for position, diagonal in least.items():
            mask = args[position]
            visible = mask if mask.dtype == torch.bool else mask != -torch.inf
            if bool(visible.triu(diagonal + 1).any()):
                return False
        return True

    def _as_plan(self, cut: int, extent: int, tokens: int) -> StagePlan:
        """The cut in tokens, for who reads the log; a sequence cut counts all sequences."""
        each = tokens // extent
        plan = plan_at([tokens], cut * each)
        group = self.group_size if self._config.sequence_parallel else 1
        return StagePlan(
            tuple(
                dataclasses.replace(
                    stage, input_tokens=-(-stage.actual_tokens // (each * group)) * each * group
                )
                for stage in plan.stages
            ),
            policy=self._config.split,
            sequence_parallel=group > 1,
        )

    def cut(self, args: Sequence[Any]) -> int | str:
        """The extent of stage 0, or the reason why the step runs unsplit."""
        for a, b in self._equal:
            if int(args[a]) != int(args[b]):
                return CACHES_DIFFER
        key = (self._extent(args), self._tokens(args))
        if self._plan is not None:
            return self._checked(self._plan(*key), key[0])
        decision = self._decided.get(key)
        if decision is None:
            decision = self._decided[key] = self.decide(*key)
        cut, self.policy = decision
        return cut

    @staticmethod
    def _checked(cut: int | str, extent: int) -> int | str:
        if not isinstance(cut, (int, str)) or (isinstance(cut, int) and not 0 < cut < extent):
            raise PlanError(
                f"the plan cuts an axis of {extent} at {cut!r}",
                remedy=f"return a cut from 1 to {extent - 1}, or a reason for not cutting",
            )
        return cut

    def decide(self, extent: int, tokens: int) -> tuple[int | str, str]:
        """The cut for a token axis of ``extent`` in a step of ``tokens`` tokens, and its policy.

        In ``sequence`` mode the cut goes through every sequence at the same place; in ``batch``
        mode every entry of the axis is one request of equal length. What the caches hold is not
        known here: the work of ``cost`` and ``auto`` is that of fresh requests.
        """
        if tokens == 0:
            return NO_TOKENS, self._config.split
        if 2 <= tokens < self._config.min_split_tokens:
            return str(NoSplitReason.BELOW_MIN_TOKENS), self._config.split
        others = max(1, tokens // max(extent, 1))
        if self._mode == "batch":
            counts, split = [others] * extent, self._config.split
            if split in ("token", "cost") and others > 1:
                split = "request"  # A token cut would go through a row; rows are equal work.
            plan = plan_stages(counts, split=split, alignment=others, costs=self._config.costs)
        else:
            counts, split = [extent], self._config.split
            if split == "request":
                split = "token"
            plan = plan_stages(counts, split=split, costs=self._costs(others))
        if isinstance(plan, NoSplit):
            return str(plan.reason), split
        stage = plan.stages[0]
        cut = stage.request_slice.stop if self._mode == "batch" else stage.actual_tokens
        return cut, plan.policy

    def _costs(self, sequences: int) -> CostModel | None:
        """Costs of a token axis whose every entry stands for one token of each sequence."""
        costs = self._config.costs
        if costs is None:
            return None
        per_token = ("linear", "quadratic", "experts", "dispatch", "combine")
        scaled = {name: getattr(costs, name) * sequences for name in per_token}
        return dataclasses.replace(costs, **scaled)
