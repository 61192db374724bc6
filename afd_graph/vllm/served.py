"""A compiled model inside vLLM: both programs, the choice between them, and the FFN side.

One per model and process. The experts are handed to the connector with the first call, when their
real weights are at hand, whether the programs were just compiled or come out of vLLM's cache.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import afd_graph.ops  # noqa: F401  (registers the operators of the programs)
from afd_graph.config import AFDConfig
from afd_graph.connectors import create_connector
from afd_graph.connectors.base import Connector
from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.dump import write_run
from afd_graph.errors import ConfigError
from afd_graph.report import GraphReport, LayerReport, Report, StepTaken
from afd_graph.runtime import Channel, channel_named, open_channel
from afd_graph.tracing import Tracer
from afd_graph.vllm import ranks
from afd_graph.vllm.ascend import is_ascend
from afd_graph.vllm.ascend_layer import ascend_program
from afd_graph.vllm.experts import expert_program, load_kernels
from afd_graph.vllm.observe import IntervalLog
from afd_graph.vllm.opaque_layer import moe_layer
from afd_graph.vllm.programs import CHANNEL, ExpertSource, Programs
from afd_graph.vllm.shared_rows import SharedRowsChannel, check_sums
from afd_graph.vllm.stage_context import (
    DUMMY_RUN,
    PROFILE_RUN,
    plan_of,
    without_captured_graphs,
)

log = logging.getLogger("vllm.afd_graph")

_models: weakref.WeakSet[ServedModel] = weakref.WeakSet()


class FFNSide:
    """Connector and channel of one model, made from its options.

    Args:
        config: the options.
        vllm_config: vLLM's configuration of the model.

    Raises:
        ConfigError: the connector does not fit this vLLM, or its ranks disagree.
        ConnectorError: its other ranks did not come.
    """

    def __init__(self, config: AFDConfig, vllm_config: Any) -> None:
        from vllm.platforms import current_platform

        self.config = config
        self.vllm_config = vllm_config
        if is_ascend(current_platform) and config.connector != "cam":
            raise ConfigError(
                f"connector={config.connector!r} is not there on vLLM-Ascend",
                remedy="set connector='cam', with the options of docs/ascend.md",
            )
        on_ranks = config.connector == "torch_distributed"
        if not current_platform.is_cpu() and (on_ranks or config.connector == "process"):
            raise ConfigError(
                f"connector={config.connector!r} takes rows from a CPU, and this is "
                f"{current_platform.device_type}",
                remedy="there is no connector of vLLM for this device yet",
            )
        parallel = vllm_config.parallel_config
        # The plugin asked before, but only where vLLM's configuration counts the experts.
        ranks.check_whole_experts(parallel)
        self.tensor_parallel = parallel.tensor_parallel_size, parallel.rank
        self.connector: Connector
        if on_ranks:
            self.connector = ranks.make_connector(config, vllm_config)
        else:
            self.connector = create_connector(config.connector, config.connector_options)
        self.shares_rows = on_ranks and self.tensor_parallel[0] > 1
        self.channel = open_channel(
            config,
            self.connector,
            channel_type=SharedRowsChannel if self.shares_rows else None,
        )
        self.channel.tensor_parallel = self.tensor_parallel

    def take(
        self,
        layer: int,
        name: str,
        weights: Sequence[torch.Tensor | None],
        activation: str,
        isa: str,
        calls: str,
    ) -> None:
        """Take the experts of a layer (:func:`afd_graph.vllm.ranks.announce`)."""
        if isinstance(self.connector, TorchDistributedConnector):
            ranks.announce(self.connector, layer, name, weights, activation, isa, calls)
        else:
            self.connector.add_program(expert_program(layer, name, weights, activation, isa))
        w13 = weights[0]
        assert w13 is not None
        self.channel.num_experts[layer] = w13.shape[0]

    def check(self, programs: Programs) -> None:
        """Refuse programs that this side cannot serve.

        Raises:
            UnsupportedError: tensor-parallel ranks do not sum what they receive.
        """
        if self.shares_rows:
            for program in (programs.unsplit, programs.split):
                if program is not None:
                    check_sums(program.graph)

    def give_up(self, error: BaseException) -> None:
        """Leave the FFN side since no model was made; ranks are told why."""
        if isinstance(self.connector, TorchDistributedConnector):
            self.connector.stop(f"the model was not compiled: {error}")
        self.channel.close()


class ServedModel:
    """Runs the steps of one model.

    Args:
        experts: where each MoE layer's weights are.
        found: what the passes found and did.
        calls: :func:`afd_graph.vllm.programs.digest` of the programs.
        ffn: where its experts go.
        unsplit: the unsplit program.
        split: the two-stage program, if there is one.

    Attributes:
        report: what was compiled and what ran, as for any model of this package.
    """

    def __init__(
        self,
        experts: Sequence[ExpertSource],
        found: GraphReport,
        calls: str,
        ffn: FFNSide,
        unsplit: Callable[..., Any],
        split: Callable[..., Any] | None,
    ) -> None:
        self._experts = experts
        self._why_unsplit = found.unsplit_reason
        self._calls = calls
        self._channel = ffn.channel
        self._ffn = ffn
        self._unsplit, self._split = unsplit, split
        self._bound = False
        self._log = IntervalLog()
        order = "receive-first" if ffn.channel.credits == 1 else "send-first"
        self.report = Report(
            credits=ffn.channel.credits,
            order=order,
            graphs=[found],
            nodes_before=found.nodes_before,
            nodes_after=found.nodes_after,
            pass_seconds=dict(found.pass_seconds),
            dump_dir=ffn.config.dump_dir,
        )
        if ffn.config.trace:
            self.report.trace = Tracer(ffn.channel, self.report).trace
        self._finalizer = weakref.finalize(self, _close, ffn.channel, self.report)
        # vLLM's worker processes end without the interpreter's own exit handlers.
        multiprocessing.util.Finalize(None, self._finalizer, exitpriority=1)
        if isinstance(ffn.connector, TorchDistributedConnector):
            ranks.close_with_worker(self._finalizer)
        _models.add(self)

    def run(self, *inputs: Any) -> Any:
        """Run one step with vLLM's inputs, inside its forward context."""
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        plan = self._why_unsplit or plan_of(metadata)
        pairs = getattr(metadata, "pairs", ())
        self._channel.begin_step()
        try:
            if not self._bound:
                self._bind(inputs)
            with channel_named(CHANNEL, self._channel):
                if isinstance(plan, str):
                    outputs = self._unsplit(*inputs)
                    self._note_unsplit(plan, pairs)
                    return outputs
                assert self._split is not None
                first, second = plan.stages
                with without_captured_graphs():
                    outputs = self._split(*inputs, first.actual_tokens, second.actual_tokens)
        except BaseException as error:
            self._failed(error)
            raise
        self._count(StepTaken(plan.policy, mid_request=plan.cuts_request, pairs=pairs))
        return outputs

    def _failed(self, error: BaseException) -> None:
        """Leave a step that ``error`` ended; raises what is behind it, if that is known."""
        failure = self._ffn.connector.failure_behind(error)
        self._channel.abandon()
        if self._ffn.tensor_parallel[0] > 1:
            ranks.end_soon(f"a step failed: {failure or error}")
        if failure is not None:
            raise failure from error

    def _note_unsplit(self, reason: str, pairs: tuple[int, ...]) -> None:
        if reason not in self.report.steps_unsplit and reason not in (PROFILE_RUN, DUMMY_RUN):
            log.warning("AFD: a step runs unsplit, reason %s (counted from now on)", reason)
        self._count(StepTaken(policy=None, reason=reason, pairs=pairs))

    def _count(self, step: StepTaken) -> None:
        self.report.count(step)
        self._log.step(self.report)

    def _bind(self, inputs: Sequence[Any]) -> None:
        """Give the experts to the FFN side; vLLM's parameters have no memory afterwards."""
        for number, source in enumerate(self._experts):
            layer = None if source.inputs else moe_layer(source.name)
            if is_ascend(layer):
                top_k = self._bind_ascend(number, source.name, layer)
            else:
                load_kernels()
                weights, activation, isa, top_k = self._weights(source, inputs)
                self._ffn.take(number, source.name, weights, activation, isa, self._calls)
            experts = self._channel.num_experts[number]
            self.report.layers.append(
                LayerReport(number, source.name, experts, top_k, self._shared(), source.gate)
            )
        self._bound = True

    def _shared(self) -> int:
        """Shared experts of a MoE layer, which an opaque layer hides and a graph does not name."""
        config = self._ffn.vllm_config.model_config.hf_text_config
        return getattr(config, "n_shared_experts", None) or 0

    def _bind_ascend(self, number: int, name: str, layer: Any) -> int:
        """Announce experts that other ranks hold; vLLM-Ascend keeps its own copy.

        Returns:
            Experts per token.
        """
        program = ascend_program(number, name, layer)
        self._ffn.connector.add_program(program)
        self._channel.num_experts[number] = program.num_experts
        top_k: int = layer.moe_config.experts_per_token
        return top_k

    @staticmethod
    def _weights(
        source: ExpertSource, inputs: Sequence[Any]
    ) -> tuple[list[torch.Tensor | None], str, str, int]:
        if source.inputs:
            weights = [None if i is None else inputs[i] for i in source.inputs]
            return weights, source.activation, source.isa, source.top_k
        layer = moe_layer(source.name)
        experts = layer.routed_experts
        kernel = getattr(experts.quant_method, "moe_kernel", None)
        isa = getattr(getattr(kernel, "fused_experts", None), "isa", None)
        if isa is None:
            raise ConfigError(
                f"the experts of {source.name} do not run on vLLM's fused kernel for CPU",
                remedy="there is no connector for this kind of device or quantisation yet",
            )
        weights = [
            getattr(experts, name, None)
            for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
        ]
        top_k = layer.moe_config.experts_per_token
        return weights, experts.activation.value, isa, top_k

    def belongs_to(self, engine: Any) -> bool:
        """Whether this is a model of the engine with the compilation configuration ``engine``."""
        return self._ffn.vllm_config.compilation_config is engine

    def close(self) -> None:
        """Stop the FFN side; weights that its process took come back to vLLM. Idempotent."""
        self._finalizer()


def _close(channel: Channel, report: Report) -> None:
    channel.close()
    if report.dump_dir is not None:
        write_run(report, report.dump_dir)


def served_models() -> list[ServedModel]:
    """The models of this process."""
    return list(_models)
