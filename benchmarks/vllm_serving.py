"""What the backend costs and gives inside vLLM, in one run, as ratios.

    .venv-vllm/bin/python benchmarks/vllm_serving.py [--without-plain] [--dtype bfloat16]

A random DeepSeek-V2 whose attention and experts take about the same time serves the same requests
in turns: unsplit AFD (``none``), two stages (``token``, ``request``, ``auto``), with attention on
one core and the experts' process on another, and plain vLLM in its default mode with a thread on
each of the two. Three workloads: long prompts with few new tokens, many short ones with more, and
two requests, whose steps are so small that a split cannot pay.

``auto`` reckons with costs that are fitted to the traces of the first rounds, as
``afd-graph costs`` does; the column *model* is the gain that the pipeline model predicts with them
for the MoE layers of the steps that ran. Ratios are medians over rounds, against unsplit AFD of the
same round: throughput above 1 is better, times below 1 are. While a bound is missed, more rounds
are run, up to ``--most``: other work on the cores moves them.

Last, what our hooks on the runner cost a step that is not split, as a share of it: bound 1 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _verdict import verdict
from _vllm_engine import HookClock, PlainEngine, Round, Work, serve, start

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

if TYPE_CHECKING:
    from afd_graph.cost_model import CostModel
    from afd_graph.tracing import TracedStep

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
POLICIES = ("none", "token", "request", "auto")
PLAIN = "plain vLLM"
MOST_HOOK_SHARE = 0.01
LEAST_GAIN = {"float32": 1.25, "bfloat16": 1.1}  # with AMX the experts have less to do
LEAST_AUTO = 0.95


def workloads() -> dict[str, Work]:
    """Requests by name of the workload."""
    draw = random.Random(0)

    def requests(count: int, lengths: Sequence[int], new: int) -> Work:
        return [
            ([draw.randrange(3, 500) for _ in range(draw.choice(lengths))], new)
            for _ in range(count)
        ]

    return {
        "prompts": requests(8, (128, 256, 384), 4),
        "decoding": requests(32, (8, 16, 32), 24),
        "two requests": requests(2, (8, 16), 32),
    }


class AFDEngine:
    """An engine with the backend, whose policy changes between rounds."""

    def __init__(self, model: Path, dtype: str, experts_cpus: Sequence[int]) -> None:
        options = {"trace": True, "connector_options": {"cpus": list(experts_cpus)}}
        self.dtype = dtype
        self.llm = start(
            model,
            dtype,
            compilation_config={"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"},
            additional_config={"afd": options},
        )
        self.costs: CostModel | None = None

    def serve(self, policy: str, work: Work) -> tuple[Round, list[TracedStep]]:
        """Serve a round, and tell what its steps did."""
        import afd_graph.vllm
        from afd_graph.vllm.runner_hook import options_of_runner

        core = self.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        options = options_of_runner(runner)
        config = options.config.replace(split=policy, costs=self.costs)
        runner._afd_options = dataclasses.replace(options, config=config)
        report = afd_graph.vllm.report()
        taken: list[Any] = []
        report.observers.append(taken.append)
        try:
            found = serve(self.llm, work)
        finally:
            report.observers.remove(taken.append)
        return found, list(report.trace().steps[-len(taken) :])

    def fit(self, steps: Sequence[TracedStep]) -> str:
        """Fit the costs of ``auto``; returns them for a reader."""
        from afd_graph.fit_costs import fit_costs, pays_from
        from afd_graph.tracing import Trace

        fit = fit_costs([Trace(tuple(steps), credits=2)])
        self.costs = fit.costs
        shown = ", ".join(
            f"{name} {getattr(fit.costs, name) * 1e6:.3g}"
            for name in ("attention_overhead", "linear", "experts_overhead", "experts", "shared")
        )
        prompt, decoding = pays_from(fit.costs, prompt=True), pays_from(fit.costs, prompt=False)
        return (
            f"us per layer: {shown}; usual error: attention {fit.attention_error:.1%}, "
            f"experts {fit.experts_error:.1%}\n"
            f"a split is predicted to pay from {prompt} tokens of one prompt on, and from "
            f"{decoding} requests that decode"
        )


def predicted_s(costs: CostModel, steps: Sequence[TracedStep]) -> float:
    """Time of all steps in the MoE layers by the pipeline model."""
    total = 0.0
    for step in steps:
        stages = [
            costs.stage_times(costs.linear * rows + costs.quadratic * (2 * pairs - rows), rows)
            for rows, pairs in zip(step.rows, step.pairs, strict=True)
        ]
        split = len(stages) > 1
        total += costs.pipeline_seconds(*stages) if split else costs.unsplit_seconds(stages[0])
    return total


class Comparison:
    """Rounds of every kind of engine on one workload."""

    def __init__(self, work: Work, engine: AFDEngine, plain: PlainEngine | None) -> None:
        self.work = work
        self._engine = engine
        self._plain = plain
        self.seen: dict[str, list[dict[str, float]]] = {}
        self.steps: dict[str, list[TracedStep]] = {}
        self.differ = 0

    def round(self) -> None:
        """One round of each kind."""
        unsplit: Round | None = None
        for policy in POLICIES:
            found, self.steps[policy] = self._engine.serve(policy, self.work)
            unsplit = unsplit or found
            self.differ += found.tokens != unsplit.tokens
            self.seen.setdefault(policy, []).append(found.numbers())
        if self._plain is not None:
            self.seen.setdefault(PLAIN, []).append(self._plain.serve(self.work).numbers())

    def ratio(self, kind: str, name: str) -> float:
        """Median over rounds of a number of ``kind`` against unsplit AFD of the same round."""
        pairs = zip(self.seen[kind], self.seen["none"], strict=True)
        return statistics.median(mine[name] / other[name] for mine, other in pairs)

    def show(self, title: str) -> None:
        """Print a table."""
        names = list(self.seen["none"][0])
        print(f"\n{title}, {len(self.seen['none'])} rounds; ratios to unsplit AFD")
        print(f"{'':>12}" + "".join(f"{name:>17}" for name in [*names, "model", "steps split"]))
        for kind in self.seen:
            cells = [f"{self.ratio(kind, name):.3f}" for name in names]
            if kind in POLICIES:
                assert self._engine.costs is not None
                gain = predicted_s(self._engine.costs, self.steps["none"]) / predicted_s(
                    self._engine.costs, self.steps[kind]
                )
                split = sum(step.policy is not None for step in self.steps[kind])
                cells += [f"{gain:.3f}", f"{split} of {len(self.steps[kind])}"]
            print(f"{kind:>12}" + "".join(f"{cell:>17}" for cell in cells))


def _busy(steps: Sequence[TracedStep]) -> str:
    """How busy both sides were in the largest step."""
    from afd_graph.tracing import Trace

    trace = Trace(tuple(steps), credits=2)
    largest = max(range(len(steps)), key=lambda number: sum(steps[number].rows))
    timeline = trace.timeline(largest)
    a, f = (timeline.utilisation(engine) for engine in ("attention", "ffn"))
    return f"{sum(steps[largest].rows)} tokens: attention busy {a:.0%}, experts busy {f:.0%}"


def main() -> None:
    """Run the benchmark; exits with 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--least", type=int, default=5, help="rounds")
    parser.add_argument("--most", type=int, default=12, help="rounds while a bound is missed")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--without-plain", action="store_true", help="no plain vLLM: starts faster")
    given = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    ours, theirs = cpus[:1], cpus[1:2] or cpus[:1]
    os.sched_setaffinity(0, ours)
    from random_deepseek import make_checkpoint

    with tempfile.TemporaryDirectory() as name:
        os.environ["VLLM_CACHE_ROOT"] = f"{name}/cache"  # nothing finds this model again
        model = make_checkpoint(
            Path(name) / "model", "deepseek_v2", num_hidden_layers=given.layers, **SIZES
        )
        plain = None if given.without_plain else PlainEngine(model, given.dtype, [*ours, *theirs])
        engine = AFDEngine(model, given.dtype, theirs)
        passed = _compare(engine, plain, given.least, given.most)
        if plain is not None:
            plain.close()
    sys.stdout.flush()
    # vLLM's own shutdown of an engine in this process may wait for threads.
    os._exit(int(not passed))


def _compare(engine: AFDEngine, plain: PlainEngine | None, least: int, most: int) -> bool:
    first: list[TracedStep] = []
    for work in workloads().values():
        for policy in ("none", "token", "request"):
            engine.serve(policy, work)
            first += engine.serve(policy, work)[1]
        if plain is not None:
            plain.serve(work)
    print(engine.fit(first))
    found = {name: Comparison(work, engine, plain) for name, work in workloads().items()}
    least_gain = LEAST_GAIN[engine.dtype]
    for number in range(most):
        if number >= least and all(holds for *_, holds in _claims(found, least_gain)):
            break
        for comparison in found.values():
            comparison.round()
    for name, comparison in found.items():
        comparison.show(name)
        for policy in ("none", "token"):
            print(f"  {policy}, {_busy(comparison.steps[policy])}")
    with HookClock() as clock:
        engine.serve("none", found["decoding"].work)
    share, bound = clock.ours_s / clock.steps_s, f"at most {MOST_HOOK_SHARE:g}"
    claims = [
        *_claims(found, least_gain),
        *([_same_tokens(found)] if engine.dtype == "float32" else []),
        ("hooks of an unsplit step, of it", share, bound, share <= MOST_HOOK_SHARE),
    ]
    held = [verdict(*claim) for claim in claims]
    return all(held)


def _same_tokens(found: dict[str, Comparison]) -> tuple[str, float, str, bool]:
    """A claim in float32; elsewhere a stage may round otherwise than the whole step."""
    differ = sum(comparison.differ for comparison in found.values())
    return "rounds with other tokens than unsplit", differ, "none", differ == 0


def _claims(found: dict[str, Comparison], least_gain: float) -> list[tuple[str, float, str, bool]]:
    """What :func:`_verdict.verdict` prints."""
    gain = found["prompts"].ratio("token", "tokens/s")
    claims = [
        (
            "prompts, two stages over unsplit AFD",
            gain,
            f"at least {least_gain:g}",
            gain >= least_gain,
        )
    ]
    for name, comparison in found.items():
        best = max(1.0, comparison.ratio("token", "tokens/s"))
        auto = comparison.ratio("auto", "tokens/s") / best
        bound = f"at least {LEAST_AUTO:g}"
        claims.append(
            (f"{name}, auto over the better of none and token", auto, bound, auto >= LEAST_AUTO)
        )
    return claims


if __name__ == "__main__":
    main()
