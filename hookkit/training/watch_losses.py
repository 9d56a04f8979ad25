"""The losses of the user's own loop: in what a model returns, as reported, by epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.callbacks.loss_log import LossHistory
from hookkit.checks import kind_of
from hookkit.errors import ArgumentError
from hookkit.nested import named_leaves


def loss_in(output: Any) -> tuple[Tensor | None, bool]:
    """The loss in a model's output, and whether that is only a guess.

    It is the output itself, or its `loss`, or, as a guess, its only scalar that has a gradient.

    >>> x = torch.ones(2, requires_grad=True)
    >>> loss_in({"logits": x, "loss": x.sum()}), loss_in((x, x.sum()))[1], loss_in(x)
    ((tensor(2., grad_fn=<SumBackward0>), False), True, (None, False))
    """
    if isinstance(output, Tensor):
        return output if output.dim() == 0 and output.requires_grad else None, False
    scalars = {p: t for p, t in named_leaves(output) if t.dim() == 0 and t.requires_grad}
    for path in (".loss", "['loss']"):
        if path in scalars:
            return scalars[path], False
    return next(iter(scalars.values())) if len(scalars) == 1 else None, True


def one_number(loss: Any) -> Tensor:
    """`loss` as a 0-d tensor, still in its graph; an ArgumentError if it is not one real number."""
    try:
        value = loss if isinstance(loss, Tensor) else torch.as_tensor(loss, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        value = None
    if value is None or value.numel() != 1 or value.is_complex():
        what = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
        raise ArgumentError(
            f"w.loss: expected the batch's loss as one number, found {what}. Give the tensor that "
            f"you call backward() on, or a float; of several numbers the mean: w.loss(loss.mean())."
        )
    return value if value.dim() == 0 else value.reshape(())


def epoch_rows(
    spans: list[dict[str, Any]], losses: LossHistory, n_steps: int
) -> list[dict[str, Any]]:
    """Return the epochs as a `Run` has them: number, last step, mean loss, reported values.

    Args:
        spans: those of a `WatchedLoop`.
        losses: of its batches: a step's is the mean of those that are known.
        n_steps: how many steps there are.

    >>> losses = LossHistory()
    >>> for step, loss in (0, 1.0), (2, 3.0):
    ...     losses.begin(step); losses.put(torch.tensor(loss))
    >>> epoch_rows([{"epoch": 0, "step": 0, "valid_loss": 0.5}], losses, 3)
    [{'epoch': 0, 'step': 2, 'train_loss': 2.0, 'valid_loss': 0.5}]
    """
    rows = []
    by_step, known = losses.by_step(n_steps), np.unique(losses.steps())
    ends = [span["step"] for span in spans[1:]] + [n_steps]
    for span, end in zip(spans, ends, strict=False):  # before the first epoch there is an end
        reported = dict(span)
        first, row = reported.pop("step"), {"epoch": reported.pop("epoch")}
        if end > first or reported:
            row["step"] = max(end - 1, 0)
        own = known[(known >= first) & (known < end)]
        if len(own):
            row["train_loss"] = float(by_step[own].mean())  # NaN if one of them is
        rows.append(row | {k: _plain(v) for k, v in reported.items()})
    return rows


def _plain(value: Any) -> Any:
    """A tensor, an array or a number of numpy's as Python numbers; anything else as it is."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value
