"""The tables of one device: what hooks handed in since the last step, and the ring of the past.

Everything is allocated before it is needed and stays on the data's device; nothing here reads a
value of a tensor that could still be on its way. `waiting.py` has the tables of the CPU.

`fold` and `commit` can be done twice: they get the number of the batch or record, what was done
before is passed over, and the batch's own tables are emptied last. So after an interrupt the
`Tally` does them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookkit.moments import triton_kernels
from hookkit.moments.histograms import ABSENT, Bins, sample_of
from hookkit.moments.history import Axis, Ring
from hookkit.moments.moments import N_FIELDS, empty_rows, flat, merge, moments
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

    def __str__(self) -> str:
        hist = "no histogram" if self.bins is None else f"{self.bins.n} bins"
        counted = " of every value" * (self.bins is not None and self.exact_hist)
        units = f"units over {self.window} records" if self.window else "no units"
        return f"eps={self.eps:g}, {hist}{counted}, {units}"


class Bank:
    """The tables of one device; a row per layer.

    Args:
        options: what is counted.
        device: where.
        rows: how many to begin with.

    Attributes:
        live: (rows, 9) moments of the batch at hand (where a kernel adds them up, in `sums`).
        kept: the same of earlier batches of this optimizer step (gradient accumulation), or None.
        turn: the number of the record that is being made.
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
        self.fused = triton_kernels.serves(device)
        self.turn = self.rows = 0
        # the number of the last batch that was kept, and what is kept: moments and counts
        self._kept: tuple[int, Tensor | None, Tensor | None] = -1, None, None
        self.sampled: dict[int, int] = {}
        self.counted = False  # whether `counts` has anything
        self.hist: Ring | None = None
        self.units = self._new_units() if options.window else None
        with torch.inference_mode(False):
            self._grow(max(rows, 1))
            self.ring = Ring(self.rows, N_FIELDS, self.dtype, device, counts=False)
            if options.bins:
                dtype = torch.int64 if options.exact_hist else torch.int32
                self.hist = Ring(self.rows, options.bins.width - 1, dtype, device, counts=True)

    @property
    def kept(self) -> Tensor | None:
        """Moments of earlier batches of this step."""
        return self._kept[1]

    def _new_units(self) -> Units:
        return Units(self.options.window, self.device)

    def _grow(self, rows: int) -> None:
        """Room for `rows`, keeping what is there; known by `self.rows` when all of it is."""
        old = self.rows
        self._grow_moments(old, rows)
        if self.options.bins:
            width = self.options.bins.width
            counts = torch.zeros(rows, width, dtype=torch.int64, device=self.device)
            if old:
                counts[:old] = self.counts[:old]
            self.counts = counts
            self._grow_samples(old, rows)
        self.rows = rows

    def _grow_moments(self, old: int, rows: int) -> None:
        live = empty_rows(rows, self.device, self.dtype)
        fresh = live.clone()
        if old:
            live[:old] = self.live[:old]
        if self.fused:
            sums = triton_kernels.blank(rows, self.device)
            if old:
                sums[:old] = self.sums[:old]
            self.sums = sums
        self.live, self.fresh = live, fresh

    def _grow_samples(self, old: int, rows: int) -> None:
        samples = self._no_samples(rows)
        if old:
            samples[:old] = self.samples[:old]
        self.samples = samples

    def _no_samples(self, *shape: int) -> Tensor:
        shape = *shape, self.options.sample
        blank = torch.full(shape, ABSENT, dtype=torch.int32, device=self.device)
        return blank.view(torch.float32)

    def begin_at(self, record: int) -> None:
        """Number the records from here on."""
        self.turn = record
        if self.units is not None:
            self.units.begin_at(record)

    def _room_for(self, row: int) -> None:
        if row >= self.rows:
            with torch.inference_mode(False):
                self._grow(max(2 * self.rows, row + 1))

    def take(self, row: int, t: Tensor, kind: str) -> None:
        """Add the plain tensor `t`, which a module of class `kind` gave, to `row`."""
        self._room_for(row)
        if self.units is not None:
            self.units.take(row, t, kind)
        x, times = flat(t)
        self._take(row, x, times)
        if self.options.bins:
            self._count(row, x, times)

    def take_array(self, row: int, array: Any, t: Tensor, kind: str) -> None:
        """Add the CPU tensor `t`, all of whose values `array` has."""
        self.take(row, t.detach(), kind)

    def _take(self, row: int, x: Tensor, times: int) -> None:
        """Add the flat `x`, each of whose values counts so many times, to the moments."""
        if self.fused:
            triton_kernels.add(x, self.sums[row], self.options.eps, times)
            return
        new = moments(x, self.options.eps, self.dtype)
        if times > 1:
            for field in (1, 3, 6, 7, 8):
                new[field] *= times
        self.live[row] = merge(self.live[row], new)

    def _count(self, row: int, x: Tensor, times: int) -> None:
        """Add `x` to the histogram, or its sample to those that go there."""
        if not self.options.exact_hist:
            self._sample(row, x)
            return
        assert self.options.bins is not None
        self.counted = True
        for part in torch.split(x, 1 << 20):
            found = self.options.bins.count(narrow(part).float().unsqueeze(0))[0]
            self.counts[row] += found * times

    def _sample(self, row: int, x: Tensor) -> None:
        part, k = self._part(row, x.numel())
        self.samples[row, :k].copy_(narrow(x[part]))

    def _part(self, row: int, n: int) -> tuple[slice, int]:
        """Which of `n` values are sampled this time, and how many those are."""
        assert self.options.bins is not None
        size = self.options.sample
        if row in self.sampled:  # a module that runs twice: count its first sample now
            self.counted = True
            self.counts[row] += self.options.bins.count(self.samples[row : row + 1])[0]
            if n < self.sampled[row]:
                self.samples[row].view(torch.int32)[n:] = ABSENT
        self.sampled[row] = k = min(n, size)
        return sample_of(n, size, self.turn), k

    def _live(self) -> Tensor:
        """(rows, 9) moments of the batch at hand."""
        return triton_kernels.collapse(self.sums) if self.fused else self.live.clone()

    def _counts(self) -> Tensor:
        """(rows, width) int64 of everything seen for this step."""
        assert self.options.bins is not None
        counts = self.counts.clone()
        if not self.options.exact_hist:
            counts += self.options.bins.count(self.samples)
        kept = self._kept[2]
        if kept is not None:
            counts[: len(kept)] += kept
        return counts

    def drop(self) -> None:
        """Forget the batch at hand."""
        self._drop_moments()
        if self.units is not None:
            self.units.drop()
        if self.options.bins:
            self._drop_counts()

    def _drop_moments(self) -> None:
        if self.fused:
            triton_kernels.clear(self.sums)
        else:
            self.live.copy_(self.fresh)

    def _drop_counts(self) -> None:
        # always: what a CUDA graph replays is written without Python being told
        self.counts.zero_()
        self.samples.view(torch.int32).fill_(ABSENT)
        self.counted = False
        self.sampled.clear()

    def fold(self, batch: int, finite_only: bool = False) -> None:
        """Keep the batch at hand (if it is finite throughout) for the step it belongs to."""
        if self._kept[0] < batch:
            self._keep(batch, finite_only)
        if self.units is not None:
            self.units.fold(batch)
        self.drop()

    def _keep(self, batch: int, finite_only: bool) -> None:
        live = self._live()
        if finite_only:
            fine = live[:, -1].sum() == 0
            live = torch.where(fine, live, empty_rows(len(live), self.device, self.dtype))
            if self.options.bins:
                self.counts *= fine
                bits = self.samples.view(torch.int32)
                bits.copy_(torch.where(fine, bits, ABSENT))
        self._kept = batch, self._with_kept(live), self._counts() if self.options.bins else None

    def keep_of(self, other: Bank) -> None:
        """Keep what `other`, of the same rows, has folded for this step, in place of its own."""
        _, rows, counts = other._kept
        if rows is not None:
            self._room_for(len(rows) - 1)
        self._kept = self._kept[0], rows, counts

    def forget(self) -> None:
        """Forget the batch at hand and those kept for this step."""
        self._kept = self._kept[0], None, None
        if self.units is not None:
            self.units.forget()
        self.drop()

    def _with_kept(self, rows: Tensor) -> Tensor:
        """`rows` merged with what earlier batches of this step gave."""
        kept = self._kept[1]
        if kept is not None:
            rows[: len(kept)] = merge(kept, rows[: len(kept)])
        return rows

    def commit(self, record: int, axis: Axis) -> None:
        """Put everything seen since the last commit into the ring, as this record of `axis`."""
        if self.turn <= record:
            self.catch_up(axis.stride)
            self.ring.put(record, self._with_kept(self._live())[None], axis.limit)
            if self.hist is not None:
                self.hist.put(record, self._counts()[None, :, :-1], axis.limit)
            if self.units is not None:
                self.units.commit(record, self.rows, axis.limit)
            self.turn = record + 1
        self.forget()

    def flush(self) -> None:
        """Bring the ring up to the last commit."""

    def catch_up(self, stride: int) -> None:
        """Halve the resolution until each column takes `stride` records."""
        for ring in self._rings():
            ring.catch_up(stride)

    def _rings(self) -> list[Ring]:
        units = [] if self.units is None else [self.units.ring, self.units.past]
        return [ring for ring in (self.ring, self.hist, *units) if ring is not None]

    def _tables(self) -> list[Tensor]:
        tables = [self.live, self.fresh]
        return [*tables, self.samples, self.counts] if self.options.bins else tables

    @property
    def n_bytes(self) -> int:
        """Memory of all tables and rings."""
        tables = self._tables() + [ring.data for ring in self._rings()]
        return sum(t.numel() * t.element_size() for t in tables)


_MOST = torch.finfo(torch.float32).max


def narrow(x: Tensor) -> Tensor:
    """Finite float64 values stay finite in float32."""
    if x.dtype is not torch.float64:
        return x
    return torch.where(torch.isinf(x), x, x.clamp(-_MOST, _MOST))
