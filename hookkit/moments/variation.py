"""How much of what a layer gives differs from sample to sample: 0 where all samples give the same.

The share is var / mean square: the variance over the first dimension, averaged over the others,
divided by the mean square of all values. 1 minus it is what the samples have in common. It is
looked at in a few batches only, on some samples and some of their values, since it is to show a
collapse, which is a matter of powers of ten. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EVERY = 16
"""Recorded steps from one look to the next."""

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SAMPLES, _VALUES, _LATEST = 64, 2048, 3


class Variation:
    """The share of each row in the first look, and in the latest three.

    >>> seen = Variation()
    >>> seen.see(0, torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    >>> seen.see(1, torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    >>> seen.read(3).tolist()
    [[0.20000000298023224, 0.20000000298023224], [0.0, 0.0], [nan, nan]]
    """

    def __init__(self) -> None:
        self._looks: dict[int, list[Tensor]] = {}  # by row: the first, and the latest

    def see(self, row: int, t: Tensor) -> None:
        """Looks at one output of a layer. Tensors without a first dimension of samples are passed.

        Args:
            row: of the layer.
            t: (samples, …) of float16, bfloat16, float32 or float64, on any device; it is not kept.
        """
        usual = type(t) is Tensor and t.dtype in _DTYPES and t.layout is torch.strided
        if not usual or t.is_nested or t.is_meta or t.ndim < 2 or len(t) < 2 or not t.numel():
            return
        with torch.no_grad(), torch.inference_mode(False):
            x = t.detach()[:_SAMPLES].flatten(1)
            x = x[:, :: -(-x.shape[1] // _VALUES)].float()
            share = x.var(0, correction=0).mean() / x.square().mean()
        looks = self._looks.setdefault(row, [])
        looks.append(share)
        if len(looks) > 1 + _LATEST:
            del looks[1]

    def read(self, rows: int) -> Tensor:
        """(rows, 2) float64 on the CPU: the first share and the median of the latest, NaN if none.

        The host reads the device here.
        """
        looks = [(row, x) for row, found in self._looks.items() for x in found]
        known: dict[int, list[float]] = {}
        for device in dict.fromkeys(x.device for _, x in looks):
            own = [(row, x) for row, x in looks if x.device == device]
            shares = torch.stack([x for _, x in own]).tolist()  # sync: one per device
            for (row, _), share in zip(own, shares, strict=True):
                known.setdefault(row, []).append(share)
        table = torch.full((rows, 2), torch.nan, dtype=torch.float64, device="cpu")
        for row, (first, *latest) in known.items():
            table[row, 0], table[row, 1] = first, sorted(latest or [first])[len(latest) // 2]
        return table

    def moved(self, row_of: Sequence[int]) -> Variation:
        """A copy in which row `i` is row `row_of[i]`."""
        new = Variation()
        new._looks = {row_of[row]: [*found] for row, found in self._looks.items()}
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"_looks": {row: [x.cpu() for x in looks] for row, looks in self._looks.items()}}
