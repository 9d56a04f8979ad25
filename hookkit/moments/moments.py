"""The numbers that sum up a tensor: exact, in one read, merged without loss.

A row is nine float64 numbers, `FIELDS`: how often the layer ran, how many finite values it gave,
their mean and their sum of squared deviations (`m2`), least and greatest, how many are near zero
and exactly zero, and how many values were not finite. Rows of different tensors, steps, layers or
ranks merge exactly (`merge`, Chan et al. 1983), so nothing is lost by summing up early.

Three ways to a row, one truth: `moments` (any device, no branch on data; the oracle of the
others), `cpu_row` (chunks that stay in the cache), and `kernels.py` (one read on CUDA).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FIELDS = ("calls", "n", "mean", "m2", "min", "max", "near", "zero", "bad")
N_FIELDS = len(FIELDS)
EMPTY = (0.0, 0.0, 0.0, 0.0, math.inf, -math.inf, 0.0, 0.0, 0.0)
"""The row of a layer that did not run; merging it changes nothing."""

Row = tuple[float, float, float, float, float, float, float, float]
"""`FIELDS` without `calls`."""

CHUNK = 1 << 17
# 512 KiB of float32 stay in a core's L2 while sum, dot, min, max and the counts read them:
# 0.45 ns a value for all of them, against 1.3 ns over a whole tensor from memory and 5.6 ns
# for torch.var_mean alone, which is not vectorized on the CPU.

_ILL = 0.1
# One pass of sums loses log10(mean²/var) of fp32's 7 digits; below this ratio we shift and redo.

_TINY = 1e-15
# Squares of differences between values of at most this size leave float32 below.

_PIECE = 8192
# OpenBLAS dots start threads above 10,000 values. Up to here its calls (1 µs, half of that the
# call) beat torch's (2.3 to 2.9 µs); in pieces of this size they take half the time of torch.dot.

_unwrapped = getattr(torch._C, "_functorch", None)
_is_cow: Any = getattr(torch._C, "_is_cow_tensor", lambda t: False)
_is_wrapped = getattr(_unwrapped, "is_functorch_wrapped_tensor", lambda t: False)


def plain(t: Tensor) -> Tensor | None:
    """`t` detached, as an ordinary strided real tensor; None if it has no values to read.

    Complex values become magnitudes; sparse tensors their explicit values; nested ones all their
    values; quantized ones are dequantized; a DTensor its local shard. None for meta and fake
    tensors and inside `torch.func` transforms, where there is nothing to look at.

    >>> plain(torch.tensor([3 + 4j]))
    tensor([5.])
    """
    common = type(t) is Tensor and t.layout is torch.strided and t.is_floating_point()
    if common and not (t.is_meta or t.is_nested or _is_wrapped(t)):
        return t.detach()
    return _odd(t.detach())


def _odd(t: Tensor) -> Tensor | None:
    if _is_wrapped(t) or t.is_meta:
        return None
    if t.is_nested:
        return plain(torch.cat([part.reshape(-1) for part in t.unbind()]))
    if hasattr(t, "to_local"):
        return plain(t.to_local())
    if t.is_quantized:
        return plain(t.dequantize())
    if t.layout is torch.sparse_coo:
        return plain(t._values() if not t.is_coalesced() else t.values())
    if t.layout is not torch.strided:
        return plain(t.to_dense() if t.is_mkldnn else t.values())
    if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
        return plain(t.as_subclass(Tensor)) if _has_storage(t) else None
    return t.abs() if t.is_complex() else t


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
    """The memory of the flat CPU tensor `x` as numpy sees it, if those are floats without gaps.

    None else, and for a lazy clone: numpy would copy all of it first, since it could write to it.
    """
    floats = x.dtype is torch.float32 or x.dtype is torch.float64
    return x.numpy() if floats and x.is_contiguous() and not _is_cow(x) else None


def working_dtype(t: Tensor) -> torch.dtype:
    """What `t` is computed in: float64 for float64 and 32/64-bit integers, else float32."""
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
        return empty_rows(1, t.device, dtype)[0].add_(torch.eye(N_FIELDS, dtype=dtype)[0].to(x))
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

    >>> x = torch.randn(100).double()
    >>> both = merge(moments(x[:30], 0.05), moments(x[30:], 0.05))
    >>> torch.allclose(both[1:], moments(x, 0.05)[1:])
    True
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


class Scratch:
    """Work space for `cpu_row`: allocated once per recorder, so that a hook allocates nothing."""

    def __init__(self) -> None:
        self.values = {torch.float32: torch.empty(0), torch.float64: torch.empty(0).double()}
        self.flags, self.others = np.empty((2, CHUNK), dtype=np.bool_)
        self.sums = {dtype: torch.empty((), dtype=dtype) for dtype in self.values}
        self.read = {dtype: total.numpy() for dtype, total in self.sums.items()}
        self.ones = {dtype: torch.ones(_PIECE, dtype=dtype).numpy() for dtype in self.values}

    def room(self, n: int, dtype: torch.dtype) -> Tensor:
        """(n,) uninitialised values, valid until the next call for the same dtype."""
        if self.values[dtype].numel() < n:
            self.values[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self.values[dtype][:n]


def cpu_row(x: Tensor, eps: float, scratch: Scratch, values: Any = None, along: Any = None) -> Row:
    """The row (without `calls`) of a flat CPU tensor, read once in chunks that fit the cache.

    fp32 within a chunk (fp64 for fp64 and wide integers), Python floats between chunks. Reads
    results through numpy's view of them: memory that is already here, no tensor read-out.

    Args:
        x: (n,) of any dtype and stride.
        values: `array_of(x)`.
        along: `Units.along`, shown each chunk of `values` too.
    """
    dtype = x.dtype if values is not None else working_dtype(x)
    n = x.numel()
    if n == 0:
        return EMPTY[1:]
    total: Row | None = None
    size = CHUNK if along is None else CHUNK // along[0] * along[0]
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite shows in the sums
        for start in range(0, n, size):
            part = x if n <= size else x[start : start + size]
            if values is None:
                part = scratch.room(part.numel(), dtype).copy_(part)
                row = _chunk(part, part.numpy(), eps, scratch)
            else:
                row = _chunk(part, values[start : start + size], eps, scratch)
                if along is not None:
                    along[1](values[start : start + size])
            total = row if total is None else merge_row(total, row)
    assert total is not None
    return total


def _chunk(x: Tensor, values: Any, eps: float, s: Scratch) -> Row:
    n, dtype = len(values), x.dtype
    mean, m2 = _mean_m2(x, values, s)
    if not math.isfinite(m2):
        return _with_nonfinite(x, eps, s)
    lo, hi = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if lo < hi and dtype is torch.float32 and max(-lo, hi) < _TINY:
        return tuple(moments(x.double(), eps)[1:].tolist())
    near, zero = _counts(values, lo, hi, eps, s)
    if m2 < _ILL * mean * mean * n:  # last: it may overwrite the room that x lies in
        near_mean = mean if dtype is torch.float64 else float(np.float32(mean))
        shifted = torch.sub(x, near_mean, out=s.room(n, dtype))
        rest, m2 = _mean_m2(shifted, shifted.numpy(), s)
        mean = near_mean + rest
    return float(n), mean, m2, lo, hi, float(near), float(zero), 0.0


def _mean_m2(x: Tensor, values: Any, s: Scratch) -> tuple[float, float]:
    """Mean and sum of squared deviations; not finite where a value or a square is not."""
    n = len(values)
    if n <= _PIECE:
        first = float(np.dot(values, s.ones[x.dtype][:n]))
    else:
        torch.sum(x, 0, out=s.sums[x.dtype])
        first = float(s.read[x.dtype])
    mean = first / n
    m2 = squares(values) - first * mean
    return mean, m2 if m2 > 0 or m2 != m2 else 0.0


def squares(values: Any) -> float:
    """The sum of squares of a contiguous float32 or float64 array; not finite if any value is not.

    In pieces so short that BLAS starts no threads for them; between pieces in float64. Squares
    may overflow: the caller silences numpy.
    """
    n = len(values)
    if n <= _PIECE:
        return float(np.dot(values, values))
    whole = n - n % _PIECE
    pieces, rest = values[:whole].reshape(-1, _PIECE), values[whole:]
    sums = np.add.reduce(_vecdot(pieces, pieces), dtype=np.float64)
    return float(sums) + float(np.dot(rest, rest))


def _rows_dot(a: Any, b: Any) -> Any:
    return np.matmul(a[:, None, :], b[:, :, None])[:, 0, 0]


_vecdot: Any = getattr(np, "vecdot", _rows_dot)  # numpy 2 has it


def _counts(values: Any, lo: float, hi: float, eps: float, s: Scratch) -> tuple[int, int]:
    """How many of the `values` between `lo` and `hi` are near zero, and how many are zero."""
    n = len(values)
    if lo > eps or hi < -eps:
        return 0, 0
    flags, near = s.flags[:n], n
    if lo < -eps or hi > eps:
        np.less_equal(values, eps, out=flags)
        if lo < -eps:
            np.not_equal(flags, np.less(values, -eps, out=s.others[:n]), out=flags)
        near = int(np.count_nonzero(flags))
    if not near or lo > 0 or hi < 0:
        return near, 0
    return near, int(np.count_nonzero(np.equal(values, 0, out=flags)))


def _with_nonfinite(x: Tensor, eps: float, s: Scratch) -> Row:
    """NaN or Inf are in `x`, or its squares overflow: the finite part, in float64."""
    finite = x[torch.isfinite(x)].double()
    bad = float(x.numel() - finite.numel())
    if finite.numel() == 0:
        return (*EMPTY[1:-1], bad)
    row = moments(finite, eps).numpy().tolist()
    return (*row[1:-1], bad)


def merge_row(a: Any, b: Any) -> Row:
    """`merge` for two rows of Python floats without `calls`."""
    n = a[0] + b[0]
    weight = b[0] / n if n else 0.0
    delta = b[1] - a[1]
    mean = a[1] + delta * weight
    m2 = a[2] + b[2] + delta * (a[0] * weight) * delta
    lo, hi = min(a[3], b[3]), max(a[4], b[4])
    return n, mean, m2, lo, hi, a[5] + b[5], a[6] + b[6], a[7] + b[7]
