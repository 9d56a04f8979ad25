"""What is compared: the tensors in a module's result, and how far two of them are apart.

Builds on `nested`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookkit._core.pytree import Parts

_CHUNK = 2**16  # elements that are converted at a time: what they take stays in the cache

# The relative and absolute tolerance of `torch.testing.assert_close`, by the dtype of a value or
# of the parts of a complex one; 0 for other dtypes.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def pairs(a: Parts, b: Parts) -> list[tuple[str, Any, str, Any]]:
    """Parts with the same path; those in the same place where the structures differ."""
    there = dict(b)
    if {path for path, _ in a} != set(there) and len(a) == len(b):
        return [(*one, *other) for one, other in zip(a, b, strict=True)]
    return [(path, x, path, there[path]) for path, x in a if path in there]


class Difference(NamedTuple):
    """How far `b` is from `a`.

    Attributes:
        max_abs_error: the largest `|a − b|`; infinite where only one of the two is NaN or infinite.
        rel_error: `‖a − b‖ / ‖a‖`; infinite if it is not finite, or `a` is zero and `b` is not.
        cosine: of the angle between them, over elements that are finite in both; NaN where one
            of them is zero.
        n_different: how many elements are beyond `atol + rtol · |a|`.
    """

    max_abs_error: float
    rel_error: float
    cosine: float
    n_different: int


def difference(
    a: Tensor, b: Tensor, rtol: float | None = None, atol: float | None = None
) -> Difference:
    """How far `b` is from `a`, dense tensors of the same shape, in float64. NaN equals NaN.

    Source: the criterion is `torch.testing.assert_close`'s, with `a` as the expected one; so are
    the tolerances by default, those of the looser dtype.

    >>> difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.0, 0.1)
    Difference(max_abs_error=0.5, rel_error=0.1, cosine=0.9984603532054123, n_different=1)
    """
    usual = [_TOLERANCES.get(t.dtype.to_real(), (0.0, 0.0)) for t in (a, b)]
    rtol = max(r for r, _ in usual) if rtol is None else rtol
    atol = max(t for _, t in usual) if atol is None else atol
    # on the CPU, since some accelerators have no float64
    flat_a, flat_b = (t.detach().reshape(-1).cpu() for t in (a, b))
    sums, most, n_different = torch.zeros(4, dtype=torch.float64, device="cpu"), 0.0, 0
    for p, q in zip(torch.split(flat_a, _CHUNK), torch.split(flat_b, _CHUNK), strict=True):
        if len(p):
            gap, x, y = _gap(p, q)
            n_different += int((gap > atol + rtol * x.abs()).sum())
            most = max(most, float(gap.max()))
            dots = [torch.vdot(u, v).real for u, v in ((gap, gap), (x, x), (y, y), (x, y))]
            sums += torch.stack(dots)
    apart, size, other, dot = sums.tolist()
    rel_error = math.sqrt(apart / size) if size else math.inf if apart else 0.0
    length = math.sqrt(size) * math.sqrt(other)
    cosine = dot / length if length else 1.0 if size == other else math.nan
    return Difference(most, rel_error, cosine, n_different)


def _gap(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`|p − q|`, `p` and `q` in 64 bits.

    The gap is 0 where both are the same, and infinite where else it is not finite; there `p` and
    `q` are 0, so that sums are finite and no tolerance is infinite.
    """
    dtype = torch.promote_types(p.dtype, q.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        gap = (p.long() - q.long()).abs().double()  # float64 has not all of int64
        return gap, p.double(), q.double()
    x, y = (t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in (p, q))
    gap = (x - y).abs()
    if not gap.isfinite().all():
        gap = gap.masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0)
        gap = gap.masked_fill(~gap.isfinite(), math.inf)
        both = x.isfinite() & y.isfinite()
        x, y = x.masked_fill(~both, 0.0), y.masked_fill(~both, 0.0)
    return gap, x, y


def dense(t: Tensor) -> Tensor:
    """`t` as an ordinary tensor: a quantized or sparse one by its values."""
    t = t.detach()
    if t.layout is not torch.strided:
        t = t.to_dense()
    return t.dequantize() if t.is_quantized else t.resolve_conj().resolve_neg()
