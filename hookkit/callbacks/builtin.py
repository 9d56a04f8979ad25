"""The smaller ready-made callbacks: modes and counts, accumulation, clipping, schedules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from math import ceil
from typing import Any, ClassVar

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookkit.callbacks.callback import Callback
from hookkit.callbacks.losses import Scalars
from hookkit.callbacks.recorder import Recorder
from hookkit.checks import check_flag, check_number, kind_of, shown
from hookkit.data import n_batches
from hookkit.errors import ArgumentError, OptionError


class TrainEvalCallback(Callback):
    """Puts the model on the data's device and in the right mode, and counts training batches.

    Every Learner has one, unless it is made with `default_cbs=False`.

    >>> from hookkit.testing import synth_learner
    >>> synth_learner().cbs
    [TrainEvalCallback, Recorder]
    """

    order = -10
    run_valid = False

    def before_fit(self) -> None:
        """Starts the counts of a fit; moves model and loss to the DataLoaders' device, if any."""
        learn = self.learn
        device = getattr(learn.dls, "device", None)
        if device is not None:
            for module in (learn.model, learn.loss_func):
                if isinstance(module, nn.Module):
                    module.to(device)
        if not learn.fitting:
            return
        learn.train_iter, learn.pct_train = 0, learn.epoch / max(learn.n_epoch, 1)
        if callable(reset := getattr(learn.model, "reset", None)):
            reset()  # as recurrent models have it: forgets the state of the last sequence

    def before_train(self) -> None:
        """Training mode."""
        self.learn.training = True
        self.learn.model.train()

    def before_validate(self) -> None:
        """Evaluation mode."""
        self.learn.training = False
        self.learn.model.eval()

    def after_batch(self) -> None:
        """One more training batch."""
        learn = self.learn
        learn.train_iter += 1
        if learn.n_iter:
            learn.pct_train = (learn.epoch + (learn.iter + 1) / learn.n_iter) / learn.n_epoch


class GradientAccumulation(Callback):
    """One optimizer step for every `n_acc` batches, with the mean of their gradients.

    The last batches of an epoch make a step too, however few. They are dropped if the end is not
    known in advance: the loader has no length, or training is cancelled.

    Args:
        n_acc: batches per step.

    Raises:
        OptionError: `n_acc` is no whole number from 1.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(n_trn=10, cbs=GradientAccumulation(4))
    >>> with learn.no_logging(): learn.fit(1)
    >>> learn.n_steps
    3
    """

    order = -5
    run_valid = False

    def __init__(self, n_acc: int = 32) -> None:
        what = "how many batches make one step"
        self.n_acc = check_number("GradientAccumulation", "n_acc", n_acc, 1, whole=True, what=what)

    def before_train(self) -> None:
        """Drops gradients that the epoch before has not stepped with."""
        self.learn.opt.zero_grad()

    def before_batch(self) -> None:
        """Decides whether a step follows this batch."""
        learn = self.learn
        last = learn.n_iter is not None and learn.iter + 1 == learn.n_iter
        learn.steps_now = (learn.iter + 1) % self.n_acc == 0 or last

    def after_loss(self) -> None:
        """Scales the loss that is differentiated; `learn.loss` stays as it is."""
        learn = self.learn
        if learn.loss_grad is None:
            return
        n = self.n_acc
        if learn.n_iter is not None:  # the last step of an epoch may have fewer batches
            n = min(n, learn.n_iter - learn.iter // n * n)
        learn.loss_grad = learn.loss_grad / n

    def cleanup_fit(self) -> None:
        """Back to a step for each batch."""
        self.learn.steps_now = True


class GradientClip(Callback):
    """Scales the gradients of each step so that their joint norm is at most `max_norm`.

    Args:
        max_norm: the largest norm a step may have.
        norm_type: 2.0, `float("inf")`, …, as in `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        norms: per step the norm before clipping, kept on the device; `norms.read()` gives them.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(n_trn=3, cbs=GradientClip(0.1))
    >>> with learn.no_logging(): learn.fit(1)
    >>> len(learn.gradient_clip.norms.read())
    3
    """

    run_valid = False
    _norm: Any = None
    _saved: ClassVar[tuple[str, ...]] = ("norms",)

    def __init__(self, max_norm: float = 1.0, norm_type: float = 2.0) -> None:
        self.max_norm = check_number("GradientClip", "max_norm", max_norm, above=0)
        self.norm_type = check_number("GradientClip", "norm_type", norm_type, above=0)
        self.norms = Scalars()

    def before_step(self) -> None:
        """Clips."""
        learn = self.learn
        clip = getattr(learn.accelerator, "clip_grad_norm_", nn.utils.clip_grad_norm_)
        norm = clip(list(learn.model.parameters()), self.max_norm, self.norm_type)
        # of a model that FSDP2 shards it is in parts, one on each rank: all of them are here
        self._norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def after_step(self) -> None:
        """Keeps the norm, if the step was made: a scaler leaves out those that overflow."""
        norm, self._norm = self._norm, None
        if norm is not None and self.learn.stepped:
            self.norms.append(norm)


class SchedulerCallback(Callback):
    """Runs a torch learning-rate scheduler: one step of it for each optimizer step really made.

    What it changed besides the learning rate (momentum, entries of its own) is restored at the end.
    A fit with a `start_epoch` continues the schedule where those epochs would have ended.

    Args:
        make: `make(opt, n_steps)` gives the scheduler; `n_steps` is how many optimizer steps the
            fit will make.
        by_epoch: one scheduler step per epoch instead; `n_steps` is then the number of epochs.
            ReduceLROnPlateau needs this: it gets the epoch's validation loss, or training loss
            where there is no validation.

    Raises:
        ArgumentError: `make` cannot be called; as the fit begins: what it gives cannot be stepped.
        OptionError: as the fit begins: the training loader has no length; the fit is resumed, and
            its checkpoint is of another schedule, such as one of fewer steps.

    >>> from torch.optim.lr_scheduler import CosineAnnealingLR
    >>> cosine = SchedulerCallback(CosineAnnealingLR)
    """

    order = 60
    run_valid = False

    def __init__(self, make: Callable[[Any, int], Any], by_epoch: bool = False) -> None:
        if not callable(make):
            raise ArgumentError(
                f"SchedulerCallback: make must be a function, found {kind_of(make)}. Give "
                f"make(opt, n_steps), such as the class CosineAnnealingLR."
            )
        self.make, self.by_epoch = make, check_flag("SchedulerCallback", "by_epoch", by_epoch)
        self._kept: list[dict[str, Any]] | None = None

    def before_fit(self) -> None:
        """Makes the scheduler for this fit."""
        learn = self.learn
        if not learn.fitting:
            return
        opt = learn.opts[0]
        self._kept = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
        n = 1 if self.by_epoch else self._n_steps()
        self.scheduler = self.make(opt, learn.n_epoch * n)
        if not callable(getattr(self.scheduler, "step", None)):
            raise ArgumentError(
                f"SchedulerCallback: make must return a scheduler of torch.optim.lr_scheduler, "
                f"found {kind_of(self.scheduler)}. Return one from make(opt, n_steps)."
            )
        if isinstance(self.scheduler, ReduceLROnPlateau) and not self.by_epoch:
            raise ArgumentError(
                "SchedulerCallback: ReduceLROnPlateau needs the loss of an epoch, and would run at "
                "each step. Use SchedulerCallback(…, by_epoch=True)."
            )
        made = self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else {}
        self._made = {"class": type(self.scheduler).__name__, **copy.deepcopy(made)}
        if not isinstance(self.scheduler, ReduceLROnPlateau):  # whose steps depend on losses
            self._skip(learn.epoch * n)

    def _skip(self, n_steps: int) -> None:
        """Makes the scheduler's steps of the epochs before `start_epoch`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped
            for _ in range(n_steps):
                self.scheduler.step()

    def _n_steps(self) -> int:
        """Optimizer steps of one epoch."""
        n = n_batches(self.learn.dls.train)
        if n is None:
            raise OptionError(
                "SchedulerCallback: a schedule by optimizer step needs the length of the training "
                "loader, which has none. Give a loader with __len__, or use "
                "SchedulerCallback(…, by_epoch=True)."
            )
        n_acc = max([cb.n_acc for cb in self.learn._grab_cbs(GradientAccumulation)], default=1)
        return ceil(n / n_acc)

    def after_batch(self) -> None:
        """Steps, if the optimizer did."""
        if not self.by_epoch and self.learn.stepped:
            self.scheduler.step()

    def after_epoch(self) -> None:
        """Steps, if it runs by epoch."""
        if not (self.by_epoch and self.learn.fitting):
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            return
        row = self.learn.recorder.rows()[-1]
        loss = row["train_loss"] if row.get("valid_loss") is None else row["valid_loss"]
        if loss is not None:
            self.scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's, during a fit: now, and as it was made."""
        has_one = self._kept is not None and hasattr(self.scheduler, "state_dict")
        return {"scheduler": self.scheduler.state_dict(), "made": self._made} if has_one else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the schedule.

        Raises:
            OptionError: it is another schedule. Taken up, it might end before the fit does.
        """
        ours, theirs = self._made, state["made"]
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise OptionError(
                    f"SchedulerCallback: the checkpoint's schedule has {name}="
                    f"{shown(theirs.get(name))}, this one {shown(ours.get(name))}. Resume with the "
                    f"same epochs, batches, learning rate and schedule; or use learn.load(…) and "
                    f"begin another fit."
                )
        self.scheduler.load_state_dict(state["scheduler"])

    def cleanup_fit(self) -> None:
        """Restores the optimizer's other hyperparameters."""
        kept, self._kept = self._kept, None
        groups = self.learn.opts[0].param_groups if kept else []
        for before, group in zip(kept or [], groups, strict=True):
            for key in [k for k in group if k not in before and k != "params"]:
                del group[key]
            group.update({k: v for k, v in before.items() if k != "lr"})


DEFAULT_CALLBACKS: tuple[type[Callback], ...] = (TrainEvalCallback, Recorder)
"""What a Learner has unless `default_cbs=False`."""
