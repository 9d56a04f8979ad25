"""Measure how far two tensors are apart, and bring a tensor of another layout into one's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 2**16  # elements that are converted at a time, so that they stay in the cache
_HUGE = 1e30  # larger values come from masks, and do not count for the size of a tensor

# The relative tolerance by the dtype of a value, or of the parts of a complex one; 0 for others.
# About 170 roundings in float32, 20 in half precision: what the layers of a port add up to.
_TOLERANCES = {
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-5,
    torch.float64: 1e-10,
}


class Difference(NamedTuple):
    """Holds how far `b` is from `a`.

    Attributes:
        max_abs_error: the largest `|a − b|`; infinite if only one of the two is NaN or infinite.
        rel_error: `‖a − b‖ / ‖a‖`; infinite if it is not finite, or `a` is zero and `b` is not.
        sqnr_db: `20 log10(‖a‖ / ‖a − b‖)`, in decibels; infinite if both are the same.
        cosine: of the angle between them, over elements that are finite in both; NaN if only one
            of them is zero.
        n_different: how many elements are beyond the tolerance.
    """

    max_abs_error: float
    rel_error: float
    sqnr_db: float
    cosine: float
    n_different: int


def default_rtol(*dtypes: torch.dtype) -> float:
    """Return the relative tolerance for the loosest of `dtypes`.

    >>> default_rtol(torch.float32, torch.bfloat16)
    0.05
    """
    return max(_TOLERANCES.get(dtype.to_real(), 0.0) for dtype in dtypes)


def difference(
    a: Tensor,
    b: Tensor,
    rtol: float | None = None,
    atol: float | None = None,
    size: float = 0.0,
) -> Difference:
    """Return how far `b` is from `a`, dense tensors of the same shape, in float64. NaN equals NaN.

    An element differs if `|a − b| > atol + rtol · |a|`, as for `torch.testing.assert_close` with
    `a` as the expected one.

    Args:
        a: what is expected.
        b: what is compared with it.
        rtol: relative tolerance; by default that of the looser dtype: 1e-5 for float32.
        atol: absolute tolerance; by default `rtol` times the root mean square of `a`, so that
            values near zero are measured by the size of the others.
        size: the least value of the root mean square that is used.

    Source: the signal-to-quantization-noise ratio is that of Bennett 1948, "Spectra of quantized
    signals", with `a` as the signal.

    >>> difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.0, 0.1)[:3]
    (0.5, 0.1, 20.0)
    """
    rtol = default_rtol(a.dtype, b.dtype) if rtol is None else rtol
    if atol is None:
        atol = rtol * max(size, root_mean_square(a)) if rtol else 0.0
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
    apart, norm, other, dot = sums.tolist()
    rel = math.sqrt(apart / norm) if norm else math.inf if apart else 0.0
    sqnr = -20 * math.log10(rel) if 0 < rel < math.inf else -math.inf if rel else math.inf
    length = math.sqrt(norm) * math.sqrt(other)
    cosine = dot / length if length else 1.0 if norm == other else math.nan
    return Difference(most, rel, sqnr, cosine, n_different)


def root_mean_square(t: Tensor) -> float:
    """Return the root mean square of the values that are finite and not those of a mask."""
    total, n = 0.0, 0
    for p in torch.split(t.detach().reshape(-1).cpu(), _CHUNK):
        size = p.to(torch.complex128).abs() if p.is_complex() else p.double().abs()
        size = size[size < _HUGE]
        total, n = total + float(torch.dot(size, size)), n + len(size)
    return math.sqrt(total / n) if n else 0.0


def _gap(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `|p − q|`, and `p` and `q` in 64 bits.

    Where one of them is NaN or infinite, the gap is 0 if both are the same, otherwise infinite;
    there `p` and `q` are returned as 0, so that sums and tolerances stay finite.
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
    """Return `t` detached, as an ordinary tensor: a sparse or quantized tensor is converted."""
    t = t.detach()
    if t.layout is not torch.strided:
        t = t.to_dense()
    return t.dequantize() if t.is_quantized else t.resolve_conj().resolve_neg()


def laid_out(y: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Yield `y` in the shape of `x`, in each way in which a port may lay out the same values.

    Channels may be first or last, batch and positions may be one axis, and heads an axis of their
    own. If sizes are equal by chance there are several ways, and the caller takes the nearest.

    >>> [t.shape for t in laid_out(torch.ones(6, 4), torch.ones(2, 3, 4))]
    [torch.Size([2, 3, 4])]
    """
    if x.numel() != y.numel():
        return
    if x.shape == y.shape:
        yield y
    moved = [y.movedim(1, -1), y.movedim(-1, 1)] if y.ndim > 2 else []
    if x.ndim > 2:
        flat = x.movedim(1, -1).shape  # positions of a grid in one axis, channels last
        if y.ndim < x.ndim and y.ndim > 1 and y.shape[-1] == x.shape[1]:
            moved.append(y.reshape(flat).movedim(-1, 1))
    for way in [y] * (x.shape != y.shape) + moved:
        if way.shape == x.shape:
            yield way
        elif way.ndim != x.ndim and (
            way.shape[:1] == x.shape[:1] or way.shape[-1:] == x.shape[-1:]
        ):
            yield way.reshape(x.shape)
