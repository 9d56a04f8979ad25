"""Units judged on a CPU, by numpy: there a record's hundred operations on small tables cost most.

The tables are those of `Units`, seen as arrays; `Units` itself is what this is tested against. It
reads less: a unit that has risen above zero is not dead in this half of the window, so the layer is
searched only while one of its units has not; and sizes are those of a part of a large tensor, at
each record another one. Records wait, and are judged many at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.moments.sweeps import scratch
from hookkit.moments.unitplans import Plan, plan_of
from hookkit.moments.units import TAU, Units

MOST_LATE = 32
LATE_VALUES = 1 << 18
"""Most records that wait, and most values that wait with them (1 MiB)."""

_LARGE = 1e25
# Sums of smaller values do not leave float32 (np.errstate costs 40 µs in a cold cache).


@dataclass(slots=True)
class _Closed:
    """A record that is not judged yet; its table is in `_late`."""

    column: int
    into: bool
    most: int


class UnitsByArrays(Units):
    """`Units` of a CPU.

    Attributes:
        late: records that wait for others before they are judged.
    """

    def __init__(self, window: int) -> None:
        super().__init__(window, torch.device("cpu"))
        self.late: list[_Closed] = []
        self._late: Any = np.empty((0, 4, 0), np.float32)
        self._plans: dict[int, Plan] = {}
        self._rows, self._folded = 0, False
        self._moved()

    @classmethod
    def of(cls, units: Units) -> UnitsByArrays:
        """The same on the CPU; for a pickle, since the tables are not copied."""
        new = cls(units.window)
        new.__setstate__({**new.__getstate__(), **units.__getstate__()})
        return new

    def _moved(self) -> None:
        self._arrays, self._kept = self.live.numpy(), self.kept.numpy()
        self._older, self._newer = self.older.numpy(), self.newer.numpy()
        self._row_of, self._bounded = self.row_of.numpy(), self.bounded.numpy()
        n, late, waiting = self.live.shape[1], self._late, len(self.late)
        slots = max(min(MOST_LATE, LATE_VALUES // (4 * n + 1)), waiting + 1)
        self._late = np.zeros((slots, 4, n), np.float32)
        self._late[:, 0] = -math.inf
        if waiting:  # then nobody has left, and others have only come
            self._late[:waiting, :, : late.shape[2]] = late[:waiting]
        self._risen: Any = ()  # by row: have all units risen in `newer`?
        self._stretched: Any = None
        self._plans.clear()

    # --- the batch at hand

    def plan(self, row: int, shape: torch.Size, kind: str) -> Plan | None:
        """How to read what `row` gives; None if it has to be `planned` first."""
        plan = self._plans.get(row)
        return None if plan is None or plan.shape != shape or plan.kind != kind else plan

    def planned(self, row: int, shape: torch.Size, kind: str) -> Plan:
        """How to read `row` from now on. If `row` was here before, nothing may wait."""
        plan = plan_of(shape, kind)
        if plan.width:
            self._place(row, plan.n, False)
        self._plans[row] = plan
        return plan

    def _leave(self, row: int) -> None:
        self.flush()
        super()._leave(row)

    def take_array(self, row: int, values: Any, plan: Plan, top: float) -> None:
        """Add flat float32 `values`, none larger than `top`."""
        start, n = self.places[row]
        tops, sums, counts = self._arrays[:3, start : start + n]
        table = values.reshape(-1, plan.width)
        if top < _LARGE:
            some = plan.add_sizes(table, self.turn, sums)
        else:
            with np.errstate(all="ignore"):
                some = plan.add_sizes(table, self.turn, sums)
        np.add(counts, some, out=counts)
        if row >= len(self._risen) or not self._risen[row]:
            plan.raise_to(tops, table)

    def drop(self) -> None:
        """Forget the batch at hand."""
        _wipe(self._arrays)

    def fold(self) -> None:
        """Keep the batch at hand for the step it belongs to."""
        self._folded = True
        _add(self._kept, self._arrays)
        _wipe(self._arrays)

    def forget(self) -> None:
        """Forget everything since the last commit."""
        _wipe(self._arrays)
        if self._folded:
            _wipe(self._kept)
            self._folded = False

    # --- records

    @property
    def full(self) -> bool:
        """Whether the records that wait have to be judged before there is another."""
        return len(self.late) >= len(self._late) or self.turn % self._half == 0

    @property
    def _half(self) -> int:
        return max(self.window // 2, 1)

    def commit(self, column: int, into: bool, rows: int, most: int) -> None:
        """Close a record: it waits for `flush`, and then (rows, 5) shares go into the ring."""
        if self.full:
            self.flush()
        table = self._late[len(self.late)]
        table[:] = self._arrays
        if self._folded:
            with np.errstate(all="ignore"):
                _add(table, self._kept)
        self.late.append(_Closed(column, into, most))
        self._rows, self.turn = rows, self.turn + 1
        self.forget()

    def take_late(self, row: int, slots: list[int], table: Any, plan: Plan) -> None:
        """Add the values that a small layer gave in the waiting records `slots`, (slots, n)."""
        parts = table.reshape(len(slots), -1, plan.width)
        room = scratch.sizes[: table.size].reshape(parts.shape)
        start, n = self.places[row]
        here = slice(start, start + n)
        with np.errstate(all="ignore"):
            sizes = plan.by_unit(np.add.reduce(np.abs(parts, out=room), axis=1), np.add.reduce)
            tops = plan.by_unit(np.maximum.reduce(parts, axis=1), np.maximum.reduce)
            self._late[slots, 0, here] = np.maximum(self._late[slots, 0, here], tops)
            self._late[slots, 1, here] += sizes
        self._late[slots, 2, here] += table.shape[1] // n

    def flush(self) -> None:
        """Judges the records that wait."""
        late = self.late
        if not late:
            return
        with np.errstate(all="ignore"):
            table, newer = self._judged(self._late[: len(late)])
        shares = torch.from_numpy(table)
        if any(record.into for record in late):
            for record, share in zip(late, shares, strict=True):
                self.ring.put(record.column, share, record.into, record.most)
        else:
            self.ring.put_all(late[0].column, shares, late[-1].most)
        self.late, self._newer[:] = [], newer
        if self.turn % self._half == 0:
            self.older, self.newer = self.newer, self.older
            self._older, self._newer = self._newer, self._older
            _wipe(self._newer)
            self._risen = ()

    def _judged(self, tables: Any) -> tuple[Any, Any]:
        """(n, rows, 5) shares of the units that ran in n records; and `newer` after them.

        `tables` are those of the records, (n, 4, units). By stretches of the units of one row.
        """
        rows, n = self._rows, len(tables)
        shares = np.zeros((n, rows + 1, 5), dtype=np.float32)
        if not len(self._row_of):
            return shares[:, :rows], self._newer
        starts, sizes, of = self._stretches()
        ran = tables[:, 2] > 0
        seen = np.empty_like(tables)
        np.maximum.accumulate(tables[:, 0], axis=0, out=seen[:, 0])
        np.add.accumulate(tables[:, 1:], axis=0, out=seen[:, 1:])
        np.maximum(seen[:, 0], self._newer[0], out=seen[:, 0])
        seen[:, 1:] += self._newer[1:]
        newer = seen[-1].copy()
        self._risen = np.zeros(rows + 1, dtype=bool)
        self._risen[of] = np.minimum.reduceat(newer[0], starts) > 0

        np.maximum(seen[:, 0], self._older[0], out=seen[:, 0])
        seen[:, 1:] += self._older[1:]
        tops, sums, counts, full = seen.transpose(1, 0, 2)
        ever, size = counts > 0, sums / np.maximum(counts, 1)
        mean = np.add.reduceat(size, starts, axis=1, dtype=np.float64) / sizes
        flags = np.empty((5, *ran.shape), dtype=np.float32)
        flags[0], flags[1] = (tops <= 0) & ever, (size <= np.repeat(TAU * mean, sizes, 1)) & ever
        flags[2], flags[3], flags[4] = full > 0.5 * counts, ran, ran & self._bounded
        found = np.add.reduceat(flags, starts, axis=2)
        shares[:, of] = np.where(found[3] > 0, found / sizes, 0).transpose(1, 2, 0)
        return shares[:, :rows], newer

    def _stretches(self) -> tuple[Any, Any, Any]:
        """Where in the tables the units of a row begin, how many they are, and of which row."""
        if self._stretched is None:
            starts = np.flatnonzero(np.diff(self._row_of, prepend=-1))
            sizes = np.diff(starts, append=len(self._row_of))
            self._stretched = starts, sizes, self._row_of[starts]
        starts, sizes, of = self._stretched
        return starts, sizes, np.minimum(of, self._rows)  # nobody's come last

    def now(self, row: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Which units are dead, dormant, saturated over the window: (units,) bool; None unseen."""
        self.flush()
        return super().now(row)

    def read(self, n: int, rows: int) -> Tensor:
        """(n, rows, 5) on the CPU: sums of shares and how many records they are of."""
        self.flush()
        return super().read(n, rows)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        views = ("_arrays", "_kept", "_older", "_newer", "_row_of", "_bounded", "_stretched")
        blank = np.empty((0, 4, 0), np.float32)
        return {**super().__getstate__(), **dict.fromkeys(views), "_plans": {}, "_late": blank}


def _add(a: Any, b: Any) -> None:
    """`_join`, by numpy."""
    np.maximum(a[0], b[0], out=a[0])
    a[1:] += b[1:]


def _wipe(table: Any) -> None:
    table[1:] = 0
    table[0] = -math.inf
