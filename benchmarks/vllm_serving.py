"""What the backend costs and gives inside vLLM, in one run, as ratios.

    .venv-vllm/bin/python benchmarks/vllm_serving.py [--requests N] [--repeat N]

One engine of a random DeepSeek-V2, with the experts in the FFN process, serves the same requests in
turns, unsplit (``split: none``) and in two stages (``token``). Printed are

* throughput and median time to first token of two stages against unsplit AFD;
* what our hooks on the runner cost a step that is not split, as a share of the step: bound 1 %.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _verdict import verdict

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

AFD = {"mode": "DYNAMO_TRACE_ONCE", "backend": "afd"}
MOST_HOOK_SHARE = 0.01


def start(model: Path) -> Any:
    """An engine with the backend; its policy is changed between rounds."""
    from vllm import LLM

    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        seed=0,
        disable_log_stats=False,
        compilation_config=AFD,
        additional_config={"afd": {}},
    )


def set_policy(llm: Any, split: str) -> None:
    """Change where steps are cut."""
    import dataclasses

    from afd_graph.vllm.runner_hook import options_of_runner

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    options = options_of_runner(runner)
    config = options.config.replace(split=split)
    runner._afd_options = dataclasses.replace(options, config=config)


def one_round(llm: Any, work: list[tuple[list[int], int]]) -> tuple[float, float]:
    """Tokens a second, and the median time to first token in seconds."""
    from vllm import SamplingParams

    begin = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in work],
        [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in work
        ],
        use_tqdm=False,
    )
    seconds = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    first = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
    return tokens / seconds, statistics.median(first)


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


def main() -> None:
    """Run the benchmark; exits with 1 when the hooks cost more than their bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    given = parser.parse_args()
    from random_deepseek import make_checkpoint

    draw = random.Random(0)
    work = [
        ([draw.randrange(3, 500) for _ in range(draw.choice([32, 96, 200]))], 16)
        for _ in range(given.requests)
    ]
    with tempfile.TemporaryDirectory() as name:
        model = make_checkpoint(
            Path(name), "deepseek_v2", hidden_size=given.hidden, moe_intermediate_size=512
        )
        llm = start(model)
        rounds: dict[str, list[tuple[float, float]]] = {"none": [], "token": []}
        for split in rounds:
            set_policy(llm, split)
            one_round(llm, work)
        for _ in range(given.repeat):
            for split, found in rounds.items():
                set_policy(llm, split)
                found.append(one_round(llm, work))
        set_policy(llm, "none")
        with HookClock() as clock:
            one_round(llm, work)
    pairs = zip(rounds["token"], rounds["none"], strict=True)
    ratios = [(token[0] / none[0], token[1] / none[1]) for token, none in pairs]
    share = clock.ours_s / clock.steps_s
    throughput, first = (statistics.median(r[i] for r in ratios) for i in (0, 1))
    verdict("throughput, two stages over unsplit AFD", throughput, "no bound", True)
    verdict("first token, two stages over unsplit AFD", first, "no bound", True)
    bound = f"at most {MOST_HOOK_SHARE:g}"
    verdict("hooks of an unsplit step, of it", share, bound, share <= MOST_HOOK_SHARE)
    sys.stdout.flush()
    os._exit(int(share > MOST_HOOK_SHARE))


if __name__ == "__main__":
    main()
