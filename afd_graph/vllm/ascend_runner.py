"""The V1 runner of vLLM-Ascend: metadata of a stage, and the forward context of a stage.

Where it differs from vLLM's own (:mod:`runner_hook` does the rest):

* it calls the builders itself, so that is where the hook listens;
* its common metadata has more fields, and ``attn_state`` says which kernel a step may use: a stage
  gets the state that the runner would give a step of its tokens alone. A request that is cut makes
  of a step without contexts one with contexts;
* builders write the rotary factors of decodes into one buffer of the process, which the next
  builder overwrites: every set of metadata keeps its own copy;
* more than twenty attributes are set on the forward context. :data:`CONTEXT` says of each what it
  is in a stage; one that is not there is refused by name.

Written and tested against the published source, with stand-ins for what needs an NPU; never run on
one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from afd_graph.errors import PlanError
from afd_graph.metadata import FieldKind
from afd_graph.planner import Stage
from afd_graph.vllm import ascend
from afd_graph.vllm.runner_hook import with_stages
from afd_graph.vllm.runner_rules import RunnerRules
from afd_graph.vllm.wrapping import wrap

log = logging.getLogger("vllm.afd_graph")

EXTRA_RULES: Mapping[str, FieldKind] = MappingProxyType(
    dict.fromkeys(
        (
            *("parallel_draft_seq_lens_cpu", "parallel_draft_num_reject_cpu"),
            *("parallel_draft_num_reject_event", "parallel_draft_num_reject_num_reqs"),
            *("req_ids_tensor", "token_to_req", "prefill_context_parallel_metadata"),
        ),
        FieldKind.INHERITED,
    )
)
"""Fields of the common metadata that the core does not know; the others follow its table."""

_ONLY_NONE = (
    *EXTRA_RULES,
    *("context_parallel_metadata", "logits_indices_padded", "mm_req_doc_ranges"),
)
"""Fields of drafts, sparse offload, context parallelism: a step that has one is not cut."""

_BUILDERS = ("AscendMLAMetadataBuilder", "AscendAttentionMetadataBuilder")
"""Builders whose metadata is known to follow from the common metadata alone."""


def install(vllm_config: Any) -> None:
    """Wrap the runner's method, once.

    Raises:
        ConfigError: the installed version was not checked or differs at the hook points, or
            ``vllm_config`` has something that is not split on vLLM-Ascend.
    """
    entry = ascend.check_installed()
    ascend.check_config(vllm_config)
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    ascend.check_source(entry)
    wrap(NPUModelRunner, "_build_attention_metadata", functools.partial(with_stages, rules=ASCEND))
    ascend.warn_untested(entry)


@contextmanager
def _heard(runner: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Collect what the runner hands to its builders; the runner calls ``build`` of each itself."""
    found: list[tuple[Any, Any]] = []
    builders = []
    for group in (group for groups in runner.attn_groups for group in groups):
        builder = group.get_metadata_builder(0)
        builder.build = _noting(found, group, builder.build)
        builders.append(builder)
    try:
        yield found
    finally:
        for builder in builders:
            del builder.build  # the method of the class is visible again


def _noting(found: list[tuple[Any, Any]], group: Any, build: Callable[..., Any]) -> Any:
    def noting(*, common_attn_metadata: Any, **kwargs: Any) -> Any:
        found.append((group, common_attn_metadata))
        return build(common_attn_metadata=common_attn_metadata, **kwargs)

    return noting


def _build(group: Any, common: Any) -> Any:
    # Shared prefixes (cascade attention) only make a kernel faster.
    return group.get_metadata_builder(0).build(common_prefix_len=0, common_attn_metadata=common)


def can_stage(runner: Any, kwargs: Mapping[str, Any], groups: list[tuple[Any, Any]]) -> bool:
    """Whether the parts of a step that only this platform has can be cut."""
    problem = _why_not(runner, groups)
    if problem is not None:
        log.debug("step cannot be cut: %s", problem)
    return problem is None


def _why_not(runner: Any, groups: list[tuple[Any, Any]]) -> str | None:
    if runner.speculative_config is not None:
        return "the drafter goes on with the step's metadata"
    if getattr(runner, "is_mm_prefix_lm", False):
        return "image tokens attend both ways"
    for group, common in groups:
        builder = type(group.get_metadata_builder(0)).__name__
        if builder not in _BUILDERS:
            return f"{builder} is not known"
        if common.graph_pad_size > 0 or common.decode_token_per_req != 1:
            return "the metadata is that of a captured graph or of drafts"
        for name in _ONLY_NONE:
            value = getattr(common, name, None)
            if value is not None and not (isinstance(value, int) and value == 0):
                return f"the metadata has {name}"
    return None


def complete(runner: Any, fields: dict[str, Any]) -> None:
    """Set ``attn_state`` of a stage, by the runner's own rule for a step of its tokens alone."""
    counts = np.diff(fields["query_start_loc_cpu"].numpy())
    computed = fields["seq_lens_cpu"]
    if computed is None:  # the host copy has the other name where steps are scheduled ahead
        computed = fields["_seq_lens_cpu"]
    alone = SimpleNamespace(
        input_batch=SimpleNamespace(num_computed_tokens_cpu=computed.numpy() - counts),
        speculative_config=None,
        scheduler_config=runner.scheduler_config,
    )
    rule = type(runner)._build_attn_state
    fields["attn_state"] = rule(alone, len(counts), counts, counts)


def own_rotary_factors(metadata: Mapping[str, Any]) -> None:
    """Copy the rotary factors of decodes: the next builder overwrites the buffer they lie in."""
    for entry in {id(value): value for value in metadata.values()}.values():
        decode = getattr(entry, "decode", None)
        if decode is not None and decode.cos is not None:
            decode.cos, decode.sin = decode.cos.clone(), decode.sin.clone()


def _inherited(value: Any, stage: Stage) -> Any:
    return value


def _tokens(value: Any, stage: Stage) -> Any:
    return stage.actual_tokens


def _rows(value: Any, stage: Stage) -> Any:
    return None if value is None else value[stage.token_slice]


def _mask(value: Any, stage: Stage) -> Any:
    # One for each row: a stage has no padding. The step's is a view of a buffer of the process.
    return value.new_ones(stage.actual_tokens)


def _only(*allowed: Any) -> Callable[..., Any]:
    """The rule of an attribute that is only known to be right with these values."""

    def rule(value: Any, stage: Stage) -> Any:
        if value not in allowed:
            raise _Unstaged(f"is {value!r}, and only {' or '.join(map(repr, allowed))} is known")
        return value

    return rule


def _all_gather(value: Any, stage: Stage) -> Any:
    if value is not None and value.name != "ALLGATHER":
        raise _Unstaged(f"is {value!r}, chosen by the number of tokens of the whole step")
    return value


class _Unstaged(Exception):
    pass


CONTEXT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "num_tokens": _tokens,
        "max_tokens_across_dp": _tokens,
        "padded_num_tokens": _tokens,
        "mc2_mask": _mask,
        "input_ids": _rows,
        # Sequence parallelism: rows would be padded to a multiple of the ranks.
        "flash_comm_v1_enabled": _only(False),
        "flashcomm_v2_enabled": _only(False),
        "pad_size": _only(0),
        "padded_length": _only(None),
        # The kind of step that is never split.
        "capturing": _only(False),
        "in_profile_run": _only(False),
        "is_draft_model": _only(False),
        "is_draft_model_prefill": _only(False),
        "draft_attn_metadatas": _only(None),
        "num_accept_tokens": _only(None),
        # Experts: not called in a split step, but these decide how a layer's answer is summed.
        "moe_comm_type": _all_gather,
        "moe_comm_method": _inherited,
        "use_mega_moe": _only(False),
        "eplb_heat_collection_status": _only(False, None),
        "mmrs_fusion": _inherited,
        # Places in the model, counted per call: nothing that is left in a split step counts.
        "layer_idx": _inherited,
        "is_first_layer": _inherited,
        "prefetch_mlp_gate_up_proj": _only(False),
        "prefetch_mlp_down_proj": _only(False),
        "model_instance": _inherited,
        "max_tokens_across_pcp": _only(0),
        "sinks": _inherited,
        "is_decode_only_node": _inherited,
    }
)
"""What an attribute of the forward context is in a stage: a function of value and stage."""


def complete_context(context: Any, stage: Stage) -> None:
    """Set the attributes that vLLM-Ascend put on the forward context to those of ``stage``.

    Raises:
        PlanError: an attribute without a rule, or a value for which the rule is not known.
    """
    fields = {field.name for field in dataclasses.fields(context)}
    for name in sorted(set(vars(context)) - fields):
        try:
            if name not in CONTEXT:
                raise _Unstaged("has no rule")
            setattr(context, name, CONTEXT[name](getattr(context, name), stage))
        except _Unstaged as problem:
            raise PlanError(
                f"the forward context's {name} {problem}",
                remedy="run this configuration without the AFD backend; docs/vllm-inside.md "
                "says what is known of vLLM-Ascend",
            ) from None


ASCEND = RunnerRules(
    heard=_heard,
    build=_build,
    extra_rules=EXTRA_RULES,
    can_stage=can_stage,
    own=own_rotary_factors,
    complete=complete,
    context=complete_context,
)
"""The V1 runner of vLLM-Ascend."""
