"""`Loop`: the base of the two training loops, the `Learner`'s own and the one that `watch` follows.

It owns the callbacks and calls them by event, counts optimizer steps, keeps losses, epochs and
learning rates, and reads everything recorded as one `Run`. `heard` lists the callbacks' methods for
each event, in the order of calls. Subclasses need not send an event that is not in `heard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from weakref import ref

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor

from hookkit._core import distributed as ranks
from hookkit._core.checks import kind_of
from hookkit._core.messages import nearest, nearest_text
from hookkit._core.modules import class_name, unwrap
from hookkit.callbacks.callback import Callback, around_fastai, is_of_fastai, method_for
from hookkit.callbacks.events import BATCH_EVENTS, CANCEL_EXCEPTIONS, EVENTS, not_an_event
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.callbacks.loss_log import LossLog
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.recorders.probes import TrainingProbes, loss_name
from hookkit.recorders.step_recorder import StepRecorder
from hookkit.records import Record, Run, grad_norms


class Loop:
    """Base of the `Learner` and of the loop behind `watch`.

    Attributes:
        cbs: the callbacks, as they were added.
        fitting: whether a fit is under way, from before its `before_fit` to after its `after_fit`.
        training: whether the current batch is a training batch.
        n_steps: how many optimizer steps were made (not skipped), over all fits.
        stepped: whether the current batch has made an optimizer step.
        in_closure: whether an optimizer step is running its closure.
        heard: event → pairs of a callback and its method for the event, in the order of calls.
        in_epoch: whether an epoch is under way.
        losses: the losses of the training batches, a `LossLog`.
        epochs: a dict for each epoch: its number, its first step, and the values reported for it.
        probes: the `TrainingProbes`, which collect facts for the diagnosis.
        first_step: the number of the first step; above 0 if a library resumed a training.
        info: facts that the user adds to the run.
    """

    # each subclass defines these
    training: Any
    model: Any
    loss_func: Any
    epoch: int
    n_epoch: Any
    train_iter: int
    opts: Any
    stepped_opts: Any
    step_scaler: Any

    def __init__(self) -> None:
        self.fitting = self.stepped = self.in_closure = self.in_epoch = False
        self.finds_opts = False  # whether optimizers are found when they first step
        self.n_steps, self.first_step = 0, 0
        self.losses, self.epochs = LossLog(), list[dict[str, Any]]()
        self.probes, self.info = TrainingProbes(), dict[str, Any]()
        self.cbs, self._past = L(), list[Callback]()  # `_past`: of past fits, still found by name
        self.heard: dict[str, list[tuple[Callback, Callable[[], object]]]] = {}
        self._hooking: list[Any] = []  # the callbacks that have hooks on modules
        self._token = object()  # stored on each recorder: marks that it recorded this loop's steps
        self._rates: dict[Any, list[Any]] = {}  # optimizer → learning rates of its last step
        self._gathered_at = -1  # `n_steps` at the last `gather`

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for cb in (*self.cbs, *self._past):
            if cb.learn is None:  # in a deep copy or a pickle; a shallow copy shares the callbacks
                cb.learn = self

    # --- adding, removing, finding callbacks

    def add_cbs(self, cbs: Any) -> Self:
        """Add one callback, several, or None; a class is instantiated. Return the loop itself.

        All are added, or none. A callback that is added during a fit gets `before_fit` at once.

        Raises:
            ArgumentError: one of `cbs` is not a callback.
            HookError: one of `cbs` is in use in another run.
        """
        for cb in self._checked(instances(cbs)):
            if not any(cb is own for own in self.cbs):
                cb.learn = self
                self.cbs = L([*self.cbs, cb])
                self._past = [past for past in self._past if past.name != cb.name]
                self.find_methods()
                if self.fitting:
                    self._set_token(cb)
                    cb("before_fit")
        return self

    def remove_cbs(self, cbs: Any) -> Self:
        """Remove one callback or several; a class removes all of its instances.

        Return the loop itself.
        """
        for cb in self._chosen(cbs):
            self.cbs = L(c for c in self.cbs if c is not cb)
            self.find_methods()
            if self.fitting:
                self._clean_up_callback(cb)
            cb.learn = None
        return self

    add_cb, remove_cb = add_cbs, remove_cbs  # fastai's names for one

    def _chosen(self, cbs: Any) -> list[Callback]:
        """Return the loop's callbacks that are in `cbs`, or whose class is."""
        several = callback_list(cbs)
        kinds = tuple(cb for cb in several if isinstance(cb, type))
        return [c for c in self.cbs if isinstance(c, kinds) or any(c is cb for cb in several)]

    @contextmanager
    def added_cbs(self, cbs: Any) -> Iterator[Self]:
        """Add `cbs` until the end of the `with`.

        Later they get no events, but can still be read by name, such as `learn.activation_stats`.
        """
        new = [cb for cb in instances(cbs) if not any(cb is own for own in self.cbs)]
        try:
            yield self.add_cbs(new)
        finally:
            self.remove_cbs(new)
            self._past += new
            for cb in new:
                cb.learn = self

    @contextmanager
    def removed_cbs(self, cbs: Any) -> Iterator[Self]:
        """Remove `cbs` (instances, classes) until the end of the `with`."""
        removed, place = self._chosen(cbs), {id(cb): i for i, cb in enumerate(self.cbs)}
        self.remove_cbs(removed)
        try:
            yield self
        finally:
            self.add_cbs(removed)
            self.cbs = L(sorted(self.cbs, key=lambda cb: place.get(id(cb), len(place))))
            self.find_methods()

    @property
    def cbs_by_name(self) -> dict[str, Callback]:
        """Return name → callback, also of past fits; the last one if several have the same name."""
        return {cb.name: cb for cb in [*self._past, *self.cbs]}

    # --- sending events

    def find_methods(self) -> None:
        """Build `heard`. Call it whenever callbacks, their methods or their order change."""
        heard: dict[str, list[tuple[Callback, Callable[[], object]]]] = {}
        for cb in sorted(self.cbs, key=lambda cb: cb.order):
            for event in EVENTS:
                if (f := method_for(cb, event)) is not None:
                    heard.setdefault(event, []).append((cb, f))
        self.heard = heard  # a new dict, because `__call__` may be iterating over the old lists
        self._hooking = [cb for cb in self.cbs if isinstance(cb, HookCallback)]

    def __call__(self, *events: str) -> None:
        """Send `events`, one after the other: call the method of each callback that has one."""
        for event in events:
            if event not in self.heard:
                if event not in EVENTS:
                    raise OptionError(not_an_event(event))
                continue
            me = ref(self)  # CPython returns the same weakref each time, so `is` can compare it
            switch = "run"  # the name of the callback's flag for this event
            if event in BATCH_EVENTS:
                switch = "run_train" if self.training else "run_valid"
            for cb, f in self.heard[event]:
                if not (cb.run and cb._owner is me and getattr(cb, switch)):
                    continue
                try:
                    f()
                except CANCEL_EXCEPTIONS:
                    raise
                except Exception as error:
                    error.add_note(f"in callback {cb!r}, event {event}{self._where()}")
                    raise

    def ordered_cbs(self, event: str) -> L:
        """Return the callbacks that have a method for `event`, in the order they run."""
        if event not in EVENTS:
            raise OptionError(not_an_event(event))
        return L(cb for cb, _ in self.heard.get(event, ()))

    def _where(self) -> str:
        """Return the position in the run, for messages: `, epoch 0, batch 3 (training)`."""
        return ""

    # --- a run

    def _claim(self) -> None:
        """Make this the loop of every callback, when a run begins.

        Raises:
            HookError: a callback is in use in another run, or has recorded one.
        """
        for cb in self._checked(self.cbs):
            cb.learn = self
            self._set_token(cb)
        self.find_methods()

    def _checked(self, cbs: Iterable[Callback]) -> Iterable[Callback]:
        """Return `cbs`; raise a HookError if one is in use in another run."""
        for cb in cbs:
            if cb.learn is not self and getattr(cb.learn, "fitting", False):
                raise HookError(
                    f"{cb!r} is in use in a run that is under way. Give each run its own: "
                    f"{type(cb).__name__}(…)."
                )
        return cbs

    def _set_token(self, cb: Callback) -> None:
        """Mark the recorder `cb` with this loop's token; leave other callbacks alone.

        Raises:
            HookError: it has recorded steps of another run with the same numbers.
        """
        if not isinstance(cb, StepRecorder) or vars(cb).get("_token") is self._token:
            return
        steps = cb._since(-1).steps
        if len(steps) and steps[-1] >= self.n_steps:
            raise HookError(
                f"{cb!r} has recorded another run, whose steps have the same numbers. Make another "
                f"for this one, {type(cb).__name__}(…), and join what they recorded: "
                f"run_record() of the first + run_record() of the second."
            )
        vars(cb)["_token"] = self._token

    def _clean_up(self) -> None:
        """Call every callback's `cleanup_fit`, even if one of them fails."""
        self.probes.remove()
        with ExitStack() as stack:
            for cb in self.cbs:
                cb.run = True
                stack.callback(self._clean_up_callback, cb)

    def _clean_up_callback(self, cb: Callback) -> None:
        try:
            cb.cleanup_fit()
        except Exception as error:
            error.add_note(f"in callback {cb!r}, cleanup_fit{self._where()}")
            raise

    def pause_recorders(self) -> list[Any]:
        """Switch off the callbacks that record the current batch; return them."""
        on = [cb for cb in self._hooking if cb.recording]
        for cb in on:
            cb._switch.on = False
        return on

    def begin_epoch(self) -> None:
        """Begin an epoch, to which the next steps belong."""
        self.in_epoch = True
        self.epochs.append({"epoch": self.epoch, "step": self.n_steps})

    # --- learning rates

    def keep_rates(self, opt: Any) -> None:
        """Keep the learning rates that `opt` has just used, before a scheduler changes them."""
        rates = self._rates[opt] = []
        for group in opt.param_groups:
            rate = group.get("lr")  # cloned: a scheduler changes a tensor in place
            rates.append(rate.detach().clone() if isinstance(rate, Tensor) else rate)
        if len(self._rates) > len(self.opts):
            self._rates = {o: rates for o, rates in self._rates.items() if o in self.opts}

    def rates_of(self, opt: Any) -> list[Any]:
        """Return each group's learning rate in the last step of `opt`; the current one before."""
        rates = self._rates.get(opt, [])
        n = len(opt.param_groups)
        return rates if len(rates) == n else [group.get("lr") for group in opt.param_groups]

    # --- reading

    def gather(self) -> Self:
        """Merge what the ranks of a process group recorded; return the loop itself. Collective.

        Until the next step, every rank then reads the merged record, without waiting. Otherwise
        each rank reads its own. A fit in `distrib_ctx` ends with a `gather`.

        Raises:
            HookError: the ranks recorded different steps or options, or one of them did not call.
        """
        if ranks.is_distributed():
            for held in (*self._past, *self.cbs, self):
                if hasattr(type(held), "_gather"):
                    with ranks.collective(f"gather what {held!r} recorded in {self.n_steps} steps"):
                        held._gather()
            self._gathered_at = self.n_steps
        return self

    def run_record(self) -> Run:
        """Return everything recorded so far, as plain values that pictures and diagnosis read.

        Sync: one per recorder.
        """
        return self.run_since(-1)

    def run_since(self, step: int) -> Run:
        """Return what was recorded after `step`, and at least the last record of each recorder.

        A callback that logs during training reads only new records with it. With -1, or if `gather`
        was called since the last step, everything is returned. If there are several recorders of a
        kind, the last one that is not empty is read. No rank waits for another. Sync: one per
        recorder.
        """
        cbs, records = [*self._past, *self.cbs], dict[str, Record]()
        for cb in cbs:
            if isinstance(cb, StepRecorder):
                record = cb._since(step)
                if len(record) or record.kind not in records:
                    records[record.kind] = record
        params = records.get("param")
        n = self.n_steps
        alone = ranks.is_distributed() and self._gathered_at != n
        return Run(
            activations=records.get("activation"),
            gradients=records.get("gradient"),
            params=params,
            losses=self.losses.by_step(n) if n and len(self.losses) else None,
            valid=self._epochs(),
            grad_norms=None if params is None else grad_norms(params, n),
            incidents=tuple(i for cb in cbs for i in vars(cb).get("incidents", ())),
            info={
                **self._facts(),
                **({"rank": ranks.rank_label()} if alone else {}),
                **self.losses.facts(),
                "train_iter": self.train_iter,
                **({"within_epoch": True} if self.in_epoch else {}),
                "first_step": self.first_step,
                "n_steps": n,
                **self.info,
            },
        )

    def _epochs(self) -> list[dict[str, Any]]:
        """Return the rows of `Run.valid`: number, last step, losses and metrics of each epoch."""
        rows = []
        ends = [epoch["step"] for epoch in self.epochs[1:]] + [self.n_steps]
        for epoch, end in zip(self.epochs, ends, strict=False):
            reported = dict(epoch)
            first, row = reported.pop("step"), {"epoch": reported.pop("epoch")}
            if end > first or reported:
                row["step"] = max(end - 1, 0)
            if (loss := self.losses.mean(first, end)) is not None:
                row["train_loss"] = loss
            for name, value in reported.items():
                numbers = isinstance(value, (Tensor, np.ndarray, np.generic))
                row[name] = value.tolist() if numbers else value  # sync: one for each tensor
            rows.append(row)
        return rows

    def _gather(self) -> None:
        self.losses.gather(self._where())

    def _facts(self) -> dict[str, Any]:
        """Return what is known of the model, its loss and its optimizer."""
        opt = self.opts[0] if self.opts else None
        groups = [] if opt is None else opt.param_groups
        rates = [] if opt is None else self.rates_of(opt)
        dtypes = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        return {
            "model": class_name(unwrap(self.model)),
            "loss_func": loss_name(self.loss_func),
            "optimizer": None if opt is None else type(opt).__name__,
            "lr": [float(rate) for rate in rates],
            "weight_decay": [float(g.get("weight_decay", 0.0)) for g in groups],
            "dtype": ", ".join(sorted(str(t) for t in dtypes)),
            "n_epoch": self.n_epoch,
            **self.probes.read(self.n_steps, self.fitting),
            "torch": torch.__version__,
            "numpy": np.__version__,
        }


def callback_list(cbs: Any) -> list[Any]:
    """Return one callback (instance or class), several or None as a list.

    Raises:
        ArgumentError: one of `cbs` is not a callback.
    """
    if isinstance(cbs, (str, type)) or not isinstance(cbs, Iterable):
        cbs = [] if cbs is None else [cbs]
    several = list(cbs)
    for cb in several:
        kind = cb if isinstance(cb, type) else type(cb)
        if is_of_fastai(kind):
            raise ArgumentError(
                f"{kind.__name__} is a callback of fastai, and hookkit cannot run it. "
                f"{around_fastai('ActivationStats', f'learn.fit(1, cbs={kind.__name__}())')}"
            )
        if not issubclass(kind, Callback):
            raise ArgumentError(
                f"expected a callback, found {kind_of(cb)}. Give a Callback, a Callback class, or "
                f"Callback(after_fit=f) around a function."
            )
    return several


def instances(cbs: Any) -> list[Callback]:
    """Return `callback_list(cbs)`, with an instance in place of each class."""
    return [cb() if isinstance(cb, type) else cb for cb in callback_list(cbs)]


def no_attribute(obj: Any, name: str, who: str) -> AttributeError:
    """Return the error for an attribute that `obj` does not have; it suggests similar names."""
    near = nearest(name, [n for n in dir(obj) if n[0] != "_"]) if name[0] != "_" else []
    hint = f" {nearest_text(name, near)}" if near else ""
    return AttributeError(f"{who} has {name!r}.{hint}", name=name, obj=obj)
