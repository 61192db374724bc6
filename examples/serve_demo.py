"""Serve a small DeepSeek-V2 with vLLM three times and compare: without AFD, unsplit, in two stages.

    make serve-demo

All are vLLM's own OpenAI-compatible server, started one after the other on a random checkpoint. The
second has the experts in a process of their own, the third cuts every step that can be in two token
stages besides. The same requests go to all, some at once. Printed are the tokens, whether they are
equal, the time to the first token, and what the backend counted. On one small machine, with tiny
experts, AFD is not faster: this shows that it serves the same tokens, and how.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from openai_server import AFD, PLAIN, Answer, serving
from random_deepseek import make_checkpoint

AT_ONCE = 6


@dataclass(frozen=True)
class Served:
    """What a server answered, and the lines in which the backend says what it did."""

    answers: list[Answer]
    said: list[str]

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of all requests."""
        return [answer.tokens for answer in self.answers]


def requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts of mixed lengths, and how many tokens to make."""
    draw = random.Random(0)
    return [
        ([draw.randrange(3, 500) for _ in range(draw.choice([3, 17, 60, 120]))], 12)
        for _ in range(count)
    ]


def afd(split: str) -> list[str]:
    """Arguments of a server with the backend and a split policy."""
    return [*AFD, "--additional-config", json.dumps({"afd": {"split": split}})]


def serve(model: Path, arguments: Sequence[str], work: list[tuple[list[int], int]]) -> Served:
    """Answers of one server."""
    log = model.parent / "server.log"
    with serving(model, arguments, log) as server, ThreadPoolExecutor(AT_ONCE) as pool:
        server.complete([5, 6, 7], 4)
        answers = list(pool.map(lambda one: server.complete(*one), work))
        time.sleep(1.2)  # one more step after the log interval writes the counters
        server.complete([5, 6, 7], 4)
        lines = re.findall(r"AFD (?:steps so far|compiled).*", log.read_text())
    return Served(answers, list(dict.fromkeys([*lines[:1], *lines[-1:]])))


def main() -> int:
    """Run the demo; returns 1 when the tokens differ or nothing was split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--split", default="token", help="token, request, cost or auto")
    given = parser.parse_args()
    work = requests(given.requests)
    kinds = {
        "vLLM": PLAIN,
        "AFD, unsplit": afd("none"),
        "AFD, two stages": afd(given.split),
    }
    found: dict[str, Served] = {}
    with tempfile.TemporaryDirectory() as name:
        model = make_checkpoint(Path(name) / "model", "deepseek_v2")
        for kind, arguments in kinds.items():
            print(f"starting {kind} ...", flush=True)
            found[kind] = serve(model, arguments, work)
    plain, *others = (served.tokens for served in found.values())
    for i, (prompt, _) in enumerate(work):
        mark = "=" if all(tokens[i] == plain[i] for tokens in others) else "DIFFERENT"
        print(f"prompt of {len(prompt):3}: {others[-1][i]} {mark}")
    for kind, served in found.items():
        first = statistics.median(answer.first_s for answer in served.answers)
        print(f"{kind}: median time to first token {first * 1e3:.0f} ms")
        for line in served.said:
            print(f"  {line}")
    equal = all(tokens == plain for tokens in others)
    split = re.search(r"so far: (\d+) split", "\n".join(found["AFD, two stages"].said))
    print("tokens are equal" if equal else "tokens DIFFER")
    return 0 if equal and split and int(split[1]) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
