"""`Learner.lr_find`: a short training with a growing learning rate, of which nothing stays.

Source: Smith 2017, "Cyclical Learning Rates", and fastai's `lr_find` and `valley` (2.8).
"""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit._core.random_state import preserve_random_state
from hookkit.callbacks import Callback, ProgressCallback, Recorder
from hookkit.callbacks.events import CancelFitException, CancelValidException
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.callbacks.loss_log import LossLog
from hookkit.errors import ModelRunError, OptionError
from hookkit.inspection.preserve import preserve_state
from hookkit.recorders.probes import TrainingProbes
from hookkit.recorders.step_recorder import StepRecorder
from hookkit.records import Floats
from hookkit.training.groups import set_hyper

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class SuggestedLRs:
    """Holds what `lr_find` found: fastai's four suggestions, and the curve they are read from.

    Args:
        valley: in the middle of the longest descent of the loss; the usual choice.
        steep: where the loss falls fastest.
        minimum: a tenth of the rate at which the loss is least.
        slide: before the loss begins to change fast, seen from the end.
        lrs, losses: (n,) float64, the learning rate and the smoothed loss of each batch.
    """

    valley: float
    steep: float
    minimum: float
    slide: float
    lrs: Floats = field(repr=False)
    losses: Floats = field(repr=False)

    def plot(self, *, ax: Any = None) -> Axes:
        """Draw the loss against the learning rate, and the suggestions; return the Axes."""
        from hookkit.plotting.lines import plot_lr_find

        suggested = {f.__name__: getattr(self, f.__name__) for f in SUGGESTIONS}
        return plot_lr_find(self.lrs, self.losses, suggested, ax=ax)


class LRFinder(Callback):
    """Multiplies the learning rate by the same factor after each batch, and ends the training."""

    order = 60
    run_valid = False

    def __init__(self, start_lr: float, end_lr: float, num_it: int, stop_div: bool) -> None:
        self.rates = [start_lr * (end_lr / start_lr) ** (i / num_it) for i in range(num_it)][::-1]
        self.stop_div, self.least = stop_div, math.inf

    def before_batch(self) -> None:
        """Set the learning rate of all groups."""
        opt = self.learn.opt
        set_hyper(opt, "lr", [self.rates.pop()] * len(opt.param_groups))

    def after_batch(self) -> None:
        """End the training if the loss is out of hand, or no rate is left to try."""
        loss = self.learn.smooth_loss  # sync: one for each batch
        if loss is not None:
            self.least = min(self.least, loss)
            if not math.isfinite(loss) or (self.stop_div and loss > 4 * self.least):
                raise CancelFitException
        if not self.rates:
            raise CancelFitException

    def before_validate(self) -> None:
        """Leave validation out."""
        raise CancelValidException


def find_lr(
    learn: Any, start_lr: float, end_lr: float, num_it: int, stop_div: bool
) -> SuggestedLRs:
    """Train as `Learner.lr_find` says, put back all that this has changed, and read the losses."""
    learn._check_idle("lr_find was called")
    if learn.accelerator is not None:  # each rank would stop at another batch
        raise OptionError("lr_find: call it before `with learn.distrib_ctx()`, not inside.")
    before, recorder = dict(vars(learn)), Recorder()
    finder = LRFinder(start_lr, end_lr, num_it, stop_div)
    # what records, saves, schedules or shows
    silent = (StepRecorder, HookCallback, Recorder, ProgressCallback)
    off = [c for c in learn.cbs if c._only_train_loop or isinstance(c, silent)]
    with ExitStack() as undo:
        undo.callback(vars(learn).update, before)
        undo.callback(vars(learn).clear)
        for part in (learn.opt, learn.loss_func):
            if hasattr(part, "state_dict"):
                undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
        learn.probes, learn.losses, learn.epochs = TrainingProbes(), LossLog(), []
        undo.enter_context(preserve_random_state(*learn.dls or ()))
        undo.enter_context(preserve_state(learn.model, params=True, observers=True))
        undo.enter_context(learn.removed_cbs(off))
        undo.enter_context(learn.no_logging())
        learn.fit(num_it, cbs=[recorder, finder])  # an epoch has one batch at least

    lrs, losses = np.array(recorder.lrs), np.array(recorder.losses)
    known, usual = np.isfinite(losses), slice(num_it // 10, -5)
    middle, there = losses[usual][known[usual]], lrs[usual][known[usual]]
    if len(middle) < 2:
        raise ModelRunError(
            f"lr_find: the loss grew too large after {known.sum()} of {num_it} batches, so there "
            f"is nothing to suggest. Give a smaller start_lr or end_lr, or a larger num_it; if the "
            f"losses of batches differ much, stop_div=False."
        )
    found = {f.__name__: f(there, middle) for f in SUGGESTIONS}
    return SuggestedLRs(**found, lrs=lrs[known], losses=losses[known])


# --- suggestions, of learning rates and losses, as fastai 2.8 makes them


def valley(lrs: Floats, losses: Floats) -> float:
    """Return the rate half-way through the longest falling subsequence of losses."""
    lengths = np.ones(len(losses), np.int64)
    for i in range(1, len(losses)):
        lengths[i] += lengths[:i][losses[:i] > losses[i]].max(initial=0)
    end = int(lengths.argmax())
    start = end - int(lengths[end]) if lengths[end] > 1 else end
    third = (end - start) / 3
    return float(lrs[max(start + int(third) + int(third / 2), 0)])


def steep(lrs: Floats, losses: Floats) -> float:
    """Return the rate at which the loss falls fastest, by the logarithm of the rate."""
    return float(lrs[np.argmin(np.diff(losses) / np.diff(np.log(lrs)))])


def minimum(lrs: Floats, losses: Floats) -> float:
    """Return a tenth of the rate at which the loss is least."""
    return float(lrs[np.argmin(losses)] / 10)


def slide(lrs: Floats, losses: Floats, width: int = 15, least: float = 0.005) -> float:
    """Return where the slope stops to differ from the slope `width` batches later, from the end."""
    slopes, left = np.gradient(losses), len(losses) - 1 - width
    found = max(left, 0)
    while left >= 0 and abs(slopes[left + width] - slopes[left]) > least:
        found, left = left, left - 1
    return float(lrs[found])


SUGGESTIONS = (valley, steep, minimum, slide)
