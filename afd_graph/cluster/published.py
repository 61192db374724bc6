"""Measurements that others published, and what this model says about the same setup.

A row is *reproduced* when the prediction from a preset is within 15 %; otherwise ``gap`` says what
the model does not know. Nothing is fitted to a row; where a row needs a number that was not
published, ``gap`` says which and how large it would have to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afd_graph.cluster.deployment import Deployment
from afd_graph.cluster.hardware import HARDWARE
from afd_graph.cluster.model import MODELS
from afd_graph.cluster.simulation import Result, simulate_cluster
from afd_graph.cluster.workload import Workload

TOLERANCE = 0.15


@dataclass(frozen=True)
class Published:
    """One published number.

    Attributes:
        name: what was measured.
        unit: of the number.
        value: as published, or derived from it by the arithmetic that ``source`` shows.
        source: where.
        predict: the same by this model.
        gap: why the prediction is further away than :data:`TOLERANCE`; empty when it is not.
    """

    name: str
    unit: str
    value: float
    source: str
    predict: Callable[[], float]
    gap: str = ""

    def error(self) -> float:
        """Relative difference of the prediction, with its sign."""
        return self.predict() / self.value - 1


def _colocated(
    hardware: str, replicas: int, tokens: int, **options: object
) -> Callable[[], Result]:
    workload = Workload("fixed:4096", tokens, phase=str(options.pop("phase", "prefill")))
    settings = {"expert_ranks": replicas, "redundant_experts": 32, **options}

    def run() -> Result:
        deployment = Deployment(
            MODELS["deepseek-v3"],
            HARDWARE[hardware],
            replicas=replicas,
            placement="colocated",
            **settings,  # type: ignore[arg-type]
        )
        return simulate_cluster(deployment, workload, steps=2)

    return run


def _sparse(placement: str, replicas: int, ranks: int, stages: int) -> Callable[[], Result]:
    workload = Workload("fixed:32768", 32768 // replicas)

    def run() -> Result:
        deployment = Deployment(
            MODELS["deepseek-v3.2"],
            HARDWARE["ascend-910c"],
            replicas=replicas,
            tensor_parallel=8,
            expert_ranks=ranks,
            placement=placement,
            stages=stages,
            credits=1,
        )
        return simulate_cluster(deployment, workload, steps=replicas)

    return run


def _layer_ms(run: Callable[[], Result]) -> Callable[[], float]:
    return lambda: run().layer_s * 1e3


def _communication_share(run: Callable[[], Result]) -> Callable[[], float]:
    def share() -> float:
        costs = run().costs
        return (costs["c"] + costs["d"]) / sum(costs[name] for name in "afcd")

    return share


_CLOUDMATRIX = "arXiv 2506.12708, prefill comparison, 16,384 tokens a device, prompts of 4,096"
_AFD_STUDY = "vllm-project/afd-plugin issue 170: closed loop of 32K tokens, 61 layers, W8A8"
_EAGER = (
    "the published system launches every operator from Python and waits for counts on the host; "
    "rooflines of the devices, which is what this model knows, are 15 to 25 times shorter. "
    "call_overhead_s would have to be that large, and it was not published"
)

ROWS: tuple[Published, ...] = (
    Published(
        "DeepSeek-V3 prefill, H800, EP32, two micro-batches, balanced",
        "ms a layer",
        34.3,
        "deepseek-ai/profile-data (prefill); 16384 tokens / 7839 tokens/s / 61 layers",
        _layer_ms(_colocated("h800", 32, 16384)),
    ),
    Published(
        "the same with SGLang, perfect expert balance",
        "ms a layer",
        36.2,
        f"{_CLOUDMATRIX}: 7417 tokens/s",
        _layer_ms(_colocated("h800", 32, 16384)),
    ),
    Published(
        "the same with SGLang, default expert balance",
        "ms a layer",
        42.7,
        f"{_CLOUDMATRIX}: 6288 tokens/s",
        _layer_ms(_colocated("h800", 32, 16384)),
        gap="the load of the fullest expert rank was not published; hottest=1.65 gives 42.7 ms",
    ),
    Published(
        "DeepSeek-R1 prefill, Ascend 910C, EP32, two micro-batches, balanced",
        "ms a layer",
        40.2,
        f"{_CLOUDMATRIX}: 6688 tokens/s a package of two dies",
        _layer_ms(_colocated("ascend-910c", 32, 8192)),
        gap="the model lets all communication run beside computing for nothing. Without any "
        "overlap it says 37.5 ms: on this device dispatch and combine run on the vector cores "
        "that norms and activations need as well, and attention changes its parallelism twice a "
        "layer, which costs collectives that are not modelled",
    ),
    Published(
        "communication's share of an unsplit prefill layer, Ascend 910C",
        "of the layer",
        0.35,
        "vllm-project/afd-plugin, prefill AFD proposal",
        _communication_share(_colocated("ascend-910c", 32, 8192, stages=1)),
        gap="batch, parallelism and kernels behind the published share are not known; the preset "
        "has the bandwidth of EP16, the largest that was published",
    ),
    Published(
        "DeepSeek-R1 decode, Ascend 910C, EP320, cache of 4,096, 96 requests a package",
        "tokens/s a package",
        1943,
        "arXiv 2506.12708, decode at under 50 ms a token; 96 requests follow from that",
        lambda: (
            2
            * _colocated(
                "ascend-910c", 320, 48, phase="decode", redundant_experts=64
            )().tokens_per_device_s
        ),
    ),
    Published(
        "DeepSeek-V3.2 prefill, 32 Ascend dies, DP4 TP8, no AFD",
        "ms a layer",
        164,
        f"{_AFD_STUDY}: 10.01 s",
        _layer_ms(_sparse("colocated", 4, 32, 1)),
        gap=_EAGER,
    ),
    Published(
        "DeepSeek-V3.2 prefill, 16 + 16 Ascend dies, DP2 TP8 + EP16, two stages, one credit",
        "ms a layer",
        116,
        f"{_AFD_STUDY}: 7.06 s",
        _layer_ms(_sparse("disaggregated", 2, 16, 2)),
        gap=_EAGER,
    ),
)
