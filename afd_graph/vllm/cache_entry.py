"""A checksum over a whole entry of vLLM's ahead-of-time cache.

vLLM stores a model in a file that is mostly PyTorch's, bytecode and guards of Dynamo, around what
:mod:`artifact` made. Nobody checks the rest of it, and damaged bytecode may run. So the first step
after vLLM wrote an entry puts a checksum beside it, ``model.afd-sha256``. An entry that has none,
or another, is not loaded: vLLM says why and compiles again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from afd_graph.errors import AFDError

log = logging.getLogger("vllm.afd_graph")

_SUFFIX = ".afd-sha256"


def entry_path(vllm_config: Any) -> Path | None:
    """Where vLLM stores the model of this rank; None when it does not say."""
    folder = getattr(vllm_config.compilation_config, "local_cache_dir", None)
    if not folder:
        return None
    parallel = vllm_config.parallel_config
    return Path(folder) / f"rank_{parallel.rank}_{parallel.data_parallel_index}" / "model"


def seal(entry: Path, content: bytes) -> None:
    """Put a checksum beside ``entry``, if vLLM stored it and ``content`` is in it."""
    try:
        data = entry.read_bytes()
        if content not in data:
            return  # another process stored its own, and seals it
        temporary = entry.with_name(f"{entry.name}.{os.getpid()}{_SUFFIX}")
        temporary.write_text(hashlib.sha256(data).hexdigest())
        temporary.replace(entry.with_name(entry.name + _SUFFIX))
    except FileNotFoundError:
        return  # the cache is switched off, or could not be written, which vLLM has said
    except OSError as error:
        log.warning("AFD: the next start compiles again, no checksum of %s: %s", entry, error)


def check(entry: Path | None) -> None:
    """Refuse an entry that is not what was stored.

    Raises:
        AFDError: its checksum is missing or differs.
    """
    if entry is None:
        raise AFDError("vLLM does not say which entry of its cache it loads")
    try:
        expected = entry.with_name(entry.name + _SUFFIX).read_text()
    except FileNotFoundError:
        raise AFDError("the stored model has no checksum: storing it was not finished") from None
    if hashlib.sha256(entry.read_bytes()).hexdigest() != expected:
        raise AFDError("the stored model is damaged: the checksum of its file differs")
