"""Which versions of vLLM-Ascend the hooks were written for, and what is refused on it.

A version is checked when its published source was read, and its modules imported and driven by the
hooks with stand-ins for what needs an NPU (``tests/vllm/test_ascend.py``). An installed
version that is not in :data:`VERSIONS`, or differs from its entry at the hook points, is refused
with what differs. Nothing of this ever ran on an NPU, and the log says so.

vLLM-Ascend resets every compilation mode but vLLM's default one, so the way in is the plugin's
(:mod:`piecewise`).
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from afd_graph._compat import TESTED_TORCH
from afd_graph.errors import ConfigError

log = logging.getLogger("vllm.afd_graph")

_REMEDY = "use a version of the table in docs/vllm.md, or the core without vLLM (docs/ascend.md)"


@dataclass(frozen=True)
class AscendVersion:
    """One published version that was checked.

    Attributes:
        vllm: version of vLLM that it is made for.
        vllm_ascend: version of the wheel.
        torch: PyTorch that it pins.
        torch_npu: torch_npu that it pins.
        parameters: of ``NPUModelRunner._build_attention_metadata``.
        fields: of ``AscendCommonAttentionMetadata`` that vLLM's own class does not have.
        attributes: that ``set_ascend_forward_context`` puts on the forward context.
    """

    vllm: str
    vllm_ascend: str
    torch: str
    torch_npu: str
    parameters: tuple[str, ...]
    fields: tuple[str, ...]
    attributes: tuple[str, ...]


_PARAMETERS = (
    *("self", "num_tokens", "num_reqs", "max_query_len", "num_tokens_padded", "num_reqs_padded"),
    *("ubatch_slices", "logits_indices", "use_spec_decode", "for_cudagraph_capture"),
    *("num_scheduled_tokens", "num_scheduled_tokens_np", "cascade_attn_prefix_lens"),
)
_FIELDS = (
    *("seq_lens_cpu", "num_computed_tokens_cpu", "decode_token_per_req", "actual_seq_lengths_q"),
    *("attn_state", "graph_pad_size", "num_input_tokens"),
)
_ATTRIBUTES = (
    *("capturing", "draft_attn_metadatas", "flash_comm_v1_enabled", "in_profile_run"),
    *("is_draft_model", "is_first_layer", "layer_idx", "max_tokens_across_dp"),
    *("max_tokens_across_pcp", "mc2_mask", "mmrs_fusion", "model_instance", "moe_comm_method"),
    *("moe_comm_type", "num_tokens", "pad_size", "padded_length", "padded_num_tokens"),
    *("prefetch_mlp_down_proj", "prefetch_mlp_gate_up_proj"),
)
_BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")
_STATE = ("self", "num_reqs", "num_scheduled_tokens", "num_valid_tokens")
_MLA_FORWARD = ("hidden_states", "need_gather_q_kv", "output", "layer_name")

VERSIONS = (
    AscendVersion(
        vllm="0.18.0",
        vllm_ascend="0.18.0",
        torch="2.9.0",
        torch_npu="2.9.0",
        parameters=_PARAMETERS,
        fields=(*_FIELDS, "positions", "prefill_context_parallel_metadata"),
        attributes=(*_ATTRIBUTES, "flashcomm_v2_enabled"),
    ),
    AscendVersion(
        vllm="0.26.0",
        vllm_ascend="0.26.0rc1",
        torch="2.10.0",
        torch_npu="2.10.0.post4",
        parameters=(*_PARAMETERS, "skip_gdn_state_update"),
        fields=(
            *(*_FIELDS, "parallel_draft_seq_lens_cpu", "parallel_draft_num_reject_cpu"),
            *("parallel_draft_num_reject_event", "parallel_draft_num_reject_num_reqs"),
            *("positions_cpu", "context_parallel_metadata", "group_len", "group_key_idx"),
            *("group_key_cache_idx", "req_ids_tensor", "token_to_req"),
        ),
        attributes=(
            *(*_ATTRIBUTES, "eplb_heat_collection_status", "input_ids", "is_decode_only_node"),
            *("is_draft_model_prefill", "sinks", "use_mega_moe"),
        ),
    ),
)
"""The versions that were checked."""


def is_ascend(part: Any) -> bool:
    """Whether a platform or a layer is one of vLLM-Ascend."""
    return type(part).__module__.split(".")[0] == "vllm_ascend"


def check_installed() -> AscendVersion:
    """The entry of the installed version.

    Raises:
        ConfigError: it has none, or vLLM or PyTorch are not those that it can run with.
    """
    import vllm

    return entry_of(_installed("vllm_ascend"), vllm.__version__, torch.__version__)


def entry_of(vllm_ascend: str | None, vllm: str, torch_version: str) -> AscendVersion:
    """The entry of a version.

    Raises:
        ConfigError: it has none, or these versions of vLLM and PyTorch do not fit.
    """
    known = {entry.vllm_ascend: entry for entry in VERSIONS}
    if vllm_ascend not in known:
        raise ConfigError(
            f"vLLM-Ascend {vllm_ascend or 'of unknown version'} was not checked; checked are "
            f"{', '.join(known)}",
            remedy=_REMEDY,
        )
    entry = known[vllm_ascend]
    if vllm.split("+")[0] != entry.vllm:
        raise ConfigError(
            f"vLLM-Ascend {vllm_ascend} was checked with vLLM {entry.vllm}, this is {vllm}",
            remedy=_REMEDY,
        )
    if not torch_version.startswith(f"{TESTED_TORCH}."):
        raise ConfigError(
            f"vLLM-Ascend {vllm_ascend} pins torch {entry.torch} and torch_npu {entry.torch_npu}; "
            f"this package runs on torch {TESTED_TORCH}, installed is {torch_version}",
            remedy=f"install torch and torch_npu {TESTED_TORCH} beside it, which vLLM-Ascend does "
            "not test, or use the core without vLLM (docs/ascend.md)",
        )
    return entry


def check_source(entry: AscendVersion) -> None:
    """Compare the installed source with ``entry`` at the hook points.

    Raises:
        ConfigError: it differs; says all that does.
    """
    differences = list(_differences(entry))
    if differences:
        raise ConfigError(
            f"the installed vLLM-Ascend {entry.vllm_ascend} differs from the checked one: "
            f"{'; '.join(differences)}",
            remedy="install the published wheel without changes, or report what changed it",
        )


def _differences(entry: AscendVersion) -> Iterator[str]:
    from vllm.v1.attention.backends.utils import CommonAttentionMetadata
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context
    from vllm_ascend.attention.mla_v1 import AscendMLAMetadataBuilder
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
    from vllm_ascend.ops.mla import mla_forward
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    functions: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
        (NPUModelRunner._build_attention_metadata, entry.parameters),
        (NPUModelRunner._build_attn_state, _STATE),
        (AscendMLAMetadataBuilder.build, _BUILD),
        (mla_forward, _MLA_FORWARD),
    )
    for function, parameters in functions:
        found = tuple(inspect.signature(function).parameters)
        yield from _changed(f"parameters of {function.__qualname__}", found, parameters)
    upstream = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    own = [field.name for field in dataclasses.fields(AscendCommonAttentionMetadata)]
    own = [name for name in own if name not in upstream]
    yield from _changed("fields of AscendCommonAttentionMetadata", own, entry.fields)
    source = inspect.getsource(set_ascend_forward_context)
    attributes = set(re.findall(r"\bforward_context\.(\w+) = ", source))
    yield from _changed("attributes of the forward context", sorted(attributes), entry.attributes)


def _changed(what: str, found: Sequence[str], expected: Sequence[str]) -> Iterator[str]:
    new = [name for name in found if name not in expected]
    gone = [name for name in expected if name not in found]
    if new or gone:
        yield f"{what} have {new} more and lack {gone}"


def check_config(vllm_config: Any) -> None:
    """Refuse what cannot be split on vLLM-Ascend, before the model is compiled.

    Raises:
        ConfigError: what is set, and what to set.
    """
    from vllm import envs

    parallel = vllm_config.parallel_config
    mode = vllm_config.compilation_config.cudagraph_mode
    problem = remedy = ""
    if envs.VLLM_USE_V2_MODEL_RUNNER or getattr(vllm_config, "use_v2_model_runner", False):
        problem = "this is vLLM-Ascend's V2 model runner, which builds metadata in another way"
        remedy = "set VLLM_USE_V2_MODEL_RUNNER=0"
    elif getattr(mode, "name", None) != "PIECEWISE":
        problem = (
            f"cudagraph_mode is {getattr(mode, 'name', mode)}: a graph of the whole model is "
            "captured once, with one stage"
        )
        remedy = 'set --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
    for name in (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("prefill_context_parallel_size", "decode_context_parallel_size"),
    ):
        if not problem and getattr(parallel, name, 1) > 1:
            problem = f"{name} is {getattr(parallel, name)}"
            remedy = "use one rank: nothing else was checked on vLLM-Ascend"
    if not problem:
        problem, remedy = _ascend_options()
    if problem:
        raise ConfigError(problem, remedy=remedy)


def _ascend_options() -> tuple[str, str]:
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import enable_sp

    config = get_ascend_config()
    refused = {
        "flashcomm1 (sequence parallelism)": enable_sp(),
        "weight_prefetch_config, which counts layers": getattr(
            getattr(config, "weight_prefetch_config", None), "enabled", False
        ),
        "multistream_overlap_gate": getattr(config, "multistream_overlap_gate", False),
        "dynamic_eplb": config.eplb_config.dynamic_eplb,
    }
    for name, is_on in refused.items():
        if is_on:
            return f"vLLM-Ascend's option {name} is on", "leave it off"
    return "", ""


def warn_untested(entry: AscendVersion) -> None:
    """Say that the hooks never ran on a device."""
    log.warning(
        "AFD on vLLM-Ascend %s: written and tested against its source, never run on an NPU",
        entry.vllm_ascend,
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
