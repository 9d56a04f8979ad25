"""`watch`: run callbacks around any training loop, without changing the loop.

    with watch(model, opt, ActivationStats(every=10), ParamStats()) as w:
        ...                                         # your loop, or any library's

Builds on `WatchedLoop`, which sends the events. The Learner takes the same callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hookkit._core.checks import check_callable, check_flag
from hookkit._core.messages import warn
from hookkit.callbacks.callback import Callback, own_method
from hookkit.callbacks.events import CancelFitException
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.hooks.eager import forget_graphs
from hookkit.recorders import ActivationStats, ParamStats
from hookkit.recorders.step_recorder import StepRecorder
from hookkit.records import Floats, Reportable, Run
from hookkit.training import watch_checks as checks
from hookkit.training.live import ShowHealth
from hookkit.training.loop import instances, no_attribute
from hookkit.training.watch_checks import NEVER_SENT, one_number
from hookkit.training.watched_loop import WatchedLoop


def watch(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    opt: Any = None,
    *callbacks: Any,
    loss_func: Callable[..., Any] | None = None,
    show: bool = False,
) -> Watcher:
    """Return a context manager that runs `callbacks` around any training loop.

    A batch begins with a forward of the model in training mode with gradients on. A step is
    everything between two optimizer steps: it is over when every optimizer has stepped, or, once at
    least one has, when the next forward begins. So gradient accumulation, skipped AMP steps,
    closures, several optimizers and validation between batches are recorded correctly, in any loop
    that steps a torch optimizer. The end of the `with` removes all hooks, also after an error or
    Ctrl-C. Records stay, and entering again appends to them. `docs/how-to/callbacks.md` has a table
    of the events and attributes that callbacks have here and in the Learner.

    Args:
        model: the model you train, wrapped (compile, DDP, FSDP, accelerate) or not; several in
            a list or dict (a GAN) count as one. Compile it before, and pass the compiled one.
        opt: its torch optimizer, in any wrapper, or a list of them. Any other optimizer that steps
            a parameter of the model is found at its first step.
        callbacks: instances or classes: ActivationStats, ParamStats, your own.
        loss_func: your loss function. If it is a module, its scalar outputs are recorded as the
            loss; not needed if the model returns its loss, or with `w.loss(loss)`. A plain
            function cannot be hooked: it only tells the diagnosis which loss it is.
        show: adds `ShowHealth()`, which redraws the run every few seconds and prints findings. If
            there is no recorder among `callbacks`, adds ActivationStats and ParamStats too.

    Returns:
        The `Watcher`, for the `with`. It reads the records, also after the `with`.

    Raises:
        ArgumentError: an argument is of a kind that cannot work.
        HookError: the model is scripted.

    Cost: four hooks a step, about 30 µs on a CPU (`benchmarks/watching.py`).

    >>> import torch
    >>> net = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> steps = Callback(after_step=lambda self: print("step", self.n_steps, self.opt is sgd))
    >>> with watch(net, sgd, steps) as w:
    ...     for _ in range(2):
    ...         net(torch.ones(4, 2)).pow(2).mean().backward()
    ...         sgd.step()
    step 1 True
    step 2 True
    >>> w
    Watcher(Linear: 2 steps in 1 epoch; callback; stopped)
    """
    if isinstance(opt, Callback) or (isinstance(opt, type) and issubclass(opt, Callback)):
        opt, callbacks = None, (opt, *callbacks)  # watch(model, ActivationStats())
    model, opts = checks.one_model(model), checks.optimizers(opt)
    cure = "the loss function that you call, such as nn.CrossEntropyLoss()"
    check_callable("watch", "loss_func", loss_func, cure)
    cbs = instances(callbacks)
    if check_flag("watch", "show", show):
        if not any(isinstance(cb, StepRecorder) for cb in cbs):
            cbs += [ActivationStats(every=10, units=True), ParamStats(every=10)]
        if not any(isinstance(cb, ShowHealth) for cb in cbs):
            cbs.append(ShowHealth())
    loop = WatchedLoop(model, opts, loss_func).add_cbs(cbs)
    for cb in cbs:
        for event in NEVER_SENT:
            if own_method(cb, event) is not None:
                warn(
                    f"{cb!r}.{event} is never called in watch, which sees forwards and steps, and "
                    f"not what is between them: {NEVER_SENT[event]}; or train with hookkit's "
                    f"Learner."
                )
    name = type(loop.model).__name__
    for one in opts:
        if not loop.hooks.owns(one):
            warn(
                f"watch: {type(one).__name__} holds none of the parameters of {name}: its steps "
                f"are counted, but they change something else. Give the optimizer made from "
                f"{name}'s parameters(), or none."
            )
    return Watcher(model, loop)


class Watcher(Reportable):
    """Follows a loop inside the `with`, and reads the records; `watch` returns it.

    Callbacks are found by name: `w.activation_stats`. `start()` and `stop()` do the same as the
    `with`. `w.run_record()` returns the records as values, to keep, copy or pickle.

    Attributes:
        model: the model that was given.
        loop: the `WatchedLoop` that callbacks have as `self.learn`: epoch, train_iter, n_steps, …
        info: facts to add to the run, such as `w.info["n_classes"] = 10`.
    """

    def __init__(self, model: nn.Module, loop: WatchedLoop) -> None:
        self.model, self.loop, self.info = model, loop, loop.info
        self._loss_reported = self._entered = False

    # --- begin and end

    def start(self) -> Watcher:
        """Begin: call the callbacks' `before_fit`, then register the hooks.

        Raises:
            HookError: it is already running, or one of its callbacks records another run.
        """
        if self.loop.fitting:
            raise HookError("watch was started while it is running. Stop it, or make a second one.")
        self.loop._claim()
        self._entered = True
        try:
            self.loop.begin()
            if self.loop.cbs:
                forget_graphs()  # a compiled graph that has already run ignores new hooks
        except BaseException:
            self.loop.end()
            raise
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """End the batch and the epoch, and remove all hooks; do nothing if it is not running.

        Args:
            error: the exception that ended the loop. Unless it is a CancelFitException, callbacks
                get no `after_` events.
        """
        if not self.loop.fitting:
            return
        try:
            if isinstance(error, CancelFitException):
                self.loop("after_cancel_fit")
            if error is None or isinstance(error, CancelFitException):
                self.loop.end_epoch()
                self.loop("after_fit")
        finally:
            self.loop.end()
        if error is None:
            self.loop.warn_of_other_loss()
        why = checks.why_unrecorded(self.loop, self._loss_reported)
        if why and error is None and not self.loop.warned:
            self.loop.warned = True
            warn(why, NeverFiredWarning)

    def __enter__(self) -> Watcher:
        return self.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """Stop; swallow a CancelFitException, with which a callback ends the loop."""
        self.stop(error)
        return isinstance(error, CancelFitException)

    # --- what the user may report

    def epoch(self, **values: Any) -> None:
        """End an epoch, at the top or the bottom of the loop over epochs. Optional.

        The next batch begins a new epoch; an epoch without batches is not counted. Before the first
        batch, values (of the untrained model) get a row of their own.

        Args:
            values: values of the epoch that ends, such as `valid_loss=…`, `accuracy=…`: numbers or
                tensors. A tensor is copied to the host when the run is read.

        Raises:
            ArgumentError: a value is not a number, or is called `epoch` or `step`.
        """
        checks.check_reported(values)
        if self.loop.fitting:
            self.loop.end_epoch()
        self.note(**values)

    def note(self, **values: Any) -> None:
        """Add values to the last epoch as `epoch` does, without ending it.

        If an epoch has several validations, each is a row of `run_record().valid`.
        """
        checks.check_reported(values)
        now = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
        self.loop.note(now)

    def batch(self) -> None:
        """Begin a training batch that the forward does not show.

        Examples are a train step that is compiled as a whole, and training in eval mode on purpose.
        """
        if self.loop.fitting:
            self.loop.mark_batch()

    def loss(self, loss: Tensor | float) -> None:
        """Report the loss of this batch, before or after its step. Optional; kept on its device.

        Give the tensor, not a float: the diagnosis reads its graph. With gradient accumulation
        report each batch's own loss, undivided: the step's loss is their mean. During a validation,
        it sets the loss of the last training batch, if that has none.

        Raises:
            ArgumentError: `loss` is not one number.
        """
        value, self._loss_reported = one_number(loss), True
        if self.loop.fitting:
            self.loop.report_loss(value)

    # --- reading

    def gather(self) -> Watcher:
        """Merge the records of all ranks, as `Learner.gather`; return the Watcher."""
        self._checked_loop.gather()
        return self

    def run_record(self) -> Run:
        """Return everything recorded so far, as plain values. Sync: one per recorder."""
        return self._checked_loop.run_record()

    @property
    def losses(self) -> Floats:
        """Return (n_steps,) float64, the training loss of each step, NaN if it is unknown."""
        loop = self._checked_loop
        return loop.losses.by_step(loop.n_steps)[loop.first_step :]

    @property
    def _checked_loop(self) -> WatchedLoop:
        """Return the loop; warn if it was never entered."""
        if not self._entered:
            self._entered = True
            warn(
                "this watch(…) was never entered, so nothing is recorded. Write `with watch(…) as "
                "w:` around the loop; or call w.start() before it, and w.stop() after it.",
                NeverFiredWarning,
            )
        return self.loop

    @property
    def opt(self) -> Any:
        """Return the first optimizer; None if none was given and none has stepped yet."""
        return self.loop.opt

    @property
    def n_steps(self) -> int:
        """Return how many optimizer steps were made, in all runs of this Watcher."""
        return self.loop.n_steps - self.loop.first_step

    @property
    def cbs(self) -> Any:
        """Return the callbacks, as they were given."""
        return self.loop.cbs

    def __getattr__(self, name: str) -> Any:
        cb = self.loop.cbs_by_name.get(name) if "loop" in vars(self) else None
        if cb is not None:
            return cb
        raise no_attribute(self, name, "Neither the Watcher nor its callbacks")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(self.loop.cbs_by_name if "loop" in vars(self) else ())]

    def __reduce__(self) -> Any:
        raise HookError(
            "a Watcher follows a loop, and cannot be copied or pickled. w.run_record() is what was "
            "recorded, as values: keep that, or save it with w.save(path)."
        )

    def __repr__(self) -> str:
        loop = self.loop
        names = ", ".join(loop.cbs_by_name) or "no callbacks"
        state = "running" if loop.fitting else "stopped" if loop.epochs else "not started"
        n, epochs = self.n_steps, len({row["epoch"] for row in loop.epochs})
        steps = f"{n} step{'s' * (n != 1)} in {epochs} epoch{'s' * (epochs != 1)}"
        return f"Watcher({type(loop.model).__name__}: {steps}; {names}; {state})"
