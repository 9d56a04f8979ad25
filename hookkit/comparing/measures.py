"""How far two tensors are apart: in float64, some elements at a time.

Builds on torch alone. A chunk of both is converted, so that comparing takes 16 MB beside the two
tensors whatever their size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 2**20  # elements

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
    Difference(max_abs=0.5, rel=0.1, cosine=0.9984172380115483, n_different=1)
    """
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    sums = torch.zeros(4, dtype=torch.float64)  # of (a − b)², a², b², a·b
    most, n_different = 0.0, 0
    for start in range(0, len(a), _CHUNK):
        p, q = (t[start : start + _CHUNK].cpu() for t in (a, b))
        x, y = _exact(p), _exact(q)
        same = (x == y) | (x.isnan() & y.isnan())
        gap = (x - y).abs().masked_fill(same, 0.0)
        if not any(t.is_floating_point() or t.is_complex() for t in (p, q)):
            gap = (p.long() - q.long()).abs().double()  # float64 has not all of int64
            same = gap == 0
        gap = gap.masked_fill(gap.isnan(), math.inf)
        n_different += int((~same & ~(gap <= atol + rtol * x.abs())).sum())
        most = max(most, float(gap.max()))
        both = x.isfinite() & y.isfinite()
        x, y = (t.masked_fill(~both, 0.0) for t in (x, y))
        dots = (x.conj() * y).real if x.is_complex() else x * y
        sums += torch.stack([gap.square().sum(), _squares(x), _squares(y), dots.sum()])
    apart, size, other, dot = sums.tolist()
    rel = math.sqrt(apart / size) if size else math.inf if apart else 0.0
    length = math.sqrt(size) * math.sqrt(other)
    cosine = dot / length if length else 1.0 if size == other else math.nan
    return Difference(most, rel, cosine, n_different)


def _exact(t: Tensor) -> Tensor:
    """`t` in 64 bits. On the CPU, since some accelerators have no float64."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _squares(t: Tensor) -> Tensor:
    return t.abs().square().sum()
