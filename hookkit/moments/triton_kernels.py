"""Moments on CUDA in one read: a Triton kernel, where Triton is installed (with PyTorch for CUDA).

Each of `PROGRAMS` programs reads its part of the tensor once and adds its sums to its own row of a
table, so nothing is atomic, the result does not depend on timing, and a hook is one launch. The
rows are combined for all layers at once at the step (`collapse`). Sums are float64, exact enough
for a mean 1e5 times the spread without a shift. The reference is `moments.moments`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookkit.moments.moments import N_FIELDS

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch have none
    triton = None

PROGRAMS = 128
BLOCK = 1024

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add(  # type: ignore[no-untyped-def]
        x,
        out,
        n,
        times,
        EPS: tl.constexpr,
        WIDE: tl.constexpr,
        PROGRAMS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        part = tl.program_id(0).to(tl.int64)
        some = tl.zeros([BLOCK], tl.float64)
        total, squares = some, some
        near, zero, bad = some, some, some
        least = some + float("inf")
        most = some - float("inf")
        for start in range(part * BLOCK, n, PROGRAMS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < n
            value = tl.load(x + at, mask=inside, other=0.0)
            value = value.to(tl.float64) if WIDE else value.to(tl.float32)
            size = tl.abs(value)
            finite = inside & (size < float("inf"))
            wide = tl.where(finite, value, 0.0).to(tl.float64)
            some += finite.to(tl.float64)
            total += wide
            squares += wide * wide
            least = tl.minimum(least, tl.where(finite, wide, float("inf")))
            most = tl.maximum(most, tl.where(finite, wide, -float("inf")))
            near += (finite & (size <= EPS)).to(tl.float64)
            zero += (finite & (value == 0)).to(tl.float64)
            bad += inside.to(tl.float64) - finite.to(tl.float64)
        row = out + part * 9
        tl.store(row, tl.load(row) + 1.0)
        tl.store(row + 1, tl.load(row + 1) + tl.sum(some, 0) * times)
        tl.store(row + 2, tl.load(row + 2) + tl.sum(total, 0) * times)
        tl.store(row + 3, tl.load(row + 3) + tl.sum(squares, 0) * times)
        tl.store(row + 4, tl.minimum(tl.load(row + 4), tl.min(least, 0)))
        tl.store(row + 5, tl.maximum(tl.load(row + 5), tl.max(most, 0)))
        tl.store(row + 6, tl.load(row + 6) + tl.sum(near, 0) * times)
        tl.store(row + 7, tl.load(row + 7) + tl.sum(zero, 0) * times)
        tl.store(row + 8, tl.load(row + 8) + tl.sum(bad, 0) * times)


def serves(device: torch.device) -> bool:
    """Whether the kernel is to be used on `device`."""
    return triton is not None and device.type == "cuda"


def blank(rows: int, device: Any) -> Tensor:
    """(rows, PROGRAMS, 9) float64 sums of nothing."""
    sums = torch.zeros(rows, PROGRAMS, N_FIELDS, dtype=torch.float64, device=device)
    clear(sums)
    return sums


def clear(sums: Tensor) -> None:
    """Makes `sums` those of nothing again."""
    sums.zero_()
    sums[..., 4] = math.inf
    sums[..., 5] = -math.inf


def add(x: Tensor, sums: Tensor, eps: float, times: int = 1) -> None:
    """Adds the flat tensor `x` to the (PROGRAMS, 9) `sums` of its row: one launch."""
    x = x.contiguous()
    if x.dtype is torch.bool:
        x = x.view(torch.uint8)
    wide = x.dtype in (torch.float64, torch.int32, torch.int64, torch.uint32)
    _add[(PROGRAMS,)](x, sums, x.numel(), times, eps, wide, PROGRAMS, BLOCK)


def collapse(sums: Tensor) -> Tensor:
    """(rows, 9) moments, as `moments.FIELDS`, from (rows, PROGRAMS, 9) sums."""
    total = sums.sum(1)
    n = total[:, 1]
    mean = total[:, 2] / n.clamp(min=1)
    m2 = (total[:, 3] - total[:, 2] * mean).clamp(min=0)
    lo, hi = sums[..., 4].amin(1), sums[..., 5].amax(1)
    head = [sums[:, 0, 0], n, mean, m2, lo, hi]
    return torch.cat([torch.stack(head, 1), total[:, 6:]], 1)
