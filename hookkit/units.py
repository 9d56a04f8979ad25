"""Dead, dormant and saturated units (channels): judged over a window of steps, not one batch.

A unit is one index of a layer's channel dimension. Kept per layer: the units' greatest value and
sums of |x| over the window, as two halves of which the older is thrown away when the newer is
full; so a judgement rests on `window / 2` to `window` records, in constant memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookkit.rings import Ring

TAU = 0.025
"""A unit whose mean |x| is at most this share of its layer's mean is dormant.

Source: Sokar et al. 2023, "The Dormant Neuron Phenomenon in Deep Reinforcement Learning", eq. 1.
"""

_TWO_SIDED = ("Tanh", "Hardtanh", "Softsign")
_ONE_SIDED = ("Sigmoid", "Hardsigmoid")
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
    """What a bank knows of the units of its rows.

    Args:
        window: records that a judgement looks back on.
        device: of the data.
    """

    FIELDS = ("dead", "dormant", "saturated", "n", "n_saturable")

    def __init__(self, window: int, device: torch.device) -> None:
        self.window, self.device, self.turn = window, device, 0
        self.live: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}
        self.halves: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self.kinds: dict[int, str] = {}
        self.ring = Ring(1, len(self.FIELDS), torch.float32, device, counts=True)

    def take(self, row: int, x: Tensor, kind: str) -> None:
        """Add the plain tensor `x` of a module of class `kind`."""
        if x.numel() == 0 or x.ndim == 0:
            return
        dim = channel_dim(kind, x.ndim)
        rest = [d for d in range(x.ndim) if d != dim]
        x = (
            x.float()
            if x.dtype in (torch.float16, torch.bfloat16) or not x.is_floating_point()
            else x
        )
        size = x.abs()
        parts = [x.amax(rest), size.sum(rest)] if rest else [x, size]
        parts.append(torch.full_like(parts[1], x.numel() / x.shape[dim]))
        if kind.endswith((*_TWO_SIDED, *_ONE_SIDED)):
            full = size > 0.97 if kind.endswith(_TWO_SIDED) else (x - 0.5).abs() > 0.47
            parts.append(full.sum(rest) if rest else full.float())
        new = torch.stack([p.float() for p in parts])
        self.live[row] = _joined(self.live.get(row), new)
        self.kinds[row] = kind

    def drop(self) -> None:
        """Forget the batch at hand."""
        self.live = {}

    def fold(self) -> None:
        """Keep the batch at hand for the step it belongs to."""
        for row, new in self.live.items():
            self.kept[row] = _joined(self.kept.get(row), new)
        self.live = {}

    def forget(self) -> None:
        """Forget everything since the last commit."""
        self.live, self.kept = {}, {}

    def commit(self, column: int, into: bool, rows: int) -> None:
        """Close a record: (rows, 5) shares go into the ring."""
        self.fold()
        self.turn += 1
        judged = {row: self._judge(row, new) for row, new in self.kept.items()}
        blank = torch.zeros(len(self.FIELDS), device=self.device)
        # not table[rows] = …: a list as an index is a copy to the device that has to be waited for
        table = torch.stack([judged.get(row, blank) for row in range(rows)])
        self.ring.put(column, table, into)
        self.kept = {}
        if self.turn % max(self.window // 2, 1) == 0:
            self.halves = {row: (newer, None) for row, (_, newer) in self.halves.items()}

    def _judge(self, row: int, new: Tensor) -> Tensor:
        older, newer = self.halves.get(row, (None, None))
        newer = _joined(newer, new)
        self.halves[row] = older, newer
        dead, dormant, saturated = _verdict(_joined(older, newer))
        one = torch.ones((), device=self.device)
        shares = [dead.float().mean(), dormant.float().mean()]
        tail = [torch.zeros_like(one), one, torch.zeros_like(one)]
        if saturated is not None:
            tail = [saturated.float().mean(), one, one]
        return torch.stack([*shares, *tail])

    def now(self, row: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Which units are dead, dormant, saturated over the window: (units,) bool; None unseen."""
        older, newer = self.halves.get(row, (None, None))
        seen = older if newer is None else _joined(older, newer)
        return None if seen is None else _verdict(seen)

    def read(self, n: int, rows: int) -> Tensor:
        """(n, rows, 5) on the CPU: sums of shares and how many records they are of."""
        mine = self.ring.read(n)[:, :rows].double()
        whole = torch.zeros(n, rows, len(self.FIELDS), dtype=torch.float64)
        whole[:, : mine.shape[1]] = mine
        return whole

    def __getstate__(self) -> dict[str, Any]:
        halves = {
            row: tuple(None if h is None else h.cpu() for h in pair)
            for row, pair in self.halves.items()
        }
        self.ring.data = self.ring.data.cpu()
        device = torch.device("cpu")
        return {**self.__dict__, "live": {}, "kept": {}, "halves": halves, "device": device}


def _joined(a: Tensor | None, b: Tensor) -> Tensor:
    """Greatest values and sums of both, (3 or 4, units); `b` alone where they do not fit."""
    if a is None or a.shape != b.shape:
        return b
    return torch.cat([torch.maximum(a[:1], b[:1]), a[1:] + b[1:]])


def _verdict(seen: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    size = seen[1] / seen[2]
    dormant = size <= TAU * size.mean()
    saturated = seen[3] > 0.5 * seen[2] if len(seen) > 3 else None
    return seen[0] <= 0, dormant, saturated


def shares(table: Any) -> dict[str, Any]:
    """`dead`, `dormant`, `saturated` as fractions, from (…, 5) sums; NaN where not judged."""
    n, n_saturable = table[..., 3].copy(), table[..., 4].copy()
    n[n == 0] = n_saturable[n_saturable == 0] = math.nan
    return {
        "dead": table[..., 0] / n,
        "dormant": table[..., 1] / n,
        "saturated": table[..., 2] / n_saturable,
    }
