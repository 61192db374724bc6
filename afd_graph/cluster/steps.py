"""From requests to steps: which tokens a replica takes next, and how they are cut in stages.

1. Requests are dealt to the replicas in turn, in the order of their arrival.
2. A step takes waiting prompts up to its token budget; the rest of a prompt waits for the next.
3. The step is cut by the planner of the product, where there are two stages, or at equal shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from afd_graph.cluster.costs import StageLoad, StepCosts, step_costs
from afd_graph.cluster.deployment import Deployment
from afd_graph.cluster.model import ModelShape
from afd_graph.cluster.workload import Workload
from afd_graph.cost_model import AttentionWork, CostModel
from afd_graph.planner import NoSplit, plan_stages

_KEPT_PLANS = 4096


@dataclass
class _Request:
    arrival_s: float
    left: int
    done: int = 0
    first_begin_s: float | None = None


@dataclass(frozen=True)
class Step:
    """One step that a replica begins.

    Attributes:
        ready_s: when its first request was there.
        tokens: tokens in it.
        costs: of its stages.
        unsplit_reason: why it has one stage although more were asked for.
    """

    ready_s: float
    tokens: int
    costs: StepCosts
    unsplit_reason: str | None


@dataclass
class StepSource:
    """Hands each replica its steps; remembers when requests came and ended.

    Args:
        deployment: what the steps run on.
        workload: where the requests come from.

    Attributes:
        waits_s: per finished prompt, seconds from its arrival to the end of its last step. When
            all requests are there from the beginning: from the begin of its first step.
        unsplit: steps that were not split although that was asked for, by reason.
    """

    deployment: Deployment
    workload: Workload
    waits_s: list[float] = field(default_factory=list)
    unsplit: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.deployment.replicas
        self._queues: list[deque[_Request]] = [deque() for _ in range(count)]
        self._dealt = 0
        self._incoming: Iterator[tuple[float, int]] = self.workload.requests()
        self._running: list[list[_Request]] = [[] for _ in range(count)]
        self._held: dict[tuple[int, ...], tuple[StepCosts, str | None]] = {}
        self._decoding = self.workload.phase == "decode"

    def next_step(self, replica: int, now_s: float) -> Step:
        """The step that ``replica`` begins when it is free at ``now_s``."""
        if self._decoding:
            return self._next_token(replica, now_s)
        queue = self._queues[replica]
        budget = self.workload.step_tokens
        self._fill(replica, now_s, budget)
        begin = max(now_s, queue[0].arrival_s)
        self._fill(replica, begin, budget)
        counts, contexts = [], []
        running = self._running[replica]
        running.clear()
        while queue and budget and queue[0].arrival_s <= begin:
            request = queue[0]
            if request.first_begin_s is None:
                request.first_begin_s = begin
            taken = min(request.left, budget)
            counts.append(taken)
            contexts.append(request.done)
            request.left -= taken
            request.done += taken
            budget -= taken
            if request.left:
                break
            running.append(queue.popleft())
        return self._step(begin, counts, contexts)

    def end_step(self, replica: int, now_s: float) -> None:
        """Note that the last step of ``replica`` ended at ``now_s``."""
        if self._decoding:
            for request in self._running[replica]:
                request.done += 1
            return
        for request in self._running[replica]:
            begin = request.arrival_s if self.workload.rate else request.first_begin_s
            assert begin is not None
            self.waits_s.append(now_s - begin)

    def _fill(self, replica: int, until_s: float, tokens: int) -> None:
        """Deal requests until ``replica`` has one after ``until_s``, or enough for a step."""
        queue = self._queues[replica]
        waiting = sum(request.left for request in queue)
        while waiting < tokens and not (queue and queue[-1].arrival_s > until_s):
            arrival, length = next(self._incoming)
            turn = self._dealt % self.deployment.replicas
            self._dealt += 1
            self._queues[turn].append(_Request(arrival, length))
            if turn == replica:
                waiting += length

    def _next_token(self, replica: int, now_s: float) -> Step:
        running = self._running[replica]
        while len(running) < self.workload.step_tokens:
            _, length = next(self._incoming)
            running.append(_Request(0.0, 1, done=length))
        return self._step(now_s, [1] * len(running), [request.done for request in running])

    def _step(self, begin_s: float, counts: list[int], contexts: list[int]) -> Step:
        key = (*counts, -1, *contexts)
        found = self._held.get(key)
        if found is None:
            cuts, reason = cut_points(self.deployment, counts, contexts)
            loads = stage_loads(self.deployment.model, counts, contexts, cuts)
            found = step_costs(self.deployment, loads, decoding=self._decoding), reason
            if len(self._held) >= _KEPT_PLANS:
                self._held.clear()
            self._held[key] = found
        costs, reason = found
        if reason is not None:
            self.unsplit[reason] = self.unsplit.get(reason, 0) + 1
        return Step(begin_s, sum(counts), costs, reason)


def cut_points(
    deployment: Deployment, counts: Sequence[int], contexts: Sequence[int]
) -> tuple[list[int], str | None]:
    """Where a step is cut on its token axis, and why it is not cut if it is not."""
    stages, total = deployment.stages, sum(counts)
    if stages == 1:
        return [], None
    if stages == 2:
        plan = plan_stages(
            counts,
            split=deployment.cut,
            min_tokens=max(2, deployment.min_split_tokens),
            costs=attention_curve(deployment, contexts),
        )
        if isinstance(plan, NoSplit):
            return [], str(plan.reason)
        return [plan.stages[1].token_slice.start], None
    if total < max(stages, deployment.min_split_tokens):
        return [], "below_min_tokens"
    if deployment.cut == "token":
        return [-(-total * number // stages) for number in range(1, stages)], None
    work = attention_curve(deployment, contexts).attention_work(counts)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    cuts: list[int] = []
    for number in range(1, stages):
        wanted = work.total * number / stages
        cut = _token_at(work, starts, wanted)
        cuts.append(min(max(cut, (cuts[-1] if cuts else 0) + 1), total - (stages - number)))
    return cuts, None


def _token_at(work: AttentionWork, starts: Sequence[int], wanted: float) -> int:
    """The token in front of which about ``wanted`` work lies."""
    low, high = 0, starts[-1]
    request = 0
    while high - low > 1:
        middle = (low + high) // 2
        request = next(i for i in range(len(starts) - 1) if starts[i + 1] > middle)
        if work.before(request, middle - starts[request]) <= wanted:
            low = middle
        else:
            high = middle
    return low


def attention_curve(deployment: Deployment, contexts: Sequence[int]) -> CostModel:
    """The planner's cost model with this hardware's ratio of linear to quadratic work."""
    model, hardware = deployment.model, deployment.hardware
    linear = 2 * (model.attention_weights + model.gate_weights) / hardware.gemm_efficiency
    # A range of positions [lo, hi) holds (hi^2 - lo^2) / 2 pairs.
    pair = model.pair_operations(absorbed=False) / hardware.attention_efficiency / 2
    peaks = hardware.flops_8bit / hardware.flops_16bit if deployment.weights_bits == 8 else 1.0
    return CostModel(context_lens=list(contexts), linear=linear, quadratic=pair * peaks)


def stage_loads(
    model: ModelShape, counts: Sequence[int], contexts: Sequence[int], cuts: Sequence[int]
) -> list[StageLoad]:
    """The load of each stage of a step that is cut in front of the tokens ``cuts``."""
    bounds = [0, *cuts, sum(counts)]
    loads = []
    for begin, end in pairwise(bounds):
        tokens = cached = requests = 0
        pairs = scanned = 0.0
        start = 0
        for count, context in zip(counts, contexts, strict=True):
            first, last = max(begin, start), min(end, start + count)
            if last > first:
                low, high = context + first - start, context + last - start
                tokens += last - first
                requests += 1
                scanned += _pairs(low, high)
                pairs += _pairs(low, high, model.sparse_keys)
                cached += min(high, model.sparse_keys) if model.sparse_keys else high
            start += count
        loads.append(StageLoad(tokens, pairs, scanned, cached, requests))
    return loads


def _pairs(low: int, high: int, most: int = 0) -> float:
    """Queries at positions ``low`` to ``high`` times their keys, at most ``most`` keys each."""
    if most and high > most:
        return _pairs(min(low, most), most) + (high - max(low, most)) * most
    return (high * (high + 1) - low * (low + 1)) / 2
