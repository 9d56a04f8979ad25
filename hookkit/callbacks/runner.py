"""`CallbackRunner`: what owns callbacks and calls them by event.

Two are built on it: the `Learner`, which runs its own loop, and the `ExternalLoop` behind `watch`,
which follows anybody's. The idea that makes it cheap: for each event a runner finds once which
callbacks have a method of that name, in order, and keeps that list until a callback is added,
removed or reordered. An event that no callback has costs one dict lookup. One class, and therefore
one file of more than 300 lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, Self

from fastcore.foundation import L
from torch import Tensor

from hookkit.callbacks.batch_facts import BatchFacts
from hookkit.callbacks.callback import Callback, in_phase, method_for
from hookkit.callbacks.loss_facts import LossFacts
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.events import CANCEL_EXCEPTIONS, EVENTS, not_an_event
from hookkit.interrupts import Undo, block, uninterrupted


class CallbackRunner:
    """Owns callbacks, calls them by event, and finds them by name.

    Of several callbacks of one name the first has it; the others are `name_2`, `name_3`, … in the
    order they were added.

    Attributes:
        cbs: the callbacks, as they were added.
        fitting: whether a fit is under way, from before its `before_fit` to after its `after_fit`.
        training: whether the current batch is one to learn from.
        in_closure: whether the current step has a closure: until it is made, every batch is one
            evaluation of it.
        step_scaler: the GradScaler that made the last optimizer step, None if none did.
        finds_opts: the optimizers become known as they step.
        n_steps: optimizer steps so far, as its recorders count them: it goes on from the last step
            that one of them recorded elsewhere, so that no step comes twice in what it holds.
    """

    holds_callbacks = True  # which therefore hold it weakly

    cbs: L
    fitting: bool = False
    _broken: bool = False  # whether the fit that is cleaned up after ended by an exception
    training: bool = False
    in_closure: bool = False
    step_scaler: Any = None
    finds_opts: bool = False
    n_steps: int = 0
    _gathered_at: int = -1  # the number of steps when what all ranks recorded was last merged
    _rates: Sequence[Any] = ()  # of the first optimizer's groups, in the last step that it made
    _by_event: dict[str, list[tuple[Callback, Callable[[], object]]]]
    _recorders: list[Any]  # the HookCallbacks: what has a `recording` to switch
    _past: list[Callback]  # added for a fit that is over
    _firing: tuple[str, Any] = "", ()  # the event under way; who has still to get it, last first

    def __init__(self) -> None:
        self.cbs, self._past = L(), []
        self._loss_facts, self.batch_facts = LossFacts(), BatchFacts()
        self._forget_order()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for cb in (*self.cbs, *self._past):
            if cb.learn is None:  # in a deep copy or a pickle; a shallow copy shares the callbacks
                cb.learn = self

    def _note_rates(self, opt: Any) -> None:
        """Called within the step: a scheduler changes them after it, a tensor in place."""
        rates = (group.get("lr") for group in opt.param_groups)
        self._rates = [r.detach().clone() if isinstance(r, Tensor) else r for r in rates]

    # --- adding and removing

    def add_cbs(self, cbs: Any) -> Self:
        """Adds one callback, several, or None: all of them, or it raises; the runner itself.

        A class is instantiated. One added while a fit is under way gets its `before_fit` at once.
        Raises an ArgumentError for what is no callback, a HookError for one in use in another fit.
        """
        made = _made(cbs)
        self._check_free(made)
        for cb in made:
            if not self._owns(cb):
                self._add(cb)
        return self

    add_cb = add_cbs  # fastai's name for one

    def _add(self, cb: Callback) -> None:
        cb.learn = self
        self.cbs.append(cb)
        self._past = [past for past in self._past if past.name != cb.name]
        self._forget_order()
        if self.fitting:
            self._continue_from(cb)
            cb("before_fit")

    def remove_cbs(self, cbs: Any) -> Self:
        """Removes one callback or several, of a class all; the runner itself.

        For one removed while a fit is under way `cleanup_fit` is called at once. Raises an
        ArgumentError for what is neither a callback nor a class of them.
        """
        for cb in self._meant(cbs):
            self._drop(cb)
            cb.learn = None
        return self

    remove_cb = remove_cbs

    def _meant(self, cbs: Any) -> list[Callback]:
        """The callbacks here that `cbs` stands for: themselves, or the instances of a class."""
        found: list[Callback] = []
        for cb in listed(cbs):
            if isinstance(cb, type) and issubclass(cb, Callback):
                found += self._grab_cbs(cb)
            elif isinstance(cb, Callback):
                found += [cb] * self._owns(cb)
            else:
                raise ArgumentError(
                    f"remove_cbs({cb!r}): expected a callback or its class, found "
                    f"{type(cb).__name__}. Give one of {list(self.cbs)}."
                )
        return list({id(cb): cb for cb in found}.values())

    def _owns(self, cb: Callback) -> bool:
        return any(cb is own for own in self.cbs)

    def _drop(self, cb: Callback) -> None:
        if self.fitting:
            self._release(cb)
        self.cbs = L(c for c in self.cbs if c is not cb)
        self._forget_order()

    @block
    def added_cbs(self, cbs: Any) -> Iterator[Self]:
        """The runner with `cbs` added, until the end of the `with`.

        Afterwards they get no more events and can still be read by name: `learn.activation_stats`.
        """
        new = [cb for cb in _made(cbs) if not self._owns(cb)]
        try:
            yield self.add_cbs(new)
        finally:
            for cb in self._meant(new):
                self._drop(cb)
                self._past.append(cb)

    @block
    def removed_cbs(self, cbs: Any) -> Iterator[Self]:
        """The runner without `cbs` (instances, classes), until the end of the `with`."""
        removed, before = self._meant(cbs), list(self.cbs)
        self.remove_cbs(removed)
        try:
            yield self
        finally:
            self.add_cbs(removed)
            place = {id(cb): i for i, cb in enumerate(before)}  # equal orders run as they stood
            self.cbs = L(sorted(self.cbs, key=lambda cb: place.get(id(cb), len(place))))
            self._forget_order()

    # --- finding

    def _grab_cbs(self, cls: type[Callback]) -> L:
        """The callbacks that are instances of `cls`."""
        return L(cb for cb in self.cbs if isinstance(cb, cls))

    def _named(self) -> dict[str, Callback]:
        """The callbacks by name, and those of a past fit, each with a name of its own."""
        found: dict[str, Callback] = {}
        for cb in [*self.cbs, *self._past]:
            name = base = cb.name
            n = 1
            while name in found:
                n += 1
                name = f"{base}_{n}"
            found[name] = cb
        return found

    def _cb_named(self, name: str) -> Callback | None:
        """The callback of that name; None if there is none."""
        return self._named().get(name)

    def ordered_cbs(self, event: str) -> L:
        """The callbacks with a method for `event`, in the order they run; else an OptionError."""
        return L(cb for cb, _ in self._having(event))

    def _having(self, event: str) -> list[tuple[Callback, Callable[[], object]]]:
        """The callbacks that have a method for `event`, with it, in the order they run."""
        if event not in self._by_event:
            if event not in EVENTS:
                raise OptionError(not_an_event(event))
            in_order = sorted(self.cbs, key=lambda cb: cb.order)
            found = [(cb, method_for(cb, event)) for cb in in_order]
            self._by_event[event] = [(cb, f) for cb, f in found if f is not None]
        return self._by_event[event]

    def _forget_order(self) -> None:
        # a new dict: an event that is just being fired goes on with its own list
        self._by_event = {}
        self._recorders = [cb for cb in self.cbs if hasattr(type(cb), "_record")]

    # --- firing

    def __call__(self, *events: str) -> None:
        """Fires events, in turn: each callback that has a method for one is called."""
        for event in events:
            callbacks = self._by_event.get(event)
            if callbacks is None:
                callbacks = self._having(event)
            if callbacks:
                self._fire(event, callbacks)

    def _fire(self, event: str, callbacks: list[tuple[Callback, Callable[[], object]]]) -> None:
        outer, self._firing = self._firing, (event, callbacks[::-1])
        try:
            self._fire_rest()
        finally:
            self._firing = outer

    def _fire_rest(self) -> None:
        """Calls the callbacks that have still to get the event under way."""
        event, rest = self._firing
        while rest:
            cb, f = rest.pop()
            try:
                if cb.run and cb.learn is self and in_phase(cb, event, self.training):
                    f()
            except CANCEL_EXCEPTIONS:
                raise
            except Exception as error:
                error.add_note(f"in callback {cb!r}, event {event}{self._where()}")
                raise

    def _where(self) -> str:
        """How far the run is, for a note: `, epoch 0, batch 3 (training)`."""
        return ""

    # --- a fit

    def _claim(self) -> None:
        """Makes this the runner of every callback: another one may have had it since."""
        self._check_free(self.cbs)
        for cb in self.cbs:
            cb.learn = self
            self._continue_from(cb)
        self._forget_order()

    def _check_free(self, cbs: Iterable[Callback]) -> None:
        for cb in cbs:
            if cb.learn is not self and getattr(cb.learn, "fitting", False):
                raise HookError(
                    f"{cb!r} is in use in a run that is under way. Give each run its own: "
                    f"{type(cb).__name__}(…)."
                )

    def _continue_from(self, cb: Callback) -> None:
        """Continues the step count after the last step that `cb` recorded, here or elsewhere."""
        self.n_steps = max(self.n_steps, cb._last_step)

    def _remember_step(self, cb: Callback) -> None:
        """Notes in a recorder how many steps it has recorded."""
        if hasattr(type(cb), "record") or "incidents" in vars(cb):
            cb._last_step = self.n_steps

    @uninterrupted
    def _clean_up(self) -> None:
        """Calls every callback's `cleanup_fit`, also when one of them fails."""
        with Undo() as stack:
            for cb in self.cbs:
                cb.run = True
                stack.callback(self._release, cb)

    def _release(self, cb: Callback) -> None:
        self._remember_step(cb)
        try:
            cb.cleanup_fit()
        except Exception as error:
            error.add_note(f"in callback {cb!r}, cleanup_fit{self._where()}")
            raise

    def _pause_recorders(self) -> list[Any]:
        """Switches off the callbacks that record the current batch; those, to be resumed."""
        paused = []
        for cb in self._recorders:
            if cb.recording:
                cb._record(False)
                paused.append(cb)
        return paused


def listed(cbs: Any) -> list[Any]:
    """One callback (instance or class), several or None, as a list."""
    if cbs is None:
        return []
    if isinstance(cbs, (Callback, type, str)) or not isinstance(cbs, Iterable):
        return [cbs]
    return list(cbs)


def _made(cbs: Any) -> list[Callback]:
    """`listed` callbacks, of each class an instance."""
    made = []
    for cb in listed(cbs):
        made.append(cb() if isinstance(cb, type) and issubclass(cb, Callback) else cb)
        if not isinstance(made[-1], Callback):
            raise ArgumentError(
                f"add_cbs({cb!r}): expected a callback, found {type(cb).__name__}. Give a "
                f"Callback, a Callback class, or Callback(after_fit=f) around a function."
            )
        if not isinstance(made[-1].order, Real):
            raise ArgumentError(
                f"{cb!r} has order={made[-1].order!r}: callbacks run by ascending order. Make it "
                f"a number, such as 0."
            )
    return made
