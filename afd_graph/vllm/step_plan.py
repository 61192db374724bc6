"""Where vLLM's model runner cuts a step: our planner over the runner's own request lengths.

All numbers come from the runner's host copies, so that asking waits for no device. The prefix-cache
hazard is checked per KV-cache group, with the slots of the step's tokens computed here from the
host's block tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from afd_graph.config import AFDConfig
from afd_graph.hazard import HazardReport, PrefixHazard
from afd_graph.planner import NoSplit, StagePlan, plan_stages


def plan_step(
    runner: Any, num_scheduled_tokens: Mapping[str, int], config: AFDConfig
) -> StagePlan | NoSplit:
    """Cut the step that ``runner`` is about to run, or say why not.

    Args:
        runner: vLLM's V1 model runner.
        num_scheduled_tokens: tokens of each scheduled request, by its id.
        config: the split policy.
    """
    batch = runner.input_batch
    counts, contexts = step_lengths(batch, num_scheduled_tokens)
    costs = config.costs
    if costs is not None:
        costs = dataclasses.replace(costs, context_lens=contexts.tolist())
    return plan_stages(
        counts,
        split=config.split,
        min_tokens=config.min_split_tokens,
        costs=costs,
        # Without a prefix cache no request reads what another writes.
        hazards=Hazards(batch, counts, contexts)
        if runner.cache_config.enable_prefix_caching
        else None,
    )


def stage_pairs(
    runner: Any, num_scheduled_tokens: Mapping[str, int], plan: StagePlan | NoSplit
) -> tuple[int, ...]:
    """Query-key pairs of each stage of a step, of the whole step where it is not cut."""
    counts, contexts = step_lengths(runner.input_batch, num_scheduled_tokens)
    starts = np.concatenate(([0], np.cumsum(counts)))
    cuts = [] if isinstance(plan, NoSplit) else [s.token_slice.start for s in plan.stages[1:]]
    before = []
    for token in (0, *cuts, starts[-1]):
        tokens = np.clip(token - starts[:-1], 0, counts)
        before.append(int((tokens * contexts + tokens * (tokens + 1) // 2).sum()))
    return tuple(after - earlier for earlier, after in pairwise(before))


def step_lengths(
    batch: Any, num_scheduled_tokens: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Scheduled tokens of each request, and its tokens in the cache."""
    counts = np.array([num_scheduled_tokens[i] for i in batch.req_ids], dtype=np.int64)
    return counts, batch.num_computed_tokens_cpu[: len(counts)].astype(np.int64)


class Hazards:
    """The hazard checks of all KV-cache groups, made when a plan is there to be asked about."""

    def __init__(self, batch: Any, counts: np.ndarray, contexts: np.ndarray) -> None:
        self._batch = batch
        self._counts = counts
        self._contexts = contexts

    def __call__(self, plan: StagePlan) -> HazardReport | None:
        """The first hazard of ``plan``, over all groups."""
        counts, contexts = self._counts, self._contexts
        starts = np.concatenate(([0], np.cumsum(counts)))
        requests = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - contexts, counts)
        for table in self._batch.block_table.block_tables:
            blocks = table.block_table.np[: len(counts)]
            size = table.block_size
            slots = blocks[requests, positions // size].astype(np.int64) * size + positions % size
            found = PrefixHazard(
                query_start_loc=torch.from_numpy(starts),
                seq_lens=torch.from_numpy(contexts + counts),
                block_table=torch.from_numpy(blocks),
                slot_mapping=torch.from_numpy(slots),
                block_size=size,
            )(plan)
            if found is not None:
                return found
        return None
