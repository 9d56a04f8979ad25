"""The numbers that sum up a tensor: exact, in one read, merged without loss.

A row is nine float64 numbers, `FIELDS`: how often the layer ran, how many finite values it gave,
their mean and their sum of squared deviations (`m2`), least and greatest, how many are near zero
and exactly zero, and how many values were not finite. Rows of different tensors, steps, layers or
ranks merge exactly (`merge`, Chan et al. 1983), so nothing is lost by summing up early.

There are four ways to a row: `moments` here (tensor operations on any device, without a branch on
data; the reference for the others), `cpu` (numpy, in chunks that stay in the cache),
`numba_kernels` (one read, where numba is installed) and `triton_kernels` (one read on CUDA).

Why merged moments and not sums of squares: a layer's values may have a mean far from 0, and
E[x²] − E[x]² then cancels all digits; mean and `m2` of parts merge without that loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookkit.hooks.snapshot import is_transformed

FIELDS = ("calls", "n", "mean", "m2", "min", "max", "near", "zero", "bad")
N_FIELDS = len(FIELDS)
EMPTY = (0.0, 0.0, 0.0, 0.0, math.inf, -math.inf, 0.0, 0.0, 0.0)
"""The row of a layer that did not run; merging it changes nothing."""

Row = tuple[float, float, float, float, float, float, float, float]
"""`FIELDS` without `calls`."""

# Private: `torch._C._is_cow_tensor`, whether a tensor is a lazy clone (since 2.1). numpy would
# copy all of it first, since it could write to it. Without it no tensor is taken for one.
_is_cow: Any = getattr(torch._C, "_is_cow_tensor", lambda t: False)


def plain(t: Tensor) -> Tensor | None:
    """`t` detached, as an ordinary strided real tensor; None if it has no values to read.

    Complex values become magnitudes; sparse tensors their explicit values; nested ones all their
    values; quantized ones are dequantized; a DTensor its local shard. None for meta and fake
    tensors, inside `torch.func` transforms, and for dtypes that PyTorch only stores (`int4`,
    `bits8`, two floats of four bits in a byte).
    """
    common = type(t) is Tensor and t.layout is torch.strided and t.is_floating_point()
    if common and not (t.is_meta or t.is_nested or is_transformed(t)):
        return t.detach() if has_numbers(t.dtype) else None
    return _odd(t.detach())


@cache
def has_numbers(dtype: torch.dtype) -> bool:
    """Whether PyTorch can turn values of `dtype` into numbers."""
    if dtype.is_complex:
        return True
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(torch.float64)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _odd(t: Tensor) -> Tensor | None:
    if is_transformed(t) or t.is_meta:
        return None
    if t.is_nested:
        return plain(_joined(t.unbind()))
    if hasattr(t, "to_local"):
        return plain(t.to_local())
    if t.is_quantized:
        return plain(t.dequantize())
    if not has_numbers(t.dtype):
        return None
    if t.layout is torch.sparse_coo:
        return plain(t._values() if not t.is_coalesced() else t.values())
    if t.layout is not torch.strided:
        return plain(t.to_dense() if t.is_mkldnn else t.values())
    if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
        return plain(t.as_subclass(Tensor)) if _has_storage(t) else None
    return t.abs() if t.is_complex() else t


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The values of all parts, as rows of features where all have the same number of features."""
    widths = {part.shape[-1] if part.ndim else 0 for part in parts}
    width = widths.pop() if len(widths) == 1 else 0
    rows = (-1, width) if width else (-1,)
    return torch.cat([part.reshape(rows) for part in parts])


def _has_storage(t: Tensor) -> bool:
    """Whether a tensor subclass is a thin one over real memory (no wrapper, no fake tensor)."""
    try:
        return bool(t.untyped_storage().data_ptr()) or t.numel() == 0
    except (RuntimeError, NotImplementedError):
        return False


def flat(t: Tensor) -> tuple[Tensor, int]:
    """The distinct values of `t` in one dimension, in memory order, and how often each occurs.

    A view wherever memory allows (also channels-last); only gaps force a copy. Expanded
    dimensions (the gradient of `sum`) are read once and counted.
    """
    if t.is_contiguous():
        return t.view(-1), 1
    times = 1
    for dim in range(t.ndim - 1, -1, -1):
        if t.stride(dim) == 0 and t.shape[dim] > 1:
            times *= t.shape[dim]
            t = t.select(dim, 0)
    order = sorted(range(t.ndim), key=t.stride, reverse=True)
    return t.permute(order).reshape(-1), times


def array_of(x: Tensor) -> Any:
    """The memory of the flat CPU tensor `x` for numpy; None unless it is floats without gaps."""
    floats = x.dtype is torch.float32 or x.dtype is torch.float64
    return x.numpy() if floats and x.is_contiguous() and not _is_cow(x) else None


def floats_of(t: Tensor) -> Any:
    """`array_of` all of an ordinary float32 CPU tensor without gaps; None for any other.

    The hot path of most layers, in as few calls as possible: each costs µs in a cold cache.
    """
    ordinary = type(t) is Tensor or type(t) is torch.nn.Parameter
    if not ordinary or t.dtype is not torch.float32 or not t.is_cpu or is_transformed(t):
        return None
    try:
        if _is_cow(t):
            return None
        array = t.detach().numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, nested, negated, …
        return None
    return array.reshape(-1) if array.flags.c_contiguous else None


def working_dtype(t: Tensor) -> torch.dtype:
    """The dtype `t` is computed in: float64 for float64 and 32/64-bit integers, else float32."""
    wide = (torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64)
    return torch.float64 if t.dtype in wide else torch.float32


def moments(t: Tensor, eps: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """The row of one plain tensor by tensor operations alone: (9,) float64 on its device.

    No branch on data and no host read, for any device; two passes in `dtype`. This is the
    reference that the faster ways are tested against.

    >>> moments(torch.tensor([1.0, 3.0, float("nan")]), eps=0.05).tolist()
    [1.0, 2.0, 2.0, 2.0, 1.0, 3.0, 0.0, 0.0, 1.0]
    """
    x = t.reshape(-1).to(working_dtype(t))
    if x.numel() == 0:
        return empty_rows(1, t.device, dtype)[0].add_(
            torch.eye(N_FIELDS, dtype=dtype, device=t.device)[0]
        )
    finite = torch.isfinite(x)
    n = finite.sum(dtype=dtype)
    y = torch.where(finite, x, 0).to(dtype)
    mean = y.sum() / n.clamp(min=1)
    m2 = torch.where(finite, y - mean, 0).square_().sum()
    size = x.abs()
    lo = torch.where(finite, x, math.inf).amin().to(dtype)
    hi = torch.where(finite, x, -math.inf).amax().to(dtype)
    near, zero = (size <= eps).sum(dtype=dtype), (x == 0).sum(dtype=dtype)
    return torch.stack([torch.ones_like(n), n, mean, m2, lo, hi, near, zero, x.numel() - n])


def empty_rows(n: int, device: Any = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    """(n, 9) rows of layers that did not run, on `device`."""
    rows = torch.zeros(n, N_FIELDS, dtype=dtype, device=device)
    rows[:, 4] = math.inf
    rows[:, 5] = -math.inf
    return rows


def merge(a: Tensor, b: Tensor) -> Tensor:
    """The rows of the values of `a` and `b` together, (…, 9) each; exact up to rounding.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
    """
    n = a[..., 1] + b[..., 1]
    weight = b[..., 1] / n.clamp(min=1)
    delta = b[..., 2] - a[..., 2]
    mean = a[..., 2] + delta * weight
    m2 = a[..., 3] + b[..., 3] + delta * (a[..., 1] * weight) * delta
    lo, hi = torch.minimum(a[..., 4], b[..., 4]), torch.maximum(a[..., 5], b[..., 5])
    head = [a[..., 0] + b[..., 0], n, mean, m2, lo, hi]
    return torch.cat([torch.stack(head, -1), a[..., 6:] + b[..., 6:]], -1)


def statistics(rows: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
    """What a reader wants to know, from (…, 9) rows: statistic → (…) float64.

    `count` is of all values, `nonfinite` of those that are NaN or Inf; the others describe the
    finite ones: `std` as torch's (n − 1; 0.0 for one value), `near_zero` and `zero` as fractions.
    A layer that did not run is NaN throughout; one that gave no finite value has NaN moments.

    >>> statistics(moments(torch.tensor([0.0, 2.0, 4.0]), 0.05).numpy())["std"].item()
    2.0
    """
    calls, n, mean, m2, lo, hi, near, zero, bad = np.moveaxis(rows, -1, 0)
    with np.errstate(over="ignore"):  # squares may leave float64
        square = mean * mean
    some = np.where(n > 0, n, np.nan)
    mean = np.where(n > 0, mean, np.nan)
    return {
        "count": np.where(calls > 0, n + bad, np.nan),
        "mean": mean,
        "std": np.sqrt(np.maximum(m2, 0) / np.maximum(some - 1, 1)),
        "rms": np.sqrt(np.maximum(m2, 0) / some + square),
        "min": np.where(n > 0, lo, np.nan),
        "max": np.where(n > 0, hi, np.nan),
        "near_zero": near / some,
        "zero": zero / some,
        "nonfinite": np.where(calls > 0, bad, np.nan),
    }


def merge_row(a: Any, b: Any) -> Row:
    """`merge` for two rows of Python floats without `calls`."""
    n = a[0] + b[0]
    weight = b[0] / n if n else 0.0
    delta = b[1] - a[1]
    mean = a[1] + delta * weight
    m2 = a[2] + b[2] + delta * (a[0] * weight) * delta
    lo, hi = min(a[3], b[3]), max(a[4], b[4])
    return n, mean, m2, lo, hi, a[5] + b[5], a[6] + b[6], a[7] + b[7]
