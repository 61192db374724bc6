"""A deployment: one model on so many devices, cut in so many stages.

*Disaggregated*: ``replicas`` attention replicas of ``tensor_parallel`` devices each, and
``expert_ranks`` devices that hold the experts. *Colocated* is the conventional form that a split
is compared to: every device attends and holds experts, all meet in an all-to-all at every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from afd_graph.cluster.hardware import Hardware
from afd_graph.cluster.model import ModelShape
from afd_graph.errors import PlanError
from afd_graph.validation import check_choice

PLACEMENTS = ("disaggregated", "colocated")
CUTS = ("token", "request", "cost")


@dataclass(frozen=True)
class Deployment:
    """What is simulated.

    Attributes:
        model: the model.
        hardware: the attention devices.
        replicas: attention replicas (data parallel).
        tensor_parallel: devices of one replica.
        expert_ranks: devices that the routed experts are spread over.
        placement: ``disaggregated`` or ``colocated``.
        ffn_hardware: the expert devices; ``None`` for the same as attention.
        redundant_experts: copies of busy experts, so that ranks hold equally many.
        stages: token stages of a step; 1 is unsplit.
        credits: un-received dispatches allowed per attention rank.
        cut: where a step is cut: ``token``, ``request`` or ``cost`` (equal attention work).
        min_split_tokens: smaller steps are not split.
        shared_experts: side that computes them, ``attention`` or ``ffn``.
        weights_bits: 8 or 16, of weights and of dispatched rows; results return in 16.
        hottest: load of the fullest expert rank over the mean, at least 1.
        stragglers: share of the devices of each side that are slow.
        slowdown: time of a slow device over that of the others.
        jitter: standard deviation of the logarithm of each attention time.

    Raises:
        PlanError: a number that is out of range, or expert ranks that hold
            unequal numbers of experts.
    """

    model: ModelShape
    hardware: Hardware
    replicas: int = 1
    tensor_parallel: int = 1
    expert_ranks: int = 1
    placement: str = "disaggregated"
    ffn_hardware: Hardware | None = None
    redundant_experts: int = 0
    stages: int = 2
    credits: int = 2
    cut: str = "token"
    min_split_tokens: int = 2
    shared_experts: str = "attention"
    weights_bits: int = 8
    hottest: float = 1.0
    stragglers: float = 0.0
    slowdown: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_choice("placement", self.placement, PLACEMENTS)
        check_choice("cut", self.cut, CUTS)
        check_choice("shared_experts", self.shared_experts, ("attention", "ffn"))
        for name in (
            *("replicas", "tensor_parallel", "expert_ranks"),
            *("stages", "credits", "min_split_tokens"),
        ):
            if getattr(self, name) < 1:
                self._refuse(name, "must be at least 1")
        if self.redundant_experts < 0:
            self._refuse("redundant_experts", "must not be negative")
        for name, low, high in (
            ("hottest", 1.0, float(self.expert_ranks)),
            ("stragglers", 0.0, 1.0),
            ("slowdown", 1.0, float("inf")),
            ("jitter", 0.0, 2.0),
        ):
            if not low <= getattr(self, name) <= high:
                self._refuse(name, f"must be {low:g} to {high:g}")
        if self.weights_bits not in (8, 16):
            self._refuse("weights_bits", "must be 8 or 16")
        if self._placed % self.expert_ranks:
            self._refuse(
                "expert_ranks",
                f"does not divide {self.model.experts} experts and {self.redundant_experts} copies",
            )
        if self.cut == "request" and self.stages > 2:
            self._refuse("stages", "must be 2 where requests stay whole")
        if self.placement == "colocated" and self.tensor_parallel * self.replicas % (
            self.expert_ranks
        ):
            self._refuse("expert_ranks", "must divide the number of devices when colocated")

    def _refuse(self, name: str, why: str) -> None:
        raise PlanError(f"{name}={getattr(self, name)!r} {why}", remedy="see Deployment")

    @property
    def _placed(self) -> int:
        return self.model.experts + self.redundant_experts

    @property
    def experts_per_rank(self) -> int:
        """Experts, copies included, on one expert rank."""
        return self._placed // self.expert_ranks

    @property
    def experts_on(self) -> Hardware:
        """Hardware of the expert side."""
        return self.ffn_hardware or self.hardware

    @property
    def attention_devices(self) -> int:
        """Devices that attend."""
        return self.replicas * self.tensor_parallel

    @property
    def devices(self) -> int:
        """All devices."""
        if self.placement == "colocated":
            return self.attention_devices
        return self.attention_devices + self.expert_ranks

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight, and of one dispatched value."""
        return self.weights_bits / 8

    @property
    def attention_memory(self) -> float:
        """Bytes of weights on one attention device: everything but the routed experts."""
        model = self.model
        shared_here = self.shared_experts == "attention" or self.placement == "colocated"
        values = (
            model.layers * model.attention_weights
            + model.dense_layers * model.dense_weights
            + model.moe_layers * (model.shared_weights * shared_here + model.gate_weights)
            + 2 * model.vocabulary * model.hidden
        )
        return values * self.weight_bytes / self.tensor_parallel

    @property
    def expert_memory(self) -> float:
        """Bytes of routed experts on one device that holds some."""
        held = self.model.moe_layers * self.experts_per_rank * self.model.expert_weights
        return held * self.weight_bytes

    def check_memory(self) -> None:
        """Refuse weights that a device cannot hold.

        Raises:
            PlanError: naming the side, what it needs and what it has.
        """
        sides = [
            ("attention", self.attention_memory, self.hardware),
            ("FFN", self.expert_memory, self.experts_on),
        ]
        if self.placement == "colocated":
            total = self.attention_memory + self.expert_memory
            sides = [("every", total, self.hardware)]
        for side, needed, hardware in sides:
            if needed > hardware.memory:
                raise PlanError(
                    f"weights of {self.model.name} need {needed / 1e9:.1f} GB on {side} device, "
                    f"{hardware.name} has {hardware.memory / 1e9:.1f} GB",
                    remedy="raise expert_ranks or tensor_parallel, or use 8-bit weights",
                )
