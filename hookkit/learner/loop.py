"""The loop: `fit`, and the parts it is made of.

It reads from top to bottom as it runs: `_do_fit`, `_do_epoch`, `_do_epoch_train`,
`_do_epoch_validate`, `all_batches`, `one_batch`, `_do_one_batch`, `_do_grad_opt`. Each part runs
inside `_with_events`, which fires its events and handles its `Cancel…Exception`. Modes, counts,
recording, schedules and progress are callbacks; `Learner` adds data, options and everything else.
After fastai's Learner, 2.8, with two repairs: whatever a fit set up is undone in a `finally`, and a
batch begins without the `pred` and `loss` of the one before. It is one file, though a little long,
so that a fit can be read in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.callbacks.loss_facts import loss_name
from hookkit.callbacks.optimizers import bare_optimizer, stepping_scaler
from hookkit.callbacks.runner import CallbackRunner
from hookkit.data import n_batches, no_batches, split_batch, to_device
from hookkit.errors import ModelRunError, OptionError
from hookkit.events import (
    CANCEL_EXCEPTIONS,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    stray_cancel,
)
from hookkit.interrupts import Guard, block, interruptible, uninterrupted
from hookkit.learner.checks import no_loss
from hookkit.nested import describe

BATCH = {
    "dl": None,
    "xb": (None,),
    "yb": (None,),
    "pred": None,
    "loss": None,
    "loss_grad": None,
    "step_scaler": None,
}


class Loop(CallbackRunner):
    """Runs epochs and batches over `model`, `dls`, `loss_func`, `opt`, and fires their events.

    `Learner` says what its attributes are. All of them are set here, but for what the Learner is
    given beyond these arguments.
    """

    loss: Any
    loss_grad: Any

    def __init__(self, dls: Any, model: nn.Module, loss_func: Any) -> None:
        super().__init__()
        self.dls, self.model, self.loss_func = dls, model, loss_func
        self.accelerator: Any = None
        self.epoch, self.n_epoch, self._epoch_range = 0, 1, range(0)
        self._epochs_done, self._within_epoch = 0, False  # of the last fit: see `checkpoints`
        self._resumed: Callable[[], int] | None = None  # takes up an epoch: which batch comes next
        self.iter, self.n_iter = 0, None  # type: int, int | None
        self.train_iter, self.pct_train = 0, 0.0
        self.n_steps, self.stepped, self.steps_now, self.eval_pass = 0, False, True, False
        self.final_record: list[Any] | None = None
        self._opt: Any = None
        self._step_hooks: list[Any] = []
        self._by_keyword, self._device = False, None  # type: bool, torch.device | None
        self._guard = Guard()
        self._forget_precision()
        self._forget_batch()

    def _forget_batch(self) -> None:
        self._in_batch = False  # from before its `before_batch` to after its `after_batch`
        for name, value in BATCH.items():
            setattr(self, name, value)

    def _forget_precision(self) -> None:
        self.autocast: Callable[[], Any] = nullcontext
        self.scaler: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # a copy that is made during a fit is not in one, and holds no graph
        rest = dict.fromkeys(("fitting", "training", "eval_pass", "_broken", "_in_batch"), False)
        return {
            **vars(self),
            **BATCH,
            **rest,
            "_step_hooks": [],
            "_firing": Loop._firing,
            "_resumed": None,
        }

    # --- the loop, from the outside in

    def _do_fit(self) -> None:
        for epoch in self._epoch_range:
            self.epoch = epoch
            self._with_events(self._do_epoch, "epoch", CancelEpochException)

    def _do_epoch(self) -> None:
        self._within_epoch = True
        try:
            self._do_epoch_train()
            if self.dls.valid is not None:
                self._do_epoch_validate(self.dls.valid)
        except CancelEpochException:
            self._end_epoch()
            raise
        self._end_epoch()

    def _end_epoch(self) -> None:
        self._epochs_done, self._within_epoch = self.epoch + 1, False

    def _do_epoch_train(self) -> None:
        self.dl = self.dls.train
        self._with_events(self.all_batches, "train", CancelTrainException)

    def _do_epoch_validate(self, dl: Any) -> None:
        self.dl = dl
        with torch.no_grad():
            self._with_events(self.all_batches, "validate", CancelValidException)

    def all_batches(self) -> None:
        """Runs every batch of `dl`."""
        self.n_iter = n_batches(self.dl)
        self._device = self.device
        batches, first = iter(self.dl), 0
        if self.training and self._resumed is not None:
            first, self._resumed = self._resumed(), None
        i = first - 1
        for i, b in enumerate(batches, first):
            self.one_batch(i, b)
        if i < 0 and self.training:
            raise ModelRunError(no_batches("the training loader"))

    def one_batch(self, i: int, b: Any) -> None:
        """Runs batch `b`, the `i`-th: prediction, loss and, in training, backward and step."""
        self.iter, self.stepped = i, False
        self.pred = self.loss = self.loss_grad = None
        self._by_keyword = isinstance(b, Mapping)
        batch = b if self._device is None else to_device(b, self._device)
        self.xb, self.yb = split_batch(batch, getattr(self.dls, "n_inp", None))
        self._in_batch = True
        self._with_events(self._do_one_batch, "batch", CancelBatchException)
        self._in_batch = False

    def _do_one_batch(self) -> None:
        with self.autocast():
            self.pred = self._predict()
            self("after_pred")
            self._get_loss()
        self("after_loss")
        if self.training:
            if self.loss_grad is None:
                raise ModelRunError(no_loss(self.loss_func, self.xb))
            self._do_grad_opt()

    def _do_grad_opt(self) -> None:
        self._with_events(self._backward, "backward", CancelBackwardException)
        if not self.steps_now:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)  # so that callbacks clip and read the true gradients
        try:
            self._with_events(self._step, "step", CancelStepException)
        finally:
            if self.scaler is not None:
                self.scaler.update()
        self.opt.zero_grad()

    # --- its smallest parts

    def _predict(self) -> Any:
        try:
            return self.model(**self.xb[0]) if self._by_keyword else self.model(*self.xb)
        except CANCEL_EXCEPTIONS:
            raise
        except Exception as error:
            given = describe(self.xb[0] if len(self.xb) == 1 else self.xb)
            how = "by keyword" if self._by_keyword else "as its inputs"
            error.add_note(
                f"the model ({type(self.model).__name__}) was given {given} {how}"
                f"{self._where()}; DataLoaders(…, n_inp=…) says how many items of a batch it takes"
            )
            raise

    def _get_loss(self) -> None:
        pred: Any = self.pred
        if self.loss_func is None:  # the model may have computed it, as Hugging Face's do
            is_dict = isinstance(pred, Mapping)
            self.loss_grad = pred.get("loss") if is_dict else getattr(pred, "loss", None)
        elif self.yb:
            self.loss_grad = self.loss_func(pred, *self.yb)
        if self.loss_grad is None:
            return
        if not isinstance(self.loss_grad, Tensor):
            who = loss_name(self.loss_func) or "the model"
            raise ModelRunError(
                f"The loss must be a tensor{self._where()}; {who} returned "
                f"{describe(self.loss_grad)}. Return the tensor that the loss was computed as."
            )
        self.loss = self.loss_grad.clone()

    def _backward(self) -> None:
        try:
            if self.accelerator is not None:
                self.accelerator.backward(self.loss_grad)
            elif self.scaler is not None:
                self.scaler.scale(self.loss_grad).backward()
            else:
                self.loss_grad.backward()
        except RuntimeError as error:
            error.add_note(f"the loss was {describe(self.loss_grad)}{self._where()}")
            if ranks.is_distributed():
                error.add_note(
                    f"{ranks.this_rank()} was in the backward pass, where the ranks average their "
                    f"gradients. If one has ended or did not come, look for its error."
                )
            raise

    def _step(self) -> None:
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
        if not self._step_hooks:  # the user's own optimizer, without torch's hooks
            self._on_step()

    def _on_step(self, opt: Any = None, *_: Any) -> None:
        self.step_scaler = stepping_scaler()
        if not self.stepped:
            self.stepped = True
            self.n_steps += 1
            self._note_rates(opt or self.opts[0])

    def _with_events(self, f: Callable[[], None], part: str, cancel: type[Exception]) -> None:
        """Runs a part between its events; `cancel` ends the part, other exceptions end the fit."""
        try:
            self(f"before_{part}")
            f()
        except cancel:
            self(f"after_cancel_{part}")
        self(f"after_{part}")

    # --- around it

    def _check_idle(self, call: str) -> None:
        if self.fitting:
            raise OptionError(
                f"{call} inside a fit of the same Learner. End that one first "
                f"(CancelFitException), or use a second Learner."
            )

    @block
    def _fit_under_way(self) -> Iterator[None]:
        """Marks a fit and counts its optimizer steps; undoes everything, however it ends."""
        self._check_idle("fit was called")
        self._claim()
        self._broken = True  # until it is known to have ended well: `after_fit` may fail too
        with_grad = torch.is_grad_enabled()
        try:
            self.fitting = self.steps_now = True
            self.opt = self._opt
            yield
            self._broken = False
        except CANCEL_EXCEPTIONS as stray:
            stray.add_note(stray_cancel(stray))
            raise
        finally:
            try:
                self._clean_up()
            finally:
                torch.set_grad_enabled(with_grad)  # Ctrl-C in torch's own `no_grad` leaves it off
                self.fitting = self.training = self._broken = False
                self._resumed = None
                self.opt = self._opt
                self._forget_batch()

    def __enter__(self) -> Self:
        """`with learn:` fires `before_fit`, `before_epoch`; at the end their `after_` events."""
        self._check_idle("`with learn` was entered")
        self._claim()
        self._guard = Guard()
        try:
            self._guard.begin()
            self("before_fit", "before_epoch")
        except BaseException:
            self._clean_up()
            self._guard.end()
            raise
        return self

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        try:
            interruptible(self.__call__)("after_epoch", "after_fit")
        finally:
            self._clean_up()
            self._guard.end()

    # --- what callbacks read

    @property
    def opt(self) -> Any:
        """The optimizer, or None before the first fit."""
        return self._opt

    @opt.setter
    @uninterrupted
    def opt(self, opt: Any) -> None:
        self._opt = opt
        for handle in self._step_hooks:
            handle.remove()
        # torch's own hook runs when a step is really made: not when a GradScaler skips it
        able = [o for o in self.opts if hasattr(o, "register_step_post_hook") and self.fitting]
        self._step_hooks = [o.register_step_post_hook(self._on_step) for o in able]

    @property
    def opts(self) -> list[Any]:
        """The plain torch optimizers, none before the first fit and then one."""
        return [] if self._opt is None else [bare_optimizer(self._opt)]

    @property
    def stepped_opts(self) -> list[Any]:
        """The optimizers that made the last step."""
        return self.opts

    @property
    def device(self) -> torch.device | None:
        """The device of the DataLoaders, where batches go, or else of the first parameter."""
        given = getattr(self.dls, "device", None)
        first = next(self.model.parameters(), None)
        return given if given is not None or first is None else first.device

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
