"""`ExternalLoop`: the user's own training loop, as callbacks see it in `self.learn`.

Builds on `CallbackRunner`. `LoopHooks` sends it signals (a forward begins, an optimizer has
stepped, …); `TABLE` says which events follow, by the state that the loop is in. One
class over one table, and therefore one file.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from hookkit.callbacks.callback import Callback
from hookkit.callbacks.losses import LossHistory
from hookkit.callbacks.optimizers import stepping_scaler
from hookkit.callbacks.readout import info_of
from hookkit.callbacks.runner import CallbackRunner
from hookkit.errors import HookError
from hookkit.events import CancelBatchException, CancelStepException
from hookkit.hooks.entries import graph_task
from hookkit.modules import unwrap
from hookkit.records import Run
from hookkit.watching.checks import warn_unseen
from hookkit.watching.loop_table import TABLE, Signal, State
from hookkit.watching.losses import epoch_rows, loss_in
from hookkit.watching.optimizer_groups import OptimizerGroups

_IN_EVAL = (State.EVAL, State.PAUSED)
_KEPT = (  # in copies and pickles
    "cbs", "_past", "n_steps", "epoch", "elsewhere", "earlier", "first_step", "losses", "spans",
    "train_iter", "n_cancelled_steps", "_gathered_at",
)  # fmt: skip


class ExternalLoop(CallbackRunner):
    """The user's training loop, as callbacks see it in `self.learn`.

    Attributes:
        model: the user's own module, without compile and distribution wrappers.
        opts: the torch optimizers; if none was given, those seen stepping the model so far.
        training: True from a training forward to the end of its batch; False in validation.
        epoch: 0-based, as marked.
        train_iter: training batches so far in this run.
        loss: of the current batch, detached, if it is known by now; else None.
        pred: the live output of the model during `after_pred`, else None: nothing is kept alive.
        stepped: an optimizer step has happened since the last `before_batch`.
        n_steps: optimizer steps so far, over all runs, and those `elsewhere`.
        elsewhere: (first, end) of steps that were made before, in another loop.
        earlier: the Run that is resumed, or None.
        first_step: the number of the first step, of a training that is resumed; else None.
        resumes_epoch: it ended within an epoch, which has not been marked since.
        n_cancelled_steps: steps that a callback cancelled (CancelStepException).
        eval_pass, dls, n_epoch, accelerator: as in a Learner that has none of them.
        finds_opts: no optimizer was given: those that step are found.
        groups: which of the optimizers make a step together.
        losses: the loss of each batch, a `LossHistory`.
        spans: for each epoch its number, its first step, and the values reported with it.
        info: facts that the user adds to the run.
        compiled, compiled_step: the model, or the step, ran inside a graph that `torch.compile`
            made of something around it: Python hooks do not run there.
        root_ran: a training forward of the model itself was seen.
        in_eval: the last forward was in eval mode with gradients on.
        other_thread: another thread has made training forwards, which are not recorded.
        warned: a warning has said what was not recorded.

    Args:
        model, opts, each_forward: as for `watch`, checked and unwrapped.
    """

    eval_pass = False
    dls = n_epoch = accelerator = None
    loss_func: Any = None
    pred: Any = None
    loss: Tensor | None = None
    epoch = n_cancelled_steps = 0
    first_step: int | None = None
    resumes_epoch = False
    compiled = compiled_step = root_ran = in_eval = other_thread = warned = False

    def __init__(
        self, model: nn.Module, opts: Iterable[Optimizer] = (), each_forward: bool = False
    ) -> None:
        super().__init__()
        self.model, self.opts, self.each_forward = model, list(opts), each_forward
        self.finds_opts = not self.opts
        self.elsewhere: list[tuple[int, int]] = []
        self.earlier: Run | None = None
        self.losses, self.spans = LossHistory(), list[dict[str, Any]]()
        self.info: dict[str, Any] = {}
        self.groups = OptimizerGroups()
        self._reset()

    def _reset(self) -> None:
        self.state = self._state_before = State.BETWEEN
        self.train_iter, self.stepped, self.training, self.in_closure = 0, False, False, False
        self.groups.stepped = []
        self.other_thread = False
        self._in_epoch = self._validating = self._marked = self._step_cancelled = False
        self._last_step_iter = self._most_batches = 0
        # of a batch that a part began, a parameter, and its gradient then
        self._first_part: nn.Module | None = None
        self._trained: Tensor | None = None
        self._grad_before: tuple[int, int] | None = None
        self._paused: list[Any] = []

    @property
    def opt(self) -> Optimizer | None:
        """The first optimizer, or None while none is known."""
        return self.opts[0] if self.opts else None

    @property
    def stepped_opts(self) -> list[Optimizer]:
        """The optimizers that made the last step; all, where steps are not seen."""
        return self.groups.last or self.opts

    @property
    def n_own_steps(self) -> int:
        """Optimizer steps so far, over all runs, without those `elsewhere`."""
        return self.n_steps - sum(end - first for first, end in self.elsewhere)

    @property
    def n_batches_since_step(self) -> int:
        """Training batches since the last step; 0 while they may still be for the next one.

        They may be up to eight times the most batches that a step has had.
        """
        n = self.train_iter - self._last_step_iter - 1
        return n if n > 8 * max(self._most_batches, 1) else 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (cb := self._cb_named(name)) is not None:
            return cb
        raise AttributeError(f"a watched loop has no {name!r}", name=name, obj=self)

    def __getstate__(self) -> dict[str, Any]:
        """What was recorded; the model, the optimizers and an open batch stay behind."""
        kept = {name: getattr(self, name) for name in _KEPT}
        return {**kept, "info": dict(self.info), "kept_info": info_of(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]
        super().__setstate__(state)

    def _where(self) -> str:
        return f", epoch {self.epoch}, batch {self.train_iter} (watched loop)"

    # --- a run

    def begin(self) -> None:
        """The run begins: `before_fit`."""
        self._claim()
        self._reset()
        self.fitting = True
        self("before_fit")

    def resume(self, run: Run) -> None:
        """Goes on from a run: its steps and epochs come first, here and in what is read."""
        self.earlier = run
        self.resumes_epoch = bool(run.info.get("within_epoch"))
        self.number_from(run.n_steps, run.n_epochs - self.resumes_epoch)

    def number_from(self, step: int, epoch: int) -> None:
        """Numbers steps and epochs from these on, as those of the training that is resumed."""
        self._pass_over(step)
        self.first_step, self.epoch = step or None, max(self.epoch, epoch)

    def _pass_over(self, step: int) -> None:
        if step > self.n_steps:
            self.elsewhere.append((self.n_steps, step))
            self.n_steps = step

    def _continue_from(self, cb: Callback) -> None:
        self._pass_over(cb._last_step)

    def finish(self) -> None:
        """The run is over: what is open is closed, then `after_fit`."""
        self.mark_epoch()
        self("after_fit")

    def end(self) -> None:
        """Whatever happened: the loop is no longer followed, and every callback cleans up."""
        self.fitting = self.training = False
        self.step_scaler = None
        self.sensors.remove()
        self._clean_up()

    def mark_epoch(self) -> None:
        """Batches after this belong to a new epoch; nothing happens if this one had none."""
        self._signal(Signal.CLOSE)
        self._end_validation()
        if self._in_epoch:
            self("after_train", "after_epoch")
        if self._in_epoch or self.resumes_epoch:
            self.epoch, self._in_epoch, self.resumes_epoch = self.epoch + 1, False, False

    # --- signals

    def _signal(self, signal: str) -> None:
        before = self.state
        row = TABLE[before].get(signal)
        if row is None:
            if before in _IN_EVAL:  # Ctrl-C ended the forward
                self.state, self.training = self._state_before, before is State.PAUSED
                self._signal(signal)
            return
        actions, state = row
        if state is State.BACK:  # the only way out of an eval forward
            self.state = self._state_before
        else:
            self.state, self._state_before = state, before
        try:
            for action in actions:
                getattr(self, f"_{action}")()
                if self.state is State.CANCELLED:
                    break
        except BaseException:  # a callback's: the other actions are skipped
            if self.state not in _IN_EVAL:
                self.state = State.BATCH if self.training else State.BETWEEN
            raise

    def forward_began(self, training: bool) -> None:
        """A forward begins, to learn from or not; nothing of the model has run."""
        if not training:
            self._signal(Signal.BEGIN_EVAL)
        elif self._marked:
            self._marked = False  # its batch has begun
        else:
            self._next_batch()

    def part_began(self, part: nn.Module) -> bool:
        """A part of a model runs whose own forward was never seen; whether a batch begins, too.

        It does after a step, and where gradients are accumulated: the part that began the batch
        runs again after a backward pass. Without one it may run any number of times in a batch.
        """
        again = part is self._first_part and (self.each_forward or self._backward_ran())
        if self.training and not self.groups.stepped and not again:
            return False
        # one of the part's, as in a GAN a backward pass may reach only one of the nets; of a frozen
        # part, one of the others'
        trained = (p for p in chain(part.parameters(), self._own()) if p.requires_grad)
        self._first_part, self._trained = part, next(trained, None)
        self._grad_before = None if self._trained is None else _grad_state(self._trained.grad)
        self.forward_began(True)
        return True

    def _backward_ran(self) -> bool:
        """Whether a gradient has come, or changed, since a part began the batch."""
        now = None if self._trained is None else _grad_state(self._trained.grad)
        return now is not None and now != self._grad_before

    def mark_batch(self) -> None:
        """The user says that a batch begins; the forward that follows belongs to it."""
        self._next_batch()
        self._marked = True

    def _next_batch(self) -> None:
        if self.groups.stepped:
            self.groups.learn()
        self._signal(Signal.CLOSE)
        self._signal(Signal.BEGIN_STEP if self.each_forward else Signal.BEGIN)

    def forward_ended(self, output: Any, share: bool = False) -> None:
        """The forward returned `output`, the live object; with `share` see `LossHistory.put`."""
        if self.training:
            loss, guess = loss_in(output)
            if loss is not None:
                self.report_loss(loss, guess, share)
            # of a loss function that is a module, its own input is read
            if not isinstance(self.loss_func, nn.Module):
                self.sensors.see_scores(self.loss_func, output, fed=False)
        self.pred = output
        try:
            self._signal(Signal.OUT)
        finally:
            self.pred = None

    def forward_failed(self) -> None:
        """The model raised; the exception is on its way to the user. The batch is not recorded."""
        self._signal(Signal.FAIL)

    def step_began(self, opt: Any, closure: bool = False) -> None:
        """`opt.step` was called; with a closure, forward and backward may be still to come.

        With `step_ended`, also for an optimizer that is not torch's and runs no step hooks: it has
        `param_groups`, as torch's have.
        """
        if opt not in self.opts:
            self.opts.append(opt)
        self.sensors.see_step(opt)
        if self.state is State.CANCELLED or self.each_forward:
            return
        if opt in self.groups.stepped and graph_task() == -1:
            self._signal(Signal.CLOSE)
        scaler = stepping_scaler()
        if scaler is not None or not self.groups.stepped:
            self.step_scaler = scaler
        self.in_closure = closure
        if closure:
            self._signal(Signal.STEP_CLOSURE)
        elif not self.training and self.groups.comes_late(opt):
            self._signal(Signal.STEP_LATE)
        else:
            self._signal(Signal.STEP)

    def closure_ran(self) -> None:
        """The closure of the current step was evaluated; weights change from here on.

        Only after the first evaluation can a callback still leave the step out.
        """
        self._signal(Signal.RAN)

    def step_ended(self, opt: Optimizer) -> None:
        """`opt` has changed the weights; their `.grad` is still there."""
        if opt in self.opts[:1]:
            self._note_rates(opt)
        if self.each_forward:
            return
        if self.state in (State.CANCELLED, State.LATE) or not self._more_to_come(opt):
            self._signal(Signal.STEPPED)
        else:
            self._signal(Signal.STEPPED_PART)
            self._note_part(opt)
        self.in_closure = False

    def _more_to_come(self, opt: Optimizer) -> bool:
        """Whether the step goes on after `opt` has stepped."""
        # within a backward, an optimizer for each parameter: the step is over when the backward is
        if graph_task() != -1:
            if not self.groups.stepped:
                # private: the autograd engine calls this when the backward pass under way has
                # ended. DDP and FSDP use it too; since torch 1.0. Without it such steps would
                # end only as the next batch begins.
                Variable._execution_engine.queue_callback(self._backward_ended)
            if opt not in self.groups.stepped:
                self.groups.stepped.append(opt)
            return True
        self.groups.stepped.append(opt)
        unseen = self.model.parameters() if self.finds_opts else ()
        return self.groups.more_to_come(self.opts, unseen)

    def _backward_ended(self) -> None:
        if self.fitting and self.groups.stepped:
            self._signal(Signal.CLOSE)

    def _note_part(self, opt: Optimizer) -> None:
        """Recorders read the gradients of `opt` now: at `after_step` they may be freed."""
        if self._step_cancelled:
            return
        owned = [p for group in opt.param_groups for p in group["params"]]
        for cb in self.cbs:
            if cb.run and hasattr(type(cb), "_note_part"):
                cb._note_part(owned)

    # --- actions on a training batch

    def _begin_batch(self) -> None:
        self._end_validation()
        if not self._in_epoch:
            self._in_epoch = True
            self.spans.append({"epoch": self.epoch, "step": self.n_steps})
            self("before_epoch", "before_train")
        self.training, self.stepped, self._marked, self.loss = True, False, False, None
        self.losses.begin(self.n_steps)
        self._fire_in_batch("before_batch")

    def _begin_unseen_batch(self) -> None:
        """A step came, and the forward before it was not seen."""
        root = unwrap(self.model)
        # some layers may be in training mode on purpose: a head on a frozen body
        trains = any(m.training for m in root.modules() if not [*m.children()])
        unseen = not (self.root_ran or self.n_own_steps)
        if not self.warned and (unseen or (self.in_eval and not (trains and root.training))):
            self.warned = True
            warn_unseen(self.model, compiled=self.compiled, in_eval=self.in_eval)
        self._begin_batch()

    def _after_pred(self) -> None:
        self._fire_in_batch("after_pred")

    def _before_step(self) -> None:
        try:
            self._fire_in_batch("before_step")
        except CancelStepException:
            if self.each_forward or graph_task() != -1:
                raise HookError(
                    "A callback raised CancelStepException, and the gradients of this step are "
                    "still to come: it is made within the backward, or is not seen "
                    "(each_forward=True). Call `backward()` first and a torch `opt.step()` after."
                ) from None
            for group in (group for opt in self.opts for group in opt.param_groups):
                for p in group["params"]:
                    p.grad = None  # then an optimizer changes nothing
            self._step_cancelled, self.n_cancelled_steps = True, self.n_cancelled_steps + 1
            self("after_cancel_step")

    def _end_step(self) -> None:
        self.groups.end()
        self.sensors.end_step()
        self._most_batches = max(self._most_batches, self.train_iter - self._last_step_iter)
        self._last_step_iter = self.train_iter
        if self._step_cancelled:
            self._step_cancelled = False
            self.losses.drop(self.n_steps)
        else:
            self.n_steps, self.stepped = self.n_steps + 1, True
            self._fire_in_batch("after_step")
        if self.training:
            self._end_batch()

    def _count_step(self) -> None:
        self.n_steps += 1

    def _end_batch(self, event: str = "after_batch") -> None:
        self.train_iter += event == "after_batch"  # as the Learner: known to most `after_batch`
        try:
            self._fire_in_batch(event)
        finally:
            self._marked = False
            self._pause()

    def _cancel_batch(self) -> None:
        self.losses.drop()
        self._end_batch("after_cancel_batch")

    def _fire_in_batch(self, event: str) -> None:
        """Fires an event of a training batch."""
        if self._by_event.get(event) == []:
            return  # the common case
        try:
            self(event)
        except CancelBatchException:  # the user's batch goes on; for the callbacks it is over
            self.state = State.CANCELLED
            if self.training:
                self._cancel_batch()

    # --- actions on an eval forward

    def _begin_eval(self) -> None:
        self.training = False
        self._pause()
        if not self._validating:
            self._validating = True
            self("before_validate")
        with suppress(CancelBatchException):
            self("before_batch")

    def _end_eval(self, *events: str) -> None:
        try:
            with suppress(CancelBatchException):
                self(*(events or ("after_pred", "after_batch")))
        finally:
            self._pause()

    def _cancel_eval(self) -> None:
        self._end_eval("after_cancel_batch")

    def _end_validation(self) -> None:
        if self._validating:
            self._validating = False
            self("after_validate")

    def _pause(self) -> None:
        """Nothing is recorded between training batches, also in a forward that cannot be seen."""
        self.training = False
        self._paused = self._pause_recorders()

    def _resume(self) -> None:
        self.training = True
        for cb in self._paused:
            cb._record(True)

    # --- losses

    def report_loss(self, loss: Tensor, guess: bool = False, share: bool = False) -> None:
        """Takes the loss of the current batch, or of the step just made."""
        self.sensors.see_loss(loss, self._own())
        kept = loss.detach().clone()  # `loss /= n_accumulate` may follow
        self.losses.put(kept, guess, share)
        if self.training:
            self.loss = kept

    def backward_began(self, root: Tensor) -> None:
        """The first backward pass was called on `root`: the loss, however it is reported."""
        for cb in self.cbs:
            if cb.run and hasattr(type(cb), "_note_graph"):
                cb._note_graph(root)

    def _own(self) -> Iterable[Tensor]:
        """The parameters that are trained, of the model and beside it."""
        groups = (group["params"] for opt in self.opts for group in opt.param_groups)
        return chain(self.model.parameters(), *groups)

    def _gather(self) -> None:
        self.losses.gather(self._where())

    def _loss_history(self) -> LossHistory:
        return self.losses

    def _epochs(self) -> list[dict[str, Any]]:
        return epoch_rows(self.spans, self.losses.by_step(self.n_steps))


def _grad_state(grad: Tensor | None) -> tuple[int, int] | None:
    """Where a gradient is, and how often it has been changed in place."""
    if grad is None or grad.layout is not torch.strided:
        return None
    # Private: `_version`, the counter by which autograd knows of changes in place (since 0.4).
    return grad.data_ptr(), grad._version
