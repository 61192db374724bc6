"""The passes in their order: one captured graph in, two attention programs and the experts out.

    normalize ▶ kv_writes ▶ match ▶ insert ▶ token_flow ▶ split ▶ schedule      (verify after each)
                          │                      └─▶ two-stage program
                          └─▶ schedule ▶ unsplit program

Inserting before splitting keeps the expert internals, which permute tokens, out of the token
flow: what is split is the attention program, where dispatch and receive are plain operators.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import fx

from afd_graph import _compat
from afd_graph.config import AFDConfig
from afd_graph.errors import ConfigError, UnsupportedError
from afd_graph.ffn.program import FFNProgram
from afd_graph.passes.exact_rows import mark_exact, mark_program, use_exact_ops
from afd_graph.passes.insert import WeightLookup, insert_dispatch
from afd_graph.passes.kv_writes import write_in_place
from afd_graph.passes.match import Match, NoMatch, match_moe_layers
from afd_graph.passes.normalize import normalize
from afd_graph.passes.schedule import schedule
from afd_graph.passes.sequence_parallel import row_local_nodes
from afd_graph.passes.shapes import propagate_shapes
from afd_graph.passes.split import CUT, split_stages
from afd_graph.passes.split_paged import TOKENS, PagedSizes, split_paged_stages
from afd_graph.passes.tensor_parallel import (
    TensorParallel,
    shard_dispatch,
    tensor_parallel_group,
)
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
        sizes: sizes of the inputs that it adds for a step over paged caches.
        flow: token flow behind the split.
        ffn: expert programs.
        matches: MoE layers.
        no_match: candidates that did not fit.
        unsplit_reason: why there is no two-stage program.
        group: tensor-parallel group of the graph.
        order: steps of the two-stage program, or of the unsplit one.
        pass_seconds: seconds per pass.
        edits: what each pass counted.
        nodes_before: nodes of the captured graph.
    """

    unsplit: fx.GraphModule
    split: fx.GraphModule | None = None
    sizes: PagedSizes | None = None
    flow: TokenFlow | None = None
    ffn: list[FFNProgram] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    no_match: list[NoMatch] = field(default_factory=list)
    unsplit_reason: str | None = None
    group: TensorParallel | None = None
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
        replicated: Collection[fx.Node] = (),
    ) -> Programs:
        """Transform ``gm``, whose graph is changed in place.

        Args:
            gm: the captured graph.
            weight_of: finds parameters.
            number: number of a layer on the FFN side.
            replicated: graph inputs that are weights known to be the same on every
                tensor-parallel rank.

        Raises:
            ConfigError: sequence parallelism without a tensor-parallel group.
            UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
            PassError: a pass broke an invariant.
        """
        graph = gm.graph
        result = Programs(gm, nodes_before=len(graph.nodes))
        if "normalize" not in self.config.disabled_passes:
            with self._pass("normalize", graph, result):
                result.edits["equal_sizes"] = _compat.learn_equal_sizes(graph)
                result.edits["normalize"] = normalize(graph)
        with self._pass("kv_writes", graph, result):
            result.edits["kv_writes"] = write_in_place(graph)
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
        if self.config.exact:
            self._mark_exact(graph, result, weight_of)
        result.group = tensor_parallel_group(graph)
        if self.config.sequence_parallel and result.group is None:
            raise ConfigError(
                "sequence_parallel=True, but the graph takes no sum over a tensor-parallel group",
                remedy="parallelise the model first (parallelize_module), or leave it False",
            )
        self._infer(graph, result, weight_of)
        local: set[fx.Node] = set()
        if result.flow is not None and self.config.sequence_parallel:
            local = row_local_nodes(graph, result.flow, replicated)
        if result.flow is not None and result.unsplit_reason is None:
            result.split = fx.GraphModule(gm, self._two_stages(graph, result, local))
        result.unsplit = fx.GraphModule(gm, self._one_stage(graph, result, local))
        return result

    def _mark_exact(self, graph: fx.Graph, result: Programs, weight_of: WeightLookup) -> None:
        with self._pass("mark_exact", graph, result), _compat.real_tensors():
            for program in result.ffn:
                for expression in program.expressions():
                    mark_program(expression.graph)
            result.edits["mark_exact"] = mark_exact(graph, _parameters(graph, weight_of))

    def _use_exact_ops(self, graph: fx.Graph, result: Programs, name: str) -> None:
        if self.config.exact:
            with self._pass(name, graph, result):
                result.edits[name] = use_exact_ops(graph)

    def _infer(self, graph: fx.Graph, result: Programs, weight_of: WeightLookup) -> None:
        """Set the token flow, or the reason why there is none or it is not used for a split."""
        if self.config.split == "none":
            result.unsplit_reason = "disabled"
            if not self.config.sequence_parallel:
                return
        try:
            with self._pass("token_flow", graph, result):
                result.flow = self._flow(graph, weight_of)
                result.edits["token_flow"] = len(result.flow.layouts)
        except NoTokenAxis as nothing_to_cut:
            result.unsplit_reason = result.unsplit_reason or nothing_to_cut.reason
        except UnsupportedError as refusal:
            if self.config.on_unsupported == "error":
                raise
            result.unsplit_reason = f"unsupported: {refusal}"

    def _two_stages(self, graph: fx.Graph, result: Programs, local: set[fx.Node]) -> fx.Graph:
        assert result.flow is not None
        stages = self.config.num_stages
        started = time.perf_counter()
        split = self._split(graph, result, local)
        result.edits["split"] = len(split.nodes) - len(graph.nodes)
        self._finish("split", graph, split, result, started)
        self._use_exact_ops(split, result, "exact_rows")
        self._shard(split, result, "shard_dispatch")
        with self._pass("schedule", split, result, scheduled=True):
            result.order = schedule(split, credits=self.credits, num_stages=stages)
        if self.with_shapes:
            with self._pass("shapes", split, result, scheduled=True):
                result.edits["shapes"] = propagate_shapes(split)
        return split

    def _split(self, graph: fx.Graph, result: Programs, local: set[fx.Node]) -> fx.Graph:
        flow = result.flow
        assert flow is not None
        if flow.mode == "paged":
            result.sizes = self._paged_sizes(graph, flow)
            return split_paged_stages(
                graph,
                flow,
                sizes=result.sizes,
                group=result.group,
                local=local,
                check_values=self.config.check_values,
            )
        cut = _compat.new_size_symbol(graph, CUT, hint=2) if self.cut_is_input else None
        return split_stages(
            graph,
            flow,
            cut=cut,
            num_stages=self.config.num_stages,
            group=result.group,
            local=local,
            check_values=self.config.check_values,
        )

    def _paged_sizes(self, graph: fx.Graph, flow: TokenFlow) -> PagedSizes:
        # Hints as in a step with some padding: code compiled for them is good for most steps.
        tokens = max(4, _compat.size_hint(flow.seed.meta["val"].shape[flow.seed_dim]) - 1)
        hints = {TOKENS: tokens, CUT: tokens // 2, "afd_requests_0": 2, "afd_requests_1": 2}
        sizes = [_compat.new_size_symbol(graph, name, hint) for name, hint in hints.items()]
        return PagedSizes(sizes[0], sizes[1], (sizes[2], sizes[3]))

    def _one_stage(self, graph: fx.Graph, result: Programs, local: set[fx.Node]) -> fx.Graph:
        if local:
            assert result.flow is not None
            started = time.perf_counter()
            whole = split_stages(
                graph,
                result.flow,
                cut=None,
                num_stages=1,
                group=result.group,
                local=local,
                check_values=self.config.check_values,
            )
            self._finish("sequence_parallel", graph, whole, result, started)
            graph = whole
        self._use_exact_ops(graph, result, "exact_rows_unsplit")
        self._shard(graph, result, "shard_dispatch_unsplit")
        with self._pass("schedule_unsplit", graph, result, scheduled=True):
            order = schedule(graph, credits=self.credits, num_stages=1)
            result.order = result.order or order
        return graph

    def _shard(self, graph: fx.Graph, result: Programs, name: str) -> None:
        if result.group is None or "shard_dispatch" in self.config.disabled_passes:
            return
        with self._pass(name, graph, result):
            result.edits[name] = shard_dispatch(graph, result.group)

    def _flow(self, graph: fx.Graph, weight_of: WeightLookup) -> TokenFlow:
        """The cut that the policy asks for; between requests when there is one token each."""
        infer = functools.partial(
            infer_token_flow,
            graph,
            assume_causal=self.config.assume_causal,
            parameters=_parameters(graph, weight_of),
        )
        if self.config.split != "request":
            try:
                return infer(mode="sequence")
            except NoTokenAxis as one_token_each:
                try:
                    return infer(mode="batch")
                except NoTokenAxis:
                    raise one_token_each from None
        try:
            return infer(mode="batch")
        except NoTokenAxis as one_request:
            reason = one_request
            # For one token the planner has one word, whatever the policy.
            try:
                infer(mode="sequence")
            except NoTokenAxis as one_token:
                reason = one_token
            except UnsupportedError:
                pass
            raise reason from None

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
        if "verify" not in self.config.disabled_passes:
            verify(after, after=name, credits=self.credits if scheduled else None)
            spent = time.perf_counter() - passed
            result.pass_seconds["verify"] = result.pass_seconds.get("verify", 0.0) + spent
        if self.observer is not None:
            self.observer(name, before, after)


def _parameters(graph: fx.Graph, weight_of: WeightLookup) -> set[fx.Node]:
    return {node for node in graph.nodes if node.op == "placeholder" and weight_of(node)}


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return copy
