"""The passes in their order: one captured graph in, two attention programs and the experts out.

    normalize ▶ match ▶ insert ▶ token_flow ▶ split ▶ schedule      (verify after each)
                          │                      └─▶ two-stage program
                          └─▶ schedule ▶ unsplit program

Inserting before splitting keeps the expert internals, which permute tokens, out of the token
flow: what is split is the attention program, where dispatch and receive are plain operators.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import fx

from afd_graph import _compat
from afd_graph.config import AFDConfig
from afd_graph.errors import UnsupportedError
from afd_graph.ffn.program import FFNProgram
from afd_graph.passes.insert import WeightLookup, insert_dispatch
from afd_graph.passes.match import Match, NoMatch, match_moe_layers
from afd_graph.passes.normalize import normalize
from afd_graph.passes.schedule import schedule
from afd_graph.passes.shapes import propagate_shapes
from afd_graph.passes.split import CUT, split_stages
from afd_graph.passes.token_flow import NoTokenAxis, TokenFlow, infer_token_flow
from afd_graph.passes.verify import verify
from afd_graph.schedule_ir import Step

PassObserver = Callable[[str, fx.Graph, fx.Graph], None]
"""Called after each pass with its name and the graph before and after it."""


@dataclass
class Programs:
    """What the pipeline makes of one graph.

    Attributes:
        unsplit: attention program of one stage; the captured graph when nothing matched.
        split: attention program of two stages; its last input is the cut, if the cut is one.
        flow: token flow behind the split.
        ffn: expert programs.
        matches: MoE layers.
        no_match: candidates that did not fit.
        unsplit_reason: why there is no two-stage program.
        order: steps of the two-stage program, or of the unsplit one.
        pass_seconds: seconds per pass.
        edits: what each pass counted.
        nodes_before: nodes of the captured graph.
    """

    unsplit: fx.GraphModule
    split: fx.GraphModule | None = None
    flow: TokenFlow | None = None
    ffn: list[FFNProgram] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    no_match: list[NoMatch] = field(default_factory=list)
    unsplit_reason: str | None = None
    order: list[Step] = field(default_factory=list)
    pass_seconds: dict[str, float] = field(default_factory=dict)
    edits: dict[str, int] = field(default_factory=dict)
    nodes_before: int = 0

    @property
    def nodes_after(self) -> int:
        """Nodes of the two-stage program, or of the unsplit one."""
        return len((self.split or self.unsplit).graph.nodes)


class Pipeline:
    """Runs the passes.

    Args:
        config: options.
        channel: name of the runtime channel that the emitted operators call.
        credits: un-received dispatches allowed.
        with_shapes: give stage copies their shapes, for who reads the graph.
        cut_is_input: the cut is an input of the two-stage program; else it is half of the axis.
        observer: called after each pass.
    """

    def __init__(
        self,
        config: AFDConfig,
        *,
        channel: str,
        credits: int,
        with_shapes: bool = False,
        cut_is_input: bool = True,
        observer: PassObserver | None = None,
    ) -> None:
        self.config = config
        self.channel = channel
        self.credits = credits
        self.with_shapes = with_shapes
        self.cut_is_input = cut_is_input
        self.observer = observer

    def run(
        self,
        gm: fx.GraphModule,
        weight_of: WeightLookup,
        number: Callable[[Match], int],
    ) -> Programs:
        """Transform ``gm``, which is changed in place and becomes the unsplit program.

        Raises:
            UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
            PassError: a pass broke an invariant.
        """
        graph = gm.graph
        result = Programs(gm, nodes_before=len(graph.nodes))
        with self._pass("normalize", graph, result):
            result.edits["normalize"] = normalize(graph)
        with self._pass("match", graph, result):
            result.matches, result.no_match = match_moe_layers(graph)
            result.edits["match"] = len(result.matches)
        if not result.matches:
            result.unsplit_reason = "no_moe_layer"
            gm.recompile()
            return result
        with self._pass("insert", graph, result):
            result.ffn = insert_dispatch(
                graph,
                result.matches,
                weight_of,
                self.channel,
                number,
                self.config.shared_experts,
            )
            result.edits["insert"] = 2 * len(result.ffn)
        self._split(gm, result, weight_of)
        with self._pass("schedule_unsplit", graph, result, scheduled=True):
            order = schedule(graph, credits=self.credits, num_stages=1)
            result.order = result.order or order
        started = time.perf_counter()
        gm.recompile()
        result.pass_seconds["recompile"] = time.perf_counter() - started
        return result

    def _split(self, gm: fx.GraphModule, result: Programs, weight_of: WeightLookup) -> None:
        if self.config.split == "none":
            result.unsplit_reason = "disabled"
            return
        graph = gm.graph
        try:
            with self._pass("token_flow", graph, result):
                result.flow = self._flow(graph, weight_of)
                result.edits["token_flow"] = len(result.flow.layouts)
        except NoTokenAxis as nothing_to_cut:
            result.unsplit_reason = nothing_to_cut.reason
            return
        except UnsupportedError as refusal:
            if self.config.on_unsupported == "error":
                raise
            result.unsplit_reason = f"unsupported: {refusal}"
            return
        flow = result.flow
        cut = _compat.new_size_symbol(graph, CUT, hint=2) if self.cut_is_input else None
        started = time.perf_counter()
        split = split_stages(graph, flow, cut=cut, num_stages=self.config.num_stages)
        result.edits["split"] = len(split.nodes) - len(graph.nodes)
        self._finish("split", graph, split, result, started)
        with self._pass("schedule", split, result, scheduled=True):
            result.order = schedule(split, credits=self.credits, num_stages=self.config.num_stages)
        if self.with_shapes:
            with self._pass("shapes", split, result, scheduled=True):
                result.edits["shapes"] = propagate_shapes(split)
        started = time.perf_counter()
        result.split = fx.GraphModule(gm, split)
        result.pass_seconds["codegen"] = time.perf_counter() - started

    def _flow(self, graph: fx.Graph, weight_of: WeightLookup) -> TokenFlow:
        """The cut that the policy asks for; between requests when there is one token each."""
        infer = functools.partial(
            infer_token_flow,
            graph,
            assume_causal=self.config.assume_causal,
            parameters={n for n in graph.nodes if n.op == "placeholder" and weight_of(n)},
        )
        if self.config.split == "request":
            return infer(mode="batch")
        try:
            return infer(mode="sequence")
        except NoTokenAxis as one_token_each:
            try:
                return infer(mode="batch")
            except NoTokenAxis:
                raise one_token_each from None

    @contextmanager
    def _pass(
        self, name: str, graph: fx.Graph, result: Programs, scheduled: bool = False
    ) -> Iterator[None]:
        before = graph if self.observer is None else _copied(graph)
        started = time.perf_counter()
        yield
        self._finish(name, before, graph, result, started, scheduled)

    def _finish(
        self,
        name: str,
        before: fx.Graph,
        after: fx.Graph,
        result: Programs,
        started: float,
        scheduled: bool = False,
    ) -> None:
        passed = time.perf_counter()
        result.pass_seconds[name] = passed - started
        verify(after, after=name, credits=self.credits if scheduled else None)
        spent = time.perf_counter() - passed
        result.pass_seconds["verify"] = result.pass_seconds.get("verify", 0.0) + spent
        if self.observer is not None:
            self.observer(name, before, after)


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return copy
