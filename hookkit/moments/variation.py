"""How much of what a layer gives differs from sample to sample: 0 where all samples give the same.

The share is var / mean square: the variance over the first dimension, averaged over the others,
divided by the mean square of all values. 1 minus it is what the samples have in common. It is
looked at in a few batches only, on some samples and some of their values, since it is to show a
collapse, which is a matter of powers of ten. What a layer is given is looked at in the first step,
in all its calls, since the first one may be given zeros: whether the data are of a usual size is a
matter of powers of ten, too. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookkit.hooks.snapshot import is_transforming
from hookkit.nested import leaves

EVERY = 16
"""Recorded steps from one look to the next."""

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SAMPLES, _VALUES, _LATEST = 64, 2048, 3

COLUMNS = ("first_variation", "last_variation", "given_rms", "given_max", "given_variation")
"""What is known of each row, by its name in `Record.meta`."""


class Variation:
    """The share of each row in the first look, and in the latest three; and what it is given.

    >>> seen = Variation()
    >>> seen.see(0, torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    >>> seen.see(1, torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    >>> seen.read(3)[:, :2].tolist()
    [[0.20000000298023224, 0.20000000298023224], [0.0, 0.0], [nan, nan]]
    >>> seen.see_given(0, torch.tensor([[3.0], [-5.0]]))
    >>> dict(zip(COLUMNS, seen.read(3)[0].tolist(), strict=True))["given_max"]
    5.0
    """

    def __init__(self) -> None:
        self._looks: dict[int, list[Tensor]] = {}  # by row: the first, and the latest
        self._given: dict[int, Tensor] = {}  # by row: RMS, largest size and share
        self._calls: dict[int, int] = {}  # of how many calls that is

    def see(self, row: int, t: Tensor) -> None:
        """Looks at one output of a layer, (samples, …) floats on any device; skips others."""
        if not _is_usual(t) or t.ndim < 2 or len(t) < 2:
            return
        # in this order: PyTorch restores the grad mode of its beginning where Ctrl-C ends the first
        with torch.inference_mode(False), torch.no_grad():
            share = _share(_some(t))
        looks = self._looks.setdefault(row, [])
        looks.append(share)
        if len(looks) > 1 + _LATEST:
            del looks[1]

    def see_given(self, row: int, inputs: Any) -> None:
        """Looks at the first tensor that a layer is given; others than floats are passed."""
        t = None if is_transforming() else next(iter(leaves(inputs)), None)
        if t is None or not _is_usual(t) or not t.ndim:
            return
        with torch.inference_mode(False), torch.no_grad():
            x, n = _some(t), self._calls.get(row, 0)
            rms, most, share = x.square().mean().sqrt(), x.abs().amax(), _share(x)
            if n:
                others = self._given[row].to(x.device).unbind()
                rms = ((n * others[0].square() + rms.square()) / (n + 1)).sqrt()
                most, share = torch.maximum(most, others[1]), torch.fmax(share, others[2])
            self._given[row], self._calls[row] = torch.stack((rms, most, share)), n + 1

    def read(self, rows: int) -> Tensor:
        """(rows, 5) float64 on the CPU: `COLUMNS`, of the latest shares the median, or NaN."""
        looks = [(row, x) for row, found in self._looks.items() for x in found]
        known: dict[int, list[float]] = {}
        for row, share in _on_the_host(looks):
            known.setdefault(row, []).append(share)
        table = torch.full((rows, len(COLUMNS)), torch.nan, dtype=torch.float64, device="cpu")
        for row, (first, *latest) in known.items():
            table[row, 0], table[row, 1] = first, sorted(latest or [first])[len(latest) // 2]
        for row, given in _on_the_host([*self._given.items()]):
            table[row, 2:] = torch.tensor(given, dtype=torch.float64, device="cpu")
        return table

    @classmethod
    def of(cls, table: Tensor) -> Variation:
        """One that reads as the (rows, 5) `table` does, such as the means over ranks."""
        new = cls()
        for row, known in enumerate(table):
            looks = known[:2][~known[:2].isnan()]
            new._looks |= {row: [*looks.unbind()]} if len(looks) else {}
            if not known[2].isnan():
                new._given[row], new._calls[row] = known[2:].clone(), 1
        return new

    def __getstate__(self) -> dict[str, Any]:
        looks = {row: [x.cpu() for x in found] for row, found in self._looks.items()}
        given = {row: x.cpu() for row, x in self._given.items()}
        return {"_looks": looks, "_given": given, "_calls": self._calls}


def _is_usual(t: Tensor) -> bool:
    usual = type(t) is Tensor and t.dtype in _DTYPES and t.layout is torch.strided
    return usual and not (t.is_nested or t.is_meta) and t.numel() > 0


def _some(t: Tensor) -> Tensor:
    """(samples, values) float32 of some of both."""
    x = t.detach()[:_SAMPLES]
    x = x[:, None] if x.ndim < 2 else x.flatten(1)
    return x[:, :: -(-x.shape[1] // _VALUES)].float()


def _share(x: Tensor) -> Tensor:
    """() the share that differs; NaN of one sample, which differs from no other."""
    if len(x) < 2:
        return x.new_full((), torch.nan)
    return x.var(0, correction=0).mean() / x.square().mean()


def _on_the_host(rows: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, Any]]:
    """Each row with its numbers."""
    for device in dict.fromkeys(x.device for _, x in rows):
        own = [(row, x) for row, x in rows if x.device == device]
        values = torch.stack([x for _, x in own]).tolist()  # sync: one per device
        yield from zip((row for row, _ in own), values, strict=True)
