"""What the compiler would make of a model, found out without weights and without running it.

Every program is captured on fake tensors and goes through the same passes as ``torch.compile``
(:mod:`afd_graph.capture`): what is matched, how a step is cut, in which order both stages run,
what is refused and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from afd_graph.artifact.experts import ExpertLayer
from afd_graph.capture import Example, LayerNumbers, capture, run_passes
from afd_graph.config import AFDConfig
from afd_graph.errors import AFDError
from afd_graph.pipeline import Programs
from afd_graph.schedule_ir import Step
from afd_graph.step import StepChooser, StepSizes


@dataclass(frozen=True)
class LayerKind:
    """MoE layers that are alike.

    Attributes:
        layers: module paths, in order.
        experts, top_k, shared: of each.
        hidden_size: width of the rows.
        bytes: weights of one layer's experts.
    """

    layers: list[str]
    experts: int
    top_k: int
    shared: int
    hidden_size: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """How a step would be cut: stage extents, or the reason for none."""

    tokens: int
    stages: tuple[int, int] | None
    reason: str | None


@dataclass
class ProgramInspection:
    """One program of a model.

    Attributes:
        name: of the program.
        kinds: MoE layers, alike ones together.
        no_match: what looked like experts and is none that we know, with the reason.
        mode: how a step is cut; None without a two-stage program.
        unsplit_reason: why there is none.
        refusal: the error that stops the compiler, if one does.
        remedy: what to do about it.
        plans: how steps of the asked sizes would be cut.
        order: of attention, dispatch and receive, of both stages.
        nodes_before, nodes_after: of the graph.
        seconds: that capturing and the passes took.
    """

    name: str
    kinds: list[LayerKind] = field(default_factory=list)
    no_match: list[str] = field(default_factory=list)
    mode: str | None = None
    unsplit_reason: str | None = None
    refusal: str | None = None
    remedy: str | None = None
    plans: list[Plan] = field(default_factory=list)
    order: list[Step] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0


def inspect_program(
    name: str,
    model: torch.nn.Module,
    example: Example,
    config: AFDConfig,
    *,
    credits: int,
    prefix: str = "",
    tokens: Sequence[int] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> ProgramInspection:
    """Capture one program and say what the passes make of it; a refusal is part of the answer.

    Args:
        name: for the report.
        model, example, prefix: as of :func:`~afd_graph.capture.capture`.
        config: of the compiler.
        credits: un-received dispatches allowed.
        tokens: extents of the token axis to plan a step for.
        progress: called with one line about each piece of work.
    """
    begin = time.perf_counter()
    found = ProgramInspection(name)
    try:
        progress(f"{name}: capturing")
        captured = capture(model, example, config, prefix=prefix)
        found.nodes_before = len(captured.gm.graph.nodes)
        progress(f"{name}: {found.nodes_before} nodes, running the passes")
        programs = run_passes(captured, config, credits=credits, channel="", numbers=LayerNumbers())
        _describe(found, programs, config, tokens)
    except AFDError as error:
        found.refusal, found.remedy = str(error), error.remedy
    found.seconds = time.perf_counter() - begin
    return found


def _describe(
    found: ProgramInspection,
    programs: Programs,
    config: AFDConfig,
    tokens: Sequence[int],
) -> None:
    found.no_match = [str(failure) for failure in programs.no_match]
    found.unsplit_reason = programs.unsplit_reason
    found.nodes_after = programs.nodes_after
    found.order = list(programs.order)
    for match, program in zip(programs.matches, programs.ffn, strict=True):
        layer = ExpertLayer.of(program, match.top_k, match.shared_experts)
        size = sum(t.nbytes for e in program.expressions() for _, t in e.weights)
        sizes = (layer.num_experts, layer.top_k, layer.shared_experts, layer.hidden_size, size)
        last = found.kinds[-1] if found.kinds else None
        name = layer.name or f"layer {layer.layer}"
        if last is not None and sizes == (
            *(last.experts, last.top_k, last.shared, last.hidden_size, last.bytes),
        ):
            last.layers.append(name)
        else:
            found.kinds.append(LayerKind([name], *sizes))
    if programs.split is None or programs.flow is None:
        return
    found.mode = programs.flow.mode
    if programs.sizes is None:
        chooser = StepChooser(StepSizes.of(programs.unsplit.graph, programs.flow), config)
        found.plans = [_plan(chooser, found.mode, count) for count in tokens]


def _plan(chooser: StepChooser, mode: str, extent: int) -> Plan:
    """A step whose token axis has ``extent`` entries: tokens of one request, or requests."""
    cut, _ = chooser.decide(extent, extent)
    if isinstance(cut, str):
        return Plan(extent, None, cut)
    return Plan(extent, (cut, extent - cut), None)


def weight_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Number of parameters and their bytes; tied ones count once."""
    seen: dict[int, torch.Tensor] = {id(p): p for p in model.parameters()}
    return sum(p.numel() for p in seen.values()), sum(p.nbytes for p in seen.values())


def to_json(found: ProgramInspection) -> dict[str, Any]:
    """JSON values; the order as text."""
    return {
        **{key: value for key, value in vars(found).items() if key not in ("kinds", "plans")},
        "kinds": [vars(kind) for kind in found.kinds],
        "plans": [vars(plan) for plan in found.plans],
        "order": [str(step) for step in found.order],
        "moe_layers": sum(len(kind.layers) for kind in found.kinds),
    }
