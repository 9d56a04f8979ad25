"""Units (channels) of one tensor: which dimension counts them, and how their values are read.

How large tensors are read on a CPU: greatest values are searched only until all units of the layer
have risen above zero in this record, since only that decides whether a unit is dead; and sizes are
those of a part of a large tensor, in each record another part, since a mean |x| over the window
needs no more. On other devices, and for classes that saturate, tensor operations read everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.moments.cpu import CHUNK, scratch
from hookkit.moments.numba_loader import machine

TWO_SIDED = ("Tanh", "Hardtanh", "Softsign")
ONE_SIDED = ("Sigmoid", "Hardsigmoid")
_FIRST = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "SyncBatchNorm", "LazyConv")
_LAST = ("Linear", "LayerNorm", "Embedding", "Bilinear", "RMSNorm", "LSTM", "GRU", "RNN")

_PART = 1 << 15
_LEAST = 16
# How many values of a large tensor have their sizes read in a record, and rows at least.

_LARGE = 1e25
# Sums of smaller values do not leave float32 (np.errstate costs 40 µs in a cold cache).


def channel_dim(kind: str, ndim: int) -> int:
    """Which dimension of a module's output counts its units, by the module's class name.

    Dimension 1 for convolutions, their norms and anything of four or more dimensions; the last
    for layers that work on features, and for what has two or three.

    >>> channel_dim("Conv2d", 4), channel_dim("ReLU", 4), channel_dim("Linear", 4)
    (1, 1, 3)
    """
    if ndim < 2:
        return 0
    if kind.startswith(_LAST) or kind.endswith(_LAST):
        return ndim - 1
    spatial = kind[-2] if kind.endswith("d") and "Conv" in kind else ""
    if spatial.isdigit() and ndim == int(spatial) + 1:
        return 0  # one image without a batch dimension
    return 1 if kind.startswith(_FIRST) or ndim >= 4 else ndim - 1


def can_saturate(kind: str) -> bool:
    """Whether modules of class `kind` have bounded outputs."""
    return kind.endswith((*TWO_SIDED, *ONE_SIDED))


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Where the units of a tensor lie, for one module class and shape; made by `layout_of`.

    Args:
        kind: the module class.
        n: how many units; 0 if there is nothing to read.
        dim: the dimension that counts them.
        saturates: whether the class has bounded outputs.
        fold: rows of the tensor that numpy reads as one, since it is fast on long rows.
        width: values in such a row; 0 if only tensor operations can read it.
        step: one row in so many has its sizes read, beginning with another one in each record.
    """

    kind: str
    n: int = 0
    dim: int = 0
    saturates: bool = False
    fold: int = 1
    width: int = 0
    step: int = 1

    def add_array(self, here: Any, values: Any, top: float, offset: int) -> None:
        """Adds flat float32 `values`, none larger than `top`, to the (4, n) table `here`."""
        tops, sums, counts, _ = here
        table = values.reshape(-1, self.width)
        if top < _LARGE:
            n_read = self._add_sizes(table, offset, sums)
        else:
            with np.errstate(all="ignore"):
                n_read = self._add_sizes(table, offset, sums)
        np.add(counts, n_read, out=counts)
        self._raise_to(tops, table)

    def _add_sizes(self, table: Any, offset: int, sums: Any) -> int:
        """Adds sums of |x| of some of the (rows, width); how many values of a unit those were."""
        start = offset % self.step
        some = table[start :: self.step]
        if machine.found is None:
            np.add(sums, self._sizes(some), out=sums)
        else:
            each = self.width // self.fold // self.n
            machine.found.unit_sizes(table, each, start, self.step, sums)
        return int(some.size // self.n)

    def _sizes(self, some: Any) -> Any:
        total, at_once = None, max(CHUNK // self.width, 1)
        for start in range(0, len(some), at_once):
            part = some[start : start + at_once]
            room = scratch.floats[: part.size].reshape(part.shape)
            found = np.add.reduce(np.abs(part, out=room), axis=0)
            total = found if total is None else total + found
        return self._by_unit(total, np.add.reduce)

    def _raise_to(self, tops: Any, table: Any) -> None:
        """Raises `tops`, the greatest values, until all are above zero or all rows are read."""
        at_once = max(_PART // self.width, 1)
        for start in range(0, len(table), at_once):
            if np.minimum.reduce(tops) > 0:
                return
            found = np.maximum.reduce(table[start : start + at_once], axis=0)
            np.maximum(tops, self._by_unit(found, np.maximum.reduce), out=tops)

    def _by_unit(self, over_rows: Any, reduce: Any) -> Any:
        """(width,) to (n,)."""
        if self.width == self.n:
            return over_rows
        shape = self.fold, self.n, self.width // self.fold // self.n
        return reduce(over_rows.reshape(shape), axis=(0, 2))

    def add_tensor(self, here: Tensor, x: Tensor) -> None:
        """Adds all of the tensor `x` to the (4, n) table `here`, on any device."""
        here[2] += x.numel() // self.n
        for part in _parts(x, self.dim):
            values = part.float()
            size = values.abs()
            torch.maximum(here[0], _reduced(values, self.dim, torch.amax), out=here[0])
            here[1] += _reduced(size, self.dim, torch.sum)
            if self.saturates:
                two_sided = self.kind.endswith(TWO_SIDED)
                full = size > 0.97 if two_sided else (values - 0.5).abs() > 0.47
                here[3] += _reduced(full, self.dim, torch.sum)


@lru_cache(4096)
def layout_of(shape: torch.Size, kind: str) -> UnitLayout:
    """Of what a module of class `kind` gave."""
    size = math.prod(shape)
    if not size or not len(shape):
        return UnitLayout(kind)
    dim, saturates = channel_dim(kind, len(shape)), can_saturate(kind)
    n, each = shape[dim], math.prod(shape[dim + 1 :])
    fold = math.gcd(size // (n * each), 1024 // (n * each) or 1)
    width = fold * n * each
    if width > CHUNK or saturates:
        return UnitLayout(kind, n, dim, saturates)
    step = -(-(size // width) // max(_PART // width, _LEAST))
    return UnitLayout(kind, n, dim, saturates, fold, width, step)


def _parts(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """`x` in parts that stay in the cache of a CPU; whole elsewhere, where calls are costly."""
    if not x.is_cpu or not dim or x.numel() <= CHUNK:
        return (x,)
    if x.is_contiguous() and dim == x.ndim - 1:
        x = x.view(-1, x.shape[-1]).view(-1, *[1] * (x.ndim - 2), x.shape[-1])
    return torch.split(x, max(CHUNK * len(x) // x.numel(), 1))


def _reduced(x: Tensor, dim: int, by: Any) -> Tensor:
    """`x` reduced to its dimension `dim`; the batch first: that is vectorized over the rest."""
    if dim and x.ndim > 2:
        x, dim = by(x, 0), dim - 1
    rest = [d for d in range(x.ndim) if d != dim]
    return by(x, rest) if rest else x
