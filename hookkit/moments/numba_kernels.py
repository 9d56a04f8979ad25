"""Loops over a CPU tensor's values that numba compiles; installed with the `fast` extra.

One read for all moments, 0.15 ns a value, where numpy's passes over chunks take 0.5. Sums are
float64, so nothing overflows, and values of a mean up to 1e3 times their spread need no second
read. Whether a float32 is zero, not finite, or greater than another is decided by its bits as
integers, because such loops become vector instructions. The reference is `moments.moments`.

This file imports numba: get it from `numba_loader.machine`, which loads it when a watch or a fit
begins.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

_SIGN, _SIZE, _INF = np.int32(31), np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_LEAST, _MOST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)
_NONE, _DENORMAL = np.int32(0), np.int32(0x007FFFFF)
TINY = 1e-45
_SIZE_BITS, _INF_BITS = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_PIECE = 4096  # counts of a piece fit 32 bits, and all of it a core's first cache
_ILL = 1e-6  # below this ratio of variance to mean² the sums have lost digits

_FLOATS = "Array(float32, 1, 'C', readonly=True)"
_TABLE = "Array(float32, 2, 'C', readonly=True)"


def _compiled(signature: str) -> Any:
    """Compiles at once; kept on disk where that can be written."""
    # reassociation lets sums become vectors; NaN and Inf keep their meaning
    options: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz"}, "nogil": True}

    def compiled(f: Any) -> Any:
        try:
            return njit(signature, cache=True, **options)(f)
        except Exception:  # nowhere to keep it, or what is kept there is broken
            return njit(signature, **options)(f)

    return compiled


@_compiled(f"Tuple((float64, float64, int32, int32, int64, int64))({_FLOATS}, int32, int32)")
def _sums(x, eps, least):  # type: ignore[no-untyped-def]
    """Sums of values and squares, keys of least and greatest, how many are near zero and zero."""
    bits, n = x.view(np.int32), len(x)
    first = second = 0.0
    lo, hi = _MOST, _LEAST
    near = zero = 0
    for start in range(0, n, _PIECE):
        values, words = x[start : start + _PIECE], bits[start : start + _PIECE]
        some = none = _NONE
        for i in range(len(values)):
            value, word = np.float64(values[i]), words[i]
            first += value
            second += value * value
            size = word & _SIZE
            some += np.int32(size <= eps)
            none += np.int32(size <= least)
            key = word ^ ((word >> _SIGN) & _SIZE)
            lo, hi = min(lo, key), max(hi, key)
        near += int(some)
        zero += int(none)
    return first, second, lo, hi, near, zero


@_compiled(f"Tuple((int64, float64, int32, int32, int64))({_FLOATS}, int32)")
def _finite_sums(x, eps):  # type: ignore[no-untyped-def]
    """Of the finite values: how many, their sum, keys of least and greatest, how many near zero."""
    bits, n = x.view(np.int32), len(x)
    count, near, first = 0, 0, 0.0
    lo, hi = _MOST, _LEAST
    for i in range(n):
        word = bits[i]
        size = word & _SIZE
        if size < _INF:
            count += 1
            first += np.float64(x[i])
            near += size <= eps
            key = word ^ ((word >> _SIGN) & _SIZE)
            lo, hi = min(lo, key), max(hi, key)
    return count, first, lo, hi, near


@_compiled(f"float64({_FLOATS}, int64, float64)")
def _deviations(x, n, mean):  # type: ignore[no-untyped-def]
    """Sum of squared deviations of the `n` finite values from their mean."""
    first = second = 0.0
    for i in range(len(x)):
        apart = np.float64(x[i]) - mean
        apart = apart if abs(apart) < math.inf else 0.0
        first += apart
        second += apart * apart
    return second - first * first / n


@_compiled(f"void({_FLOATS}, float32, float32, float64[::1])")
def row(x, eps, tiny, out):  # type: ignore[no-untyped-def]
    """The row of `x` (without `calls`, as `moments.Row`) into the (8,) `out`.

    `tiny` is `TINY`: it comes in as 0 where the processor takes what is denormal for 0.
    """
    n = len(x)
    floats = np.empty(3, np.float32)
    words = floats.view(np.int32)
    floats[0], floats[2] = tiny, abs(eps)  # of -0.0 too
    least = _NONE if words[0] else _DENORMAL
    limit = max(words[2], least)
    first, second, lo, hi, near, zero = _sums(x, limit, least)
    count = n
    if not second < math.inf:
        count, first, lo, hi, near = _finite_sums(x, limit)
    words[0], words[1] = lo ^ ((lo >> _SIGN) & _SIZE), hi ^ ((hi >> _SIGN) & _SIZE)
    mean = first / max(count, 1)
    m2 = second - first * mean
    if count and (count < n or m2 < _ILL * mean * mean * n):
        m2 = _deviations(x, count, mean)
    out[0], out[1], out[2] = count, mean, max(m2, 0.0) if count else 0.0
    out[3], out[4] = (floats[0], floats[1]) if count else (math.inf, -math.inf)
    out[5], out[6], out[7] = near, zero, n - count


@_compiled(f"float64({_FLOATS})")
def squares(x):  # type: ignore[no-untyped-def]
    """Their sum."""
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@_compiled(f"float64({_FLOATS}, float32[::1])")
def copied_squares(x, copy):  # type: ignore[no-untyped-def]
    """Their sum; they are copied on the way."""
    total = 0.0
    for i in range(len(x)):
        copy[i] = x[i]
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@_compiled(f"float64({_FLOATS}, {_FLOATS})")
def squared_distance(x, y):  # type: ignore[no-untyped-def]
    """Sum of the squares of `x` less `y`."""
    total = 0.0
    for i in range(len(x)):
        apart = np.float64(x[i]) - np.float64(y[i])
        total += apart * apart
    return total


@_compiled(
    "void(Array(uint32, 2, 'C', readonly=True), uint32, int64, int64, uint32, int64[:, ::1])"
)
def count_bits(bits, shift, first, last, absent, table):  # type: ignore[no-untyped-def]
    """Adds to (k, width) counts those of (k, m) values, given as bits; as `Bins.count`.

    Logarithmic bins begin at the sizes that, shifted, are `first` to `last`. `absent` is what marks
    places without a value (an argument: a constant of another file would stay as it was compiled).
    """
    n = table.shape[1] - 4
    half = n // 2
    for i in range(len(bits)):
        counts, words = table[i], bits[i]
        for j in range(len(words)):
            word = words[j]
            size = word & _SIZE_BITS
            if size >= _INF_BITS:
                counts[n + 1 + (size == _INF_BITS) + 2 * (word == absent)] += 1
                continue
            step = min(max(np.int64(size >> shift), first - 1), last) - first + 1
            minus = word > _SIZE_BITS and size != 0
            counts[np.uint64(half - 1 - step if minus else half + step)] += 1
            counts[n] += size == 0


@_compiled(f"void({_TABLE}, int64, int64, int64, float32[::1])")
def unit_sizes(table, each, start, step, sums):  # type: ignore[no-untyped-def]
    """Adds to (units,) sums of |x| those of each `step`-th row, which has `each` values of each."""
    n = len(sums)
    for i in range(start, len(table), step):
        row = table[i]
        for begin in range(0, len(row), n * each):
            if each == 1:
                values = row[begin : begin + n]
                for unit in range(n):
                    sums[unit] += abs(values[unit])
                continue
            for unit in range(n):
                at = begin + unit * each
                total = np.float32(0)
                for value in row[at : at + each]:
                    total += abs(value)
                sums[unit] += total
