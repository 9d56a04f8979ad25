"""Histograms that need no range in advance: signed logarithmic bins, from a bounded sample.

The idea: the upper bits of a float *are* a logarithmic bin number. `bits >> (23 - m)` of a
float32 counts 2**m bins per octave (m = 1: edges 1, 1.5, 2, 3, 4, 6, …), exactly and alike on
every device, without a logarithm or a search. Exact zeros, NaN and Inf have counts of their own;
what is below or above the bins goes to an underflow bin next to zero or to an open bin at the end.

Why a strided sample: one slice copies it, on any device, without random numbers, which belong to
the training. The stride is coprime with the size, because the stride n // k often divides the
number of channels and would take the same few of them again and again (standard deviations were
off by 50 %). Each record begins at another offset, so in the long run every value is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookkit.errors import OptionError
from hookkit.moments.numba_loader import machine

ABSENT = 0x7FA5C35A
"""Bits of the float32 that marks an unused place in a sample: a signalling NaN, which no arithmetic
makes (0x7FFFFFFF is what CUDA's makes)."""


@dataclass(frozen=True)
class Bins:
    """Where values are counted; build it with `log_bins`, `range_bins` or `edge_bins`.

    A table of counts has `n` columns for the bins and four more: exact zeros (which are also in
    their bin), NaN, Inf, and unused places of a sample.

    Args:
        edges: (n + 1,) increasing float64; bin i holds edges[i] <= x < edges[i + 1], negative
            logarithmic ones edges[i] < x <= edges[i + 1].
        octaves: for logarithmic bins (lowest exponent, highest exponent, bits per octave).
    """

    edges: npt.NDArray[np.float64]
    octaves: tuple[int, int, int] | None = None
    _on: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return Bins, (self.edges, self.octaves)

    @property
    def n(self) -> int:
        """Number of bins."""
        return len(self.edges) - 1

    @property
    def width(self) -> int:
        """Columns of a table of counts: the bins, zeros, NaN, Inf, absent."""
        return self.n + 4

    def index(self, x: Tensor) -> Tensor:
        """Column of each float32 value of `x`, int64 of its shape; `ABSENT` bits have their own."""
        bits = x.view(torch.int32)
        size = bits & _SIZE
        inner = self._log_index(x, size) if self.octaves else self._edge_index(x)
        special = torch.where(bits == ABSENT, self.n + 3, self.n + 1 + (size == _INF_BITS).long())
        inner = torch.where(size >= _INF_BITS, special, inner)
        return torch.where(size == 0, self.n, inner)

    def _log_index(self, x: Tensor, size: Tensor) -> Tensor:
        assert self.octaves
        low, high, m = self.octaves
        first, last = (low + 127) << m, (high + 127) << m
        steps = (size >> (23 - m)).clamp_(first - 1, last).sub_(first - 1).long()  # 0: under lo
        half = last - first + 2
        return torch.where(x < 0, half - 1 - steps, half + steps)

    def _edge_index(self, x: Tensor) -> Tensor:
        if x.device not in self._on:  # sync: once per device
            inner = torch.from_numpy(self.edges[1:-1].copy()).float()
            self._on[x.device] = inner.to(x.device)
        return torch.bucketize(x, self._on[x.device], right=True)

    def count(self, x: Tensor) -> Tensor:
        """Counts of each row of `x`: (rows, k) float32 → (rows, width) int64 on its device."""
        if self.octaves and x.is_cpu:
            return self._count_bits(x)
        rows, column = len(x), self.index(x)
        column += torch.arange(rows, device=x.device).unsqueeze(1) * self.width
        counts = torch.zeros(rows * self.width, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, column.view(-1), torch.ones_like(column).view(-1))
        table = counts.view(rows, self.width)
        of_zero = int(np.searchsorted(self.edges, 0.0, side="right")) - 1
        table[:, of_zero] += table[:, self.n]
        return table

    def _count_bits(self, x: Tensor) -> Tensor:
        """The same on a CPU by the bits alone: 1 ns a value, where the arithmetic takes 36 ns.

        Sign, exponent and the first bits of the fraction are a bin number already, finer than
        needed at both ends. What shares such numbers (zeros of both signs, NaN, Inf and `ABSENT`)
        is separated only where there is any.
        """
        assert self.octaves
        low, high, m = self.octaves
        first, last = (low + 127) << m, (high + 127) << m
        bits, half, n = x.contiguous().numpy().view(np.uint32), self.n // 2, self.n
        if machine.found is not None:
            counts = np.zeros((len(x), self.width), np.int64)
            machine.found.count_bits(bits, 23 - m, first, last, ABSENT, counts)
            return torch.from_numpy(counts)
        sides = _bincounts(bits >> np.uint32(23 - m), 512 << m).reshape(len(x), 2, 256 << m)
        starts = [0, *range(first, last + 1), 255 << m]
        found = np.add.reduceat(sides, starts, axis=2)
        table = np.zeros((len(x), self.width), np.int64)
        table[:, half:n], table[:, :half] = found[:, 0, :-1], found[:, 1, -2::-1]
        if sides[:, :, 0].any():
            table[:, n] = np.count_nonzero(bits & np.uint32(_SIZE) == 0, axis=1)
            minus = np.count_nonzero(bits == _MINUS_ZERO, axis=1)
            table[:, half - 1] -= minus
            table[:, half] += minus
        odd = found[:, 0, -1] + found[:, 1, -1]
        if odd.any():
            table[:, n + 3] = np.count_nonzero(bits == ABSENT, axis=1)
            odd -= table[:, n + 3]
        if odd.any():
            table[:, n + 2] = np.count_nonzero(bits & np.uint32(_SIZE) == _INF_BITS, axis=1)
            table[:, n + 1] = odd - table[:, n + 2]
        return torch.from_numpy(table)


def _bincounts(classes: npt.NDArray[np.uint32], n: int) -> npt.NDArray[np.int64]:
    """(rows, n) counts of each row's numbers below `n`; overwrites them."""
    classes += (np.arange(len(classes), dtype=np.uint32) * np.uint32(n))[:, None]
    every = torch.from_numpy(classes.view(np.int32)).view(-1)  # twice as fast as numpy's
    counts: npt.NDArray[np.int64] = torch.bincount(every, minlength=len(classes) * n).numpy()
    return counts


_SIZE = 0x7FFFFFFF
_INF_BITS = 0x7F800000
_MINUS_ZERO = 0x80000000


def log_bins(low: int = -12, high: int = 12, per_octave: int = 2) -> Bins:
    """Signed logarithmic bins from 2**low to 2**high, with open ends and two underflow bins.

    >>> log_bins(0, 2, 1).edges.tolist()
    [-inf, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, inf]
    """
    if per_octave not in (1, 2, 4, 8) or not -126 <= low < high <= 127:
        raise OptionError(
            f"log_bins({low}, {high}, {per_octave}) is outside of float32, or not in whole bits. "
            "Use exponents -126 <= low < high <= 127 and 1, 2, 4 or 8 bins per octave."
        )
    steps = np.arange(per_octave) / per_octave
    side = np.concatenate([2.0**e * (1 + steps) for e in range(low, high)] + [[2.0**high]])
    edges = np.concatenate([[-np.inf], -side[::-1], [0.0], side, [np.inf]])
    return Bins(edges, (low, high, per_octave.bit_length() - 1))


def edge_bins(edges: Sequence[float] | npt.NDArray[np.float64]) -> Bins:
    """Bins between the given edges, and two open ones beside them unless the edges are infinite.

    >>> edge_bins([0, 5, 10]).edges.tolist()
    [-inf, 0.0, 5.0, 10.0, inf]
    """
    inner = np.asarray(edges, dtype=np.float64)
    if inner.ndim != 1 or len(inner) < 2 or not (np.diff(inner) > 0).all():
        raise OptionError(
            f"bins={edges!r} was given. Bin edges are at least two increasing numbers."
        )
    ends = [[-np.inf]] if inner[0] > -np.inf else [], [[np.inf]] if inner[-1] < np.inf else []
    return Bins(np.concatenate([*ends[0], inner, *ends[1]]))


def range_bins(low: float, high: float, n: int = 40) -> Bins:
    """`n` equal bins from `low` to `high` (fastai: 40 from 0 to 10), open ones beside them."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high and n > 0):
        raise OptionError(
            f"range_bins({low}, {high}, {n}): the range is empty or not finite. Give finite low < "
            f"high, and at least one bin."
        )
    return edge_bins(np.linspace(low, high, n + 1))


@lru_cache(4096)
def coprime_stride(n: int, k: int) -> int:
    """The largest stride that takes at least `k` of `n` values and shares no factor with `n`."""
    stride = max(n // max(k, 1), 1)
    while math.gcd(stride, n) != 1:
        stride -= 1
    return stride


def sample_of(n: int, k: int, offset: int) -> slice:
    """Which `k` of `n` values to take from the one at `offset` on; all if there are fewer."""
    if n <= k:
        return slice(0, n, 1)
    stride = coprime_stride(n, k)
    start = offset % stride
    return slice(start, start + stride * (k - 1) + 1, stride)


def sample_error(k: int) -> float:
    """Bound on the error of a sampled distribution function, with 95 % confidence.

    Source: Dvoretzky-Kiefer-Wolfowitz with Massart's constant (1990), sqrt(ln(2/alpha) / 2k); it
    is for random samples, and a bound on what a strided sample of unordered values shows.

    >>> round(sample_error(4096), 4)
    0.0212
    """
    return math.sqrt(math.log(2 / 0.05) / (2 * k)) if k else math.inf
