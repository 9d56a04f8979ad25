"""Dead, dormant and saturated units (channels): judged over a window of records, not one batch.

A unit is one index of a layer's channel dimension. Kept per unit: its greatest value and the sum of
|x| over the window, as two halves of which the older is dropped when the newer is full; so a
judgement rests on `window / 2` to `window` records, in constant memory. It builds on
`unit_layouts`. The tables of all layers lie side by side, (4, units), and are judged for all layers
and several records at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hookkit.moments.unit_layouts import can_saturate

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
        older, newer: (4, units) of the two halves of the window.
        row_of: (units,) int64, whose unit it is.
        bounded: (units,) bool, whether it can be saturated.
        places: by row the first of its units, and how many they are.
    """

    window: int
    older: Tensor
    newer: Tensor
    row_of: Tensor
    bounded: Tensor
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def blank(cls, window: int, device: torch.device) -> UnitTables:
        """Without units."""
        none, table = torch.zeros(0, dtype=torch.int64, device=device), blank_table(0, device)
        return cls(window, table, table, none, none.bool())

    @property
    def half(self) -> int:
        """Records in each half of the window."""
        return max(self.window // 2, 1)

    @property
    def n_units(self) -> int:
        """Of all rows."""
        return len(self.row_of)

    def with_row(self, row: int, n: int, bounded: bool) -> UnitTables:
        """With `n` units of `row`, that were not seen so far, in place of those that it had."""
        first, old = self.places.get(row, (self.n_units, 0))
        rest = {r: (i - old * (i > first), k) for r, (i, k) in self.places.items() if r != row}
        with torch.inference_mode(False):
            blank = blank_table(n, self.row_of.device)
            return replace(
                self,
                older=self.moved(row, self.older, blank),
                newer=self.moved(row, self.newer, blank),
                row_of=self.moved(row, self.row_of, self.row_of.new_full((n,), row)),
                bounded=self.moved(row, self.bounded, self.bounded.new_full((n,), bounded)),
                places={**rest, row: (self.n_units - old, n)},
            )

    def moved(self, row: int, table: Tensor, new: Tensor) -> Tensor:
        """`table` (…, units) without the units of `row`, and with `new` ones behind the others.

        By slices, since an index would make a GPU wait.
        """
        first, n = self.places.get(row, (self.n_units, 0))
        return torch.cat([table[..., :first], table[..., first + n :], new], -1)

    def record(self, tables: Tensor, after: int, rows: int) -> tuple[Tensor, Tensor, UnitTables]:
        """Records with these (n, 4, units) tables, of which only the last may end half a window.

        The number of the record that comes next is `after`.

        Returns:
            (n, rows, 6) shares of the units that ran in each record; (n, units, 4) counts, by
            which several ranks are judged together; and the tables as they are afterwards.
        """
        seen = _joined(_accumulated(tables), self.newer)
        newer, older = seen[-1], self.older
        shares = self._shares(_joined(seen, older), tables[:, 2] > 0, rows)
        counts = torch.cat([(tables[:, :1] > 0).to(tables.dtype), tables[:, 1:]], 1)
        if after % self.half == 0:
            older, newer = newer, blank_table(self.n_units, newer.device)
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
        """(n,) bools of a row's units in the window: never above 0, only 0, dormant, saturated."""
        if row not in self.places:
            return None
        start, n = self.places[row]
        seen = _joined(self.older, self.newer)[None, :, start : start + n]
        mean = (seen[:, 1] / seen[:, 2].clamp(min=1)).mean()
        return tuple(flags[0] for flags in _verdict(seen, mean))

    def blanked(self) -> UnitTables:
        """The same units, not seen so far."""
        blank = blank_table(self.n_units, self.row_of.device)
        return replace(self, older=blank, newer=blank)

    def on_cpu(self) -> UnitTables:
        """A copy on the CPU."""
        names = ("older", "newer", "row_of", "bounded")
        return replace(self, **{name: getattr(self, name).cpu() for name in names})


def blank_table(units: int, device: torch.device) -> Tensor:
    """(4, units) float32 of units that were not seen."""
    table = torch.zeros(4, units, dtype=torch.float32, device=device)
    table[0] = -math.inf
    return table


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

    `layers` are the rows of the units, side by side: row, class of the module, how many. `window`
    is in records, of which a column has `stride`.
    """
    half = -(-max(window // 2, 1) // stride)
    tables = UnitTables.blank(2 * half, torch.device("cpu"))
    for row, kind, n in layers:
        tables = tables.with_row(row, n, can_saturate(kind))
    shares = torch.zeros(len(counts), rows, len(FIELDS), dtype=torch.float32, device="cpu")
    for i, column in enumerate(counts):
        table, _, tables = tables.record(column.t()[None], i + 1, rows)
        shares[i] = table[0]
    return shares, tables
