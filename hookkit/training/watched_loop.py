"""`WatchedLoop`: the user's own training loop, as callbacks see it in `self.learn`.

A step is everything between two optimizer steps. It is over when every known optimizer has stepped,
or else when the next forward begins (the two players of a GAN). Each training forward begins a
batch. Nothing that is recorded depends on where a batch ends: recorders merge those of a step.
`LoopHooks` calls the methods of the middle part; they fire the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hookkit.callbacks.events import CancelStepException
from hookkit.callbacks.loss_log import LossHistory
from hookkit.callbacks.optimizers import ids_of, stepping_scaler
from hookkit.errors import HookError
from hookkit.hooks.attach import graph_task
from hookkit.modules import unwrap
from hookkit.training.loop import Loop
from hookkit.training.watch_checks import not_in_watch, warn_other_loss, warn_unseen
from hookkit.training.watch_hooks import LoopHooks
from hookkit.training.watch_losses import epoch_rows, loss_in


class WatchedLoop(Loop):
    """The user's training loop, as callbacks see it in `self.learn`.

    Attributes:
        model: the user's own module, without compile and distribution wrappers.
        opts, opt: the optimizers, and the first; if none was given, those that were seen stepping.
        training: True from a training forward to the end of its batch; False in validation.
        epoch, train_iter, n_steps: 0-based, as marked; training batches; optimizer steps.
        loss: of the current batch, detached, if it is known by now; else None.
        pred: the live output of the model during `after_pred`, else None.
        losses: the loss of each batch, a `LossHistory`.
        spans: for each epoch its number, its first step, and the values reported with it; for one
            with several validations one for each.
        n_cancelled_steps: steps that a callback has cancelled (CancelStepException).
    """

    dls = n_epoch = accelerator = pred = loss = None
    epoch = train_iter = n_cancelled_steps = 0
    _noted = 0  # after how many steps values were reported last
    rolled_out = False  # the model was evaluated within the batch
    warned = False  # a warning has said what was not recorded
    other_loss = _warned_of_loss = False  # what the model returns is not what backward() is for

    def __init__(self, model: Any, opts: Iterable[Any], loss_func: Any) -> None:
        super().__init__()
        self.model, self.loss_func = unwrap(model), loss_func
        self.opts = list(opts)
        self.finds_opts = not self.opts
        self.losses, self.spans = LossHistory(), list[dict[str, Any]]()
        self.hooks = LoopHooks(model)
        self._reset()

    def _reset(self) -> None:
        self.train_iter, self.training, self.in_closure = 0, False, False
        self._in_epoch = self._in_validation = False
        self._marked = False  # a batch has begun, and its forward is still to come
        self._joins_last = self._cancelled = self._in_eval = False
        self._stepped: list[Any] = []  # optimizers, since the last training forward
        self._adopted = False  # one that was not known has begun a step
        self._last: list[Any] = []  # those that made the step before
        self._paused: list[Any] | None = None  # recorders, in a rollout within a batch

    @property
    def opt(self) -> Any:
        """The first optimizer, or None while none is known."""
        return self.opts[0] if self.opts else None

    @property
    def stepped_opts(self) -> list[Any]:
        """The optimizers that made the last step; all, where steps are not seen."""
        return self._stepped or self._last or self.opts

    @property
    def in_batch(self) -> bool:
        """Whether a training batch has begun, and no optimizer has stepped since."""
        return self.training and not self._stepped

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (cb := self.cbs_by_name.get(name)) is not None:
            return cb
        raise AttributeError(not_in_watch(name), name=name, obj=self)

    def _where(self) -> str:
        return f", epoch {self.epoch}, batch {self.train_iter} (watched loop)"

    # --- a run

    def begin(self) -> None:
        """The run begins: `before_fit`, then the hooks."""
        self._reset()
        self.fitting = True
        self("before_fit")
        self.hooks.attach(self)

    def end(self) -> None:
        """Whatever happened: all hooks go, and every callback cleans up."""
        self.hooks.remove()
        self.fitting = self.training = False
        self.step_scaler = None
        self._clean_up()

    def mark_epoch(self) -> None:
        """Batches after this belong to a new epoch; nothing happens if this one had none."""
        self._close()
        self._set_validation(False)
        if self._in_epoch:
            self("after_train", "after_epoch")
            self.epoch, self._in_epoch = self.epoch + 1, False

    def note(self, values: dict[str, Any]) -> None:
        """Adds values to the last epoch; a later value of the same name begins another row of it.

        Before the first batch they get a row of their own.
        """
        again = bool(self.spans) and not values.keys().isdisjoint(self.spans[-1])
        if values and not self.spans:
            self.spans.append({"epoch": self.epoch, "step": self.n_steps})
        elif again and self._noted < self.n_steps:
            self.spans.append({"epoch": self.spans[-1]["epoch"], "step": self._noted})
        if values:
            self.spans[-1].update(values)
            self._noted = self.n_steps

    # --- what the hooks tell: forwards

    def forward_began(self, training: bool, with_grad: bool, inputs: Any) -> None:
        """A forward begins, in training mode or not; nothing of the model has run."""
        if self._marked and with_grad:  # of a batch that has begun, whatever the mode is
            self._marked, training = False, True
        elif training and with_grad:
            self._close()
            self._begin_batch()
        elif self.in_batch:  # a rollout within a batch: nobody records it
            self._paused, self.training = self.pause_recorders(), False
            self.rolled_out = True
        else:
            self._close()
            self._set_validation(True)
            self("before_batch")
        if self.training:
            self._in_eval = False
            self.probes.see_batch(inputs, training)
        elif with_grad:
            self.eval_part_began(inputs)

    def eval_part_began(self, inputs: Any) -> None:
        """The model, or a part of it, runs in eval mode with gradients."""
        if not self.in_batch and self._paused is None:
            self._in_eval = True
            self.probes.see_batch(inputs, training=False)

    def forward_ended(self, output: Any, failed: bool = False, shared: bool = False) -> None:
        """The forward returned `output`, the live object, or raised, which cancels its batch.

        With `shared` the losses of a step's batches add up: see `LossHistory.put`.
        """
        if self._paused is not None:
            self._end_rollout()
        elif failed:
            if self.training:
                self.losses.drop()
            self._end_batch("after_cancel_batch")
        else:
            if self.training:
                loss, guess = (None, False) if self.other_loss else loss_in(output)
                if loss is not None:
                    self.report_loss(loss, True, guess, shared)
                # of a loss function that is a module, its own input is read
                known = None if isinstance(self.loss_func, nn.Module) else self.loss_func
                self.probes.see_scores(known, output, fed=False, found=loss)
            self.pred = output
            try:
                self("after_pred")
            finally:
                self.pred = None
            if not self.training:
                self._end_batch()

    def mark_batch(self) -> None:
        """The user says that a batch begins; the forward that follows belongs to it."""
        self._close()
        self._begin_batch()
        self._marked = True

    # --- what the hooks tell: steps

    def step_began(self, opt: Any, closure: bool = False) -> None:
        """`opt.step` was called; with a closure its forwards are still to come."""
        known = opt in self.opts
        if not known:
            self.opts, self._adopted = [*self.opts, opt], True
        self.probes.see_step(opt)
        if self._paused is not None:  # Ctrl-C has ended a rollout
            self._end_rollout()
        if opt in self._stepped and graph_task() == -1:
            self._close()  # it steps again, and no forward was seen in between
        self.step_scaler, self.in_closure = stepping_scaler(), closure
        for cb in self.cbs if closure and not self._stepped else ():
            if cb.run and hasattr(type(cb), "_before_closure"):
                cb._before_closure()
        if not (self.training or closure or known) and self._last:
            self._last.append(opt)  # one more of the step before: from now on it is known
            self._joins_last = True
        elif not closure:
            self.closure_ran()

    def closure_ran(self) -> None:
        """Gradients are there, and weights change from here on: the last chance to cancel."""
        if not self.training:
            self._begin_unseen_batch()
        if self._stepped:
            return  # the same step goes on
        try:
            self("before_step")
        except CancelStepException:
            self._cancel_step()

    def step_ended(self, opt: Any) -> None:
        """`opt` has changed the weights; their `.grad` is still there."""
        self.in_closure = False
        self.keep_rates(opt)
        if self._joins_last:
            self._joins_last = False
            return
        if opt not in self._stepped:
            self._stepped.append(opt)
        if graph_task() == -1 and len(self._stepped) >= len(self.opts):
            self._close()
            return
        owned = [p for group in opt.param_groups for p in group["params"]]
        for cb in self.cbs:  # recorders read its gradients now: they may be freed before the end
            if cb.run and hasattr(type(cb), "_read_gradients") and not self._cancelled:
                cb._read_gradients(owned)

    # --- batches and steps

    def _begin_batch(self) -> None:
        self._set_validation(False)
        self.warn_of_other_loss()
        if not self._in_epoch:
            self._in_epoch = True
            self.spans.append({"epoch": self.epoch, "step": self.n_steps})
            self("before_epoch", "before_train")
        self.training, self.stepped, self.loss = True, False, None
        self.rolled_out = False
        self.losses.begin(self.n_steps)
        self("before_batch")

    def _begin_unseen_batch(self) -> None:
        """A step came, and the forward before it was not seen."""
        seen = self.hooks.root_ran or self.n_steps
        if not self.warned and (self._in_eval or not seen):
            self.warned = True
            warn_unseen(self.model, in_graph=self.hooks.in_graph, in_eval=self._in_eval)
        self._begin_batch()

    def _cancel_step(self) -> None:
        if graph_task() != -1:
            raise HookError(
                "CancelStepException: this step is made within the backward. Its other gradients "
                "are still to come, so it cannot be cancelled."
            ) from None
        for group in (group for opt in self.opts for group in opt.param_groups):
            for p in group["params"]:
                p.grad = None  # then an optimizer changes nothing
        self._cancelled, self.n_cancelled_steps = True, self.n_cancelled_steps + 1
        self("after_cancel_step")

    def _close(self) -> None:
        """Ends the step that was made, if one was, and the batch that is open."""
        if self.probes.other_loss and not self.other_loss:
            self.other_loss = True
            self.losses.drop_found()
        stepped, self._stepped = self._stepped, []
        if stepped:
            self._last = stepped
            self.probes.end_step()
            if self._cancelled:
                self._cancelled = False
                self.losses.drop(self.n_steps)
            else:
                self.n_steps, self.stepped = self.n_steps + 1, True
                self("after_step")
            self._forget_replaced()
        if self.training:
            self._end_batch()

    def _forget_replaced(self) -> None:
        """Leaves out optimizers whose parameters those of the last step, one of them new, hold."""
        if self._adopted:
            held, self._adopted = ids_of(self._last), False
            self.opts = [o for o in self.opts if o in self._last or not ids_of([o]) <= held]

    def _end_batch(self, event: str = "after_batch") -> None:
        """The batch is over; until the next one nothing is recorded."""
        self.train_iter += self.training and event == "after_batch"
        try:
            self(event)
        finally:
            self._marked = self.training = False
            self.pause_recorders()

    def _end_rollout(self) -> None:
        for cb in self._paused or ():
            cb._record(True)
        self._paused, self.training = None, True

    def _set_validation(self, on: bool) -> None:
        if self._in_validation is not on:
            self._in_validation = on
            self("before_validate" if on else "after_validate")

    # --- losses

    def report_loss(
        self, loss: Tensor, found: bool = False, guess: bool = False, shared: bool = False
    ) -> None:
        """Takes the loss of the current batch, or of the step just made."""
        self.probes.see_loss(loss, self.model.parameters(), found)
        known = loss.detach().clone()  # `loss /= n_accumulate` may follow
        self.losses.put(known, found, guess, shared, late=self._in_validation)
        if self.training:
            self.loss = known

    def warn_of_other_loss(self) -> None:
        """Warns if backward() is called on another loss than the model's, and none is reported.

        A scalar that was only guessed to be the loss is one no more, and nobody need know.
        """
        unknown = self.other_loss and self.losses.certain and not len(self.losses)
        if unknown and not self._warned_of_loss:
            self._warned_of_loss = True
            warn_other_loss(self.model)

    def _gather(self) -> None:
        self.losses.gather(self._where())

    def _loss_history(self) -> LossHistory:
        return self.losses

    def _epochs(self) -> list[dict[str, Any]]:
        return epoch_rows(self.spans, self.losses, self.n_steps)
