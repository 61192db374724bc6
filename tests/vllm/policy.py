"""The split policy of a running engine, changed from outside, as only a test may do.

Starting an engine costs many times what a workload costs, so one engine runs all policies.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any


def set_policy(runner: Any, split: str) -> None:
    """Let ``runner`` cut the following steps by ``split``."""
    from afd_graph.cost_model import CostModel
    from afd_graph.vllm import runner_hook

    costs = CostModel(linear=1.0, quadratic=0.02, experts=1.0, num_layers=3, credits=2)
    options = runner_hook.options_of_runner(runner)
    config = options.config.replace(split=split, costs=costs)
    runner._afd_options = dataclasses.replace(options, config=config)


def counters() -> Counter[str]:
    """Steps of this process so far: ``split``, of those ``mid_request``, and the reasons."""
    from afd_graph.vllm.served import served_models

    found: Counter[str] = Counter()
    for model in served_models():
        found["split"] += model.report.steps_split
        found["mid_request"] += model.report.steps_mid_request
        found.update(model.report.steps_unsplit)
    return found


class PolicySwitch:
    """What ``--worker-extension-cls`` adds to vLLM's worker, for ``/collective_rpc``."""

    model_runner: Any

    def afd_set_policy(self, split: str) -> None:
        """See :func:`set_policy`."""
        set_policy(self.model_runner, split)

    def afd_counters(self) -> dict[str, int]:
        """See :func:`counters`."""
        return dict(counters())
