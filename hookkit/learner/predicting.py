"""`GatherPreds`: the callback behind `Learner.get_preds`, and the joining of batches it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookkit.callbacks import Callback
from hookkit.errors import ModelRunError
from hookkit.nested import describe, leaves, tmap


class GatherPreds(Callback):
    """Keeps each batch's predictions, targets and, if asked, inputs and losses, on the CPU."""

    order = 70

    def __init__(self, with_input: bool, with_loss: bool, act: Callable[[Any], Any] | None) -> None:
        self.with_input, self.with_loss, self.act = with_input, with_loss, act
        self.inputs, self.preds = list[Any](), list[Any]()
        self.targets, self.losses = list[Any](), list[Any]()

    def before_batch(self) -> None:
        """Keeps the input as the model gets it."""
        if self.with_input:
            self._x = kept(self.learn.x)

    def after_batch(self) -> None:
        """Keeps the rest, unless the batch was cancelled before there was a prediction."""
        learn = self.learn
        if learn.pred is None:
            return
        pred = learn.pred if self.act is None else self.act(learn.pred)
        self.preds.append(kept(pred))
        self.targets.append(kept(learn.y))
        if self.with_input:
            self.inputs.append(self._x)
        if self.with_loss:
            self.losses.append(kept(self._losses()))

    def _losses(self) -> Any:
        learn = self.learn
        f = learn.loss_func
        if f is not None and learn.yb:
            if hasattr(f, "reduction"):
                before, f.reduction = f.reduction, "none"
                try:
                    return _by_sample(f(learn.pred, *learn.yb))
                finally:
                    f.reduction = before
            if "reduction" in _parameters(f):
                return _by_sample(f(learn.pred, *learn.yb, reduction="none"))
        return None if learn.loss is None else learn.loss

    def result(self, dim: int | None) -> tuple[Any, ...]:
        """`([inputs,] preds, targets [, losses])`, joined along `dim`; None leaves lists."""
        parts = [self.preds, self.targets]
        parts = [self.inputs, *parts] if self.with_input else parts
        parts = [*parts, self.losses] if self.with_loss else parts
        return tuple(parts if dim is None else [joined(part, dim) for part in parts])


def kept(x: Any) -> Any:
    """A detached copy of `x` on the CPU that later batches cannot change."""
    return tmap(lambda t: t.detach().cpu() if t.is_cuda else t.detach().clone(), x)


def joined(batches: list[Any], dim: int = 0) -> Any:
    """Structures of the same kind as one, each tensor concatenated along `dim`, scalars stacked.

    Raises:
        ModelRunError: the shapes do not fit together.

    >>> joined([(torch.ones(2, 3), None), (torch.ones(1, 3), None)])[0].shape
    torch.Size([3, 3])
    """
    if not batches:
        return None
    columns = iter(zip(*[leaves(b) for b in batches], strict=True))

    def join(_: Tensor) -> Tensor:
        ts = next(columns)
        return torch.stack(ts) if ts[0].ndim == 0 else torch.cat(ts, dim)

    try:
        return tmap(join, batches[0])
    except (RuntimeError, ValueError) as error:
        shapes = ", ".join(dict.fromkeys(describe(b) for b in batches))
        raise ModelRunError(
            f"Batches were to be joined along dimension {dim}; their shapes are {shapes}. "
            f"Pad them to one size, or use get_preds(…, concat_dim=None) for lists."
        ) from error


def _by_sample(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _parameters(f: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return ()
