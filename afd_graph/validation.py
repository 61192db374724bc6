"""Checks of options, topology and steps, as functions over plain values (semantics 7).

Every message names the key and the value and says what to do. Nothing here knows a configuration
class, an environment variable or a process group: callers pass what they have.

* 7.1, when options are parsed: :func:`check_mapping` to :func:`check_topology`;
* 7.2, when a worker starts: :func:`check_worker` runs the single checks in the recorded order and
  stops early for an expert rank, which may have any shape;
* 7.3, when a step runs: :func:`check_runtime_sequence_parallel` (plans and layouts check
  themselves);
* what the eager reference leaves unchecked: :func:`check_ranks_agree`,
  :func:`check_expert_partition`, :func:`check_capacity`, :func:`check_moe_layers`,
  :func:`check_recurrent_attention`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afd_graph.errors import ConfigError
from afd_graph.planner import POLICIES

ROLES = ("attention", "ffn")
MAX_SEQUENCE_ROWS = 262144
"""Most rows that the CAM operators take per tensor-parallel group and step (semantics 6.3)."""


class ConfigTypeError(ConfigError, TypeError):
    """An option has a value of the wrong type."""


# -- 7.1: options ----------------------------------------------------------------------------------


def check_mapping(key: str, value: Any) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping with string keys.

    Raises:
        ConfigTypeError: it is not.
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigTypeError(
            f"{key} must be a mapping of option names: {key}={value!r}",
            remedy=f"pass {key} as a dict",
        )
    return value


def check_known_keys(key: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse keys of mapping ``key`` that nobody reads.

    Raises:
        ConfigError: naming all unknown keys, sorted, and the nearest known ones.
    """
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
    raise ConfigError(
        f"unknown {key} field(s): {', '.join(unknown)}",
        remedy=(f"did you mean {', '.join(map(repr, near))}? " if near else "")
        + f"known fields: {', '.join(sorted(known))}",
    )


def resolve_aliases(given: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return ``given`` with every alias replaced by its canonical name.

    Args:
        given: options by name.
        aliases: canonical name by alias.

    Raises:
        ConfigError: one option is given under two names.
    """
    resolved: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in given.items():
        canonical = aliases.get(name, name)
        if canonical in resolved:
            raise ConfigError(
                f"duplicate field: {sources[canonical]!r} and {name!r} both set {canonical!r}",
                remedy=f"keep only {canonical!r}",
            )
        resolved[canonical] = value
        sources[canonical] = name
    return resolved


def check_choice(key: str, value: Any, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``.

    Raises:
        ConfigError: it is not.
    """
    if value not in choices:
        raise ConfigError(
            f"{key} is not supported: {key}={value!r}", remedy=f"use one of {', '.join(choices)}"
        )
    return value


def check_integer(key: str, value: Any, *, least: int | None = None) -> int:
    """Return ``value`` if it is an integer of at least ``least``; a bool is not an integer.

    Raises:
        ConfigTypeError: not an integer.
        ConfigError: too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigTypeError(
            f"{key} must be an integer: {key}={value!r}", remedy=f"pass {key} as an int"
        )
    if least is not None and value < least:
        bound = "positive" if least == 1 else f"at least {least}"
        raise ConfigError(
            f"{key} must be {bound}: {key}={value}", remedy=f"set {key} to {least} or more"
        )
    return value


def check_seconds(key: str, value: Any, remedy: str) -> float:
    """Return ``value`` if it is a positive, finite number; a bool is not a number.

    Raises:
        ConfigError: it is not; with ``remedy``.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ConfigError(f"{key}={value!r} is not a positive number of seconds", remedy=remedy)
    return value


def parse_bool(key: str, value: Any) -> bool:
    """Read a bool, 0/1, or one of 1/true/yes/on and 0/false/no/off in any case.

    Raises:
        ConfigTypeError: anything else.
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, (int, str)) else ""
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigTypeError(
        f"{key} must be a bool: {key}={value!r}", remedy=f"set {key} to true or false"
    )


def normalise_split(value: Any, *, policies: Sequence[str] = POLICIES) -> str:
    """Return the split policy, stripped and in lower case.

    Raises:
        ConfigTypeError: not a string.
        ConfigError: not a policy.
    """
    if not isinstance(value, str):
        raise ConfigTypeError(
            f"split must be a string: split={value!r}",
            remedy=f"use one of {', '.join(policies)}",
        )
    return check_choice("split", value.strip().lower(), policies)


def check_endpoint(host: Any, port: Any) -> None:
    """Check the address of the first attention rank.

    Raises:
        ConfigTypeError: ``port`` is not an integer.
        ConfigError: an empty host, or a port outside 1 to 65535.
    """
    if not isinstance(host, str) or not host.strip():
        raise ConfigError(
            f"host must not be empty: host={host!r}",
            remedy="name the host of attention rank 0",
        )
    if not 1 <= check_integer("port", port) <= 65535:
        raise ConfigError(
            f"port is outside 1 to 65535: port={port}", remedy="choose a free TCP port"
        )


def check_topology(
    *, role: str, role_rank: int, num_attention_ranks: int, num_ffn_ranks: int
) -> None:
    """Check that this rank exists: ``[A0 .. A(A-1), F0 .. F(F-1)]``.

    Raises:
        ConfigTypeError: a number that is not an integer.
        ConfigError: an unknown role, an empty role, or a rank outside its role.
    """
    check_choice("role", role, ROLES)
    check_integer("num_attention_ranks", num_attention_ranks, least=1)
    check_integer("num_ffn_ranks", num_ffn_ranks, least=1)
    size = num_attention_ranks if role == "attention" else num_ffn_ranks
    if not 0 <= check_integer("role_rank", role_rank) < size:
        raise ConfigError(
            f"role_rank is outside the {role} role: role_rank={role_rank}, ranks={size}",
            remedy="start exactly as many ranks as the topology says",
        )


# -- 7.2: worker start -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker knows about itself when it starts.

    Attributes:
        role: ``attention`` or ``ffn``.
        split: the split policy; ``none`` means that steps are not cut.
        num_stages: token stages asked for.
        gate_on_attention: whether gate and top-k run on the attention side.
        native_ubatching: whether the host splits batches itself.
        tensor_parallel_size: tensor-parallel ranks of this replica.
        attn_ranks_per_dp: attention ranks that the experts wait for as one group.
        prefill_context_parallel_size: ranks that share a prefill's context.
        decode_context_parallel_size: ranks that share a decode's context.
        require_tensor_parallel: whether cutting inside requests needs two or more such ranks.
        dynamic_quant: 1 for int8 activations on the wire, else 0.
    """

    role: str = "attention"
    split: str = "token"
    num_stages: int = 2
    gate_on_attention: bool = True
    native_ubatching: bool = False
    tensor_parallel_size: int = 1
    attn_ranks_per_dp: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    require_tensor_parallel: bool = False
    dynamic_quant: int = 0


def check_worker(facts: WorkerFacts) -> None:
    """Run the checks of a starting worker, in the recorded order.

    Raises:
        ConfigTypeError, ConfigError: from the first check that fails.
    """
    check_native_ubatching(facts.native_ubatching)
    if facts.split != "none":
        check_gate_on_attention(facts.gate_on_attention)
        check_num_stages(facts.num_stages)
        normalise_split(facts.split)
    if check_choice("role", facts.role, ROLES) == "ffn":
        return
    check_context_parallel(facts.prefill_context_parallel_size, facts.decode_context_parallel_size)
    check_attention_group(facts.attn_ranks_per_dp, facts.tensor_parallel_size)
    if facts.require_tensor_parallel:
        check_required_tensor_parallel(facts.split, facts.tensor_parallel_size)
    check_dynamic_quant(facts.dynamic_quant)


def check_native_ubatching(enabled: bool) -> None:
    """Refuse a host that splits batches itself (dual-batch overlap).

    Raises:
        ConfigError: it does.
    """
    if enabled:
        raise ConfigError(
            "two stages cannot be combined with the host's own batch splitting: "
            f"native_ubatching={enabled}",
            remedy="switch off enable_dbo and use_ubatching",
        )


def check_gate_on_attention(gate_on_attention: bool) -> None:
    """Require gate and top-k on the attention side.

    Raises:
        ConfigError: they run elsewhere.
    """
    if not gate_on_attention:
        raise ConfigError(
            "expert ids and weights are chosen on the attention side: "
            f"gate_on_attention={gate_on_attention}",
            remedy="set gate_on_attention (compute_gate_on_attention) to true",
        )


def check_num_stages(num_stages: Any) -> None:
    """Require exactly two stages.

    Raises:
        ConfigTypeError: not an integer.
        ConfigError: not two.
    """
    if check_integer("num_stages", num_stages, least=1) != 2:
        raise ConfigError(
            f"exactly two stages are supported: num_stages={num_stages}",
            remedy="set num_stages=2, or split='none' to run unsplit",
        )


def check_context_parallel(prefill_size: int, decode_size: int) -> None:
    """Refuse context parallelism, whose metadata is not cut by stage.

    Raises:
        ConfigError: more than one rank shares a context.
    """
    for key, size in (
        ("prefill_context_parallel_size", prefill_size),
        ("decode_context_parallel_size", decode_size),
    ):
        if check_integer(key, size, least=1) > 1:
            raise ConfigError(
                f"context parallelism is not supported: {key}={size}",
                remedy=f"set {key} to 1 and use tensor or sequence parallelism",
            )


def check_attention_group(attn_ranks_per_dp: int, tensor_parallel_size: int) -> None:
    """Require that the experts wait for exactly one tensor-parallel group.

    Raises:
        ConfigError: the two sizes differ.
    """
    check_integer("attn_ranks_per_dp", attn_ranks_per_dp, least=1)
    check_integer("tensor_parallel_size", tensor_parallel_size, least=1)
    if attn_ranks_per_dp != tensor_parallel_size:
        raise ConfigError(
            "attn_ranks_per_dp must equal the tensor-parallel size: "
            f"attn_ranks_per_dp={attn_ranks_per_dp}, tensor_parallel_size={tensor_parallel_size}",
            remedy=f"set attn_ranks_per_dp={tensor_parallel_size}",
        )


def check_required_tensor_parallel(split: str, tensor_parallel_size: int) -> None:
    """Refuse, as the eager reference does, to cut inside requests on a single rank.

    Raises:
        ConfigError: the policy can cut inside requests and the group has one rank.
    """
    if split in ("token", "cost") and tensor_parallel_size <= 1:
        raise ConfigError(
            f"split={split!r} requires more than one tensor-parallel rank: "
            f"tensor_parallel_size={tensor_parallel_size}",
            remedy="use split='request', or leave require_tensor_parallel off",
        )


def check_dynamic_quant(dynamic_quant: Any) -> None:
    """Require a known quantisation of the dispatched rows.

    Raises:
        ConfigTypeError: not an integer.
        ConfigError: neither 0 nor 1.
    """
    if check_integer("dynamic_quant", dynamic_quant) not in (0, 1):
        raise ConfigError(
            f"dynamic_quant must be 0 or 1: dynamic_quant={dynamic_quant}",
            remedy="use 0 for rows as they are, 1 for int8 rows with one scale each",
        )


# -- 7.3: a step -----------------------------------------------------------------------------------


def check_runtime_sequence_parallel(*, planned: bool, running: bool) -> bool:
    """Compare the plan with what the model does in this step.

    Returns:
        Whether the plan has to be used ``without_sequence_parallel()``.

    Raises:
        ConfigError: the model shards rows and the plan did not pad for it.
    """
    if running and not planned:
        raise ConfigError(
            "the model runs sequence parallel but the step was planned without it: "
            f"planned={planned}, running={running}",
            remedy="plan with sequence_parallel=True",
        )
    return planned and not running


# -- what the reference leaves unchecked -----------------------------------------------------------


def check_ranks_agree(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that all ranks of both roles have the same settings.

    Different maximum tokens give different window layouts, and another policy another number of
    dispatches: both hang or corrupt instead of failing.

    Args:
        settings: per rank (by name, such as ``attention 0``), the values that must be equal:
            maximum tokens, policy, stages, quantisation, model fingerprint, versions.

    Raises:
        ConfigError: naming every setting that differs, with the ranks that hold each value.
    """
    keys = list(dict.fromkeys(key for values in settings.values() for key in values))
    differences = []
    for key in keys:
        holders: dict[str, list[str]] = {}
        for rank, values in settings.items():
            shown = repr(values[key]) if key in values else "missing"
            holders.setdefault(shown, []).append(rank)
        if len(holders) > 1:
            differences.append(
                f"{key}: "
                + ", ".join(f"{value} on {', '.join(ranks)}" for value, ranks in holders.items())
            )
    if differences:
        raise ConfigError(
            f"ranks disagree on {'; '.join(differences)}",
            remedy="start every rank of both roles with the same options and versions",
        )


def check_expert_partition(num_experts: int, num_ffn_ranks: int) -> int:
    """Return the experts per rank, which must come out even.

    The operators address expert ``id`` at rank ``id // experts_per_rank``.

    Raises:
        ConfigError: the experts are not divisible by the ranks.
    """
    check_integer("num_experts", num_experts, least=1)
    check_integer("num_ffn_ranks", num_ffn_ranks, least=1)
    if num_experts % num_ffn_ranks:
        raise ConfigError(
            "the experts must be divisible by the expert ranks: "
            f"num_experts={num_experts}, num_ffn_ranks={num_ffn_ranks}",
            remedy="choose a number of expert ranks that divides the experts",
        )
    return num_experts // num_ffn_ranks


def check_capacity(
    *,
    max_tokens: int,
    tensor_parallel_size: int,
    receive_capacity: int,
    max_sequence_rows: int = MAX_SEQUENCE_ROWS,
) -> int:
    """Check before launch that the largest step fits the connector.

    Args:
        max_tokens: most tokens of one step of a replica, on all its ranks together.
        tensor_parallel_size: ranks of its tensor-parallel group.
        receive_capacity: most rows that one expert may receive in one piece; in the worst case
            every token of the group goes to the same expert.
        max_sequence_rows: most tokens that the connector takes per group.

    Returns:
        Most rows that one rank dispatches.

    Raises:
        ConfigError: a limit is exceeded, or the tokens are not divisible by the ranks, so that
            the rounded-up share of a rank does not fit its window.
    """
    check_integer("max_tokens", max_tokens, least=1)
    check_integer("tensor_parallel_size", tensor_parallel_size, least=1)
    if max_tokens % tensor_parallel_size:
        raise ConfigError(
            "max_tokens must be a multiple of the tensor-parallel size: "
            f"max_tokens={max_tokens}, tensor_parallel_size={tensor_parallel_size}",
            remedy=f"set max_tokens to {max_tokens + -max_tokens % tensor_parallel_size}",
        )
    for key, limit in (
        ("max_sequence_rows", max_sequence_rows),
        ("receive_capacity", receive_capacity),
    ):
        if max_tokens > limit:
            raise ConfigError(
                f"the largest step does not fit the connector: max_tokens={max_tokens}, "
                f"{key}={limit}",
                remedy=f"lower max_tokens to {limit}, or raise {key} where the connector allows",
            )
    return max_tokens // tensor_parallel_size


def check_moe_layers(is_moe: Sequence[bool], *, allow_dense_after: bool = False) -> range | None:
    """Find the layers that the two-stage pipeline spans, before anything runs.

    Args:
        is_moe: for each layer, whether it is a mixture of experts.
        allow_dense_after: whether dense layers after the first MoE layer are supported: those in
            between inside the stages, those after the last on the restored batch.

    Returns:
        From the first to the last MoE layer; ``None`` when there is none.

    Raises:
        ConfigError: a dense layer follows an MoE layer and that is not allowed.
    """
    layers = [layer for layer, moe in enumerate(is_moe) if moe]
    if not layers:
        return None
    dense_after = [layer for layer in range(layers[0], len(is_moe)) if not is_moe[layer]]
    if dense_after and not allow_dense_after:
        raise ConfigError(
            "a split needs a dense prefix followed by contiguous MoE layers: "
            f"dense layers {dense_after} follow MoE layer {layers[0]}",
            remedy="use split='none' for this model",
        )
    return range(layers[0], layers[-1] + 1)


def check_recurrent_attention(split: str, recurrent_layers: Collection[int]) -> None:
    """Refuse to cut inside requests where a layer carries a state instead of a KV cache.

    Args:
        split: the split policy.
        recurrent_layers: layers with linear attention or another recurrent state.

    Raises:
        ConfigError: the policy can cut inside requests and there is such a layer.
    """
    if split in ("token", "cost", "auto") and recurrent_layers:
        raise ConfigError(
            f"split={split!r} can cut inside a request, which recurrent state does not allow: "
            f"recurrent_layers={sorted(recurrent_layers)}",
            remedy="use split='request' for this model",
        )
