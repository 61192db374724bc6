"""What the planner promises for the steps of a batch, and which rows each rank then dispatches.

Written from the rules of docs/semantics.md and docs/tensor-parallelism.md, not from what the
compiled program does: the judge of the matrix holds one against the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from afd_graph.planner import NoSplit, StagePlan, plan_stages
from afd_graph.results import Step
from evaluation.configurations import Configuration


def promised_steps(
    configuration: Configuration,
    lengths: Sequence[int],
    steps: int,
    *,
    ranks: int,
    layers: int,
) -> list[Step]:
    """The steps of one batch: a prompt step and ``steps - 1`` decode steps.

    Args:
        configuration: what is asked for.
        lengths: tokens of every prompt; they are padded to the longest.
        steps: how many steps the batch takes.
        ranks: tensor-parallel ranks of the replica.
        layers: MoE layers of the model.
    """
    tokens = [max(lengths)] + [1] * (steps - 1)
    return [_promised(configuration, len(lengths), count, ranks, layers) for count in tokens]


def _promised(
    configuration: Configuration, requests: int, tokens: int, ranks: int, layers: int
) -> Step:
    split = configuration.split
    # A token cut goes through all prompts at the same place, between them when each is one token.
    through = tokens > 1 and split != "request"
    counts = [tokens] if through else [tokens] * requests
    plan = plan_stages(counts, split=split)
    if isinstance(plan, NoSplit):
        stages = [sum(counts)]
        answer = Step(None, False, reason=str(plan.reason))
    else:
        assert isinstance(plan, StagePlan)
        stages = [stage.actual_tokens for stage in plan.stages]
        answer = Step(plan.policy, True)
    # Without an axis to cut there is none to share either: one request runs as in plain TP.
    nothing_to_cut = answer.reason in ("single_request", "single_token")
    if not configuration.sequence_parallel or nothing_to_cut:
        rows = [-(-stage * (requests if through else 1) // ranks) for stage in stages]
    elif through:
        rows = [requests * -(-stage // ranks) for stage in stages]
    else:
        rows = [tokens * -(-stage // tokens // ranks) for stage in stages]
    return Step(answer.policy, answer.split, answer.reason, tuple(layers * count for count in rows))
