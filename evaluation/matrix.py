"""Run the matrix: ``python -m evaluation.matrix``, see ``--help``.

Attention DP3TP2 with FFN DP2TP1/EP2: eight processes of ``afd-graph serve`` answer the same prompts
in every configuration. Each is judged against the unsplit eager model, which answers the prompts
alone, one at a time, in this process:

1. every logit that chose a token is equal (fp32, 1e-5 relative to the largest of its step),
2. no answer flips,
3. every step did what the planner promises for its batch: which policy cut it, or why nothing did,
   and how many rows of each stage crossed to the experts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from afd_graph.compare import Activation, activation, compare_pair
from afd_graph.generate import Generation, generate, read_prompts
from afd_graph.results import Document, Run, read_results, write_results
from evaluation.configurations import CONFIGURATIONS, REFERENCE, Settings
from evaluation.promises import promised_steps

ROOT = Path(__file__).parent.parent
ADDITION = ROOT / "examples" / "addition"
TOLERANCE = 1e-5
NAMED = 3

Logits = dict[str, torch.Tensor]


@dataclass
class Verdict:
    """One run of one configuration.

    Attributes:
        name: the configuration.
        run: number of the run.
        documents: prompts answered.
        right: exact matches.
        flips: documents whose tokens are not those of the reference.
        error: largest difference of logits, relative to the largest logit of its step.
        steps: what the steps did.
        faults: why the configuration did not pass.
    """

    name: str
    run: int
    documents: int
    right: int
    flips: int
    error: float
    steps: Activation
    faults: list[str]


def answer_alone(settings: Settings) -> tuple[Run, Logits]:
    """The eager model's answers, one prompt at a time, and the logits that chose their tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype), local_files_only=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    logits: Logits = {}
    documents = generate(
        model,
        lambda: DynamicCache(config=model.config),
        read_prompts(settings.prompts.read_text().splitlines(), tokenizer),
        None,
        Generation(
            policy="none",
            mode=REFERENCE,
            max_new_tokens=settings.most,
            batch_size=1,
            end_tokens=frozenset([model.config.eos_token_id]),
            decode=tokenizer.decode,
        ),
        logits,
    )
    path = settings.out / "reference.jsonl"
    write_results(path, documents)
    return read_results(path), logits


def launch(settings: Settings, name: str, run: int) -> None:
    """Run one configuration to its end; the program ends when a rank fails."""
    configuration = CONFIGURATIONS[name]
    command: list[Any] = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", settings.ranks, "-m", "afd_graph.cli", "serve"),
        *("--model", settings.model, "--dtype", settings.dtype),
        *("--tp", settings.tensor_parallel, "--ffn-ranks", settings.ffn_ranks),
        *("--split", configuration.split, "--mode", name),
        *(["--sequence-parallel"] if configuration.sequence_parallel else []),
        *("--prompts", settings.prompts, "--batch", settings.batch),
        *("--max-new-tokens", settings.most, "--timeout", settings.timeout_s),
        *("--output", settings.results(name, run), "--logits", settings.logits(name, run)),
    ]
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{name}: a rank failed\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference ``[tokens, vocabulary]``, relative to the largest logit of its step.

    Steps behind a flipped token were given something else and do not count.
    """
    length = min(len(got), len(wanted))
    flipped = (got[:length].argmax(-1) != wanted[:length].argmax(-1)).nonzero()
    if len(flipped):
        length = int(flipped[0]) + 1
    got, wanted = got[:length], wanted[:length]
    return float(((got - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max())


def broken_promises(settings: Settings, name: str, run: Run) -> list[str]:
    """Steps that are not what the planner promises for the batch that they served."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    config = json.loads((settings.model / "config.json").read_text())
    broken = []
    for replica in range(settings.replicas):
        mine = run.documents[replica :: settings.replicas]
        for start in range(0, len(mine), settings.batch):
            batch: tuple[Document, ...] = mine[start : start + settings.batch]
            promised = promised_steps(
                CONFIGURATIONS[name],
                [len(tokenizer(document.prompt).input_ids) for document in batch],
                max(len(document.tokens) for document in batch),
                ranks=settings.tensor_parallel,
                layers=config["num_hidden_layers"] - config["first_k_dense_replace"],
            )
            for document in batch:
                if len(document.steps) != len(document.tokens):
                    broken.append(f"document {document.id}: {len(document.steps)} steps")
                for i, (step, wanted) in enumerate(zip(document.steps, promised, strict=False)):
                    done = (step.policy, step.split, step.reason, step.rows)
                    if done != (wanted.policy, wanted.split, wanted.reason, wanted.rows):
                        broken.append(f"document {document.id}, step {i}: {step}, not {wanted}")
    return broken


def judge(settings: Settings, name: str, run: int, reference: Run, wanted: Logits) -> Verdict:
    """Hold one run of one configuration against the reference and the planner."""
    results = read_results(settings.results(name, run))
    logits: Logits = {}
    for file in sorted(settings.logits(name, run).iterdir()):
        logits.update(load_file(file))
    verdict = Verdict(
        name=name,
        run=run,
        documents=len(results.documents),
        right=sum(bool(document.right) for document in results.documents),
        flips=compare_pair(reference, results).flips,
        error=max(relative_error(logits[i], wanted[i]) for i in wanted),
        steps=activation(results),
        faults=[],
    )
    if settings.dtype == "float32":
        if verdict.flips:
            verdict.faults.append(f"{verdict.flips} answers flipped")
        if not verdict.error < TOLERANCE:
            verdict.faults.append(f"logits differ by {verdict.error:.2e}")
    broken = broken_promises(settings, name, results)
    if broken:
        named = "; ".join(broken[:NAMED])
        verdict.faults.append(f"{len(broken)} steps not as promised: {named}")
    if verdict.steps.never:
        verdict.faults.append("the policy was never active")
    return verdict


def table_row(verdict: Verdict) -> str:
    """The verdict for people, a row of a Markdown table."""
    steps = verdict.steps
    unsplit = sum(steps.unsplit.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in steps.unsplit.most_common())
    return (
        f"| {verdict.name} | {verdict.right} of {verdict.documents} | {verdict.flips} "
        f"| {verdict.error:.1e} | {steps.steps} | {steps.steps - unsplit} | {reasons or '0'} |"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.matrix",
        description="Six configurations of DP3TP2 attention with EP2 experts, against the unsplit "
        "model in one process.",
    )
    parser.add_argument("--model", type=Path, default=ADDITION / "model", help="checkpoint")
    parser.add_argument("--size", type=int, default=505, help="held-out additions to answer")
    parser.add_argument("--prompts", type=Path, help="or JSON lines with id, prompt, expected")
    parser.add_argument(
        "--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS)
    )
    parser.add_argument("--runs", type=int, default=1, help="runs of every configuration")
    parser.add_argument("--batch", type=int, default=6, help="most prompts of a replica's step")
    parser.add_argument("--most", type=int, default=9, help="most tokens of an answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--replicas", type=int, default=3, help="data-parallel replicas")
    parser.add_argument("--out", type=Path, default=Path(".cache/matrix"), help="result files")
    return parser.parse_args()


def main() -> None:
    """Run, judge, print; code 1 when a configuration did not pass."""
    args = parse()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*past_key_values. is deprecated")
    transformers.utils.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = args.prompts
    if prompts is None:
        prompts = args.out / "prompts.jsonl"
        write_prompts(prompts, args.size)
    settings = Settings(
        model=args.model,
        prompts=prompts,
        out=args.out,
        replicas=args.replicas,
        batch=args.batch,
        most=args.most,
        dtype=args.dtype,
    )
    reference, wanted = answer_alone(settings)
    right = sum(bool(document.right) for document in reference.documents)
    print(f"{REFERENCE}: {right} of {len(reference.documents)} right", flush=True)
    print("| configuration | right | flips | logits differ by | steps | in two stages | unsplit |")
    print("|---|---|---|---|---|---|---|", flush=True)
    faults = []
    begin = time.perf_counter()
    for name in args.configurations:
        for run in range(args.runs):
            launch(settings, name, run)
            verdict = judge(settings, name, run, reference, wanted)
            print(table_row(verdict), flush=True)
            faults += [f"{name}, run {run}: {fault}" for fault in verdict.faults]
    print(f"{time.perf_counter() - begin:.0f} s; result files in {args.out}")
    if faults:
        sys.exit("\n".join(faults))


def write_prompts(path: Path, size: int) -> None:
    """Write held-out additions; the id of each is its place."""
    sys.path.insert(0, str(ADDITION))
    from task import held_out_problems

    with path.open("w", encoding="utf-8") as file:
        for i, problem in enumerate(held_out_problems(size)):
            answer = problem.answer.removesuffix(".")
            line = {"id": str(i), "prompt": problem.prompt, "expected": answer}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
