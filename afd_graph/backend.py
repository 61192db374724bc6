"""The ``torch.compile`` backend: from a captured graph to a callable that overlaps both sides.

The path of a graph: Dynamo hands it over, attention is kept whole, AOTAutograd makes it
functional, the pipeline makes two attention programs and the experts of it, a lowering makes them
callable. The path of a step: the chooser decides, the program runs, dispatch and receive go
through the backend's channel.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import afd_graph.checks
import afd_graph.ops
import afd_graph.paged_attention  # noqa: F401  (they register operators)
from afd_graph import _compat
from afd_graph.attention import keep_attention_whole
from afd_graph.compiled_graph import CompiledGraph, guarded, without_cut
from afd_graph.config import AFDConfig
from afd_graph.connectors import Connector
from afd_graph.dump import GraphDump, write_report, write_run
from afd_graph.errors import AFDError, ConfigError, ConnectorError, TrainingError
from afd_graph.lowering import decompositions, lower
from afd_graph.metadata import AttentionMetadata
from afd_graph.paged_step import CompiledSizes, PagedStepChooser
from afd_graph.passes.exact_rows import try_kernels
from afd_graph.passes.graph_tools import clean_path, root
from afd_graph.passes.match import Match
from afd_graph.pipeline import Pipeline, Programs
from afd_graph.report import GraphReport, LayerReport, Report
from afd_graph.runtime import open_channel
from afd_graph.step import StepChooser, StepSizes
from afd_graph.tracing import Trace, Tracer

log = logging.getLogger(__name__)


class AFDBackend:
    """A backend for ``torch.compile(model, backend=AFDBackend(AFDConfig(...)))``.

    One backend serves one model: all graphs captured from it (prefill, decode, other shapes)
    share the experts, which are handed to the connector once.

    Args:
        config: options; defaults and environment when None.
        connector: an already built connector instead of ``config.connector``.
        plan: a policy of the user instead of ``config.split``'s, from (extent of the token axis,
            tokens of the step) to the extent of stage 0, or to the reason for not cutting.
    """

    def __init__(
        self,
        config: AFDConfig | None = None,
        connector: Connector | None = None,
        plan: Callable[[int, int], int | str] | None = None,
    ) -> None:
        self.config = config if config is not None else AFDConfig.from_options()
        self.channel = open_channel(self.config, connector)
        self.credits = self.channel.credits
        self._connector = self.channel.connector
        order = "receive-first" if self.credits == 1 else "send-first"
        self._report = Report(credits=self.credits, order=order)
        self._tracer = Tracer(self.channel, self._report) if self.config.trace else None
        self._report.trace = None if self._tracer is None else self._tracer.trace
        self._report.dump_dir = self.config.dump_dir
        self._plan = plan
        self._to_save: bytes | AFDError | None = None
        self._step_metadata: AttentionMetadata | None = None
        # Compiled code is specialised on its sizes, and a free cut would be one more of them.
        self._cut_is_input = self.config.lowering == "eager"
        if plan is not None and not self._cut_is_input:
            self._connector.close()
            raise ConfigError(
                f"lowering={self.config.lowering!r} cuts at half of the axis, it takes no plan",
                remedy="use lowering='eager' with a plan of your own",
            )
        self._layers = _LayerRegistry()
        self._finalizer = weakref.finalize(self, self.channel.close)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile one captured graph; called by ``torch.compile``.

        Raises:
            TrainingError: gradients would be needed.
            UnsupportedError: the graph cannot be split and ``on_unsupported`` is ``error``.
        """
        if not self._finalizer.alive:
            raise ConnectorError(
                "this backend was closed", remedy="compile the model with a new AFDBackend"
            )
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
        ):
            raise TrainingError(
                "the AFD backend compiles inference only, and gradients are enabled",
                remedy="call the compiled model under torch.no_grad() or torch.inference_mode()",
            )
        keep_attention_whole(gm.graph)
        given = [n for n in gm.graph.nodes if n.op == "placeholder"]
        inputs = [
            _Input(_compat.input_source(node), value, part)
            for node, value in zip(given, example_inputs, strict=True)
            for part in _compat.flat_input(value)
        ]
        compiled: list[CompiledGraph] = []
        is_saving = _compat.is_saving()

        def compile_aten(aten: fx.GraphModule, _fakes: Sequence[Any]) -> Callable[..., Any]:
            graph = self._compile(aten, inputs, is_saving)
            compiled.append(graph)
            return _compat.boxed(graph.run)

        table = decompositions(self.config.lowering, self.config.lowering_options)
        runner = _compat.aot_compile(gm, example_inputs, compile_aten, table)
        moved = compiled[0].moved if compiled else set()
        run = guarded(
            runner, {i: value for i, value in enumerate(example_inputs) if id(value) in moved}
        )
        if self._to_save is None:
            return run
        from afd_graph.aot import SavedGraph

        saved, self._to_save = self._to_save, None
        return SavedGraph(run, saved, self._report, self.close)

    def _compile(
        self, gm: fx.GraphModule, inputs: list[_Input], is_saving: bool = False
    ) -> CompiledGraph:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        if len(placeholders) != len(inputs):
            raise AFDError(
                f"the functional graph has {len(placeholders)} inputs, the captured one "
                f"{len(inputs)}: they cannot be matched",
                remedy="please report the model",
            )
        by_node = dict(zip(placeholders, inputs, strict=True))

        def weight_of(node: fx.Node) -> tuple[str, torch.Tensor] | None:
            if node.op == "get_attr":
                value = getattr(gm, str(node.target))
                return str(node.target), value
            found = by_node[node]
            return (found.name, found.value) if found.is_weight else None

        def number(match: Match) -> int:
            key = tuple(root(product.weight) for product in match.products)
            weights = tuple(by_node[node].value if node in by_node else node for node in key)
            return self._layers.number(weights)

        dump = GraphDump(self.config.dump_dir, gm) if self.config.dump_dir is not None else None
        _compat.trace_graph("afd_captured", gm)
        pipeline = Pipeline(
            self.config,
            channel=self.channel.name,
            credits=self.credits,
            with_shapes=self.config.dump_dir is not None,
            cut_is_input=self._cut_is_input,
            observer=None if dump is None else dump.after_pass,
        )
        # Only a model with distributed weights tells which of its weights are whole.
        told = any(found.is_sharded for found in inputs)
        replicated = [
            node
            for node, found in by_node.items()
            if told and found.is_weight and not found.is_sharded
        ]
        programs = pipeline.run(gm, weight_of, number, replicated)
        if programs.ffn:
            self._connector.check_group(1 if programs.group is None else programs.group.size)
        if programs.group is not None:
            self.channel.tensor_parallel = (programs.group.size, programs.group.rank)
        if self.config.exact:
            with _compat.real_tensors():
                try_kernels(programs.unsplit.graph)
        for program in programs.ffn:
            with _compat.real_tensors():
                self._connector.add_program(program)
            self.channel.num_experts[program.layer] = program.num_experts
            if program.shared is not None:
                self.channel.shared_layers.add(program.layer)
        graph_report = self._note(programs)
        if dump is not None:
            dump.finish(programs, graph_report)
            assert self.config.dump_dir is not None
            write_report(self._report, self.config.dump_dir)
        _compat.trace_graph("afd_unsplit", programs.unsplit)
        if programs.split is not None:
            _compat.trace_graph("afd_two_stage", programs.split)
        moved = {
            id(weight)
            for program in programs.ffn
            for expression in program.expressions()
            for _, weight in expression.weights
        }
        if is_saving:
            from afd_graph.aot import stored_graph

            positions = {id(found.value): i for i, found in enumerate(inputs) if found.is_weight}
            self._to_save = stored_graph(
                programs, graph_report, self.config, self.credits, positions
            )
        # Before lowering, which may fix sizes that are symbols now.
        sizes = None
        if programs.split is not None and programs.sizes is None:
            assert programs.flow is not None
            sizes = StepSizes.of(programs.unsplit.graph, programs.flow)
        unsplit = lower(self.config.lowering, programs.unsplit, self.config.lowering_options)
        split, chooser = self._two_stages(programs, sizes)
        return CompiledGraph(
            self._report, self.channel, unsplit, split, chooser, programs.unsplit_reason, moved
        )

    def _two_stages(
        self, programs: Programs, sizes: StepSizes | None
    ) -> tuple[Callable[[Sequence[Any]], Any] | None, StepChooser | PagedStepChooser | None]:
        """The two-stage program, lowered, and what decides whether a step runs it."""
        flow, gm, config = programs.flow, programs.split, self.config
        if gm is None:
            return None, None
        assert flow is not None
        if programs.sizes is not None:
            with _compat.guards_on(programs.sizes.symbols) as conditions:
                split = lower(config.lowering, gm, config.lowering_options)
            return split, PagedStepChooser(
                programs.unsplit.graph,
                flow,
                config,
                lambda: self._step_metadata,
                self._plan,
                fits=CompiledSizes(gm.graph, conditions) if conditions else None,
            )
        if config.split in ("cost", "auto") and not self._cut_is_input:
            raise ConfigError(
                f"lowering={config.lowering!r} cuts at half of the axis, "
                f"split={config.split!r} does not",
                remedy="use lowering='eager' with this policy, or split='token'",
            )
        split = lower(config.lowering, gm, config.lowering_options)
        ranks = 1 if programs.group is None else programs.group.size
        assert sizes is not None
        chooser = StepChooser(sizes, config, self._plan, ranks)
        return split if self._cut_is_input else without_cut(split), chooser

    @contextlib.contextmanager
    def step_metadata(self, metadata: AttentionMetadata) -> Iterator[None]:
        """Hand over the metadata of the step that the model is called for inside.

            with backend.step_metadata(AttentionMetadata(query_start_loc_cpu=..., ...)):
                compiled(tokens, positions, ...)

        A step over paged caches is only split when it has some: its requests come from here, in
        host integers. ``query_start_loc`` and ``seq_lens`` (or their ``_cpu`` forms) are needed;
        block table and slots only where those of the graph's inputs are not in host memory.
        """
        before, self._step_metadata = self._step_metadata, metadata
        try:
            yield
        finally:
            self._step_metadata = before

    def _note(self, programs: Programs) -> GraphReport:
        known = {layer.index for layer in self._report.layers}
        numbers = [program.layer for program in programs.ffn]
        for match, layer in zip(programs.matches, numbers, strict=True):
            if layer not in known:
                self._report.layers.append(
                    LayerReport(
                        layer, match.name, match.num_experts, match.top_k, match.shared_experts
                    )
                )
        graph = GraphReport.of(programs)
        self._report.graphs.append(graph)
        self._report.nodes_before += graph.nodes_before
        self._report.nodes_after += graph.nodes_after
        for name, seconds in graph.pass_seconds.items():
            self._report.pass_seconds[name] = self._report.pass_seconds.get(name, 0.0) + seconds
        what = f"{len(numbers)} MoE layers" if numbers else "no MoE layer: runs as captured"
        how = f"two stages ({graph.mode})" if graph.mode else f"unsplit: {graph.unsplit_reason}"
        log.info(
            "compiled a graph of %d nodes: %s, %s, %d nodes emitted",
            graph.nodes_before,
            what,
            how,
            graph.nodes_after,
        )
        for failure in graph.no_match:
            log.warning("expert products that do not match: %s", failure)
        return graph

    def report(self) -> Report:
        """What was compiled and what ran so far."""
        return self._report

    def trace(self) -> Trace:
        """The last steps as they were measured.

        Raises:
            ConfigError: the backend was not asked to trace.
        """
        if self._tracer is None:
            raise ConfigError(
                "this backend keeps no trace", remedy="compile with AFDConfig(trace=True)"
            )
        return self._tracer.trace()

    def close(self) -> None:
        """Stop the FFN side and free what it holds; idempotent.

        With a dump directory, writes ``report.json`` and what was traced there.
        """
        is_open, directory = self._finalizer.alive, self.config.dump_dir
        self._finalizer()
        if is_open and directory is not None and self._report.graphs:
            write_run(self._report, directory)

    def __enter__(self) -> AFDBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Input:
    """One input of the functional graph: a captured input, or a part of a distributed one."""

    def __init__(self, source: str | None, captured: Any, part: Any) -> None:
        self.name = clean_path(source) if source else "?"
        self.value = part
        self.is_weight = isinstance(part, torch.Tensor) and (
            isinstance(captured, torch.nn.Parameter)
            or (source is not None and "._buffers[" in source)
        )
        self.is_sharded = _compat.is_sharded(captured)


class _LayerRegistry:
    """Numbers MoE layers by the identity of their weights, the same in every graph of a model."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._alive: list[Any] = []

    def number(self, weights: tuple[Any, ...]) -> int:
        key = tuple(id(weight) for weight in weights)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._alive.append(weights)
        return self._numbers[key]


_default_backends: dict[str, AFDBackend] = {}


def afd_backend(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile with options from ``torch.compile(options=...)`` and the environment.

    ``torch.compile(model, backend=afd_backend)`` or ``backend="afd"``. Calls with equal options
    share one :class:`AFDBackend`. A graph of vLLM takes the way of
    :mod:`afd_graph.vllm`, with options from vLLM's configuration.
    """
    if "vllm" in sys.modules:
        from afd_graph.vllm.backend import compile_without_plugin, is_vllm_graph

        if is_vllm_graph(gm):
            return compile_without_plugin(gm, example_inputs)
    config = AFDConfig.from_options(options)
    key = config.digest() + str((config.layout_log, config.trace, config.dump_dir))
    backend = _default_backends.get(key)
    if backend is None or not backend._finalizer.alive:
        backend = _default_backends[key] = AFDBackend(config)
    return backend(gm, example_inputs)


def report(compiled: Any = None) -> Report:
    """The report of a compiled model, or of the last default backend.

    Raises:
        AFDError: nothing was compiled with this package.
    """
    backend = None if compiled is None else _compat.backend_of(compiled)
    if isinstance(backend, AFDBackend):
        return backend.report()
    if not _default_backends:
        raise AFDError(
            "no model was compiled with the AFD backend yet",
            remedy="call torch.compile(model, backend=afd_graph.afd_backend) and run it once",
        )
    return next(reversed(_default_backends.values())).report()


def close_default_backends() -> None:
    """Close every backend that :func:`afd_backend` made."""
    with contextlib.ExitStack() as stack:
        for backend in _default_backends.values():
            stack.callback(backend.close)
    _default_backends.clear()
