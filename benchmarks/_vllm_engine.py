"""Engines of vLLM for the serving benchmark: one with the backend here, one without in a child.

Each engine serves rounds: all requests of a workload arrive at once, and the time of every token is
noted.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Work = Sequence[tuple[list[int], int]]
"""Prompts, and how many tokens to make for each."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Round:
    """What clients saw of a round.

    Attributes:
        tokens: of all requests, in their order.
        seconds: of the whole round.
        first_s: from the arrival of each request to its first token.
        between_s: between tokens of one request that follow each other.
    """

    tokens: list[list[int]]
    seconds: float
    first_s: list[float]
    between_s: list[float]

    def numbers(self) -> dict[str, float]:
        """Throughput, and the delays that clients wait for."""
        count = sum(map(len, self.tokens))
        return {
            "tokens/s": count / self.seconds,
            "first, median": statistics.median(self.first_s),
            "first, p90": _p90(self.first_s),
            "between, median": statistics.median(self.between_s),
            "between, p90": _p90(self.between_s),
        }


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def start(model: Path, dtype: str, **options: Any) -> Any:
    """An engine in this process, with the kernels that vLLM chooses for the CPU, if it can."""
    from vllm import LLM

    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype=dtype,
        # vLLM's choice where the CPU has AMX has no float32.
        attention_backend="CPU_MLA" if dtype == "float32" else None,
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        seed=0,
        **options,
    )


def serve(llm: Any, work: Work) -> Round:
    """Serve a round."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    names = [f"request {next(_numbers)}" for _ in work]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    came: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for name, (prompt, length) in zip(names, work, strict=True):
        sampling = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
        )
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            made = list(output.outputs[0].token_ids)
            if len(made) > len(tokens[output.request_id]):
                tokens[output.request_id] = made
                came[output.request_id].append(now)
    return Round(
        [tokens[name] for name in names],
        time.perf_counter() - begin,
        [times[0] - begin for times in came.values()],
        [late - early for times in came.values() for early, late in itertools.pairwise(times)],
    )


class PlainEngine:
    """vLLM as it is, in a process of its own with all cores; one round at a time.

    Start it before an engine in this process, which changes the environment.

    Args:
        model: the checkpoint.
        dtype: that it computes in.
        cpus: cores that it may use, with a thread on each.
    """

    def __init__(self, model: Path, dtype: str, cpus: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_plain, args=(theirs, model, dtype, cpus), daemon=True
        )
        # OpenMP reads its number of threads when it is loaded, which may be before any Python runs.
        here = os.environ["OMP_NUM_THREADS"]
        os.environ["OMP_NUM_THREADS"] = str(len(cpus))
        try:
            self._process.start()
        finally:
            os.environ["OMP_NUM_THREADS"] = here
        theirs.close()
        self._connection.recv()

    def serve(self, work: Work) -> Round:
        """Serve a round there."""
        self._connection.send(work)
        found: Round = self._connection.recv()
        return found

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(30)
        self._process.kill()


def _serve_plain(connection: Connection, model: Path, dtype: str, cpus: Sequence[int]) -> None:
    os.sched_setaffinity(0, cpus)  # before OpenMP counts them
    import torch

    if torch.get_num_threads() != len(cpus):
        raise RuntimeError(f"{torch.get_num_threads()} threads for the cores {cpus}")
    llm = start(model, dtype)
    connection.send("ready")
    try:
        while True:
            connection.send(serve(llm, connection.recv()))
    except EOFError:
        os._exit(0)


class HookClock:
    """Time inside our wrappers of the runner, without that of what they wrap."""

    def __init__(self) -> None:
        self.ours_s = self.steps_s = 0.0

    def __enter__(self) -> HookClock:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self._owner = GPUModelRunner
        self._build = GPUModelRunner._build_attention_metadata
        self._execute = GPUModelRunner.execute_model
        plain = self._build.__wrapped__
        clock = self
        inner = 0.0

        def timed_plain(runner: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inner
            begin = time.perf_counter()
            try:
                return plain(runner, *args, **kwargs)
            finally:
                inner += time.perf_counter() - begin

        from afd_graph.vllm.runner_hook import with_stages

        ours = with_stages(timed_plain)

        def build(runner: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inner
            inner, begin = 0.0, time.perf_counter()
            result = ours(runner, *args, **kwargs)
            clock.ours_s += time.perf_counter() - begin - inner
            return result

        def execute(runner: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = clock._execute(runner, *args, **kwargs)
            clock.steps_s += time.perf_counter() - begin
            return result

        GPUModelRunner._build_attention_metadata = build
        GPUModelRunner.execute_model = execute
        return self

    def __exit__(self, *exc: object) -> None:
        self._owner._build_attention_metadata = self._build
        self._owner.execute_model = self._execute
