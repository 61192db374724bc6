"""The code that torchair generates for a captured graph, and the rules that its events must keep.

:func:`faults` returns one sentence for every rule that a piece of code breaks. In good code every
communication operator

* is on its stream, behind a wait for an event that the main stream recorded when the rows were
  there;
* keeps alive what it reads, or the main stream would use the memory again;
* records an event behind a receive, which everybody who reads the answer waits for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from afd_graph.lowering.ascend.ir_table import PACKAGES
from afd_graph.lowering.ascend.streams import LABEL

_STREAM = f"with torch.npu.stream(_GLOBAL_USER_TAG_TO_STREAM['{LABEL}']):"
_CALL = re.compile(
    r"(\w+) = torch\.ops\.("
    + "|".join(o.name.replace("::", r"\.") for p in PACKAGES.values() for o in p.operators)
    + r")\.default\((.*?)\)"
)
_RECEIVES = tuple(p.combine_recv.name.split("::")[1] for p in PACKAGES.values())


@dataclass(frozen=True)
class _Exchange:
    line: int
    result: str
    operator: str
    tensors: tuple[str, ...]
    region: range | None

    @property
    def is_receive(self) -> bool:
        return self.operator.endswith(_RECEIVES)


def body(code: str) -> list[str]:
    """The lines of the function that is captured."""
    return [line for line in code[code.index("def forward(") :].splitlines() if line.strip()]


def exchanges(code: str) -> list[str]:
    """The communication operators, in the order of the code."""
    return [found.operator.split(".")[1] for found in _exchanges(body(code))]


def faults(code: str) -> list[str]:
    """The rules that ``code`` breaks, one sentence each."""
    lines = body(code)
    found = []
    for exchange in _exchanges(lines):
        if exchange.region is None:
            found.append(f"{exchange.operator} is not on stream {LABEL}")
            continue
        found += _readiness(lines, exchange)
        found += _memory(lines, exchange)
        if exchange.is_receive:
            found += _answers(lines, exchange)
    return found


def _exchanges(lines: list[str]) -> list[_Exchange]:
    regions = [range(i, _end(lines, i)) for i, line in enumerate(lines) if line.strip() == _STREAM]
    found = []
    for i, line in enumerate(lines):
        call = _CALL.search(line)
        if call is not None:
            names = (name.strip() for name in call[3].split(","))
            tensors = tuple(n for n in names if re.fullmatch(r"[A-Za-z_]\w*", n))
            region = next((r for r in regions if i in r), None)
            found.append(_Exchange(i, call[1], call[2], tensors, region))
    return found


def _end(lines: list[str], start: int) -> int:
    def depth(line: str) -> int:
        return len(line) - len(line.lstrip())

    inside = (i for i in range(start + 1, len(lines)) if depth(lines[i]) <= depth(lines[start]))
    return next(inside, len(lines))


def _readiness(lines: list[str], exchange: _Exchange) -> list[str]:
    assert exchange.region is not None
    start = exchange.region.start
    for line in lines[start : exchange.line]:
        wait = re.match(r"\s*(event_\w+)\.wait\(", line)
        if wait and any(before.strip().startswith(f"{wait[1]}.record") for before in lines[:start]):
            return []
    return [f"{exchange.operator} does not wait for its rows: line {exchange.line}"]


def _memory(lines: list[str], exchange: _Exchange) -> list[str]:
    assert exchange.region is not None
    text = "\n".join(lines[i] for i in exchange.region)
    return [
        f"the memory of {name} may be used again while {exchange.operator} reads it"
        for name in exchange.tensors
        if not name.startswith("full_default")  # nobody reads the constants
        and not re.search(rf"record_tagged_stream\.default\({name}, '{LABEL}'\)", text)
    ]


def _answers(lines: list[str], exchange: _Exchange) -> list[str]:
    assert exchange.region is not None
    behind = range(exchange.line + 1, exchange.region.stop)
    records = [m[1] for i in behind if (m := re.match(r"\s*(event_\w+)\.record\(", lines[i]))]
    name = rf"\b{exchange.result}\b"
    later = range(exchange.region.stop, len(lines))
    reads = [i for i in later if re.search(rf"[(\[ ]{name}[,)\]]", lines[i])]
    waits = [i for i in later if any(lines[i].strip().startswith(f"{e}.wait(") for e in records)]
    if reads and not any(wait < reads[0] for wait in waits):
        return [f"line {reads[0]} reads {exchange.result} before it has arrived"]
    return []
