"""Metadata of a step with its stages, and the forward context of one stage.

vLLM's operators find metadata, slot mapping and caches in a global *forward context*, by the name
of their layer. A stage gets a copy of the step's context in which the metadata and the slots are
its own; what a platform attaches to the context follows the platform's rules
(:class:`runner_rules.RunnerRules`), everything else stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from afd_graph.errors import PlanError
from afd_graph.planner import NoSplitReason, Stage, StagePlan

_STAGES = "afd_stage_contexts"

PROFILE_RUN = "profile_run"
"""Reason of a step without metadata: vLLM measures memory and warms up."""

DUMMY_RUN = "dummy_run"
"""Reason of a step with metadata that nobody asked for: vLLM warms up."""

UNSUPPORTED_STEP = "step_kind_unsupported"
"""Reason of a step with something that is not cut: drafts, encoders, KV transfer, ..."""


class StagedMetadata(dict):
    """Metadata of a step by layer name, and that of its stages.

    To vLLM it is the dictionary that it was without us.

    Attributes:
        plan: where the step is cut.
        stages: metadata by layer name, one dictionary a stage.
        pairs: query-key pairs of each stage; only while steps are traced.
        complete: sets what the platform attached to a stage's forward context.
    """

    def __init__(
        self,
        whole: Mapping[str, Any],
        plan: StagePlan,
        stages: Sequence[Mapping[str, Any]],
        pairs: tuple[int, ...] = (),
        complete: Callable[[Any, Stage], None] = lambda context, stage: None,
    ) -> None:
        super().__init__(whole)
        self.plan = plan
        self.pairs = pairs
        self.stages = [dict(stage) for stage in stages]
        self.complete = complete


class UnsplitMetadata(dict):
    """Metadata of a step that runs as one stage, and why.

    Attributes:
        reason: a reason that the report counts.
        pairs: query-key pairs of the step; only while steps are traced.
    """

    def __init__(self, whole: Mapping[str, Any], reason: str, pairs: tuple[int, ...] = ()) -> None:
        super().__init__(whole)
        self.reason = reason
        self.pairs = pairs


def plan_of(metadata: Any) -> StagePlan | str:
    """The plan that came with a step's metadata, or why there is none."""
    if metadata is None:
        return PROFILE_RUN
    if isinstance(metadata, StagedMetadata):
        return metadata.plan
    if isinstance(metadata, UnsplitMetadata):
        return metadata.reason
    return str(NoSplitReason.METADATA_MISSING)


@contextmanager
def without_captured_graphs() -> Iterator[None]:
    """Run a split step: captured device graphs are those of whole batches."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, override_forward_context

    context = copy.copy(get_forward_context())
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    context.batch_descriptor = None
    with override_forward_context(context):
        yield


@contextmanager
def enter_stage(stage: int) -> Iterator[None]:
    """Run inside the forward context of ``stage``."""
    from vllm.forward_context import get_forward_context, override_forward_context

    with override_forward_context(stage_context(get_forward_context(), stage)):
        yield


def stage_context(context: Any, stage: int) -> Any:
    """The forward context of ``stage``, made once a step.

    Raises:
        PlanError: the step's metadata has no stages.
    """
    metadata = context.attn_metadata
    if not isinstance(metadata, StagedMetadata):
        raise PlanError(
            "a stage runs in a step whose metadata has no stages",
            stage=stage,
            remedy="this is a defect of the backend; please report it",
        )
    made = context.additional_kwargs.setdefault(_STAGES, {})
    if stage not in made:
        made[stage] = _stage_copy(context, metadata, stage)
    return made[stage]


def _stage_copy(context: Any, metadata: StagedMetadata, stage: int) -> Any:
    # A shallow copy keeps attributes that a platform set on the instance.
    own = copy.copy(context)
    rows = metadata.plan.stages[stage].token_slice
    own.attn_metadata = metadata.stages[stage]
    own.slot_mapping = {layer: slots[rows] for layer, slots in context.slot_mapping.items()}
    own.ubatch_slices = None
    if getattr(context, "is_padding", None) is not None:  # older versions have no such field
        own.is_padding = context.is_padding[rows]
    own.additional_kwargs = {k: v for k, v in context.additional_kwargs.items() if k != _STAGES}
    metadata.complete(own, metadata.plan.stages[stage])
    return own
