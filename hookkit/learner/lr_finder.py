"""`Learner.lr_find`: a short training with a growing learning rate, of which nothing stays.

Builds on the loop, which it runs, and on `modelinfo.sandbox`, which restores a model and random
states. Source: Smith 2017, "Cyclical Learning Rates", and fastai's `lr_find` and `valley` (2.8).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.callbacks import (
    Callback,
    CSVLogger,
    GradientClip,
    LogTo,
    ProgressCallback,
    Recorder,
    SchedulerCallback,
    TrackerCallback,
)
from hookkit.callbacks.batch_facts import BatchFacts
from hookkit.callbacks.loss_facts import LossFacts
from hookkit.checks import check_flag, check_number
from hookkit.data import loader_state, set_loader
from hookkit.devices import widened
from hookkit.errors import ModelRunError
from hookkit.events import CancelFitException, CancelValidException
from hookkit.interrupts import Undo, block
from hookkit.learner.groups import set_hyper
from hookkit.live import ShowHealth
from hookkit.modelinfo.sandbox import preserve_random_states, restore_after
from hookkit.modelinfo.tree import Tree
from hookkit.recording import HookCallback
from hookkit.records import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BETA = 0.98  # of the smoothing, as the Recorder's
_OBSERVERS: tuple[type[Callback], ...] = (
    *(HookCallback, SchedulerCallback, TrackerCallback, CSVLogger, LogTo),
    *(ProgressCallback, ShowHealth, Recorder, GradientClip),
)


@dataclass(frozen=True)
class SuggestedLRs:
    """What `lr_find` found.

    Args:
        valley: a learning rate in the middle of the longest descent of the loss.
        lrs: (n,) float64: the learning rate of each batch.
        losses: (n,) float64: the smoothed loss of each batch.
    """

    valley: float
    lrs: Floats = field(repr=False)
    losses: Floats = field(repr=False)

    def plot(self, *, ax: Any = None) -> Axes:
        """Draws the loss against the learning rate, and the one suggested; the Axes."""
        from hookkit.plotting.rates import plot_lr_find

        return plot_lr_find(self.lrs, self.losses, self.valley, ax=ax)


def find_lr(
    learn: Any, start_lr: float, end_lr: float, num_it: int, stop_div: bool
) -> SuggestedLRs:
    """What `Learner.lr_find` does, without its picture."""
    who = "lr_find"
    start = check_number(who, "start_lr", start_lr, above=0)
    end = check_number(who, "end_lr", end_lr, above=start)
    n = check_number(who, "num_it", num_it, 10, whole=True, what="how many batches are trained on")
    finder = LRFinder(start, end, n, check_flag(who, "stop_div", stop_div))
    learn._check_idle("lr_find was called")
    learn._needs_data(who)
    with mock_training(learn):
        learn.fit(n, cbs=finder)  # an epoch has one batch at least
    return suggest(np.array(finder.lrs), np.array(finder.losses), n)


class LRFinder(Callback):
    """Multiplies the learning rate by the same factor after each batch, and notes the loss.

    From `start_lr` to `end_lr` in `num_it` batches; `stop_div` ends it when the smoothed loss is
    over four times its least.
    """

    order = 60
    run_valid = False

    def __init__(self, start_lr: float, end_lr: float, num_it: int, stop_div: bool) -> None:
        self.start_lr, self.end_lr = start_lr, end_lr
        self.num_it, self.stop_div = num_it, stop_div
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self._average, self._n, self._lr = 0.0, 0, start_lr

    def before_batch(self) -> None:
        """Sets the learning rate of all groups."""
        self._lr = self.start_lr * (self.end_lr / self.start_lr) ** (self._n / self.num_it)
        set_hyper(self.learn.opt, "lr", [self._lr] * len(self.learn.opt.param_groups))

    def after_batch(self) -> None:
        """Notes the smoothed loss, and ends the training if it is over."""
        self._n += 1
        if self.learn.loss is not None:  # else the batch was cancelled
            self._note(self._loss())
        if self._n >= self.num_it:
            raise CancelFitException

    def _loss(self) -> float:
        """The mean over all ranks, or one of them would stop alone."""
        loss = widened(self.learn.loss.detach().mean())
        if self.learn.accelerator is not None:
            loss = ranks.total(loss) / ranks.world_size()
        return float(loss)  # sync: one for each batch of the mock training

    def _note(self, loss: float) -> None:
        self._average = _BETA * self._average + (1 - _BETA) * loss
        self.lrs.append(self._lr)
        self.losses.append(self._average / (1 - _BETA ** (len(self.losses) + 1)))
        now = self.losses[-1]
        if not math.isfinite(now) or (self.stop_div and now > 4 * min(self.losses)):
            raise CancelFitException

    def before_validate(self) -> None:
        """There is no validation."""
        raise CancelValidException


def suggest(lrs: Floats, losses: Floats, num_it: int) -> SuggestedLRs:
    """The suggestion from what was noted, without the first tenth and the last five batches.

    Raises a ModelRunError if too few batches had a loss that is a number.
    """
    first, known = num_it // 10, np.isfinite(losses)
    middle = losses[first:-5][known[first:-5]]
    if len(middle) < 2:
        raise ModelRunError(
            f"lr_find: the loss grew too large after {known.sum()} of {num_it} batches, so "
            f"there is nothing to suggest. Give a smaller start_lr or end_lr, or a larger num_it."
        )
    return SuggestedLRs(float(lrs[first + valley(middle)]), lrs[known], losses[known])


def valley(losses: Floats) -> int:
    """Half-way through the longest falling subsequence of losses, the index that fastai's gives.

    >>> valley(np.array([5.0, 6.0, 4.0, 3.0, 2.0, 1.0, 0.5, 9.0]))
    3
    """
    lengths = np.ones(len(losses), np.int64)
    for i in range(1, len(losses)):
        lengths[i] += lengths[:i][losses[:i] > losses[i]].max(initial=0)
    end = int(lengths.argmax())
    start = end - int(lengths[end]) if lengths[end] > 1 else end
    third = (end - start) / 3
    return max(start + int(third) + int(third / 2), 0)


# --- nothing stays


@block
def mock_training(learn: Any) -> Iterator[None]:
    """Around a fit of which nothing stays: all is restored, however the block ends.

    What records, saves or schedules does not run; other callbacks do, and what they keep for
    themselves stays.
    """
    kept = {k: v for k, v in vars(learn).items() if k not in ("cbs", "_by_event", "_recorders")}
    kept = {k: list(v) if type(v) is list else v for k, v in kept.items()}
    observers = [
        cb for cb in learn.cbs if isinstance(cb, _OBSERVERS) or hasattr(type(cb), "record")
    ]
    clips = [cb for cb in observers if isinstance(cb, GradientClip)]
    stand_ins: list[Any] = [copy.deepcopy(cb) for cb in clips]  # which keep norms
    stand_ins += [Recorder() for cb in observers if isinstance(cb, Recorder)][:1]
    with Undo() as undo:
        undo.callback(vars(learn).update, kept)
        for opt in learn.opts:
            undo.callback(_restore, opt, *_state_of(opt))
        undo.enter_context(preserve_random_states())
        undo.callback(set_loader, learn.dls.train, loader_state(learn.dls.train))
        for module in (learn.model, learn.loss_func):
            if isinstance(module, nn.Module):
                undo.callback(module.zero_grad)
                undo.enter_context(restore_after(Tree(module)))
        undo.enter_context(learn.removed_cbs(observers))
        undo.enter_context(learn.added_cbs(stand_ins))
        undo.enter_context(learn.no_logging())
        learn._loss_facts, learn.batch_facts = LossFacts(), BatchFacts()
        yield


def _state_of(opt: Any) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Copies of what an optimizer holds for each parameter, and of its groups' settings."""
    state = {p: copy.deepcopy(of_p) for p, of_p in opt.state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
    return state, copy.deepcopy(groups)


def _restore(opt: Any, state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    opt.state.clear()
    opt.state.update(state)
    for group, before in zip(opt.param_groups, groups, strict=True):
        for key in [key for key in group if key not in before and key != "params"]:
            del group[key]
        for key, value in before.items():
            if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                with torch.no_grad():
                    group[key].copy_(value)  # a compiled step may hold the tensor itself
            else:
                group[key] = value
