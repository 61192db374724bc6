"""What an operator of a server sees: log lines, counters, graphs.

* one INFO line per compiled or loaded model;
* a WARNING the first time that a step runs unsplit for a reason;
* the counters of split and unsplit steps, once per interval of vLLM's own statistics;
* the captured and the emitted graphs in vLLM's debug dump directory (``debug_dump_path``), in
  ``TORCH_LOGS=graph_code`` and in ``TORCH_TRACE``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from afd_graph import _compat
from afd_graph.config import AFDConfig
from afd_graph.report import GraphReport, Report
from afd_graph.vllm.programs import ExpertSource

log = logging.getLogger("vllm.afd_graph")


class GraphLog:
    """Follows one compilation.

    Args:
        vllm_config: says where vLLM puts graphs.
        config: says where ours go, besides.
    """

    def __init__(self, vllm_config: Any, config: AFDConfig) -> None:
        folders = [config.dump_dir, _dump_path(vllm_config)]
        self._folders = [Path(folder) for folder in folders if folder is not None]
        self._number = 0

    def after_pass(self, name: str, graph: fx.Graph) -> None:
        """Write the graph that a pass left."""
        self._number += 1
        gm = fx.GraphModule({}, graph)
        _compat.trace_graph(f"afd_{name}", gm)
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"afd.{self._number}.{name}.py"
            path.write_text(gm.print_readable(print_output=False))

    def finish(self, experts: Sequence[ExpertSource], found: GraphReport) -> None:
        """Say what came out, in one line."""
        for failure in found.no_match:
            log.warning("AFD: not matched: %s", failure)
        log.info("AFD compiled the model: %s", summary(experts, found))


class IntervalLog:
    """Writes the counters as often as vLLM writes its statistics (``VLLM_LOG_STATS_INTERVAL``)."""

    def __init__(self) -> None:
        import vllm.envs

        self._interval_s = vllm.envs.VLLM_LOG_STATS_INTERVAL
        self._next = time.monotonic() + self._interval_s

    def step(self, report: Report) -> None:
        """Note that a step ran."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval_s
        unsplit = ", ".join(f"{count} {why}" for why, count in sorted(report.steps_unsplit.items()))
        log.info(
            "AFD steps so far: %d split (%d inside a request), unsplit: %s",
            report.steps_split,
            report.steps_mid_request,
            unsplit or "none",
        )


def loaded(experts: Sequence[ExpertSource], found: GraphReport) -> None:
    """Say in one line what came out of vLLM's cache."""
    log.info("AFD loaded the model from vLLM's compile cache: %s", summary(experts, found))


def summary(experts: Sequence[ExpertSource], found: GraphReport) -> str:
    """One line about the programs of a model."""
    layers = f"{len(found.layers)} MoE layers" if found.layers else "no MoE layer"
    how = "two stages" if found.mode else f"unsplit ({found.unsplit_reason})"
    gates = " and ".join(dict.fromkeys(source.gate for source in experts))
    seconds = sum(found.pass_seconds.values())
    return (
        f"{layers}, {how}, {found.nodes_before} nodes captured, {found.nodes_after} emitted, "
        f"passes {seconds:.2f} s" + (f", gate and top-k: {gates}" if gates else "")
    )


def _dump_path(vllm_config: Any) -> Path | None:
    path = vllm_config.compile_debug_dump_path()
    return None if path is None else Path(path)
