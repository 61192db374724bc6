"""vLLM's workers as the attention ranks of a world whose FFN ranks are processes of their own.

A worker keeps its process group for itself; the world has a store and a group of its own
(:mod:`afd_graph.connectors.torch_distributed_meeting`). Tensor-parallel rank ``r`` of vLLM is
attention rank ``r``. What vLLM's configuration tells is not asked again.

A worker that fails alone would leave the others in a collective that nothing ends: vLLM's own waits
in shared memory. So when a step or the world has failed, a worker of several ends soon, which vLLM
sees, and stops.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from afd_graph.checkpoint import Checkpoint
from afd_graph.config import AFDConfig
from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.connectors.torch_distributed_world import World, WorldConfig
from afd_graph.errors import ConfigError
from afd_graph.validation import check_expert_partition
from afd_graph.vllm.packing import padded_width
from afd_graph.vllm.rank_experts import announced_program

log = logging.getLogger("vllm.afd_graph")

_OURS = ("address", "ffn_ranks", "credits", "dynamic_quant", "timeout_s", "connect_timeout_s")
_END_AFTER_S = 5.0  # time for vLLM to hear of the failure by itself
_OTHER_PARALLELISM = {
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "enable_expert_parallel": False,
}


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse ``connector_options`` of ``torch_distributed`` that have no place inside vLLM.

    Raises:
        ConfigError: an unknown option, one that vLLM's configuration tells, or no address.
    """
    unknown = sorted(set(given) - set(_OURS))
    if unknown:
        raise ConfigError(
            f"connector_options {unknown} have no place inside vLLM",
            remedy=f"use {_OURS}; the others follow from vLLM's configuration",
        )
    if "address" not in given:
        raise ConfigError(
            "connector='torch_distributed' needs an address at which both roles meet",
            remedy='set "connector_options": {"address": "HOST:PORT"}, and start '
            "afd-graph vllm-ffn with the same",
        )


def check_whole_experts(parallel: Any) -> None:
    """Refuse ranks that hold different experts: ids of the gate are those of all experts.

    Raises:
        ConfigError: vLLM's expert parallelism is on, over more than one rank.
    """
    several = parallel.tensor_parallel_size * parallel.data_parallel_size > 1
    if parallel.enable_expert_parallel and several:
        raise ConfigError(
            "vLLM's expert parallelism (enable_expert_parallel) is not there with AFD",
            remedy="leave it off; connector='torch_distributed' gives FFN ranks different experts",
        )


def check_parallelism(parallel: Any) -> None:
    """Refuse what FFN ranks cannot serve yet; ``parallel`` is vLLM's parallel configuration.

    Raises:
        ConfigError: another kind of parallelism than tensor parallelism.
    """
    for name, supported in _OTHER_PARALLELISM.items():
        found = getattr(parallel, name, supported)
        if found != supported:
            raise ConfigError(
                f"connector='torch_distributed' inside vLLM serves tensor parallelism alone, and "
                f"{name} is {found!r}",
                remedy=f"set {name} to {supported!r}",
            )


def check_model(config: AFDConfig, vllm_config: Any) -> None:
    """Refuse MoE models that FFN ranks cannot serve: else one side finds it while the other waits.

    Raises:
        ConfigError: the ranks do not divide the experts, or a second model drafts tokens.
    """
    experts = vllm_config.model_config.get_num_experts()
    check_expert_partition(experts, config.connector_options.get("ffn_ranks", 1))
    drafts = vllm_config.speculative_config
    if drafts is not None and (drafts.use_eagle() or drafts.uses_draft_model()):
        raise ConfigError(
            f"connector='torch_distributed' inside vLLM serves one model, and the speculative "
            f"method {drafts.method!r} has a second one",
            remedy="use connector='process', or leave speculative_config out",
        )


def make_connector(config: AFDConfig, vllm_config: Any) -> TorchDistributedConnector:
    """Meet the other workers and the FFN ranks; returns when all settings agree.

    Raises:
        ConfigError: settings differ, on all ranks the same message.
        ConnectorError: ranks did not come.
    """
    from afd_graph.hf import open_checkpoint

    parallel = vllm_config.parallel_config
    check_parallelism(parallel)
    size = parallel.tensor_parallel_size
    most = vllm_config.scheduler_config.max_num_batched_tokens
    settings = WorldConfig(
        **{
            "ffn_ranks": 1,
            "timeout_s": config.timeout_s,
            **config.connector_options,
            "attention_ranks": size,
            "tp_size": size,
            # A share is rounded up.
            "max_tokens": -(-most // size) * size,
            "rank": parallel.rank,
        }
    )
    if parallel.rank == 0:
        log.info(
            "AFD: waiting at %s for FFN ranks (afd-graph vllm-ffn): %d, at most %g s",
            settings.address,
            settings.ffn_ranks,
            settings.connect_timeout_s,
        )
    world = World(settings)
    connector = TorchDistributedConnector(world)
    try:
        dtype = vllm_config.model_config.dtype
        checkpoint = open_checkpoint(_directory(vllm_config), dtype)
        world.describe(described_model(checkpoint), str(dtype).removeprefix("torch."))
        connector.configured(config)
    except BaseException as error:
        world.give_up(error)
        connector.close()
        raise
    if size > 1:
        connector.on_failure(end_soon)
    return connector


def described_model(checkpoint: Checkpoint) -> str:
    """What both roles compare of the model: the checkpoint, and whose kernels read its experts."""
    import vllm

    return f"{checkpoint.fingerprint()} (vLLM {vllm.__version__})"


def announce(
    connector: TorchDistributedConnector,
    layer: int,
    name: str,
    weights: Sequence[torch.Tensor | None],
    activation: str,
    isa: str,
    calls: str,
) -> None:
    """Name a layer's experts to the FFN ranks; vLLM's own have no memory afterwards.

    Args:
        connector: to the FFN ranks.
        layer: number of the layer.
        name: its module path in the captured graph, or vLLM's name of it.
        weights: this rank's slices of w13 and w2, packed, and of their biases, or None.
        activation: vLLM's name of the activation.
        isa: vLLM's name of the kernel.
        calls: digest of the programs of this rank; those of all ranks must be equal.

    Raises:
        ConfigError: they are not equal slices of experts as the checkpoint has them.
        ConnectorError: the FFN ranks cannot compute them.
    """
    whole_name, moe = _moe_config(name)
    w13, w2, *biases = weights
    assert w13 is not None
    assert w2 is not None
    size = connector.world.config.tp_size
    padded = padded_width(isa, moe.intermediate_size // size)
    expected = (moe.num_experts, 2 * padded, moe.hidden_dim)
    if tuple(w13.shape) != expected or any(bias is not None for bias in biases):
        raise ConfigError(
            f"the experts of {whole_name} are {tuple(w13.shape)} on this rank, not {expected}, or "
            "have biases",
            remedy="run this model with connector='process'",
        )
    connector.add_program(
        announced_program(
            layer,
            whole_name,
            moe.num_experts,
            moe.intermediate_size,
            moe.hidden_dim,
            w13.dtype,
            activation,
            isa,
            calls,
        )
    )
    for weight in (w13, w2):
        weight.untyped_storage().resize_(0)


def close_with_worker(close: Callable[[], object]) -> None:
    """Call ``close`` when vLLM tells this worker process to end, which it does by its queues.

    A worker for CPU of vLLM 0.32 does not end by itself then, and is killed some seconds later:
    the FFN ranks would take that for a failure.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    original = MessageQueue.shutdown

    @functools.wraps(original)
    def shutdown(self: Any) -> None:
        original(self)
        close()

    MessageQueue.shutdown = shutdown


def end_soon(why: str) -> None:
    """End this worker, one of several, unless vLLM does it before."""

    def end() -> None:
        log.error("AFD ends this worker: %s", why)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(_END_AFTER_S, end)
    timer.daemon = True
    timer.start()


def _moe_config(name: str) -> tuple[str, Any]:
    """Full name and vLLM's configuration of the MoE layer at module path ``name``.

    Raises:
        ConfigError: no layer, or several, end with this name.
    """
    from vllm.forward_context import get_forward_context

    found = {
        layer_name: layer.moe_config
        for layer_name, layer in get_forward_context().no_compile_layers.items()
        if hasattr(layer, "moe_config") and f".{layer_name}".endswith(f".{name}")
    }
    if len(found) != 1:
        raise ConfigError(
            f"the MoE layer {name} is called {sorted(found) or 'nothing'} by vLLM",
            remedy="run this model with connector='process'",
        )
    return found.popitem()


def _directory(vllm_config: Any) -> Path:
    """The model's checkpoint, which the FFN ranks read as well.

    Raises:
        ConfigError: it is not a directory, or its weights are not used.
    """
    path = Path(vllm_config.model_config.model)
    if not path.is_dir():
        raise ConfigError(
            f"the model {str(path)!r} is not a directory",
            remedy="give both roles the directory of the checkpoint",
        )
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError(
            "vLLM makes up its weights (load_format='dummy'), and FFN ranks read the checkpoint",
            remedy="leave load_format out",
        )
    return path
