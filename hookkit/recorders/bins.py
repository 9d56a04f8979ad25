"""Histograms of a bounded sample: signed logarithmic bins that need no range, or equal ones.

The upper bits of a float32 are a logarithmic bin number: `bits >> 22` counts two bins per octave
(edges 1, 1.5, 2, 3, 4, …), exactly and equally on every device, without a logarithm or a search.
Values below or above the bins go to an underflow bin next to zero or to an open bin at the end; NaN
and Inf are in no bin.

A bin contains its lower edge but not its upper edge, below zero too, as in `numpy.histogram`.

A sample is one slice from end to end. It draws no random numbers, so the training's generator does
not change. Its stride is coprime with the size, because a stride that divides the number of
channels would see only a few of them. Each record begins at another offset, so that in the long run
every value is sampled.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLE = 4096
"""The least number of values sampled from a larger tensor: the error of the distribution function
is below 0.021 with 95 % confidence (Dvoretzky-Kiefer-Wolfowitz, with Massart's constant, 1990)."""

_CLASSES = 1024  # how many values the upper ten bits of a float32 have: its class
_NOT_FINITE = 510  # the class of +Inf; NaN has class 510 or 511
_MINUS_INF = -8388608  # the bits of -inf as an int32; finite negative values have smaller ones


class LogBins:
    """Signed logarithmic bins from 2**low to 2**high, one or two an octave.

    Attributes:
        edges: (n + 1,) float64, from -inf to inf.
        n: the number of bins.

    >>> LogBins(0, 2, 1).edges.tolist()
    [-inf, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, inf]
    """

    def __init__(self, low: int = -12, high: int = 12, per_octave: int = 2) -> None:
        factors = (1.0, 1.5)[:per_octave]
        side = np.array([2.0**e * f for e in range(low, high) for f in factors] + [2.0**high])
        self.edges = np.concatenate([[-np.inf], -side[::-1], [0.0], side, [np.inf]])
        self.n, half = len(self.edges) - 1, _CLASSES // 2
        step = 2 // per_octave
        starts = [*range((low + 127) * 2, (high + 127) * 2 + 1, step), _NOT_FINITE]
        outwards = np.searchsorted(starts, np.arange(half), side="right")  # 0 is next to zero
        positive, negative = self.n // 2 + outwards, self.n // 2 - 1 - outwards
        positive[_NOT_FINITE:] = negative[_NOT_FINITE:] = self.n
        self._of_class = np.concatenate([positive, negative])

    def places(self, x: Any) -> Any:
        """Return the bin of each value of a float32 array; `n` for NaN and Inf."""
        bits = (x + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0
        bits -= bits < _MINUS_INF  # a negative value that is an edge belongs to the bin above it
        return self._of_class[bits.view(np.uint32) >> 22]

    def places_in_tensor(self, x: Tensor) -> Tensor:
        """Return the bin of each value of a float32 tensor, int64 of its shape, on its device."""
        bits = (x + 0).view(torch.int32)
        bits = bits - (bits < _MINUS_INF).int()
        bins = torch.from_numpy(self._of_class).to(x.device, non_blocking=True)
        return bins[(bits >> 22 & _CLASSES - 1).long()]


class RangeBins:
    """Has `n` equal bins from `low` to `high` (fastai: 40 from 0 to 10), and an open one per side.

    >>> RangeBins(0, 10, 2).edges.tolist()
    [-inf, 0.0, 5.0, 10.0, inf]
    """

    def __init__(self, low: float, high: float, n: int) -> None:
        self.edges = np.concatenate([[-np.inf], np.linspace(low, high, n + 1), [np.inf]])
        self.n = n + 2
        self._inner = self.edges[1:-1].astype(np.float32)

    def places(self, x: Any) -> Any:
        """Return the bin of each value of a float32 array; `n` for NaN and Inf."""
        return np.where(np.isfinite(x), np.searchsorted(self._inner, x, side="right"), self.n)

    def places_in_tensor(self, x: Tensor) -> Tensor:
        """Return the bin of each value of a float32 tensor, int64 of its shape, on its device."""
        inner = torch.from_numpy(self._inner).to(x.device, non_blocking=True)
        return torch.bucketize(x, inner, right=True).where(x.isfinite(), self.n)


def count(x: Any, bins: LogBins | RangeBins) -> Any:
    """Return (n,) counts of the finite values of an array, float32 or float64."""
    if x.dtype != np.float32:
        most = np.finfo(np.float32).max
        x = np.where(np.isinf(x), x, np.clip(x, -most, most)).astype(np.float32)
    return np.bincount(bins.places(x), minlength=bins.n + 1)[:-1]


def narrowed(x: Tensor) -> Tensor:
    """Return a float32 copy of a tensor; finite values that are too large are clipped."""
    if x.dtype is torch.float64:
        most = torch.finfo(torch.float32).max
        x = x.clamp(-most, most).where(x.isfinite(), x)
    return x.to(torch.float32, copy=True)


@lru_cache(4096)
def _stride(n: int) -> int:
    """Return the largest stride that is coprime with `n` and samples `SAMPLE` or more values."""
    stride = n // SAMPLE
    while math.gcd(stride, n) != 1:
        stride -= 1
    return stride


def sample_of(n: int, offset: int) -> slice:
    """Return the slice of `n` values to count: all if they are up to 4096, or at least 4096.

    If few strides are coprime with `n`, it is more: 5461 of 16384 values, all of 15360.
    """
    stride = _stride(n) if n > SAMPLE else 1
    return slice(offset % stride, n, stride)
