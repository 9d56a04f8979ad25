"""`Learner`: data, model, loss, optimizer and callbacks in one place, and the loop over them.

Optimizers, schedulers, loaders and distribution are torch's and accelerate's own, not wrapped.
Names, order and defaults are fastai's (2.8).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from fastcore.basics import PrettyString
from torch import Tensor, nn
from torch.utils.data import default_collate

from hookkit._core import distributed as ranks
from hookkit._core.batches import n_batches, no_batches, split_batch, to_device
from hookkit._core.checks import check_callable, check_module, check_number
from hookkit._core.files import atomic_write
from hookkit._core.messages import warn
from hookkit._core.modules import BATCH_NORMS, unwrap
from hookkit._core.pytree import describe, tree_map
from hookkit._core.random_state import preserve_random_state
from hookkit.callbacks import DEFAULT_CALLBACKS, ProgressCallback, Recorder, SchedulerCallback
from hookkit.callbacks.events import CANCEL_EXCEPTIONS, CANCELS, EVENTS
from hookkit.callbacks.optimizers import (
    restore_settings,
    settings_of,
    skips_step,
    stepping_scaler,
    unwrap_optimizer,
)
from hookkit.errors import ModelRunError, OptionError
from hookkit.records import Reportable
from hookkit.training.data import as_loaders
from hookkit.training.distributing import distributed, no_log
from hookkit.training.groups import (
    make_optimizer,
    one_cycle,
    set_hyper,
    spread,
    trainable_params,
)
from hookkit.training.loop import Loop, callback_list, instances, no_attribute
from hookkit.training.lr_finder import SuggestedLRs, find_lr
from hookkit.training.predicting import Keep, concat_batches, loader_of

if TYPE_CHECKING:
    from hookkit.inspection.fastai_layout import SummaryText


_CALLBACK_STATE = ("cbs", "heard", "_past", "_hooking")
"""Attributes that a pass without training does not restore: its callbacks may add callbacks."""


class Learner(Loop, Reportable):
    """Trains a model, and calls callbacks at each event.

    Args:
        dls: `DataLoaders`, a pair of loaders `(train, valid)`, or one loader; None if the Learner
            only summarises, or validates and predicts on batches that are passed in.
        model: any `nn.Module`. A tuple or list batch is called as `model(*inputs)`, a mapping as
            `model(**batch)`.
        loss_func: `loss_func(pred, *targets)`; None takes the `loss` in the model's output.
        opt_func: `opt_func(groups, lr=lr)` returns a torch optimizer.
        lr: the default learning rate of fits: a number, one per group, or `slice(lowest, highest)`.
        splitter: `splitter(model)` returns the parameters, or a list of them for each group, or
            torch's dicts. A group's own `weight_decay` holds in each fit.
        cbs: callbacks, instances or classes; read by name, as in `learn.activation_stats`.
        metrics: functions `f(pred, *targets)` averaged over samples, or objects with `reset`,
            `update` and `compute` (torchmetrics).
        path: the folder that contains `model_dir`; None for the current folder.
        model_dir: the folder that `save` writes to.
        wd: weight decay; None for the optimizer's own.
        train_bn: whether batch norms in frozen groups are trained.
        default_cbs: whether to begin with TrainEvalCallback and Recorder; one of these in `cbs`
            replaces the default.

    Attributes:
        epoch, n_epoch, iter, n_iter: the current epoch and batch, and their numbers (`n_iter` is
            None if unknown).
        train_iter, pct_train: the number of training batches so far in this fit, and their
            fraction of the fit.
        n_steps, stepped: optimizer steps made, over all fits; whether this batch made one.
        steps_now: whether the optimizer steps after this batch.
        xb, yb, x, y: inputs and targets as tuples; `x` and `y` are the item if there is only one.
        pred, loss, loss_grad: None until they are computed; backward is called on `loss_grad`, and
            `loss` is a copy that callbacks may keep.
        losses, epochs: the `LossLog` of the training batches; for each epoch its number, its first
            step, and its row of the log.
        final_record: losses and metrics of the last epoch or validation.
        logger: a function called with `recorder.log` after each epoch; `print` by default.

    Raises:
        ArgumentError: an argument is of a kind that cannot work.

    >>> from hookkit.testing import RegModel, synth_dbunch
    >>> learn = Learner(synth_dbunch(), RegModel(), nn.MSELoss(), torch.optim.SGD, lr=0.01)
    >>> with learn.no_logging(): learn.fit(3)
    >>> len(learn.recorder.values), learn.n_steps
    (3, 30)
    """

    autocast: Any
    dl: Any
    xb: tuple[Any, ...]
    yb: tuple[Any, ...]
    pred: Any
    loss: Any
    loss_grad: Any
    _callbacks_scaler: Any

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
        dls = as_loaders(dls)
        check_module("Learner", model, "The order is Learner(dls, model, loss_func).")
        for what, f in (("loss_func", loss_func), ("opt_func", opt_func), ("splitter", splitter)):
            check_callable("Learner", what, f)
        super().__init__()
        self.dls, self.model = dls, model
        self.loss_func: Any = loss_func
        if loss_func is None and dls is not None:
            self.loss_func = getattr(dls.train_ds, "loss_func", None)
        self.opt_func, self.splitter, self.lr, self.wd = opt_func, splitter, lr, wd
        self.train_bn, self.metrics = train_bn, metrics
        self.path, self.model_dir = Path(path or ""), Path(model_dir)
        self.logger: Any = print
        self.opt: Any = None
        self.frozen_idx = 0
        self._group_wd: dict[int, float] = {}  # group → weight decay that the splitter returned
        self.scaler: Any = None  # the loop's GradScaler
        self.accelerator: Any = None
        self._plain_loaders: list[Any] = []  # in `distrib_ctx`: the user's own loaders
        self.epoch, self.n_epoch, self.iter, self.train_iter, self.pct_train = 0, 1, 0, 0, 0.0
        self.n_iter: int | None = None
        self.final_record: list[Any] | None = None
        self._device: torch.device | None = None  # the device to which batches are moved
        self._by_keyword = False  # whether the batch is a mapping
        self._hooked_opt: Any = None  # the optimizer whose step hook counts its steps
        self._end_run()
        own = instances(cbs)
        for default in DEFAULT_CALLBACKS if default_cbs else ():
            if not any(isinstance(cb, default) for cb in own):
                self.add_cbs(default)
        self.add_cbs(own)
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
    ) -> None:
        """Train for `n_epoch` epochs, validating after each if there is validation data.

        Every callback's `cleanup_fit()` runs at the end, also after an exception or Ctrl-C.

        Args:
            n_epoch: the total number of epochs, with those before `start_epoch`.
            lr, wd: learning rate and weight decay; None takes the Learner's.
            cbs: further callbacks for this fit; they can still be read by name afterwards.
            reset_opt: whether to make a new optimizer.
            start_epoch: the number of the first epoch, to resume after `learn.load(…)`.

        Raises:
            ModelRunError: there is no training data, or no loss.
        """
        check_number("fit", "n_epoch", n_epoch, start_epoch, whole=True, what="all epochs")
        self._needs_data("fit")
        if reset_opt or self.opt is None:
            self.create_opt()
        n = len(self.opt.param_groups)
        set_hyper(self.opt, "lr", spread(self.lr if lr is None else lr, n))
        if (wd := self.wd if wd is None else wd) is not None:
            set_hyper(self.opt, "weight_decay", [self._group_wd.get(i, wd) for i in range(n)])
        with self.added_cbs(cbs), self._fit_under_way():
            self.opt.zero_grad()  # an interrupted fit may have left gradients
            self.n_epoch, self.epoch = n_epoch, start_epoch
            self._with_events("fit", self._do_fit)

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
    ) -> None:
        """Train with torch's OneCycleLR: warm up to `lr_max`, then anneal to almost 0.

        Args:
            n_epoch: the total number of epochs.
            lr_max: the highest learning rate, in the same forms as the Learner's `lr`, the default.
            div, div_final: the first rate is `lr_max / div`, the last one `lr_max / div_final`.
            pct_start: the fraction of the steps that warm up.
            moms: lowest and highest momentum (Adam: first beta), cycled against the learning rate.
            wd, cbs, reset_opt, start_epoch: as in `fit`.
        """
        lr = self.lr if lr_max is None else lr_max
        schedule = SchedulerCallback(one_cycle(lr, div, div_final, pct_start, moms))
        self.fit(n_epoch, lr, wd, [schedule, *callback_list(cbs)], reset_opt, start_epoch)

    def lr_find(
        self,
        start_lr: float = 1e-7,
        end_lr: float = 10,
        num_it: int = 100,
        stop_div: bool = True,
        show_plot: bool = True,
    ) -> SuggestedLRs:
        """Return suggested learning rates, from a short training with a growing rate.

        Afterwards model (see `preserve_state`), optimizer, random states, counts and records are
        restored. Callbacks that record, save or schedule do not run; others do.

        Args:
            start_lr, end_lr: the first and the last learning rate of all parameter groups.
            num_it: the number of batches to train on, in as many epochs as are needed.
            stop_div: whether to stop when the smoothed loss is over four times its minimum.
            show_plot: whether to draw the losses, if matplotlib is installed.

        Returns:
            fastai's suggestions: `.valley` is the usual one; `.steep`, `.minimum`, `.slide`.
            `.plot()` draws the losses and the suggestions.

        Raises:
            OptionError: it was called inside `distrib_ctx`.
            ModelRunError: the loss grew too large at the first rates.
        """
        rates = find_lr(self, start_lr, end_lr, num_it, stop_div)
        if show_plot and find_spec("matplotlib") is not None:
            rates.plot()
        return rates

    def create_opt(self) -> None:
        """Make a new optimizer: call `opt_func(groups, lr=lr)` with the splitter's groups."""
        split = list(self.splitter(self.model))
        self.opt, self.frozen_idx = make_optimizer(self.opt_func, split, self.lr), 0
        own = enumerate(g.get("weight_decay") if isinstance(g, dict) else None for g in split)
        self._group_wd = {i: wd for i, wd in own if wd is not None}

    def freeze_to(self, n: int) -> None:
        """Freeze all parameter groups before group `n`; a negative `n` counts from the end."""
        if self.accelerator is not None:  # DDP has already chosen the parameters it averages
            raise OptionError("freeze_to: call it before `with learn.distrib_ctx()`, not inside.")
        if self.opt is None:
            self.create_opt()
        groups = self.opt.param_groups
        n = check_number("freeze_to", "n", n, -len(groups), len(groups), whole=True)
        self.frozen_idx = n + len(groups) if n < 0 else n
        norms = [m for m in self.model.modules() if isinstance(m, BATCH_NORMS)]
        learns = {id(p) for m in norms for p in m.parameters()} if self.train_bn else set()
        for i, group in enumerate(groups):
            for p in group["params"]:
                p.requires_grad_(i >= self.frozen_idx or id(p) in learns)

    def freeze(self) -> None:
        """Freeze all parameter groups but the last."""
        self.freeze_to(-1)

    def unfreeze(self) -> None:
        """Unfreeze all parameter groups."""
        self.freeze_to(0)

    # --- the loop, from the outside in

    def _do_fit(self) -> None:
        for epoch in range(self.epoch, self.n_epoch):
            self.epoch = epoch
            self.begin_epoch()
            self._with_events("epoch", self._do_epoch)
            self.in_epoch = False

    def _do_epoch(self) -> None:
        self.dl = self.dls.train
        self._with_events("train", self.all_batches)
        if self.dls.valid is not None:
            self._do_epoch_validate(self.dls.valid)

    def _do_epoch_validate(self, dl: Any) -> None:
        self.dl = dl
        with torch.no_grad():
            self._with_events("validate", self.all_batches)

    def all_batches(self) -> None:
        """Run every batch of `dl`."""
        self.n_iter, self._device, i = n_batches(self.dl), self.device, -1
        with preserve_random_state(self.dl) if self.eval_pass else nullcontext():
            batches = enumerate(self.dl)  # making a DataLoader's iterator draws a random number
        for i, b in batches:
            self.one_batch(i, b)
        if i < 0 and not (self.training or self.eval_pass):
            warn(no_batches("the validation loader"))
        elif i < 0:
            raise ModelRunError(no_batches(f"the {'training ' * self.training}loader"))

    def one_batch(self, i: int, b: Any) -> None:
        """Run batch `b`, the `i`-th: prediction, loss and, in training, backward and step."""
        self.iter, self.stepped, self.pred, self.loss, self.loss_grad = i, False, None, None, None
        batch = b if self._device is None else to_device(b, self._device)
        self._by_keyword = isinstance(b, Mapping)
        self.xb, self.yb = split_batch(batch, getattr(self.dls, "n_inp", None))
        self._with_events("batch", self._do_one_batch)

    def _do_one_batch(self) -> None:
        with self.autocast():
            self.pred = self._predict()
            self("after_pred")
            self._get_loss()
        self("after_loss")
        if not self.training:
            return
        if self.loss_grad is None:
            why = "there is no loss_func, and the model returns none. Give Learner(…, loss_func=…)."
            if self.loss_func is not None:
                why = f"the batch has no target: {describe(self.xb)} is all input. Give batches "
                why += "(x, y), a smaller DataLoaders(…, n_inp=…), or no loss_func if the model "
                why += "returns a loss."
            raise ModelRunError(f"Training needs a loss; {why}")
        if not self.probes.done:
            self.probes.see_batch(self.xb)
            self.probes.see_scores(self.loss_func, self.pred)
            self.probes.see_loss(self.loss_grad)
        self.losses.begin(self.n_steps)
        self._do_grad_opt()
        if self.loss is not None:
            self.losses.put(self.loss)

    def _do_grad_opt(self) -> None:
        self._with_events("backward", self._backward)
        if not self.steps_now:
            return
        if self.scaler is not None:
            grads = (p.grad for group in self.opt.param_groups for p in group["params"])
            if all(grad is None for grad in grads):
                return  # the backward was cancelled; a GradScaler raises without gradients
            self.scaler.unscale_(self.opt)  # so that callbacks clip and read the true gradients
        try:
            done = self._with_events("step", self._step)
        finally:
            if self.scaler is not None:
                self.scaler.update()
        self.opt.zero_grad()
        if self.stepped:
            if not self.probes.done:
                self.probes.end_step()
        elif not done:  # the batches of a cancelled step are not recorded
            self.losses.drop(self.n_steps)

    # --- its smallest parts

    def _predict(self) -> Any:
        try:
            return self.model(**self.xb[0]) if self._by_keyword else self.model(*self.xb)
        except Exception as error:
            if not isinstance(error, CANCEL_EXCEPTIONS):
                how = "by keyword" if self._by_keyword else "as its inputs"
                error.add_note(
                    f"the model was given {describe(self.x)} {how}{self._where()}; "
                    f"DataLoaders(…, n_inp=…) says how many items of a batch it takes"
                )
            raise

    def _get_loss(self) -> None:
        pred: Any = self.pred
        if self.loss_func is not None:
            self.loss_grad = self.loss_func(pred, *self.yb) if self.yb else None
        else:  # the model may return its loss, as Hugging Face's models do
            is_dict = isinstance(pred, Mapping)
            self.loss_grad = pred.get("loss") if is_dict else getattr(pred, "loss", None)
        if isinstance(self.loss_grad, Tensor):
            self.loss = self.loss_grad.clone()
        elif self.loss_grad is not None:
            raise ModelRunError(
                f"The loss must be a tensor{self._where()}; found {describe(self.loss_grad)}. "
                f"Return the tensor that the loss was computed as."
            )

    def _backward(self) -> None:
        loss: Any = self.loss_grad
        try:
            if self.accelerator is not None:
                self.accelerator.backward(loss)
            else:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        except RuntimeError as error:
            rank = f", {ranks.rank_label()}" if ranks.is_distributed() else ""
            error.add_note(f"the loss was {describe(loss)}{self._where()}{rank}")
            raise

    def _step(self) -> None:
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
        if self.opt is not self._hooked_opt:  # it has no step hooks, or was made after `before_fit`
            self._on_step(self.opts[0])

    def _on_step(self, opt: Any, *_: Any) -> None:
        """Count a step that `opt` has made. Called by its step hook or, without one, by `_step`."""
        if skips_step(opt):
            return
        self.keep_rates(opt)
        if self.scaler is None:
            self._callbacks_scaler = stepping_scaler()
        self.n_steps += not self.stepped
        self.stepped = True

    def _with_events(self, part: str, f: Callable[[], None]) -> bool:
        """Run a part between its events, and return whether it was not cancelled.

        The part's Cancel exception ends the part. Any other exception propagates.
        """
        done = True
        try:
            self(f"before_{part}")
            f()
        except CANCELS[part]:
            done = False
            self(f"after_cancel_{part}")
        self(f"after_{part}")
        return done

    # --- around it

    @contextmanager
    def _fit_under_way(self) -> Iterator[None]:
        """Set `fitting`, and count optimizer steps, until the end of the `with`."""
        self._check_idle("fit was called")
        self.scaler, self._hooked_opt = None, None
        with ExitStack() as undo:
            # torch's own hook runs only if the step is made, not if a GradScaler skips it
            if hasattr(self.opts[0], "register_step_post_hook"):
                undo.callback(self.opts[0].register_step_post_hook(self._on_step).remove)
                self._hooked_opt = self.opt
            undo.enter_context(self._run_under_way())
            self.fitting = True
            yield

    @contextmanager
    def _run_under_way(self) -> Iterator[None]:
        """Claim the callbacks; clean up at the end of the `with`, however it ends."""
        self._claim()
        with_grad = torch.is_grad_enabled()
        try:
            yield
        finally:
            try:
                self._clean_up()
            finally:
                torch.set_grad_enabled(with_grad)  # Ctrl-C in torch's own `no_grad` leaves it off
                self._end_run()

    @contextmanager
    def _pass_under_way(self, cbs: Any) -> Iterator[None]:
        """Prepare for a pass without training; restore state, modes and records at its end.

        Outside a fit, send the events of a fit and of an epoch around the pass, as fastai does.
        """
        with ExitStack() as undo:
            before = {name: x for name, x in vars(self).items() if name not in _CALLBACK_STATE}
            undo.callback(vars(self).update, before)
            for module in self.model.modules():
                undo.callback(setattr, module, "training", module.training)
            silent = self.pause_recorders()  # the pass may run within a batch that is recorded
            for cb in silent:
                undo.callback(setattr, cb._switch, "on", True)
            if self.fitting:  # the epoch already has a progress bar
                silent += [cb for cb in self.cbs if isinstance(cb, ProgressCallback)]
            for cb in silent:
                undo.callback(setattr, cb, "run", cb.run)
                cb.run = False
            for cb in self.cbs:
                if isinstance(cb, Recorder):
                    undo.callback(vars(cb).update, dict(vars(cb)))
                    if self.fitting:  # a validation may be adding to these metrics
                        cb._metrics = copy.deepcopy(cb._metrics)
            self.eval_pass = True
            undo.enter_context(self.added_cbs(cbs))
            if not self.fitting:
                undo.enter_context(self._run_under_way())  # at the end `run` is True again
                for cb in self.cbs:
                    cb.run = cb.run and not cb._only_train_loop
                self("before_fit", "before_epoch")
                undo.callback(self, "after_epoch", "after_fit")
            yield

    def _end_run(self) -> None:
        """Set the attributes of a run to their values outside a run."""
        self.fitting = self.in_epoch = self.training = self.stepped = self.eval_pass = False
        self.steps_now, self.autocast = True, nullcontext
        self.dl = self.pred = self.loss = self.loss_grad = None
        self.xb = self.yb = (None,)
        self._callbacks_scaler = None  # the GradScaler with which a callback made the last step

    def _check_idle(self, call: str) -> None:
        if self.fitting:
            raise OptionError(
                f"{call} inside a fit of the same Learner. End that one first "
                f"(CancelFitException), or use a second Learner."
            )

    # --- what callbacks read

    @property
    def opts(self) -> list[Any]:
        """Return a list of the unwrapped torch optimizer; empty before there is one."""
        return [] if self.opt is None else [unwrap_optimizer(self.opt)]

    stepped_opts = opts

    @property
    def step_scaler(self) -> Any:
        """Return the GradScaler that makes the steps, or None."""
        scaler: Any = self.scaler or getattr(self.accelerator, "scaler", None)
        scaler = scaler or self._callbacks_scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def device(self) -> torch.device | None:
        """Return the device of batches, the DataLoaders' or that of the first parameter."""
        device = getattr(self.dls, "device", None)
        first = next(self.model.parameters(), None)
        return device if device is not None or first is None else first.device

    @property
    def x(self) -> Any:
        """Return the batch's only input, or the tuple `xb`."""
        return self.xb[0] if len(self.xb) == 1 else self.xb

    @property
    def y(self) -> Any:
        """Return the batch's only target, or the tuple `yb`."""
        return self.yb[0] if len(self.yb) == 1 else self.yb

    def _where(self) -> str:
        batch = "" if self.dl is None else f", batch {self.iter}"
        return f", epoch {self.epoch}{batch} ({'training' if self.training else 'not training'})"

    # --- without learning

    def validate(self, ds_idx: int = 1, dl: Any = None, cbs: Any = None) -> list[Any]:
        """Return the mean loss and the metrics on validation data: `[valid_loss, *metrics]`.

        Records, the modules' modes and the state of a surrounding fit do not change.

        Args:
            ds_idx: which loader of `dls`. A torch DataLoader that shuffles, or drops its last
                batch, is read in order and whole.
            dl: batches to use instead: a loader or a list.
            cbs: further callbacks.

        Raises:
            ModelRunError: there is no data.
        """
        dl = loader_of(self, ds_idx, dl, "validate")
        with self._pass_under_way(cbs):
            self._do_epoch_validate(dl)
            record: list[Any] = list(self.final_record or [])
        self.final_record = record
        return record

    def get_preds(
        self,
        ds_idx: int = 1,
        dl: Any = None,
        *,
        with_input: bool = False,
        with_loss: bool = False,
        cbs: Any = None,
    ) -> tuple[Any, ...]:
        """Return `([inputs,] preds, targets [, losses])` of all batches, on the CPU.

        Structures (tuples, dicts, model outputs) are joined tensor by tensor and keep their type; a
        list of strings or dicts has an item for each sample. In `distrib_ctx` every rank has to
        call, and gets the tensors of all ranks in the order of the data, but only its own other
        items. To keep outputs that cannot be joined, such as those of several lengths, use a
        callback: `learn.validate(cbs=Callback(after_pred=lambda cb: kept.append(cb.pred)))`.

        Args:
            ds_idx, dl, cbs: as in `validate`.
            with_input: whether to return the inputs too.
            with_loss: whether to return losses too: (n,) of each sample if the loss function has a
                `reduction`; otherwise of each batch.

        Raises:
            ModelRunError: there is no data, or no batch.
            RuntimeError, ValueError: the batches cannot be joined.
        """
        dl, keep = loader_of(self, ds_idx, dl, "get_preds"), Keep(with_input, with_loss)
        try:
            with self._pass_under_way([keep, *callback_list(cbs)]):
                self._do_epoch_validate(dl)
        finally:  # otherwise its tensors would live on
            self._past = [cb for cb in self._past if cb is not keep]
        if not keep.batches:
            raise ModelRunError(no_batches("get_preds: the loader"))
        return tuple(concat_batches(list(part)) for part in zip(*keep.batches, strict=True))

    def predict(self, item: Any) -> Any:
        """Return the model's output for one sample, on the CPU and without a batch dimension.

        Args:
            item: an item of the data set, or its input alone. The `collate_fn` of the validation
                loader, or else of the training loader, makes a batch of it.

        >>> from hookkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> x, y = learn.dls.valid_ds[0]
        >>> learn.predict((x, y)).equal(learn.predict(x)), learn.predict(x).shape == x.shape
        (True, True)
        """
        train, *others = self.dls or (None,)
        loaders = [*others, train]  # training last: its `collate_fn` may augment
        loader: Any = next((dl for dl in loaders if hasattr(dl, "collate_fn")), None)
        plain = loader is None or loader.batch_size is None  # None: its data set returns batches
        batch = (default_collate if plain else loader.collate_fn)([item])
        preds, _ = self.get_preds(dl=[batch])
        return tree_map(lambda t: t[0], preds)

    def _needs_data(self, who: str) -> None:
        if self.dls is None:
            raise ModelRunError(
                f"{who}: this Learner has no data. Make it with DataLoaders(train, valid), set "
                f"`learn.dls`, or give batches: `learn.get_preds(dl=[…])`."
            )
        self.dls = as_loaders(self.dls)  # the user may have set `learn.dls` to a pair of loaders

    # --- files

    def save(self, file: str | Path, with_opt: bool = True) -> Path:
        """Write the weights to `path/model_dir/file.pth`, atomically, and return the path.

        In `distrib_ctx`, or if the model is sharded, every rank has to call, and rank 0 writes.

        Args:
            file: the name of the file, or a path.
            with_opt: whether the optimizer's state is written too.

        Raises:
            OptionError: the optimizer's state is sharded.
            OSError: the file cannot be written.
        """
        where, model = self._file(file), unwrap(self.model)
        sharded, with_opt = ranks.is_sharded(model), with_opt and self.opt is not None
        if sharded and with_opt:
            raise OptionError(
                "save: the model is sharded, and so is the optimizer's state. Use "
                "learn.save(…, with_opt=False), or torch.distributed.checkpoint for both."
            )
        state = {"model": ranks.whole_state(model) if sharded else model.state_dict()}
        if with_opt:
            state["opt"] = self.opt.state_dict()
        if ranks.rank() == 0:
            with atomic_write(where) as f:
                torch.save(state, f)
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()
        return where

    def load(self, file: str | Path, with_opt: bool = True, strict: bool = True) -> Learner:
        """Load weights and the optimizer's state from a file of `save` or of a state dict.

        Return the Learner. The optimizer keeps its own settings (rates, momentum), because those in
        the file may be from the middle of a schedule. `fit(…, start_epoch=…)` resumes a training.

        Raises:
            OptionError: there is no such file, or it has the state of another kind of optimizer.
            RuntimeError: the weights are those of another model.
        """
        where, model = self._file(file, there=True), unwrap(self.model)
        if not where.exists():
            others = ", ".join(sorted(p.stem for p in where.parent.glob("*.pth"))) or "no .pth file"
            raise OptionError(f"load: {where} does not exist. The folder has {others}.")
        state = torch.load(where, map_location="cpu", weights_only=True)
        opt_state = state.get("opt") if with_opt else None
        if opt_state is not None:
            if self.opt is None:
                self.create_opt()
            own, theirs = set(self.opt.param_groups[0]), set(opt_state["param_groups"][0])
            theirs -= {"initial_lr", "max_lr", "min_lr"}  # of schedules
            # a difference in one direction only comes from another version of torch
            if own - theirs and theirs - own:
                raise OptionError(
                    f"load: the file has the state of another optimizer, with "
                    f"{sorted(theirs - own)}, and this one is {type(self.opt).__name__}. Use "
                    f"learn.load(…, with_opt=False), or give the Learner the same opt_func."
                )
        weights = state.get("model", state)
        if ranks.is_sharded(model):
            ranks.load_whole_state(model, weights, strict)
        else:
            model.load_state_dict(weights, strict=strict)
        if opt_state is not None:
            settings = settings_of(self.opt)
            self.opt.load_state_dict(opt_state)
            restore_settings(self.opt, settings)
        return self

    def _file(self, file: str | Path, there: bool = False) -> Path:
        name = Path(file) if Path(file).suffix == ".pth" else Path(f"{file}.pth")
        inside = self.path / self.model_dir / name
        # the user may pass the path that `save` returned, which has the folder
        return name if there and name.exists() and not inside.exists() else inside

    # --- processes

    def distrib_ctx(self, accelerator: Any = None, **options: Any) -> Any:
        """Train, inside the `with`, over processes that `accelerate launch` or `torchrun` started.

        Model, optimizer and loaders are wrapped by `accelerate.Accelerator(**options)`: DDP, FSDP2
        on devices, mixed precision, gradient accumulation. At the end they are unwrapped again; a
        model that FSDP2 has sharded stays sharded. It also works with a single process, and on CPUs
        without a GPU. Validation, `get_preds` and records cover all ranks; every rank has to call.

        Raises:
            MissingExtraError: accelerate is not installed.
            OptionError: `accelerator` sees one process, and several were started.
        """
        return distributed(self, accelerator, options)

    # --- reading

    def summary(self) -> SummaryText:
        """Return the model as a table: shapes, parameters, optimizer, loss, callbacks."""
        from hookkit.inspection import learner_summary

        return learner_summary(self)

    @property
    def smooth_loss(self) -> float | None:
        """Return the Recorder's smoothed training loss, which waits for the device once."""
        return getattr(self.cbs_by_name.get("recorder"), "smooth_loss", None)

    def show_training_loop(self) -> PrettyString:
        """Return the loop as text: each event with the callbacks that have a method for it."""
        lines, depth = list[str](), 0
        for event in EVENTS[1:]:  # without `after_create`
            ends = event.startswith("after_")
            if cbs := self.ordered_cbs(event):
                lines.append("  " * (depth - ends) + f"{event}: {list(cbs)}")
            if not ends:
                depth += 1
            elif event.replace("after", "before") in EVENTS:
                depth -= 1
        return PrettyString("\n".join(lines))

    @contextmanager
    def no_logging(self) -> Iterator[Self]:
        """Print no log until the end of the `with`."""
        before, self.logger = self.logger, no_log
        try:
            yield self
        finally:
            self.logger = before

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property raised AttributeError: raise that error again
            return object.__getattribute__(self, name)
        if name[0] != "_" and "cbs" in vars(self):
            if (cb := self.cbs_by_name.get(name)) is not None:
                return cb
            with suppress(AttributeError):
                return getattr(self.model, name)
        raise no_attribute(self, name, "Neither the Learner, its callbacks nor its model")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(self.cbs_by_name if "cbs" in vars(self) else ())]

    def __repr__(self) -> str:
        return f"Learner({type(self.model).__name__}, {self.dls!r}, cbs={list(self.cbs)})"
