"""Dead, dormant and saturated units (channels): judged over a window of records, not one batch.

A unit is one index of a layer's channel dimension. Kept per unit: its greatest value and the sum of
|x| over the window, as two halves of which the older is dropped when the newer is full; so a
judgement rests on `window / 2` to `window` records, in constant memory. It builds on
`unit_layouts`. The tables of all layers lie side by side, (4, units), and are judged for all layers
and several records at once. The file is a little longer than 300 lines, since the tables and the
functions that judge them share the order of the four rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hookkit.moments.unit_layouts import UnitLayout, can_saturate

TAU = 0.025
"""A unit whose mean |x| is at most this share of its layer's mean is dormant.

Source: Sokar et al. 2023, "The Dormant Neuron Phenomenon in Deep Reinforcement Learning", eq. 1.
"""

CLAMPING: tuple[str | None, ...] = ("ReLU", "ReLU6")
"""Classes that give 0 for every value below 0."""

FIELDS = ("never_positive", "zero", "dormant", "saturated", "n", "n_saturable")
"""Of a layer's record: shares of its units, and ones that say whether it was judged at all."""


@dataclass(frozen=True)
class UnitTables:
    """The units of all layers on one device, side by side. Methods return changed copies.

    A (4, units) table has of each unit the greatest value, the sum of |x|, how many values were
    read, and how many of them were saturated.

    Args:
        window: records that a judgement looks back on.
        live: (slots, 4, units) of records that are not judged yet, then of the current batch;
            the only table that is written in place.
        kept: (4, units) of earlier batches of this step, None if there are none.
        older, newer: (4, units) of the two halves of the window.
        row_of: (units,) int64, whose unit it is.
        bounded: (units,) bool, whether it can be saturated.
        places: by row the first of its units, and how many they are.
        layouts: by row how its tensors are read.
    """

    window: int
    live: Tensor
    kept: Tensor | None
    older: Tensor
    newer: Tensor
    row_of: Tensor
    bounded: Tensor
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    layouts: dict[int, UnitLayout] = field(default_factory=dict)

    @classmethod
    def blank(cls, window: int, device: torch.device, slots: int = 1) -> UnitTables:
        """Without units."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        live = blank_tables(slots, 0, device)
        return cls(window, live, None, live[0], live[0], none, none.bool())

    @property
    def half(self) -> int:
        """Records in each half of the window."""
        return max(self.window // 2, 1)

    @property
    def n_units(self) -> int:
        """Of all rows."""
        return len(self.row_of)

    @cached_property
    def array(self) -> Any:
        """`live` as numpy sees it; on a CPU."""
        return self.live.numpy()

    def add(self, slot: int, row: int, x: Tensor) -> None:
        """Adds the plain tensor `x` to the current batch."""
        start, n = self.places[row]
        self.layouts[row].add_tensor(self.live[slot, :, start : start + n], x)

    def add_array(self, slot: int, row: int, values: Any, top: float, offset: int) -> None:
        """Adds flat float32 `values`, none larger than `top`; `offset` selects what is read."""
        start, n = self.places[row]
        here = self.array[slot, :, start : start + n]
        self.layouts[row].add_array(here, values, top, offset)

    def with_layout(self, row: int, layout: UnitLayout) -> UnitTables:
        """With units for a new `row`, or for one that gives another number of units now."""
        layouts = {**self.layouts, row: layout}
        _, n = self.places.get(row, (0, 0))
        if not layout.n or n == layout.n:
            return replace(self, layouts=layouts)
        kept = self if not n else self._of_rows([r for r in self.places if r != row])
        with torch.inference_mode(False):
            return replace(kept._with_units(row, layout.n, layout.saturates), layouts=layouts)

    def _with_units(self, row: int, n: int, bounded: bool) -> UnitTables:
        device, slots = self.row_of.device, len(self.live)
        new = blank_tables(slots, n, device)
        older, newer = (torch.cat([t, new[0]], -1) for t in (self.older, self.newer))
        return replace(
            self,
            live=torch.cat([self.live, new], -1),
            kept=None if self.kept is None else torch.cat([self.kept, new[0]], -1),
            older=older,
            newer=newer,
            row_of=torch.cat([self.row_of, torch.full((n,), row, device=device)]),
            bounded=torch.cat([self.bounded, torch.full((n,), bounded, device=device)]),
            places={**self.places, row: (self.n_units, n)},
        )

    def parts_of(self, rows: list[int]) -> list[slice]:
        """Where the units of these rows lie."""
        return [slice(start, start + n) for start, n in map(self.places.__getitem__, rows)]

    def _of_rows(self, rows: list[int]) -> UnitTables:
        """Of these rows alone. By slices: an index would make a GPU wait."""
        parts = self.parts_of(rows)

        def some(t: Any) -> Any:
            return None if t is None else torch.cat([t[..., :0], *(t[..., p] for p in parts)], -1)

        sizes = [self.places[row][1] for row in rows]
        starts = accumulate(sizes, initial=0)
        places = dict(zip(rows, zip(starts, sizes, strict=False), strict=True))
        return UnitTables(
            self.window,
            some(self.live),
            some(self.kept),
            some(self.older),
            some(self.newer),
            some(self.row_of),
            some(self.bounded),
            places,
            self.layouts,
        )

    def clear(self, slot: int) -> None:
        """Empties the current batch."""
        self.live[slot, 1:] = 0
        self.live[slot, 0] = -math.inf

    def folded(self, slot: int) -> UnitTables:
        """With the current batch kept for its step."""
        return replace(self, kept=self.with_kept(slot).clone())

    def without_kept(self) -> UnitTables:
        """With earlier batches of this step forgotten."""
        return self if self.kept is None else replace(self, kept=None)

    def with_kept(self, slot: int) -> Tensor:
        """(4, units) of all batches of this step."""
        live = self.live[slot]
        return live if self.kept is None else _joined(live, self.kept)

    def emptied(self, slot: int, slots: int) -> UnitTables:
        """With room for `slots` records, of which the first is the one that was in `slot`."""
        live = blank_tables(slots, self.n_units, self.row_of.device)
        if slot < len(self.live):
            live[0] = self.live[slot]
        return replace(self, live=live)

    def record(self, tables: Tensor, after: int, rows: int) -> tuple[Tensor, Tensor, UnitTables]:
        """Records with these (n, 4, units) tables, of which only the last may end half a window.

        Args:
            after: the number of the record that comes next.
            rows: of all layers.

        Returns:
            (n, rows, 6) shares of the units that ran in each record; (n, units, 4) counts, by
            which several ranks are judged together; and the tables as they are afterwards.
        """
        seen = _joined(_accumulated(tables), self.newer)
        newer, older = seen[-1], self.older
        shares = self._shares(_joined(seen, older), tables[:, 2] > 0, rows)
        counts = torch.cat([(tables[:, :1] > 0).to(tables.dtype), tables[:, 1:]], 1)
        if after % self.half == 0:
            older, newer = newer, blank_tables(1, self.n_units, newer.device)[0]
        return shares, counts.transpose(1, 2), replace(self, older=older, newer=newer)

    def _shares(self, seen: Tensor, ran: Tensor, rows: int) -> Tensor:
        """(n, rows, 6) shares, from the (n, 4, units) of the whole window."""
        size = seen[:, 1] / seen[:, 2].clamp(min=1)
        one = torch.ones_like(size)
        sums = self._by_row(torch.stack([size, one], 1), rows)
        mean = (sums[..., 0] / sums[..., 1].clamp(min=1)).index_select(1, self.row_of)
        flags = torch.stack([*_verdict(seen, mean), ran, ran & self.bounded], 1)
        table = self._by_row(flags.to(seen.dtype), rows)
        n = sums[..., 1:].clamp(min=1)
        return torch.where(table[..., 4:5] > 0, table / n, 0.0)

    def _by_row(self, values: Tensor, rows: int) -> Tensor:
        """Sums over the units of each row: (n, k, units) → (n, rows, k)."""
        n, k, units = values.shape
        total = values.new_zeros(rows, n * k)
        total.index_add_(0, self.row_of, values.permute(2, 0, 1).reshape(units, n * k))
        return total.view(rows, n, k).transpose(0, 1)

    def now(self, row: int) -> tuple[Tensor, ...] | None:
        """Which units were never above 0, only 0, dormant, saturated over the window: (n,) bools.

        None if the row has no units.
        """
        if row not in self.places:
            return None
        start, n = self.places[row]
        seen = _joined(self.older, self.newer)[None, :, start : start + n]
        mean = (seen[:, 1] / seen[:, 2].clamp(min=1)).mean()
        return tuple(flags[0] for flags in _verdict(seen, mean))

    def on_cpu(self) -> UnitTables:
        """A copy on the CPU without the current batch, for pickles."""
        cpu = torch.device("cpu")
        return replace(
            self,
            live=blank_tables(1, self.n_units, cpu),
            kept=None,
            older=self.older.to(cpu),
            newer=self.newer.to(cpu),
            row_of=self.row_of.to(cpu),
            bounded=self.bounded.to(cpu),
        )


def blank_tables(slots: int, units: int, device: torch.device) -> Tensor:
    """(slots, 4, units) float32 of units that were not seen."""
    with torch.inference_mode(False):
        tables = torch.zeros(slots, 4, units, dtype=torch.float32, device=device)
        tables[:, 0] = -math.inf
    return tables


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """Greatest values and sums of `a` and `b` together, (…, 4, units) each."""
    tops = torch.maximum(a[..., :1, :], b[..., :1, :])
    return torch.cat([tops, a[..., 1:, :] + b[..., 1:, :]], -2)


def _accumulated(tables: Tensor) -> Tensor:
    """Each of the (n, 4, units) tables together with those before it."""
    if len(tables) == 1:
        return tables
    tops = tables[:, :1].cummax(0).values
    return torch.cat([tops, tables[:, 1:].cumsum(0)], 1)


def _verdict(seen: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each unit over the window: is it never above 0, only 0, dormant, saturated?

    (n, units) bool each, from (n, 4, units) and the mean sizes of the units' layers.
    """
    tops, sums, n_read, n_full = seen.unbind(1)
    ran = n_read > 0
    low = (tops <= 0) & ran
    dormant = (sums / n_read.clamp(min=1) <= TAU * mean) & ran
    return low, low & (sums == 0), dormant, n_full > 0.5 * n_read


def judged(
    counts: Tensor, layers: list[tuple[int, str, int]], window: int, stride: int, rows: int
) -> tuple[Tensor, UnitTables]:
    """(columns, rows, 6) shares by the (columns, units, 4) counts of all ranks, and the tables.

    Args:
        layers: of the units, side by side: row, class of the module, how many.
        window: in records, of which a column has `stride`.
    """
    half = -(-max(window // 2, 1) // stride)
    tables = UnitTables.blank(2 * half, torch.device("cpu"))
    for row, kind, n in layers:
        tables = tables._with_units(row, n, can_saturate(kind))
    shares = torch.zeros(len(counts), rows, len(FIELDS), dtype=torch.float32, device="cpu")
    for i, column in enumerate(counts):
        table, _, tables = tables.record(column.t()[None], i + 1, rows)
        shares[i] = table[0]
    return shares, tables


def shares(table: Any) -> dict[str, Any]:
    """Fractions of units from (…, 6) sums; NaN where not judged.

    `dead` is what it is for a ReLU, or before one: never above 0. Of other layers `only_zero` is:
    see `reading.shares_of`.
    """
    n, n_saturable = table[..., 4].copy(), table[..., 5].copy()
    n[n == 0] = n_saturable[n_saturable == 0] = math.nan
    return {
        "dead": table[..., 0] / n,
        "dormant": table[..., 2] / n,
        "saturated": table[..., 3] / n_saturable,
        "never_positive": table[..., 0] / n,
        "only_zero": table[..., 1] / n,
    }
