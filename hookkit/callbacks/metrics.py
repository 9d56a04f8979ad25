"""Metrics: functions averaged over samples, or objects that accumulate by themselves.

Batches are added up on their own device; the host reads when training or validation ends. The
`Recorder` uses a function as a `Mean`, and an object (of torchmetrics, fastai, …) as a `Metric`:
both have `names`, `reset`, `take` and `results`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit import ranks
from hookkit.checks import kind_of
from hookkit.data import batch_size
from hookkit.errors import ArgumentError

_TORCHMETRICS = ("reset", "update", "compute")
_FASTAI = ("reset", "accumulate", "value")


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
        self.f, self.names = f, [metric_name(f)]
        self.reset()

    def reset(self) -> None:
        """Starts again."""
        self.total: Any = 0.0
        self.n = 0

    def take(self, learn: Any) -> None:
        """Adds the Learner's current batch."""
        self.update(learn.pred, *learn.yb)

    def update(self, pred: Any, *targets: Any) -> None:
        """Adds one batch."""
        assert self.f is not None
        value = self.f(pred, *targets)
        if not isinstance(value, (Real, Tensor, np.ndarray)):
            raise ArgumentError(
                f"the metric {self.names[0]} returned {kind_of(value)}. Return a number or a "
                f"tensor, to be averaged; several numbers from one metric each."
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
            n = int(ranks.total(torch.tensor(n)))
            total = ranks.total(torch.as_tensor(total, dtype=torch.float64))
        return item(total / n) if n else None  # sync: one per read-out

    def results(self, across: bool = False) -> list[Any]:
        """`compute`, in a list."""
        return [self.compute(across)]


class Metric:
    """An object that accumulates by itself, as those of torchmetrics, torcheval and fastai do.

    Args:
        metric: the object. If it has `keys` (a MetricCollection), it is several, called by them.

    Attributes:
        names: of what `results` gives, in order.
    """

    def __init__(self, metric: Any) -> None:
        self.metric, self._n = metric, 0
        self._fastais = bool(_lacking(metric, _TORCHMETRICS))
        keys = getattr(metric, "keys", None)
        self._several = callable(keys)
        self.names = [str(key) for key in keys()] if callable(keys) else [metric_name(metric)]

    def reset(self) -> None:
        """Starts again."""
        self.metric.reset()
        self._n = 0

    def take(self, learn: Any) -> None:
        """Adds the Learner's current batch."""
        if self._fastais:
            self.metric.accumulate(learn)
        else:
            self.metric.update(learn.pred, *learn.yb)
        self._n += 1

    def results(self, across: bool = False) -> list[Any]:
        """A value for each name, None where there was no batch.

        They are over all ranks if the object does that itself, as torchmetrics' do.
        """
        if not self._n:
            return [None] * len(self.names)
        value = self.metric.value if self._fastais else self.metric.compute()
        if not self._several:
            return [item(value)]
        found = {str(key): item(one) for key, one in value.items()}
        if found.keys() != set(self.names):
            raise ArgumentError(
                f"{metric_name(self.metric)} has the keys {', '.join(self.names)}, and computed "
                f"{', '.join(found)}. Give its metrics by themselves: metrics=[…]."
            )
        return [found[name] for name in self.names]


def metric_name(metric: Any) -> str:
    """A metric's `name`, else its function's or class's name."""
    while hasattr(metric, "func"):  # functools.partial
        metric = metric.func
    name = getattr(metric, "name", None) or getattr(metric, "__name__", None)
    return name if isinstance(name, str) else type(metric).__name__.lower()


def as_metric(metric: Any, device: Any = None) -> Mean | Metric:
    """A user's metric as the `Recorder` uses it; a class is instantiated.

    Args:
        metric: a function of `(pred, *targets)`, or an object with `reset`, `update` and `compute`
            (torchmetrics), or with `reset`, `accumulate` and `value` (fastai).
        device: where an object moves its state to, if it can; None leaves it where it is.

    Raises:
        ArgumentError: it is none of these.
    """
    made = _made(metric) if isinstance(metric, type) else metric
    lacking = min(_lacking(made, _TORCHMETRICS), _lacking(made, _FASTAI), key=len)
    if not lacking:
        if device is not None and hasattr(made, "to"):
            made.to(device)
        return Metric(made)
    needs = "Give a function of (pred, target), or an object with reset, update and compute"
    if len(lacking) == 1:
        raise ArgumentError(f"metrics={metric!r}: it lacks {lacking[0]}. {needs}.")
    if not callable(made):
        raise ArgumentError(
            f"metrics={metric!r}: expected a function, found {kind_of(metric)}. {needs}."
        )
    return Mean(made)


def _lacking(metric: Any, methods: tuple[str, ...]) -> list[str]:
    """Those of `methods` that `metric` has not; a property is not read."""
    return [name for name in methods if not (hasattr(type(metric), name) or hasattr(metric, name))]


def _made(cls: type) -> Any:
    try:
        return cls()
    except TypeError as error:
        raise ArgumentError(
            f"metrics={cls.__name__}: the class needs arguments ({error}). Give an object of it: "
            f"metrics={cls.__name__}(…)."
        ) from None


def item(value: Any) -> Any:
    """A tensor as a float, or as an array if it has several; a dict of them; else as it is."""
    if isinstance(value, Mapping):
        return {key: item(one) for key, one in value.items()}
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.numel() == 1 else value.cpu().numpy()
