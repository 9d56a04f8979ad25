"""The loop: `fit`, and the parts it is made of.

It reads from top to bottom as it runs. Each part runs inside `_with_events`, which fires its events
and handles its `Cancel…Exception`. Modes, counts, recording, schedules and progress are callbacks.
After fastai's Learner, 2.8; whatever a fit set up is undone in a `finally`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.batches import generators_kept, n_batches, no_batches, split_batch, to_device
from hookkit.callbacks.events import (
    CANCEL_EXCEPTIONS,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
)
from hookkit.callbacks.optimizers import bare_optimizer, skips_step, stepping_scaler
from hookkit.errors import ModelRunError, OptionError, warn
from hookkit.nested import describe
from hookkit.training.runner import CallbackRunner

BATCH: dict[str, Any] = {"dl": None, "xb": (None,), "yb": (None,)}
BATCH |= dict.fromkeys(("pred", "loss", "loss_grad"))
"""What is known of the current batch, and its values outside of one."""

_OF_A_RUN = ("fitting", "training", "steps_now", "autocast", "_callbacks_scaler")
"""What is reset as a fit, or a pass without one, ends."""


class Loop(CallbackRunner):
    """Runs epochs and batches over `model`, `dls`, `loss_func`, `opt`, and fires their events.

    `Learner` says what the attributes are.
    """

    accelerator: Any = None
    opt: Any = None
    scaler: Any = None
    autocast: Callable[[], Any] = nullcontext
    epoch = iter = train_iter = 0
    n_iter: int | None = None
    n_epoch, pct_train, steps_now = 1, 0.0, True
    final_record: list[Any] | None = None
    loss: Any
    loss_grad: Any
    _device: torch.device | None = None  # of the current loader's batches
    _callbacks_scaler: Any = None  # the GradScaler by which a callback made the last step
    _counted: Any = None  # the optimizer whose steps are counted by its own hook

    def __init__(self, dls: Any, model: nn.Module, loss_func: Any) -> None:
        super().__init__()
        self.dls, self.model, self.loss_func = dls, model, loss_func
        vars(self).update(BATCH)

    # --- the loop, from the outside in

    def _do_fit(self) -> None:
        for epoch in range(self.epoch, self.n_epoch):
            self.epoch = epoch
            self._with_events(self._do_epoch, "epoch", CancelEpochException)

    def _do_epoch(self) -> None:
        self.dl = self.dls.train
        self._with_events(self.all_batches, "train", CancelTrainException)
        if self.dls.valid is not None:
            self._do_epoch_validate(self.dls.valid)

    def _do_epoch_validate(self, dl: Any) -> None:
        self.dl = dl
        with torch.no_grad():
            self._with_events(self.all_batches, "validate", CancelValidException)

    def all_batches(self) -> None:
        """Runs every batch of `dl`."""
        self.n_iter, self._device, i = n_batches(self.dl), self.device, -1
        with generators_kept(self.dl) if self.eval_pass else nullcontext():
            batches = enumerate(self.dl)  # a DataLoader draws a number as its iterator is made
        for i, b in batches:
            self.one_batch(i, b)
        if i < 0 and (self.training or self.eval_pass):
            raise ModelRunError(
                no_batches("the training loader" if self.training else "the loader")
            )
        if i < 0:
            warn(no_batches("the validation loader"))

    def one_batch(self, i: int, b: Any) -> None:
        """Runs batch `b`, the `i`-th: prediction, loss and, in training, backward and step."""
        self.iter, self.stepped, self.pred, self.loss, self.loss_grad = i, False, None, None, None
        batch = b if self._device is None else to_device(b, self._device)
        self._by_keyword = isinstance(b, Mapping)
        self.xb, self.yb = split_batch(batch, getattr(self.dls, "n_inp", None))
        self._with_events(self._do_one_batch, "batch", CancelBatchException)

    def _do_one_batch(self) -> None:
        with self.autocast():
            self.pred = self._predict()
            self("after_pred")
            self._get_loss()
        self("after_loss")
        if not self.training:
            return
        if self.loss_grad is None:
            raise ModelRunError(self._no_loss())
        self.sensors.see_batch(self.xb)
        self.sensors.see_scores(self.loss_func, self.pred)
        self.sensors.see_loss(self.loss_grad)
        self._do_grad_opt()

    def _do_grad_opt(self) -> None:
        self._with_events(self._backward, "backward", CancelBackwardException)
        if not self.steps_now:
            return
        if self.scaler is not None:
            grads = (p.grad for group in self.opt.param_groups for p in group["params"])
            if all(grad is None for grad in grads):
                return  # the backward was cancelled, and a GradScaler refuses a step without any
            self.scaler.unscale_(self.opt)  # so that callbacks clip and read the true gradients
        try:
            self._with_events(self._step, "step", CancelStepException)
        finally:
            if self.scaler is not None:
                self.scaler.update()
        self.opt.zero_grad()
        if self.stepped:
            self.sensors.end_step()

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
        else:  # the model may have computed it, as Hugging Face's do
            is_dict = isinstance(pred, Mapping)
            self.loss_grad = pred.get("loss") if is_dict else getattr(pred, "loss", None)
        if isinstance(self.loss_grad, Tensor):
            self.loss = self.loss_grad.clone()
        elif self.loss_grad is not None:
            raise ModelRunError(
                f"The loss must be a tensor{self._where()}; found {describe(self.loss_grad)}. "
                f"Return the tensor that the loss was computed as."
            )

    def _no_loss(self) -> str:
        why = "there is no loss_func, and the model returns none. Give Learner(…, loss_func=…)."
        if self.loss_func is not None:
            why = f"the batch has no target: {describe(self.xb)} is all input. Give batches (x, y),"
            why += " a smaller DataLoaders(…, n_inp=…), or no loss_func if the model returns one."
        return f"Training needs a loss; {why}"

    def _backward(self) -> None:
        loss: Any = self.loss_grad
        try:
            if self.accelerator is not None:
                self.accelerator.backward(loss)
            else:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        except RuntimeError as error:
            rank = f", {ranks.this_rank()}" if ranks.is_distributed() else ""
            error.add_note(f"the loss was {describe(loss)}{self._where()}{rank}")
            raise

    def _step(self) -> None:
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
        if self.opt is not self._counted:  # without torch's hooks, or a new one since `before_fit`
            self._on_step()

    def _on_step(self, *_: Any) -> None:
        if skips_step(self.opts[0]):
            return
        self._note_rates(self.opts[0])
        if self.scaler is None:
            self._callbacks_scaler = stepping_scaler()
        self.n_steps += not self.stepped
        self.stepped = True

    def _with_events(self, f: Callable[[], None], part: str, cancel: type[Exception]) -> None:
        """Runs a part between its events; `cancel` ends the part, other exceptions end the fit."""
        try:
            self(f"before_{part}")
            f()
        except cancel:
            self(f"after_cancel_{part}")
        self(f"after_{part}")

    # --- around it

    @contextmanager
    def _run_under_way(self) -> Iterator[None]:
        """Around the events of a fit, or of a pass without one: cleans up, however it ends."""
        self._claim()
        with_grad = torch.is_grad_enabled()
        try:
            yield
        finally:
            try:
                self._clean_up()
            finally:
                torch.set_grad_enabled(with_grad)  # Ctrl-C in torch's own `no_grad` leaves it off
                for name in _OF_A_RUN:
                    vars(self).pop(name, None)

    @contextmanager
    def _fit_under_way(self) -> Iterator[None]:
        """Marks a fit; undoes everything that it set up, however it ends."""
        self._check_idle("fit was called")
        vars(self).pop("scaler", None)
        with ExitStack() as undo:
            undo.callback(vars(self).update, BATCH)
            # torch's own hook runs when a step is really made: not when a GradScaler skips it
            register = getattr(self.opts[0], "register_step_post_hook", None)
            self._counted = None if register is None else self.opt
            if register is not None:
                undo.callback(register(self._on_step).remove)
            undo.enter_context(self._run_under_way())
            self.fitting = True
            yield

    def _check_idle(self, call: str) -> None:
        if self.fitting:
            raise OptionError(
                f"{call} inside a fit of the same Learner. End that one first "
                f"(CancelFitException), or use a second Learner."
            )

    # --- what callbacks read

    @property
    def opts(self) -> list[Any]:
        """The plain torch optimizers, none before the first fit and then one."""
        return [] if self.opt is None else [bare_optimizer(self.opt)]

    stepped_opts = opts

    @property
    def step_scaler(self) -> Any:
        """The GradScaler that makes the steps, or None."""
        scaler: Any = self.scaler or getattr(self.accelerator, "scaler", None)
        scaler = scaler or self._callbacks_scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def device(self) -> torch.device | None:
        """The device of the DataLoaders, where batches go, or else of the first parameter."""
        device = getattr(self.dls, "device", None)
        first = next(self.model.parameters(), None)
        return device if device is not None or first is None else first.device

    @property
    def x(self) -> Any:
        """The batch's input, or the tuple of them if there are several."""
        return self.xb[0] if len(self.xb) == 1 else self.xb

    @property
    def y(self) -> Any:
        """The batch's target, or the tuple of them unless there is exactly one."""
        return self.yb[0] if len(self.yb) == 1 else self.yb

    def _where(self) -> str:
        batch = "" if self.dl is None else f", batch {self.iter}"
        return f", epoch {self.epoch}{batch} ({'training' if self.training else 'not training'})"
