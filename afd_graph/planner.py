"""The stage planner: where one step is cut in two token stages, or why it is not.

Host integers in, slices out: no torch, no collective, no state. All tensor-parallel ranks of a
replica see the same input and therefore decide the same; another replica may decide otherwise.

1. validate the inputs, in the recorded order (semantics 2.2);
2. find the cut on the flattened, request-major token axis (2.3 request, 2.4 token, and the
   ``cost`` and ``auto`` policies, which are ours), moved to a multiple of ``alignment``;
3. describe both sides of the cut as stages (2.4, 2.7);
4. ask ``hazards`` whether the step may be cut there at all.

A step that is not cut always says why, in a closed set of reasons: callers count them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from operator import index
from typing import Any

from afd_graph.cost_model import AttentionWork, CostModel
from afd_graph.errors import PlanError

POLICIES = ("none", "token", "request", "cost", "auto")

GIVEN = "given"
"""What stands for the policy where the user's own plan made the cut."""


class NoSplitReason(str, Enum):
    """Why a step runs as one stage. Closed: counters and reports key on these values."""

    DISABLED = "disabled"
    METADATA_MISSING = "metadata_missing"
    SINGLE_TOKEN = "single_token"
    BELOW_MIN_TOKENS = "below_min_tokens"
    SINGLE_REQUEST = "single_request"
    TENSOR_PARALLEL_REQUIRED = "tensor_parallel_required"
    ALIGNMENT = "alignment"
    PREFIX_HAZARD = "prefix_hazard"
    UNSPLIT_FASTER = "unsplit_faster"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class NoSplit:
    """The step is not cut.

    Attributes:
        reason: which of the closed set of reasons.
        detail: the same for a person, with the numbers of this step.
    """

    reason: NoSplitReason
    detail: str


@dataclass(frozen=True)
class Stage:
    """One ordered part of the real tokens of a step.

    Attributes:
        request_slice: requests with at least one token here. A request that is cut in the middle
            is the last of one stage and the first of the next.
        token_slice: real tokens, on the parent's flattened token axis.
        input_tokens: physical rows, with the stage's own trailing padding.
        actual_tokens: real rows, the extent of ``token_slice``.
    """

    request_slice: slice
    token_slice: slice
    input_tokens: int
    actual_tokens: int

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """Everything that distinguishes this stage, hashable: use it in every cache key."""
        requests, tokens = self.request_slice, self.token_slice
        return requests.start, requests.stop, tokens.start, tokens.stop, self.input_tokens

    def __hash__(self) -> int:
        # Slices are not hashable before Python 3.12.
        return hash(self.key)

    @property
    def padding(self) -> int:
        """Number of trailing pad rows."""
        return self.input_tokens - self.actual_tokens


@dataclass(frozen=True)
class StagePlan:
    """The stages of one step, checked on construction (semantics 2.7).

    Attributes:
        stages: ordered stages; the planner makes two, the invariants hold for any number.
        policy: the policy that chose the cut (for ``auto``, the one it picked).
        detail: why, for a person; empty unless there was a choice.
        sequence_parallel: whether ``input_tokens`` was padded for sequence parallelism.

    Raises:
        PlanError: the stages do not tile the real tokens in order, or a stage is empty, or it has
            fewer physical than real rows.
    """

    stages: tuple[Stage, ...]
    policy: str = "token"
    detail: str = ""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check_stages(self.stages)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the step."""
        return self.stages[-1].token_slice.stop

    @property
    def cuts_request(self) -> bool:
        """Whether some request has tokens in more than one stage."""
        return any(
            after.request_slice.start < before.request_slice.stop
            for before, after in pairwise(self.stages)
        )

    def check_parent(self, parent_tokens: int) -> None:
        """Refuse a parent batch with fewer physical rows than the plan has real tokens.

        Raises:
            PlanError: ``parent_tokens`` does not cover the plan.
        """
        if parent_tokens < self.num_tokens:
            raise PlanError(
                "the parent's rows must cover every real token: "
                f"parent_tokens={parent_tokens}, num_tokens={self.num_tokens}",
                remedy="plan from the counts of the step that is being run",
            )

    def without_sequence_parallel(self) -> StagePlan:
        """Return the same cut without stage padding, for a step that runs without it (7.3)."""
        return replace(
            self,
            stages=tuple(replace(s, input_tokens=s.actual_tokens) for s in self.stages),
            sequence_parallel=False,
        )


def check_stages(stages: Sequence[Stage]) -> None:
    """Check the invariants of semantics 2.7 on any sequence of stages.

    Raises:
        PlanError: naming the first stage that breaks one, and the values.
    """
    if not stages:
        raise PlanError("a stage plan needs at least one stage", remedy="use NoSplit instead")
    next_token, next_request = 0, 0
    for number, stage in enumerate(stages):
        tokens, requests = stage.token_slice, stage.request_slice
        if tokens.start != next_token or tokens.stop <= tokens.start:
            _broken(number, f"token slices must tile [0, N) in order, got {tokens}")
        if stage.actual_tokens != tokens.stop - tokens.start:
            _broken(number, f"actual_tokens={stage.actual_tokens} is not the extent of {tokens}")
        if stage.input_tokens < stage.actual_tokens:
            _broken(
                number,
                f"input_tokens={stage.input_tokens} cannot hold "
                f"actual_tokens={stage.actual_tokens}",
            )
        shares_request = number > 0 and requests.start == next_request - 1
        if requests.stop <= requests.start or not (
            requests.start == next_request or shares_request
        ):
            _broken(number, f"request slices must be ordered without a gap, got {requests}")
        next_token, next_request = tokens.stop, requests.stop


def _broken(number: int, what: str) -> None:
    raise PlanError(what, stage=number, remedy="build plans with plan_stages")


def plan_stages(
    num_scheduled_tokens: Iterable[int] | None,
    *,
    split: str,
    sequence_parallel: bool = False,
    tensor_parallel_size: int = 1,
    require_tensor_parallel: bool = False,
    min_tokens: int = 2,
    alignment: int = 1,
    costs: CostModel | None = None,
    hazards: Callable[[StagePlan], Any] | None = None,
) -> StagePlan | NoSplit:
    """Cut one step in two token stages, or say why not.

    Args:
        num_scheduled_tokens: tokens of each scheduled request, in batch order, all positive;
            ``None`` when the host has no per-request counts for this step.
        split: ``token`` (middle of the token axis, the odd token goes to stage 0), ``request``
            (the most balanced request boundary), ``cost`` (equal attention work, at token
            granularity), ``auto`` (the fastest of unsplit and the other three by the pipeline
            model) or ``none``.
        sequence_parallel: pad each stage to a multiple of ``tensor_parallel_size``.
        tensor_parallel_size: tensor-parallel ranks of this replica.
        require_tensor_parallel: refuse to cut inside requests when there is one such rank, as
            the eager reference does.
        min_tokens: steps with fewer real tokens are not cut.
        alignment: stage 1 starts at a multiple of this many tokens. Policies that cut inside
            requests move to the best such token; ``request`` only takes boundaries that are one.
        costs: cost model; required by ``cost`` and ``auto``.
        hazards: called with a candidate plan; a true result means that the plan must not run,
            and its ``str`` becomes the detail.

    Returns:
        A plan of exactly two non-empty stages, or the reason why there is none.

    Raises:
        PlanError: an invalid argument. A count that is not positive (or an empty batch) is found
            first, then ``tensor_parallel_size``, then ``split``, then the rest.
    """
    if num_scheduled_tokens is None:
        return NoSplit(NoSplitReason.METADATA_MISSING, "this step has no per-request token counts")
    counts = _validated_counts(num_scheduled_tokens)
    _validate_options(split, tensor_parallel_size, min_tokens, alignment, costs)

    starts = list(accumulate(counts, initial=0))
    total = starts[-1]
    if split == "none":
        return NoSplit(NoSplitReason.DISABLED, "split is 'none'")
    if total < 2:
        return NoSplit(NoSplitReason.SINGLE_TOKEN, "one token cannot be cut in two stages")
    if total < min_tokens:
        return NoSplit(
            NoSplitReason.BELOW_MIN_TOKENS, f"{total} tokens are fewer than min_tokens={min_tokens}"
        )

    cutter = _Cutter(
        starts,
        alignment=alignment,
        work=costs.attention_work(counts) if costs and split in ("cost", "auto") else None,
        inside_requests=tensor_parallel_size > 1 or not require_tensor_parallel,
    )
    padding_unit = tensor_parallel_size if sequence_parallel else 1

    def plan_at(cut: int, policy: str, detail: str = "") -> StagePlan:
        return StagePlan(
            _stages_at(starts, cut, padding_unit),
            policy=policy,
            detail=detail,
            sequence_parallel=sequence_parallel,
        )

    if split == "auto":
        assert costs is not None
        return _fastest(cutter, costs, padding_unit, plan_at, hazards)
    cut = cutter.cut(split)
    if isinstance(cut, NoSplit):
        return cut
    plan = plan_at(cut, split)
    hazard = hazards(plan) if hazards is not None else None
    return NoSplit(NoSplitReason.PREFIX_HAZARD, str(hazard)) if hazard else plan


def plan_at(num_scheduled_tokens: Iterable[int], cut: int) -> StagePlan:
    """Describe a step that is cut in front of token ``cut``, wherever that is.

    Raises:
        PlanError: a count that is not positive, or a cut that leaves a stage empty.
    """
    starts = list(accumulate(_validated_counts(num_scheduled_tokens), initial=0))
    if not 0 < cut < starts[-1]:
        raise PlanError(
            f"the plan cuts a step of {starts[-1]} tokens at {cut}",
            remedy=f"cut at 1 to {starts[-1] - 1}, or give a reason for not cutting",
        )
    return StagePlan(_stages_at(starts, cut, 1), policy=GIVEN)


def _validated_counts(num_scheduled_tokens: Iterable[int]) -> tuple[int, ...]:
    # An array's tolist is one call; iterating it would make a scalar object per request.
    tolist = getattr(num_scheduled_tokens, "tolist", None)
    try:
        counts = tuple(map(index, tolist() if tolist else num_scheduled_tokens))
    except TypeError as error:
        raise PlanError(
            f"Scheduled token counts must be integers: {error}",
            remedy="pass one integer per scheduled request",
        ) from error
    if not counts or min(counts) <= 0:
        raise PlanError(
            f"Scheduled token counts must all be positive: scheduled_tokens={counts}",
            remedy="leave out requests without tokens; do not plan an empty step",
        )
    return counts


def _validate_options(
    split: str,
    tensor_parallel_size: int,
    min_tokens: int,
    alignment: int,
    costs: CostModel | None,
) -> None:
    if tensor_parallel_size <= 0:
        raise PlanError(
            f"tensor_parallel_size must be positive: tensor_parallel_size={tensor_parallel_size}",
            remedy="pass the size of this replica's tensor-parallel group",
        )
    if split not in POLICIES:
        raise PlanError(
            f"Unsupported split policy: {split!r}",
            remedy=f"use one of {', '.join(POLICIES)}",
        )
    for name, value in (("min_tokens", min_tokens), ("alignment", alignment)):
        if value < 1:
            raise PlanError(
                f"{name} must be positive: {name}={value}", remedy="leave it at its default"
            )
    if costs is None and split in ("cost", "auto"):
        raise PlanError(
            f"split={split!r} needs a cost model: costs=None",
            remedy="pass costs=CostModel(...), or use the token policy",
        )


class _Cutter:
    """Finds the cut of each policy on one step's token axis."""

    def __init__(
        self,
        starts: Sequence[int],
        *,
        alignment: int,
        work: AttentionWork | None,
        inside_requests: bool,
    ) -> None:
        self.starts = starts
        self.total = starts[-1]
        self.alignment = alignment
        self.work = work
        self.inside_requests = inside_requests

    def cut(self, policy: str) -> int | NoSplit:
        """First token of stage 1 under ``policy``."""
        if policy == "request":
            return self._request()
        if not self.inside_requests:
            return NoSplit(
                NoSplitReason.TENSOR_PARALLEL_REQUIRED,
                f"split={policy!r} needs tensor_parallel_size > 1 here",
            )
        if self.alignment >= self.total:
            return self._unaligned("no token")
        if policy == "token":
            return self._token()
        return self._cost()

    def _unaligned(self, what: str) -> NoSplit:
        return NoSplit(
            NoSplitReason.ALIGNMENT,
            f"{what} inside [1, {self.total}) is a multiple of alignment={self.alignment}",
        )

    def _request(self) -> int | NoSplit:
        starts, total = self.starts, self.total
        requests = len(starts) - 1
        if requests < 2:
            return NoSplit(
                NoSplitReason.SINGLE_REQUEST, "a single request has no boundary to cut at"
            )
        if self.alignment == 1:
            # Starts strictly increase, so the best boundary is a neighbour of the middle.
            middle = bisect_left(starts, total / 2)
            candidates: Iterable[int] = {
                min(max(middle - 1, 1), requests - 1),
                min(max(middle, 1), requests - 1),
            }
        else:
            candidates = [k for k in range(1, requests) if starts[k] % self.alignment == 0]
        best = min(
            candidates,
            key=lambda k: (abs(2 * starts[k] - total), abs(2 * k - requests), k),
            default=None,
        )
        return self._unaligned("no request boundary") if best is None else starts[best]

    def _aligned_neighbours(self, cut: int) -> tuple[int, int]:
        """Multiples of the alignment around ``cut`` that leave both stages non-empty."""
        last = (self.total - 1) // self.alignment * self.alignment
        below = cut // self.alignment * self.alignment
        return min(max(below, self.alignment), last), min(below + self.alignment, last)

    def _token(self) -> int:
        middle = (self.total + 1) // 2
        if self.alignment == 1:
            return middle
        return min(
            self._aligned_neighbours(middle),
            key=lambda cut: (abs(cut - middle), abs(2 * cut - self.total), -cut),
        )

    def _cost(self) -> int:
        work = self.work
        assert work is not None
        target = work.total / 2
        request = bisect_right(work.cumulative, target, hi=len(self.starts) - 1) - 1
        low, high = 0, self.starts[request + 1] - self.starts[request]
        while high - low > 1:
            middle = (low + high) // 2
            if work.before(request, middle) <= target:
                low = middle
            else:
                high = middle
        # A tie leaves the odd token in stage 0, as in the token policy.
        return min(
            self._aligned_neighbours(self.starts[request] + low),
            key=lambda cut: (abs(2 * self.work_before(cut) - work.total), -cut),
        )

    def work_before(self, cut: int) -> float:
        """Attention work of stage 0 for this cut, in the work curve's units."""
        assert self.work is not None
        request = bisect_right(self.starts, cut) - 1
        if request == len(self.starts) - 1:
            return self.work.total
        return self.work.before(request, cut - self.starts[request])


def _stages_at(starts: Sequence[int], cut: int, padding_unit: int) -> tuple[Stage, Stage]:
    """Describe both sides of ``cut``; a request that contains it belongs to both."""
    total = starts[-1]
    first_stop = bisect_left(starts, cut)
    second_start = bisect_right(starts, cut) - 1
    return (
        Stage(slice(0, first_stop), slice(0, cut), _ceil_to(cut, padding_unit), cut),
        Stage(
            slice(second_start, len(starts) - 1),
            slice(cut, total),
            _ceil_to(total - cut, padding_unit),
            total - cut,
        ),
    )


def _ceil_to(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _fastest(
    cutter: _Cutter,
    costs: CostModel,
    padding_unit: int,
    plan_at: Callable[[int, str, str], StagePlan],
    hazards: Callable[[StagePlan], Any] | None,
) -> StagePlan | NoSplit:
    """The ``auto`` policy: the fastest cut that beats the unsplit step and has no hazard."""
    work, total = cutter.work, cutter.total
    assert work is not None
    unsplit = costs.unsplit_seconds(
        costs.stage_times(work.total * work.unit, _ceil_to(total, padding_unit))
    )
    refusals: list[NoSplit] = []
    timed: dict[int, tuple[float, str]] = {}
    # On equal time the earlier policy wins: a request boundary leaves every request whole.
    for policy in ("request", "token", "cost"):
        cut = cutter.cut(policy)
        if isinstance(cut, NoSplit):
            refusals.append(cut)
        elif cut not in timed:
            first = cutter.work_before(cut)
            stages = _stages_at(cutter.starts, cut, padding_unit)
            seconds = costs.pipeline_seconds(
                costs.stage_times(first * work.unit, stages[0].input_tokens),
                costs.stage_times((work.total - first) * work.unit, stages[1].input_tokens),
            )
            timed[cut] = seconds, policy
    if not timed:
        return refusals[-1]

    predicted = ", ".join(
        [f"none {unsplit:.4g} s"]
        + [f"{policy} at {cut} {seconds:.4g} s" for cut, (seconds, policy) in timed.items()]
    )
    hazard: Any = None
    for cut, (seconds, policy) in sorted(timed.items(), key=lambda item: item[1][0]):
        if seconds >= unsplit:
            break
        plan = plan_at(cut, policy, f"predicted: {predicted}")
        hazard = hazards(plan) if hazards is not None else None
        if not hazard:
            return plan
    if hazard:
        return NoSplit(NoSplitReason.PREFIX_HAZARD, str(hazard))
    return NoSplit(NoSplitReason.UNSPLIT_FASTER, f"predicted: {predicted}")
