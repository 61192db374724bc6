"""Variants of a stored model, each loaded as vLLM does at a start, in one process.

A start takes seconds and a load milliseconds, so what may be wrong with an entry is tried here;
a few of the variants are tried with starts as well (``test_cache.py``).
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLIPS = 200


def variants(data: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Name, content, and whether its checksum is made to fit, of every variant of an entry."""
    yield "empty", b"", False
    yield "empty, sealed", b"", True
    for parts in (0.02, 0.5, 0.98):
        yield f"truncated to {parts}", data[: int(parts * len(data))], False
        yield f"truncated to {parts}, sealed", data[: int(parts * len(data))], True
    yield "truncated by a byte", data[:-1], False
    yield "longer", data + b"\0", False
    for name, other in (("text", b"not a pickle"), ("a pickle", pickle.dumps({"a": [1, 2]}))):
        yield name, other, False
        yield f"{name}, sealed", other, True
    draw = random.Random(0)
    for place in draw.sample(range(len(data)), FLIPS):
        bit = draw.randrange(8)
        yield f"bit {bit} of byte {place}", flipped(data, place, bit), False
    inside = data.index(b"schedule_unsplit")
    yield "a bit of ours, sealed", flipped(data, inside, 1), True
    for name, old, new in rewritten(data):
        yield name, with_identity(data, old, new), True


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


def rewritten(data: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """What an entry of another version of ours, of the same length, would say of itself."""
    from afd_graph._version import __version__
    from afd_graph.vllm.artifact import source_digest

    version, source = __version__.encode(), source_digest().encode()
    yield "another version", version, b"9" * len(version)
    yield "another source", source, b"0" * len(source)


def with_identity(data: bytes, old: bytes, new: bytes) -> bytes:
    """An entry whose part of ours is whole and says ``new`` where it said ``old``."""
    from torch._dynamo.aot_compile import AOTCompileUnpickler

    _, ours = AOTCompileUnpickler({}, io.BytesIO(data)).load()["compiled_fn"]
    check = hashlib.sha256().digest_size
    body = ours[check:]
    assert data.count(ours) == body.count(old) == 1
    body = body.replace(old, new)
    return data.replace(ours, hashlib.sha256(body).digest() + body)


def load_all(model: Any, others: dict[str, str]) -> dict[str, str]:
    """Load every variant of the entry of ``model``; says for each why not, "" where it loaded.

    Args:
        model: a model that vLLM compiled and stored.
        others: files of entries that are not of this model, by name.
    """
    from afd_graph.vllm import cache_entry

    entry = cache_entry.entry_path(model.vllm_config)
    assert entry is not None
    seal = entry.with_name(entry.name + ".afd-sha256")
    whole, sealed = entry.read_bytes(), seal.read_text()
    found = {"as it was": load(model, entry)}
    for name, data, fits in variants(whole):
        entry.write_bytes(data)
        seal.write_text(hashlib.sha256(data).hexdigest() if fits else sealed)
        found[name] = load(model, entry)
    for name, other in others.items():
        for end in ("", ".afd-sha256"):
            shutil.copy(other + end, str(entry) + end)
        found[name] = load(model, entry)
    entry.write_bytes(whole)
    seal.unlink()
    found["without a checksum"] = load(model, entry)
    seal.write_text(sealed)
    return found


def load(model: Any, entry: Path) -> str:
    """Why vLLM does not load its entry of ``model``; "" if it does."""
    from vllm.compilation import decorators

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    decorators.logger.addHandler(handler)
    try:
        loaded = decorators._try_load_aot_compiled_fn(model, str(entry))
    finally:
        decorators.logger.removeHandler(handler)
    if loaded is not None:
        return ""
    (reason,) = (text.split("reason: ")[1] for text in said if "reason: " in text)
    assert reason
    return reason
