"""The tables of the CPU, where what is small waits until there is much of it.

What looking at a small tensor costs is not the reading but the code for it, which the model has
driven out of the cache, and which drives out the model's in its turn. So it is copied, and looked
at later, together with others; records wait likewise before they go into the ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.moments.banks import Bank, Options, narrow
from hookkit.moments.histograms import ABSENT, sample_of
from hookkit.moments.moments import EMPTY, array_of, flat, merge_row
from hookkit.moments.rings import Ring
from hookkit.moments.sweeps import CHUNK, cpu_row, rows_of, stacked
from hookkit.moments.unitarrays import LATE_VALUES, MOST_LATE, UnitsByArrays
from hookkit.moments.unitplans import Plan

SMALL = 1 << 14
"""Tensors of at most so many values wait."""

Unread = tuple[Any, int, "Plan | None"]
"""Values that were copied, how often each counts, and how their units are read."""


@dataclass(slots=True)
class Late:
    """A record that is not in the ring yet: its column, and what is known or yet to be read."""

    column: int
    into: bool
    most: int
    turn: int
    seen: dict[int, tuple[float, ...]]
    unread: dict[int, Unread]


class WaitingBank(Bank):
    """The tables of the CPU. Moments are Python floats here until they go into the ring.

    Attributes:
        seen: moments of the batch at hand, by row.
        unread: by row, what was copied and is to be looked at.
        late: records that wait for others before they go into the ring.
    """

    units: UnitsByArrays | None

    def __init__(self, options: Options, rows: int) -> None:
        self.seen: dict[int, tuple[float, ...]] = {}
        self.unread: dict[int, Unread] = {}
        self.late: list[Late] = []
        self.n_unread = self.n_late = 0  # values that wait: of the batch at hand, of records
        super().__init__(options, torch.device("cpu"), rows)

    def _new_units(self) -> UnitsByArrays:
        return UnitsByArrays(self.options.window)

    def _grow(self, rows: int) -> None:
        self.flush()
        super()._grow(rows)

    def _grow_moments(self, old: int) -> None:
        """Nothing: they are kept by row."""

    def _blank_samples(self) -> Tensor:
        """Those of the batch at hand, after as many more as records may wait."""
        assert self.options.bins is not None
        size = self.rows * self.options.sample
        self.slots = max(min(LATE_VALUES // size, MOST_LATE), 1)
        shape = self.slots, self.rows, self.options.sample
        self.staged = torch.full(shape, ABSENT, dtype=torch.int32, device="cpu").view(torch.float32)
        self.staged_arrays: Any = self.staged.numpy()
        self.sample_arrays: Any = self.staged_arrays[0]
        return self.staged[0]

    def _use_slot(self, slot: int) -> None:
        """Has the samples of the batch at hand go to `slot`."""
        if self.options.bins:
            self.samples, self.sample_arrays = self.staged[slot], self.staged_arrays[slot]

    # --- the batch at hand

    def take(self, row: int, t: Tensor, kind: str) -> None:
        """Add the plain tensor `t`, which a module of class `kind` gave, to `row`."""
        x, times = flat(t)
        array = array_of(x)
        if array is not None:
            self.take_array(row, array, t, kind, times)
            return
        self._room_for(row)
        if row in self.unread:
            self._read()
        if self.units is not None:
            self._plan(row, t, kind)
            self.units.take(row, t, kind)
        self._take_row(row, x, times)
        if self.options.exact_hist:
            self._count(row, x, times)

    def take_array(self, row: int, array: Any, t: Tensor, kind: str, times: int = 1) -> None:
        """Add `t`, whose values are the flat `array`, each so many times."""
        self._room_for(row)
        known = row in self.seen or row in self.unread
        if known:
            self._read()
        plan = None if self.units is None else self._plan(row, t, kind)
        alike = times == 1 and array.dtype == np.float32 and t.is_contiguous()
        quick = plan is None or (alike and plan.width > 0)
        if quick and len(array) <= SMALL and not (known or self.options.exact_hist):
            self.unread[row] = array.copy(), times, plan
            self.n_unread += len(array)
            if self.n_unread > LATE_VALUES:
                self._read()
            return
        self._take_row(row, array, times)
        if self.units is not None and plan is not None:
            if quick:
                self.units.take_array(row, array, plan, self._top(row))
            else:
                self.units.take(row, t.detach(), kind)
        if self.options.exact_hist:
            self._count(row, torch.from_numpy(array), times)

    def _plan(self, row: int, t: Tensor, kind: str) -> Plan:
        assert self.units is not None
        plan = self.units.plan(row, t.shape, kind)
        if plan is None:
            if row in self.units.places:  # it may give other units now: judge those first
                self.flush()
            plan = self.units.planned(row, t.shape, kind)
        return plan

    def _top(self, row: int) -> float:
        *_, lo, hi, _, _, bad = self.seen[row]
        return math.inf if bad else max(-lo, hi)

    def _read(self, slot: int | None = None) -> None:
        """Look at what was only copied of the batch at hand, or of the record in `slot`."""
        for row, (array, times, plan) in list(self.unread.items()):
            if row not in self.seen:  # an interrupt loses nothing, nor counts it twice
                self._take_row(row, array, times)
            if self.units is not None and plan is not None:
                if slot is None:
                    self.units.take_array(row, array, plan, self._top(row))
                else:
                    self.units.take_late(row, [slot], array[None], plan)
            del self.unread[row]
        self.n_unread = 0

    def _take_row(self, row: int, x: Any, times: int) -> None:
        new: Any = cpu_row(x, self.options.eps)
        if times > 1:
            n, mean, m2, lo, hi, near, zero, bad = new
            new = (n * times, mean, m2 * times, lo, hi, near * times, zero * times, bad * times)
        calls, *old = self.seen.get(row, (0.0,))
        self.seen[row] = (calls + 1, *(merge_row(old, new) if calls else new))
        if self.options.bins and not self.options.exact_hist:
            self._sample(row, x)

    def _sample(self, row: int, x: Any) -> None:
        part, k = self._part(row, len(x))
        if isinstance(x, np.ndarray) and x.dtype == np.float32:
            self.sample_arrays[row, :k] = x[part]  # as below, in a third of the time
        else:
            some = x[part] if isinstance(x, Tensor) else torch.from_numpy(x[part])
            self.samples[row, :k].copy_(narrow(some))

    def _live(self) -> Tensor:
        self._read()
        return self._table([self.seen])[0]

    def _table(self, seen: list[dict[int, tuple[float, ...]]]) -> Tensor:
        """(len(seen), rows, 9) float64 moments."""
        rows = range(self.rows)
        return torch.from_numpy(np.array([[one.get(row, EMPTY) for row in rows] for one in seen]))

    def _drop_moments(self) -> None:
        self.seen.clear()
        self.unread.clear()
        self.n_unread = 0

    def _drop_counts(self) -> None:
        if self.counted:
            self.counts.zero_()
            self.counted = False
        if self.sampled:
            self.samples.view(torch.int32).fill_(ABSENT)
            self.sampled.clear()

    # --- records

    def commit(self, column: int, into: bool, most: int) -> None:
        """Close the record; it goes into the ring when there are others, or somebody reads."""
        if self.kept is not None or self.counted:
            self._read()
            self.flush()
            super().commit(column, into, most)
            if self.units is not None:
                self.units.flush()
            return
        if self.units is not None and self.units.full:
            self.flush()  # an interrupt may have left it half done
        self.late.append(Late(column, into, most, self.turn, self.seen, self.unread))
        self.n_late += self.n_unread
        self.seen, self.unread, self.n_unread = {}, {}, 0
        if self.units is not None:
            self.units.commit(column, into, self.rows, most)
        self.sampled.clear()
        slots = self.slots if self.options.bins else MOST_LATE
        full = len(self.late) >= slots or self.n_late > LATE_VALUES
        if full or (self.units is not None and self.units.full):
            self.flush()
        else:
            self._use_slot(len(self.late))

    def flush(self) -> None:
        """Bring the ring up to the last commit."""
        late = self.late
        if not late:
            return
        self._read_late(late)
        tables = self._table([record.seen for record in late])
        counts: Any = None
        if self.hist is not None and self.options.bins is not None:
            staged = self.staged[: len(late)]
            found = self.options.bins.count(staged.view(-1, self.options.sample))
            counts = found.view(len(late), self.rows, -1)[..., :-1]
        if self.units is not None:
            self.units.flush()
        self._put(self.ring, late, tables)
        if self.hist is not None:
            self._put(self.hist, late, counts)
        if self.hist is not None:
            if self.sampled:  # the batch at hand goes on in the first slot
                staged[0] = self.samples
                self.samples.view(torch.int32).fill_(ABSENT)
                staged = staged[1:]
            staged.view(torch.int32).fill_(ABSENT)
            self._use_slot(0)
        self.late, self.n_late = [], 0  # last: an interrupt loses nothing

    def _put(self, ring: Ring, late: list[Late], tables: Tensor) -> None:
        if any(record.into for record in late):
            for record, table in zip(late, tables, strict=True):
                ring.put(record.column, table, record.into, record.most)
        else:  # new columns, one after the other
            ring.put_all(late[0].column, tables, late[-1].most)

    def _read_late(self, late: list[Late]) -> None:
        """Look at what was only copied of records that wait; the batch at hand is kept apart."""
        self._read_alike(late)
        apart = self.seen, self.unread, self.n_unread, self.sampled, self.turn
        try:
            for slot, record in enumerate(late):
                self.seen, self.unread, self.sampled = record.seen, record.unread, {}
                self.turn = record.turn
                self._use_slot(slot)
                self._read(slot)
        finally:
            self.seen, self.unread, self.n_unread, self.sampled, self.turn = apart
            if len(late) < (self.slots if self.options.bins else MOST_LATE):
                self._use_slot(len(late))

    def _read_alike(self, late: list[Late]) -> None:
        """Look at what a layer gave in many records at once, where it is alike in size."""
        alike: dict[tuple[int, int, Any], list[int]] = {}
        for slot, record in enumerate(late):
            for row, (array, times, plan) in record.unread.items():
                if times == 1 and array.dtype == np.float32:
                    shape = None if plan is None else plan.shape
                    alike.setdefault((row, len(array), shape), []).append(slot)
        for (row, n, _), slots in alike.items():
            if len(slots) >= 4 and n:
                for start in range(0, len(slots), CHUNK // n):
                    self._read_together(row, late, slots[start : start + CHUNK // n])

    def _read_together(self, row: int, late: list[Late], slots: list[int]) -> None:
        plan = late[slots[0]].unread[row][2]
        table = stacked([late[slot].unread[row][0] for slot in slots])
        rows = rows_of(table, self.options.eps)
        for slot, values, found in zip(slots, table, rows, strict=True):
            record = late[slot]
            record.seen[row] = (1.0, *(found or cpu_row(values, self.options.eps)))
            if self.options.bins:
                part = values[sample_of(len(values), self.options.sample, record.turn)]
                self.staged_arrays[slot, row, : len(part)] = part
            del record.unread[row]
        if self.units is not None and plan is not None:
            self.units.take_late(row, slots, table, plan)

    def _tables(self) -> list[Tensor]:
        return [self.staged, self.counts] if self.options.bins else []

    @property
    def n_bytes(self) -> int:
        """Memory of all tables and rings, and of what waits."""
        return super().n_bytes + 4 * (self.n_late + self.n_unread)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the past only (a `Tally` has put it here before)."""
        self.flush()
        names = ("options", "rows", "turn", "ring", "hist", "units")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"], state["rows"])  # type: ignore[misc]
        self.__dict__.update(state)
