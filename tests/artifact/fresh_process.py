"""Open artifacts in a process that has never seen a model, and compare with what is expected."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

import afd_graph


def main(folder: str, *names: str) -> None:
    different, split = {}, {}
    for name in names:
        expected = load_file(Path(folder) / f"{name}.expected")
        with afd_graph.load(Path(folder) / f"{name}.afd") as model:
            out = model(input_ids=expected["input_ids"])
            got = {"logits": out["logits"]}
            got |= {f"{i}.{j}": t for i, p in enumerate(out["cache"]) for j, t in enumerate(p)}
            different[name] = max(
                (got[key] - expected[key]).abs().max().item() for key in got if got[key].numel()
            )
            split[name] = model.report().steps_split
    libraries = [name for name in ("transformers", "tiny_models") if name in sys.modules]
    print(json.dumps({"different": different, "split": split, "libraries": libraries}))


main(*sys.argv[1:])
