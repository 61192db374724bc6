"""What was compiled and what ran: a typed object that prints as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afd_graph.pipeline import Programs
    from afd_graph.tracing import Trace


GATE_IN_GRAPH = "attention side, from the graph"
"""Gate and top-k are operators of the captured graph."""

GATE_OPENED = "attention side, opened from the opaque operator"
"""The captured graph hid gate and top-k in one operator with the experts, which was opened."""


@dataclass(frozen=True)
class LayerReport:
    """One MoE layer, as matched.

    Attributes:
        index: number of the layer on the FFN side, in order of first appearance.
        name: module path, when the graph tells it.
        experts: routed experts.
        top_k: choices per token.
        shared: shared experts, counted in widths of a routed one.
        gate: where gate and top-k run, and where they were found.
    """

    index: int
    name: str | None
    experts: int
    top_k: int
    shared: int
    gate: str = GATE_IN_GRAPH


@dataclass
class GraphReport:
    """One captured graph.

    Attributes:
        layers: indices of its MoE layers.
        mode: ``sequence``, ``batch`` or ``rows`` when it has a two-stage variant, else None.
        unsplit_reason: why it has no two-stage variant.
        no_match: what looked like experts and did not match, with the reason.
        pass_seconds: seconds per pass.
        nodes_before: nodes of the captured ATen graph.
        nodes_after: nodes of the two-stage graph, or of the unsplit one.
        edits: what each pass counted.
    """

    layers: list[int] = field(default_factory=list)
    mode: str | None = None
    unsplit_reason: str | None = None
    no_match: list[str] = field(default_factory=list)
    pass_seconds: dict[str, float] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    edits: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, programs: Programs) -> GraphReport:
        """What a report says about the programs of one graph."""
        return cls(
            layers=[program.layer for program in programs.ffn],
            mode=None if programs.flow is None else programs.flow.mode,
            unsplit_reason=programs.unsplit_reason,
            no_match=[str(failure) for failure in programs.no_match],
            pass_seconds=dict(programs.pass_seconds),
            nodes_before=programs.nodes_before,
            nodes_after=programs.nodes_after,
            edits=dict(programs.edits),
        )


@dataclass(frozen=True)
class StepTaken:
    """What one step of a compiled graph did.

    Attributes:
        policy: the policy that made the cut; None when the step ran unsplit.
        reason: why it ran unsplit; None when it ran in two stages.
        mid_request: whether the cut went through a request.
        pairs: query-key pairs of each stage; empty where they are not known.
    """

    policy: str | None
    reason: str | None = None
    mid_request: bool = False
    pairs: tuple[int, ...] = ()

    @property
    def split(self) -> bool:
        """Whether the step ran in two stages."""
        return self.policy is not None


@dataclass
class Report:
    """Everything that a backend compiled and ran so far.

    Attributes:
        layers: MoE layers.
        steps_split: steps that ran in two stages.
        steps_mid_request: those of them whose cut went through a request.
        steps_unsplit: steps that ran as one, by reason.
        pass_seconds: seconds per pass, over all graphs.
        nodes_before: nodes of all captured ATen graphs.
        nodes_after: nodes of all emitted graphs.
        credits: un-received dispatches allowed.
        order: ``receive-first`` or ``send-first``.
        graphs: one entry per captured graph.
        observers: called with every step that ended without an error.
        trace: hands out the measured steps; None when the backend does not trace.
        dump_dir: where graphs were dumped; None when they were not.
    """

    layers: list[LayerReport] = field(default_factory=list)
    steps_split: int = 0
    steps_mid_request: int = 0
    steps_unsplit: Counter[str] = field(default_factory=Counter)
    pass_seconds: dict[str, float] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    credits: int = 0
    order: str = ""
    graphs: list[GraphReport] = field(default_factory=list)
    observers: list[Callable[[StepTaken], None]] = field(
        default_factory=list, repr=False, compare=False
    )

    trace: Callable[[], Trace] | None = field(default=None, repr=False, compare=False)
    dump_dir: str | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process: the steps that were measured so far, and no observers."""
        state = {**self.__dict__, "observers": []}
        if self.trace is not None:
            state["trace"] = _Measured(self.trace())
        return state

    def as_dict(self) -> dict[str, Any]:
        """What was compiled and counted, for JSON."""
        return {
            entry.name: (
                [asdict(item) for item in value]
                if entry.name in ("layers", "graphs")
                else dict(value)
                if isinstance(value, dict)
                else value
            )
            for entry in fields(self)
            if entry.compare
            for value in (getattr(self, entry.name),)
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """The report that :meth:`as_dict` gave."""
        read = dict(values)
        read["layers"] = [LayerReport(**layer) for layer in read["layers"]]
        read["graphs"] = [GraphReport(**graph) for graph in read["graphs"]]
        read["steps_unsplit"] = Counter(read["steps_unsplit"])
        return cls(**read)

    def html(self, path: str | PathLike[str], *, title: str = "afd-graph") -> None:
        """Write a self-contained page: matches, timelines, plan of every step, graphs.

        Timelines need ``AFDConfig(trace=True)``, graphs ``dump_dir``; without them the page says
        so in their place.
        """
        from afd_graph.html import from_report, write_html

        write_html(from_report(self, title), path)

    def count(self, step: StepTaken) -> None:
        """Count one step and tell who observes."""
        if step.reason is None:
            self.steps_split += 1
            self.steps_mid_request += step.mid_request
        else:
            self.steps_unsplit[step.reason] += 1
        for observer in self.observers:
            observer(step)

    def __str__(self) -> str:
        lines = [f"{_counted(self.layers, 'MoE layer')}, {_counted(self.graphs, 'graph')}"]
        if self.layers:
            rows: list[tuple[str, ...]] = [("index", "layer", "experts", "top-k", "shared")]
            rows += [
                (str(x.index), x.name or "?", str(x.experts), str(x.top_k), str(x.shared))
                for x in self.layers
            ]
            lines += _table(rows)
            lines += [f"gate and top-k: {text}" for text in self._gates()]
        else:
            lines.append("no MoE layer was matched: the graphs run as they were captured")
        lines.append(f"order: {self.order} ({self.credits} credits)")
        lines.append(f"nodes: {self.nodes_before} captured, {self.nodes_after} emitted")
        lines.append(f"steps split: {self.steps_split} ({self.steps_mid_request} inside a request)")
        for reason, count in sorted(self.steps_unsplit.items()):
            lines.append(f"steps unsplit: {count} ({reason})")
        for graph in self.graphs:
            for text in graph.no_match:
                lines.append(f"not matched: {text}")
        if self.pass_seconds:
            lines.append(f"passes: {sum(self.pass_seconds.values()):.3f} s")
            lines += _table(
                [("pass", "seconds"), *((n, f"{s:.4f}") for n, s in self.pass_seconds.items())]
            )
        return "\n".join(lines)

    def _gates(self) -> list[str]:
        layers: dict[str, list[str]] = {}
        for layer in self.layers:
            layers.setdefault(layer.gate, []).append(str(layer.index))
        if len(layers) == 1:
            return list(layers)
        return [f"{gate} (layers {', '.join(indices)})" for gate, indices in layers.items()]


@dataclass(frozen=True)
class _Measured:
    """A trace that nothing is added to."""

    trace: Trace

    def __call__(self) -> Trace:
        return self.trace


def _counted(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
