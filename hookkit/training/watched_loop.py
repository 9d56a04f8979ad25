"""`WatchedLoop`: the user's own training loop, as callbacks see it in `self.learn`.

A step is everything between two optimizer steps. It is over when every known optimizer has stepped,
or, once at least one has stepped, when the next forward begins (the two players of a GAN). Each
training forward begins a batch. Recorders merge the batches of a step, so nothing that is recorded
depends on where a batch ends.

`LoopHooks` decides which forwards and steps count, and calls `begin_forward`, `end_forward`,
`begin_step` and `end_step`. `WatchedLoop` makes events of them; its `State` says what is open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import wraps
from itertools import chain
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer as global_hooks
from torch.utils.hooks import RemovableHandle

from hookkit._core.batches import loss_in
from hookkit._core.messages import warn
from hookkit._core.modules import is_replica, unwrap, wrappers
from hookkit.callbacks.events import CancelStepException
from hookkit.callbacks.loss_log import Source
from hookkit.callbacks.optimizers import ids_of, skips_step, stepping_scaler
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.hooks.attach import attach, check_hookable, remove_all
from hookkit.hooks.calls import call_kind, graph_task, is_tracing
from hookkit.training.loop import Loop
from hookkit.training.watch_checks import not_in_watch, one_number, warn_unseen

is_compiling = torch.compiler.is_compiling


class State(Enum):
    """What is open in a watched loop.

    - IDLE: nothing is open.
    - VALIDATION: a validation is open, and none of its forwards runs.
    - EVALUATING: a forward of a validation runs.
    - MARKED: a training batch is open, and its forward has not begun.
    - BATCH: a training batch is open, and its forward has begun.
    - PAUSED: a forward that does not train (a rollout) runs within a training batch.
    - STEPPED: in this batch an optimizer has stepped, and another known one has not.
    - CANCELLED: a callback has cancelled the step of this batch.

    What can come:

    - `train`: a forward in training mode with gradients begins.
    - `other`: any other forward begins.
    - `returns`, `raises`: a forward ends.
    - `mark`: w.batch() is called.
    - `step`: an optimizer steps, and another known one has not.
    - `last`: the last known optimizer steps.
    - `epoch`: w.epoch() is called.

    Each row has the state, what comes, the next state, and the events that are sent, except epoch
    events. Only outermost forwards count, so no forward begins in EVALUATING or PAUSED.

        IDLE       train   BATCH      before_batch
        VALIDATION train   BATCH      after_validate before_batch
        MARKED     train   BATCH
        BATCH      train   BATCH      after_batch before_batch
        STEPPED    train   BATCH      after_step after_batch before_batch
        CANCELLED  train   BATCH      after_batch before_batch

        IDLE       other   EVALUATING before_validate before_batch
        VALIDATION other   EVALUATING before_batch
        MARKED     other   PAUSED
        BATCH      other   PAUSED
        STEPPED    other   EVALUATING after_step after_batch before_validate before_batch
        CANCELLED  other   EVALUATING after_batch before_validate before_batch

        BATCH      returns BATCH      after_pred
        EVALUATING returns VALIDATION after_pred after_batch
        PAUSED     returns BATCH
        BATCH      raises  IDLE       after_cancel_batch
        EVALUATING raises  VALIDATION after_cancel_batch
        PAUSED     raises  BATCH

        IDLE       mark    MARKED     before_batch
        VALIDATION mark    MARKED     after_validate before_batch
        EVALUATING mark    MARKED     after_validate before_batch
        MARKED     mark    MARKED     after_batch before_batch
        BATCH      mark    MARKED     after_batch before_batch
        PAUSED     mark    MARKED     after_batch before_batch
        STEPPED    mark    MARKED     after_step after_batch before_batch
        CANCELLED  mark    MARKED     after_batch before_batch

        IDLE       step    STEPPED    before_batch before_step
        VALIDATION step    STEPPED    after_validate before_batch before_step
        EVALUATING step    STEPPED    after_validate before_batch before_step
        MARKED     step    STEPPED    before_step
        BATCH      step    STEPPED    before_step
        PAUSED     step    STEPPED    before_step
        STEPPED    step    STEPPED
        CANCELLED  step    CANCELLED

        IDLE       last    IDLE       before_batch before_step after_step after_batch
        VALIDATION last    IDLE       after_validate before_batch before_step after_step after_batch
        EVALUATING last    IDLE       after_validate before_batch before_step after_step after_batch
        MARKED     last    IDLE       before_step after_step after_batch
        BATCH      last    IDLE       before_step after_step after_batch
        PAUSED     last    IDLE       before_step after_step after_batch
        STEPPED    last    IDLE       after_step after_batch
        CANCELLED  last    IDLE       after_batch

        IDLE       epoch   IDLE
        VALIDATION epoch   IDLE       after_validate
        EVALUATING epoch   IDLE       after_validate
        MARKED     epoch   IDLE       after_batch
        BATCH      epoch   IDLE       after_batch
        PAUSED     epoch   IDLE       after_batch
        STEPPED    epoch   IDLE       after_step after_batch
        CANCELLED  epoch   IDLE       after_batch

    The table leaves out three cases:

    - PAUSED returns to MARKED if it came from MARKED.
    - If an optimizer steps again in STEPPED or CANCELLED, the batch is closed first, and the step
      is then handled as in IDLE.
    - If an unknown optimizer steps while no batch is open, its step is added to the last step.
    """

    IDLE = "idle"
    VALIDATION = "validation"
    EVALUATING = "evaluating"
    MARKED = "marked"
    BATCH = "batch"
    PAUSED = "paused"
    STEPPED = "stepped"
    CANCELLED = "cancelled"


# Module-level names, for speed: in Python 3.11 looking up `State.IDLE` runs Python code.
IDLE, VALIDATION, EVALUATING, MARKED, BATCH, PAUSED, STEPPED, CANCELLED = State
TRAINING = BATCH, STEPPED, MARKED, CANCELLED


class WatchedLoop(Loop):
    """The user's training loop, as callbacks see it in `self.learn`.

    Attributes:
        model: the user's own module, without compile and distribution wrappers.
        outer_model: the module that was given, with its wrappers.
        opts, opt: the optimizers given or seen stepping; the first of them.
        state: what is open, a `State`.
        epoch: the number of epochs that `end_epoch` has ended.
        train_iter, n_steps: the numbers of training batches and of optimizer steps so far.
        loss: the detached loss of the current batch, or None while it is unknown.
        epochs: as in `Loop`, but an epoch with several validations has a dict for each.
        pred: the model's output, with its graph, during `after_pred`; otherwise None.
        n_cancelled_steps: how many steps a callback has cancelled (CancelStepException).
        loss_twice: whether the loss function was called twice within a batch.
        warned: whether a warning about something not recorded was shown.
    """

    dls = n_epoch = accelerator = None

    def __init__(self, model: Any, opts: Iterable[Any], loss_func: Any) -> None:
        super().__init__()
        self.model, self.outer_model, self.loss_func = unwrap(model), model, loss_func
        self.opts = list(opts)
        self.finds_opts = not self.opts
        self.hooks = LoopHooks(model)
        self.epoch = self.n_cancelled_steps = 0
        self.warned = self.loss_twice = False
        self.step_scaler: Any = None  # the GradScaler that made the last step
        # whether backward() was called on another tensor than the loss in the model's output
        self.other_loss = False
        self._noted_at = 0  # `n_steps` when `note` last added values
        self._reset()

    def _reset(self) -> None:
        self.state, self.in_closure, self.in_epoch = IDLE, False, False
        self.train_iter, self.pred = 0, None
        self.loss: Tensor | None = None
        self._computed: Tensor | None = None  # the last loss that the loss function computed
        # the state before PAUSED, and the callbacks to switch on again
        self._resume: tuple[State, list[Any]] = IDLE, []
        # whether the model ran in eval mode with gradients after the last training batch
        self._in_eval = False
        self._stepped: list[Any] = []  # the optimizers that have stepped in the current step
        self._last_opts: list[Any] = []  # the optimizers that made the last step

    @property
    def opt(self) -> Any:
        """Return the first optimizer, or None while none is known."""
        return self.opts[0] if self.opts else None

    @property
    def stepped_opts(self) -> list[Any]:
        """Return the optimizers that made the current or last step; all before the first step."""
        return self._stepped or self._last_opts or self.opts

    @property
    def training(self) -> bool:
        """Return whether a training batch is open, and is not PAUSED."""
        return self.state in TRAINING

    @property
    def in_batch(self) -> bool:
        """Return whether a training batch has begun, and no optimizer has stepped since."""
        return self.state in (MARKED, BATCH)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (cb := self.cbs_by_name.get(name)) is not None:
            return cb
        raise AttributeError(not_in_watch(name), name=name, obj=self)

    def _where(self) -> str:
        return f", epoch {self.epoch}, batch {self.train_iter} (watched loop)"

    # --- a run

    def begin(self) -> None:
        """Begin a run: send `before_fit`, then register the hooks."""
        self._reset()
        self.fitting = True
        self("before_fit")
        self.hooks.attach(self)

    def end(self) -> None:
        """Remove all hooks, and let every callback clean up, however the run has ended."""
        self.hooks.remove()
        self.fitting, self.state = False, IDLE
        self.step_scaler = None
        self._clean_up()

    def end_epoch(self) -> None:
        """End the epoch, if it has a batch; the next batch begins a new epoch."""
        self._close()
        self._end_validation()
        if self.in_epoch:
            self("after_train", "after_epoch")
            self.epoch, self.in_epoch = self.epoch + 1, False

    def note(self, values: dict[str, Any]) -> None:
        """Add values to the row of the last epoch.

        A name that the row already has begins another row of this epoch, if steps were made since;
        otherwise the value is replaced. Before the first batch, values get a row of their own.
        """
        again = bool(self.epochs) and not values.keys().isdisjoint(self.epochs[-1])
        if values and not self.epochs:
            self.epochs.append({"epoch": self.epoch, "step": self.n_steps})
        elif again and self._noted_at < self.n_steps:
            self.epochs.append({"epoch": self.epochs[-1]["epoch"], "step": self._noted_at})
        if values:
            self.epochs[-1].update(values)
            self._noted_at = self.n_steps

    # --- forwards

    def begin_forward(self, trains: bool, with_grad: bool, inputs: Any) -> None:
        """Begin a training batch, a validation batch or a rollout, just before the forward runs.

        Args:
            trains: the module is in training mode.
            with_grad: gradients are on.
            inputs: the arguments of the forward, any structure.
        """
        if self.state is MARKED and with_grad:  # `w.batch()` trains, even in eval mode
            self.state, trains = BATCH, True
        elif trains and with_grad:
            if self.state is not IDLE:
                self._close()
            self._begin_batch()
        elif self.in_batch:
            self._resume = self.state, self.pause_recorders()
            self.state = PAUSED
        else:
            self._close()
            if self.state is IDLE:
                self.state = VALIDATION
                self("before_validate")
            self.state = EVALUATING
            self("before_batch")
        if self.state is BATCH:
            self._in_eval = False
            if not self.probes.done:
                self.probes.see_batch(inputs, trains)
        elif with_grad:
            self.begin_eval_part(inputs)

    def begin_eval_part(self, inputs: Any) -> None:
        """Note that the model, or a part of it, runs in eval mode with gradients on."""
        if self.state not in (MARKED, BATCH, PAUSED):
            self._in_eval = True
            self.probes.see_batch(inputs, training=False)

    def end_forward(self, output: Any, failed: bool = False, shared: bool = False) -> None:
        """End a forward: read the loss in its output, or cancel the batch if the forward raised.

        Args:
            output: the output of the model, with its graph.
            failed: whether the forward raised.
            shared: whether the step's loss is the sum of its batches' losses, not their mean.
        """
        if self.state is PAUSED:
            self._end_pause()
        elif self.state in (IDLE, VALIDATION):
            pass  # its batch was closed during the forward, or `before_batch` raised
        elif failed:
            if self.state is not EVALUATING:
                self.losses.drop()
            self._end_batch("after_cancel_batch")
        else:
            if self.state is not EVALUATING:
                loss, guess = None, False
                if not self.other_loss and not (isinstance(output, Tensor) and output.ndim):
                    loss, guess = loss_in(output)
                if loss is not None:
                    self.report_loss(loss, "guess" if guess else "returned", share=shared)
                if not self.probes.done:
                    # `end_loss` reads the scores if the loss function is a module
                    known = None if isinstance(self.loss_func, nn.Module) else self.loss_func
                    self.probes.see_scores(known, output, fed=False, found=loss)
            if "after_pred" in self.heard:
                self.pred = output
                try:
                    self("after_pred")
                finally:
                    self.pred = None
            if self.state is EVALUATING:
                self._end_batch()

    def mark_batch(self) -> None:
        """Begin a training batch for `w.batch()`; the next forward belongs to it."""
        self._close()
        self._begin_batch()
        self.state = MARKED

    # --- steps

    def begin_step(self, opt: Any, closure: bool = False) -> None:
        """Begin a step of `opt`; with a closure, its forwards are still to come."""
        if self.state is PAUSED:  # Ctrl-C has ended a rollout
            self._end_pause()
        known = opt in self.opts
        joins = bool(self._last_opts) and not (self.state in TRAINING or closure or known)
        if not known:  # it replaces known ones whose parameters are all in this step's optimizers
            step = [opt, *(self._last_opts if joins else self._stepped)]
            held = ids_of(step)
            self.opts = [o for o in self.opts if o in step or not ids_of([o]) <= held] + [opt]
        if not self.probes.done:
            self.probes.see_step(opt)
        if opt in self._stepped and graph_task() == -1:
            self._close()  # it steps again without a forward in between: a new step
        self.in_closure = closure
        if self.cbs:
            self.step_scaler = stepping_scaler()
        for cb in self.cbs if closure and not self._stepped else ():
            if cb.run:
                cb._before_closure()
        if joins:
            self._last_opts.append(opt)  # it belongs to the last step
        elif not closure:
            self.begin_update()

    def begin_update(self) -> None:
        """Send `before_step`, when gradients are ready and the weights are about to change."""
        if self.state not in TRAINING:  # the forward before it was not seen
            seen = self.hooks.root_ran or self.n_steps
            if not self.warned and (self._in_eval or not seen):
                self.warned = True
                warn_unseen(self.model, in_graph=self.hooks.in_graph, in_eval=self._in_eval)
            self._begin_batch()
        if self.state in (STEPPED, CANCELLED):
            return  # the same step goes on
        try:
            if "before_step" in self.heard:
                self("before_step")
        except CancelStepException:
            if graph_task() != -1:
                raise HookError(
                    "CancelStepException: this step is made within the backward. Its other "
                    "gradients are still to come, so it cannot be cancelled."
                ) from None
            for group in (group for opt in self.opts for group in opt.param_groups):
                for p in group["params"]:
                    p.grad = None  # PyTorch cannot skip `step`; without gradients it does nothing
            self.state, self.n_cancelled_steps = CANCELLED, self.n_cancelled_steps + 1
            self("after_cancel_step")

    def end_step(self, opt: Any) -> None:
        """End a step of `opt`: the weights have changed, and their `.grad` is still there."""
        self.in_closure = False
        self.keep_rates(opt)
        if self.state not in TRAINING:
            return  # it belongs to the last step, which is over
        if opt not in self._stepped:
            self._stepped.append(opt)
        if self.state is not CANCELLED:
            self.state = STEPPED
        if len(self._stepped) >= len(self.opts) and graph_task() == -1:
            self._close()
        elif self.state is STEPPED:
            # recorders read its gradients now: the loop may free them before the step is over
            owned = [p for group in opt.param_groups for p in group["params"]]
            for cb in self.cbs:
                if cb.run:
                    cb._read_gradients(owned)

    step_began, step_ended = begin_step, end_step  # the names that the docs have shown before

    # --- what is open

    def _begin_batch(self) -> None:
        """End a validation that is open, begin an epoch if none is open, and begin a batch."""
        if self.state is not IDLE:
            self._end_validation()
        if self.other_loss:
            self.warn_of_other_loss()
        if not self.in_epoch:
            self.begin_epoch()
            self("before_epoch", "before_train")
        self.state, self.stepped, self.loss = BATCH, False, None
        self.losses.begin(self.n_steps)
        if "before_batch" in self.heard:
            self("before_batch")

    def _close(self) -> None:
        """End the rollout, the step and the training batch that are open, if any."""
        if self.state is PAUSED:
            self._end_pause()
        if self.probes.other_loss and not self.other_loss:
            self.other_loss = True
            self.losses.drop_returned()
        if self.state in (STEPPED, CANCELLED):
            cancelled, self.state = self.state is CANCELLED, BATCH
            self._last_opts, self._stepped = self._stepped or self._last_opts, []
            if not self.probes.done:
                self.probes.end_step()
            if cancelled:
                self.losses.drop(self.n_steps)
            else:
                self.n_steps, self.stepped = self.n_steps + 1, True
                if "after_step" in self.heard:
                    self("after_step")
        if self.state in TRAINING:
            self._end_batch()

    def _end_batch(self, event: str = "after_batch") -> None:
        """End the batch with `event`, and switch off the recorders until the next batch."""
        trained = self.state is not EVALUATING
        self.train_iter += trained and event == "after_batch"
        try:
            if event in self.heard:
                self(event)
        finally:
            self.state = IDLE if trained else VALIDATION
            for cb in self._hooking:
                cb._switch.on = False

    def _end_pause(self) -> None:
        """End PAUSED: restore the state before it, and switch the recorders on again."""
        self.state, recorders = self._resume
        for cb in recorders:
            cb._switch.on = True

    def _end_validation(self) -> None:
        if self.state in (VALIDATION, EVALUATING):
            self.state = IDLE
            self("after_validate")

    # --- losses

    def report_loss(
        self, loss: Tensor, source: Source = "reported", *, share: bool = False
    ) -> None:
        """Log the loss of the current batch, or of the batch just ended; see `LossLog.put`."""
        if not self.probes.done:
            self.probes.see_loss(loss, self.model.parameters(), source != "reported")
        known = loss.detach().clone()  # `loss /= n_accumulate` may follow
        late = self.state in (VALIDATION, EVALUATING)
        self.losses.put(known, source, share=share, late=late)
        if self.state in TRAINING:
            self.loss = known

    def end_loss(self, loss_func: nn.Module, args: Any, loss: Tensor) -> None:
        """Log the loss that the user's `loss_func` module computed from `args`."""
        if self.state not in TRAINING:
            return  # no training batch is open, so it is the loss of a validation
        self.loss_twice |= self.loss is not None and self.loss is self._computed
        if args and not self.probes.done:
            self.probes.see_scores(loss_func, args[0])
        self.report_loss(one_number(loss))
        self._computed = self.loss

    def warn_of_other_loss(self) -> None:
        """Warn if training uses another loss than the model returns, and no loss is reported.

        If the model's loss was only a guess, it is dropped without a warning.
        """
        unknown = self.other_loss and self.losses.certain and not len(self.losses)
        if unknown and not self.warned:
            self.warned = True
            warn(
                f"watch: {type(self.model).__name__} returns a loss, and backward() is called on "
                f"another: what it returns is not recorded as the loss. Report the one that you "
                f"train on: w.loss(loss), in each batch.",
                NeverFiredWarning,
            )


_ITEMS_OF_STEP = "num_items_in_batch"
"""transformers' Trainer passes this, so that a model divides its loss by the items of the step."""


class LoopHooks:
    """Reports each forward of the model and each optimizer step to a `WatchedLoop`.

    It registers forward hooks on the model and on each of its wrappers (the user may call any of
    them), and the step hooks of optimizers. If the loss function is a module, a forward hook on it
    sees the loss. Only outermost calls in the thread that entered `watch` count; recomputation by
    activation checkpointing and tracing do not.

    If the model's own forward never runs (Lightning's training_step, a dict of two nets), a
    training call of any of its parts begins a batch, and the next call of the same part begins the
    next batch.

    Attributes:
        loop: the `WatchedLoop` from `attach` to `remove`, otherwise None: the loop references this
            object, and the cycle would keep the model until the garbage collector runs.
        root_ran: whether a training forward of the model itself was seen.
        in_graph: whether the model ran inside a compiled function or module around it.
        elsewhere: whether a training forward was seen in another thread.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loop: Any = None
        self.outer, self.model = model, unwrap(model)
        self.root_ran = self.in_graph = self.elsewhere = False
        self._first_part: nn.Module | None = None  # the part that began the batch
        self._begin()

    def _begin(self) -> None:
        self._thread = get_ident()
        self._depth = 0  # how many nested forwards are running
        self._error: BaseException | None = None  # `sys.exception()` before the outermost forward
        self._steps: list[Optimizer] = []  # the steps that are running: a step may call another's
        self._in_closure = False  # whether the closure of a step is running
        self._handles, self._part_handles = list[RemovableHandle](), list[RemovableHandle]()

    def attach(self, loop: WatchedLoop) -> None:
        """Register the hooks. If this raises, `remove` removes the hooks registered so far."""
        self._begin()
        self.loop = loop
        for module in wrappers(self.outer):
            check_hookable(module, "watch")
            # prepend: the batch begins before the user's hooks; always_call: also after an error
            self._handles.append(attach(module, self._before, pre=True, prepend=True))
            self._handles.append(attach(module, self._after, always_call=True))
        if not self.root_ran:
            for part in self.model.modules():  # a ScriptModule runs no Python hooks
                if part is not self.model and not isinstance(part, torch.jit.ScriptModule):
                    before = attach(part, self._before_part, pre=True, prepend=True)
                    self._part_handles.append(before)
        if isinstance(loop.loss_func, nn.Module):
            check_hookable(loop.loss_func, "watch")
            self._handles.append(attach(loop.loss_func, self._after_loss))
        _listen(self, True)

    def remove(self) -> None:
        """Remove what `attach` registered; can be called at any time, and twice."""
        _listen(self, False)
        remove_all([*self._handles, *self._part_handles])
        self._thread = 0  # no thread: a forward that is still running no longer counts
        self.loop = None

    def owns(self, opt: Optimizer) -> bool:
        """Return whether `opt` holds a parameter of the model."""
        own = {id(p) for p in chain(self.outer.parameters(), self.model.parameters())}
        return not own.isdisjoint(ids_of([opt]))

    # --- forwards

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():
            self.in_graph = True  # only written, so the graph has neither a guard nor a break
        elif (kind := call_kind(self._thread)) == "first" and not is_tracing():
            self._depth += 1
            if self._depth == 1:
                self._error = sys.exception()
                self._begin_forward(self.model, args, kwargs)
        elif module.training and kind == "other thread":
            self.elsewhere |= torch.is_grad_enabled() and not is_replica(module)

    def _before_part(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():
            self.in_graph = True
        elif self._depth or not torch.is_grad_enabled() or is_tracing():
            return
        elif call_kind(self._thread) == "first":
            # within a batch, only the part that began it begins the next one
            if not part.training:
                self.loop.begin_eval_part((args, kwargs))
            elif part is self._first_part or not self.loop.in_batch:
                self._first_part = part
                self._begin_forward(part, args, kwargs)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._in_closure:
            self._steps.clear()  # a step that is still listed has raised, and had no post-hook
        with_grad = torch.is_grad_enabled()
        if module is self.model and module.training and with_grad and not self.root_ran:
            self.root_ran = True
            remove_all(self._part_handles)
        self.loop.begin_forward(module.training, with_grad, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or not self._depth or get_ident() != self._thread:
            return
        self._depth -= 1
        if not self._depth:
            failed = sys.exception() is not self._error  # a new exception: the forward raised it
            shared = kwargs.get(_ITEMS_OF_STEP) is not None
            self.loop.end_forward(output, failed, shared)

    def _after_loss(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or call_kind(self._thread) != "first" or is_tracing():
            return
        if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
            self.loop.end_loss(module, args, output)

    # --- steps

    def before_step(self, opt: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin a step of any optimizer.

        If the step has a closure, return the step's arguments with the closure wrapped.
        """
        if is_compiling() or (get_ident() != self._thread and graph_task() == -1):
            return None  # other threads do not count, except autograd's: steps made in the backward
        loop = self.loop  # read once: another thread may end it now
        if loop is None or not (opt in loop.opts or self.owns(opt)):
            return None
        if getattr(opt, "found_inf", None) is not None and skips_step(opt):
            return None
        self._steps.append(opt)
        if len(self._steps) > 1:  # called by another optimizer's step, or by super().step()
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # a user's own optimizer may take a number or the model in this place
        if not callable(closure) or isinstance(closure, nn.Module):
            return loop.begin_step(opt)
        loop.begin_step(opt, closure=True)
        closure = self._reporting(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _reporting(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `closure`, wrapped: after its first call the update begins, which has no hook."""
        first = True

        @wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            self._in_closure = True
            try:
                result = closure(*args, **kwargs)
            finally:
                self._in_closure = False
            if first and self.loop is not None:
                self.loop.begin_update()
            first = False
            return result

        return call

    def after_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        """End a step of any optimizer."""
        if not self._steps or self._steps[-1] is not opt:
            return  # `before_step` ignored this step
        self._steps.pop()
        if not self._steps:
            self._depth = 0  # Ctrl-C in a forward leaves a wrong depth
            self.loop.end_step(opt)


# --- global step hooks, which see every optimizer, also one that is made later
#
# PyTorch iterates over its global hooks while they run: adding or removing one breaks a step in
# another thread. So all watched loops share one pair, from the first begin to the last end.

_listening: tuple[LoopHooks, ...] = ()  # replaced, never changed: another thread may iterate
_handles: list[RemovableHandle] = []
_lock = Lock()


def _listen(hooks: LoopHooks, on: bool) -> None:
    """Begin to report optimizer steps to `hooks`, or end it."""
    global _listening
    with _lock:
        others = tuple(each for each in _listening if each is not hooks)
        _listening = (*others, hooks) if on else others
        if not _listening:
            remove_all(_handles)
            _handles.clear()
        elif not _handles:
            register: Any = global_hooks.register_optimizer_step_pre_hook
            _handles.append(register(_before_step))
            register = global_hooks.register_optimizer_step_post_hook
            _handles.append(register(_after_step))


def _before_step(opt: Optimizer, args: Any, kwargs: Any) -> Any:
    changed = None
    for hooks in _listening:
        if (result := hooks.before_step(opt, args, kwargs)) is not None:
            changed = args, kwargs = result
    return changed


def _after_step(opt: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in _listening:
        hooks.after_step(opt, args, kwargs)
