"""`watch`: callbacks around any training loop, with nothing to subclass and nothing to write.

    with watch(model, opt, ActivationStats(every=10), ParamStats()) as w:
        ...                                         # your loop, or any library's

Builds on `LoopHooks` (which see batches and steps) and `ExternalLoop` (what callbacks see).
The callbacks are those of the Learner, and get the same events, except those between forward and
step (loss, backward), which cannot be seen. One public class with its documentation, and therefore
one file of more than 300 lines.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.callbacks.callback import Callback
from hookkit.callbacks.logging import LogTo
from hookkit.callbacks.readout import gather, is_recorder, run_of
from hookkit.checks import check_flag
from hookkit.errors import HookError, HookkitWarning, NeverFiredWarning, nearest
from hookkit.events import CancelFitException
from hookkit.hooks.compiling import forget_graphs
from hookkit.interrupts import Guard, interruptible, uninterrupted
from hookkit.live import ShowHealth
from hookkit.modules import unwrap
from hookkit.records import Exports, Floats, Run, Views, as_run
from hookkit.stats import ActivationStats, ParamStats
from hookkit.stats.named import Named
from hookkit.watching import checks
from hookkit.watching.external_loop import ExternalLoop
from hookkit.watching.loop_hooks import LoopHooks
from hookkit.watching.losses import one_number


def watch(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    opt: Any = None,
    *callbacks: Any,
    loss_func: Callable[..., Any] | None = None,
    each_forward: bool = False,
    show: bool = False,
    resume: Any = None,
) -> Watcher:
    """Runs `callbacks` around any training loop, inside the `with`.

    A batch is a forward of the model in training mode with gradients on; a step is a step of
    the optimizer, and callbacks read gradients right after it. So gradient accumulation, AMP
    steps that are skipped, closures and validation in between are all recorded right, in a plain
    loop and in any library that steps a torch optimizer. At the end of the `with` all hooks are
    removed, also after an error or Ctrl-C; what was recorded stays. Entering again appends.

    Args:
        model: the model you train, wrapped (compile, DDP, FSDP, accelerate) or not; several in
            a list or dict (a GAN) count as one. Compile it before, and pass the compiled one.
        opt: its torch optimizer, in any wrapper, or a list of them. None: every torch optimizer
            that steps a parameter of the model, also one made later. (fastai's own optimizers
            run no step hooks: use its OptimWrapper, or hookkit's Learner.)
        callbacks: instances or classes: ActivationStats, ParamStats, your own.
        loss_func: your loss function. If it is a module, its scalar outputs are recorded as the
            loss; not needed if the model returns its loss, or with `w.loss(loss)`. A plain
            function cannot be hooked: it only says what kind of loss it is.
        each_forward: each training forward is a step: for loops without a torch optimizer.
            Gradients are then read when the next forward begins.
        show: redraws the run every few seconds and prints findings as they become clear: adds
            `ShowHealth()`, and where no callback records,
            `ActivationStats(every=10, units=True)` and `ParamStats(every=10)`.
        resume: the Run that this training goes on from, or the file that `w.save(path)` wrote of
            it. Steps and epochs are counted on, from within an epoch if it was written there, and
            what is read of the Watcher is both as one run; the recorders themselves hold
            only the new part. Weights are yours to load.

    Returns:
        The `Watcher`, for the `with`; it reads what was recorded afterwards too.

    Raises:
        ArgumentError: an argument is of a kind that cannot work.
        OptionError: `resume` is no such file.
        HookError: the model is scripted.

    Cost: four hooks a step, about 30 µs on a CPU (`benchmarks/watching.py`).

    >>> import torch
    >>> net = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> steps = Callback(after_step=lambda self: print("step", self.n_steps, self.opt is sgd))
    >>> with watch(net, sgd, steps) as w:
    ...     for _ in range(2):
    ...         loss = net(torch.ones(4, 2)).pow(2).mean()
    ...         loss.backward()
    ...         sgd.step()
    step 1 True
    step 2 True
    >>> w
    Watcher(Linear: 2 steps in 1 epoch; callback; stopped)
    """
    if isinstance(opt, Callback) or (isinstance(opt, type) and issubclass(opt, Callback)):
        opt, callbacks = None, (opt, *callbacks)  # watch(model, ActivationStats())
    found, opts = checks.one_model(model), checks.optimizers(opt)
    checks.check_rest(callbacks, loss_func, each_forward)
    if check_flag("watch", "show", show):
        callbacks = _shown(callbacks)
    earlier = Run.load(resume) if isinstance(resume, (str, Path)) else resume
    earlier = None if earlier is None else as_run(earlier)
    w = Watcher(found, opts, callbacks, loss_func, each_forward)
    if earlier is not None:
        w.loop.resume(earlier)
    return w


def _shown(callbacks: tuple[Any, ...]) -> tuple[Any, ...]:
    """`callbacks`, with a ShowHealth, and with recorders if there are none that it can show."""
    kinds = [cb if isinstance(cb, type) else type(cb) for cb in callbacks]
    if not any(is_recorder(kind) for kind in kinds):
        callbacks = (*callbacks, ActivationStats(every=10, units=True), ParamStats(every=10))
    return (
        callbacks if any(issubclass(k, ShowHealth) for k in kinds) else (*callbacks, ShowHealth())
    )


class Watcher(Exports, Views, Named):
    """What `watch` returns: follows a loop inside the `with`, and reads what was recorded.

    Callbacks are found by name: `w.activation_stats`; of several of one name the others are
    `w.activation_stats_2`, … in the order they were given. `start()` and `stop()` do the same as
    the `with`, for places without one. A copy or a pickle holds what was recorded, and reads the
    same; model, optimizer and hooks stay with the original.

    Args:
        model, opts, callbacks, loss_func, each_forward: as for `watch`, checked and unwrapped.

    Attributes:
        model: as given.
        loop: the `ExternalLoop` that callbacks have as `self.learn`: epoch, train_iter, n_steps, …
    """

    def __init__(
        self,
        model: nn.Module,
        opts: list[Optimizer],
        callbacks: Iterable[Any],
        loss_func: Callable[..., Any] | None = None,
        each_forward: bool = False,
    ) -> None:
        self.model, self.loss_func = model, loss_func
        self.loop = ExternalLoop(unwrap(model), opts, each_forward)
        self.loop.loss_func = loss_func
        self.loop.add_cbs(callbacks)
        self.hooks = LoopHooks(model, opts, self.loop)
        self._warned_of_loss = False
        self._guard, self._with_grad = Guard(), True
        for opt in opts:
            if not self.hooks.owns(opt):
                checks.warn_foreign(opt, self.loop.model)

    # --- begin and end

    def start(self) -> Watcher:
        """Begins: calls the callbacks' `before_fit`, then registers the hooks.

        Raises:
            HookError: it is running, or one of its callbacks records another run.
        """
        self._check_whole()
        if self.loop.fitting:
            raise HookError(
                "watch was started while it is running. Stop it first, or use a second watch(…) "
                "with other callbacks."
            )
        self.loop._check_free(self.cbs)
        self._with_grad = torch.is_grad_enabled()
        try:
            self._guard.begin()
            self.loop.begin()
            self.hooks.attach()
            if self.loop.cbs:
                forget_graphs(self.model)  # one that has run would ignore the hooks
        except BaseException:
            self._take_down()
            raise
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Ends it: closes what is open, removes all hooks. Does nothing if it is not running.

        Args:
            error: the exception that ended the loop; the callbacks then get no `after_` events.
        """
        if not self.loop.fitting:
            return
        try:
            interruptible(self._finish)(error)
        finally:
            self._take_down()
        if error is None:
            self._warn_of_gaps()

    def _finish(self, error: BaseException | None) -> None:
        if isinstance(error, CancelFitException):
            self.loop("after_cancel_fit")
        if error is None or isinstance(error, CancelFitException):
            self.loop.finish()

    @uninterrupted
    def _take_down(self) -> None:
        if isinstance(sys.exception(), KeyboardInterrupt):  # it leaves torch's own `no_grad` on
            torch.set_grad_enabled(self._with_grad)
        try:
            self.hooks.detach()
        finally:
            self.loop.end()
            self._guard.end()

    def __enter__(self) -> Watcher:
        return self.start()

    @uninterrupted
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """A callback's CancelFitException ends the block, and is not raised."""
        self.stop(error)
        return isinstance(error, CancelFitException)

    def follow(self, opt: Any) -> None:
        """Takes another optimizer, from the next start on: libraries make one for each training."""
        self._check_whole()
        opts = checks.optimizers(opt)
        self.hooks.opts, self.loop.opts = opts, list(opts)

    # --- what the user may report

    def epoch(self, **values: Any) -> None:
        """Marks an epoch: batches from now on belong to the next one. Optional.

        It can be called at the top or the bottom of the loop over epochs: an epoch without batches
        is not counted.

        Args:
            values: of the epoch that ends, such as `valid_loss=…`, `accuracy=…`: numbers or
                tensors, read by the host when the run is read.

        Raises:
            ArgumentError: one of them is `epoch` or `step`, which watch counts itself.
        """
        checks.check_reported(values)
        self.loop.mark_epoch()
        self.note(**values)

    def note(self, **values: Any) -> None:
        """Adds values to the last epoch as `epoch` does, with its errors, without ending it."""
        checks.check_reported(values)
        if self.loop.spans:
            now = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
            self.loop.spans[-1].update(now)

    def batch(self) -> None:
        """Marks that a training batch begins. Only for forwards that cannot be seen.

        Such as those of a train step compiled as a whole, where model hooks are part of the graph.
        """
        if self.loop.fitting:
            self.loop.mark_batch()

    def loss(self, loss: Tensor | float) -> None:
        """Reports the loss of this batch, before or after its step. Optional; kept on its device.

        From the tensor's graph `diagnose` knows which of PyTorch's losses it is. Under gradient
        accumulation report each batch's own loss, undivided: the step's is their mean.

        Raises:
            ArgumentError: it is not one number.
        """
        value = one_number(loss)
        self._warned_of_loss = True
        if self.loop.fitting:
            self.loop.report_loss(value)

    # --- reading

    @property
    def losses(self) -> Floats:
        """(n_steps,) float64: the training loss by optimizer step, NaN where it is not known."""
        losses = self.loop.losses.by_step(self.loop.n_steps)
        own = np.ones(len(losses), np.bool_)
        for first, end in self.loop.elsewhere:
            own[first:end] = False
        before = self.loop.earlier
        if before is None:
            return losses[own]
        past = np.full(before.n_steps, np.nan)
        if before.losses is not None:
            past[: len(before.losses)] = before.losses
        return np.concatenate([past, losses[own]])

    def gather(self) -> Watcher:
        """Merges what the ranks of a process group recorded; the Watcher.

        Every rank has to call. Until the next step every rank then reads the whole: losses are
        means over ranks, statistics those of all values. Without it each reads its own, and says
        so. Alone it does nothing.

        Raises:
            HookError: the ranks recorded different steps or layouts; or one of them does not come.
        """
        gather(self.loop)
        return self

    def run_record(self) -> Run:
        """Everything recorded so far, as plain values: what pictures, diagnosis and report read.

        Steps are counted as the recorders count them: those of a callback that has recorded in
        another `watch` before come first.

        Sync: one per recorder.
        """
        run, cbs = run_of(self.loop), self.loop._named().items()
        logs = {name: cb.state_dict() for name, cb in cbs if isinstance(cb, LogTo)}
        return replace(run, info={**run.info, "LogTo": logs}) if any(logs.values()) else run

    @property
    def info(self) -> dict[str, Any]:
        """Facts to add to the run, such as `w.info["n_classes"] = 10`."""
        return self.loop.info

    @info.setter
    def info(self, facts: dict[str, Any]) -> None:
        self.loop.info = facts

    @property
    def opt(self) -> Optimizer | None:
        """The first optimizer; None while none was given and none has stepped."""
        return self.loop.opt

    @property
    def n_steps(self) -> int:
        """Optimizer steps so far, in all its runs and the one that it resumes."""
        before = self.loop.earlier
        return self.loop.n_own_steps + (0 if before is None else before.n_steps)

    @property
    def cbs(self) -> Any:
        """The callbacks, as they were given."""
        return self.loop.cbs

    if not TYPE_CHECKING:  # so that a misspelt name is an error there: see `Named`

        def __getattr__(self, name: str) -> Any:
            loop = vars(self).get("loop")
            if loop is None or name.startswith("_"):
                raise AttributeError(f"Watcher has no attribute {name!r}", name=name, obj=self)
            if (cb := loop._cb_named(name)) is not None:
                return cb
            known = list(loop._named())
            near = nearest(name, [*known, *(n for n in dir(type(self)) if n[0] != "_")]) or known
            raise AttributeError(
                f"Neither Watcher nor its callbacks have {name!r}. "
                f"Nearest: {', '.join(near) or 'none: it has no callbacks'}.",
                name=name,
                obj=self,
            )

    def __dir__(self) -> list[str]:
        loop = vars(self).get("loop")
        return [*super().__dir__(), *(loop._named() if loop is not None else ())]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what was recorded, not what runs."""
        return {"loop": copy.copy(self.loop)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, model=None, loss_func=None, hooks=None)

    def _check_whole(self) -> None:
        if self.model is None:
            raise HookError(
                "This Watcher was copied or loaded: it has the records, and neither model nor "
                "optimizer. Make a new one around them: watch(model, opt, *w.cbs)."
            )

    def __repr__(self) -> str:
        loop = self.loop
        names = ", ".join(loop._named()) or "no callbacks"
        state = "running" if loop.fitting else "stopped" if loop.spans else "not started"
        known = {span["epoch"] for span in loop.spans}
        known |= set(range(0 if loop.earlier is None else loop.earlier.n_epochs))
        steps, epochs = _count(self.n_steps, "step"), _count(len(known), "epoch")
        kept = vars(loop).get("kept_info")
        model = type(loop.model).__name__ if kept is None else kept["model"]
        return f"Watcher({model}: {steps} in {epochs}; {names}; {state})"

    # --- warnings

    def _warn_of_gaps(self) -> None:
        """Warns, once each, of batches and of losses that were not recorded."""
        loop = self.loop
        if not loop.warned and (why := checks.why_unrecorded(loop)):
            loop.warned = True
            warnings.warn(why, NeverFiredWarning, stacklevel=3)
        if self._warned_of_loss or not loop.n_steps:
            return
        if why := checks.why_no_loss(self.loss_func, len(loop.losses), self.hooks.loss_twice):
            self._warned_of_loss = True
            warnings.warn(why, HookkitWarning, stacklevel=3)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
