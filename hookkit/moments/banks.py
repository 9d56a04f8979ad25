"""The tables of one device: what hooks handed in since the last step, and the ring of the past.

Everything is allocated before it is needed and stays on the data's device; nothing here reads a
value of a tensor that could still be on its way. `waiting.py` has the tables of the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookkit.moments import kernels
from hookkit.moments.histograms import ABSENT, Bins, sample_of
from hookkit.moments.moments import N_FIELDS, empty_rows, flat, merge, moments
from hookkit.moments.rings import Ring
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
        self.fused = kernels.serves(device)
        self.turn = self.rows = 0
        self.kept: Tensor | None = None
        self.kept_counts: Tensor | None = None
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

    def _new_units(self) -> Units:
        return Units(self.options.window, self.device)

    def _grow(self, rows: int) -> None:
        """Room for `rows`, keeping what is there."""
        old, self.rows = self.rows, rows
        self._grow_moments(old)
        if self.options.bins:
            width = self.options.bins.width
            samples = self._blank_samples()
            counts = torch.zeros(rows, width, dtype=torch.int64, device=self.device)
            if old:
                samples[:old], counts[:old] = self.samples, self.counts
            self.samples, self.counts = samples, counts

    def _grow_moments(self, old: int) -> None:
        live = empty_rows(self.rows, self.device, self.dtype)
        self.fresh = live.clone()
        if old:
            live[:old] = self.live
        self.live = live
        if self.fused:
            sums = kernels.blank(self.rows, self.device)
            if old:
                sums[:old] = self.sums
            self.sums = sums

    def _blank_samples(self) -> Tensor:
        shape = self.rows, self.options.sample
        blank = torch.full(shape, ABSENT, dtype=torch.int32, device=self.device)
        return blank.view(torch.float32)

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
            kernels.add(x, self.sums[row], self.options.eps, times)
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
        return kernels.collapse(self.sums) if self.fused else self.live.clone()

    def _counts(self) -> Tensor:
        """(rows, width) int64 of everything seen for this step."""
        assert self.options.bins is not None
        counts = self.counts.clone()
        if not self.options.exact_hist:
            counts += self.options.bins.count(self.samples)
        if self.kept_counts is not None:
            counts[: len(self.kept_counts)] += self.kept_counts
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
            kernels.clear(self.sums)
        else:
            self.live.copy_(self.fresh)

    def _drop_counts(self) -> None:
        # always: what a CUDA graph replays is written without Python being told
        self.counts.zero_()
        self.samples.view(torch.int32).fill_(ABSENT)
        self.counted = False
        self.sampled.clear()

    def fold(self, finite_only: bool = False) -> None:
        """Keep the batch at hand (if it is finite throughout) for the step it belongs to."""
        live = self._live()
        if finite_only:
            fine = live[:, -1].sum() == 0
            live = torch.where(fine, live, empty_rows(len(live), self.device, self.dtype))
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

    def keep_of(self, other: Bank) -> None:
        """Keep what `other`, of the same rows, has folded for this step, in place of its own."""
        if other.kept is not None:
            self._room_for(len(other.kept) - 1)
        self.kept, self.kept_counts = other.kept, other.kept_counts

    def forget(self) -> None:
        """Forget the batch at hand and those kept for this step."""
        self.kept = self.kept_counts = None
        if self.units is not None:
            self.units.forget()
        self.drop()

    def _with_kept(self, rows: Tensor) -> Tensor:
        """`rows` merged with what earlier batches of this step gave."""
        if self.kept is not None:
            n = len(self.kept)
            rows[:n] = merge(self.kept, rows[:n])
        return rows

    def commit(self, column: int, into: bool, most: int) -> None:
        """Put everything seen since the last commit into the ring, of `most` columns in the end."""
        self.ring.put(column, self._with_kept(self._live()), into, most)
        if self.hist is not None:
            self.hist.put(column, self._counts()[:, :-1], into, most)
        if self.units is not None:
            self.units.commit(column, into, self.rows, most)
        self.forget()

    def flush(self) -> None:
        """Bring the ring up to the last commit."""

    def halve(self, n: int) -> None:
        """Halve the resolution of the first `n` columns."""
        self.flush()
        for ring in self._rings():
            ring.halve(n)

    def _rings(self) -> list[Ring]:
        units = None if self.units is None else self.units.ring
        return [ring for ring in (self.ring, self.hist, units) if ring is not None]

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
