"""int8 rows with one fp32 scale each (``dynamic_quant``), packed for one message.

``scale = max|row| / 127``, ``int8 = round(row / scale)``. A row of zeros has scale 0 and comes
back as zeros; a row with an infinity or NaN has a scale that is not finite and comes back as NaN,
so that it is seen and not clipped.
"""

from __future__ import annotations

import torch

_LEVELS = 127.0


def packed_size(rows: int, width: int) -> int:
    """Bytes of ``rows`` quantised rows."""
    return rows * (4 + width)


def pack_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Quantise ``rows [m, width]``, any float dtype, into ``out``.

    Args:
        rows: the rows.
        out: uint8 ``[packed_size]``: the scales of all rows, then the rows.
    """
    count = rows.shape[0]
    wide = rows.to(torch.float32)
    scales = wide.abs().amax(dim=1).div_(_LEVELS)
    divisors = torch.where(scales > 0, scales, 1.0)
    levels = (wide / divisors[:, None]).round_()
    # What is not finite has no level; the scale says it all.
    levels = torch.where(levels.isfinite(), levels, 0.0).clamp_(-_LEVELS, _LEVELS)
    out[: 4 * count].view(torch.float32).copy_(scales)
    out[4 * count :].view(torch.int8).view(rows.shape).copy_(levels)


def unpack_rows(packed: torch.Tensor, rows: torch.Tensor) -> None:
    """Write what :func:`pack_rows` packed to ``rows [m, width]``, any float dtype."""
    count = rows.shape[0]
    scales = packed[: 4 * count].view(torch.float32)
    levels = packed[4 * count :].view(torch.int8).view(rows.shape)
    wide = levels.to(torch.float32).mul_(scales[:, None])
    rows.copy_(torch.where(scales.isfinite()[:, None], wide, torch.nan))
