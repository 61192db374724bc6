"""What a stage costs: from tokens to seconds, by the formulas of docs/cluster.md.

Every kernel takes the longer of its operations at the rate that such kernels reach and its bytes
at the memory bandwidth that kernels reach. Values between kernels are written once and read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from afd_graph.cluster.deployment import Deployment
from afd_graph.cluster.hardware import Hardware
from afd_graph.cluster.model import ModelShape

_VALUE_BYTES = 2  # of activations, caches and results
_WRITE_AND_READ = 2


@dataclass(frozen=True)
class StageLoad:
    """The tokens of one stage, on one attention replica.

    Attributes:
        tokens: tokens that are computed.
        pairs: queries times the keys that each attends to.
        scanned: queries times the keys that an indexer scores; equal to ``pairs`` without one.
        cached: tokens of the caches that are read.
        requests: requests that have a token here.
    """

    tokens: int
    pairs: float
    scanned: float
    cached: int
    requests: int


@dataclass(frozen=True)
class StepCosts:
    """One step of one replica, in seconds; sequences have one entry per stage.

    A rank that takes the share ``x`` of a stage's rows spends ``max(ffn_floor, x * ffn)`` plus
    ``ffn_fixed`` on them, after ``x * take_in`` on its link, and ``x * give_back`` afterwards.

    Attributes:
        head: before the first MoE layer (dense layers).
        tail: after the last one.
        attention: attention and gate of one layer.
        after: work between a dispatch and its receive (shared experts).
        out: sending the rows of one layer.
        back: taking in the results of one layer.
        ffn: experts, for all rows of the stage.
        ffn_floor: reading the weights of the experts of one rank.
        ffn_fixed: of every item on every rank.
        take_in: taking in all rows of the stage.
        give_back: sending all results of the stage.
        latency_out: from the end of sending until the experts have the rows.
        latency_back: the same for results.
    """

    head: float
    tail: float
    attention: Sequence[float]
    after: Sequence[float]
    out: Sequence[float]
    back: Sequence[float]
    ffn: Sequence[float]
    ffn_floor: Sequence[float]
    ffn_fixed: float
    take_in: Sequence[float]
    give_back: Sequence[float]
    latency_out: float
    latency_back: float

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.attention)


def step_costs(deployment: Deployment, loads: Sequence[StageLoad], *, decoding: bool) -> StepCosts:
    """Costs of one step of one replica."""
    model, near, far = deployment.model, deployment.hardware, deployment.experts_on
    attention, after, out, back, ffn, floor = [], [], [], [], [], []
    take_in, give_back = [], []
    head = tail = 0.0
    colocated = deployment.placement == "colocated"
    shared_here = colocated or deployment.shared_experts == "attention"
    # Only stages that wait for one another's rows compute while rows travel.
    overlap = 1.0 if len(loads) > 1 else 0.0
    near_share = 1 / deployment.tensor_parallel
    far_share = near_share if colocated else 1 / deployment.expert_ranks
    for load in loads:
        attend = attention_seconds(deployment, load, decoding=decoding)
        whole = load.tokens * copies(deployment) * model.hidden
        sent = whole * deployment.weight_bytes
        returned = whole * _VALUE_BYTES
        out.append(sent * near_share / near.dispatch_bandwidth)
        back.append(returned * near_share / near.combine_bandwidth)
        take_in.append(sent / far.dispatch_bandwidth)
        give_back.append(returned / far.combine_bandwidth)
        shared = shared_seconds(deployment, load.tokens, near, deployment.tensor_parallel)
        experts = expert_seconds(deployment, load.tokens * model.top_k, far)
        if not shared_here:
            experts += shared_seconds(deployment, load.tokens, far, 1)
        near_computing = attend + (shared if shared_here else 0.0)
        near_moving, far_moving = out[-1] + back[-1], (take_in[-1] + give_back[-1]) * far_share
        if colocated:
            near_computing += experts * far_share
        slower = slowed(near, near_computing, overlap * near_moving)
        attention.append(attend * slower)
        after.append(shared * slower if shared_here else 0.0)
        if not colocated:
            slower = slowed(far, experts * far_share, overlap * far_moving)
        ffn.append(experts * slower)
        rows = load.tokens * model.top_k
        weights = (
            min(deployment.experts_per_rank, rows) * model.expert_weights * deployment.weight_bytes
        )
        floor.append(weights / (far.memory_bandwidth * far.memory_efficiency))
        head += model.dense_layers * (
            attend + dense_seconds(deployment, load.tokens, near, deployment.tensor_parallel)
        )
        logits = 2 * load.requests * model.hidden * model.vocabulary
        tail += logits / _gemm_rate(deployment, near) / deployment.tensor_parallel
    return StepCosts(
        head,
        tail,
        attention,
        after,
        out,
        back,
        ffn,
        floor,
        far.call_overhead_s,
        take_in,
        give_back,
        near.message_latency_s,
        far.message_latency_s,
    )


def attention_seconds(deployment: Deployment, load: StageLoad, *, decoding: bool) -> float:
    """Attention and gate of one layer on one replica."""
    model, hardware = deployment.model, deployment.hardware
    parallel = deployment.tensor_parallel
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    weights = model.attention_weights + model.gate_weights
    projections = max(
        2 * load.tokens * weights / parallel / _gemm_rate(deployment, hardware),
        weights * deployment.weight_bytes / parallel / bandwidth,
    )
    core_rate = hardware.flops_16bit * hardware.attention_efficiency
    # A latent cache belongs to all heads, so every device of the replica reads all of it.
    cache_share = 1 if model.kv_rank else 1 / parallel
    core = max(
        load.pairs * model.pair_operations(absorbed=decoding) / parallel / core_rate,
        load.cached * model.cache_values * _VALUE_BYTES * cache_share / bandwidth,
    )
    index = 2 * load.scanned * model.index_width / parallel / _gemm_rate(deployment, hardware)
    moved = load.tokens * model.attention_values * _VALUE_BYTES * _WRITE_AND_READ / parallel
    together = 0.0
    if parallel > 1:
        reduced = 2 * (parallel - 1) / parallel * load.tokens * model.hidden * _VALUE_BYTES
        together = hardware.collective_latency_s + reduced / hardware.collective_bandwidth
    return projections + core + index + moved / bandwidth + together + hardware.call_overhead_s


def expert_seconds(deployment: Deployment, rows: float, hardware: Hardware) -> float:
    """Routed experts for ``rows`` (token, expert) pairs on one device, weights not counted."""
    model = deployment.model
    products = 2 * rows * model.expert_weights / _gemm_rate(deployment, hardware)
    return products + _moved(rows * model.expert_values, hardware)


def shared_seconds(
    deployment: Deployment, tokens: float, hardware: Hardware, parallel: int
) -> float:
    """Shared experts of one layer for ``tokens`` rows."""
    model = deployment.model
    return _feed_forward(
        deployment, tokens, model.shared_weights, model.shared_width, hardware, parallel
    )


def dense_seconds(
    deployment: Deployment, tokens: float, hardware: Hardware, parallel: int
) -> float:
    """The feed-forward of one dense layer."""
    model = deployment.model
    return _feed_forward(
        deployment, tokens, model.dense_weights, model.dense_width, hardware, parallel
    )


def _feed_forward(
    deployment: Deployment,
    tokens: float,
    weights: int,
    width: int,
    hardware: Hardware,
    parallel: int,
) -> float:
    if not weights:
        return 0.0
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    products = max(
        2 * tokens * weights / _gemm_rate(deployment, hardware),
        weights * deployment.weight_bytes / bandwidth,
    )
    values = tokens * (2 * deployment.model.hidden + 3 * width)
    return (products + _moved(values, hardware)) / parallel


def copies(deployment: Deployment) -> float:
    """Copies of a row that a token sends: one per domain that holds one of its experts."""
    domains = max(1, round(deployment.expert_ranks / deployment.experts_on.domain))
    return reached(deployment.model, domains)


def reached(model: ModelShape, domains: int) -> float:
    """Expected number of ``domains``, of equally many experts each, that a token's experts are in.

    With grouped routing the experts come from ``top_groups`` of ``groups`` groups, which lie next
    to one another. Choices are taken as independent of one another.
    """
    groups, chosen = model.groups, model.top_groups
    if domains > groups:
        parts = domains / groups  # domains of one group
        return chosen * parts * (1 - (1 - 1 / (chosen * parts)) ** model.top_k)
    inside = groups // domains  # groups of one domain
    missed = sum(
        math.comb(inside, here)
        * math.comb(groups - inside, chosen - here)
        * (1 - here / chosen) ** model.top_k
        for here in range(min(inside, chosen) + 1)
    )
    return domains * (1 - missed / math.comb(groups, chosen))


def slowed(hardware: Hardware, computing: float, communicating: float) -> float:
    """Factor on computing time when a part of the device moves rows meanwhile."""
    if not computing:
        return 1.0
    lost = 1 - hardware.compute_share_while_communicating
    return 1 + lost * min(communicating, computing) / computing


def _gemm_rate(deployment: Deployment, hardware: Hardware) -> float:
    peak = hardware.flops_8bit if deployment.weights_bits == 8 else hardware.flops_16bit
    return peak * hardware.gemm_efficiency


def _moved(values: float, hardware: Hardware) -> float:
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    return values * _VALUE_BYTES * _WRITE_AND_READ / bandwidth
