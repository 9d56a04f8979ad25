"""`BatchFacts`: whether the first steps of a training see different batches, or a few again.

Builds on `nested` and `moments`. Each tensor that the model is given is reduced to one number on
its device, for `MANY` steps; the host reads them on demand. Equal batches have equal numbers, in
whatever order they come; a batch that is shuffled, augmented or drawn anew has another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hookkit.devices import widest_float
from hookkit.hooks.snapshot import is_transforming
from hookkit.moments.rows import plain
from hookkit.nested import leaves

MANY = 64
"""Steps that are looked at: later ones cost nothing."""

# Values of each tensor that are read
_VALUES = 4096
_PLAIN = (Tensor, torch.nn.Parameter)
# Decimal digits that equal batches share on any device
_DIGITS = 9


class BatchFacts:
    """The number of different batches in the first steps.

    Args:
        name: of the fact.
        besides: others, whose batches do not count here: to log what a batch gives is no question.

    >>> facts = BatchFacts()
    >>> for i in range(6):
    ...     facts.see(torch.full((2, 3), i % 2)); facts.end_step()
    >>> facts.read()
    {'batches': [6, 2], 'batches_period': 2}
    """

    def __init__(self, name: str = "batches", besides: BatchFacts | None = None) -> None:
        self._name, self._besides = name, besides
        self._steps: list[Tensor] = []
        self._now: Tensor | None = None

    def see(self, given: Any) -> None:
        """Adds what the model is given in one call, any structure; a step may have several."""
        if len(self._steps) >= MANY or torch.compiler.is_compiling() or is_transforming():
            return
        with torch.no_grad():
            for mark in marks(leaves(given)):
                # the largest: a closure evaluates the same batch again
                now = mark if self._now is None else self._now.to(mark.device)
                self._now = torch.maximum(now, mark)

    def see_first(self, given: Any) -> None:
        """The same, of the first call since the last step alone."""
        if self._now is None:
            self.see(given)

    def end_step(self) -> None:
        """What was seen since the last step was for this one."""
        if self._now is not None and len(self._steps) < MANY:
            self._steps.append(self._now)
        self._now = None

    def read(self) -> dict[str, Any]:
        """Under the fact's name: of how many steps it is known, how many saw something else.

        And as `NAME_period` after how many steps all of them come again in the same order, if they
        do.

        Reads the device once.
        """
        others = set(self._besides.seen()) if self._besides is not None else set()
        seen = [mark for mark in self.seen() if mark not in others]
        period = _period(seen)
        again = {f"{self._name}_period": period} if period else {}
        return {self._name: [len(seen), len(set(seen))], **again} if seen else {}

    def seen(self) -> list[str]:
        """What was seen, as a text for each step; reads the device once."""
        if not self._steps:
            return []
        marks = torch.stack([t.to(self._steps[0].device) for t in self._steps]).tolist()  # sync
        return [f"{mark:.{_DIGITS}g}" for mark in marks]

    def __getstate__(self) -> dict[str, Any]:
        steps = [t.cpu() for t in self._steps]
        return {"_steps": steps, "_now": None, "_name": self._name, "_besides": None}


def _period(seen: list[str]) -> int:
    """After how many places all values come again in the same order; 0 if they do not."""
    period = len(set(seen))
    return period if period < len(seen) and seen[period:] == seen[:-period] else 0


def marks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """One number for each of `tensors` that can be read: equal tensors have equal ones."""
    for t in tensors:
        # no subclasses: reading a part of a DTensor would wait for other ranks
        whole = type(t) in _PLAIN and t.layout is torch.strided and not t.is_nested
        if whole and t.numel() and (values := plain(t)) is not None:
            yield _mark(values)


def _mark(t: Tensor) -> Tensor:
    """One number that depends on the values of a tensor and on their order."""
    wide = widest_float(t.device)
    stride = t.numel() // _VALUES | 1  # odd: an even one may stay within the padding of images
    some = t.reshape(-1)[::stride][:_VALUES].to(wide)
    return some @ torch.arange(len(some), dtype=wide, device=t.device).cos()
