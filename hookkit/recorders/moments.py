"""The nine numbers that describe a tensor: exact, computed in one read, merged without loss.

A row has the nine `FIELDS`: number of calls, number of finite values, their mean, their sum of
squared deviations (`m2`), minimum and maximum, how many are near zero and exactly zero, and the
number of non-finite values. Mean and `m2` of parts merge exactly (Chan et al. 1983); sums of
squares would lose all digits if the mean is far from 0.

Four functions compute a row: `array_row` by numpy on a CPU; `SmallArrays` by numpy for many small
arrays at once; `triton_rows` on CUDA; `moments` by tensor operations on other devices. `moments` is
the reference for the others.
"""

from __future__ import annotations

import math
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookkit._core.devices import widest_float
from hookkit.hooks.values import is_transforming

FIELDS = ("calls", "n", "mean", "m2", "min", "max", "near", "zero", "bad")
EMPTY = (0.0, 0.0, 0.0, 0.0, math.inf, -math.inf, 0.0, 0.0, 0.0)
"""The row of a layer that did not run; merging it changes nothing."""

CHUNK = 1 << 16  # so many values stay in a core's cache while they are read several times
_BLOCK = 1 << 12  # so many values are summed in float32 before the sums are added in float64
_WIDE = frozenset((torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64))


@cache
def has_numbers(dtype: torch.dtype) -> bool:
    """Return whether PyTorch can turn values of `dtype` into numbers; not `int4`, `bits8`, …"""
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(torch.complex128)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def plain(t: Tensor) -> Tensor | None:
    """Return `t` detached, as an ordinary strided real tensor; None if its values cannot be read.

    Complex values become magnitudes, and a DTensor its local shard. Return None for sparse, nested,
    quantized, meta and fake tensors, inside `torch.func` transforms, and for dtypes of no numbers.
    """
    t = t.detach()
    if type(t) is not Tensor:
        if hasattr(t, "to_local"):
            t = t.to_local()
        elif not _has_storage(t):
            return None
        t = t.as_subclass(Tensor)
    if t.layout is not torch.strided or t.is_nested or t.is_meta or t.is_quantized:
        return None
    if is_transforming() or not has_numbers(t.dtype):
        return None
    if not t.is_complex():
        return t.resolve_neg()
    # the magnitude of two half-precision parts may overflow in half precision, and torch 2.14 has
    # no `abs` for bcomplex32
    return (t.to(torch.complex64) if t.dtype.itemsize < 8 else t).abs()


def _has_storage(t: Tensor) -> bool:
    """Return whether a tensor subclass has real memory of its own: no wrapper, no fake tensor."""
    try:
        return bool(t.untyped_storage().data_ptr()) or t.numel() == 0
    except (RuntimeError, NotImplementedError):
        return False


def flat(t: Tensor) -> Tensor:
    """Return the values of a plain tensor in memory order, as a view if the memory is dense."""
    if not t.is_contiguous():
        t = t.permute(sorted(range(t.ndim), key=t.stride, reverse=True))
    return t.reshape(-1)


def to_widest_float(t: Tensor) -> Tensor:
    """Return `t` as float64 if it is float64 or has integers of 32 bits or more, else float32."""
    return t.to(torch.float64 if t.dtype in _WIDE else torch.float32)


def norm(t: Tensor) -> Tensor:
    """Return the 2-norm of a plain tensor of floats, in its dtype or, if that has 16 bits or less,
    in float32.
    """
    wide = t.dtype if t.itemsize > 2 else torch.float32
    # `dtype=` avoids a float32 copy, which may not fit on the device; float8 has no arithmetic
    result: Tensor = torch.linalg.vector_norm(t.to(wide) if t.itemsize < 2 else t, dtype=wide)
    return result


def moments(x: Tensor, eps: float) -> Tensor:
    """Return the row of a flat tensor, (9,) in its device's widest float, without a device sync.

    >>> moments(torch.tensor([1.0, 3.0, float("nan")]), eps=0.05).tolist()
    [1.0, 2.0, 2.0, 2.0, 1.0, 3.0, 0.0, 0.0, 1.0]
    """
    wide = widest_float(x.device)
    if not x.numel():
        return torch.tensor([1.0, *EMPTY[1:]], dtype=wide, device=x.device)
    finite = x.isfinite()
    n, y = finite.sum(dtype=wide), x.where(finite, 0).to(wide)
    mean = y.sum() / n.clamp(min=1)
    m2 = (y - mean).where(finite, 0).square_().sum()
    low = x.where(finite, math.inf).amin().to(wide)
    high = x.where(finite, -math.inf).amax().to(wide)
    near, zero = (x.abs() <= eps).sum(dtype=wide), (x == 0).sum(dtype=wide)
    return torch.stack([torch.ones_like(n), n, mean, m2, low, high, near, zero, x.numel() - n])


_ONES = {kind: np.ones(_BLOCK // 4, kind) for kind in ("f", "d")}
_LARGE = {"f": 1e16, "d": 1e150}  # squares of larger values may overflow
_SMALL = 1e-12  # squares of smaller float32 values, or of their deviations, may underflow


def dot(a: Any, b: Any) -> float:
    """Return the dot product: float32 sums over blocks, added in float64.

    A single float32 sum rounds many equal values (a mask, spikes, saturated units) in the same
    direction: its error was 1.5e-5 for 65,536 equal values, and is 1e-6 in blocks.
    """
    if len(a) <= _BLOCK:
        return float(a.dot(b))
    n = len(a) // _BLOCK * _BLOCK
    blocks = a[:n].reshape(-1, 1, _BLOCK) @ b[:n].reshape(-1, _BLOCK, 1)
    return float(blocks.sum(dtype=np.float64)) + float(a[n:].dot(b[n:]))


def _total(a: Any) -> float:
    """Return the sum, by short blocks: `dot` with ones would read twice as much memory."""
    ones = _ONES[a.dtype.char]
    n = len(a) // len(ones) * len(ones)
    blocks = a[:n].reshape(-1, len(ones)) @ ones
    return float(blocks.sum(dtype=np.float64)) + float(a[n:].dot(ones[: len(a) - n]))


def array_row(x: Any, eps: float) -> tuple[float, ...]:
    """Return the row of a flat float32 or float64 array, in chunks that stay in the cache."""
    rows = []
    near_zero, large = x.dtype.type(eps), _LARGE[x.dtype.char]
    for start in range(0, len(x), CHUNK):
        part = x[start : start + CHUNK]
        n, low, high = len(part), float(part.min()), float(part.max())
        if not (-large < low and high < large):  # NaN, Inf, or squares that overflow
            rows.append(tuple(moments(torch.from_numpy(part), eps).tolist()))
            continue
        if 0 < max(-low, high) < _SMALL:
            part = part.astype(np.float64)
        mean = _total(part) / n
        m2 = dot(part, part) - n * mean * mean
        if m2 < 0.1 * n * mean * mean:  # the difference has lost digits: subtract the mean first
            y = part - part.dtype.type(mean)
            rest = _total(y) / n
            mean, m2 = float(part.dtype.type(mean)) + rest, dot(y, y) - n * rest * rest
        near = np.count_nonzero(np.abs(part) <= near_zero)
        zero = np.count_nonzero(part == 0) if near else 0  # counting bools is faster than floats
        row = 1.0, float(n), mean, max(m2, 0.0), low, high, float(near), float(zero), 0.0
        rows.append(row)
    return 1.0, *(reduce(merge, rows) if rows else EMPTY)[1:]


SMALL = 1024
"""The largest number of values of a small array."""

_CAPACITY = 8 * SMALL  # in values; larger temporary arrays in `_compute` are slow to allocate


class SmallArrays:
    """Collects copies of small float32 arrays, and computes their rows together.

    A row takes a dozen calls of numpy, however small the array is. Here many arrays share them.

    Args:
        eps: a value is near zero if its absolute value is at most this.
        bins: the bins of histograms; None counts none.
    """

    def __init__(self, eps: float, bins: Any = None) -> None:
        self._eps, self._bins = eps, bins
        self._values: Any = np.empty(_CAPACITY, np.float32)
        self._ends = [0]  # 0, then the end of each array in `_values`
        self._rows: list[Any] | None = None  # computed at the first `read`
        self._counts: Any = None

    def add(self, x: Any) -> int | None:
        """Copy an array of any shape; return its number, or None if there is no room for it."""
        ends = self._ends
        start = ends[-1]
        end = start + x.size
        if end > _CAPACITY or self._rows is not None:
            return None
        self._values[start:end] = x.reshape(-1)
        ends.append(end)  # last: one operation, which Ctrl-C cannot interrupt
        return len(ends) - 2

    def read(self, number: int) -> tuple[Any, Any]:
        """Return the row of an array, and its counts in the bins."""
        if self._rows is None:
            with np.errstate(all="ignore"):
                self._compute()
        assert self._rows is not None
        return self._rows[number], None if self._bins is None else self._counts[number]

    def _compute(self) -> None:
        ends = np.array(self._ends)
        starts, sizes = ends[:-1], np.diff(ends)
        x, n = self._values[: ends[-1]], len(starts)
        of = np.arange(n).repeat(sizes)  # for each value, the number of its array
        table = np.zeros((9, n))
        _, _, mean, m2, low, high, near, zero, _ = table
        table[0], table[1] = 1, sizes
        np.minimum.reduceat(x, starts, out=low)
        np.maximum.reduceat(x, starts, out=high)
        wide = x.astype(np.float64)
        np.divide(np.add.reduceat(wide, starts), sizes, out=mean)
        wide -= mean[of]
        np.add.reduceat(wide * wide, starts, out=m2)
        near[:] = np.bincount(of[np.abs(x) <= x.dtype.type(self._eps)], minlength=n)
        zero[:] = np.bincount(of[x == 0], minlength=n)
        finite, rows = np.isfinite(mean), table.T.tolist()
        for i in () if finite.all() else np.flatnonzero(~finite):
            part = x[starts[i] : starts[i] + sizes[i]]
            rows[i] = moments(torch.from_numpy(part), self._eps).tolist()
        if self._bins is not None:
            width = self._bins.n + 1  # one more for NaN and Inf
            counts = np.bincount(self._bins.places(x) + of * width, minlength=n * width)
            self._counts = counts.reshape(n, width)[:, :-1]
        self._rows, self._values = rows, None


def merge(a: Any, b: Any) -> Any:
    """Return the row of all values that rows `a` and `b` describe: nine numbers or nine tensors.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.

    >>> merge((1, 1, 2.0, 0.0, 2.0, 2.0, 0, 0, 0), (1, 1, 4.0, 0.0, 4.0, 4.0, 0, 0, 0))[:6]
    (2, 2, 3.0, 2.0, 2.0, 4.0)
    """
    n = a[1] + b[1]
    share, apart = b[1] / (n + (n == 0)), b[2] - a[2]
    mean, m2 = a[2] + apart * share, a[3] + b[3] + apart * (a[1] * share) * apart
    least, most = (torch.minimum, torch.maximum) if isinstance(n, Tensor) else (min, max)
    low, high = least(a[4], b[4]), most(a[5], b[5])
    return a[0] + b[0], n, mean, m2, low, high, a[6] + b[6], a[7] + b[7], a[8] + b[8]


def statistics(rows: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
    """Return the statistics of (…, 9) rows: name → (…) float64.

    `count` counts all values, `nonfinite` those that are NaN or Inf. The others describe the finite
    values: `std` is torch's (n − 1; 0.0 for one value); `near_zero` and `zero` are fractions. All
    are NaN if the layer did not run; if it had no finite value, all but the two counts are.

    >>> statistics(moments(torch.tensor([0.0, 2.0, 4.0]), 0.05).numpy())["std"].item()
    2.0
    """
    calls, n, mean, m2, low, high, near, zero, bad = np.moveaxis(rows, -1, 0)
    some = np.where(n > 0, n, np.nan)
    with np.errstate(all="ignore"):  # squares may leave float64
        rms = np.sqrt(np.maximum(m2, 0) / some + mean * mean)
        std = np.sqrt(np.maximum(m2, 0) / np.maximum(some - 1, 1))
    return {
        "count": np.where(calls > 0, n + bad, np.nan),
        "mean": np.where(n > 0, mean, np.nan),
        "std": std,
        "rms": rms,
        "min": np.where(n > 0, low, np.nan),
        "max": np.where(n > 0, high, np.nan),
        "near_zero": near / some,
        "zero": zero / some,
        "nonfinite": np.where(calls > 0, bad, np.nan),
    }
