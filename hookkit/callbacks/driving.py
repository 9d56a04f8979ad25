"""`Callback`, and `Driver`: whatever owns callbacks and tells them what happens.

Two drivers stand on this: the `Learner`, which runs its own loop, and the `Watcher`, which follows
anybody's. The idea that makes it cheap: for each event a driver finds once which callbacks have a
method of that name, in order, and keeps that list until a callback is added, removed or reordered.
An event nobody listens to costs one dict lookup.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any, TypeVar

from fastcore.foundation import L

from hookkit.callbacks.keywords import InitSignature, check_keywords
from hookkit.errors import ArgumentError, HookkitWarning, OptionError, nearest
from hookkit.events import BATCH_EVENTS, CANCEL_EXCEPTIONS, EVENTS

D = TypeVar("D", bound="Driver")

# What the loop itself reads back: a callback that writes one of these on itself meant the learner.
LOOP_STATE = frozenset(
    {"model", "dls", "opt", "loss_func", "xb", "yb", "pred", "loss", "loss_grad", "training", "dl"}
)
_NOTICED = LOOP_STATE | frozenset(EVENTS) | {"order"}


class Callback:
    """Something to do at some of the events of training: a subclass has a method for each.

    Reads fall through: `self.pred` is the callback's own, else the learner's (`self.learn.pred`),
    else the model's. Writes stay on the callback: to change the run, write `self.learn.pred = …`.
    `name` (`MyStatsCallback` → `my_stats`) is how the learner shows it: `learn.my_stats`.

    Args:
        events: event → function of the callback, for a callback without a class.

    Attributes:
        order: callbacks run by ascending `order`; equal ones as they were added.
        learn: the driver it belongs to, or None.
        run: off, it is passed over until the end of the fit.
        run_train: whether in-batch events reach it while training.
        run_valid: the same while validating.

    Raises:
        OptionError: a keyword is not an event.

    >>> from hookkit.testing import synth_learner
    >>> greet = Callback(after_fit=lambda self: print(self.epoch + 1, "epochs"))
    >>> with synth_learner(cbs=greet).no_logging() as learn: learn.fit(2)
    2 epochs
    """

    order: float = 0
    learn: Any = None
    run: bool = True
    run_train: bool = True
    run_valid: bool = True
    _came_to: int = 0  # the step of a recorder: see `Driver._part_from`

    __signature__ = InitSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Callback:
        """A callback, unless a keyword is none of the class's arguments."""
        check_keywords(cls, kwargs)
        return super().__new__(cls)

    def __init__(self, **events: Callable[[Any], object]) -> None:
        for event, f in events.items():
            if event not in EVENTS:
                raise OptionError(f"{type(self).__name__}({event}=…): {_not_an_event(event)}")
            if not callable(f):
                raise ArgumentError(
                    f"{type(self).__name__}({event}={f!r}) was asked for, {type(f).__name__} "
                    f"cannot be called. Give a function of one argument, the callback."
                )
            setattr(self, event, MethodType(f, self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if near := _near_events(name):
                warnings.warn(
                    f"{cls.__name__}.{name} is never called: no event has that name. "
                    f"Did you mean {near}?",
                    HookkitWarning,
                    stacklevel=2,
                )

    @property
    def name(self) -> str:
        """The class name in snake case, without a trailing `Callback`."""
        return _snake_case(type(self).__name__)

    def cleanup_fit(self) -> None:
        """Takes down what `before_fit` set up. Not an event: it is always called.

        The driver calls it once a fit is over, however it ended (also when `before_fit` itself
        failed), so it may find nothing to do.
        """

    def __call__(self, event: str) -> None:
        """Runs the method for `event`, if there is one and `run` (`run_train`, …) allows it."""
        f = _method(self, event)
        if f is not None and self.run and _in_phase(self, event, getattr(self, "training", True)):
            f()

    def __getattr__(self, name: str) -> Any:
        # a property of ours that fails with AttributeError also lands here: show its own error
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        mine = type(self).__name__
        if name.startswith("__"):
            raise AttributeError(f"{mine} has no attribute {name!r}", name=name, obj=self)
        if self.learn is None:
            raise AttributeError(
                f"{mine} has no attribute {name!r}, and no learner yet to look it up in. "
                f"Read it during a fit, or after `learn.add_cb(…)`.",
                name=name,
                obj=self,
            )
        return getattr(self.learn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NOTICED and self.learn is not None:
            self._notice(name)
        object.__setattr__(self, name, value)

    def _notice(self, name: str) -> None:
        if name not in LOOP_STATE:  # an event or the order: what the driver remembers is stale
            self.learn._forget_order()
        elif not hasattr(type(self), name) and name not in vars(self):
            warnings.warn(
                f"{type(self).__name__} sets `self.{name}`: that is its own attribute, and the "
                f"loop goes on with its own `{name}`. To change the loop's, set "
                f"`self.learn.{name}`.",
                HookkitWarning,
                stacklevel=4,
            )

    def __repr__(self) -> str:
        return type(self).__name__


@cache
def _snake_case(word: str) -> str:
    word = re.sub(r"Callback$", "", word) or "Callback"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", word).lower()


def _method(cb: Callback, event: str) -> Callable[[], object] | None:
    """The callback's own method for `event`; never one of its learner's or its model's."""
    if event in vars(cb) or hasattr(type(cb), event):
        f: Callable[[], object] = object.__getattribute__(cb, event)
        return f
    return None


def _heard_by(cb: Callback, event: str) -> Callable[[], object] | None:
    """What to call at `event`: the method, or at every one the class's own `__call__`."""
    own = type(cb).__call__ is not Callback.__call__
    return partial(cb, event) if own else _method(cb, event)


def _in_phase(cb: Callback, event: str, training: bool) -> bool:
    return event not in BATCH_EVENTS or (cb.run_train if training else cb.run_valid)


def _near_events(name: str) -> str:
    """The events that the method `name` was meant for; empty if it is one, or none is near.

    `before_` and `after_` are set aside, or everything that begins so would be near.
    """
    half, _, rest = name.partition("_")
    if half not in ("before", "after") or name in EVENTS:
        return ""
    rests = [e.removeprefix(f"{half}_") for e in EVENTS if e.startswith(f"{half}_")]
    return ", ".join(f"`{half}_{near}`" for near in nearest(rest, rests, n=2))


def _not_an_event(name: str) -> str:
    near = nearest(name, EVENTS)
    hint = f"Nearest: {', '.join(near)}. " if near else ""
    return f"{name!r} is not an event. {hint}hookkit.events.EVENTS lists all {len(EVENTS)}."


class Driver:
    """Owns callbacks, calls them by event, and finds them by name. `Learner` and `Watcher` are two.

    Attributes:
        cbs: the callbacks, as they were added.
        fitting: whether a fit is under way, from before its `before_fit` to after its `after_fit`.
        training: whether the batch at hand is one to learn from.
        in_closure: whether the step at hand has a closure: until it is made, every batch is one
            evaluation of it.
        n_steps: optimizer steps so far, on the axis of its recorders: one that has recorded
            elsewhere is carried on, so that no step comes twice in what it holds.
    """

    cbs: L
    fitting: bool = False
    _broken: bool = False  # whether the fit that is cleaned up after ended by an exception
    training: bool = False
    in_closure: bool = False
    n_steps: int = 0
    _listeners: dict[str, list[tuple[Callback, Callable[[], object]]]]
    _past: dict[str, Callback]

    def _own(self, cbs: Any) -> None:
        """Starts with `cbs` as the callbacks."""
        self.cbs, self._listeners, self._past = L(), {}, {}
        self.add_cbs(cbs)

    # --- adding and removing

    def add_cb(self: D, cb: Callback | type[Callback]) -> D:
        """Adds a callback, an instance or a class to be made into one; the driver itself.

        One added while a fit is under way gets its `before_fit` at once.

        Raises:
            ArgumentError: `cb` is not a callback.
        """
        made = cb() if isinstance(cb, type) and issubclass(cb, Callback) else cb
        if not isinstance(made, Callback):
            raise ArgumentError(
                f"{cb!r} was to be added as a callback, its type is {type(cb).__name__}. Give a "
                f"Callback, a Callback class, or Callback(after_fit=f) around a function."
            )
        if not any(made is known for known in self.cbs):
            made.learn = self
            self.cbs.append(made)
            self._past.pop(made.name, None)
            self._forget_order()
            if self.fitting:
                self._carry_on(made)
                made("before_fit")
        return self

    def add_cbs(self: D, cbs: Any) -> D:
        """Adds one callback, several, or None."""
        for cb in _listed(cbs):
            self.add_cb(cb)
        return self

    def remove_cb(self: D, cb: Callback | type[Callback]) -> D:
        """Removes a callback, or every instance of a class; the driver itself.

        One removed while a fit is under way is cleaned up after at once.

        Raises:
            ArgumentError: `cb` is neither a callback nor a class of them.
        """
        for known in self._meant(cb):
            if any(known is c for c in self.cbs):
                self._drop(known)
                known.learn = None
        return self

    def _meant(self, cb: Any) -> list[Callback]:
        """The callbacks that `cb` stands for: itself, or the instances of a class."""
        if isinstance(cb, type) and issubclass(cb, Callback):
            return list(self._grab_cbs(cb))
        if isinstance(cb, Callback):
            return [cb]
        raise ArgumentError(
            f"{cb!r} was to be removed as a callback, its type is {type(cb).__name__}. Give the "
            f"callback, or its class; there are {list(self.cbs)}."
        )

    def remove_cbs(self: D, cbs: Any) -> D:
        """Removes what `add_cbs` takes."""
        for cb in _listed(cbs):
            self.remove_cb(cb)
        return self

    def _drop(self, cb: Callback) -> None:
        if self.fitting:
            self._part_from(cb)
            cb.cleanup_fit()
        self.cbs = L(c for c in self.cbs if c is not cb)
        self._forget_order()

    @contextmanager
    def added_cbs(self: D, cbs: Any) -> Iterator[D]:
        """The driver with `cbs` added, until the end of the `with`.

        Afterwards they get no more events and can still be read by name: `learn.activation_stats`.
        """
        before = list(self.cbs)
        self.add_cbs(cbs)
        mine = [cb for cb in self.cbs if not any(cb is old for old in before)]
        try:
            yield self
        finally:
            for cb in mine:
                if any(cb is c for c in self.cbs):
                    self._drop(cb)
                    self._past[cb.name] = cb

    @contextmanager
    def removed_cbs(self: D, cbs: Any) -> Iterator[D]:
        """The driver without `cbs` (instances, classes), until the end of the `with`."""
        gone = [
            known
            for cb in _listed(cbs)
            for known in self._meant(cb)
            if any(known is c for c in self.cbs)
        ]
        self.remove_cbs(gone)
        try:
            yield self
        finally:
            self.add_cbs(gone)

    # --- finding

    def _grab_cbs(self, cls: type[Callback]) -> L:
        """The callbacks that are instances of `cls`."""
        return L(cb for cb in self.cbs if isinstance(cb, cls))

    def _cb_named(self, name: str) -> Callback | None:
        """The callback of that name, the latest of several; else one added for a past fit."""
        found = [cb for cb in self.cbs if cb.name == name]
        return found[-1] if found else self._past.get(name)

    def ordered_cbs(self, event: str) -> L:
        """The callbacks that have a method for `event`, in the order they run.

        Raises:
            OptionError: there is no such event.
        """
        return L(cb for cb, _ in self._listening(event))

    def _listening(self, event: str) -> list[tuple[Callback, Callable[[], object]]]:
        if event not in self._listeners:
            if event not in EVENTS:
                raise OptionError(f"An event was to be fired: {_not_an_event(event)}")
            found = [(cb, _heard_by(cb, event)) for cb in sorted(self.cbs, key=lambda cb: cb.order)]
            self._listeners[event] = [(cb, f) for cb, f in found if f is not None]
        return self._listeners[event]

    def _forget_order(self) -> None:
        # a new dict: an event that is just being fired goes on with its own list
        self._listeners = {}

    # --- firing

    def __call__(self, *events: str) -> None:
        """Fires events, in turn, at the callbacks that have a method for them."""
        for event in events:
            listening = self._listeners.get(event)
            if listening is None:
                listening = self._listening(event)
            if listening:
                self._fire(event, listening)

    def _fire(self, event: str, listening: list[tuple[Callback, Callable[[], object]]]) -> None:
        try:
            for cb, f in listening:
                if cb.run and cb.learn is self and _in_phase(cb, event, self.training):
                    f()
        except CANCEL_EXCEPTIONS:
            raise
        except Exception as error:
            error.add_note(f"in callback {cb!r}, event {event}{self._where()}")
            raise

    def _where(self) -> str:
        """Where the run stands, for a note: `, epoch 0, batch 3 (training)`."""
        return ""

    def _claim(self) -> None:
        """Makes every callback answer to this driver: another one may have had it since."""
        for cb in self.cbs:
            cb.learn = self
            self._carry_on(cb)
        self._forget_order()

    def _carry_on(self, cb: Callback) -> None:
        """Counts on from the step that `cb` has come to, here or elsewhere."""
        self.n_steps = max(self.n_steps, cb._came_to)

    def _part_from(self, cb: Callback) -> None:
        """Has a recorder know which step it has come to."""
        if hasattr(type(cb), "record") or "incidents" in vars(cb):
            cb._came_to = self.n_steps

    def _clean_up(self) -> None:
        """Calls every callback's `cleanup_fit`, also when one of them fails."""
        with ExitStack() as stack:
            for cb in self.cbs:
                cb.run = True
                self._part_from(cb)
                stack.callback(cb.cleanup_fit)


def _listed(cbs: Any) -> list[Any]:
    if cbs is None:
        return []
    if isinstance(cbs, (Callback, type, str)) or not isinstance(cbs, Iterable):
        return [cbs]
    return list(cbs)
