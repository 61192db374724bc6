"""Which deployment is best: devices per side, and whether to split a step at all.

Both searches play a few steps of every candidate with the same seed, so differences are the
candidates' and not the draw's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from afd_graph.cluster.deployment import Deployment
from afd_graph.cluster.simulation import Result, simulate_cluster
from afd_graph.cluster.workload import Workload
from afd_graph.errors import PlanError

_STEPS = 4


@dataclass(frozen=True)
class Candidate:
    """A division of the devices, and what it reached.

    Attributes:
        replicas: attention replicas.
        expert_ranks: expert devices.
        tokens_per_s: of the whole deployment.
        attention_busy: share of the time in which attention devices computed.
        ffn_busy: the same of the expert devices.
        idle_devices: devices that this division has no use for.
        first_token_s: median seconds to the first token, where prompts ended.
    """

    replicas: int
    expert_ranks: int
    tokens_per_s: float
    attention_busy: float
    ffn_busy: float
    idle_devices: int
    first_token_s: float | None


def divisions(deployment: Deployment, devices: int) -> list[Deployment]:
    """Every division of ``devices`` in replicas and expert ranks that fits in memory.

    Expert ranks hold equally many experts, so their number divides that of the experts (with
    copies); replicas take the rest.
    """
    placed = deployment.model.experts + deployment.redundant_experts
    found = []
    for ranks in range(1, placed + 1):
        replicas = (devices - ranks) // deployment.tensor_parallel
        if placed % ranks or replicas < 1:
            continue
        try:
            candidate = dataclasses.replace(
                deployment,
                replicas=replicas,
                expert_ranks=ranks,
                placement="disaggregated",
                hottest=min(deployment.hottest, ranks),
            )
            candidate.check_memory()
        except PlanError:
            continue
        found.append(candidate)
    return found


def best_division(
    deployment: Deployment, workload: Workload, devices: int, *, steps: int = _STEPS
) -> list[Candidate]:
    """All divisions of ``devices``, the one with the highest throughput first.

    Raises:
        PlanError: no division of so many devices holds the model.
    """
    candidates = []
    for candidate in divisions(deployment, devices):
        result = simulate_cluster(candidate, workload, steps=steps)
        candidates.append(
            Candidate(
                candidate.replicas,
                candidate.expert_ranks,
                result.tokens_per_s,
                result.attention_busy,
                result.ffn_busy,
                devices - candidate.devices,
                result.first_token_s["p50"] if result.first_token_s else None,
            )
        )
    if not candidates:
        raise PlanError(
            f"no division of {devices} devices holds {deployment.model.name} with "
            f"tensor_parallel={deployment.tensor_parallel}",
            remedy="give more devices, 8-bit weights, or another tensor-parallel size",
        )
    return sorted(candidates, key=lambda c: -c.tokens_per_s)


@dataclass(frozen=True)
class SplitGain:
    """One size of step: what a split and what disaggregation bring.

    Attributes:
        step_tokens: tokens of a replica's step.
        unsplit_s: seconds of an unsplit step.
        split_s: seconds of the split step.
        unsplit_tokens_per_device_s: throughput of unsplit steps.
        split_tokens_per_device_s: throughput of split steps.
        colocated_tokens_per_device_s: the best of the conventional form on as many devices, with
            and without stages; ``None`` when that many devices cannot hold the model so.
    """

    step_tokens: int
    unsplit_s: float
    split_s: float
    unsplit_tokens_per_device_s: float
    split_tokens_per_device_s: float
    colocated_tokens_per_device_s: float | None

    @property
    def speedup(self) -> float:
        """Unsplit over split step."""
        return self.unsplit_s / self.split_s


def where_split_pays(
    deployment: Deployment,
    workload: Workload,
    step_tokens: Sequence[int],
    *,
    steps: int = _STEPS,
) -> list[SplitGain]:
    """Compare split, unsplit and colocated steps of several sizes.

    Raises:
        PlanError: as :func:`afd_graph.cluster.simulation.simulate_cluster`.
    """
    if deployment.stages < 2:
        raise PlanError("stages=1 is no split", remedy="compare two stages or more")
    gains = []
    for tokens in step_tokens:
        load = dataclasses.replace(workload, step_tokens=tokens)
        whole = dataclasses.replace(deployment, stages=1)
        unsplit = simulate_cluster(whole, load, steps=steps)
        split = simulate_cluster(deployment, load, steps=steps)
        together = _colocated(deployment, load, steps)
        gains.append(
            SplitGain(
                tokens,
                unsplit.step_s,
                split.step_s,
                unsplit.tokens_per_device_s,
                split.tokens_per_device_s,
                max((r.tokens_per_device_s for r in together), default=None),
            )
        )
    return gains


def _colocated(deployment: Deployment, workload: Workload, steps: int) -> list[Result]:
    """The conventional form on as many devices: experts over as many of them as divide evenly."""
    replicas = deployment.devices // deployment.tensor_parallel
    devices = replicas * deployment.tensor_parallel
    placed = deployment.model.experts + deployment.redundant_experts
    ranks = max(n for n in range(1, devices + 1) if devices % n == 0 and placed % n == 0)
    results = []
    for stages in sorted({1, min(2, deployment.stages)}):
        try:
            conventional = dataclasses.replace(
                deployment,
                placement="colocated",
                replicas=replicas,
                expert_ranks=ranks,
                stages=stages,
                hottest=min(deployment.hottest, ranks),
            )
            results.append(simulate_cluster(conventional, workload, steps=steps))
        except PlanError:
            continue
    return results
