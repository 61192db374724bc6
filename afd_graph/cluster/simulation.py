"""One deployment, played for a number of steps, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from afd_graph.cluster.colocated import step_times
from afd_graph.cluster.deployment import Deployment
from afd_graph.cluster.disaggregated import Fleet
from afd_graph.cluster.routing import VARIANTS, draw_shares
from afd_graph.cluster.steps import Step, StepSource
from afd_graph.cluster.workload import Workload
from afd_graph.errors import PlanError
from afd_graph.timeline import Interval, Timeline


@dataclass(frozen=True)
class Result:
    """What a deployment reached.

    Attributes:
        tokens_per_s: tokens of all replicas, per second.
        tokens_per_device_s: the same over all devices of the deployment.
        step_s: mean time of a step of one replica.
        layer_s: ``step_s`` over all layers of the model.
        first_token_s: ``{"p50": ..., "p90": ..., "p99": ...}`` seconds from the arrival of a
            prompt to its first token; ``None`` when no prompt was finished, and in decoding.
        attention_busy: share of the time in which attention devices computed, 0 to 1.
        ffn_busy: the same of the expert devices; in colocated form both are the device's.
        costs: seconds per MoE layer and stage of the first step: ``a``, ``f`` (mean rank), ``c``
            and ``d`` (link and latency), as docs/pipeline.md names them.
        steps: steps that were played, all replicas together.
        split_steps: how many of them ran in more than one stage.
        unsplit: reasons of the others, counted.
        attention_memory: bytes of weights on an attention device.
        expert_memory: bytes of experts on a device that holds some.
        timeline: the first step of replica 0, with expert rank 0; ``None`` in colocated form.
    """

    tokens_per_s: float
    tokens_per_device_s: float
    step_s: float
    layer_s: float
    first_token_s: dict[str, float] | None
    attention_busy: float
    ffn_busy: float
    costs: dict[str, float]
    steps: int
    split_steps: int
    unsplit: dict[str, int]
    attention_memory: float
    expert_memory: float
    timeline: Timeline | None = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the timeline, for JSON."""
        values = asdict(self)
        del values["timeline"]
        return values


def simulate_cluster(
    deployment: Deployment,
    workload: Workload,
    *,
    steps: int = 200,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Play ``steps`` steps on every replica; equal arguments give equal results.

    Args:
        deployment: what is simulated.
        workload: what is asked of it.
        steps: of every replica.
        progress: called with the number of steps that have ended since the last call.

    Raises:
        PlanError: no steps, a model without MoE layers, or weights that do not fit.
    """
    if steps < 1:
        raise PlanError(f"steps={steps} simulates nothing", remedy="play at least one step")
    if deployment.model.moe_layers < 1:
        raise PlanError(
            f"{deployment.model.name} has no MoE layer", remedy="there is nothing to disaggregate"
        )
    deployment.check_memory()
    tell = progress or (lambda ended: None)
    source = StepSource(deployment, workload)
    if deployment.placement == "colocated":
        return _colocated(deployment, workload, source, steps, tell)
    generator = np.random.default_rng([workload.seed, 2])
    played: list[list[tuple[Step, float]]] = [[] for _ in range(deployment.replicas)]

    def next_step(replica: int, now_s: float) -> Step | None:
        if len(played[replica]) == steps:
            return None
        step = source.next_step(replica, now_s)
        played[replica].append((step, 0.0))
        return step

    def end_step(replica: int, now_s: float) -> None:
        played[replica][-1] = played[replica][-1][0], now_s
        source.end_step(replica, now_s)
        tell(1)

    fleet = Fleet(
        layers=deployment.model.moe_layers,
        stages=deployment.stages,
        credits=deployment.credits,
        shares=draw_shares(
            deployment.model.moe_layers, deployment.expert_ranks, deployment.hottest, generator
        ),
        next_step=next_step,
        end_step=end_step,
        replica_slowness=_slowness(deployment, deployment.replicas, generator),
        rank_slowness=_slowness(deployment, deployment.expert_ranks, generator),
        jitter=deployment.jitter,
        generator=generator,
        watch=(0, 1),
    )
    fleet.run()
    end = float(fleet.end_s.max())
    rate = sum(
        sum(step.tokens for step, _ in of_one) / (of_one[-1][1] - _free_from(workload, of_one))
        for of_one in played
    )
    return _result(
        deployment,
        source,
        rate,
        [
            ended - max(step.ready_s, before)
            for of_one in played
            for (step, ended), before in zip(
                of_one, [0.0, *(end_s for _, end_s in of_one)], strict=False
            )
        ],
        [step for of_one in played for step, _ in of_one],
        float(fleet.attention_busy_s.sum() / (deployment.replicas * end)),
        float(fleet.ffn_busy_s.sum() / (deployment.expert_ranks * end)),
        tuple(fleet.intervals),
    )


def _free_from(workload: Workload, steps: Sequence[tuple[Step, float]]) -> float:
    # With arrivals the time before the first request counts too: the rate is what was served.
    return 0.0 if workload.rate else steps[0][0].ready_s


def _colocated(
    deployment: Deployment,
    workload: Workload,
    source: StepSource,
    steps: int,
    tell: Callable[[int], None],
) -> Result:
    generator = np.random.default_rng([workload.seed, 2])
    shares = draw_shares(
        deployment.model.moe_layers, deployment.expert_ranks, deployment.hottest, generator
    )
    slowness = _slowness(deployment, deployment.replicas, generator)
    now = busy = 0.0
    tokens = 0
    taken: list[float] = []
    all_steps: list[Step] = []
    for number in range(steps):
        current = [source.next_step(replica, now) for replica in range(deployment.replicas)]
        begin = max(now, max(step.ready_s for step in current))
        times = step_times(
            [step.costs for step in current],
            shares,
            number % VARIANTS,
            slowness,
            deployment.tensor_parallel,
        )
        now = begin + times.total
        taken += [times.total] * len(current)
        busy += float(times.computing.mean())
        tokens += sum(step.tokens for step in current)
        all_steps += current
        for replica in range(deployment.replicas):
            source.end_step(replica, now)
        tell(deployment.replicas)
    share = busy / now
    return _result(deployment, source, tokens / now, taken, all_steps, share, share, ())


def _slowness(
    deployment: Deployment, devices: int, generator: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    slow = np.ones(devices)
    count = round(deployment.stragglers * devices)
    if deployment.stragglers and not count:
        count = 1
    slow[generator.permutation(devices)[:count]] = deployment.slowdown
    return slow


def _result(
    deployment: Deployment,
    source: StepSource,
    rate: float,
    step_seconds: Sequence[float],
    steps: Sequence[Step],
    attention_busy: float,
    ffn_busy: float,
    intervals: tuple[Interval, ...],
) -> Result:
    step_s = float(np.mean(step_seconds))
    first = steps[0].costs
    ranks = deployment.expert_ranks
    if deployment.placement == "colocated":
        ranks = deployment.tensor_parallel
    waits = np.array(source.waits_s)
    stages = "unsplit" if deployment.stages == 1 else f"{deployment.stages} stages"
    credits = "one credit" if deployment.credits == 1 else f"{deployment.credits} credits"
    title = stages if deployment.stages == 1 else f"{stages}, {credits}"
    return Result(
        tokens_per_s=rate,
        tokens_per_device_s=rate / deployment.devices,
        step_s=step_s,
        layer_s=step_s / deployment.model.layers,
        first_token_s=(
            {f"p{p}": float(np.percentile(waits, p)) for p in (50, 90, 99)} if waits.size else None
        ),
        attention_busy=attention_busy,
        ffn_busy=ffn_busy,
        costs={
            "a": float(np.mean(first.attention) + np.mean(first.after)),
            "f": float(np.mean(np.maximum(np.array(first.ffn) / ranks, first.ffn_floor)))
            + first.ffn_fixed,
            "c": float(np.mean(first.out)) + first.latency_out,
            "d": float(np.mean(first.back)) + first.latency_back,
        },
        steps=len(steps),
        split_steps=sum(step.costs.stages > 1 for step in steps),
        unsplit=dict(source.unsplit),
        attention_memory=deployment.attention_memory,
        expert_memory=deployment.expert_memory,
        timeline=Timeline(intervals, title) if intervals else None,
    )
