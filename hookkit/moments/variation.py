"""How much of what a layer gives differs from sample to sample: 0 where all samples give the same.

The share is var / mean square: the variance over the first dimension, averaged over the others,
divided by the mean square of all values. It shows a collapse, which is a matter of powers of ten:
so some samples and some of their values are enough, in records 0, 1, 2, 4, 8, …. The first step's
inputs are looked at too: their size, their largest value, their share. Nothing waits for a device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookkit.hooks.snapshot import is_transforming
from hookkit.nested import leaves

COLUMNS = ("first_variation", "last_variation", "given_rms", "given_max", "given_variation")
"""What is known of each row, by its name in `Record.meta`."""

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SAMPLES, _VALUES = 16, 512


def is_due(n: int) -> bool:
    """Whether variation is looked at in record number `n`: 0 or a power of two.

    >>> [n for n in range(20) if is_due(n)]
    [0, 1, 2, 4, 8, 16]
    """
    return n & (n - 1) == 0


class Variation:
    """The share of each row in the first look and in the last; and its inputs in the first step.

    >>> looks = Variation()
    >>> looks.see(0, torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    >>> looks.see(1, torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    >>> looks.read(3)[:, :2].tolist()
    [[0.20000000298023224, 0.20000000298023224], [0.0, 0.0], [nan, nan]]
    >>> looks.see_inputs(0, torch.tensor([[3.0], [-5.0]]))
    >>> dict(zip(COLUMNS, looks.read(3)[0].tolist(), strict=True))["given_max"]
    5.0
    """

    def __init__(self) -> None:
        self._first: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}
        self._inputs: dict[int, list[Tensor]] = {}  # of each call: mean square, largest, share

    def see(self, row: int, t: Tensor) -> None:
        """Looks at one output of a layer, (samples, …) floats on any device; skips others."""
        if _is_usual(t) and t.ndim > 1 and len(t) > 1:
            # in this order: PyTorch restores the grad mode of its beginning where Ctrl-C ends the
            # first
            with torch.inference_mode(False), torch.no_grad():
                self._last[row] = share = _share(_part(t))
            self._first.setdefault(row, share)

    def see_inputs(self, row: int, inputs: Any) -> None:
        """Looks at the first tensor of a layer's inputs; others than floats are passed."""
        t = None if is_transforming() else next(iter(leaves(inputs)), None)
        if t is not None and _is_usual(t) and t.ndim:
            with torch.inference_mode(False), torch.no_grad():
                x = _part(t)
                call = torch.stack((x.square().mean(), x.abs().amax(), _share(x)))
            self._inputs.setdefault(row, []).append(call)

    def read(self, rows: int) -> Tensor:
        """(rows, 5) float64 on the CPU: `COLUMNS`, NaN where nothing was seen. Waits once a row."""
        table = torch.full((rows, len(COLUMNS)), math.nan, dtype=torch.float64, device="cpu")
        for column, shares in enumerate((self._first, self._last)):
            for row, share in shares.items():
                table[row, column] = share
        for row, calls in self._inputs.items():  # all calls count: the first may be fed zeros
            square, most, share = torch.stack([x.cpu() for x in calls]).double().unbind(1)
            known = share[~share.isnan()]
            table[row, 2], table[row, 3] = square.mean().sqrt(), most.max()
            table[row, 4] = known.max() if len(known) else math.nan
        return table

    @classmethod
    def of(cls, table: Tensor) -> Variation:
        """One that reads as the (rows, 5) `table` does, such as the means over ranks."""
        new = cls()
        for row, (first, last, rms, most, share) in enumerate(table):
            if not first.isnan():
                new._first[row], new._last[row] = first, last
            if not rms.isnan():
                new._inputs[row] = [torch.stack((rms.square(), most, share))]
        return new

    def __getstate__(self) -> dict[str, Any]:
        shares = {
            k: {row: x.cpu() for row, x in vars(self)[k].items()} for k in ("_first", "_last")
        }
        inputs = {row: [x.cpu() for x in calls] for row, calls in self._inputs.items()}
        return {**shares, "_inputs": inputs}


def _is_usual(t: Tensor) -> bool:
    usual = type(t) is Tensor and t.dtype in _DTYPES and t.layout is torch.strided
    return usual and not (t.is_nested or t.is_meta) and t.numel() > 0


def _part(t: Tensor) -> Tensor:
    """(samples, values) float32 of some of both."""
    x = t.detach()[:_SAMPLES]
    x = x[:, None] if x.ndim < 2 else x.flatten(1)
    return x[:, :: -(-x.shape[1] // _VALUES)].float()


def _share(x: Tensor) -> Tensor:
    """() the share that differs; NaN of one sample, which differs from no other."""
    if len(x) < 2:
        return x.new_full((), math.nan)
    # centred by hand: `var` over the first dimension is not vectorized on a CPU (12 times slower)
    return (x - x.mean(0)).square_().mean() / x.square().mean()
