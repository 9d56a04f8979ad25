"""How far two tensors are apart: in float64, some elements at a time.

Builds on torch alone. A chunk of both is converted at a time: comparing takes a few MB beside the
two tensors whatever their size, and what it works on stays in the processor's cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 2**15  # elements; 256 KB in float64, seven times as fast as 8 MB

# What `torch.testing.assert_close` allows: relative and absolute tolerance by dtype; 0 for others.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


class Difference(NamedTuple):
    """How far `b` is from `a`.

    Attributes:
        max_abs: the largest `|a − b|`; infinite where only one of the two is NaN or infinite.
        rel: `‖a − b‖ / ‖a‖`; infinite where that is not finite, or `a` is zero and `b` is not.
        cosine: of the angle between them, over elements that are finite in both; NaN where one
            of them is zero.
        n_different: how many elements are beyond `atol + rtol · |a|`.
    """

    max_abs: float
    rel: float
    cosine: float
    n_different: int


def tolerances(a: torch.dtype, b: torch.dtype) -> tuple[float, float]:
    """`(rtol, atol)` of torch.testing for the looser of two dtypes.

    >>> tolerances(torch.float32, torch.bfloat16)
    (0.016, 1e-05)
    """
    both = [_TOLERANCES.get(dtype, (0.0, 0.0)) for dtype in (a, b)]
    return max(rtol for rtol, _ in both), max(atol for _, atol in both)


def dense(t: Tensor) -> Tensor:
    """`t` as an ordinary tensor: a quantized, sparse or nested one by its values."""
    t = t.detach()
    if t.is_nested:
        return t.values() if t.layout is torch.jagged else torch.nested.to_padded_tensor(t, 0.0)
    if t.layout is not torch.strided:
        t = t.to_dense()
    return t.dequantize() if t.is_quantized else t.resolve_conj().resolve_neg()


def difference(a: Tensor, b: Tensor, rtol: float, atol: float) -> Difference:
    """How far `b` is from `a`, dense tensors of the same shape. NaN equals NaN.

    Source: the criterion is `torch.testing.assert_close`'s, with `a` as the expected one.

    >>> difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.0, 0.1)
    Difference(max_abs=0.5, rel=0.1, cosine=0.9984603532054123, n_different=1)
    """
    # On the CPU, since some accelerators have no float64: one copy each, not one a chunk.
    a, b = (t.detach().reshape(-1).cpu() for t in (a, b))
    sums = torch.zeros(4, dtype=torch.float64, device="cpu")  # of (a − b)², a², b², a·b
    most, n_different = 0.0, 0
    for start in range(0, len(a), _CHUNK):
        p, q = (t[start : start + _CHUNK] for t in (a, b))
        x, y = _exact(p), _exact(q)
        gap = (x - y).abs()
        if not gap.isfinite().all():
            gap, x, y = _without_infinities(gap, x, y)
        elif not any(t.is_floating_point() or t.is_complex() for t in (p, q)):
            gap = (p.long() - q.long()).abs().double()  # float64 has not all of int64
        n_different += int((gap > atol + rtol * x.abs()).sum())
        most = max(most, float(gap.max()))
        dots = [torch.vdot(u, v).real for u, v in ((gap, gap), (x, x), (y, y), (x, y))]
        sums += torch.stack(dots)
    apart, size, other, dot = sums.tolist()
    rel = math.sqrt(apart / size) if size else math.inf if apart else 0.0
    length = math.sqrt(size) * math.sqrt(other)
    cosine = dot / length if length else 1.0 if size == other else math.nan
    return Difference(most, rel, cosine, n_different)


def _exact(t: Tensor) -> Tensor:
    """`t` in 64 bits."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _without_infinities(gap: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gap is 0 where both are the same, infinite where else it was not finite.

    `x` and `y` are 0 where one of them is not finite, for sums; also so that no tolerance is
    infinite, which would cover every gap.
    """
    same = (x == y) | (x.isnan() & y.isnan())
    gap = gap.masked_fill(same, 0.0)
    both = x.isfinite() & y.isfinite()
    gap = gap.masked_fill(~gap.isfinite(), math.inf)
    return gap, x.masked_fill(~both, 0.0), y.masked_fill(~both, 0.0)
