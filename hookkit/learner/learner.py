"""`Learner`: data, model, loss, optimizer and callbacks in one place, and what one does with them.

Builds on `loop` (the loop itself), `predicting` (`validate`, `get_preds`) and `callbacks.readout`
(what was recorded). Optimizers, schedulers, loaders and distribution are torch's and accelerate's
own, not wrapped. Names, order and defaults are fastai's (2.8). One public class with its
documentation, and therefore one file of more than 300 lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fastcore.basics import PrettyString
from torch import nn

from hookkit.callbacks import DEFAULT_CALLBACKS, ProgressCallback, SchedulerCallback
from hookkit.callbacks.losses import LossHistory
from hookkit.callbacks.readout import gather, loop_text, run_of
from hookkit.callbacks.runner import listed
from hookkit.checks import check_flag, check_module, check_path
from hookkit.errors import nearest
from hookkit.events import CancelFitException
from hookkit.interrupts import block
from hookkit.learner.checkpoints import end_event, load_weights, write
from hookkit.learner.checks import (
    as_loaders,
    check_decay,
    check_epochs,
    check_function,
    check_optimizer,
    check_trained,
    checked_metrics,
    warn_unwritten,
)
from hookkit.learner.distributing import distributed
from hookkit.learner.groups import (
    freeze_groups,
    make_optimizer,
    one_cycle,
    param_groups,
    set_hyper,
    spread,
    trainable_params,
)
from hookkit.learner.lr_finder import SuggestedLRs, find_lr
from hookkit.learner.predicting import Predicting
from hookkit.learner.resuming import read_for_fit, resume_from
from hookkit.records import Run, Tables, Views
from hookkit.stats.named import Named

if TYPE_CHECKING:
    from hookkit.summaries.fastai_layout import SummaryText


class Learner(Predicting, Tables, Views, Named):
    """Trains a model, and calls callbacks at each event.

    Args:
        dls: `DataLoaders`, a pair of loaders `(train, valid)`, or one; None for a Learner that only
            summarises, or validates and predicts on batches given to it.
        model: any `nn.Module`. A tuple or list batch is called as `model(*inputs)`, a mapping as
            `model(**batch)`.
        loss_func: `loss_func(pred, *targets)`; None takes `dls.train_ds.loss_func`, else the `loss`
            in what the model returns.
        opt_func: `opt_func(groups, lr=lr)` gives a torch optimizer.
        lr: of fits without one of their own: a number, one per group, or `slice(lowest, highest)`.
        splitter: `splitter(model)` gives the parameters, or a list of them for each group.
        cbs: callbacks, instances or classes; read by name, as in `learn.activation_stats`, and of
            several of one name as `activation_stats`, `activation_stats_2`, …
        metrics: functions `f(pred, *targets)` averaged over samples, or objects with `reset`,
            `update` and `compute` (torchmetrics, its MetricCollection) or `reset`, `accumulate` and
            `value` (fastai); instances or classes.
        path: folder of `model_dir`; None for the current one.
        model_dir: where `save` writes.
        wd: weight decay; None for the optimizer's own.
        train_bn: whether batch norms in frozen groups still learn.
        default_cbs: whether to begin with TrainEvalCallback and Recorder; one of these in `cbs`
            replaces the default.

    Attributes:
        epoch, n_epoch, iter, n_iter: how far the run is (`n_iter` None: unknown).
        train_iter, pct_train: training batches done in this fit, and their share of it.
        n_steps: optimizer steps really made, over all fits; it goes on from the steps that its
            recorders have seen in another Learner or loop before.
        stepped: whether the current batch has made one.
        steps_now: whether the current batch is to be followed by a step.
        eval_pass: whether `validate` or `get_preds` is under way.
        xb, yb, x, y: the batch as tuples, and the only item of each if there is one.
        pred, loss, loss_grad: None until the batch gets there; `loss_grad` is what is
            differentiated, `loss` a copy that callbacks may keep.
        autocast, scaler: the context of the forward pass, and the GradScaler of the steps, in a fit
            with MixedPrecision.
        frozen_idx: the first parameter group that is trained.
        final_record: losses and metrics of the last epoch or validation.
        logger: takes a row per epoch; `print` by default.

    Raises:
        ArgumentError: an argument is of a kind that cannot work.

    >>> from hookkit.testing import RegModel, synth_dbunch
    >>> learn = Learner(synth_dbunch(), RegModel(), nn.MSELoss(), torch.optim.SGD, lr=0.01)
    >>> with learn.no_logging(): learn.fit(3)
    >>> len(learn.recorder.values), learn.n_steps
    (3, 30)
    """

    def __init__(
        self,
        dls: Any,
        model: nn.Module,
        loss_func: Callable[..., Any] | None = None,
        opt_func: Callable[..., Any] = torch.optim.Adam,
        lr: Any = 1e-3,
        splitter: Callable[[nn.Module], Any] = trainable_params,
        cbs: Any = None,
        metrics: Any = None,
        path: str | Path | None = None,
        model_dir: str | Path = "models",
        wd: float | None = None,
        *,
        train_bn: bool = True,
        default_cbs: bool = True,
    ) -> None:
        check_module("Learner", model, "The order is Learner(dls, model, loss_func).")
        dls = as_loaders(dls)
        for what, f in (("loss_func", loss_func), ("opt_func", opt_func), ("splitter", splitter)):
            check_function(what, f)
        if loss_func is None and dls is not None:
            loss_func = getattr(dls.train_ds, "loss_func", None)
        check_decay("Learner", wd)
        super().__init__(dls, model, loss_func)
        self.opt_func, self.splitter = opt_func, splitter
        self.lr, self.wd, self.frozen_idx = lr, wd, 0
        self.train_bn = check_flag("Learner", "train_bn", train_bn)
        self.metrics = checked_metrics(metrics)
        self.path = Path() if path is None else check_path("Learner", path)
        self.model_dir = check_path("Learner", model_dir, "model_dir")
        self.logger: Callable[[list[Any]], Any] = print
        given = listed(cbs)
        kinds = [cb if isinstance(cb, type) else type(cb) for cb in given]
        if check_flag("Learner", "default_cbs", default_cbs):
            self.add_cbs(d for d in DEFAULT_CALLBACKS if not any(issubclass(k, d) for k in kinds))
        self.add_cbs(given)
        self("after_create")

    # --- learning

    def fit(
        self,
        n_epoch: int,
        lr: Any = None,
        wd: float | None = None,
        cbs: Any = None,
        reset_opt: bool = False,
        start_epoch: int = 0,
        *,
        resume: str | Path | None = None,
    ) -> None:
        """Trains for `n_epoch` epochs, validating after each if there is validation data.

        However it ends, also by an exception or Ctrl-C, every callback's `cleanup_fit()` runs.

        Args:
            n_epoch: the number of epochs in all.
            lr: learning rate, as the Learner's; None takes the Learner's.
            wd: weight decay; None takes the Learner's.
            cbs: further callbacks for this fit; they stay readable by name afterwards.
            reset_opt: whether to begin with a new optimizer.
            start_epoch: the first epoch's number.
            resume: a file that `save` wrote at the end of an epoch (in `after_epoch`, or later) of
                the same fit. It goes on from there, to the same weights and the same record as if
                it had not ended: with the file's optimizer, schedule, random numbers and callbacks,
                and the parameters that were frozen then. It does not have what a data set or
                workers that stay (`persistent_workers`) draw from generators of their own.
                Within an epoch a file of `after_batch` will do, after a step, in one process, where
                the training loader has `state_dict` and `load_state_dict`, as torchdata's
                StatefulDataLoader. `before_epoch` and `before_train` of that epoch run again.

        Raises:
            ModelRunError: there is no training data, or no loss.
            OptionError: an option cannot work; `resume` is no such file, or of another Learner.
        """
        check_epochs(n_epoch, start_epoch, resume)
        check_flag("fit", "reset_opt", reset_opt)
        check_decay("fit", wd)
        self._needs_data("fit")
        state = None if resume is None else read_for_fit(self._file("fit", resume), n_epoch)
        start = start_epoch if state is None else state["fit"]["epoch"]

        def run() -> None:
            if state is not None:
                resume_from(self, state)
            self._do_fit()

        with self.added_cbs(cbs), self._fit_under_way():
            if reset_opt or self.opt is None:
                self.create_opt()
            elif self.accelerator is None:  # whose wrappers may have parameters of their own
                check_trained(self.model, self.opt)
            self._set_hypers(lr, wd)
            self.opt.zero_grad()  # of a fit that was interrupted, or of somebody's own backward
            self.n_epoch, self.epoch = n_epoch, start
            self._epochs_done, self._within_epoch = start, False
            self._epoch_range = range(start, n_epoch)
            self._with_events(run, "fit", CancelFitException)

    def fit_one_cycle(
        self,
        n_epoch: int,
        lr_max: Any = None,
        div: float = 25.0,
        div_final: float = 1e5,
        pct_start: float = 0.25,
        wd: float | None = None,
        moms: tuple[float, float] = (0.85, 0.95),
        cbs: Any = None,
        reset_opt: bool = False,
        start_epoch: int = 0,
        *,
        resume: str | Path | None = None,
    ) -> None:
        """`fit` with torch's OneCycleLR: warm up to `lr_max`, anneal to almost nothing.

        Args:
            n_epoch: the number of epochs in all.
            lr_max: the highest learning rate, as the Learner's `lr`; None takes that.
            div: the first learning rate is `lr_max / div`.
            div_final: the last one is `lr_max / div_final`.
            pct_start: the share of the steps that warm up.
            moms: lowest and highest momentum (Adam: first beta), cycled against the learning
                rate, and restored afterwards. Not changed in an SGD without momentum.
            wd, cbs, reset_opt, start_epoch, resume: as in `fit`.
        """
        lr = self.lr if lr_max is None else lr_max
        schedule = SchedulerCallback(one_cycle(lr, div, div_final, pct_start, moms))
        cbs = [schedule, *listed(cbs)]
        self.fit(n_epoch, lr, wd, cbs, reset_opt, start_epoch, resume=resume)

    def lr_find(
        self,
        start_lr: float = 1e-7,
        end_lr: float = 10,
        num_it: int = 100,
        stop_div: bool = True,
        show_plot: bool = True,
    ) -> SuggestedLRs:
        """A learning rate to train with, from a short training with a growing one.

        Of that training nothing stays: model, optimizer, random states, data order and records are
        as before, however it ends. Your own callbacks run, and what they keep for themselves stays.

        Args:
            start_lr: the first learning rate, of all parameter groups.
            end_lr: the last.
            num_it: how many batches are trained on, of as many epochs as it takes.
            stop_div: whether to stop when the smoothed loss is over four times its least.
            show_plot: whether to draw the picture, where matplotlib is installed.

        Returns:
            `.valley` is the suggestion, fastai's; `.lrs` and `.losses` are what it is read from;
            `.plot()` draws them.

        Raises:
            ModelRunError: the loss was a number for too few batches, or there is no training data.
            OptionError: an option cannot work; a fit is under way.
        """
        show_plot = check_flag("lr_find", "show_plot", show_plot)
        found = find_lr(self, start_lr, end_lr, num_it, stop_div)
        if show_plot and find_spec("matplotlib") is not None:
            found.plot()
        return found

    def create_opt(self) -> None:
        """Makes a new optimizer: `opt_func(groups, lr=lr)` of the splitter's groups.

        Raises:
            ArgumentError: `opt_func` returned no optimizer, one whose steps need a closure, or one
                without the model's parameters.
        """
        groups = param_groups(self.splitter(self.model))
        opt = make_optimizer(self.opt_func, groups, self.lr)
        self.opt, self.frozen_idx = check_optimizer(self.model, opt), 0

    def _set_hypers(self, lr: Any, wd: float | None) -> None:
        n = len(self.opt.param_groups)
        set_hyper(self.opt, "lr", spread(self.lr if lr is None else lr, n))
        if (wd := self.wd if wd is None else wd) is not None:
            set_hyper(self.opt, "weight_decay", [wd] * n)

    def freeze_to(self, n: int) -> None:
        """Trains only the parameter groups from `n` on; negative ones count from the end."""
        if self.opt is None:
            self.create_opt()
        self.frozen_idx = freeze_groups(self.opt, self.model, n, self.train_bn)

    def freeze(self) -> None:
        """Trains only the last parameter group."""
        self.freeze_to(-1)

    def unfreeze(self) -> None:
        """Trains every parameter group."""
        self.freeze_to(0)

    # --- files

    def save(self, file: str | Path, with_opt: bool = True) -> Path | None:
        """Writes a checkpoint to `path/model_dir/file.pth`, whole or not at all; that path.

        It has all that a fit goes on from: weights, the optimizer's state, schedule, GradScaler,
        random numbers, epochs and steps, and what the callbacks recorded (`Callback.state_dict`).
        In `distrib_ctx` every rank has to call; rank 0 writes, of sharded weights the whole, and
        the file fits any number of processes. In `after_batch` or `after_epoch` the callbacks that
        come later get that event first: the file is of its end.

        Args:
            file: its name, or a path.
            with_opt: False writes the weights alone.

        Raises:
            OptionError: a state dict has objects that could not be loaded again.
            OSError: the file cannot be written. During a fit a warning says so, the training goes
                on, and None is returned.
        """
        with_opt = check_flag("save", "with_opt", with_opt)
        where = self._file("save", file)
        cancelled = end_event(self) if with_opt else ""
        try:
            return write(self, where, with_opt, cancelled)
        except OSError as error:
            if not self.fitting:
                raise
            warn_unwritten(where, error)
            return None

    def load(self, file: str | Path, with_opt: bool = True, strict: bool = True) -> Learner:
        """Reads weights and the optimizer's state from what `save` wrote; the Learner.

        What was recorded stays. `fit(…, resume=file)` goes on with a training instead.

        Raises:
            OptionError: there is no such file, or it does not fit; then nothing was changed.
        """
        with_opt = check_flag("load", "with_opt", with_opt)
        strict = check_flag("load", "strict", strict)
        load_weights(self, self._file("load", file), with_opt, strict)
        return self

    def _file(self, who: str, file: str | Path) -> Path:
        name = check_path(who, file, "file")
        full = name if name.suffix == ".pth" else Path(f"{name}.pth")
        where = self.path / self.model_dir / full
        if who == "save" or where.exists():
            return where
        # what `save` returned has the folder already
        in_folder = full.parent.parts and full.parent.is_dir() and not where.parent.is_dir()
        return name if name.is_file() else full if in_folder else where

    # --- reading

    def summary(self) -> SummaryText:
        """The model as a table: shapes, parameters, optimizer, loss, callbacks. Changes nothing."""
        from hookkit.summaries import learner_summary

        return learner_summary(self)

    def gather(self) -> Learner:
        """Merges what all ranks recorded; the Learner. A fit in `distrib_ctx` ends with it.

        Every rank has to call; reading afterwards waits for none. For fits in a process group of
        your own, or that an error has ended. Alone it does nothing.

        Raises:
            HookError: the ranks recorded different steps or layouts; or one of them does not come.
        """
        gather(self)
        return self

    def run_record(self) -> Run:
        """Everything recorded so far, as plain values: what pictures, diagnosis and report read.

        `.save(path)` writes it, for `Run.load(path)`; the Learner's own `save` writes the weights.
        """
        return run_of(self)

    def _loss_history(self) -> LossHistory | None:
        recorder = self._cb_named("recorder")
        return None if recorder is None else recorder._losses

    def _epochs(self) -> list[dict[str, Any]]:
        recorder = self._cb_named("recorder")
        return [] if recorder is None else recorder._epochs(self.n_steps)

    if not TYPE_CHECKING:  # so that a misspelt name is an error there: see `Named`

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError: its own error
                return object.__getattribute__(self, name)
            cb = None if name[0] == "_" or "cbs" not in vars(self) else self._cb_named(name)
            if cb is not None:
                return cb
            if not name.startswith("__") and "model" in vars(self):
                try:
                    return getattr(self.model, name)
                except AttributeError:
                    pass
            raise AttributeError(self._no_attribute(name), name=name, obj=self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(self._named() if "cbs" in vars(self) else ())]

    def _no_attribute(self, name: str) -> str:
        near = nearest(name, [n for n in {*dir(type(self)), *vars(self)} if n[0] != "_"])
        near += nearest(name, self._named() if "cbs" in vars(self) else ())
        hint = f" Nearest: {', '.join(near)}." if near else ""
        model = type(vars(self).get("model")).__name__
        return f"Neither the Learner, its callbacks nor its model ({model}) has {name!r}.{hint}"

    def __repr__(self) -> str:
        model, dls, cbs = (vars(self)[name] for name in ("model", "dls", "cbs"))
        return f"Learner({type(model).__name__}, {dls!r}, cbs={list(cbs)})"

    @property
    def smooth_loss(self) -> float | None:
        """The Recorder's smoothed training loss; reading it is a read from the device."""
        recorder: Any = self._cb_named("recorder")
        return None if recorder is None else recorder.smooth_loss

    def show_training_loop(self) -> PrettyString:
        """The loop as text: every event in its place, with the callbacks that have it."""
        return PrettyString(loop_text(self))

    # --- around

    @block
    def no_logging(self) -> Iterator[Learner]:
        """The Learner without printing its log, until the end of the `with`."""
        kept, self.logger = self.logger, _no_log
        try:
            yield self
        finally:
            self.logger = kept

    @block
    def no_bar(self) -> Iterator[Learner]:
        """The Learner without its progress bar, until the end of the `with`."""
        with self.removed_cbs(ProgressCallback):
            yield self

    def distrib_ctx(self, accelerator: Any = None, **options: Any) -> Any:
        """The Learner over all processes that `accelerate launch` or `torchrun` started.

        Inside the `with`, model, optimizer and loaders are accelerate's: DDP or FSDP, mixed
        precision, gradient accumulation, each as `accelerate.Accelerator(**options)` says.
        Afterwards they are the plain ones again. A single process works too. Without a GPU it
        takes the CPUs, as with `cpu=True`. With
        `fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)` the model is sharded, on CPUs
        too; the Learner's own model, which stays where it was, has learnt nothing if an error ends
        the `with`. Validation, `get_preds` and records are over all ranks: each of them has to
        call.

        Raises:
            MissingExtraError: accelerate is not installed.
            OptionError: version 1 of FSDP is wanted on CPUs; a loader has `batch_size=None`;
                `accelerator` sees one process, and several were started.
        """
        return distributed(self, accelerator, options)


def _no_log(row: list[Any]) -> None:
    """Ignores a row; a function at module level, so that a Learner can be pickled."""
