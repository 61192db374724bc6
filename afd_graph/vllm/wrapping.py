"""Wrap methods of vLLM, whose source is not touched; each once, however often it is asked for."""

from __future__ import annotations

import functools
from typing import Any

MARK = "_afd_wrapped"
"""Attribute of a wrapped method."""


def wrap(owner: type, name: str, wrapper: Any) -> None:
    """Replace the method ``name`` of ``owner`` by ``wrapper(method)``, once."""
    original = getattr(owner, name)
    if not getattr(original, MARK, False):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, MARK, True)
        setattr(owner, name, wrapped)
