"""How much sooner an artifact answers than compiling does, both in fresh processes.

    python benchmarks/artifact_startup.py --layers 4

Each process is timed from before its imports to its first logits: one builds the model and
compiles it with ``torch.compile``, the other opens the artifact. Importing PyTorch alone is timed
as well, since both have to. The result is a ratio, with and without that import.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from _verdict import verdict

BOUND = 5.0

COMPILE = """
import time; begin = time.perf_counter()
import torch; imported = time.perf_counter()
import sys; sys.path.insert(0, sys.argv[1])
from transformers import AutoModelForCausalLM
from afd_graph import AFDBackend
model = AutoModelForCausalLM.from_pretrained(sys.argv[2]).eval()
model.config._experts_implementation = "grouped_mm"
with AFDBackend() as backend, torch.no_grad():
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    logits = compiled(torch.arange(32).view(1, 32)).logits
    assert backend.report().steps_split == 1
print(imported - begin, time.perf_counter() - begin)
"""
LOAD = """
import time; begin = time.perf_counter()
import torch; imported = time.perf_counter()
import sys, afd_graph
with afd_graph.load(sys.argv[3]) as model:
    model(input_ids=torch.arange(32).view(1, 32))
    assert model.report().steps_split == 1
print(imported - begin, time.perf_counter() - begin)
"""


def timed(code: str, *arguments: str) -> tuple[float, float]:
    """Seconds to import PyTorch, and to the first logits."""
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    imported, answered = map(float, run.stdout.split()[-2:])
    return imported, answered


def main() -> int:
    """Measure both, alternating; 1 when the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    from _models import deepseek_v2

    from afd_graph.artifact import save
    from afd_graph.hf import PREFIX, ServingModule, open_checkpoint, serving_examples

    with tempfile.TemporaryDirectory() as folder:
        model = deepseek_v2(num_hidden_layers=given.layers)
        model.save_pretrained(folder)
        module = ServingModule(model)
        artifact = str(Path(folder) / "model.afd")
        save(
            artifact,
            module,
            dict(serving_examples(module, None, ["prefill"])),
            checkpoint=open_checkpoint(folder, model=model),
            prefix=PREFIX,
        )
        here = str(Path(__file__).parent)
        runs = [
            (timed(COMPILE, here, folder, artifact), timed(LOAD, here, folder, artifact))
            for _ in range(given.runs)
        ]
    compiled = median(run[0][1] for run in runs)
    loaded = median(run[1][1] for run in runs)
    bare = (
        median(run[0][1] - run[0][0] for run in runs),
        median(run[1][1] - run[1][0] for run in runs),
    )
    ratio, ratio_bare = compiled / loaded, bare[0] / bare[1]
    print(f"{given.layers} layers, medians of {given.runs} runs")
    print(
        f"  compile: {compiled:6.2f} s to the first logits, {bare[0]:6.2f} s without import torch"
    )
    print(f"  load:    {loaded:6.2f} s to the first logits, {bare[1]:6.2f} s without import torch")
    print(f"  ratio:   {ratio:6.2f}                          {ratio_bare:6.2f}")
    held = verdict("compiling over loading", ratio, f"at least {BOUND:g}", ratio >= BOUND)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
