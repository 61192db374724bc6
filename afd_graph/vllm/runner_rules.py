"""What a platform's model runner does in its own way, as a table for :mod:`runner_hook`.

vLLM's own runner, which the CPU runner inherits, is :data:`UPSTREAM`; other platforms have a table
in a file of their own (:mod:`ascend_runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from afd_graph.metadata import FieldKind
from afd_graph.planner import Stage


def _nothing(*args: Any) -> None:
    pass


@dataclass(frozen=True)
class RunnerRules:
    """How the hook works on one kind of runner.

    Attributes:
        heard: of a runner, collects (attention group, common metadata) of every build inside.
        build: of an attention group and common metadata, makes the backend's metadata.
        extra_rules: kinds of fields of the common metadata that the core does not know.
        can_stage: of a runner, the arguments of the build and what was heard: whether the
            platform's part of the step can be cut.
        own: of a step's metadata by layer, gives it what the stages' builders would overwrite.
        complete: of a runner and a stage's common fields, sets those that no rule can cut.
        context: of a stage's forward context and the stage, sets what the platform attached.
    """

    heard: Callable[[Any], AbstractContextManager[list[tuple[Any, Any]]]]
    build: Callable[[Any, Any], Any]
    extra_rules: Mapping[str, FieldKind]
    can_stage: Callable[[Any, Mapping[str, Any], list[tuple[Any, Any]]], bool] = (
        lambda runner, kwargs, groups: True
    )
    own: Callable[[Mapping[str, Any]], None] = _nothing
    complete: Callable[[Any, dict[str, Any]], None] = _nothing
    context: Callable[[Any, Stage], None] = _nothing


_listeners: list[list[tuple[Any, Any]]] = []


@contextmanager
def _heard(runner: Any) -> Iterator[list[tuple[Any, Any]]]:
    found: list[tuple[Any, Any]] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.pop()


def listening(original: Any) -> Any:
    """Wrap ``AttentionGroup.build_metadata``, so that :data:`UPSTREAM` hears it."""

    def build_metadata(self: Any, common: Any, *args: Any, **kwargs: Any) -> Any:
        if _listeners:
            _listeners[-1].append((self, common))
        return original(self, common, *args, **kwargs)

    return build_metadata


UPSTREAM = RunnerRules(
    heard=_heard,
    build=lambda group, common: group.build_metadata(common),
    extra_rules={
        "replayssm_decode_base_cpu": FieldKind.PER_REQUEST,
        "req_idx": FieldKind.PER_REQUEST,
        "dcp_local_seq_lens_cpu_upper_bound": FieldKind.PER_REQUEST,
        "max_logits_per_req": FieldKind.INHERITED,
    },
)
"""vLLM's own V1 runner."""
