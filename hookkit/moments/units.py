"""Dead, dormant and saturated units (channels): judged over a window of steps, not one batch.

A unit is one index of a layer's channel dimension. Kept per layer: the units' greatest value and
sums of |x| over the window, as two halves of which the older is thrown away when the newer is
full; so a judgement rests on `window / 2` to `window` records, in constant memory.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hookkit.moments.rings import Ring
from hookkit.moments.sweeps import CHUNK

TAU = 0.025
"""A unit whose mean |x| is at most this share of its layer's mean is dormant.

Source: Sokar et al. 2023, "The Dormant Neuron Phenomenon in Deep Reinforcement Learning", eq. 1.
"""

TWO_SIDED = ("Tanh", "Hardtanh", "Softsign")
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


class Units:
    """What a bank knows of the units of its rows, all rows side by side in flat (4, units) tables.

    A table holds of each unit the greatest value, the sum of |x|, how many values, and how many
    of them are saturated.

    Args:
        window: records that a judgement looks back on.
        device: of the data.
    """

    FIELDS = ("dead", "dormant", "saturated", "n", "n_saturable")

    def __init__(self, window: int, device: torch.device) -> None:
        self.window, self.device, self.turn = window, device, 0
        self.places: dict[int, tuple[int, int]] = {}
        self._n_left = 0  # units that are nobody's any more
        self.live, self.kept = self._blank(0), self._blank(0)
        self.older, self.newer = self._blank(0), self._blank(0)
        self.row_of = torch.zeros(0, dtype=torch.int64, device=device)
        self.bounded = torch.zeros(0, dtype=torch.bool, device=device)
        self.ring = Ring(1, len(self.FIELDS), torch.float32, device, counts=True)

    def _blank(self, n: int) -> Tensor:
        with torch.inference_mode(False):
            table = torch.zeros(4, n, dtype=torch.float32, device=self.device)
            table[0] = -math.inf
        return table

    def _place(self, row: int, n: int, bounded: bool) -> int:
        """Where in `live` are `row`'s units; made anew when their number changes."""
        start, size = self.places.get(row, (0, -1))
        if size != n:
            if size >= 0:
                self._leave(row)
            start = self.live.shape[1]
            self.places[row] = start, n
            with torch.inference_mode(False):
                for name in ("live", "kept", "older", "newer"):
                    setattr(self, name, torch.cat([getattr(self, name), self._blank(n)], 1))
                mine = torch.full((n,), row, device=self.device)
                self.row_of = torch.cat([self.row_of, mine])
                flags = torch.full((n,), bounded, device=self.device)
                self.bounded = torch.cat([self.bounded, flags])
            self._moved()
        return start

    def _leave(self, row: int) -> None:
        """Its units are nobody's; when there are many of those the tables are closed up."""
        start, size = self.places.pop(row)
        self.row_of[start : start + size] = _NOBODY
        self._n_left += size
        if self._n_left <= max(self.live.shape[1] // 2, 1024):
            return
        with torch.inference_mode(False):
            for name in ("live", "kept", "older", "newer", "row_of", "bounded"):
                table = getattr(self, name)
                parts = [table[..., at : at + n] for at, n in self.places.values()]
                setattr(self, name, torch.cat([table[..., :0], *parts], -1))  # no index: no wait
        ends = accumulate(n for _, n in self.places.values())
        places = zip(self.places.items(), ends, strict=True)
        self.places = {other: (end - n, n) for (other, (_, n)), end in places}
        self._n_left = 0

    def _moved(self) -> None:
        """The tables lie elsewhere now."""

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

    def fold(self) -> None:
        """Keep the batch at hand for the step it belongs to."""
        _join(self.kept, self.live)
        _clear(self.live)

    def forget(self) -> None:
        """Forget everything since the last commit."""
        _clear(self.live)
        _clear(self.kept)

    def commit(self, column: int, into: bool, rows: int, most: int) -> None:
        """Close a record: (rows, 5) shares go into the ring."""
        self.fold()
        _join(self.newer, self.kept)
        self.turn += 1
        self.ring.put(column, self._judge(rows), into, most)
        _clear(self.kept)
        if self.turn % max(self.window // 2, 1) == 0:
            self.older, self.newer = self.newer, self.older
            _clear(self.newer)

    def _judge(self, rows: int) -> Tensor:
        """(rows, 5): the shares of those that ran in this record, and ones that say so."""
        dead, dormant, saturated = self._verdict(rows)
        ran = self.kept[2] > 0
        flags = torch.stack([dead, dormant, saturated, ran, ran & self.bounded], 1).float()
        table = self._by_row(flags, rows)
        n = self._by_row(torch.ones_like(flags[:, :1]), rows)
        return torch.where(table[:, 3:4] > 0, table / n.clamp(min=1), 0.0)

    def _verdict(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each unit over the window: is it dead, dormant, saturated? (units,) bool each."""
        seen = _join(self.older.clone(), self.newer)
        size = seen[1] / seen[2].clamp(min=1)
        sums = self._by_row(torch.stack([size, torch.ones_like(size)], 1), rows)
        mean = (sums[:, 0] / sums[:, 1].clamp(min=1))[self.row_of.clamp(max=rows - 1)]
        ran = seen[2] > 0
        return (seen[0] <= 0) & ran, (size <= TAU * mean) & ran, seen[3] > 0.5 * seen[2]

    def _by_row(self, values: Tensor, rows: int) -> Tensor:
        """Sums over the units of each row: (units, k) → (rows, k)."""
        total = values.new_zeros(rows + 1, values.shape[1])
        return total.index_add_(0, self.row_of.clamp(max=rows), values)[:rows]

    def now(self, row: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Which units are dead, dormant, saturated over the window: (units,) bool; None unseen."""
        if row not in self.places:
            return None
        start, n = self.places[row]
        dead, dormant, saturated = self._verdict(max(self.places) + 1)
        part = slice(start, start + n)
        return dead[part], dormant[part], saturated[part]

    def read(self, n: int, rows: int) -> Tensor:
        """(n, rows, 5) on the CPU: sums of shares and how many records they are of."""
        mine = self.ring.read(n)[:, :rows].double()
        whole = torch.zeros(n, rows, len(self.FIELDS), dtype=torch.float64, device="cpu")
        whole[:, : mine.shape[1]] = mine
        return whole

    def __getstate__(self) -> dict[str, Any]:
        self.forget()
        state = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}
        self.ring.data = self.ring.data.cpu()
        return {**state, "device": torch.device("cpu")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._moved()


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


def _join(a: Tensor, b: Tensor) -> Tensor:
    """Puts greatest values and sums of `b` into `a`."""
    torch.maximum(a[0], b[0], out=a[0])
    a[1:] += b[1:]
    return a


def _clear(table: Tensor) -> None:
    table.zero_()
    table[0] = -math.inf


def shares(table: Any) -> dict[str, Any]:
    """`dead`, `dormant`, `saturated` as fractions, from (…, 5) sums; NaN where not judged."""
    n, n_saturable = table[..., 3].copy(), table[..., 4].copy()
    n[n == 0] = n_saturable[n_saturable == 0] = math.nan
    return {
        "dead": table[..., 0] / n,
        "dormant": table[..., 1] / n,
        "saturated": table[..., 2] / n_saturable,
    }
