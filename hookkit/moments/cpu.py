"""Moments and norms of CPU tensors in one read: by numpy, in chunks that stay in the cache.

It builds on `moments` (the row, and how rows merge). The model's own code and data have just
filled the caches, so the first call of any function costs 30 to 100 µs here: few different
functions are called, on one thread. Where numba is installed (the `fast` extra), the compiled
loops of `numba_kernels` read instead.
"""

from __future__ import annotations

import math
import sys
import threading
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hookkit.moments.moments import EMPTY, Row, merge_row, moments, working_dtype
from hookkit.moments.numba_loader import machine

CHUNK = 1 << 17
# 512 KiB of float32 stay in a core's L2 (or near it) while sums, min, max and the counts read them:
# 0.4 ns a value for all of them, against 1.3 ns over a whole tensor from memory and 5 ns for
# torch.var_mean alone, which is not vectorized on the CPU.

_ILL = 0.1
# One pass of sums loses log10(mean²/var) of fp32's 7 digits; below this ratio of variance to mean²
# the values are read again, less their mean.

_TINY = 1e-15
# Squares of differences between values of at most this size leave float32 below.

_PIECE = 8192
# OpenBLAS dots start threads above 10,000 values.

_SMALL = 1e-30
# A smaller sum of float32 squares has lost some of them.

_ONES = {kind: np.ones((_PIECE, 1), kind) for kind in (np.float32, np.float64)}

_LARGE = {np.float32: 1e17, np.float64: 1e150}
# The squares of a piece of smaller values do not overflow.

_FLAGS_LIE = sys.platform == "darwin"
# On macOS Accelerate's products set the processor's error flags at random.


class _Scratch(threading.local):
    """Work space of one thread, allocated once, so that hooks allocate nothing."""

    def __init__(self) -> None:
        both = torch.float32, torch.float64
        self.values = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in both}
        self.flags, self.others = np.empty((2, CHUNK), dtype=np.bool_)
        self.floats = np.empty(CHUNK, dtype=np.float32)
        self.row = np.empty(8)

    def room(self, n: int, dtype: torch.dtype) -> Tensor:
        """(n,) uninitialised values, valid until the next call for the same dtype."""
        if self.values[dtype].numel() < n:
            with torch.inference_mode(False):
                self.values[dtype] = torch.empty(CHUNK, dtype=dtype, device="cpu")
        return self.values[dtype][:n]


scratch = _Scratch()


def cpu_row(x: Any, eps: float) -> Row:
    """The row (without `calls`) of flat values on the CPU, read once in chunks that fit the cache.

    Sums are float32 within 8,192 values (float64 for float64 and wide integers), and Python floats
    beyond. `x`: (n,) floats without gaps, or a tensor of any dtype and stride.
    """
    n, compiled, is_array = len(x), machine.found, isinstance(x, np.ndarray)
    if n == 0:
        return EMPTY[1:]
    if compiled is not None and is_array and (row := _compiled_row(compiled, x, eps)) is not None:
        return row
    total: Row | None = None
    for start in range(0, n, CHUNK):
        chunk = x[start : start + CHUNK]
        if not is_array:
            chunk = scratch.room(len(chunk), working_dtype(x)).copy_(chunk).numpy()
        row = None if compiled is None else _compiled_row(compiled, chunk, eps)
        row = row or _array_row(chunk, eps)
        total = row if total is None else merge_row(total, row)
    assert total is not None
    return total


def _compiled_row(compiled: Any, x: Any, eps: float) -> Row | None:
    """The row of an array by numba's loops; None if they are not made for such arrays."""
    if x.dtype != np.float32:
        return None
    row = scratch.row
    try:
        compiled.row(x, eps, compiled.TINY, row)
    except TypeError:  # its memory is not aligned
        return None
    return cast(Row, tuple(row.tolist()))


def _array_row(x: Any, eps: float) -> Row:
    """The row of an array, by numpy."""
    if not _FLAGS_LIE:
        try:
            return _chunk_row(x, eps)
        except FloatingPointError:  # the user has set numpy to raise on underflow
            pass
    with np.errstate(all="ignore"):
        return _chunk_row(x, eps)


def _chunk_row(values: Any, eps: float) -> Row:
    """The same, in as little code as can be for ordinary values.

    Squares are bounded before they are taken, since `np.errstate` costs 40 µs in a cold cache.
    """
    n, dtype = len(values), values.dtype.type
    large, eps = _LARGE[dtype], _rounded(eps, dtype)
    lo, hi = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not (-large < lo and hi < large) or (lo < hi and max(-lo, hi) < _TINY):
        return _wide_row(values, eps)
    near, zero = _counts(values, lo, hi, eps)
    mean, m2 = (lo, 0.0) if lo == hi else _mean_m2(values)
    if lo < hi and not m2 >= _ILL * mean * mean * n:
        # last: `values` may be in the scratch memory that this overwrites
        near_mean = dtype(mean)
        room = scratch.room(n, torch.float32 if dtype is np.float32 else torch.float64).numpy()
        rest, m2 = _mean_m2(np.subtract(values, near_mean, out=room))
        mean = float(near_mean) + rest
    return float(n), mean, m2, lo, hi, float(near), float(zero), 0.0


@lru_cache(64)
def _rounded(eps: float, dtype: Any) -> float:
    """`eps` as values of this type are compared with it; Inf if it leaves the type."""
    with np.errstate(all="ignore"):
        return float(dtype(eps))


def _wide_row(values: Any, eps: float) -> Row:
    """The row in float64: of NaN, Inf, and values whose squares leave their type."""
    finite = values[np.isfinite(values)].astype(np.float64)
    bad = float(len(values) - len(finite))
    if not len(finite):
        return (*EMPTY[1:-1], bad)
    row = moments(torch.from_numpy(finite), eps).tolist()
    return (*row[1:-1], bad)


def _mean_m2(values: Any) -> tuple[float, float]:
    """Mean and sum of squared deviations."""
    n, (first, second) = len(values), _sums(values)
    mean = first / n
    return mean, max(second - first * mean, 0.0)


def _sums(values: Any) -> tuple[float, float]:
    """Of the values and of their squares: BLAS dots of pieces, added up as Python floats."""
    ones = _ONES[values.dtype.type]
    whole = len(values) - len(values) % _PIECE
    total, rest = 0.0, values[whole:]
    if whole:
        pieces = values[:whole].reshape(-1, 1, _PIECE)
        total = sum(np.matmul(pieces, ones).ravel().tolist())
    return total + float(np.dot(rest, ones[: len(rest), 0])), _squares(values)


def _squares(values: Any) -> float:
    """Sum of squares, in the same way."""
    whole = len(values) - len(values) % _PIECE
    total, rest = 0.0, values[whole:]
    if whole:
        pieces = values[:whole].reshape(-1, 1, _PIECE)
        total = sum(np.matmul(pieces, pieces.reshape(-1, _PIECE, 1)).ravel().tolist())
    return total + float(np.dot(rest, rest))


def _counts(values: Any, lo: float, hi: float, eps: float) -> tuple[int, int]:
    """How many of the `values` between `lo` and `hi` are near zero, and how many are zero."""
    n = len(values)
    if lo > eps or hi < -eps:
        return 0, 0
    flags, near = scratch.flags[:n], n
    if lo < -eps or hi > eps:
        np.less_equal(values, eps, out=flags)
        if lo < -eps:
            np.not_equal(flags, np.less(values, -eps, out=scratch.others[:n]), out=flags)
        near = int(np.count_nonzero(flags))
    if not near or lo > 0 or hi < 0:
        return near, 0
    return near, int(np.count_nonzero(np.equal(values, 0, out=flags)))


def norms(
    arrays: list[Any], copies: list[Any] | None = None, minus: list[Any] | None = None
) -> list[float]:
    """2-norms of flat float32 arrays, or of them less `minus`; copied into `copies` on the way."""
    nothing, compiled = [None] * len(arrays), machine.found
    found = zip(arrays, copies or nothing, minus or nothing, strict=True)
    if compiled is not None:
        return [_compiled_norm(compiled, *each) for each in found]
    with np.errstate(all="ignore"):
        return [_norm(*each) for each in found]


def _compiled_norm(compiled: Any, x: Any, copy: Any, minus: Any) -> float:
    if copy is not None:
        return math.sqrt(compiled.copied_squares(x, copy))
    if minus is not None:
        return math.sqrt(compiled.squared_distance(x, minus))
    return math.sqrt(compiled.squares(x))


def _norm(x: Any, copy: Any, minus: Any) -> float:
    total = 0.0
    for start in range(0, len(x), CHUNK):
        chunk = x if len(x) <= CHUNK else x[start : start + CHUNK]
        end = start + len(chunk)
        if copy is not None:
            copy[start:end] = chunk
        if minus is not None:
            chunk = np.subtract(chunk, minus[start:end], out=scratch.floats[: len(chunk)])
        total += float(np.dot(chunk, chunk)) if len(chunk) <= _PIECE else _squares(chunk)
    if _SMALL < total < math.inf:
        return math.sqrt(total)
    if not x.any() if minus is None else np.array_equal(x, minus):
        return 0.0
    wide = x.astype(np.float64) if minus is None else np.subtract(x, minus, dtype=np.float64)
    return float(np.linalg.norm(wide))
