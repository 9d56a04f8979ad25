"""`History`: tables by record in bounded memory, on the host.

A record is a dict of numpy tables, whose rows are layers or parameters. When the history is full,
neighbouring records merge, and each then has twice as many steps. A new record waits before it is
read, since it may be on its way from a device, and since several are read faster than one each.
All changes make a new history: an interrupt leaves the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hookkit.moments.rows import EMPTY, merge

Place = tuple[int, int, int]
"""Step, epoch and iteration."""

Tables = dict[str, Any]
"""Name → (rows, …) array: "moments" are rows that merge, others add up."""

WAIT = 8
"""Records that wait at most."""

LIMIT = 8 * 2**20  # bytes


class History:
    """The records of a training.

    Attributes:
        places: step, epoch and iteration of each record that was read; of several the first.
        spans: how many recorded steps each of them has.
        columns: their tables.
        stride: how many steps a new record will have.
        waiting: those that were not read, with what reads each.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.spans: list[int] = []
        self.columns: list[Tables] = []
        self.stride = 1
        self.waiting: tuple[tuple[Place, Callable[[], Tables]], ...] = ()

    def later(self, place: Place, read: Callable[[], Tables]) -> History:
        """With one more record, which waits: `read` gives its tables."""
        new = History()
        vars(new).update(vars(self))
        new.waiting = (*self.waiting, (place, read))
        return new

    def settled(self, finish: Callable[[Tables], Tables] = lambda tables: tables) -> History:
        """With all that wait read, in order; `finish` makes the tables that are kept of them."""
        if not self.waiting:
            return self
        new = History()
        new.places, new.spans = [*self.places], [*self.spans]
        new.columns, new.stride = [*self.columns], self.stride
        for place, read in self.waiting:
            new._add(place, finish(read()))
        return new

    def _add(self, place: Place, tables: Tables) -> None:
        n_bytes = sum(x.nbytes for x in tables.values())
        full = (len(self.columns) + 1) * n_bytes > LIMIT and len(self.columns) > 1
        if full and self.spans[-1] >= self.stride:
            self._halve()
        if self.columns and self.spans[-1] < self.stride:
            self.columns[-1] = _joined(self.columns[-1], tables)
            self.spans[-1] += 1
        else:
            self.columns.append(tables)
            self.places.append(place)
            self.spans.append(1)

    def _halve(self) -> None:
        n = len(self.columns) // 2 * 2
        pairs = zip(self.columns[:n:2], self.columns[1:n:2], strict=True)
        self.columns[:n] = [_joined(a, b) for a, b in pairs]
        self.spans[:n] = [a + b for a, b in zip(self.spans[:n:2], self.spans[1:n:2], strict=True)]
        self.places[:n] = self.places[:n:2]
        self.stride *= 2

    def table(self, name: str, rows: int) -> Any:
        """(columns, rows, …) of all records that were read."""
        return np.stack([_sized(column[name], rows, name) for column in self.columns])

    def __len__(self) -> int:
        """How many records there are; of those that wait each counts."""
        return len(self.columns) + len(self.waiting)


def _sized(x: Any, rows: int, name: str) -> Any:
    """`x` with more rows, of layers that did not run."""
    if len(x) == rows:
        return x
    new = np.zeros((rows, *x.shape[1:]), x.dtype)
    if name == "moments":
        new[:] = EMPTY
    new[: len(x)] = x
    return new


def _joined(a: Tables, b: Tables) -> Tables:
    rows = max(len(next(iter(t.values()))) for t in (a, b))
    pairs = {name: (_sized(a[name], rows, name), _sized(b[name], rows, name)) for name in a}
    return {name: merged(name, *pair) for name, pair in pairs.items()}


def merged(name: str, a: Any, b: Any) -> Any:
    """Two tables of equal shape as one."""
    if name != "moments":
        return a + b
    with np.errstate(over="ignore", invalid="ignore"):  # squares may leave float64
        return np.stack(merge(np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0)), -1)
