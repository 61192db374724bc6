"""Metadata per stage, built where vLLM's V1 model runner builds that of the step.

:func:`install` wraps ``GPUModelRunner._build_attention_metadata`` (the CPU runner inherits it). The
wrapper lets vLLM build the step's metadata as ever, listens to what each attention group is built
from, plans the cut, and for every stage

1. cuts that common metadata (:class:`afd_graph.metadata.AttentionMetadata`), which gives the stage
   buffers of its own, and lengths by the rules of chunked prefill;
2. lets a builder that belongs to the stage alone make the backend's metadata. Builders keep state
   between calls, and the runner's own cache of built metadata does not tell stages apart.

A step that cannot be cut carries its reason. The wrapper does nothing for runners whose
configuration does not use the backend, and nothing is wrapped twice.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from afd_graph.metadata import AttentionMetadata
from afd_graph.planner import NoSplit, Stage
from afd_graph.vllm.options import Options, options_of
from afd_graph.vllm.runner_rules import UPSTREAM, RunnerRules, listening
from afd_graph.vllm.stage_context import (
    DUMMY_RUN,
    UNSUPPORTED_STEP,
    StagedMetadata,
    UnsplitMetadata,
)
from afd_graph.vllm.step_plan import plan_step, stage_pairs, step_lengths
from afd_graph.vllm.wrapping import wrap

log = logging.getLogger("vllm.afd_graph")

_CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
"""What vLLM computes from the other fields on demand."""


def install(vllm_config: Any) -> None:
    """Wrap the methods of this platform's runner, once.

    Raises:
        ConfigError: a version of a platform, or a configuration on it, that is not known.
    """
    from vllm.platforms import current_platform

    from afd_graph.vllm import ascend

    if ascend.is_ascend(current_platform):
        from afd_graph.vllm import ascend_runner

        ascend_runner.install(vllm_config)
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    from afd_graph.vllm import worker_rules

    worker_rules.install()
    wrap(GPUModelRunner, "_build_attention_metadata", with_stages)
    wrap(AttentionGroup, "build_metadata", listening)


def uses_backend(vllm_config: Any) -> Options | None:
    """The options, if this configuration's model is compiled by the backend."""
    from vllm.config import CompilationMode

    from afd_graph.vllm.options import BACKEND

    compilation = vllm_config.compilation_config
    options = options_of(vllm_config)
    by_name = compilation.backend == BACKEND
    by_plugin = options.given and compilation.mode == CompilationMode.VLLM_COMPILE
    return options if options.enabled and (by_name or by_plugin) else None


def with_stages(original: Any, rules: RunnerRules = UPSTREAM) -> Any:
    """Wrap a runner's ``_build_attention_metadata``."""

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = options_of_runner(self)
        if options is None or kwargs.get("ubatch_slices") is not None:
            return original(self, *args, **kwargs)
        with rules.heard(self) as groups:
            built, common = original(self, *args, **kwargs)
        if not isinstance(built, dict) or not built:
            return built, common
        scheduled = kwargs.get("num_scheduled_tokens")
        if scheduled is None:
            return UnsplitMetadata(built, DUMMY_RUN), common
        if not (_can_stage(self, kwargs, groups, built) and rules.can_stage(self, kwargs, groups)):
            return UnsplitMetadata(built, UNSUPPORTED_STEP), common
        plan = plan_step(self, scheduled, options.config)
        pairs = stage_pairs(self, scheduled, plan) if options.config.trace else ()
        if isinstance(plan, NoSplit):
            log.debug("step unsplit, %s: %s", plan.reason, plan.detail)
            return UnsplitMetadata(built, str(plan.reason), pairs), common
        log.debug("step split: %s", plan.stages)
        counts, contexts = step_lengths(self.input_batch, scheduled)
        lengths = (counts + contexts).tolist()
        rules.own(built)
        stages: list[dict[str, Any]] = []
        for number, stage in enumerate(plan.stages):
            stages.append({})
            for group, step in groups:
                common_of_stage = _cut(step, stage, lengths, self, rules)
                mine = rules.build(_stage_group(group, self, number), common_of_stage)
                stages[-1].update(dict.fromkeys(group.layer_names, mine))
            rules.own(stages[-1])
        return StagedMetadata(built, plan, stages, pairs, rules.context), common

    return build


def options_of_runner(runner: Any) -> Options | None:
    """The options of a runner whose model the backend compiles; read once."""
    if not hasattr(runner, "_afd_options"):
        runner._afd_options = uses_backend(runner.vllm_config)
    return runner._afd_options


def _can_stage(runner: Any, kwargs: Mapping[str, Any], groups: list[Any], built: Any) -> bool:
    """Whether all that this step's metadata is made of can be cut."""
    heard = {layer for group, _ in groups for layer in group.layer_names}
    return not (
        kwargs.get("use_spec_decode")
        or kwargs.get("for_cudagraph_capture")
        or runner.parallel_config.data_parallel_size > 1
        or getattr(runner, "dcp_world_size", 1) > 1
        or runner.cache_config.kv_sharing_fast_prefill
        # A connector may start to save a layer when its attention returns, so after one stage.
        or runner.vllm_config.kv_transfer_config is not None
        or any(step.encoder_seq_lens is not None or step.causal is not True for _, step in groups)
        or heard != set(built)
    )


def _stage_group(group: Any, runner: Any, stage: int) -> Any:
    """A copy of an attention group with a builder that serves one stage alone."""
    from vllm.config import set_current_vllm_config

    made = group.__dict__.setdefault("_afd_stage_groups", {})
    if stage not in made:
        mine = copy.copy(group)
        mine.__dict__.pop("_afd_stage_groups", None)
        block_size = getattr(group.metadata_builders[0].kv_cache_spec, "block_size", None)
        with set_current_vllm_config(runner.vllm_config):  # as when the runner made its own
            mine.create_metadata_builders(runner.vllm_config, runner.device, block_size, 1)
        made[stage] = mine
    return made[stage]


def _cut(step: Any, stage: Stage, lengths: list[int], runner: Any, rules: RunnerRules) -> Any:
    """vLLM's common metadata of one stage."""
    given = {
        entry.name: getattr(step, entry.name)
        for entry in dataclasses.fields(step)
        if entry.name not in _CACHES
    }
    # The host's lengths are ours, exact ones. Some platforms have a field for theirs.
    has_host = "seq_lens_cpu" in given
    host = given.pop("seq_lens_cpu", None)
    # Requests that only pad the batch have no tokens.
    padding = [0] * (len(step.seq_lens) - len(lengths))
    parent = AttentionMetadata(
        extra_rules={name: kind for name, kind in rules.extra_rules.items() if name in given},
        **given,
        seq_lens_cpu=[*lengths, *padding],
    )
    mine = parent.for_stage(stage).as_dict()
    exact = mine.pop("seq_lens_cpu")
    if has_host:
        mine["seq_lens_cpu"] = None if host is None else host.new_tensor(exact)
    rules.complete(runner, mine)
    return type(step)(**mine)
