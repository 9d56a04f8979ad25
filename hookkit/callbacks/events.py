"""The events of training, in the order they fire, and the exceptions that end a part of it early.

A `fit` consists of nested parts. Each part fires `before_<part>`, does its work, and fires
`after_<part>`:

    fit
    └─ epoch *
       ├─ train
       │  └─ batch *
       │     ├─ after_pred, after_loss
       │     ├─ backward
       │     └─ step
       └─ validate
          └─ batch *  (only after_pred, after_loss: no gradient, no step)

A callback that raises `Cancel<Part>Exception` ends that part at once: the rest is skipped, then
`after_cancel_<part>` and `after_<part>` fire. Any other exception ends the fit: no further event
fires, but every callback's `cleanup_fit()` is called.

`watch` differs in two ways, because the loop is the user's:

- A `CancelBatchException` propagates into the user's loop. If `before_batch` raises it, or the
  forward raises any error, the batch ends with `after_cancel_batch`, without `after_batch`.
- After a `CancelStepException` the optimizer changes nothing and no step is counted:
  `after_cancel_step` fires, without `after_step`.
"""

from __future__ import annotations

from hookkit._core.messages import nearest_text

EVENTS = (
    "after_create",
    "before_fit",
    "before_epoch",
    "before_train",
    "before_batch",
    "after_pred",
    "after_loss",
    "before_backward",
    "after_cancel_backward",
    "after_backward",
    "before_step",
    "after_cancel_step",
    "after_step",
    "after_cancel_batch",
    "after_batch",
    "after_cancel_train",
    "after_train",
    "before_validate",
    "after_cancel_validate",
    "after_validate",
    "after_cancel_epoch",
    "after_epoch",
    "after_cancel_fit",
    "after_fit",
)
"""Every event, in firing order (names and order of fastai 2.8)."""

BATCH_EVENTS = frozenset(EVENTS[EVENTS.index("before_batch") : EVENTS.index("after_batch") + 1])
"""The events inside a batch: the only ones that `run_train` and `run_valid` switch off."""


class CancelFitException(Exception):
    """Ends the fit: no further epoch."""


class CancelEpochException(Exception):
    """Ends this epoch, training and validation; the next epoch follows."""


class CancelTrainException(Exception):
    """Ends the training part of this epoch; validation follows."""


class CancelValidException(Exception):
    """Ends the validation part of this epoch."""


class CancelBatchException(Exception):
    """Ends this batch: the rest of it (loss, backward, step, zero_grad) is skipped."""


class CancelBackwardException(Exception):
    """Skips the backward pass of this batch; the step follows."""


class CancelStepException(Exception):
    """Skips the optimizer step of this batch; its gradients are still zeroed."""


CANCELS: dict[str, type[Exception]] = {
    "fit": CancelFitException,
    "epoch": CancelEpochException,
    "train": CancelTrainException,
    "validate": CancelValidException,
    "batch": CancelBatchException,
    "backward": CancelBackwardException,
    "step": CancelStepException,
}
"""Part of a fit → the exception that ends it. Raising one is control flow, not a failure."""

CANCEL_EXCEPTIONS: tuple[type[Exception], ...] = tuple(CANCELS.values())
"""The same exceptions, for an `except` clause."""


def not_an_event(name: str) -> str:
    """Return the error message for a `name` that is not an event.

    >>> print(not_an_event("after_bach"))  # doctest: +ELLIPSIS
    'after_bach' is not an event. Nearest: "after_batch", ... lists all 24.
    """
    where = f"hookkit.callbacks.events.EVENTS lists all {len(EVENTS)}."
    return f"{name!r} is not an event. {nearest_text(name, EVENTS)} {where}"
