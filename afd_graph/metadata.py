"""Attention metadata of one step, and its cut into stages (semantics 3.2 to 3.4).

Every field has a declared kind: it has a token axis, it has one row per request, it is inherited
as it is, or it is derived by a rule of its own. A field without a declaration is refused by name,
since a field that is not cut silently belongs to the wrong rows.

The law behind the derived fields (3.3): for request ``i`` with parent tokens ``[q_i, q_i+1)`` and
overlap ``[lo, hi)`` with the stage, the stage has ``query = hi - lo``,
``seq = cached_i + hi - q_i`` and ``context = cached_i + lo - q_i``. Stage 1 of a request that is
cut in the middle is therefore ordinary chunked prefill over what stage 0 wrote.

A stage owns everything it holds: nothing shares storage with the parent or with another stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from afd_graph.errors import PlanError
from afd_graph.planner import Stage


class FieldKind(str, Enum):
    """How a metadata field belongs to a step."""

    PER_TOKEN = "per_token"
    PER_REQUEST = "per_request"
    INHERITED = "inherited"
    DERIVED = "derived"


@dataclass(frozen=True)
class FieldRule:
    """Declaration of one metadata field.

    Attributes:
        kind: how the field is cut.
        axis: token axis of a ``PER_TOKEN`` field; ``None`` finds it by its extent, axis 1 before
            axis 0, which is how positions with several axes (``[axes, tokens]``) are read.
    """

    kind: FieldKind
    axis: int | None = 0


@dataclass(frozen=True)
class _Cut:
    """One stage against its parent, in host integers."""

    stage: Stage
    start: int
    stop: int
    requests: slice
    skip_head: int
    skip_tail: int
    query_start_loc: tuple[int, ...]
    parent: AttentionMetadata


def _query_start_loc(value: Any, cut: _Cut) -> Any:
    if isinstance(value, torch.Tensor):
        rows = value[cut.requests.start : cut.requests.stop + 1]
        return rows.clamp(cut.start, cut.stop) - cut.start
    return list(cut.query_start_loc)


def _seq_lens(value: Any, cut: _Cut) -> Any:
    # Only a cut tail shortens the sequence: a cut head is context that stage 0 has written.
    rows = _own(value[cut.requests])
    rows[-1] = rows[-1] - cut.skip_tail
    return rows


def _num_computed_tokens(value: Any, cut: _Cut) -> Any:
    # Stage 0 computes the head of a cut request before stage 1 attends to it.
    rows = _own(value[cut.requests])
    rows[0] = rows[0] + cut.skip_head
    return rows


def _max_query_len(value: Any, cut: _Cut) -> int:
    starts = cut.query_start_loc
    return max(stop - start for start, stop in pairwise(starts))


def _max_seq_len(value: Any, cut: _Cut) -> int:
    return max(_host_list(_seq_lens(cut.parent.host_seq_lens(), cut)))


def _actual_seq_lengths_q(value: Any, cut: _Cut) -> Any:
    """Clip the cumulative query ends to the stage's tokens, and count from its start."""
    ends = _host_list(value)
    clipped = [
        min(end, cut.stop) - cut.start
        for begin, end in pairwise([0, *ends])
        if end > cut.start and begin < cut.stop
    ]
    if ends and not clipped:
        # The parent's list was shorter than its tokens: every decode row stands for itself.
        step = int(cut.parent.get("decode_token_per_req") or 1)
        clipped = list(range(step, cut.stage.actual_tokens + 1, step))
    if isinstance(value, torch.Tensor):
        return torch.tensor(clipped, dtype=value.dtype, device=value.device)
    return clipped


_DERIVATIONS: Mapping[str, Callable[[Any, _Cut], Any]] = MappingProxyType(
    {
        "query_start_loc": _query_start_loc,
        "query_start_loc_cpu": _query_start_loc,
        "seq_lens": _seq_lens,
        "seq_lens_cpu": _seq_lens,
        "_seq_lens_cpu": _seq_lens,
        # What is cut off a request's tail is known exactly, so the bound stays one.
        "seq_lens_cpu_upper_bound": _seq_lens,
        "num_computed_tokens_cpu": _num_computed_tokens,
        "_num_computed_tokens_cpu": _num_computed_tokens,
        "num_reqs": lambda value, cut: cut.requests.stop - cut.requests.start,
        "num_actual_tokens": lambda value, cut: cut.stage.actual_tokens,
        # Attention only sees real rows: pads are dropped before it and put back after it.
        "num_input_tokens": lambda value, cut: cut.stage.actual_tokens,
        "max_query_len": _max_query_len,
        "max_seq_len": _max_seq_len,
        "actual_seq_lengths_q": _actual_seq_lengths_q,
    }
)

_PER_REQUEST_FIELDS = (
    "block_table",
    "block_table_tensor",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "is_prefilling",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
    "rswa_prefix_lens",
    "group_len",
    "group_key_idx",
    "group_key_cache_idx",
)

_INHERITED_FIELDS = (
    "attn_state",
    "causal",
    "graph_pad_size",
    "decode_token_per_req",
    "kvcomp_metadata",
    "logits_indices_padded",
    "num_logits_indices",
    "context_parallel_metadata",
    "mm_req_doc_ranges",
)

FIELD_RULES: Mapping[str, FieldRule] = MappingProxyType(
    {
        **{name: FieldRule(FieldKind.DERIVED) for name in _DERIVATIONS},
        "slot_mapping": FieldRule(FieldKind.PER_TOKEN),
        "positions": FieldRule(FieldKind.PER_TOKEN, axis=None),
        "positions_cpu": FieldRule(FieldKind.PER_TOKEN, axis=None),
        **{name: FieldRule(FieldKind.PER_REQUEST) for name in _PER_REQUEST_FIELDS},
        **{name: FieldRule(FieldKind.INHERITED) for name in _INHERITED_FIELDS},
    }
)
"""Every field known by name, with the kind that decides how it is cut."""


class AttentionMetadata:
    """Attention metadata of a step, or of one of its stages, by field name.

    Fields are given and read by the names of semantics 3.2. Per-token and per-request values and
    the derived lists may be tensors (any integer dtype, any device) or Python lists; a field that
    is ``None`` stays ``None``.

    Args:
        extra_rules: rules for further fields, by name. A bare :class:`FieldKind` means its default
            rule (token axis 0). Known fields cannot be redeclared.
        fields: values by field name. ``query_start_loc`` or ``query_start_loc_cpu``
            (``[num_reqs + 1]``, int) is required to cut; with both, the host one is read.

    Raises:
        PlanError: a field of unknown kind, named; or an extra rule that cannot be used.
    """

    def __init__(
        self, *, extra_rules: Mapping[str, FieldRule | FieldKind] | None = None, **fields: Any
    ) -> None:
        rules = dict(FIELD_RULES)
        for name, rule in (extra_rules or {}).items():
            rule = rule if isinstance(rule, FieldRule) else FieldRule(FieldKind(rule))
            if name in FIELD_RULES or hasattr(type(self), name):
                raise PlanError(
                    f"metadata field {name!r} is already declared",
                    remedy="register only fields that the table does not know",
                )
            if rule.kind is FieldKind.DERIVED:
                raise PlanError(
                    f"metadata field {name!r} cannot be registered as derived",
                    remedy="declare it per_token, per_request or inherited",
                )
            rules[name] = rule
        unknown = sorted(set(fields) - set(rules))
        if unknown:
            raise PlanError(
                f"metadata field of unknown kind: {', '.join(map(repr, unknown))}",
                remedy="declare it in extra_rules as per_token, per_request or inherited",
            )
        self._rules: Mapping[str, FieldRule] = rules
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not an ordinary attribute; copying probes before __init__ ran.
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(f"attention metadata has no field {name!r}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._fields.items())})"

    def get(self, name: str, default: Any = None) -> Any:
        """Value of field ``name``, or ``default`` when it was not given."""
        return self._fields.get(name, default)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, sharing their buffers with this object."""
        return dict(self._fields)

    def host_query_start_loc(self) -> list[int]:
        """Start of each request on the token axis, and the end, as host integers.

        Reads a device tensor (and so waits for the device) only when there is no host copy.
        """
        return self._host_field("query_start_loc_cpu", "query_start_loc")

    def host_seq_lens(self) -> list[int]:
        """KV length of each request including this step's tokens, as host integers."""
        return self._host_field("seq_lens_cpu", "_seq_lens_cpu", "seq_lens")

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request, as host integers."""
        starts = self.host_query_start_loc()
        return [stop - start for start, stop in pairwise(starts)]

    @property
    def context_lens(self) -> list[int]:
        """Tokens that each request attends to and that this step or stage does not compute."""
        return [
            seq - query for seq, query in zip(self.host_seq_lens(), self.query_lens, strict=True)
        ]

    def _host_field(self, *names: str) -> list[int]:
        for name in names:
            if self._fields.get(name) is not None:
                return _host_list(self._fields[name])
        raise PlanError(
            f"metadata field {names[0]!r} is missing", remedy=f"give one of {', '.join(names)}"
        )

    def for_stage(self, stage: Stage) -> AttentionMetadata:
        """Cut this metadata to ``stage``; the parent is not changed.

        Returns:
            New metadata with the same fields, none of which shares storage with this object.

        Raises:
            PlanError: the stage is empty, does not fit the requests, or a field has fewer rows
                than the stage needs.
        """
        cut = self._cut(stage)
        return AttentionMetadata(
            extra_rules={n: r for n, r in self._rules.items() if n not in FIELD_RULES},
            **{
                name: None if value is None else self._cut_field(name, value, cut)
                for name, value in self._fields.items()
            },
        )

    def _cut(self, stage: Stage) -> _Cut:
        starts = self.host_query_start_loc()
        requests, tokens = stage.request_slice, stage.token_slice
        first, last = requests.start, requests.stop - 1
        if tokens.stop <= tokens.start or last < first or last + 1 >= len(starts):
            raise PlanError(
                f"stage is empty or outside the batch: requests {requests}, tokens {tokens}, "
                f"batch of {len(starts) - 1} requests",
                remedy="plan from the counts that this metadata was built for",
            )
        if not starts[first] <= tokens.start < starts[first + 1]:
            raise PlanError(
                f"token slice starts outside its first request: tokens {tokens}, "
                f"request {first} is [{starts[first]}, {starts[first + 1]})",
                remedy="plan from the counts that this metadata was built for",
            )
        if not starts[last] < tokens.stop <= starts[last + 1]:
            raise PlanError(
                f"token slice stops outside its last request: tokens {tokens}, "
                f"request {last} is [{starts[last]}, {starts[last + 1]})",
                remedy="plan from the counts that this metadata was built for",
            )
        return _Cut(
            stage=stage,
            start=tokens.start,
            stop=tokens.stop,
            requests=slice(first, last + 1),
            skip_head=tokens.start - starts[first],
            skip_tail=starts[last + 1] - tokens.stop,
            query_start_loc=tuple(
                min(max(start, tokens.start), tokens.stop) - tokens.start
                for start in starts[first : last + 2]
            ),
            parent=self,
        )

    def _cut_field(self, name: str, value: Any, cut: _Cut) -> Any:
        rule = self._rules[name]
        if rule.kind is FieldKind.PER_TOKEN:
            axis = self._token_axis(name, value) if rule.axis is None else rule.axis
            return _own(_slice(name, value, axis, cut.start, cut.stop))
        if rule.kind is FieldKind.PER_REQUEST:
            return _own(_slice(name, value, 0, cut.requests.start, cut.requests.stop))
        if rule.kind is FieldKind.DERIVED:
            return _DERIVATIONS[name](value, cut)
        return _own(value, name)

    def _token_axis(self, name: str, value: Any) -> int:
        shape = _shape(value)
        if len(shape) == 1:
            return 0
        # A parent may carry its padding or not; either extent is its token axis.
        extents = {self.host_query_start_loc()[-1]}
        if self.get("num_input_tokens") is not None:
            extents.add(int(self.num_input_tokens))
        if self.get("slot_mapping") is not None:
            extents.add(len(self.slot_mapping))
        for axis in (1, 0):
            if shape[axis] in extents:
                return axis
        raise PlanError(
            f"metadata field {name!r} of shape {shape} has no axis 0 or 1 "
            f"with one entry per token: tokens={sorted(extents)}",
            remedy="pass one entry per token on axis 0 or 1",
        )


class StageMetadataCache:
    """Stage metadata of one step, built once and shared by all layers of a KV-cache group.

    The whole stage is part of the key. A cache that is keyed by the group only hands stage 1 the
    lengths of stage 0.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, AttentionMetadata] = {}

    def get(
        self, parent: AttentionMetadata, stage: Stage, *, group: Hashable = 0
    ) -> AttentionMetadata:
        """Metadata of ``stage``, cut from ``parent`` on first use.

        Args:
            parent: full-batch metadata of ``group`` in this step.
            stage: the stage to cut to.
            group: KV-cache group that ``parent`` belongs to.
        """
        key = (group, stage.key)
        if key not in self._entries:
            self._entries[key] = parent.for_stage(stage)
        return self._entries[key]

    def clear(self) -> None:
        """Forget the step; call it before the next one."""
        self._entries.clear()


def _host_list(value: Any) -> list[int]:
    return value.tolist() if isinstance(value, torch.Tensor) else list(value)


def _shape(value: Any) -> tuple[int, ...]:
    """Shape of a tensor, an array, or of lists (nested once at most)."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if len(value) and isinstance(value[0], (list, tuple)):
        return len(value), len(value[0])
    return (len(value),)


def _slice(name: str, value: Any, axis: int, start: int, stop: int) -> Any:
    shape = _shape(value)
    if axis >= len(shape) or shape[axis] < stop:
        raise PlanError(
            f"metadata field {name!r} of shape {shape} is too short on axis {axis}: "
            f"the stage needs rows [{start}, {stop})",
            remedy="pass one entry per token (or per request) of the step",
        )
    if axis == 0:
        return value[start:stop]
    if hasattr(value, "shape"):
        return value[(slice(None),) * axis + (slice(start, stop),)]
    return [row[start:stop] for row in value]


def _own(value: Any, name: str = "") -> Any:
    """Copy ``value`` so that it shares no storage with anything."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise PlanError(
            f"metadata field {name!r} of type {type(value).__name__} cannot be copied: {error}",
            remedy="stages must not share buffers; give the field __deepcopy__ or leave it out",
        ) from error
