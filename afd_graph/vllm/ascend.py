"""What is known of vLLM-Ascend, by version: where a split would hook in, and why it does not run.

The hook points are those of the published wheels, checked by reading their source (the test does
it again). None can run with this package: they pin a PyTorch that is older than the one this
package is built on. So vLLM-Ascend is refused with a message, and so is a version that nobody read.

vLLM-Ascend resets every compilation mode but vLLM's default one, so the way in is the plugin's
(:mod:`piecewise`); its attention is one operator, ``vllm::mla_forward``, which :mod:`split` knows;
its V1 runner builds metadata in a method of its own, with ``AscendCommonAttentionMetadata``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from afd_graph.errors import ConfigError


@dataclass(frozen=True)
class AscendVersion:
    """One published version that was read.

    Attributes:
        vllm_ascend: version of the wheel.
        torch: PyTorch that it pins.
        torch_npu: torch_npu that it pins.
        runner: file, class and method that builds a step's metadata.
        parameters: of that method, as far as the hook needs them.
        common: file and class of the metadata that is cut.
        fields: of that class that vLLM's own does not have.
        attention: file and name of the attention operator's function.
    """

    vllm_ascend: str
    torch: str
    torch_npu: str
    runner: tuple[str, str, str]
    parameters: tuple[str, ...]
    common: tuple[str, str]
    fields: tuple[str, ...]
    attention: tuple[str, str]


_RUNNER = ("vllm_ascend/worker/model_runner_v1.py", "NPUModelRunner", "_build_attention_metadata")
_PARAMETERS = ("num_tokens", "num_reqs", "ubatch_slices", "num_scheduled_tokens")
_COMMON = ("vllm_ascend/attention/utils.py", "AscendCommonAttentionMetadata")
_ATTENTION = ("vllm_ascend/ops/mla.py", "mla_forward")
_FIELDS = (
    *("seq_lens_cpu", "num_computed_tokens_cpu", "decode_token_per_req", "actual_seq_lengths_q"),
    *("positions", "attn_state", "graph_pad_size", "num_input_tokens"),
)

VERSIONS = (
    AscendVersion(
        vllm_ascend="0.18.0",
        torch="2.9.0",
        torch_npu="2.9.0",
        runner=_RUNNER,
        parameters=_PARAMETERS,
        common=_COMMON,
        fields=_FIELDS,
        attention=_ATTENTION,
    ),
    AscendVersion(
        vllm_ascend="0.26.0rc1",
        torch="2.10.0",
        torch_npu="2.10.0.post4",
        runner=_RUNNER,
        parameters=_PARAMETERS,
        common=_COMMON,
        fields=(*_FIELDS, "positions_cpu"),
        attention=_ATTENTION,
    ),
)
"""The versions whose source was read."""


def refuse(version: str | None) -> None:
    """Say why the backend does not run on vLLM-Ascend ``version``.

    Raises:
        ConfigError: always.
    """
    known = {entry.vllm_ascend: entry for entry in VERSIONS}
    if version in known:
        entry = known[version]
        raise ConfigError(
            f"vLLM-Ascend {version} pins torch {entry.torch} and torch_npu {entry.torch_npu}, "
            "which this package does not run on",
            remedy="use the core's torchair lowering and connector 'cam' without vLLM "
            "(docs/ascend.md)",
        )
    raise ConfigError(
        f"vLLM-Ascend {version or 'of unknown version'} was not checked; checked are "
        f"{', '.join(known)}",
        remedy="see docs/vllm.md for what the hooks rely on",
    )


def refuse_if_ascend(platform: Any) -> None:
    """Refuse vLLM-Ascend's platform; does nothing on any other.

    Raises:
        ConfigError: ``platform`` is that of vLLM-Ascend.
    """
    if not type(platform).__module__.startswith("vllm_ascend"):
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("vllm_ascend")
    except PackageNotFoundError:
        found = None
    refuse(found)
