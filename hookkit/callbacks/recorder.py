"""`Recorder`: losses, learning rates and metrics of a run, read from the device only on demand.

Builds on `LossHistory` and `metrics`. Smoothing, averaging by optimizer step and the move to the
host wait until the numbers are read, at the latest at the end of the epoch.
"""

from __future__ import annotations

import copy
import time
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hookkit.callbacks.callback import Callback
from hookkit.callbacks.losses import Floats, LossHistory
from hookkit.callbacks.metrics import Mean, Metric, add_up, as_metric, take_of_ranks
from hookkit.checks import check_flag, check_number
from hookkit.data import batch_size, to_device
from hookkit.errors import HookError
from hookkit.texts import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Recorder(Callback):
    """Losses, learning rates, metrics. Fits add to it; `validate` and `get_preds` leave it alone.

    Under `distrib_ctx` all numbers are over all ranks, and the same on each: of validation those of
    the data set, of training means, from the end of each epoch on. A metric that is an object is
    given the batches of all ranks; torchmetrics' merge what they have counted themselves.

    Args:
        add_time: whether the log has the epoch's duration.
        train_metrics: whether metrics are computed on training batches too.
        valid_metrics: whether metrics are computed on validation batches.
        beta: of the exponential moving average that smooths the training loss.

    Raises:
        OptionError: `beta` is not from 0 to below 1.

    Attributes:
        values: per epoch `[train_loss, valid_loss, *metrics]`, floats; None where nothing ran.
            `train_loss` is the smoothed loss at the end of the epoch.
        metric_names: the log's columns: `epoch`, `train_loss`, `valid_loss`, the metrics, `time`.
        log: the last epoch's row: `[0, 6.58, 5.40, '00:00']`.
        lrs: per training batch, the last parameter group's learning rate.
        iters: per epoch, how many training batches there had been at its end.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(n_trn=3)
    >>> with learn.no_logging(): learn.fit(2)
    >>> len(learn.recorder.losses), len(learn.recorder.values), learn.recorder.iters
    (6, 2, [3, 6])
    """

    order = 50
    _saved: ClassVar[tuple[str, ...]] = (
        *("values", "log", "lrs", "iters", "_losses", "_rows", "_fits", "_smooth"),
        *("_average", "_gathered", "_train_part", "_valid_part"),
    )
    _renamed: ClassVar[Mapping[str, str]] = {
        "plot": "plot_loss()",
        "plot_losses": "plot_loss()",
        "plot_metrics": "rows()",
        "val_losses": "values",
    }

    def __init__(
        self,
        add_time: bool = True,
        train_metrics: bool = False,
        valid_metrics: bool = True,
        beta: float = 0.98,
    ) -> None:
        what = "the share of the smoothed loss that stays at each batch"
        self.beta = check_number("Recorder", "beta", beta, 0, below=1, what=what)
        self.add_time = check_flag("Recorder", "add_time", add_time)
        self.train_metrics = check_flag("Recorder", "train_metrics", train_metrics)
        self.valid_metrics = check_flag("Recorder", "valid_metrics", valid_metrics)
        self.metric_names: list[str] = []
        self.values: list[list[Any]] = []
        self.log: list[Any] = []
        self.lrs: list[float] = []
        self.iters: list[int] = []
        self._losses, self._rows = LossHistory(), list[dict[str, Any]]()
        self._fits = [0]  # the batch each fit began with: smoothing starts again there
        self._smooth, self._average = array("d"), 0.0
        self._gathered = 0, 0.0  # smoothed losses that are over all ranks, and the average there
        self._valid_loss, self._cancelled = Mean(), False
        self._metrics: dict[bool, list[Mean | Metric]] = {True: [], False: []}
        self._train_part: list[Any] = []
        self._valid_part: list[Any] = []

    # --- events

    def before_fit(self) -> None:
        """Names the columns; a fit starts a new smoothing."""
        metrics = [as_metric(m, self.learn.device) for m in self.learn.metrics]
        self._metrics[False] = metrics if self.valid_metrics else []
        self._metrics[True] = copy.deepcopy(metrics) if self.train_metrics else []
        if not self.learn.fitting:
            return
        self._fits.append(len(self._losses))
        self.before_epoch()
        self._cancelled = False
        self.metric_names = ["epoch", *self._columns(), *["time"] * self.add_time]

    def _columns(self) -> list[str]:
        both = self.train_metrics and self.valid_metrics
        named = {part: [n for m in ms for n in m.names] for part, ms in self._metrics.items()}
        train = ["train_loss"] + [("train_" if both else "") + name for name in named[True]]
        valid = ["valid_loss"] + [("valid_" if both else "") + name for name in named[False]]
        return train + (valid if self.learn.dls.valid is not None else [])

    def before_epoch(self) -> None:
        """Starts the clock; also called as an epoch ends, since the event may be cancelled."""
        self._started = time.perf_counter()
        self._train_part, self._valid_part = [], []

    def before_train(self) -> None:
        """Starts the training metrics again."""
        for metric in self._metrics[True]:
            metric.reset()

    def before_validate(self) -> None:
        """Starts the validation loss and metrics again."""
        self._valid_loss.reset()
        for metric in self._metrics[False]:
            metric.reset()

    def after_cancel_batch(self) -> None:
        """Remembers that this batch is not to be recorded."""
        self._cancelled = True

    def after_cancel_step(self) -> None:
        """A step that is skipped records nothing: none of its batches, and not this one."""
        self._cancelled = True
        self._losses.drop(self.learn.n_steps)
        n = len(self._losses)
        del self.lrs[n:]
        self._fits[-1] = min(self._fits[-1], n)
        if len(self._smooth) > n:  # with one of them: smoothed again from the fit's first batch
            del self._smooth[self._fits[-1] :]
            self._gathered = min(self._gathered, (self._fits[-1], 0.0))

    def after_batch(self) -> None:
        """Adds the batch's loss and metrics, on their device."""
        learn = self.learn
        cancelled = self._cancelled or learn.loss is None
        self._cancelled = False
        if given := self._given_all():
            take_of_ranks(given, learn, False, cancelled)
        if cancelled:
            return
        self._add_loss()
        for metric in self._metrics[learn.training]:
            if metric not in given:
                metric.take(learn)

    def _add_loss(self) -> None:
        learn = self.learn
        if learn.training:
            learn._loss_facts.see_scores(learn.loss_func, learn.pred)
            learn.batch_facts.see(learn.xb)
            if learn.stepped:
                learn.batch_facts.end_step()
            self._losses.begin(learn.n_steps - learn.stepped)
            self._losses.put(learn.loss)
            self.lrs.append(learn.opt.param_groups[-1]["lr"])
        else:
            self._valid_loss.add(learn.loss.mean(), batch_size(learn.yb or learn.xb))

    def _given_all(self) -> list[Metric]:
        """The metrics that are given the batches of all ranks."""
        metrics = self._metrics[self.learn.training] if self._is_shared() else []
        return [m for m in metrics if isinstance(m, Metric) and not m.merges]

    def _is_shared(self) -> bool:
        """Whether each rank has a part of the loader's batches, as accelerate gives them."""
        return self.learn.accelerator is not None and hasattr(self.learn.dl, "end_of_dataloader")

    def after_train(self) -> None:
        """Notes the smoothed loss and the training metrics."""
        if self.learn.accelerator is not None:
            self._gather()
        self._train_part = [self.smooth_loss, *self._computed([])]

    def after_validate(self) -> None:
        """Gives the learner its `final_record`; inside a fit, notes it for the epoch."""
        part = self._computed([self._valid_loss])
        self.learn.final_record = part
        if not self.learn.eval_pass:
            self._valid_part = part

    def after_epoch(self) -> None:
        """Adds the epoch to `values` and passes the row to the learner's logger."""
        if not self.learn.fitting:
            return
        names = self._columns()
        record = self._train_part + self._valid_part
        record += [None] * (len(names) - len(record))  # a part that was cancelled as it began
        self.learn.final_record = record
        self.values.append(record)
        self.iters.append(len(self._losses))
        self._rows.append({"epoch": self.learn.epoch, **dict(zip(names, record, strict=True))})
        self.log = [self.learn.epoch, *record]
        if self.add_time:
            self.log.append(format_time(time.perf_counter() - self._started))
        self.learn.logger(self.log)
        self.before_epoch()

    def _computed(self, first: list[Mean | Metric]) -> list[Any]:
        """The values of `first`, and of the metrics of training or of validation."""
        metrics, given = [*first, *self._metrics[self.learn.training]], self._given_all()
        while given and not take_of_ranks(given, self.learn, True, False):
            pass  # others have more batches
        if self._is_shared():
            add_up([m for m in metrics if m not in given], self.learn._where())
        return [value for metric in metrics for value in metric.results()]

    def _gather(self) -> None:
        """Replaces the losses since the last time by means over the ranks: all of them call."""
        n, self._average = self._gathered
        del self._smooth[n:]
        self._losses.gather(self.learn._where())
        self._smoothen()
        self._gathered = len(self._smooth), self._average

    # --- reading

    @property
    def losses(self) -> list[float]:
        """The smoothed training loss after each training batch."""
        self._smoothen()
        return self._smooth.tolist()

    @property
    def smooth_loss(self) -> float | None:
        """The smoothed training loss now; None before the first batch of a fit."""
        self._smoothen()
        return self._smooth[-1] if len(self._smooth) > self._fits[-1] else None

    def _smoothen(self) -> None:
        """Continues the debiased exponential average over the losses since the last read."""
        n = len(self._smooth)
        for i, loss in enumerate(self._losses.by_batch(n).tolist(), n):
            start = self._fits[bisect_right(self._fits, i) - 1]
            before = self._average if i > start else 0.0
            self._average = self.beta * before + (1 - self.beta) * loss
            self._smooth.append(self._average / (1 - self.beta ** (i - start + 1)))

    def raw_losses(self) -> Floats:
        """(n_batches,) float64: the training loss of each batch, not smoothed."""
        return self._losses.by_batch()

    def step_losses(self) -> Floats:
        """(n_steps,) float64: the mean training loss of the batches of each optimizer step.

        NaN for steps of which no loss is known, such as steps made outside a fit.
        """
        n = getattr(self.learn, "n_steps", 0) or int(self._losses.steps().max(initial=-1)) + 1
        return self._losses.by_step(n)

    def rows(self) -> list[dict[str, Any]]:
        """Per epoch a dict: `{"epoch": 0, "train_loss": 6.58, "valid_loss": 5.40, …}`."""
        return [dict(row) for row in self._rows]

    def _epochs(self, n_steps: int) -> list[dict[str, Any]]:
        """`rows()` as a `Run` has them: with the last of `n_steps` steps that each epoch made."""
        found, steps = [], self._losses.steps()
        for row, n_batches in zip(self.rows(), self.iters, strict=True):
            last = steps[:n_batches][-1:]
            known = {"step": min(int(last[0]), n_steps - 1)} if len(last) and n_steps else {}
            found.append({"epoch": row.pop("epoch"), **known, **row})
        return found

    def state_dict(self) -> dict[str, Any]:
        """What was recorded; reads the losses from the device."""
        self._losses.by_batch()
        counted = [metric.state() for metric in self._metrics[True]]
        return {**super().state_dict(), "train_metrics": counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        state = dict(state)
        if counted := state.pop("train_metrics", None):
            for metric, each in zip(self._metrics[True], counted, strict=True):
                metric.take_up(to_device(each, self.learn.device or torch.device("cpu")))
        super().load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # metrics in use belong to a fit; each fit begins with those of its Learner
        return {**super().__getstate__(), "_metrics": {True: [], False: []}}

    def plot_loss(
        self, skip_start: int = 0, with_valid: bool = True, *, ax: Any = None, fig: Any = None
    ) -> Any:
        """Draws training and validation loss over steps: `hookkit.plotting.plot_loss` of the run.

        Raises:
            HookError: its Learner no longer exists.
        """
        from hookkit.plotting import plot_loss

        if self.learn is None:
            raise HookError(
                "plot_loss: this Recorder belongs to no Learner, or to one that no longer exists. "
                "Keep the Learner, or draw its record: plot_loss(learn.run_record())."
            )

        return plot_loss(self.learn.run_record(), skip_start, with_valid, ax=ax, fig=fig)

    def plot_lr(self, *, ax: Any = None) -> Axes:
        """Draws the learning rate of each training batch, dotted lines between epochs; the Axes.

        Of several parameter groups it is the last one's.
        """
        from hookkit.plotting.rates import plot_rates

        return plot_rates(self.lrs, self.iters, ax=ax)
