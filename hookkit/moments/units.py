"""Dead, dormant and saturated units (channels): judged over a window of steps, not one batch.

A unit is one index of a layer's channel dimension. Kept per layer: the units' greatest value and
sums of |x| over the window, as two halves of which the older is thrown away when the newer is
full; so a judgement rests on `window / 2` to `window` records, in constant memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.moments.cpu import CHUNK
from hookkit.moments.history import Axis, Ring

TAU = 0.025
"""A unit whose mean |x| is at most this share of its layer's mean is dormant.

Source: Sokar et al. 2023, "The Dormant Neuron Phenomenon in Deep Reinforcement Learning", eq. 1.
"""

TWO_SIDED = ("Tanh", "Hardtanh", "Softsign")
CLAMPING: tuple[str | None, ...] = ("ReLU", "ReLU6")
"""Classes of which nothing but 0 comes of a value below 0."""

ONE_SIDED = ("Sigmoid", "Hardsigmoid")
_FIRST = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "SyncBatchNorm", "LazyConv")
_LAST = ("Linear", "LayerNorm", "Embedding", "Bilinear", "RMSNorm", "LSTM", "GRU", "RNN")


def channel_dim(kind: str, ndim: int) -> int:
    """Which dimension of a module's output counts its units, by the module's class name.

    Dimension 1 for convolutions, their norms and anything of four or more dimensions; the last
    for layers that work on features, and for what has two or three.

    >>> channel_dim("Conv2d", 4), channel_dim("ReLU", 4), channel_dim("Linear", 4)
    (1, 1, 3)
    """
    if ndim < 2:
        return 0
    if kind.startswith(_LAST) or kind.endswith(_LAST):
        return ndim - 1
    spatial = kind[-2] if kind.endswith("d") and "Conv" in kind else ""
    if spatial.isdigit() and ndim == int(spatial) + 1:
        return 0  # one image without a batch dimension
    return 1 if kind.startswith(_FIRST) or ndim >= 4 else ndim - 1


@dataclass(frozen=True)
class Tables:
    """What `Units` holds, all rows side by side; replaced as a whole, so never half done.

    A (4, units) table holds of each unit the greatest value, the sum of |x|, how many values, and
    how many of them are saturated.
    """

    live: Tensor
    """Of the batch at hand; written in place."""

    kept: Tensor
    """Of earlier batches of this step; in place too, emptied after each record."""

    older: Tensor
    newer: Tensor
    """Of the two halves of the window."""

    row_of: Tensor
    """(units,) int64: whose unit it is; `_NOBODY`'s have left."""

    bounded: Tensor
    """(units,) bool: whether it can be saturated."""

    places: dict[int, tuple[int, int]]
    """By row the first of its units, and how many they are."""

    n: int = 0
    """Number of the next record."""

    folded: int = -1
    """Number of the last batch that was kept."""

    past: Ring | None = None
    """For several ranks, (units, 4) of each record: in how many records of the half of the window a
    unit was seen above 0 (in one at least, if it was), and the sums. Merged over the ranks, they
    are judged as one process would have."""

    @classmethod
    def blank(cls, device: torch.device) -> Tables:
        """Of no units."""
        row_of = torch.zeros(0, dtype=torch.int64, device=device)
        bounded = torch.zeros(0, dtype=torch.bool, device=device)
        past = None
        if ranks.is_distributed():
            past = Ring(1, 4, torch.float32, device, counts=True)
        live, kept, older, newer = (_blank(0, device) for _ in range(4))
        return cls(live, kept, older, newer, row_of, bounded, {}, past=past)

    def with_row(self, row: int, n: int, bounded: bool) -> Tables:
        """With `n` units of a new `row`."""
        device, start = self.row_of.device, self.live.shape[1]
        live, kept, older, newer = (torch.cat([t, _blank(n, device)], 1) for t in self.four)
        row_of = torch.cat([self.row_of, torch.full((n,), row, device=device)])
        flags = torch.cat([self.bounded, torch.full((n,), bounded, device=device)])
        places = {**self.places, row: (start, n)}
        new = replace(self, live=live, kept=kept, older=older, newer=newer)
        return replace(new, row_of=row_of, bounded=flags, places=places)

    def without(self, row: int) -> Tables:
        """With the units of `row` nobody's; closed up when there are many of those."""
        start, size = self.places[row]
        row_of = self.row_of.clone()
        row_of[start : start + size] = _NOBODY
        places = {other: place for other, place in self.places.items() if other != row}
        if len(row_of) - sum(n for _, n in places.values()) <= max(len(row_of) // 2, 1024):
            return replace(self, row_of=row_of, places=places)
        parts = [slice(at, at + n) for at, n in places.values()]
        live, kept, older, newer, row_of, bounded = (
            torch.cat([t[..., :0], *(t[..., part] for part in parts)], -1)  # no index: no wait
            for t in (*self.four, row_of, self.bounded)
        )
        past = None if self.past is None else self.past.rows(parts)
        new = replace(self, live=live, kept=kept, older=older, newer=newer, past=past)
        return replace(new, row_of=row_of, bounded=bounded, places=_packed(places))

    @property
    def four(self) -> tuple[Tensor, ...]:
        """The tables of all four times."""
        return self.live, self.kept, self.older, self.newer


def _packed(places: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """`places` one after the other."""
    ends = accumulate(n for _, n in places.values())
    return {row: (end - n, n) for (row, (_, n)), end in zip(places.items(), ends, strict=True)}


def _blank(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        table = torch.zeros(4, n, dtype=torch.float32, device=device)
        table[0] = -math.inf
    return table


class Units:
    """What a bank knows of the units of its rows.

    Args:
        window: records that a judgement looks back on.
        device: of the data.
    """

    FIELDS = ("never_positive", "zero", "dormant", "saturated", "n", "n_saturable")

    def __init__(self, window: int, device: torch.device) -> None:
        self.window, self.device = window, device
        self._state: tuple[Tables, Any] = Tables.blank(device), None
        self._set(self.tables)
        self.ring = Ring(1, len(self.FIELDS), torch.float32, device, counts=True)

    def _set(self, tables: Tables) -> None:
        self._state = tables, self._views_of(tables)

    def _views_of(self, tables: Tables) -> Any:
        """What belongs to these tables in a subclass; set with them, at once."""

    @property
    def tables(self) -> Tables:
        """What is known."""
        return self._state[0]

    @property
    def past(self) -> Ring | None:
        """Counts of every record, for the ranks."""
        return self.tables.past

    @property
    def turn(self) -> int:
        """The number of the record that is being made."""
        return self.tables.n

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """By row the first of its units in the tables, and how many they are."""
        return self.tables.places

    @property
    def live(self) -> Tensor:
        """(4, units) of the batch at hand."""
        return self.tables.live

    @property
    def newer(self) -> Tensor:
        """(4, units) of the newer half of the window."""
        return self.tables.newer

    @property
    def n_bytes(self) -> int:
        """Of a record's counts for the ranks."""
        return 0 if self.past is None else 16 * self.live.shape[1]

    def begin_at(self, record: int) -> None:
        """Number the records from here on."""
        self._set(replace(self.tables, n=record))

    def _place(self, row: int, n: int, bounded: bool) -> int:
        """Where in `live` are `row`'s units; made anew when their number changes."""
        start, size = self.places.get(row, (0, -1))
        if size != n:
            with torch.inference_mode(False):
                tables = self.tables if size < 0 else self.tables.without(row)
                self._set(tables.with_row(row, n, bounded))
            start, _ = self.places[row]
        return start

    def take(self, row: int, x: Tensor, kind: str) -> None:
        """Add the plain tensor `x` of a module of class `kind`."""
        if x.numel() == 0 or x.ndim == 0:
            return
        dim = channel_dim(kind, x.ndim)
        n = x.shape[dim]
        bounded = kind.endswith((*TWO_SIDED, *ONE_SIDED))
        start = self._place(row, n, bounded)
        here = self.live[:, start : start + n]
        here[2] += x.numel() // n
        for part in _parts(x, dim):
            self._add(here, part.float(), dim, kind)

    def _add(self, here: Tensor, x: Tensor, dim: int, kind: str) -> None:
        size = x.abs()
        torch.maximum(here[0], _reduced(x, dim, torch.amax), out=here[0])
        here[1] += _reduced(size, dim, torch.sum)
        if kind.endswith((*TWO_SIDED, *ONE_SIDED)):
            full = size > 0.97 if kind.endswith(TWO_SIDED) else (x - 0.5).abs() > 0.47
            here[3] += _reduced(full, dim, torch.sum)

    def drop(self) -> None:
        """Forget the batch at hand."""
        _clear(self.live)

    def fold(self, batch: int) -> None:
        """Keep the batch at hand for the step it belongs to."""
        tables = self.tables
        if tables.folded < batch:
            kept = _joined(tables.kept, tables.live)
            self._set(replace(tables, kept=kept, folded=batch))
        _clear(self.live)

    def forget(self) -> None:
        """Forget everything since the last commit."""
        _clear(self.tables.live)
        _clear(self.tables.kept)

    def commit(self, record: int, rows: int, most: int) -> None:
        """Close a record: (rows, 6) shares go into the ring."""
        tables = self.tables
        if tables.n <= record:
            now = _joined(tables.kept, tables.live)
            newer = _joined(tables.newer, now)
            seen = replace(tables, kept=now, newer=newer)
            self.ring.put(record, _judged(seen, rows)[None], most)
            self._put_past(record, now[None], most)
            self._set(self._moved_on(newer, record + 1))
        self.forget()

    @property
    def _half(self) -> int:
        return max(self.window // 2, 1)

    def _moved_on(self, newer: Tensor, n: int) -> Tables:
        """The tables before record `n`: the older half of the window goes when the other ends."""
        if n % self._half:
            return replace(self.tables, newer=newer, n=n)
        blank = _blank(newer.shape[1], self.device)
        return replace(self.tables, older=newer, newer=blank, n=n)

    def _put_past(self, record: int, tables: Tensor, most: int) -> None:
        """(n, 4, units) of records, for the ranks."""
        if self.past is not None:
            counts = tables.clone()
            counts[:, 0] = counts[:, 0] > 0
            self.past.put(record, counts.transpose(1, 2), most)

    def now(self, row: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Which units are never above 0, dormant, saturated over the window: (units,) bool each.

        None if the row was not seen.
        """
        if row not in self.places:
            return None
        low, _, dormant, saturated = self._verdict_of(row)
        return low, dormant, saturated

    def zero(self, row: int) -> Tensor | None:
        """Which units have given nothing but 0 over the window: (units,) bool; None if not seen."""
        return self._verdict_of(row)[1] if row in self.places else None

    def _verdict_of(self, row: int) -> list[Tensor]:
        start, n = self.places[row]
        return [flags[start : start + n] for flags in _verdict(self.tables, max(self.places) + 1)]

    def counts(self, n: int) -> dict[int, Tensor]:
        """By row the (n, units, 4) counts of each record, on the CPU, for the ranks."""
        if self.past is None:
            return {}
        whole = self.past.read(n)
        return {row: whole[:, at : at + many] for row, (at, many) in self.places.items()}

    def read(self, n: int, rows: int) -> Tensor:
        """(n, rows, 6) on the CPU: sums of shares and how many records they are of."""
        mine = self.ring.read(n)[:, :rows].double()
        whole = torch.zeros(n, rows, len(self.FIELDS), dtype=torch.float64, device="cpu")
        whole[:, : mine.shape[1]] = mine
        return whole

    def __getstate__(self) -> dict[str, Any]:
        self.forget()
        here = {k: v.cpu() for k, v in vars(self.tables).items() if isinstance(v, Tensor)}
        tables = replace(self.tables, **here)  # type: ignore[arg-type]
        return {**self.__dict__, "_state": (tables, None), "device": torch.device("cpu")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set(self.tables)


def judged(counts: Tensor, layers: list[tuple[int, str, int]], window: int, axis: Axis) -> Units:
    """`Units` that have seen the (n, units, 4) `counts` of each column of `axis`.

    Args:
        layers: of the units, side by side: row, class of the module, how many.
        window: in records, of which a column has several when the axis has halved.
    """
    half = -(-max(window // 2, 1) // axis.stride)  # rounded up: see `Tables.past`
    units = Units(2 * half, torch.device("cpu"))
    tables = replace(units.tables, past=None)
    for row, kind, n in layers:
        tables = tables.with_row(row, n, kind.endswith((*TWO_SIDED, *ONE_SIDED)))
    units._set(tables)
    rows = max((row for row, _, _ in layers), default=-1) + 1
    for column, table in enumerate(counts):
        units._set(replace(units.tables, kept=table.t().clone()))
        units.commit(column, rows, len(counts))
    return units


def _judged(tables: Tables, rows: int) -> Tensor:
    """(rows, 6): the shares of the units that ran in this record (`kept`), and ones that say so."""
    ran = tables.kept[2] > 0
    flags = torch.stack([*_verdict(tables, rows), ran, ran & tables.bounded], 1).float()
    table = _by_row(tables.row_of, flags, rows)
    n = _by_row(tables.row_of, torch.ones_like(flags[:, :1]), rows)
    return torch.where(table[:, 4:5] > 0, table / n.clamp(min=1), 0.0)


def _verdict(tables: Tables, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each unit over the window: is it never above 0, only 0, dormant, saturated?

    (units,) bool each.
    """
    seen = _joined(tables.older, tables.newer)
    size = seen[1] / seen[2].clamp(min=1)
    sums = _by_row(tables.row_of, torch.stack([size, torch.ones_like(size)], 1), rows)
    mean = (sums[:, 0] / sums[:, 1].clamp(min=1))[tables.row_of.clamp(max=rows - 1)]
    ran = seen[2] > 0
    low = (seen[0] <= 0) & ran
    return low, low & (seen[1] == 0), (size <= TAU * mean) & ran, seen[3] > 0.5 * seen[2]


def _by_row(row_of: Tensor, values: Tensor, rows: int) -> Tensor:
    """Sums over the units of each row: (units, k) → (rows, k)."""
    total = values.new_zeros(rows + 1, values.shape[1])
    return total.index_add_(0, row_of.clamp(max=rows), values)[:rows]


_NOBODY = 1 << 40


def _parts(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """`x` in parts that stay in the cache of a CPU; whole elsewhere, where calls are dear."""
    if not x.is_cpu or not dim or x.numel() <= CHUNK:
        return (x,)
    if x.is_contiguous() and dim == x.ndim - 1:
        x = x.view(-1, x.shape[-1]).view(-1, *[1] * (x.ndim - 2), x.shape[-1])
    return torch.split(x, max(CHUNK * len(x) // x.numel(), 1))


def _reduced(x: Tensor, dim: int, by: Any) -> Tensor:
    """`x` reduced to its dimension `dim`; the batch first: that is vectorized over the rest."""
    if dim and x.ndim > 2:
        x, dim = by(x, 0), dim - 1
    rest = [d for d in range(x.ndim) if d != dim]
    return by(x, rest) if rest else x


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """Greatest values and sums of `a` and `b` together."""
    return torch.cat([torch.maximum(a[:1], b[:1]), a[1:] + b[1:]])


def _clear(table: Tensor) -> None:
    table.zero_()
    table[0] = -math.inf


def shares(table: Any) -> dict[str, Any]:
    """Fractions of units from (…, 6) sums; NaN where not judged.

    `dead` is what it is for a ReLU, or before one: never above 0. Of other layers `zero` is: see
    `Tally`.
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
