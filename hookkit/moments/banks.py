"""The tables of one device: what hooks handed in since the last step, and the ring of the past.

Everything is allocated before it is needed and stays on the data's device; nothing here reads a
value of a tensor that could still be on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.moments import kernels
from hookkit.moments.histograms import ABSENT, Bins, coprime_stride
from hookkit.moments.moments import (
    EMPTY,
    N_FIELDS,
    array_of,
    empty_rows,
    flat,
    merge,
    merge_row,
    moments,
)
from hookkit.moments.rings import Ring
from hookkit.moments.sweeps import Reader, cpu_row
from hookkit.moments.units import Units


@dataclass(frozen=True)
class Options:
    """What is counted, and how.

    Args:
        eps: values of at most this size are near zero.
        bins: of the histogram, None for none.
        sample: values per layer and call that go into the histogram.
        exact_hist: count every value instead of a sample.
        window: records over which units are judged; 0 not to look at units.
    """

    eps: float = 0.05
    bins: Bins | None = None
    sample: int = 4096
    exact_hist: bool = False
    window: int = 0


# On a CPU a small tensor is copied and looked at later, when there are many: what it costs is not
# the reading but the code for it, which the model has driven out of the cache, and drives it out
# in its turn. Records wait likewise: so many at most, of so many values (1 MiB, as many sampled).
SMALL = 1 << 14
MOST_LATE = 32
LATE_VALUES = 1 << 18


@dataclass(slots=True)
class Late:
    """A record that is not in the ring yet: its column, and what is known or yet to be read."""

    column: int
    into: bool
    most: int
    turn: int
    seen: dict[int, tuple[float, ...]]
    unread: dict[int, tuple[Any, int]]


class Bank:
    """The tables of one device; a row per layer.

    Args:
        options: what is counted.
        device: where.
        rows: how many to begin with.

    Attributes:
        live: (rows, 9) moments of the batch at hand (on CUDA in `sums`, see `kernels`; on the CPU
            in `seen`, by row, as Python floats, or still `unread`).
        late: records that wait for others before they go into the ring; CPU only.
        kept: the same of earlier batches of this optimizer step (gradient accumulation), or None.
        samples: (rows, sample) float32 of the last call of each row in this batch.
        counts: (rows, width) int64 of earlier calls, and of everything with `exact_hist`.
    """

    live: Tensor
    sums: Tensor
    samples: Tensor
    counts: Tensor

    def __init__(self, options: Options, device: torch.device, rows: int) -> None:
        self.options, self.device = options, device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.turn = self.rows = 0
        self.kept: Tensor | None = None
        self.kept_counts: Tensor | None = None
        self.sampled: dict[int, int] = {}
        self.counted = False  # whether `counts` has anything
        self.hist: Ring | None = None
        self.fused = kernels.serves(device)
        self.on_cpu = device.type == "cpu" and not self.fused
        self.seen: dict[int, tuple[float, ...]] = {}
        self.unread: dict[int, tuple[Any, int]] = {}  # row: values, how often each counts
        self.late: list[Late] = []
        self.n_unread = self.n_late = 0  # values that wait: of the batch at hand, of records
        self.patient = self.on_cpu and not (options.window or options.exact_hist)
        self.units = Units(options.window, device) if options.window else None
        with torch.inference_mode(False):
            self._grow(max(rows, 1))
            self.ring = Ring(self.rows, N_FIELDS, self.dtype, device, counts=False)
            if options.bins:
                dtype = torch.int64 if options.exact_hist else torch.int32
                self.hist = Ring(self.rows, options.bins.width - 1, dtype, device, counts=True)

    def _grow(self, rows: int) -> None:
        """Room for `rows`, keeping what is there."""
        self.flush()
        live = empty_rows(rows, self.device, self.dtype)
        if self.rows:
            live[: self.rows] = self.live
        self.live, self.fresh = live, empty_rows(rows, self.device, self.dtype)
        if self.fused:
            sums = kernels.blank(rows, self.device)
            if self.rows:
                sums[: self.rows] = self.sums
            self.sums = sums
        self.slots = MOST_LATE
        if self.options.bins:
            size = rows * self.options.sample
            self.slots = max(min(LATE_VALUES // size, MOST_LATE), 1) if self.on_cpu else 1
            shape = self.slots, rows, self.options.sample
            blank = torch.full(shape, ABSENT, dtype=torch.int32, device=self.device)
            staged = blank.view(torch.float32)
            width = self.options.bins.width
            counts = torch.zeros(rows, width, dtype=torch.int64, device=self.device)
            if self.rows:
                staged[0, : self.rows], counts[: self.rows] = self.samples, self.counts
            self.staged, self.counts = staged, counts
            self.staged_arrays: Any = staged.numpy() if self.on_cpu else None
            self._use_slot(0)
        self.rows = rows

    def _use_slot(self, slot: int) -> None:
        """Has the samples of the batch at hand go to `slot`."""
        self.samples = self.staged[slot]
        self.sample_arrays: Any = self.staged_arrays[slot] if self.on_cpu else None

    def take(self, row: int, t: Tensor, kind: str) -> None:
        """Add the plain tensor `t`, which a module of class `kind` gave, to `row`."""
        if row >= self.rows:
            with torch.inference_mode(False):
                self._grow(max(2 * self.rows, row + 1))
        x, times = flat(t)
        values = array_of(x) if self.on_cpu else None
        known = row in self.seen or row in self.unread
        if self.patient and values is not None and len(values) <= SMALL and not known:
            self.unread[row] = values.copy(), times
            self.n_unread += len(values)
            if self.n_unread > LATE_VALUES:
                self._read()
            return
        if known:
            self._read()
        reader = None
        if self.units is not None:
            reader = None if values is None else self.units.reader(row, t, kind)
            if reader is None:
                self.units.take(row, t, kind)
        self._take(row, x, values, times, reader)

    def _read(self) -> None:
        """Look at what was only copied of the batch at hand."""
        for row in list(self.unread):
            values, times = self.unread[row]
            self._take(row, torch.from_numpy(values), values, times, None)
            del self.unread[row]  # only now: an interrupt loses nothing, nor counts it twice
        self.n_unread = 0

    def _take(self, row: int, x: Tensor, values: Any, times: int, reader: Reader | None) -> None:
        if self.on_cpu:
            self._take_cpu(row, x, values, times, reader)
        else:
            self._take_device(row, x, times)
        if self.options.exact_hist:
            self._count_all(row, x, times)
        elif self.options.bins:
            self._sample(row, x, values)

    def _take_cpu(
        self, row: int, x: Tensor, values: Any, times: int, reader: Reader | None
    ) -> None:
        new: Any = cpu_row(x, self.options.eps, values, reader)
        if times > 1:
            n, mean, m2, lo, hi, near, zero, bad = new
            new = (n * times, mean, m2 * times, lo, hi, near * times, zero * times, bad * times)
        calls, *old = self.seen.get(row, (0.0,))
        self.seen[row] = (calls + 1, *(merge_row(old, new) if calls else new))

    def _take_device(self, row: int, x: Tensor, times: int) -> None:
        if self.fused:
            kernels.add(x, self.sums[row], self.options.eps, times)
            return
        new = moments(x, self.options.eps, self.dtype)
        if times > 1:
            for field in (1, 3, 6, 7, 8):
                new[field] *= times
        self.live[row] = merge(self.live[row], new)

    def _count_all(self, row: int, x: Tensor, times: int) -> None:
        assert self.options.bins is not None
        self.counted = True
        for part in torch.split(x, 1 << 20):
            self.counts[row] += (
                self.options.bins.count(_narrow(part).float().unsqueeze(0))[0] * times
            )

    def _sample(self, row: int, x: Tensor, values: Any) -> None:
        assert self.options.bins is not None
        size, n = self.options.sample, x.numel()
        if row in self.sampled:  # a module that runs twice: count its first sample now
            self.counted = True
            self.counts[row] += self.options.bins.count(self.samples[row : row + 1])[0]
            if n < self.sampled[row]:
                self.samples[row].view(torch.int32)[n:] = ABSENT
        part = slice(0, n)
        if n > size:
            stride = coprime_stride(n, size)
            start = self.turn % stride  # another part of the tensor at each step
            part = slice(start, start + stride * (size - 1) + 1, stride)
        self.sampled[row] = k = min(n, size)
        if values is not None and x.dtype is torch.float32:
            self.sample_arrays[row, :k] = values[part]  # as below, in a third of the time
        else:
            self.samples[row, :k].copy_(_narrow(x[part]))

    def _all_counts(self) -> Tensor:
        """(rows, width) int64 of everything seen in this batch."""
        assert self.options.bins is not None
        if self.options.exact_hist:
            return self.counts.clone()
        return self.counts + self.options.bins.count(self.samples)

    def drop(self) -> None:
        """Forget the batch at hand."""
        if self.on_cpu:
            self.seen.clear()
            self.unread.clear()
            self.n_unread = 0
        elif self.fused:
            kernels.clear(self.sums)
        else:
            self.live.copy_(self.fresh)
        if self.units is not None:
            self.units.drop()
        # on a device always: what a CUDA graph replays is written without Python being told
        if self.counted or (self.options.bins and not self.on_cpu):
            self.counts.zero_()
            self.counted = False
        if self.sampled or (self.options.bins and not self.on_cpu):
            self.samples.view(torch.int32).fill_(ABSENT)
            self.sampled.clear()

    def fold(self, finite_only: bool = False) -> None:
        """Keep the batch at hand (if it is finite throughout) for the step it belongs to."""
        self._read()
        live = self._live()
        if finite_only:
            fine = live[:, -1].sum() == 0
            live = torch.where(fine, live, self.fresh)
            if self.options.bins:
                self.counts *= fine
                bits = self.samples.view(torch.int32)
                bits.copy_(torch.where(fine, bits, ABSENT))
        self.kept = self._with_kept(live)
        if self.options.bins:
            self.kept_counts = self._counts()
        if self.units is not None:
            self.units.fold()
        self.drop()

    def forget(self) -> None:
        """Forget the batch at hand and those kept for this step."""
        self.kept = self.kept_counts = None
        if self.units is not None:
            self.units.forget()
        self.drop()

    def _live(self) -> Tensor:
        """(rows, 9) moments of the batch at hand."""
        if self.on_cpu:
            self._read()
            return self._table([self.seen])[0]
        return kernels.collapse(self.sums) if self.fused else self.live.clone()

    def _table(self, seen: list[dict[int, tuple[float, ...]]]) -> Tensor:
        """(len(seen), rows, 9) float64 moments."""
        rows = range(self.rows)
        return torch.from_numpy(np.array([[one.get(row, EMPTY) for row in rows] for one in seen]))

    def _with_kept(self, rows: Tensor) -> Tensor:
        """`rows` merged with what earlier batches of this step gave."""
        if self.kept is not None:
            n = len(self.kept)
            rows[:n] = merge(self.kept, rows[:n])
        return rows

    def _counts(self) -> Tensor:
        counts, kept = self._all_counts(), self.kept_counts
        if kept is not None:
            counts[: len(kept)] += kept
        return counts

    def commit(self, column: int, into: bool, most: int) -> None:
        """Put everything seen since the last commit into the ring, of `most` columns in the end."""
        if self.on_cpu and self.kept is None and not self.counted:
            self._commit_late(Late(column, into, most, self.turn, self.seen, self.unread))
            return
        self._read()
        self.flush()
        self.ring.put(column, self._with_kept(self._live()), into, most)
        if self.hist is not None:
            self.hist.put(column, self._counts()[:, :-1], into, most)
        if self.units is not None:
            self.units.commit(column, into, self.rows, most)
        self.forget()

    def _commit_late(self, record: Late) -> None:
        """As `commit`, but into the ring together with others."""
        self.late.append(record)
        self.n_late += self.n_unread
        self.seen, self.unread, self.n_unread = {}, {}, 0
        if self.units is not None:
            self.units.commit(record.column, record.into, self.rows, record.most)
            self.units.forget()
        self.sampled.clear()
        if len(self.late) >= self.slots or self.n_late > LATE_VALUES:
            self.flush()
        elif self.hist is not None:
            self._use_slot(len(self.late))

    def flush(self) -> None:
        """Bring the ring up to the last commit."""
        late = self.late
        if not late:
            return
        self._read_late(late)
        tables = self._table([record.seen for record in late])
        counts: Any = [None] * len(late)
        if self.hist is not None and self.options.bins is not None:
            staged = self.staged[: len(late)]
            found = self.options.bins.count(staged.view(-1, self.options.sample))
            counts = found.view(len(late), self.rows, -1)[..., :-1]
        for record, table, count in zip(late, tables, counts, strict=True):
            self.ring.put(record.column, table, record.into, record.most)
            if self.hist is not None:
                self.hist.put(record.column, count, record.into, record.most)
        if self.hist is not None:
            if self.sampled:  # the batch at hand goes on in the first slot
                staged[0] = self.samples
                self.samples.view(torch.int32).fill_(ABSENT)
                staged = staged[1:]
            staged.view(torch.int32).fill_(ABSENT)
            self._use_slot(0)
        self.late, self.n_late = [], 0  # last: an interrupt loses nothing

    def _read_late(self, late: list[Late]) -> None:
        """Look at what was only copied of records that wait; the batch at hand is kept apart."""
        apart = self.seen, self.unread, self.n_unread, self.sampled, self.turn
        try:
            for slot, record in enumerate(late):
                self.seen, self.unread, self.sampled = record.seen, record.unread, {}
                self.turn = record.turn
                if self.hist is not None:
                    self._use_slot(slot)
                self._read()
        finally:
            self.seen, self.unread, self.n_unread, self.sampled, self.turn = apart
            if self.hist is not None and len(late) < self.slots:
                self._use_slot(len(late))

    def halve(self, n: int) -> None:
        """Halve the resolution of the first `n` columns."""
        self.flush()
        for ring in self._rings():
            ring.halve(n)

    def _rings(self) -> list[Ring]:
        units = None if self.units is None else self.units.ring
        return [ring for ring in (self.ring, self.hist, units) if ring is not None]

    @property
    def n_bytes(self) -> int:
        """Memory of all tables and rings."""
        tables = [self.live, self.fresh, *(ring.data for ring in self._rings())]
        if self.options.bins:
            tables += [self.staged, self.counts]
        waiting = 4 * (self.n_late + self.n_unread)
        return waiting + sum(t.numel() * t.element_size() for t in tables)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the past only (a `Tally` has put it on the CPU before)."""
        self.flush()
        names = ("options", "rows", "turn", "ring", "hist", "units")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"], torch.device("cpu"), state["rows"])  # type: ignore[misc]
        self.__dict__.update(state)


_MOST = torch.finfo(torch.float32).max


def _narrow(x: Tensor) -> Tensor:
    """Finite float64 values stay finite in float32."""
    if x.dtype is not torch.float64:
        return x
    return torch.where(torch.isinf(x), x, x.clamp(-_MOST, _MOST))
