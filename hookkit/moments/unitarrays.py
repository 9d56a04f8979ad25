"""Units judged on a CPU, by numpy: there a record's hundred operations on small tables cost most.

The tables are those of `Units`, seen as arrays; `Units` itself is what this is tested against. It
reads less: a unit that has risen above zero is not dead in this half of the window, so the layer is
searched only while one of its units has not; and sizes are those of a part of a large tensor, at
each record another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.moments.sweeps import CHUNK, scratch
from hookkit.moments.units import ONE_SIDED, TAU, TWO_SIDED, Units, channel_dim

PART = 1 << 15
LEAST = 16
"""How many values of a large tensor have their sizes read in a record, and rows at least."""

_LARGE = 1e25
# Sums of smaller values do not leave float32 (np.errstate costs 40 µs in a cold cache).


@dataclass(slots=True)
class _Plan:
    """How to read the units of one layer, while it gives tensors of this shape."""

    shape: torch.Size
    kind: str
    n: int = 0
    fold: int = 1
    """Rows of the tensor that are read as one: numpy likes long rows."""

    width: int = 0
    """Values in such a row; 0 if this way will not do."""

    step: int = 1
    """One row in so many has its sizes read, beginning with another one at each record."""

    here: Any = None
    """The rows of the layer's part of the table: greatest values, sums and how many values."""

    def sum(self, over_rows: Any) -> Any:
        """(width,) to (units,)."""
        if self.width == self.n:
            return over_rows
        return np.add.reduce(over_rows.reshape(self.fold, self.n, -1), axis=(0, 2))

    def top(self, over_rows: Any) -> Any:
        """Likewise of greatest values."""
        if self.width == self.n:
            return over_rows
        return np.maximum.reduce(over_rows.reshape(self.fold, self.n, -1), axis=(0, 2))


def _plan(shape: torch.Size, kind: str) -> _Plan:
    size = math.prod(shape)
    if kind.endswith((*TWO_SIDED, *ONE_SIDED)) or not size or not len(shape):
        return _Plan(shape, kind)
    dim = channel_dim(kind, len(shape))
    n, each = shape[dim], math.prod(shape[dim + 1 :])
    fold = math.gcd(size // (n * each), 1024 // (n * each) or 1)
    width = fold * n * each
    if width > CHUNK:
        return _Plan(shape, kind)
    rows = size // width
    return _Plan(shape, kind, n, fold, width, -(-rows // max(PART // width, LEAST)))


class UnitsByArrays(Units):
    """`Units` of a CPU."""

    def __init__(self, window: int) -> None:
        super().__init__(window, torch.device("cpu"))
        self._plans: dict[int, _Plan] = {}
        self._moved()

    def _moved(self) -> None:
        self._arrays, self._kept = self.live.numpy(), self.kept.numpy()
        self._older, self._newer = self.older.numpy(), self.newer.numpy()
        self._row_of, self._bounded = self.row_of.numpy(), self.bounded.numpy()
        self._risen: Any = ()  # by row: have all units risen in `newer`?
        self._plans.clear()

    def take_array(self, row: int, values: Any, x: Tensor, kind: str, top: float) -> bool:
        """`take` for `x`, whose flat float32 values are an array, none larger than `top`.

        Returns: whether it did; else only `take` will do.
        """
        plan = self._plans.get(row)
        if plan is None or plan.shape != x.shape or plan.kind != kind:
            plan = self._planned(row, x.shape, kind)
        if not plan.width or values.dtype != np.float32 or not x.is_contiguous():
            return False
        tops, sums, counts = plan.here
        table = values.reshape(-1, plan.width)
        some = table[self.turn % plan.step :: plan.step]
        if top < _LARGE:
            np.add(sums, _sizes(some, plan), out=sums)
        else:
            with np.errstate(all="ignore"):
                np.add(sums, _sizes(some, plan), out=sums)
        np.add(counts, some.size // plan.n, out=counts)
        if row >= len(self._risen) or not self._risen[row]:
            _rise(tops, table, plan)
        return True

    def _planned(self, row: int, shape: torch.Size, kind: str) -> _Plan:
        plan = _plan(shape, kind)
        if plan.width:
            start = self._place(row, plan.n, False)  # it may move the tables
            plan.here = tuple(self._arrays[:3, start : start + plan.n])
        self._plans[row] = plan
        return plan

    def drop(self) -> None:
        """Forget the batch at hand."""
        _wipe(self._arrays)

    def fold(self) -> None:
        """Keep the batch at hand for the step it belongs to."""
        _add(self._kept, self._arrays)
        _wipe(self._arrays)

    def forget(self) -> None:
        """Forget everything since the last commit."""
        _wipe(self._arrays)
        _wipe(self._kept)

    def commit(self, column: int, into: bool, rows: int, most: int) -> None:
        """Close a record: (rows, 5) shares go into the ring."""
        with np.errstate(all="ignore"):
            self.fold()
            _add(self._newer, self._kept)
            shares = self._shares(rows)
        self.turn += 1
        self.ring.put(column, torch.from_numpy(shares), into, most)
        _wipe(self._kept)
        if self.turn % max(self.window // 2, 1) == 0:
            self.older, self.newer = self.newer, self.older
            self._older, self._newer = self._newer, self._older
            _wipe(self._newer)
            self._risen = ()

    def _shares(self, rows: int) -> Any:
        """`_judge`, by numpy."""
        seen = self._older + self._newer
        top = np.maximum(self._older[0], self._newer[0])
        place = np.minimum(self._row_of, rows)
        n = np.maximum(np.bincount(place, minlength=rows + 1), 1)
        self._risen = np.bincount(place, ~(self._newer[0] > 0), rows + 1) == 0
        size = seen[1] / np.maximum(seen[2], 1)
        mean = (np.bincount(place, size, rows + 1) / n)[place]
        ever, ran = seen[2] > 0, self._kept[2] > 0
        flags = (
            (top <= 0) & ever,
            (size <= np.float32(TAU) * mean) & ever,
            seen[3] > 0.5 * seen[2],
            ran,
            ran & self._bounded,
        )
        table = np.stack([np.bincount(place, flag, rows + 1) for flag in flags], 1)
        table = np.where(table[:, 3:4] > 0, table / n[:, None], 0.0)
        return table[:rows].astype(np.float32)

    def __getstate__(self) -> dict[str, Any]:
        views = ("_arrays", "_kept", "_older", "_newer", "_row_of", "_bounded", "_risen")
        return {**super().__getstate__(), **dict.fromkeys(views), "_plans": {}}


def _sizes(some: Any, plan: _Plan) -> Any:
    """(units,) sums of |x| over these rows."""
    total, at_once = None, max(CHUNK // plan.width, 1)
    for start in range(0, len(some), at_once):
        part = some[start : start + at_once]
        room = scratch.floats[: part.size].reshape(part.shape)
        found = np.add.reduce(np.abs(part, out=room), axis=0)
        total = found if total is None else total + found
    return plan.sum(total)


def _rise(tops: Any, table: Any, plan: _Plan) -> None:
    """Raises `tops`, the units' greatest values, until all are above zero or all rows are read."""
    at_once = max(CHUNK // plan.width, 1)
    for start in range(0, len(table), at_once):
        if np.minimum.reduce(tops) > 0:
            return
        found = plan.top(np.maximum.reduce(table[start : start + at_once], axis=0))
        np.maximum(tops, found, out=tops)


def _add(a: Any, b: Any) -> None:
    """`_join`, by numpy."""
    np.maximum(a[0], b[0], out=a[0])
    a[1:] += b[1:]


def _wipe(table: Any) -> None:
    table[1:] = 0
    table[0] = -math.inf
