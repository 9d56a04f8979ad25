"""Units judged on a CPU, by numpy: there a record's hundred operations on small tables cost most.

The tables are those of `Units`, seen as arrays; `Units` itself is what this is tested against. It
reads less: a unit that has risen above zero is not dead in this half of the window, so the layer is
searched only while one of its units has not; and sizes are those of a part of a large tensor, at
each record another one. Records wait, and are judged many at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hookkit.moments.cpu import scratch
from hookkit.moments.unitplans import Plan, plan_of
from hookkit.moments.units import TAU, Tables, Units

MOST_LATE = 32
LATE_VALUES = 1 << 18
"""Most records that wait, and most values that wait with them (1 MiB)."""

_LARGE = 1e25
# Sums of smaller values do not leave float32 (np.errstate costs 40 µs in a cold cache).


@dataclass(slots=True)
class _Closed:
    """A record that is not judged yet; its table is in `late_tables`."""

    record: int
    rows: int
    most: int


@dataclass(slots=True)
class _Views:
    """The tables as arrays, and what else holds for them alone."""

    places: dict[int, tuple[int, int]]
    live: Any
    kept: Any
    older: Any
    newer: Any
    row_of: Any
    bounded: Any
    late_tables: Any
    """(slots, 4, units) of the records that wait."""

    late: list[_Closed] = field(default_factory=list)
    """Records that wait for others before they are judged."""

    plans: dict[int, Plan] = field(default_factory=dict)
    stretches: Any = None
    risen: Any = ()
    """By row: have all units risen above 0 in `newer`?"""


class UnitsByArrays(Units):
    """`Units` of a CPU."""

    def __init__(self, window: int) -> None:
        super().__init__(window, torch.device("cpu"))

    @classmethod
    def of(cls, units: Units) -> UnitsByArrays:
        """The same on the CPU; for a pickle, since the tables are not copied."""
        new = cls(units.window)
        new.__setstate__({**new.__getstate__(), **units.__getstate__()})
        return new

    def _views_of(self, tables: Tables) -> _Views:
        live, kept, older, newer = (t.numpy() for t in tables.four)
        old = self._state[1]
        if old is not None and old.places is tables.places:  # the same units
            return replace(cast(_Views, old), live=live, kept=kept, older=older, newer=newer)
        n, late = tables.live.shape[1], [] if old is None else list(old.late)
        slots = max(min(MOST_LATE, LATE_VALUES // (4 * n + 1)), len(late) + 1)
        late_tables = np.zeros((slots, 4, n), np.float32)
        late_tables[:, 0] = -math.inf
        if late:  # then nobody has left, and others have only come
            before = old.late_tables[: len(late)]
            late_tables[: len(late), :, : before.shape[2]] = before
        row_of, bounded = tables.row_of.numpy(), tables.bounded.numpy()
        places = tables.places
        return _Views(places, live, kept, older, newer, row_of, bounded, late_tables, late)

    @property
    def _views(self) -> _Views:
        return cast(_Views, self._state[1])

    @property
    def turn(self) -> int:
        """The number of the record that is being made."""
        late = self._views.late
        return late[-1].record + 1 if late else self.tables.n

    @property
    def late(self) -> list[_Closed]:
        """Records that wait for others before they are judged."""
        return self._views.late

    # --- the batch at hand

    def plan(self, row: int, shape: torch.Size, kind: str) -> Plan | None:
        """How to read what `row` gives; None if it has to be `planned` first."""
        plan = self._views.plans.get(row)
        return None if plan is None or plan.shape != shape or plan.kind != kind else plan

    def planned(self, row: int, shape: torch.Size, kind: str) -> Plan:
        """How to read `row` from now on. If `row` was here before, nothing may wait."""
        plan = plan_of(shape, kind)
        if plan.width:
            self._place(row, plan.n, False)
        self._views.plans[row] = plan
        return plan

    def _place(self, row: int, n: int, bounded: bool) -> int:
        if self.places.get(row, (0, n))[1] != n:
            self.flush()
        return super()._place(row, n, bounded)

    def take_array(self, row: int, values: Any, plan: Plan, top: float) -> None:
        """Add flat float32 `values`, none larger than `top`."""
        views, (start, n) = self._views, self.places[row]
        tops, sums, counts = views.live[:3, start : start + n]
        table = values.reshape(-1, plan.width)
        if top < _LARGE:
            some = plan.add_sizes(table, self.turn, sums)
        else:
            with np.errstate(all="ignore"):
                some = plan.add_sizes(table, self.turn, sums)
        np.add(counts, some, out=counts)
        if row >= len(views.risen) or not views.risen[row]:
            plan.raise_to(tops, table)

    def take_first(self, row: int, values: Any, plan: Plan, top: float) -> None:
        """The same, as the only values of `row` in this batch: done twice, it is done once."""
        start, n = self.places[row]
        _wipe(self._views.live[:, start : start + n])
        self.take_array(row, values, plan, top)

    def drop(self) -> None:
        """Forget the batch at hand."""
        _wipe(self._views.live)

    def forget(self) -> None:
        """Forget everything since the last commit."""
        views = self._views
        _wipe(views.live)
        if self.tables.folded >= 0:
            _wipe(views.kept)

    # --- records

    @property
    def full(self) -> bool:
        """Whether the records that wait have to be judged before there is another."""
        views = self._views
        return len(views.late) >= len(views.late_tables) or self.turn % self._half == 0

    def commit(self, record: int, rows: int, most: int) -> None:
        """Close a record: it waits for `flush`, and then (rows, 6) shares go into the ring."""
        if self.turn <= record:
            if self.full:
                self.flush()
            views = self._views
            table = views.late_tables[len(views.late)]
            table[:] = views.live
            if self.tables.folded >= 0:
                with np.errstate(all="ignore"):
                    _add(table, views.kept)
            views.late.append(_Closed(record, rows, most))
        self.forget()

    def take_late(self, row: int, slots: list[int], table: Any, plan: Plan) -> None:
        """The values that a small layer gave in the waiting records `slots`, (slots, n)."""
        parts = table.reshape(len(slots), -1, plan.width)
        room = scratch.sizes[: table.size].reshape(parts.shape)
        start, n = self.places[row]
        here, tables = slice(start, start + n), self._views.late_tables
        with np.errstate(all="ignore"):
            sizes = plan.by_unit(np.add.reduce(np.abs(parts, out=room), axis=1), np.add.reduce)
            tops = plan.by_unit(np.maximum.reduce(parts, axis=1), np.maximum.reduce)
        tables[slots, 0, here] = tops  # not added: its only values there
        tables[slots, 1, here] = sizes
        tables[slots, 2, here] = table.shape[1] // n

    def flush(self) -> None:
        """Judges the records that wait."""
        views = self._views
        late = views.late
        if not late:
            return
        tables = views.late_tables[: len(late)]
        with np.errstate(all="ignore"):
            shares, newer, risen = self._judged(tables)
        self.ring.put(late[0].record, torch.from_numpy(shares), late[-1].most)
        self._put_past(late[0].record, torch.from_numpy(tables), late[-1].most)
        moved = self._moved_on(torch.from_numpy(newer), late[-1].record + 1)
        new = replace(self._views_of(moved), late=[], risen=risen if moved.n % self._half else ())
        self._state = moved, new

    def _judged(self, tables: Any) -> tuple[Any, Any, Any]:
        """(n, rows, 6) shares of the units that ran in n records; `newer` and `risen` after them.

        `tables` are those of the records, (n, 4, units). By stretches of the units of one row.
        """
        views, rows, n = self._views, self._views.late[-1].rows, len(tables)
        shares = np.zeros((n, rows + 1, len(self.FIELDS)), dtype=np.float32)
        if not len(views.row_of):
            return shares[:, :rows], views.newer, ()
        starts, sizes, of = self._stretches(rows)
        ran = tables[:, 2] > 0
        seen = np.empty_like(tables)
        np.maximum.accumulate(tables[:, 0], axis=0, out=seen[:, 0])
        np.add.accumulate(tables[:, 1:], axis=0, out=seen[:, 1:])
        np.maximum(seen[:, 0], views.newer[0], out=seen[:, 0])
        seen[:, 1:] += views.newer[1:]
        newer = seen[-1].copy()
        risen = np.zeros(rows + 1, dtype=bool)
        risen[of] = np.minimum.reduceat(newer[0], starts) > 0

        np.maximum(seen[:, 0], views.older[0], out=seen[:, 0])
        seen[:, 1:] += views.older[1:]
        tops, sums, counts, full = seen.transpose(1, 0, 2)
        ever, size = counts > 0, sums / np.maximum(counts, 1)
        mean = np.add.reduceat(size, starts, axis=1, dtype=np.float64) / sizes
        flags = np.empty((len(self.FIELDS), *ran.shape), dtype=np.float32)
        flags[0] = (tops <= 0) & ever
        flags[1] = (tops <= 0) & ever & (sums == 0)
        flags[2] = (size <= np.repeat(TAU * mean, sizes, 1)) & ever
        flags[3], flags[4], flags[5] = full > 0.5 * counts, ran, ran & views.bounded
        found = np.add.reduceat(flags, starts, axis=2)
        shares[:, of] = np.where(found[4] > 0, found / sizes, 0).transpose(1, 2, 0)
        return shares[:, :rows], newer, risen

    def _stretches(self, rows: int) -> tuple[Any, Any, Any]:
        """Where in the tables the units of a row begin, how many they are, and of which row."""
        views = self._views
        if views.stretches is None:
            starts = np.flatnonzero(np.diff(views.row_of, prepend=-1))
            sizes = np.diff(starts, append=len(views.row_of))
            views.stretches = starts, sizes, views.row_of[starts]
        starts, sizes, of = views.stretches
        return starts, sizes, np.minimum(of, rows)  # nobody's come last

    def now(self, row: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Which units are never above 0, dormant, saturated over the window: (units,) bool each."""
        self.flush()
        return super().now(row)

    def zero(self, row: int) -> Tensor | None:
        """Which units have given nothing but 0 over the window: (units,) bool; None if not seen."""
        self.flush()
        return super().zero(row)

    def counts(self, n: int) -> dict[int, Tensor]:
        """By row the (n, units, 4) counts of each record, on the CPU, for the ranks."""
        self.flush()
        return super().counts(n)

    def read(self, n: int, rows: int) -> Tensor:
        """(n, rows, 6) on the CPU: sums of shares and how many records they are of."""
        self.flush()
        return super().read(n, rows)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return super().__getstate__()


def _add(a: Any, b: Any) -> None:
    """Puts greatest values and sums of `b` into `a`."""
    np.maximum(a[0], b[0], out=a[0])
    a[1:] += b[1:]


def _wipe(table: Any) -> None:
    table[1:] = 0
    table[0] = -math.inf
