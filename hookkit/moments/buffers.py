"""What hooks show on one device: preallocated tables of the current batch, a row per layer.

It builds on the ways to a row of moments (`moments`, `cpu`, `triton_kernels`) and on `histograms`
and `units`. Everything is allocated before it is needed and stays on the data's device; nothing
here makes the host wait for a device.

On a CPU the tables have several slots, one for each record: the current batch is written into the
first free one, and the records before it wait there until there are enough to count their samples,
judge their units and write them into the history together. For nets of a few milliseconds a step
those operations cost more than all reading, because the model has driven their code out of the
cache. On other devices there is one slot: a CUDA graph replays writes to fixed addresses.

The file is longer than 300 lines: it is one class, since the code that writes a slot, folds it and
reads it must agree on the layout of the tables.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.moments import triton_kernels
from hookkit.moments.cpu import cpu_row
from hookkit.moments.histograms import ABSENT, Bins, sample_of
from hookkit.moments.moments import (
    N_FIELDS,
    array_of,
    empty_rows,
    flat,
    merge,
    merge_row,
    moments,
)
from hookkit.moments.units import UnitTables

MOST_SLOTS = 32
WAITING_VALUES = 1 << 18
"""Most records that wait on a CPU, and most values that wait with them (1 MiB)."""


@dataclass(frozen=True)
class Options:
    """What is counted, and how.

    Args:
        eps: values of at most this size are near zero.
        bins: of the histogram, None for none.
        sample: values per layer and call that go into the histogram.
        exact_hist: count every value instead of a sample.
        window: records over which units are judged; 0 records no units.
    """

    eps: float = 0.05
    bins: Bins | None = None
    sample: int = 4096
    exact_hist: bool = False
    window: int = 0

    def __str__(self) -> str:
        hist = "no histogram" if self.bins is None else f"{self.bins.n} bins"
        counted = " of every value" * (self.bins is not None and self.exact_hist)
        units = f"units over {self.window} records" if self.window else "no units"
        return f"eps={self.eps:g}, {hist}{counted}, {units}"


class Buffers:
    """The tables of one device. All but the current batch changes in copies only (`folded`, …).

    Args:
        options: what is counted.
        device: where.
        rows: of the tables.
        slots: how many records they hold.

    Attributes:
        moments: (slots, rows, 9); `sums` in its place where a kernel adds them up.
        samples: (slots, rows, sample) float32, of the last call of each row in a batch.
        counts: (rows, width) int64 of earlier calls in the current batch, and of all its values
            with `exact_hist`.
        seen: by slot, the rows whose module was called.
        counted: whether `counts` has anything.
        kept: moments and counts of earlier batches of this step (gradient accumulation), or None.
        units: the tables of units, or None.
    """

    sums: Tensor
    samples: Tensor
    counts: Tensor

    def __init__(self, options: Options, device: torch.device, rows: int, slots: int = 1) -> None:
        self.options, self.device, self.rows, self.slots = options, device, max(rows, 1), slots
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.fused = triton_kernels.serves(device)
        self.by_array = reads_arrays(device)
        self.seen: list[set[int]] = [set() for _ in range(slots)]
        self.counted = False
        self.kept: tuple[Tensor, Tensor | None] | None = None
        self.units = UnitTables.blank(options.window, device, slots) if options.window else None
        with torch.inference_mode(False):
            self._allocate()

    def _allocate(self) -> None:
        rows, bins = self.rows, self.options.bins
        self.moments = empty_rows(self.slots * rows, self.device, self.dtype)
        self.moments = self.moments.view(self.slots, rows, N_FIELDS)
        if self.fused:
            self.sums = triton_kernels.blank(rows, self.device)
        if bins:
            self.counts = torch.zeros(rows, bins.width, dtype=torch.int64, device=self.device)
            shape = self.slots, rows, self.options.sample
            absent = torch.full(shape, ABSENT, dtype=torch.int32, device=self.device)
            self.samples = absent.view(torch.float32)
        if self.by_array:
            self.moments_array: Any = self.moments.numpy()
            self.samples_array: Any = self.samples.numpy() if bins else None

    def resized(self, slot: int, rows: int) -> Buffers:
        """Room for more rows, or for the records to come: the batch in `slot` is in the first."""
        new = Buffers(self.options, self.device, rows, self._slots_for(rows))
        new.counted, new.kept = self.counted, self.kept
        if slot < self.slots:
            new.seen[0] = self.seen[slot]
            new.moments[0, : self.rows] = self.moments[slot]
            if self.options.bins:
                new.samples[0, : self.rows].view(torch.int32).copy_(
                    self.samples[slot].view(torch.int32)
                )
        if self.fused:
            new.sums[: self.rows] = self.sums
        if self.options.bins:
            new.counts[: self.rows] = self.counts
        if self.units is not None:
            new.units = self.units.emptied(slot, new.slots)
        return new

    def _slots_for(self, rows: int) -> int:
        """Slots that fit the budget; one where the values of a record are not known yet."""
        if not self.by_array or self.options.exact_hist:
            return 1
        units = 0 if self.units is None else 4 * self.units.n_units
        size = rows * (self.options.sample if self.options.bins else N_FIELDS) + units
        return max(min(WAITING_VALUES // size, MOST_SLOTS), 1)

    @property
    def waits(self) -> bool:
        """Whether the current batch may wait for others before it goes into the history."""
        return self.slots > 1 and self.kept is None and not self.counted

    @property
    def wants_more_slots(self) -> bool:
        """Whether `resized` would give other slots than there are."""
        return self.by_array and self._slots_for(self.rows) != self.slots

    # --- the current batch

    def add(self, slot: int, row: int, t: Tensor, offset: int, array: Any = None) -> None:
        """Adds the plain tensor `t` to `row`.

        Args:
            offset: the number of the record, which selects the values that are sampled.
            array: all values of `t`, where numpy sees them.
        """
        values, times = (array, 1) if array is not None and self.by_array else flat(t.detach())
        if self.by_array and isinstance(values, Tensor):
            found = array_of(values)
            values = values if found is None else found
        if self.options.bins:
            self._count(slot, row, values, times, offset)
        top = math.inf
        if self.by_array:
            top = self._add_on_cpu(slot, row, values, times)
        elif self.fused:
            triton_kernels.add(values, self.sums[row], self.options.eps, times)
        else:
            new = _times(moments(values, self.options.eps, self.dtype), times)
            self.moments[slot, row] = merge(self.moments[slot, row], new)
        self.seen[slot].add(row)
        units = self.units
        if units is None or not (layout := units.layouts[row]).n:
            return
        is_float = isinstance(values, np.ndarray) and values.dtype == np.float32
        if is_float and layout.width and times == 1 and (array is not None or t.is_contiguous()):
            units.add_array(slot, row, values, top, offset)
        else:
            units.add(slot, row, t.detach())

    def _add_on_cpu(self, slot: int, row: int, values: Any, times: int) -> float:
        """Adds to the moments; the greatest size of the values."""
        new: Any = cpu_row(values, self.options.eps)
        *_, lo, hi, _, _, bad = new
        if times > 1:
            n, mean, m2, lo, hi, near, zero, bad = new
            new = (n * times, mean, m2 * times, lo, hi, near * times, zero * times, bad * times)
        calls = 0.0
        if row in self.seen[slot]:
            calls, *old = self.moments_array[slot, row].tolist()
            new = merge_row(old, new)
        self.moments_array[slot, row] = (calls + 1, *new)
        return math.inf if bad else max(-lo, hi)

    def _count(self, slot: int, row: int, values: Any, times: int, offset: int) -> None:
        """Adds the values to the histogram, or a sample of them to those that are counted later."""
        bins, size = self.options.bins, self.options.sample
        assert bins is not None
        if self.options.exact_hist:
            self.counted = True
            x = values if isinstance(values, Tensor) else torch.from_numpy(values)
            for part in torch.split(x, 1 << 20):
                self.counts[row] += bins.count(narrow(part).float().unsqueeze(0))[0] * times
            return
        if row in self.seen[slot]:  # a module that runs twice: count its first sample now
            self.counted = True
            self.counts[row] += bins.count(self.samples[slot, row : row + 1])[0]
            self.samples[slot, row].view(torch.int32).fill_(ABSENT)
        some = values[sample_of(len(values), size, offset)]
        if isinstance(some, np.ndarray) and some.dtype == np.float32:
            self.samples_array[slot, row, : len(some)] = some  # a third of the time of a `copy_`
        else:
            some = some if isinstance(some, Tensor) else torch.from_numpy(some)
            self.samples[slot, row, : len(some)].copy_(narrow(some))

    def clear(self, slot: int) -> None:
        """Empties the current batch, in place."""
        if self.fused:
            triton_kernels.clear(self.sums)
        else:
            self.moments[slot] = empty_rows(1, self.device, self.dtype)
        if self.options.bins:
            # always: a CUDA graph that is replayed writes without running any Python
            self.counts.zero_()
            self.samples[slot].view(torch.int32).fill_(ABSENT)
        self.counted = False
        self.seen[slot] = set()
        if self.units is not None:
            self.units.clear(slot)

    # --- the step

    def _moments_of(self, slot: int) -> Tensor:
        """(rows, 9) of all batches of this step."""
        rows = triton_kernels.collapse(self.sums) if self.fused else self.moments[slot].clone()
        if self.kept is not None:
            n = len(self.kept[0])
            rows[:n] = merge(self.kept[0], rows[:n])
        return rows

    def _counts_of(self, slot: int) -> Tensor | None:
        """(rows, width) int64 of all batches of this step."""
        bins = self.options.bins
        if bins is None:
            return None
        counts = self.counts.clone()
        if not self.options.exact_hist:
            counts += bins.count(self.samples[slot])
        if self.kept is not None and self.kept[1] is not None:
            counts[: len(self.kept[1])] += self.kept[1]
        return counts

    def folded(self, slot: int, finite_only: bool) -> Buffers:
        """With the current batch kept for its step, if it is finite throughout or need not be."""
        new, rows, counts = copy(self), self._moments_of(slot), self._counts_of(slot)
        if finite_only:
            live = triton_kernels.collapse(self.sums) if self.fused else self.moments[slot]
            fine = live[:, -1].sum() == 0
            before = self._kept_of_rows()
            rows = torch.where(fine, rows, before[0])
            counts = None if counts is None else torch.where(fine, counts, before[1])
        new.kept = rows, counts
        if self.units is not None:
            new.units = self.units.folded(slot)
        return new

    def _kept_of_rows(self) -> tuple[Tensor, Any]:
        """`kept`, for all rows."""
        rows = empty_rows(self.rows, self.device, self.dtype)
        counts = torch.zeros_like(self.counts) if self.options.bins else None
        if self.kept is not None:
            rows[: len(self.kept[0])] = self.kept[0]
            if counts is not None and self.kept[1] is not None:
                counts[: len(self.kept[1])] = self.kept[1]
        return rows, counts

    def with_kept(self, kept: tuple[Tensor, Tensor | None] | None) -> Buffers:
        """With these moments and counts kept for this step."""
        new = copy(self)
        new.kept = kept
        return new

    def with_units(self, units: UnitTables) -> Buffers:
        """With other tables of units."""
        new = copy(self)
        new.units = units
        return new

    def without_kept(self) -> Buffers:
        """With earlier batches of this step forgotten."""
        new = copy(self)
        new.kept = None
        if self.units is not None:
            new.units = self.units.without_kept()
        return new

    def waiting_records(self, n: int, after: int, rows: int) -> tuple[dict[str, Tensor], Buffers]:
        """The tables of the records in the first `n` slots, of which only the last may end half a
        window, and the buffers afterwards: the units' window has moved on.

        Args:
            after: the number of the record that comes next.
            rows: how many have names.

        Returns:
            (n, rows, fields) tables by name: "moments", "counts", "units", and "past", which is
            (n, units, 4).
        """
        new, bins = copy(self), self.options.bins
        tables = {"moments": self.moments[:n, :rows]}
        if bins is not None:
            found = bins.count(self.samples[:n].view(-1, self.options.sample))
            tables["counts"] = found.view(n, self.rows, -1)[:, :rows, :-1].int()
        if self.units is not None:
            live = self.units.live[:n]
            tables["units"], tables["past"], new.units = self.units.record(live, after, rows)
        return tables, new

    def record(self, after: int, rows: int) -> tuple[dict[str, Tensor], Buffers]:
        """The same of the current step, all of whose batches are in the first slot and `kept`."""
        new = self.without_kept()
        tables = {"moments": self._moments_of(0)[None, :rows]}
        if (counts := self._counts_of(0)) is not None:
            dtype = torch.int64 if self.options.exact_hist else torch.int32
            tables["counts"] = counts[None, :rows, :-1].to(dtype)
        if self.units is not None and new.units is not None:
            live = self.units.with_kept(0)[None]
            tables["units"], tables["past"], new.units = new.units.record(live, after, rows)
        return tables, new

    @property
    def n_bytes(self) -> int:
        """Memory of all tables."""
        tables = [self.moments] + ([self.samples, self.counts] if self.options.bins else [])
        tables += [] if self.units is None else [self.units.live]
        return sum(t.numel() * t.element_size() for t in tables)


def _times(row: Tensor, times: int) -> Tensor:
    """A row of values that each occur so many times."""
    for field in (1, 3, 6, 7, 8) if times > 1 else ():
        row[field] *= times
    return row


def reads_arrays(device: torch.device) -> bool:
    """Whether numpy reads the tensors of `device`."""
    return device.type == "cpu" and not triton_kernels.serves(device)


_MOST = torch.finfo(torch.float32).max


def narrow(x: Tensor) -> Tensor:
    """Finite float64 values stay finite in float32."""
    if x.dtype is not torch.float64:
        return x
    return torch.where(torch.isinf(x), x, x.clamp(-_MOST, _MOST))
