"""How the units of a CPU tensor are read by numpy: found once for each layer and shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hookkit.moments.cpu import CHUNK, scratch
from hookkit.moments.numba_loader import machine
from hookkit.moments.units import ONE_SIDED, TWO_SIDED, channel_dim

PART = 1 << 15
LEAST = 16
"""How many values of a large tensor have their sizes read in a record, and rows at least."""


@dataclass(slots=True)
class Plan:
    """How to read the units of one layer, while it gives tensors of this shape."""

    shape: torch.Size
    kind: str
    n: int = 0
    """Units."""

    fold: int = 1
    """Rows of the tensor that are read as one: numpy likes long rows."""

    width: int = 0
    """Values in such a row; 0 if only tensor operations will do."""

    step: int = 1
    """One row in so many has its sizes read, beginning with another one at each record."""

    def by_unit(self, over_rows: Any, reduce: Any) -> Any:
        """(…, width) to (…, units)."""
        if self.width == self.n:
            return over_rows
        shape = *over_rows.shape[:-1], self.fold, self.n, self.width // self.fold // self.n
        return reduce(over_rows.reshape(shape), axis=(-3, -1))

    def add_sizes(self, table: Any, turn: int, sums: Any) -> int:
        """Adds to (units,) sums of |x| those of some of the (rows, width), others at each `turn`.

        How many values of a unit those were.
        """
        start = turn % self.step
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
        return self.by_unit(total, np.add.reduce)

    def raise_to(self, tops: Any, table: Any) -> None:
        """Raises `tops`, the greatest values, until all are above zero or all rows are read."""
        at_once = max(CHUNK // self.width, 1)
        for start in range(0, len(table), at_once):
            if np.minimum.reduce(tops) > 0:
                return
            found = np.maximum.reduce(table[start : start + at_once], axis=0)
            np.maximum(tops, self.by_unit(found, np.maximum.reduce), out=tops)


def plan_of(shape: torch.Size, kind: str) -> Plan:
    """How to read what a module of class `kind` gave."""
    size = math.prod(shape)
    if kind.endswith((*TWO_SIDED, *ONE_SIDED)) or not size or not len(shape):
        return Plan(shape, kind)
    dim = channel_dim(kind, len(shape))
    n, each = shape[dim], math.prod(shape[dim + 1 :])
    fold = math.gcd(size // (n * each), 1024 // (n * each) or 1)
    width = fold * n * each
    if width > CHUNK:
        return Plan(shape, kind)
    rows = size // width
    return Plan(shape, kind, n, fold, width, -(-rows // max(PART // width, LEAST)))
