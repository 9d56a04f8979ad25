"""Callbacks that follow one number of each epoch: keep the best weights, stop when it stands still.

Builds on `recorder`, whose columns they choose from. Names, order of arguments and defaults are
fastai's (`fastai.callback.tracker`, 2.8).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import gt, lt
from pathlib import Path
from typing import Any, ClassVar

from hookkit.callbacks.callback import Callback
from hookkit.checks import check_callable, check_flag, check_number, check_path, shown
from hookkit.errors import OptionError
from hookkit.events import CancelFitException


class TrackerCallback(Callback):
    """Knows after each epoch whether a number of it is the best so far. A base of others.

    Args:
        monitor: a column of the log: `"train_loss"`, `"valid_loss"` or the name of a metric.
        comp: `comp(new, best)` is whether `new` is better, as `np.less`; None is that for names
            with `loss` or `error` in them, `np.greater` for others.
        min_delta: by how much a number has to be better.
        reset_on_fit: whether each fit begins anew; otherwise a fit goes on with the best of the one
            before.

    Raises:
        ArgumentError: `comp` cannot be called.
        OptionError: `min_delta` is no number from 0; as a fit begins: the log has no such column.

    Attributes:
        best: the best number so far; infinite before the first.
        best_epoch: the epoch it is of; None before the first.
        new_best: whether the last epoch's is the best.
    """

    order = 60
    _saved: ClassVar[tuple[str, ...]] = ("best", "best_epoch", "new_best")
    best: float | None = None
    best_epoch: int | None = None
    new_best = False

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        reset_on_fit: bool = True,
    ) -> None:
        who = type(self).__name__
        down = "loss" in str(monitor) or "error" in str(monitor)
        self.monitor = monitor
        usual = lt if down else gt
        self.comp: Callable[[Any, Any], Any] = check_callable(who, "comp", comp) or usual
        what = "by how much a number has to be better"
        self.min_delta = check_number(who, "min_delta", min_delta, 0, what=what)
        self.reset_on_fit = check_flag(who, "reset_on_fit", reset_on_fit)

    def before_fit(self) -> None:
        """Begins anew, unless it goes on from the fit before."""
        if not self.learn.fitting:
            return
        self._check_monitor()
        self.new_best = False
        if self.reset_on_fit or self.best is None:
            self.best, self.best_epoch = math.inf * self._sign(), None

    def _check_monitor(self) -> None:
        recorder: Any = self.learn._cb_named("recorder")
        names = [] if recorder is None else recorder.metric_names
        known = [name for name in names if name not in ("epoch", "time")]
        if self.monitor not in known:
            raise OptionError(
                f"{type(self).__name__}(monitor={shown(self.monitor)}): the log has no such "
                f"column, only {', '.join(known) or 'none, since there is no Recorder'}. Give one "
                f"of these, or a Learner with that metric, or with validation data."
            )

    def _sign(self) -> int:
        """1 where smaller is better, −1 where greater is."""
        return 1 if self.comp(0.0, 1.0) else -1

    def after_epoch(self) -> None:
        """Compares the epoch's number with the best so far."""
        if not self.learn.fitting:
            return
        value = self.learn.recorder.rows()[-1][self.monitor]
        self.new_best = False
        if value is not None:  # validation was cancelled
            self._see(value)

    def _see(self, value: Any) -> None:
        self.new_best = bool(self.comp(value + self._sign() * self.min_delta, self.best))
        if self.new_best:
            self.best, self.best_epoch = value, self.learn.epoch

    def __repr__(self) -> str:
        none = self.best_epoch is None
        found = "" if none else f", best {self.best:.4g} in epoch {self.best_epoch}"
        return f"{type(self).__name__}({self.monitor}{found})"


class EarlyStoppingCallback(TrackerCallback):
    """Ends the fit when a number of the epochs is not getting better any more.

    Nothing is printed: `repr` says what was best when.

    Args:
        monitor: a column of the log: `"train_loss"`, `"valid_loss"` or the name of a metric.
        comp: `comp(new, best)` is whether `new` is better; None: less for losses and errors, else
            greater.
        min_delta: by how much a number has to be better.
        patience: how many epochs in a row may be without a new best; the last of them ends the fit.
        reset_on_fit: whether each fit begins anew; otherwise it goes on with the best before.

    Raises:
        OptionError: as `TrackerCallback`; `patience` is no whole number from 1.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(lr=0.0, cbs=EarlyStoppingCallback(patience=2))
    >>> with learn.no_logging(): learn.fit(10)
    >>> len(learn.recorder.values), learn.early_stopping.best_epoch
    (3, 0)
    """

    order = TrackerCallback.order + 3
    _saved: ClassVar[tuple[str, ...]] = (*TrackerCallback._saved, "wait")

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        what = "how many epochs in a row may be without a new best"
        self.patience = check_number(
            type(self).__name__, "patience", patience, 1, whole=True, what=what
        )
        self.wait = 0

    def before_fit(self) -> None:
        """Begins to count anew."""
        super().before_fit()
        if self.learn.fitting:
            self.wait = 0

    def _see(self, value: Any) -> None:
        super()._see(value)
        self.wait = 0 if self.new_best else self.wait + 1
        if self.wait >= self.patience:
            raise CancelFitException


class SaveModelCallback(TrackerCallback):
    """Saves the weights whenever a number of the epochs is better, and loads the best at the end.

    They are written by `learn.save`, into `learn.path/learn.model_dir`. After a fit that ends by an
    exception the model stays as it is. If a file cannot be written, a warning says so and the
    training goes on.

    Args:
        monitor: a column of the log: `"train_loss"`, `"valid_loss"` or the name of a metric.
        comp: `comp(new, best)` is whether `new` is better; None: less for losses and errors, else
            greater.
        min_delta: by how much a number has to be better.
        fname: of the file, without `.pth`.
        every_epoch: saves every epoch instead, or every n-th, as `{fname}_{epoch}`; then nothing is
            loaded at the end.
        at_end: saves what the fit has ended with instead of loading the best.
        with_opt: whether to save and load the optimizer's state too.
        reset_on_fit: whether each fit begins anew; otherwise it goes on with the best before.

    Raises:
        ArgumentError: `fname` is no name of a file.
        OptionError: as `TrackerCallback`; `every_epoch` is no whole number from 0.

    Attributes:
        last_saved_path: the file that was written last; None before the first.

    >>> import tempfile
    >>> from hookkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=SaveModelCallback(fname="best"))
    ...     with learn.no_logging(): learn.fit(2)
    ...     print(learn.save_model.last_saved_path.name)
    best.pth
    """

    order = TrackerCallback.order + 1
    _saved: ClassVar[tuple[str, ...]] = (*TrackerCallback._saved, "last_saved_path")

    def __init__(
        self,
        monitor: str = "valid_loss",
        comp: Callable[[Any, Any], Any] | None = None,
        min_delta: float = 0.0,
        fname: str = "model",
        every_epoch: bool | int = False,
        at_end: bool = False,
        with_opt: bool = False,
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        who, every = type(self).__name__, every_epoch
        self.fname = check_path(who, fname, "fname")
        every = int(every) if isinstance(every, bool) else every
        what = "True for every epoch, 3 for every third"
        self.every_epoch = check_number(who, "every_epoch", every, 0, whole=True, what=what)
        self.at_end = check_flag(who, "at_end", at_end)
        self.with_opt = check_flag(who, "with_opt", with_opt)
        self.last_saved_path: Any = None

    def before_fit(self) -> None:
        """Begins anew, unless it goes on from the fit before."""
        if self.every_epoch:
            return
        super().before_fit()
        if self.best_epoch is None:
            self.last_saved_path = None  # another fit's file is not the best of this one

    def after_epoch(self) -> None:
        """Saves, if this epoch is to be saved."""
        learn = self.learn
        if not learn.fitting:
            return
        if not self.every_epoch:
            super().after_epoch()
            if self.new_best:
                self._save(str(self.fname))
        elif learn.epoch % self.every_epoch == 0:
            self._save(f"{self.fname}_{learn.epoch}")

    def after_fit(self) -> None:
        """Loads the best, or saves the last."""
        if not self.learn.fitting:
            return
        if self.at_end:
            self._save(str(self.fname))
        elif not self.every_epoch and self.last_saved_path is not None:
            self.learn.load(self.fname, with_opt=self.with_opt)

    def _save(self, file: str) -> None:
        path = self.learn.save(file, with_opt=self.with_opt)
        self.last_saved_path = path or self.last_saved_path  # None: it could not be written

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and where it is."""
        path = self.last_saved_path
        return {**super().state_dict(), "last_saved_path": None if path is None else str(path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        path = state["last_saved_path"]
        super().load_state_dict({**state, "last_saved_path": None if path is None else Path(path)})
