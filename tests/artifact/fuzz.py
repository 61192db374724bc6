"""Damage an artifact in thousands of ways: always an error or the right result.

    python tests/artifact/fuzz.py --mutations 5000 --seed 0

Two kinds of damage. *Raw*: bytes of a file are flipped, cut, repeated or thrown away; opening it
must be an error of ours, or give exactly the right result. *Sealed*: a value inside is replaced,
by a hostile one more often than not, and all hashes are made right again, so that the reader
itself is tried; opening must be an error of ours or succeed, and a step that then fails must do so
with an exception. In no case may the process die, hang, grow, import, write or start anything.

Mutations run in a child process whose address space is limited; a child that dies names the
mutation that it died of. Every mutation depends on its number and the seed alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import afd_graph
from afd_graph import AFDError
from afd_graph.artifact import Example, save
from afd_graph.artifact.manifest import Manifest, encode, sha256

ADDRESS_SPACE = 12 * 2**30
GROWTH = 512 * 2**20
HANG_S = 300
CANARY = "afd_fuzz_canary"
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**40, 1.5, -0.0, 1e308),
    *("", "x", "\0", "a" * 100_000, "..", "/etc/passwd", "../../x", "/dev/zero", "constructor"),
    *([], {}, [[]], [None] * 1000, {"node": "x"}, {"tuple": []}, {"device": "cuda"}),
    f"__import__('{CANARY}')",
    f"x=__import__('{CANARY}')",
    f"x): __import__('{CANARY}') #",
    f"x, y=__import__('{CANARY}')",
    f"\n    __import__('{CANARY}')\n",
    *("aten.from_file.default", "aten._print.default", "aten.add_.Tensor", "aten.add.out"),
    *("afd.cam_receive.default", "operator.pow", "operator.attrgetter", "builtins.eval"),
    *("aten.empty.memory_format", "aten.item.default", "prim.device.default", "os.system"),
    *("add", "dim", "input", "floordiv", "float64", "bool", "uint8", "device", "no_such_name"),
    ["mul", *[["dim", 0, 0]] * 50],
    ["dim", 10**9, 0],
    ["floordiv", 1, 0],
    {"stack": [{"file": 0, "name": "x"}] * 3},
    {"concat": [{"file": 0, "name": "x"}], "dim": 7},
]
_deep: Any = []
for _ in range(400):
    _deep = [_deep]
HOSTILE.append(_deep)


class Block(torch.nn.Module):
    """One attention and one MoE layer, as small as they come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, 8)
        self.qkv = torch.nn.Linear(8, 24)
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.up = torch.nn.Parameter(torch.randn(4, 8, 6))
        self.down = torch.nn.Parameter(torch.randn(4, 6, 8))
        self.register_buffer("scale", torch.rand(8), persistent=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Hidden states ``[b, s, 8]`` of ``ids [b, s]``."""
        x = self.embed(ids) * self.scale
        b, s, h = x.shape
        q, k, v = (t.view(b, s, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(b, s, h)
        rows = x.view(-1, h)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        flat = chosen.reshape(-1)
        repeated = rows.repeat_interleave(2, dim=0)
        inner = torch.bmm(repeated.unsqueeze(1), self.up[flat]).squeeze(1)
        out = torch.bmm(inner.relu().unsqueeze(1), self.down[flat]).squeeze(1)
        out = (out * weights.reshape(-1, 1)).view(rows.shape[0], 2, h).sum(1)
        return {"hidden": x + out.view(b, s, h)}


def make(folder: Path) -> None:
    """The sound artifacts, and what they give."""
    model = Block().eval().requires_grad_(False)
    ids = torch.arange(6).view(1, 6)
    dynamic = {"ids": {1: torch.export.Dim.AUTO}}
    for name in ("sound", "sound.afd"):
        save(folder / name, model, {"step": Example({"ids": ids}, dynamic)}, ffn_ranks=2)
    with afd_graph.load(folder / "sound") as loaded:
        result = loaded(ids=ids)["hidden"]
        assert loaded.report().steps_split == 1
    torch.testing.assert_close(result, model(ids)["hidden"], rtol=1e-5, atol=1e-5)
    torch.save(result, folder / "expected.pt")


def damaged(data: bytes, random: random.Random) -> bytes:
    """Raw damage."""
    place = random.randrange(len(data) + 1)
    size = random.choice([1, 2, 8, 64, len(data) // 2])
    kind = random.randrange(7)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + data[place + size :]
    if kind == 2:
        return data[:place] + random.randbytes(size) + data[place:]
    if kind == 3:
        return data[:place] + data[place : place + size] * 2 + data[place + size :]
    if kind == 4:
        return data[:place] + bytes(min(size, len(data) - place)) + data[place + size :]
    if kind == 5 and len(data):
        flipped = bytearray(data)
        for _ in range(random.choice([1, 1, 3, 20])):
            flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(flipped)
    return random.choice([b"", random.randbytes(size), b"null", b"[]", b"{}", b'{"kind": 1}'])


def changed(value: Any, random: random.Random) -> Any:
    """One value inside replaced, removed, doubled or exchanged for its neighbour."""
    value = copy.deepcopy(value)
    spots: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        keys = part.keys() if isinstance(part, dict) else range(len(part))
        for key in keys:
            spots.append((part, key))
            if isinstance(part[key], (dict, list)):
                walk(part[key])

    walk(value)
    if not spots:
        return random.choice(HOSTILE)
    parent, key = random.choice(spots)
    kind = random.randrange(10)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == 2:
        other, place = random.choice(spots)
        parent[key] = copy.deepcopy(other[place])
    elif kind == 3 and isinstance(parent[key], int):
        parent[key] += random.choice([-1, 1, 7])
    elif kind == 4 and isinstance(parent, dict):
        name = random.choice([h for h in HOSTILE if isinstance(h, str)])
        parent[name] = parent.pop(key)
    elif kind == 5 and isinstance(parent[key], str):
        parent[key] = parent[key] + random.choice(["x", ".", " ", "=1", ":int", "\n"])
    else:
        parent[key] = copy.deepcopy(random.choice(HOSTILE))
    return value


def seal(folder: Path, name: str, data: bytes) -> None:
    """Put a changed file in and make the hash and checksum of the manifest right."""
    (folder / name).write_bytes(data)
    manifest = Manifest.decode((folder / "manifest.json").read_bytes())
    files = dict(manifest.files)
    files[name] = (len(data), sha256(data))
    made = Manifest(**{**vars(manifest), "files": files})
    (folder / "manifest.json").write_bytes(made.encode())


def seal_manifest(folder: Path, random: random.Random) -> None:
    """Change the manifest itself, with a checksum that is right."""
    body = json.loads((folder / "manifest.json").read_bytes())
    body.pop("checksum")
    body = changed(body, random)
    try:
        data = encode(body)
        if isinstance(body, dict):
            data = encode({**body, "checksum": sha256(data)})
    except (ValueError, RecursionError):
        data = b"{}"
    (folder / "manifest.json").write_bytes(data)


def mutate(sound: Path, target: Path, random: random.Random) -> tuple[Path, bool]:
    """Make one damaged artifact; returns where, and whether it is sealed."""
    if random.random() < 0.2:
        data = damaged((sound / "sound.afd").read_bytes(), random)
        (target / "sound.afd").write_bytes(data)
        shutil.copy(sound / "sound.safetensors", target)
        return target / "sound.afd", False
    folder = target / "sound"
    shutil.copytree(sound / "sound", folder)
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    name = random.choice(files)
    data = (folder / name).read_bytes()
    if random.random() < 0.35:
        (folder / name).write_bytes(damaged(data, random))
        return folder, False
    if name == "manifest.json":
        seal_manifest(folder, random)
    elif name.endswith(".json"):
        value = changed(json.loads(data), random)
        try:
            seal(folder, name, json.dumps(value, allow_nan=False).encode())
        except (ValueError, RecursionError):
            seal(folder, name, b"[[[[")
    else:
        (folder / name).write_bytes(damaged(data, random))
        if name == "constants.safetensors":
            seal(folder, name, (folder / name).read_bytes())
    return folder, True


class Watch:
    """Notes what a process does that opening an artifact must not do."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in ("os.system", "subprocess.Popen", "pickle.find_class", "socket.connect"):
            self.seen.append(event)
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            self.seen.append(f"writes {args[0]}")
        elif event == "import" and args[0] == CANARY:
            self.seen.append("imports what the artifact names")


def try_one(path: Path, sealed: bool, expected: torch.Tensor, watch: Watch) -> str:
    """What opening a damaged artifact and running a step comes to."""
    ids = torch.arange(6).view(1, 6)
    watch.on = True
    try:
        try:
            model = afd_graph.load(path, options={"timeout_s": 20})
        except AFDError:
            raise
        except Exception as error:
            return f"WRONG: load {error!r}"
        try:
            result = model(ids=ids)
        except Exception as error:
            return f"step: {type(error).__name__}" if sealed else f"WRONG: step {error!r}"
        finally:
            model.close()
        if path.is_dir():
            afd_graph.load(path, role="ffn", rank=1)
    except AFDError as error:
        return f"load: {type(error).__name__}"
    finally:
        watch.on = False
    hidden = result.get("hidden") if isinstance(result, dict) else None
    if isinstance(hidden, torch.Tensor) and torch.equal(hidden, expected):
        return "right"
    return "changed" if sealed else "WRONG: another result"


def child(sound: Path, seed: int, first: int, last: int) -> int:
    """Run the mutations ``first`` to ``last``; prints one line each."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    torch.set_num_threads(1)
    expected = torch.load(sound / "expected.pt")
    watch = Watch()
    (sound / f"{CANARY}.py").write_text("")
    sys.path.insert(0, str(sound))
    before = 0
    for number in range(first, last):
        print(f"begin {number}", flush=True)
        generator = random.Random(f"{seed} {number}")
        signal.alarm(HANG_S)
        with tempfile.TemporaryDirectory() as target:
            path, sealed = mutate(sound, Path(target), generator)
            answer = try_one(path, sealed, expected, watch)
        signal.alarm(0)
        if watch.seen or CANARY in sys.modules:
            answer = f"WRONG: {watch.seen}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = before or peak
        if peak > before + GROWTH:
            answer = f"WRONG: grew by {(peak - before) / 2**20:.0f} MiB"
        print(f"end {number} {'sealed' if sealed else 'raw'} {answer}", flush=True)
    return 0


def main() -> int:
    """Run all mutations and print what they came to; 1 when any was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=3, metavar=("FOLDER", "FIRST", "LAST"))
    given = parser.parse_args()
    if given.child:
        return child(Path(given.child[0]), given.seed, *map(int, given.child[1:]))
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        first = 0
        while first < given.mutations:
            last = min(first + 500, given.mutations)
            command = [sys.executable, __file__, "--seed", str(given.seed)]
            run = subprocess.run(
                [*command, "--child", folder, str(first), str(last)],
                capture_output=True,
                text=True,
            )
            begun = first
            for line in run.stdout.splitlines():
                word, number, *answer = line.split(" ", 2)
                begun = int(number)
                if word == "end":
                    counted[answer[0]] += 1
                    if "WRONG" in answer[0]:
                        wrong.append(f"mutation {number}: {answer[0]}")
            if run.returncode:
                wrong.append(f"mutation {begun}: the process ended with {run.returncode}")
                wrong.append(run.stderr[-2000:])
                last = begun + 1
            first = last
            print(f"{first} of {given.mutations}", file=sys.stderr, flush=True)
    for answer, count in counted.most_common():
        print(f"{count:6} {answer}")
    for line in wrong:
        print(line)
    print(f"{given.mutations} mutations, seed {given.seed}: {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
