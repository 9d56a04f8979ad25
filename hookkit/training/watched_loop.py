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
    - PAUSED: within a training batch, a forward runs that does not train.
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

    Each row has the state, what comes, the next state, and the events that are sent, without those
    of epochs. Only outermost forwards count, so none begins in EVALUATING or PAUSED.

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

    Three things are not in the table:

    - PAUSED returns to MARKED if it came from MARKED.
    - If an optimizer steps again in STEPPED or CANCELLED, the batch is closed first, and the step
      is then one in IDLE.
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


# Names of a module, and no property: in 3.11 looking up a member of an Enum calls Python.
IDLE, VALIDATION, EVALUATING, MARKED, BATCH, PAUSED, STEPPED, CANCELLED = State
TRAINING = BATCH, STEPPED, MARKED, CANCELLED


class WatchedLoop(Loop):
    """The user's training loop, as callbacks see it in `self.learn`.

    Attributes:
        model: the user's own module, without compile and distribution wrappers.
        outer_model: the module with them, as it was given.
        opts, opt: the optimizers, and the first; if none was given, those that were seen stepping.
        state: what is open, a `State`.
        epoch, train_iter, n_steps: 0-based, as marked; training batches; optimizer steps.
        loss: of the current batch, detached, if it is known by now; else None.
        epochs: as in `Loop`; an epoch with several validations has one for each.
        pred: the live output of the model during `after_pred`, else None.
        n_cancelled_steps: steps that a callback has cancelled (CancelStepException).
        loss_twice: the loss function was called again within a batch.
        warned: a warning has said what was not recorded.
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
        # backward() is called on another tensor than the loss in the model's output
        self.other_loss = False
        self._noted = 0  # the number of steps when values were last reported
        self._reset()

    def _reset(self) -> None:
        self.state, self.in_closure, self.in_epoch = IDLE, False, False
        self.train_iter, self.pred = 0, None
        self.loss: Tensor | None = None
        self._computed: Tensor | None = None  # the last loss that the loss function gave
        # the state before PAUSED, and the callbacks to switch on again
        self._resume: tuple[State, list[Any]] = IDLE, []
        # since the last training batch the model has run in eval mode with gradients
        self._in_eval = False
        self._stepped: list[Any] = []  # the optimizers that have stepped in the step under way
        self._last: list[Any] = []  # the optimizers of the step before

    @property
    def opt(self) -> Any:
        """Return the first optimizer, or None while none is known."""
        return self.opts[0] if self.opts else None

    @property
    def stepped_opts(self) -> list[Any]:
        """Return the optimizers that made the last step; all, where steps are not seen."""
        return self._stepped or self._last or self.opts

    @property
    def training(self) -> bool:
        """Return whether a training batch is open, and no other forward runs within it."""
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
        """Begin a run: `before_fit`, then the hooks."""
        self._reset()
        self.fitting = True
        self("before_fit")
        self.hooks.attach(self)

    def end(self) -> None:
        """Remove all hooks, and let every callback clean up, whatever has happened."""
        self.hooks.remove()
        self.fitting, self.state = False, IDLE
        self.step_scaler = None
        self._clean_up()

    def end_epoch(self) -> None:
        """End the epoch, if it had a batch: those to come belong to a new one."""
        self._close()
        self._end_validation()
        if self.in_epoch:
            self("after_train", "after_epoch")
            self.epoch, self.in_epoch = self.epoch + 1, False

    def note(self, values: dict[str, Any]) -> None:
        """Add values to the last epoch; a later value of the same name begins another row of it.

        Before the first batch they get a row of their own.
        """
        again = bool(self.epochs) and not values.keys().isdisjoint(self.epochs[-1])
        if values and not self.epochs:
            self.epochs.append({"epoch": self.epoch, "step": self.n_steps})
        elif again and self._noted < self.n_steps:
            self.epochs.append({"epoch": self.epochs[-1]["epoch"], "step": self._noted})
        if values:
            self.epochs[-1].update(values)
            self._noted = self.n_steps

    # --- forwards

    def begin_forward(self, trains: bool, with_grad: bool, inputs: Any) -> None:
        """Begin a batch, of training or validation, or a rollout; nothing of the model has run.

        Args:
            trains: the module is in training mode.
            with_grad: gradients are on.
            inputs: what it is given, any structure.
        """
        if self.state is MARKED and with_grad:  # it trains, whatever the mode is
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
        """Note that the model, or a part of it, runs in eval mode with gradients."""
        if self.state not in (MARKED, BATCH, PAUSED):
            self._in_eval = True
            self.probes.see_batch(inputs, training=False)

    def end_forward(self, output: Any, failed: bool = False, shared: bool = False) -> None:
        """End a forward: read the loss in its output, or cancel the batch if it has raised.

        Args:
            output: what the model has returned, the live object.
            failed: it has raised.
            shared: the step's loss is the sum of its batches' losses, not their mean.
        """
        if self.state is PAUSED:
            self._end_rollout()
        elif self.state in (IDLE, VALIDATION):
            pass  # its batch was closed within it, or could not begin
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
                    # of a loss function that is a module, its own input is read
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
        """Begin a batch because the user says so; the forward that follows belongs to it."""
        self._close()
        self._begin_batch()
        self.state = MARKED

    # --- steps

    def begin_step(self, opt: Any, closure: bool = False) -> None:
        """Begin a step: `opt.step` was called; with a closure its forwards are still to come."""
        if self.state is PAUSED:  # Ctrl-C has ended a rollout
            self._end_rollout()
        known = opt in self.opts
        joins = bool(self._last) and not (self.state in TRAINING or closure or known)
        if not known:  # it replaces those whose parameters it holds, with others of its step
            step = [opt, *(self._last if joins else self._stepped)]
            held = ids_of(step)
            self.opts = [o for o in self.opts if o in step or not ids_of([o]) <= held] + [opt]
        if not self.probes.done:
            self.probes.see_step(opt)
        if opt in self._stepped and graph_task() == -1:
            self._close()  # it steps again, and no forward was seen in between
        self.in_closure = closure
        if self.cbs:
            self.step_scaler = stepping_scaler()
        for cb in self.cbs if closure and not self._stepped else ():
            if cb.run:
                cb._before_closure()
        if joins:
            self._last.append(opt)  # one more of the step before
        elif not closure:
            self.begin_update()

    def begin_update(self) -> None:
        """Send `before_step`: gradients are there, and weights change from here on."""
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
                    p.grad = None  # then an optimizer changes nothing
            self.state, self.n_cancelled_steps = CANCELLED, self.n_cancelled_steps + 1
            self("after_cancel_step")

    def end_step(self, opt: Any) -> None:
        """End a step of `opt`, which has changed the weights; their `.grad` is still there."""
        self.in_closure = False
        self.keep_rates(opt)
        if self.state not in TRAINING:
            return  # it has joined the step before, which is over
        if opt not in self._stepped:
            self._stepped.append(opt)
        if self.state is not CANCELLED:
            self.state = STEPPED
        if len(self._stepped) >= len(self.opts) and graph_task() == -1:
            self._close()
        elif self.state is STEPPED:
            # recorders read its gradients now: they may be freed before the step is over
            owned = [p for group in opt.param_groups for p in group["params"]]
            for cb in self.cbs:
                if cb.run:
                    cb._read_gradients(owned)

    # --- what is open

    def _begin_batch(self) -> None:
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
        """End the rollout, the step and the batch that are open, if any."""
        if self.state is PAUSED:
            self._end_rollout()
        if self.probes.other_loss and not self.other_loss:
            self.other_loss = True
            self.losses.drop_returned()
        if self.state in (STEPPED, CANCELLED):
            cancelled, self.state = self.state is CANCELLED, BATCH
            self._last, self._stepped = self._stepped or self._last, []
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
        """End the batch; until the next one nothing is recorded."""
        trained = self.state is not EVALUATING
        self.train_iter += trained and event == "after_batch"
        try:
            if event in self.heard:
                self(event)
        finally:
            self.state = IDLE if trained else VALIDATION
            for cb in self._hooking:
                cb._switch.on = False

    def _end_rollout(self) -> None:
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
        """Take the loss of the current batch, or of the step just made; see `LossLog.put`."""
        if not self.probes.done:
            self.probes.see_loss(loss, self.model.parameters(), source != "reported")
        known = loss.detach().clone()  # `loss /= n_accumulate` may follow
        late = self.state in (VALIDATION, EVALUATING)
        self.losses.put(known, source, share=share, late=late)
        if self.state in TRAINING:
            self.loss = known

    def end_loss(self, loss_func: nn.Module, args: Any, loss: Tensor) -> None:
        """Take the loss that the loss function has computed of `args`."""
        if self.state not in TRAINING:
            return  # no training batch is open: it is the loss of a validation
        self.loss_twice |= self.loss is not None and self.loss is self._computed
        if args and not self.probes.done:
            self.probes.see_scores(loss_func, args[0])
        self.report_loss(one_number(loss))
        self._computed = self.loss

    def warn_of_other_loss(self) -> None:
        """Warn if backward() is called on another loss than the model's, and none is reported.

        Do not warn if the model's loss was only a guess: it is dropped silently.
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


_IN_STEP = "num_items_in_batch"
"""A model that transformers' Trainer gives this divides its loss by the items of the whole step."""


class LoopHooks:
    """Tells a `WatchedLoop` of each forward of its model and of each step of its optimizers.

    Two pairs of hooks see everything: forward hooks on the model and on each of its wrappers (the
    user may call any of them), and the step hooks of optimizers. One more, on a loss function that
    is a module, sees the loss. Counted are outermost calls of the thread that entered `watch`; no
    recomputation by activation checkpointing, and no trace.

    Where the model's own forward never runs (Lightning's training_step, a dict of two nets), a
    training call of any of its parts begins a batch, and the next call of that same part another.

    Attributes:
        loop: the `WatchedLoop`, from `attach` to `remove`, otherwise None. The loop references
            this object too, and such a cycle keeps the model until the garbage collector runs.
        root_ran: a training forward of the model itself was seen.
        in_graph: the model ran inside a graph that `torch.compile` made of something around it.
        elsewhere: a training forward was seen in another thread.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loop: Any = None
        self.outer, self.model = model, unwrap(model)
        self.root_ran = self.in_graph = self.elsewhere = False
        self._first_part: nn.Module | None = None  # the part that began the batch
        self._begin()

    def _begin(self) -> None:
        self._thread = get_ident()
        self._depth = 0  # of forwards under way
        self._error: BaseException | None = None  # what was handled as the outermost one began
        self._steps: list[Optimizer] = []  # under way: a step may call another's
        self._evaluates = False  # the closure of a step
        self._handles, self._on_parts = list[RemovableHandle](), list[RemovableHandle]()

    def attach(self, loop: WatchedLoop) -> None:
        """Register the hooks; `remove` removes all of them, also if this was cut short."""
        self._begin()
        self.loop = loop
        for module in wrappers(self.outer):
            check_hookable(module, "watch")
            # before the user's hooks, which belong to the batch; after a forward that raised, too
            self._handles.append(attach(module, self._before, pre=True, prepend=True))
            self._handles.append(attach(module, self._after, always_call=True))
        if not self.root_ran:
            for part in self.model.modules():  # a ScriptModule runs no Python hooks
                if part is not self.model and not isinstance(part, torch.jit.ScriptModule):
                    before = attach(part, self._before_part, pre=True, prepend=True)
                    self._on_parts.append(before)
        if isinstance(loop.loss_func, nn.Module):
            check_hookable(loop.loss_func, "watch")
            self._handles.append(attach(loop.loss_func, self._after_loss))
        _listen(self, True)

    def remove(self) -> None:
        """Remove what `attach` registered; can be called at any time, and twice."""
        _listen(self, False)
        remove_all([*self._handles, *self._on_parts])
        self._thread = 0  # what is under way no longer counts
        self.loop = None

    def owns(self, opt: Optimizer) -> bool:
        """Return whether `opt` holds a parameter of the model."""
        own = {id(p) for p in chain(self.outer.parameters(), self.model.parameters())}
        return not own.isdisjoint(ids_of([opt]))

    # --- forwards

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():
            self.in_graph = True  # written only: no guard, no graph break
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
            # other parts that are called within a batch do not begin a new one
            if not part.training:
                self.loop.begin_eval_part((args, kwargs))
            elif part is self._first_part or not self.loop.in_batch:
                self._first_part = part
                self._begin_forward(part, args, kwargs)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._evaluates:
            self._steps.clear()  # a step that is under way has raised
        with_grad = torch.is_grad_enabled()
        if module is self.model and module.training and with_grad and not self.root_ran:
            self.root_ran = True
            remove_all(self._on_parts)
        self.loop.begin_forward(module.training, with_grad, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or not self._depth or get_ident() != self._thread:
            return
        self._depth -= 1
        if not self._depth:
            failed, shared = sys.exception() is not self._error, kwargs.get(_IN_STEP) is not None
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
            return None  # in a backward pass a thread of autograd's may make a step that counts
        loop = self.loop  # another thread may just have ended it
        if loop is None or not (opt in loop.opts or self.owns(opt)):
            return None
        if getattr(opt, "found_inf", None) is not None and skips_step(opt):
            return None
        self._steps.append(opt)
        if len(self._steps) > 1:  # within another's, or super().step()
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # a user's own optimizer may take a number there, or the model
        if not callable(closure) or isinstance(closure, nn.Module):
            return loop.begin_step(opt)
        loop.begin_step(opt, closure=True)
        closure = self._reported(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _reported(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `closure`, whose first evaluation is reported: PyTorch has no hook for it."""
        first = True

        @wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            self._evaluates = True
            try:
                result = closure(*args, **kwargs)
            finally:
                self._evaluates = False
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
            self._depth = 0  # a forward that Ctrl-C has cut short ends here
            self.loop.end_step(opt)


# --- hooks on the steps of any optimizer: one may be made later, or be inside of another's step
#
# PyTorch iterates over its global hooks while they run. Another thread that trains, with or without
# watch, would fail if a hook came or went in the meantime. So there is one for all watched loops,
# from the first that begins to the last that ends.

_listening: tuple[LoopHooks, ...] = ()  # replaced, never changed: another thread may iterate
_handles: list[RemovableHandle] = []
_lock = Lock()


def _listen(hooks: LoopHooks, on: bool) -> None:
    """Tell `hooks` of each step of an optimizer from now on, or no more."""
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
