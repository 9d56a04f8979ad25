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
from hookkit.moments.cpu import CHUNK, cpu_row, rows_of, stacked
from hookkit.moments.histograms import ABSENT, sample_of
from hookkit.moments.history import Axis
from hookkit.moments.moments import EMPTY, array_of, flat, merge_row
from hookkit.moments.unitarrays import LATE_VALUES, MOST_LATE, UnitsByArrays
from hookkit.moments.unitplans import Plan

SMALL = 1 << 14
"""Tensors of at most so many values wait."""

Unread = tuple[Any, int, "Plan | None"]
"""Values that were copied, how often each counts, and how their units are read."""


@dataclass(slots=True)
class Late:
    """A record that is not in the ring yet: its number, and what is known or yet to be read."""

    record: int
    most: int
    seen: dict[int, tuple[float, ...]]
    unread: dict[int, Unread]
    n_late: int
    """Values that are copied and not read: of this record and those before it that wait."""


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
        # the records that wait, and the samples of each and then of the batch at hand: one tuple
        self._waits: tuple[list[Late], Tensor, Any] = [], torch.empty(0, device="cpu"), None
        self.n_unread = 0  # values of the batch at hand that wait
        super().__init__(options, torch.device("cpu"), rows)

    def _new_units(self) -> UnitsByArrays:
        return UnitsByArrays(self.options.window)

    @property
    def n_late(self) -> int:
        """Values of records that wait."""
        return self.late[-1].n_late if self.late else 0

    def _grow(self, rows: int) -> None:
        self.flush()
        super()._grow(rows)

    def _grow_moments(self, old: int, rows: int) -> None:
        """Nothing: they are kept by row."""

    def _grow_samples(self, old: int, rows: int) -> None:
        self._waits = self._nothing_waits(rows, old)

    def _nothing_waits(self, rows: int, old: int) -> tuple[list[Late], Tensor, Any]:
        """No record waits; the samples of the batch at hand, of `old` rows so far, lie first."""
        if not self.options.bins:
            return [], torch.empty(0, device="cpu"), None
        slots = max(min(LATE_VALUES // (rows * self.options.sample), MOST_LATE), 1)
        staged = self._no_samples(slots, rows)
        if self.sampled:
            staged[0, :old] = self.samples[:old]
        return [], staged, staged.numpy()

    @property
    def late(self) -> list[Late]:
        """Records that wait for others before they go into the ring."""
        return self._waits[0]

    @property
    def slots(self) -> int:
        """How many records may wait."""
        return len(self._waits[1]) if self.options.bins else MOST_LATE

    @property
    def samples(self) -> Tensor:  # type: ignore[override]
        """(rows, sample) of the batch at hand."""
        late, staged, _ = self._waits
        return staged[len(late)]

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

    def _read(self) -> None:
        """Look at what was only copied of the batch at hand."""
        for row, (array, times, plan) in list(self.unread.items()):
            if row not in self.seen:  # an interrupt loses nothing, nor counts it twice
                self.sampled.pop(row, None)
                self._take_row(row, array, times)
            if self.units is not None and plan is not None:
                self.units.take_first(row, array, plan, self._top(row))
            del self.unread[row]
        self.n_unread = 0

    def _take_row(self, row: int, x: Any, times: int) -> None:
        new = self._row(x, times)
        calls, *old = self.seen.get(row, (0.0,))
        if self.options.bins and not self.options.exact_hist:
            self._sample(row, x)
        self.seen[row] = (calls + 1, *(merge_row(old, new) if calls else new))

    def _row(self, x: Any, times: int) -> Any:
        new: Any = cpu_row(x, self.options.eps)
        if times > 1:
            n, mean, m2, lo, hi, near, zero, bad = new
            new = (n * times, mean, m2 * times, lo, hi, near * times, zero * times, bad * times)
        return new

    def _sample(self, row: int, x: Any) -> None:
        part, k = self._part(row, len(x))
        if isinstance(x, np.ndarray) and x.dtype == np.float32:
            late, _, arrays = self._waits
            arrays[len(late), row, :k] = x[part]  # as below, in a third of the time
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
        self.seen, self.unread, self.n_unread = {}, {}, 0

    def _drop_counts(self) -> None:
        if self.counted:
            self.counts.zero_()
            self.counted = False
        if self.sampled:
            self.samples.view(torch.int32).fill_(ABSENT)
            self.sampled = {}

    # --- records

    def commit(self, record: int, axis: Axis) -> None:
        """Close the record; it goes into the ring when there are others, or somebody reads."""
        if self.turn > record:  # closed before an interrupt
            self.forget()
        elif self.kept is not None or self.counted:
            self._read()
            self.flush()
            super().commit(record, axis)
        else:
            self.catch_up(axis.stride)
            self._wait(record, axis.limit)
            self.turn = record + 1
        if self.units is not None and not self.late:
            self.units.flush()

    def _wait(self, record: int, most: int) -> None:
        if self.units is not None and self.units.turn <= record:
            if self.units.full or len(self.units.late) != len(self.late):
                self.flush()
                self.units.flush()
            self.units.commit(record, self.rows, most)
        if self.ring.n <= record and not (self.late and self.late[-1].record == record):
            n = self.n_late + self.n_unread
            self.late.append(Late(record, most, self.seen, self.unread, n))
        self.seen, self.unread, self.n_unread = {}, {}, 0
        self.sampled = {}
        full = len(self.late) >= self.slots or self.n_late > LATE_VALUES
        if full or (self.units is not None and self.units.full):
            self.flush()

    def flush(self) -> None:
        """Bring the ring up to the last commit."""
        late = self.late
        if not late:
            return
        self._read_late(late)
        tables = self._table([record.seen for record in late])
        counts: Any = None
        if self.hist is not None and self.options.bins is not None:
            staged = self._waits[1][: len(late)]
            found = self.options.bins.count(staged.view(-1, self.options.sample))
            counts = found.view(len(late), self.rows, -1)[..., :-1]
        if self.units is not None:
            self.units.flush()
        first, most = late[0].record, late[-1].most
        self.ring.put(first, tables, most)
        if self.hist is not None:
            self.hist.put(first, counts, most)
        self._waits = self._nothing_waits(self.rows, self.rows)  # last: an interrupt loses nothing

    def _read_late(self, late: list[Late]) -> None:
        """Look at what was only copied of records that wait."""
        self._read_alike(late)
        for slot, record in enumerate(late):
            for row, (array, times, plan) in list(record.unread.items()):
                if self.units is not None and plan is not None:
                    self.units.take_late(row, [slot], array[None], plan)
                self._sample_late(slot, row, array, record.record)
                record.seen[row] = (1.0, *self._row(array, times))
                del record.unread[row]

    def _sample_late(self, slot: int, row: int, values: Any, turn: int) -> None:
        if self.options.bins:
            part = values[sample_of(len(values), self.options.sample, turn)]
            if part.dtype != np.float32:
                part = narrow(torch.from_numpy(part)).float().numpy()
            self._waits[2][slot, row, : len(part)] = part

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
        if self.units is not None and plan is not None:
            self.units.take_late(row, slots, table, plan)
        for slot, values, found in zip(slots, table, rows, strict=True):
            record = late[slot]
            self._sample_late(slot, row, values, record.record)
            record.seen[row] = (1.0, *(found or cpu_row(values, self.options.eps)))
            del record.unread[row]

    def _tables(self) -> list[Tensor]:
        return [self._waits[1], self.counts] if self.options.bins else []

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
