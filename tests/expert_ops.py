"""Operators for misbehaving experts; a module of its own because the FFN process imports it."""

import time

import torch

_library = torch.library.Library("afdtest", "DEF")
_library.define("pause(Tensor rows, float seconds) -> Tensor")
_library.define("fail(Tensor rows) -> Tensor")
_library.define("threads(Tensor rows) -> Tensor")


def _pause(rows: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return rows.clone()


def _fail(rows: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("the experts are on strike")


def _threads(rows: torch.Tensor) -> torch.Tensor:
    return torch.full_like(rows, torch.get_num_threads())


_library.impl("pause", _pause, "CPU")
_library.impl("fail", _fail, "CPU")
_library.impl("threads", _threads, "CPU")
