"""What hooks show on one device: preallocated tables of the current batch, a row per layer.

It builds on the ways to a row of moments (`moments`, `cpu`, `triton_kernels`) and on `histograms`
and `units`. Everything is allocated before it is needed and stays on the data's device; nothing
here makes the host wait for a device.

On a CPU the tables have several slots, one for each record: the current batch is written into the
first free one, and the records before it wait there until there are enough to count their samples,
judge their units and write them into the history together. For nets of a few milliseconds a step
those operations cost more than all reading, because the model has driven their code out of the
cache. On other devices there is one slot: a CUDA graph replays writes to fixed addresses.

All batches of a step (gradient accumulation) are added up in the same slot. `folded` keeps a copy
of the slot as it is after a batch, and `clear` restores that copy, so a later batch of the step can
be cancelled by itself.

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

from hookkit.devices import widest_float
from hookkit.moments import triton_kernels
from hookkit.moments.cpu import cpu_row
from hookkit.moments.histograms import ABSENT, Bins, sample_of
from hookkit.moments.moments import N_FIELDS, array_of, empty_rows, flat, merge, merge_row, moments
from hookkit.moments.unit_layouts import UnitLayout
from hookkit.moments.units import UnitTables, blank_table

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

    Attributes:
        units: how units are judged, and those of the records so far; None without units.
        slots: how many records the tables hold; one at first.
        live: what is written in place. "moments": (slots, rows, 9), sums of them where a kernel
            adds those up; "counts": (slots, rows, width) int64 of what is not in `samples`;
            "units": (slots, 4, units).
        samples: (slots, rows, sample) float32, of the last call of each row in a batch.
        sampled: by slot, the rows with a sample.
        kept: `live` of earlier batches of this step (gradient accumulation), one slot; or None.
    """

    samples: Tensor

    def __init__(
        self, options: Options, device: torch.device, rows: int, units: UnitTables | None = None
    ) -> None:
        self.options, self.device, self.rows, self.slots = options, device, max(rows, 1), 1
        self.dtype = widest_float(device)
        self.fused = triton_kernels.serves(device)
        self.by_array = reads_arrays(device)
        self.kept: dict[str, Tensor] | None = None
        self.units = units
        if options.window and units is None:
            self.units = UnitTables.blank(options.window, device)
        self._allocate()

    def _allocate(self) -> None:
        self.sampled: list[set[int]] = [set() for _ in range(self.slots)]
        with torch.inference_mode(False):
            blank = self._blank().items()
            self.live = {name: t.expand(self.slots, *t.shape).clone() for name, t in blank}
            if self.options.bins:
                n = 0 if self.options.exact_hist else self.options.sample
                shape = self.slots, self.rows, n
                absent = torch.full(shape, ABSENT, dtype=torch.int32, device=self.device)
                self.samples = absent.view(torch.float32)
        self._see_arrays()

    def _see_arrays(self) -> None:
        if self.by_array:
            self.moments_array: Any = self.live["moments"].numpy()
            self.samples_array: Any = self.samples.numpy() if self.options.bins else None
            self.units_array: Any = self.live["units"].numpy() if self.units else None

    def _blank(self) -> dict[str, Tensor]:
        """`live` of a batch in which nothing ran."""
        rows, device, bins = self.rows, self.device, self.options.bins
        tables = {"moments": empty_rows(rows, device, self.dtype)}
        if self.fused:
            tables["moments"] = triton_kernels.blank(rows, device)
        if bins:
            tables["counts"] = torch.zeros(rows, bins.width, dtype=torch.int64, device=device)
        if self.units is not None:
            tables["units"] = blank_table(self.units.n_units, device)
        return tables

    def resized(self, slot: int, rows: int, slots: int | None = None) -> Buffers:
        """Room for more rows, or for the records to come: the batch in `slot` is in the first."""
        new = copy(self)
        new.rows, new.slots = rows, slots or self.best_slots
        new._allocate()
        if slot < self.slots:
            for name, t in self.live.items():
                new.live[name][0, : t.shape[1]] = t[slot]
            if self.options.bins:
                here = new.samples[0, : self.rows].view(torch.int32)
                here.copy_(self.samples[slot].view(torch.int32))
            new.sampled[0] = self.sampled[slot]
        return new

    @property
    def best_slots(self) -> int:
        """Slots that fit the budget."""
        if not self.by_array:
            return 1
        bins, size = self.options.bins, N_FIELDS
        if bins:
            size = 2 * bins.width if self.options.exact_hist else self.options.sample
        units = 0 if self.units is None else 4 * self.units.n_units
        return max(min(WAITING_VALUES // (self.rows * size + units), MOST_SLOTS), 1)

    # --- the current batch

    def add(
        self,
        slot: int,
        row: int,
        t: Tensor,
        offset: int,
        array: Any = None,
        layout: UnitLayout | None = None,
    ) -> None:
        """Adds the plain tensor `t` to `row`.

        Args:
            offset: the number of the record, which selects the values that are sampled.
            array: all values of `t`, where numpy sees them.
            layout: of its units, where they are counted.
        """
        t = t.detach() if t.requires_grad else t
        values, times = (array, 1) if array is not None and self.by_array else flat(t)
        if self.by_array and isinstance(values, Tensor):
            found = array_of(values)
            values = values if found is None else found
        chosen, top = slice(0, 0, 1), math.inf
        if self.options.bins:
            chosen = self._count(slot, row, values, times, offset)
        if self.by_array:
            top = self._add_on_cpu(slot, row, values, times)
        elif self.fused:
            samples = self.samples if self.options.bins else None
            sums, eps = self.live["moments"], self.options.eps
            triton_kernels.add(values, sums, row, eps, times, samples, chosen)
        else:
            new = _times(moments(values, self.options.eps, self.dtype), times)
            here = self.live["moments"][slot]
            here[row] = merge(here[row], new)
        if self.units is None or layout is None or not layout.n:
            return
        start, n = self.units.places[row]
        is_float = isinstance(values, np.ndarray) and values.dtype == np.float32
        if is_float and layout.width and times == 1 and (array is not None or t.is_contiguous()):
            here = self.units_array[slot, :, start : start + n]
            layout.add_array(here, values, top, offset)
        else:
            layout.add_tensor(self.live["units"][slot, :, start : start + n], t)

    def _add_on_cpu(self, slot: int, row: int, values: Any, times: int) -> float:
        """Adds to the moments; the greatest size of the values."""
        new: Any = cpu_row(values, self.options.eps)
        *_, lo, hi, _, _, bad = new
        if times > 1:
            n, mean, m2, lo, hi, near, zero, bad = new
            new = (n * times, mean, m2 * times, lo, hi, near * times, zero * times, bad * times)
        calls, here = 1.0, self.moments_array[slot]
        if here[row, 0]:
            calls, *old = here[row].tolist()
            calls, new = calls + 1, merge_row(old, new)
        here[row] = (calls, *new)
        return math.inf if bad else max(-lo, hi)

    def _count(self, slot: int, row: int, values: Any, times: int, offset: int) -> slice:
        """Adds the values to the histogram, or a sample of them to those that are counted later.

        Returns which values the kernel has to store as the sample; none where it is stored here.
        """
        bins, size = self.options.bins, self.options.sample
        assert bins is not None
        if self.options.exact_hist:
            x = values if isinstance(values, Tensor) else torch.from_numpy(values)
            for part in torch.split(x, 1 << 20):
                self.live["counts"][slot, row] += (
                    bins.count(narrow(part).float().unsqueeze(0))[0] * times
                )
            return slice(0, 0, 1)
        if row in self.sampled[slot]:  # a module that runs twice: count its first sample now
            self.live["counts"][slot, row] += bins.count(self.samples[slot, row : row + 1])[0]
            self.samples[slot, row].view(torch.int32).fill_(ABSENT)
        self.sampled[slot].add(row)
        chosen = sample_of(len(values), size, offset)
        if self.fused:
            return chosen
        some = values[chosen]
        if isinstance(some, np.ndarray) and some.dtype == np.float32:
            # a third of the time of a `copy_`
            self.samples_array[slot, row, : len(some)] = some
        else:
            some = some if isinstance(some, Tensor) else torch.from_numpy(some)
            self.samples[slot, row, : len(some)].copy_(narrow(some))
        return slice(0, 0, 1)

    def clear(self, slot: int) -> None:
        """Empties the current batch, in place: `live` is as the last `folded` left it.

        All of it: a CUDA graph that is replayed writes without running any Python.
        """
        for name, t in self._before().items():
            self.live[name][slot] = t
        if self.options.bins:
            self.samples[slot].view(torch.int32).fill_(ABSENT)
        self.sampled[slot] = set()

    def _before(self) -> dict[str, Tensor]:
        """`live` of this step without the current batch."""
        before = self._blank()
        for name, t in (self.kept or {}).items():
            before[name][: len(t)] = t
        return before

    # --- the step

    def _counts(self, slots: slice) -> Tensor:
        """(slots, rows, width) int64 of all values that were counted or sampled."""
        bins, counts = self.options.bins, self.live["counts"][slots]
        assert bins is not None
        if self.options.exact_hist:
            return counts
        return counts + bins.count(self.samples[slots].flatten(0, 1)).view_as(counts)

    def folded(self, slot: int, finite_only: bool) -> Buffers:
        """With the current batch kept for its step, if it is finite throughout or need not be."""
        now = {name: t[slot].clone() for name, t in self.live.items()}
        if self.options.bins:
            now["counts"] = self._counts(slice(slot, slot + 1))[0].clone()
        if finite_only:
            before = self._before()
            n_bad, n_before = (t["moments"][..., -1].sum() for t in (now, before))
            now = {name: torch.where(n_bad == n_before, now[name], t) for name, t in before.items()}
        return self.with_kept(now)

    def with_kept(self, kept: dict[str, Tensor] | None) -> Buffers:
        """With these tables kept for this step."""
        if kept is self.kept:
            return self
        new = copy(self)
        new.kept = kept
        return new

    def with_units_of(self, row: int, n: int, bounded: bool) -> Buffers:
        """With `n` units of `row`, none of which were seen, in place of those that it had."""
        new, old = copy(self), self.units
        assert old is not None
        new.units = old.with_row(row, n, bounded)
        with torch.inference_mode(False):
            blank = blank_table(n, self.device)
            blanks = blank.expand(self.slots, *blank.shape)
            new.live = self.live | {"units": old.moved(row, self.live["units"], blanks)}
            if self.kept:
                new.kept = self.kept | {"units": old.moved(row, self.kept["units"], blank)}
        new._see_arrays()
        return new

    def records(self, n: int, after: int, rows: int) -> tuple[dict[str, Tensor], Buffers]:
        """The tables of the records in the first `n` slots, and the buffers afterwards.

        Of these records only the last, which number `after` follows, may end half a window: the
        units' window has moved on. The tables are (n, rows, fields) by name: "moments", "counts",
        "units", and "past", which is (n, units, 4).
        """
        new, moments = copy(self), self.live["moments"][:n]
        if self.fused:
            moments = triton_kernels.collapse(moments[0])[None]
        tables = {"moments": moments[:, :rows]}
        if self.options.bins:
            dtype = torch.int64 if self.options.exact_hist else torch.int32
            tables["counts"] = self._counts(slice(n))[:, :rows, :-1].to(dtype)
        if self.units is not None:
            live = self.live["units"][:n]
            tables["units"], tables["past"], new.units = self.units.record(live, after, rows)
        return tables, new

    @property
    def n_bytes(self) -> int:
        """Memory of all tables."""
        return sum(t.nbytes for t in self.live.values()) + (
            self.samples.nbytes if self.options.bins else 0
        )


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
