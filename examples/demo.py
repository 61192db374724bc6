"""One compiled model becomes two programs: DeepSeek-V2-Lite's shape, split and judged.

    python examples/demo.py                     # random weights, real text
    python examples/demo.py --weights DIR       # a Hugging Face checkpoint directory

1. The eager model computes the text; so does the same model in fp32, layer by layer, as the judge.
2. The model is compiled: attention stays here on one core, the experts move to a process of their
   own on another core.
3. Unsplit and two-stage steps take turns, so that both see the same machine.
4. The eager model is timed again, with its weights back.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
)

from afd_graph import AFDBackend, AFDConfig
from afd_graph.efficiency import Efficiency, efficiency
from afd_graph.picture import write_svg
from afd_graph.planner import NoSplit, StagePlan, plan_stages
from afd_graph.simulate import closed_form
from afd_graph.timeline import Recorder
from afd_graph.trace import write_trace

BYTES = 256
TEXT = Path(__file__).with_name("text") / "alice.txt"
NOT_SPLIT = "asked for unsplit"

Model = torch.nn.Module


class Progress:
    """Says what is going on and how long it took."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        print(f"[{begin - self._begin:5.1f} s] {what} ...", end="", flush=True)
        yield
        print(f" {time.perf_counter() - begin:.1f} s", flush=True)

    @staticmethod
    def dot() -> None:
        print(".", end="", flush=True)


def v2_lite_config() -> DeepseekV2Config:
    """DeepSeek-V2-Lite's published shape with 1 dense and 3 MoE layers, and bytes as vocabulary."""
    return DeepseekV2Config(
        vocab_size=BYTES,
        hidden_size=2048,
        intermediate_size=10944,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        max_position_embeddings=4096,
    )


def random_model(config: DeepseekV2Config, seed: int = 0) -> Model:
    """A bf16 model of random weights, made within seconds.

    All weights come from one pool of random numbers; its odd length keeps rows apart.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = DeepseekV2ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(4_194_301, generator=generator).mul_(config.initializer_range).bfloat16()
    start = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            for part in parameter.view(-1).split(pool.numel()):
                end = start + part.numel()
                head = pool[start:end]
                part[: head.numel()] = head
                part[head.numel() :] = pool[: part.numel() - head.numel()]
                start = end % pool.numel()
    return model


def load(weights: Path | None, seed: int) -> Model:
    """The model of a checkpoint directory, or one of random weights."""
    if weights is None:
        model = random_model(v2_lite_config(), seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(weights, dtype="auto", local_files_only=True)
    model.config._experts_implementation = "grouped_mm"
    model.config._attn_implementation = "sdpa"
    return model.eval().requires_grad_(False)


def tokenize(text: str, weights: Path | None, vocabulary: int, limit: int) -> torch.Tensor:
    """Token ids ``[1, n]``: by the checkpoint's tokenizer when it has one, else bytes."""
    if weights is not None and any(weights.glob("tokenizer*.json")):
        ids = AutoTokenizer.from_pretrained(weights, local_files_only=True)(text)["input_ids"]
    else:
        ids = list(text.encode())
    ids = ids[:limit]
    if len(ids) < 2 or max(ids) >= vocabulary:
        sys.exit(
            f"{len(ids)} tokens up to id {max(ids, default=0)} do not suit a vocabulary of "
            f"{vocabulary}: give at least 2 tokens (--text, --tokens) and the model's tokenizer"
        )
    return torch.tensor([ids])


def judged_in_fp32(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Logits in fp32 from the same weights; one part of the model at a time is widened."""

    dtypes: dict[torch.nn.Parameter, torch.dtype] = {}

    def widen(part: Model, _arguments: object) -> None:
        dtypes.update((parameter, parameter.dtype) for parameter in part.parameters())
        part.float()

    def restore(part: Model, _arguments: object, _output: object) -> None:
        for parameter in part.parameters():
            parameter.data = parameter.data.to(dtypes[parameter])

    stem = model.model
    hooks = []
    for part in [stem.embed_tokens, *stem.layers, stem.norm, model.lm_head]:
        hooks.append(part.register_forward_pre_hook(widen))
        hooks.append(part.register_forward_hook(restore))
    try:
        return model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Steps:
    """Times in seconds and results of one way to run the model."""

    seconds: list[float] = field(default_factory=list)
    judged: list[Efficiency] = field(default_factory=list)
    logits: torch.Tensor | None = None

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    def time(self, run: Callable[[], torch.Tensor]) -> None:
        begin = time.perf_counter()
        self.logits = run()
        self.seconds.append(time.perf_counter() - begin)

    def typical(self) -> Efficiency:
        """The measured step whose time is the median."""
        return sorted(self.judged, key=lambda e: e.wall_s)[len(self.judged) // 2]


@contextmanager
def on_cores(cores: list[int]) -> Iterator[None]:
    """Run PyTorch on these cores of this machine, one thread each."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def run(options: argparse.Namespace) -> int:
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[:1], cores[1:2] or cores[:1]
    progress = Progress()
    with progress("loading the checkpoint" if options.weights else "filling random weights"):
        model = load(options.weights, options.seed)
    vocabulary = model.config.vocab_size
    ids = tokenize(options.text.read_text(), options.weights, vocabulary, options.tokens)
    tokens = ids.shape[1]
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{type(model).__name__}: {parameters / 1e9:.2f} billion parameters, {model.dtype}, "
        f"{model.config.num_hidden_layers} layers; {tokens} tokens of {options.text.name}\n"
        f"attention on core {ours[0]}, experts in their own process on core {theirs[0]}"
        + ("" if len(cores) > 1 else ": ONE core for both, nothing can overlap")
    )

    def eager() -> torch.Tensor:
        return model(ids, use_cache=False).logits

    def time_eager() -> None:
        for steps, where in ((eager_both, ours + theirs), (eager_one, ours)):
            with on_cores(sorted(set(where))):
                for _ in range((options.rounds + 1) // 2):
                    steps.time(eager)
                    progress.dot()

    eager_one, eager_both, unsplit, split = Steps(), Steps(), Steps(), Steps()
    with progress("judge: the same weights in fp32, layer by layer"):
        judge = judged_in_fp32(model, ids)
    with progress("eager steps"):
        time_eager()

    plan = plan_stages([tokens], split="token")
    asked: list[int | str] = [NOT_SPLIT]
    config = AFDConfig(connector="process", connector_options={"threads": 1, "cpus": theirs})
    with AFDBackend(config, plan=lambda extent, tokens: asked[0]) as backend, on_cores(ours):
        compiled = torch.compile(model, backend=backend, fullgraph=True)

        def step(steps: Steps, cut: int | str) -> None:
            asked[0] = cut
            with Recorder(backend.channel) as recorder:
                steps.time(lambda: compiled(ids, use_cache=False).logits)
            stages = "unsplit" if cut == NOT_SPLIT else "two stages"
            if backend.report().layers:
                steps.judged.append(efficiency(recorder, backend.credits, stages))

        with progress("compiling, and moving the experts to their process"):
            step(Steps(), NOT_SPLIT)
        print(backend.report())
        print_plan(plan)
        cut = NOT_SPLIT if isinstance(plan, NoSplit) else plan.stages[0].actual_tokens
        with progress("unsplit and two-stage steps in turn"):
            step(Steps(), cut)
            for _ in range(options.rounds):
                step(unsplit, NOT_SPLIT)
                step(split, cut)
                progress.dot()
    with progress("eager steps again"):
        time_eager()

    print_differences(judge, eager_one, unsplit, split)
    print_times(eager_one, eager_both, unsplit, split)
    if not unsplit.judged:
        print("no MoE layer was matched: there is nothing to split")
        return 0
    print_model(backend, unsplit.typical(), split.typical())
    draw(options.out, unsplit.typical(), split.typical())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the attention process: {peak:.1f} GiB")
    return 0 if is_equal(judge, unsplit, split) else 1


def print_plan(plan: StagePlan | NoSplit) -> None:
    if isinstance(plan, NoSplit):
        print(f"plan: not split, {plan.reason} {plan.detail}")
        return
    stages = (f"stage {i}: {s.actual_tokens} tokens" for i, s in enumerate(plan.stages))
    print(f"plan: {plan.policy}: {', '.join(stages)}")


def error(judge: torch.Tensor, steps: Steps) -> float:
    assert steps.logits is not None
    return float((steps.logits.float() - judge).abs().max())


def is_equal(judge: torch.Tensor, unsplit: Steps, split: Steps) -> bool:
    """Two stages may be off from fp32 by twice what the unsplit compiled model is."""
    return error(judge, split) <= 2 * error(judge, unsplit)


def print_differences(judge: torch.Tensor, eager: Steps, unsplit: Steps, split: Steps) -> None:
    assert eager.logits is not None
    assert split.logits is not None
    between = float((split.logits - eager.logits).abs().max())
    print(
        f"\nlargest difference of logits (up to {float(judge.abs().max()):.3g}), two stages to "
        f"eager: {between:.2g}\n"
        f"to the same weights in fp32: eager {error(judge, eager):.2g}, unsplit AFD "
        f"{error(judge, unsplit):.2g}, two stages {error(judge, split):.2g} "
        f"(at most twice unsplit: {'yes' if is_equal(judge, unsplit, split) else 'NO'})"
    )


def print_times(eager_one: Steps, eager_both: Steps, unsplit: Steps, split: Steps) -> None:
    print(
        f"\nmedian of {len(split.seconds)} steps, fastest        time     fastest  two stages are"
    )
    rows = (
        ("eager, one core", eager_one),
        ("eager, both cores", eager_both),
        ("unsplit AFD, one core a side", unsplit),
        ("two-stage AFD, one core a side", split),
    )
    for name, steps in rows:
        ratio = steps.median_s / split.median_s
        print(
            f"  {name:<31} {steps.median_s * 1e3:8.1f} ms {min(steps.seconds) * 1e3:8.1f} ms "
            f"{ratio:6.2f} times as fast"
        )


def print_model(backend: AFDBackend, unsplit: Efficiency, split: Efficiency) -> None:
    order, layers = backend.report().order, len(backend.report().layers)
    print(f"\nthe pipeline model, {order}, with the costs of the median step")
    for name, result in (("unsplit", unsplit), ("two stages", split)):
        a, f, c, d = (f"{value * 1e3:.1f}" for value in result.costs.uniform())
        print(
            f"  {name:<10} a {a}, f {f}, c {c}, d {d} ms per MoE layer and stage; "
            f"attention busy {result.busy('attention'):.0%}, experts {result.busy('ffn'):.0%}"
        )
    form = closed_form(layers, split.costs, order)
    print(
        f"  {layers} MoE layers alone: at least {form.split_s * 1e3:.1f} ms ({form.regime})\n"
        f"  with what lies around them: at least {split.bound_s * 1e3:.1f} ms; measured "
        f"{split.wall_s * 1e3:.1f} ms, {split.of_bound:.1%} of the bound"
    )


def draw(folder: Path, unsplit: Efficiency, split: Efficiency) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    timelines = [unsplit.measured, split.predicted, split.measured]
    picture, trace = folder / "timeline.svg", folder / "timeline.trace.json"
    write_svg(timelines, picture, title="One step: attention above, experts below")
    write_trace(timelines, trace)
    print(f"\npicture: {picture}\ntrace for ui.perfetto.dev: {trace}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--text", type=Path, default=TEXT, help="what the model reads")
    parser.add_argument("--tokens", type=int, default=768, help="longest prompt")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--out", type=Path, default=Path(".cache/demo"), help="for the picture")
    options = parser.parse_args(arguments)
    if options.weights is not None and not (options.weights / "config.json").is_file():
        parser.error(f"--weights {options.weights} has no config.json")
    if options.rounds < 1 or options.tokens < 2:
        parser.error("--rounds must be at least 1 and --tokens at least 2")
    # Dynamo warns about caches inside transformers that do not concern the user.
    warnings.filterwarnings("ignore", module="torch._dynamo")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with torch.no_grad():
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
