"""Metrics: functions averaged over samples, or objects that update and compute; read late.

What a batch gives is added up on its own device; the host reads when the part is over.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit import ranks
from hookkit.data import batch_size
from hookkit.errors import ArgumentError


class Mean:
    """A mean over samples of what a function gives per batch.

    Args:
        f: `f(pred, *targets)` gives the batch's mean, a number or a tensor of one element; None
            for the loss itself.

    >>> m = Mean(lambda pred, y: (pred == y).float().mean())
    >>> m.update(torch.tensor([1, 1]), torch.tensor([1, 0]))
    >>> m.update(torch.tensor([1, 1, 1, 1]), torch.tensor([1, 1, 1, 1]))
    >>> round(m.compute(), 3)
    0.833
    """

    def __init__(self, f: Callable[..., Any] | None = None) -> None:
        self.f = f
        self.name = metric_name(f)
        self.reset()

    def reset(self) -> None:
        """Starts again."""
        self.total: Any = 0.0
        self.n = 0

    def update(self, pred: Any, *targets: Any) -> None:
        """Adds one batch."""
        assert self.f is not None
        value = self.f(pred, *targets)
        if not isinstance(value, (Real, Tensor, np.ndarray)):
            raise ArgumentError(
                f"the metric {self.name} was to be averaged; it gave {type(value).__name__}. Give "
                f"a number or a tensor from it; of several numbers, each from a metric of its own."
            )
        self.add(value, batch_size(targets))

    def add(self, value: Any, n: int) -> None:
        """Adds a value that stands for `n` samples."""
        # out of place: what the function returned may be a tensor of the user's
        self.total = self.total + (value.detach() if isinstance(value, Tensor) else value) * n
        self.n += n

    def compute(self, across: bool = False) -> Any:
        """The mean over samples, a float (an array if a metric gives several); None of none.

        Args:
            across: over the samples of all ranks: each of them has to call.
        """
        total, n = self.total, self.n
        if across:
            n = int(ranks.all_reduce(torch.tensor(n)))
            total = ranks.all_reduce(torch.as_tensor(total, dtype=torch.float64))
        return item(total / n) if n else None  # sync: one per read-out


def metric_name(metric: Any) -> str:
    """A metric's `name`, else its function's or class's name."""
    while hasattr(metric, "func"):  # functools.partial
        metric = metric.func
    name = getattr(metric, "name", None) or getattr(metric, "__name__", None)
    return name if isinstance(name, str) else type(metric).__name__.lower()


def as_metric(metric: Any) -> Any:
    """What a user gives, as an object with `reset`, `update(pred, *targets)` and `compute`.

    A function of `(pred, *targets)` is averaged over samples. An object with the three methods, as
    torchmetrics' are, is used as it is; a class is made into one.

    Raises:
        ArgumentError: it is neither.
    """
    made = metric() if isinstance(metric, type) else metric
    if all(hasattr(made, verb) for verb in ("reset", "update", "compute")):
        return made
    if not callable(made):
        raise ArgumentError(
            f"metrics={metric!r} was asked for, {type(metric).__name__} cannot be called. Give a "
            f"function of (pred, target), or an object with reset, update and compute."
        )
    return Mean(made)


def item(value: Any) -> Any:
    """A tensor as a float, or as an array if it has several; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.numel() == 1 else value.cpu().numpy()
