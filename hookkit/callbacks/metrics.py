"""Metrics: functions averaged over samples, or objects that accumulate by themselves.

Batches are added up on their own device; the host reads when training or validation ends. The
`Recorder` uses a function as a `Mean`, and an object (of torchmetrics, fastai, …) as a `Metric`:
both have `names`, `reset`, `take` and `results`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit import ranks
from hookkit.checks import kind_of
from hookkit.data import batch_size, to_device
from hookkit.errors import ArgumentError
from hookkit.nested import tmap

_TORCHMETRICS = ("reset", "update", "compute")
_FASTAI = ("reset", "accumulate", "value")
_CODE = type, partial, FunctionType, BuiltinFunctionType, MethodType


class Mean:
    """A mean over samples of what `f(pred, *targets)` gives per batch; of the loss if `f` is None.

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

    def compute(self) -> Any:
        """The mean over samples, a float (an array if a metric gives several); None of none."""
        return item(self.total / self.n) if self.n else None  # sync: one per read-out

    def results(self) -> list[Any]:
        """`compute`, in a list."""
        return [self.compute()]

    def state(self) -> dict[str, Any]:
        """What was added so far."""
        return {"total": self.total, "n": self.n}

    def take_up(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.total, self.n = state["total"], state["n"]


class Metric:
    """An object that accumulates by itself, as those of torchmetrics, torcheval and fastai do.

    One with `keys` (a MetricCollection) is several, called by them.

    Attributes:
        names: of what `results` gives, in order.
        n: how many batches were added.
        merges: whether its value is over all ranks by itself, as torchmetrics' are.
    """

    def __init__(self, metric: Any) -> None:
        self.metric, self.n = metric, 0
        self._fastais = bool(_lacking(metric, _TORCHMETRICS))
        owners = {cls.__module__.partition(".")[0] for cls in type(metric).__mro__}
        self.merges = "torchmetrics" in owners
        for part in metric.modules() if self.merges else ():
            if getattr(part, "dist_sync_fn", part) is None:  # the user has set no other
                part.dist_sync_fn = _one_of_each_rank
        keys = getattr(metric, "keys", None)
        self._several = callable(keys)
        self.names = [str(key) for key in keys()] if callable(keys) else [metric_name(metric)]

    def reset(self) -> None:
        """Starts again."""
        self.metric.reset()
        self.n = 0

    def take(self, learn: Any) -> None:
        """Adds the Learner's current batch."""
        if self._fastais:
            self.metric.accumulate(learn)
        else:
            self.metric.update(learn.pred, *learn.yb)
        self.n += 1

    def results(self) -> list[Any]:
        """A value for each name, None where there was no batch."""
        if not self.n:
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

    def state(self) -> dict[str, Any]:
        """What the object has counted so far: its `state_dict`, else its attributes."""
        if self.merges:
            self.metric.persistent(True)  # or torchmetrics' `state_dict` is empty
        if callable(of := getattr(self.metric, "state_dict", None)):
            return {"n": self.n, "counted": dict(of())}
        own = vars(self.metric).items()
        return {"n": self.n, "counted": {k: v for k, v in own if not isinstance(v, _CODE)}}

    def take_up(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        take = getattr(self.metric, "load_state_dict", vars(self.metric).update)
        take(state["counted"])
        self.n = state["n"]


def _one_of_each_rank(t: Tensor, group: Any = None) -> list[Tensor]:
    """`t` of each rank: torchmetrics' `dist_sync_fn`.

    Its own ends in an error of gloo where a rank has no batch, and so a flat, empty tensor (1.9).
    """
    everyone = [part.to(t.device) for part in ranks.gather_object(t.detach().cpu(), group)]
    return [part for part in everyone if part.numel()] or everyone


def add_up(metrics: Sequence[Mean | Metric], where: str) -> None:
    """Replaces the sums of means, and all numbers of batches, by those of all ranks.

    Each rank has to call; `where` says how far the run is, should one not come. Two reductions for
    all of them together, of some numbers for each.
    """
    known = [getattr(m, "total", 0.0) for m in metrics]
    own = [torch.as_tensor(total, device="cpu").detach().double() for total in known]
    numbers = torch.tensor([m.n for m in metrics], dtype=torch.float64, device="cpu")
    with ranks.together(f"add up losses and metrics{where}"):
        # a rank without a batch does not know how many numbers a metric gives
        sizes = ranks.greatest(torch.tensor([t.numel() for t in own], device="cpu")).tolist()
        sums = [t.flatten().expand(size) for t, size in zip(own, sizes, strict=True)]
        whole = ranks.total(torch.cat([numbers, *sums]))
    counts, *totals = torch.split(whole, [len(metrics), *sizes])
    for m, n, total, t in zip(metrics, counts.tolist(), totals, own, strict=True):
        m.n = int(n)
        if isinstance(m, Mean):
            m.total = total.view(t.shape) if t.numel() == total.numel() else total


def take_of_ranks(metrics: Sequence[Metric], learn: Any, done: bool, cancelled: bool) -> bool:
    """Adds the current batches of all ranks to each of the metrics; whether all ranks are done.

    So an object that knows nothing of ranks gives what it gives in one process, whatever the order
    of batches. Each rank has to call for each of its batches, and then with `done` until all are.
    One exchange: prediction, targets and loss of each rank.
    """
    now = learn.pred, learn.yb, learn.loss
    own = None if done or cancelled else tmap(lambda t: t.detach().cpu(), now)
    device = learn.device or torch.device("cpu")
    with ranks.together(f"give its metrics each batch{learn._where()}"):
        everyone = ranks.gather_object((own, done))
    for batch, _ in everyone:
        if batch is not None:
            learn.pred, learn.yb, learn.loss = to_device(batch, device)
            for metric in metrics:
                metric.take(learn)
    learn.pred, learn.yb, learn.loss = now
    return all(is_done for _, is_done in everyone)


def metric_name(metric: Any) -> str:
    """A metric's `name`, else its function's or class's name."""
    while hasattr(metric, "func"):  # functools.partial
        metric = metric.func
    name = getattr(metric, "name", None) or getattr(metric, "__name__", None)
    return name if isinstance(name, str) else type(metric).__name__.lower()


def as_metric(metric: Any, device: Any = None) -> Mean | Metric:
    """A user's metric as the `Recorder` uses it: a class is instantiated; else an ArgumentError.

    Args:
        metric: a function of `(pred, *targets)`, or an object with `reset`, `update` and `compute`
            (torchmetrics), or with `reset`, `accumulate` and `value` (fastai).
        device: where an object moves its state to, if it can; None leaves it where it is.
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
