"""Peak memory of the attention side: two stages against unsplit.

    python benchmarks/memory.py

Each variant compiles the same model in a process of its own, over the connector ``process`` (the
experts' weights are in the other process). After a warm-up step the kernel's high-water mark is
reset, steps run, and the mark is read: everything that the attention process holds, weights and
shared slots included. What a step adds to the memory before it is shown as well. Exits with 1
when two stages need more than 1.1 times the peak of unsplit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from _verdict import verdict

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 4,
}
MIB = 2**20


def status(field: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM`` of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found
    return int(found[1]) * 1024


def child(variant: str, tokens: int, steps: int) -> None:
    """Print the memory of one variant as JSON."""
    from _models import Compiled, deepseek_v2

    torch.set_num_threads(1)
    model = deepseek_v2(torch.bfloat16, **SIZES)
    ids = torch.randint(0, 256, (1, tokens))
    compiled = Compiled(model, connector="process")
    with torch.no_grad(), compiled.backend:
        split = variant == "two stages"
        for _ in range(2):
            compiled(ids, split=split)
        ctypes.CDLL(None).malloc_trim(0)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(steps):
            compiled(ids, split=split)
        print(json.dumps({"before": before, "peak": status("VmHWM")}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.1)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        child(options.variant, options.tokens[0], options.steps)
        return 0
    print(
        f"{'tokens':>6} {'variant':>10} {'peak':>10} {'one step':>10} {'ratio':>6} {'one step':>8}"
    )
    worst = 0.0
    for tokens in options.tokens:
        seen: list[tuple[int, int]] = []
        for variant in ("unsplit", "two stages"):
            command = [sys.executable, __file__, "--variant", variant]
            command += ["--tokens", str(tokens), "--steps", str(options.steps)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            memory = json.loads(done.stdout.splitlines()[-1])
            seen.append((memory["peak"], memory["peak"] - memory["before"]))
            peak, step = (now / first for now, first in zip(seen[-1], seen[0], strict=True))
            print(
                f"{tokens:>6} {variant:>10} {seen[-1][0] / MIB:>6.0f} MiB "
                f"{seen[-1][1] / MIB:>6.0f} MiB {peak:>6.3f} {step:>8.3f}",
                flush=True,
            )
        worst = max(worst, peak)
    holds = worst <= options.limit
    verdict("peak of two stages over unsplit", worst, f"at most {options.limit:g}", holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
