"""Metrics: functions averaged over samples, or objects that update and compute.

Batches are added up on their own device; the host reads when training or validation ends. The
`Recorder` uses every metric as a `Column`: `Mean`, `Stateful` or `Accumulated`.
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
from hookkit.nested import tmap


class Column:
    """One metric, or several that are computed together, as the `Recorder` uses them.

    Attributes:
        names: of what `results` gives, in order.
    """

    names: list[str]

    def reset(self) -> None:
        """Starts again."""
        raise NotImplementedError

    def take(self, learn: Any) -> None:
        """Adds the Learner's current batch."""
        raise NotImplementedError

    def results(self, across: bool = False) -> list[Any]:
        """A value for each name; None where there was no batch."""
        raise NotImplementedError

    def to(self, device: Any) -> None:
        """Moves its state to `device`, where the batches are."""


class Mean(Column):
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
        self.names = [self.name]
        self.reset()

    def take(self, learn: Any) -> None:
        """Adds the Learner's current batch."""
        self.update(learn.pred, *learn.yb)

    def results(self, across: bool = False) -> list[Any]:
        """`compute`, in a list."""
        return [self.compute(across)]

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
                f"the metric {self.name} returned {kind_of(value)}. Return a number or a tensor, "
                f"to be averaged; several numbers from one metric each."
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


class Stateful(Column):
    """An object with `reset`, `update` and `compute`, as torchmetrics' and torcheval's are.

    Args:
        metric: the object. If it has `keys` (a MetricCollection), it is several, called by them.
    """

    def __init__(self, metric: Any) -> None:
        self.metric, self._n = metric, 0
        keys = getattr(metric, "keys", None)
        self._several = callable(keys)
        self.names = [str(key) for key in keys()] if callable(keys) else [metric_name(metric)]

    def reset(self) -> None:
        """Starts again."""
        self.metric.reset()
        self._n = 0

    def take(self, learn: Any) -> None:
        """Adds the Learner's current batch."""
        self.metric.update(learn.pred, *learn.yb)
        self._n += 1

    def results(self, across: bool = False) -> list[Any]:
        """What it computes; over all ranks if it does so itself, as torchmetrics' do."""
        if not self._n:
            return [None] * len(self.names)
        value = self.metric.compute()
        if not self._several:
            return [item(value)]
        found = {str(key): item(one) for key, one in value.items()}
        if found.keys() != set(self.names):
            raise ArgumentError(
                f"{metric_name(self.metric)} has the keys {', '.join(self.names)}, and computed "
                f"{', '.join(found)}. Give its metrics by themselves: metrics=[…]."
            )
        return [found[name] for name in self.names]

    def to(self, device: Any) -> None:
        """Moves its state to `device`, where the batches are."""
        if hasattr(self.metric, "to"):
            self.metric.to(device)


class Accumulated(Column):
    """An object with `reset`, `accumulate(learn)` and `value`, as fastai's metrics are."""

    def __init__(self, metric: Any) -> None:
        self.metric, self.names = metric, [metric_name(metric)]

    def reset(self) -> None:
        """Starts again."""
        self.metric.reset()

    def take(self, learn: Any) -> None:
        """Adds the Learner's current batch."""
        self.metric.accumulate(_ForFastai(learn))

    def results(self, across: bool = False) -> list[Any]:
        """Its value."""
        return [item(self.metric.value)]


class _ForFastai:
    """A Learner with the one method of fastai's that its metrics call."""

    def __init__(self, learn: Any) -> None:
        self._learn = learn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learn, name)

    def to_detach(self, x: Any, cpu: bool = True, gather: bool = True) -> Any:
        """`x` with its tensors detached, on the CPU or where they are."""
        return tmap(lambda t: t.detach().cpu() if cpu else t.detach(), x)


def as_metric(metric: Any) -> Column:
    """A user's metric as the `Recorder` uses it.

    A function of `(pred, *targets)` is averaged over samples. An object with `reset`, `update` and
    `compute` (torchmetrics) or with `reset`, `accumulate` and `value` (fastai) is used as it is; a
    class is instantiated.

    Raises:
        ArgumentError: it is neither.
    """
    made = _made(metric) if isinstance(metric, type) else metric
    for kind, verbs in _KINDS:
        has = [verb for verb in verbs if _has(made, verb)]
        if len(has) == len(verbs):
            return kind(made)
        if len(has) == len(verbs) - 1:
            (lacks,) = set(verbs) - set(has)
            raise ArgumentError(
                f"metrics={metric!r}: it has {' and '.join(has)}, and lacks {lacks}. "
                f"A metric is a function of (pred, target), or an object with {_LISTED}: add "
                f"{lacks} to it."
            )
    if not callable(made):
        raise ArgumentError(
            f"metrics={metric!r}: expected a function, found {kind_of(metric)}. Give a function of "
            f"(pred, target), or an object with {_LISTED}."
        )
    return Mean(made)


_KINDS: list[tuple[Callable[[Any], Column], tuple[str, ...]]] = [
    (Stateful, ("reset", "update", "compute")),
    (Accumulated, ("reset", "accumulate", "value")),
]
_LISTED = "reset, update and compute"


def _has(metric: Any, verb: str) -> bool:
    return hasattr(type(metric), verb) or hasattr(metric, verb)  # a property is not read


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
