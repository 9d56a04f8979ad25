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
from hookkit.moments.moments import plain
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

    >>> facts = BatchFacts()
    >>> for i in range(6):
    ...     facts.see(torch.full((2, 3), i % 2)); facts.end_step()
    >>> facts.read()
    {'batches': [6, 2]}
    """

    def __init__(self) -> None:
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

    def end_step(self) -> None:
        """What was seen since the last step was for this one."""
        if self._now is not None and len(self._steps) < MANY:
            self._steps.append(self._now)
        self._now = None

    def read(self) -> dict[str, Any]:
        """`batches`: of how many steps it is known, and how many of them saw something else.

        Reads the device once.
        """
        if not self._steps:
            return {}
        marks = torch.stack([t.to(self._steps[0].device) for t in self._steps]).tolist()  # sync
        return {"batches": [len(marks), len({f"{mark:.{_DIGITS}g}" for mark in marks})]}

    def __getstate__(self) -> dict[str, Any]:
        return {"_steps": [t.cpu() for t in self._steps], "_now": None}


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
    some = t.reshape(-1)[:: max(t.numel() // _VALUES, 1)][:_VALUES].to(wide)
    return some @ torch.arange(len(some), dtype=wide, device=t.device).cos()
