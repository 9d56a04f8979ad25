"""`CallbackRunner`: what owns callbacks and calls them by event.

Two are built on it: the `Learner`, which runs its own loop, and the `WatchedLoop` behind `watch`,
which follows anybody's. For each event it finds once which callbacks have a method of that name, in
order, and keeps that list until a callback is added, removed or reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from fastcore.foundation import L
from torch import Tensor

from hookkit.callbacks.callback import Callback, around_fastai, in_phase, is_of_fastai, method_for
from hookkit.callbacks.events import CANCEL_EXCEPTIONS, EVENTS, not_an_event
from hookkit.checks import kind_of
from hookkit.errors import ArgumentError, HookError, OptionError, nearest
from hookkit.recorders.probes import TrainingProbes
from hookkit.records import Run
from hookkit.training.readout import is_recorder, run_of

Method = Callable[[], object]


class CallbackRunner:
    """Owns callbacks, calls them by event, and finds them by name.

    Attributes:
        cbs: the callbacks, as they were added.
        fitting: whether a fit is under way, from before its `before_fit` to after its `after_fit`.
        training: whether the current batch is one to learn from.
        n_steps: optimizer steps really made, over all fits.
        stepped: whether the current batch has made one.
        in_closure: whether a step is under way that evaluates its batches itself.
        probes: what the diagnosis wants to know of batches, losses and gradients.
        first_step: the number of its first step, where a library resumes a training; else 0.
        info: facts that are added to the run.
    """

    fitting = training = stepped = in_closure = finds_opts = eval_pass = False
    n_steps, first_step, _gathered_at = 0, 0, -1
    step_scaler: Any = None  # the GradScaler that made the last optimizer step
    info: dict[str, Any]
    opts: Any

    def __init__(self) -> None:
        self.cbs, self._past, self.probes = L(), list[Callback](), TrainingProbes()
        self.info, self._token = {}, object()
        self._rates: dict[
            int, tuple[Any, list[Any]]
        ] = {}  # optimizers, and those of their last steps
        self._forget_order()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for cb in (*self.cbs, *self._past):
            if cb.learn is None:  # in a deep copy or a pickle; a shallow copy shares the callbacks
                cb.learn = self

    def _note_rates(self, opt: Any) -> None:
        """Called within the step: a scheduler changes them after it, a tensor in place."""
        rates = (group.get("lr") for group in opt.param_groups)
        now = [r.detach().clone() if isinstance(r, Tensor) else r for r in rates]
        self._rates[id(opt)] = opt, now
        if len(self._rates) > len(self.opts):
            kept = {id(one) for one in self.opts}
            self._rates = {key: pair for key, pair in self._rates.items() if key in kept}

    def rates_of(self, opt: Any) -> list[Any]:
        """Return the learning rate of each group of `opt` in its last step, else the next one's."""
        one, rates = self._rates.get(id(opt), (None, []))
        if one is opt and len(rates) == len(opt.param_groups):
            return rates
        return [group.get("lr") for group in opt.param_groups]

    # --- adding, removing, finding

    def add_cbs(self, cbs: Any) -> Self:
        """Adds one callback, several, or None; a class is instantiated. The runner itself.

        All are added, or none. One added while a fit is under way gets its `before_fit` at once.

        Raises:
            ArgumentError: one of them is no callback.
            HookError: one of them is in use in another run.
        """
        for cb in self._checked(instances(cbs)):
            if not any(cb is own for own in self.cbs):
                cb.learn = self
                self.cbs = L([*self.cbs, cb])
                self._past = [past for past in self._past if past.name != cb.name]
                self._forget_order()
                if self.fitting:
                    self._take(cb)
                    cb("before_fit")
        return self

    def remove_cbs(self, cbs: Any) -> Self:
        """Removes one callback or several, of a class all; the runner itself."""
        for cb in self._chosen(cbs):
            self.cbs = L(c for c in self.cbs if c is not cb)
            self._forget_order()
            if self.fitting:
                self._release(cb)
            cb.learn = None
        return self

    add_cb, remove_cb = add_cbs, remove_cbs  # fastai's names for one

    def _chosen(self, cbs: Any) -> list[Callback]:
        """Those of its callbacks that `cbs` names: by themselves, or by their class."""
        several = listed(cbs)
        kinds = tuple(cb for cb in several if isinstance(cb, type))
        return [c for c in self.cbs if isinstance(c, kinds) or any(c is cb for cb in several)]

    @contextmanager
    def added_cbs(self, cbs: Any) -> Iterator[Self]:
        """The runner with `cbs` added, until the end of the `with`.

        Afterwards they get no more events and can still be read by name: `learn.activation_stats`.
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
        """The runner without `cbs` (instances, classes), until the end of the `with`."""
        removed, place = self._chosen(cbs), {id(cb): i for i, cb in enumerate(self.cbs)}
        self.remove_cbs(removed)
        try:
            yield self
        finally:
            self.add_cbs(removed)
            self.cbs = L(sorted(self.cbs, key=lambda cb: place.get(id(cb), len(place))))
            self._forget_order()

    def _named(self) -> dict[str, Callback]:
        """Return the callbacks, and those of a past fit, by name; the last one of equal names."""
        return {cb.name: cb for cb in [*self._past, *self.cbs]}

    def _cb_named(self, name: str) -> Any:
        return self._named().get(name)

    def ordered_cbs(self, event: str) -> L:
        """The callbacks with a method for `event`, in the order they run."""
        return L(cb for cb, _ in self._methods(event))

    def _methods(self, event: str) -> list[tuple[Callback, Method]]:
        if event not in EVENTS:
            raise OptionError(not_an_event(event))
        pairs = [(cb, method_for(cb, event)) for cb in sorted(self.cbs, key=lambda c: c.order)]
        return [(cb, f) for cb, f in pairs if f is not None]

    def run_since(self, step: int) -> Run:
        """Return what was recorded after `step`, and at least the last record of each recorder."""
        return run_of(self, step)

    def _forget_order(self) -> None:
        # a new dict: an event that is just being fired goes on with its own list
        self._by_event: dict[str, list[tuple[Callback, Method]]] = {}

    # --- firing

    def __call__(self, *events: str) -> None:
        """Fires events, in turn: each callback that has a method for one is called."""
        for event in events:
            methods = self._by_event.get(event)
            if methods is None:
                methods = self._by_event[event] = self._methods(event)
            for cb, f in methods:
                if not (cb.run and cb.learn is self and in_phase(cb, event, self.training)):
                    continue
                try:
                    f()
                except CANCEL_EXCEPTIONS:
                    raise
                except Exception as error:
                    error.add_note(f"in callback {cb!r}, event {event}{self._where()}")
                    raise

    def _where(self) -> str:
        """How far the run is, for a note: `, epoch 0, batch 3 (training)`."""
        return ""

    # --- a run

    def _claim(self) -> None:
        """Makes this the runner of every callback, as a run begins.

        Raises:
            HookError: one of them is in use in another run, or has recorded one.
        """
        for cb in self._checked(self.cbs):
            cb.learn = self
            self._take(cb)
        self._forget_order()

    def _checked(self, cbs: Iterable[Callback]) -> Iterable[Callback]:
        for cb in cbs:
            if cb.learn is not self and getattr(cb.learn, "fitting", False):
                raise HookError(
                    f"{cb!r} is in use in a run that is under way. Give each run its own: "
                    f"{type(cb).__name__}(…)."
                )
        return cbs

    def _take(self, cb: Callback) -> None:
        """Records with `cb` from now on, unless it has these steps already, of another run."""
        if not is_recorder(type(cb)) or vars(cb).get("_token") is self._token:
            return
        steps = cb.record().steps
        if len(steps) and steps[-1] >= self.n_steps:
            raise HookError(
                f"{cb!r} has recorded another run, whose steps have the same numbers. Make another "
                f"for this one, {type(cb).__name__}(…), and join what they recorded: "
                f"run_record() of the first + run_record() of the second."
            )
        vars(cb)["_token"] = self._token

    def _clean_up(self) -> None:
        """Calls every callback's `cleanup_fit`, also when one of them fails."""
        self.probes.remove()
        with ExitStack() as stack:
            for cb in self.cbs:
                cb.run = True
                stack.callback(self._release, cb)

    def _release(self, cb: Callback) -> None:
        try:
            cb.cleanup_fit()
        except Exception as error:
            error.add_note(f"in callback {cb!r}, cleanup_fit{self._where()}")
            raise

    def _pause_recorders(self) -> list[Any]:
        """Switches off the callbacks that record the current batch; those, to be resumed."""
        on = [cb for cb in self.cbs if hasattr(type(cb), "_record") and cb.recording]
        for cb in on:
            cb._record(False)
        return on


def listed(cbs: Any) -> list[Any]:
    """One callback (instance or class), several or None, as a list.

    Raises:
        ArgumentError: one of them is no callback.
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
    """`listed` callbacks, of each class an instance."""
    return [cb() if isinstance(cb, type) else cb for cb in listed(cbs)]


def no_attribute(obj: Any, name: str, who: str) -> AttributeError:
    """The error for a `name` that `obj` has not, with the public names that are near it."""
    near = nearest(name, [n for n in dir(obj) if n[0] != "_"]) if name[0] != "_" else ()
    hint = f" Nearest: {', '.join(near)}." if near else ""
    return AttributeError(f"{who} has {name!r}.{hint}", name=name, obj=obj)
