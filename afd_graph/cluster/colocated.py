"""The conventional form: every device attends and holds experts, all meet at every layer.

Dispatch and combine are all-to-alls of all devices, so each begins when the last device is ready
and the one before it has ended. With two stages a device computes attention of both, then experts
of both, while the other stage's rows are on their way::

    compute   A(l,0)  A(l,1)  F(l,0)  F(l,1)  A(l+1,0) ...
    network           D(l,0)  D(l,1)  C(l,0)  C(l,1) ...

One step of all devices is one loop over layers; its numbers are arrays over the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from afd_graph.cluster.costs import StepCosts

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """What one step of all replicas took, in seconds.

    Attributes:
        total: from the begin to the end.
        computing: per replica, busy with attention and experts.
        network: all-to-alls, one after the other.
    """

    total: float
    computing: Floats
    network: float


def step_times(
    costs: Sequence[StepCosts],
    shares: Floats,
    variant: int,
    slowness: Floats,
    devices_per_replica: int,
) -> StepTimes:
    """Play one step.

    Args:
        costs: of each replica; those with fewer stages than others are padded with empty ones.
        shares: ``[layers, VARIANTS, ranks]`` of the rows per expert rank.
        variant: which of the variants this step has.
        slowness: factor on the computing time of each replica.
        devices_per_replica: tensor-parallel size; every device holds experts.
    """
    stages = max(step.stages for step in costs)
    table = {
        name: np.array([_padded(getattr(step, name), stages) for step in costs]).T
        for name in ("attention", "after", "out", "back", "ffn", "ffn_floor")
    }
    latency = max(step.latency_out for step in costs), max(step.latency_back for step in costs)
    head = np.array([step.head for step in costs]) * slowness
    free = head.copy()  # compute engine of each replica
    busy = head.copy()
    network_free = network = 0.0
    back_at = [np.zeros(len(costs)) for _ in range(stages)]
    layers, _, ranks = shares.shape
    fullest = shares[:, variant].max(axis=1) * ranks
    # The experts of a device get rows of everybody; on average its part of one replica's stage.
    per_device = table["ffn"].mean(axis=1) / devices_per_replica
    fixed = costs[0].ffn_fixed
    for layer in range(layers):
        rank_share = shares[layer, variant, np.arange(len(costs)) % ranks] * ranks
        sent = []
        for stage in range(stages):
            attend = table["attention"][stage] * slowness
            begin = np.maximum(free, back_at[stage])
            free = begin + attend
            shared = table["after"][stage] * slowness
            ready = free.max()
            free = free + shared
            busy += attend + shared
            moving = table["out"][stage].max() * fullest[layer] + latency[0]
            network_free = max(network_free, ready) + moving
            network += moving
            sent.append(network_free)
        done = []
        for stage in range(stages):
            work = np.maximum(per_device[stage] * rank_share, table["ffn_floor"][stage].max())
            work = (work + fixed) * slowness
            free = np.maximum(free, sent[stage]) + work
            busy += work
            done.append(free.max())
        for stage in range(stages):
            moving = table["back"][stage].max() * fullest[layer] + latency[1]
            network_free = max(network_free, done[stage]) + moving
            network += moving
            back_at[stage] = np.full(len(costs), network_free)
    tail = np.array([step.tail for step in costs]) * slowness
    end = np.maximum(free, np.max(back_at, axis=0)) + tail
    return StepTimes(float(end.max()), busy + tail, network)


def _padded(values: Sequence[float], stages: int) -> list[float]:
    return [*values, *([0.0] * (stages - len(values)))]
