"""`Callback`: something to do at some of the events of training. Whoever calls it is a `Driver`.

It is written to be inherited from: a subclass has a method for each event it wants, reads the run
as if it were its own, and changes it through `self.learn`.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MethodType
from typing import Any, ClassVar

from hookkit.callbacks.keywords import InitSignature, check_keywords
from hookkit.errors import ArgumentError, HookkitWarning, OptionError, nearest
from hookkit.events import BATCH_EVENTS, EVENTS, not_an_event

# What the loop itself reads back: a callback that writes one of these on itself meant the learner.
LOOP_STATE = frozenset(
    {"model", "dls", "opt", "loss_func", "xb", "yb", "pred", "loss", "loss_grad", "training", "dl"}
)
V1_EVENTS = {
    "on_train_begin": "before_fit",
    "on_epoch_begin": "before_epoch",
    "on_batch_begin": "before_batch",
    "on_loss_begin": "after_pred",
    "on_backward_begin": "before_backward",
    "on_backward_end": "after_backward",
    "on_step_end": "after_step",
    "on_batch_end": "after_batch",
    "on_epoch_end": "after_epoch",
    "on_train_end": "after_fit",
}
"""fastai v1's events, and those that took their place."""

_NOTICED = LOOP_STATE | frozenset(EVENTS) | {"order"}


class Owner:
    """Who a callback belongs to: a driver, held weakly. Its copies and pickles belong to nobody."""

    __slots__ = ("get", "known")

    def __init__(self, driver: Any = None) -> None:
        self.known = driver is not None
        weak = getattr(type(driver), "holds_callbacks", False)  # else a stand-in, in a test
        self.get: Callable[[], Any] = weakref.ref(driver) if weak else lambda: driver

    def __reduce__(self) -> Any:
        return Owner, ()  # where a callback's own `__getstate__` passes it on


class Callback:
    """Something to do at some of the events of training: a subclass has a method for each.

    Reads fall through: `self.pred` is the callback's own, else the learner's (`self.learn.pred`),
    else the model's. Writes stay on the callback: to change the run, write `self.learn.pred = …`.
    `name` (`MyStatsCallback` → `my_stats`) is how the learner shows it: `learn.my_stats`.

    Args:
        events: event → function of the callback, for a callback without a class.

    Attributes:
        order: callbacks run by ascending `order`; equal ones as they were added.
        learn: the driver it belongs to, held weakly (it holds the callback); None if there is none,
            or it is gone.
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
    run: bool = True
    run_train: bool = True
    run_valid: bool = True
    _renamed: ClassVar[Mapping[str, str]] = {}  # fastai v1's names of attributes, and today's
    _came_to: int = 0  # the step of a recorder: see `Driver._part_from`
    _learn: Owner = Owner()

    __signature__ = InitSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Callback:
        """A callback, unless a keyword is none of the class's arguments."""
        check_keywords(cls, kwargs)
        return super().__new__(cls)

    def __init__(self, **events: Callable[[Any], object]) -> None:
        for event, f in events.items():
            if event not in EVENTS:
                raise OptionError(f"{type(self).__name__}({event}=…): {not_an_event(event)}")
            if not callable(f):
                raise ArgumentError(
                    f"{type(self).__name__}({event}={f!r}) was asked for, {type(f).__name__} "
                    f"cannot be called. Give a function of one argument, the callback."
                )
            setattr(self, event, MethodType(f, self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if near := _near_events(cls, name):
                warnings.warn(
                    f"{cls.__name__}.{name} is never called: no event has that name. "
                    f"Did you mean {near}?",
                    HookkitWarning,
                    stacklevel=2,
                )

    @property
    def learn(self) -> Any:
        """The driver it belongs to, or None."""
        return self._learn.get()

    @learn.setter
    def learn(self, driver: Any) -> None:
        object.__setattr__(self, "_learn", Owner(driver))

    @property
    def name(self) -> str:
        """The class name in snake case, without a trailing `Callback`."""
        return _snake_case(type(self).__name__)

    def cleanup_fit(self) -> None:
        """Takes down what `before_fit` set up. Not an event: it is always called.

        The driver calls it once a fit is over, however it ended (also when `before_fit` itself
        failed), so it may find nothing to do.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_learn": Owner()}  # a copy belongs to nobody

    def __call__(self, event: str) -> None:
        """Runs the method for `event`, if there is one and `run` (`run_train`, …) allows it."""
        f = _method(self, event)
        if f is not None and self.run and in_phase(self, event, getattr(self, "training", True)):
            f()

    def __getattr__(self, name: str) -> Any:
        # a property of ours that fails with AttributeError also lands here: show its own error
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        mine = type(self).__name__
        if name.startswith("__"):
            raise AttributeError(f"{mine} has no attribute {name!r}", name=name, obj=self)
        if (now := self._renamed.get(name)) is not None:
            raise AttributeError(
                f"{mine} has no attribute {name!r}, its name in fastai v1. Use `{now}`.",
                name=name,
                obj=self,
            )
        if self.learn is None:
            raise AttributeError(
                f"{mine} has no attribute {name!r}, {self._why()}", name=name, obj=self
            )
        try:
            return getattr(self.learn, name)
        except AttributeError as error:
            if _skips_init(type(self)):
                which = f"does not call super().__init__(…), which may set {name!r}"
                error.add_note(f"{mine}.__init__ {which}")
            if near := nearest(name, [n for n in dir(type(self)) if n[0] != "_"]):
                error.add_note(f"nearest in {mine}: {', '.join(near)}")
            raise

    def _why(self) -> str:
        """Why there is no driver to look it up in, and what to do."""
        if not self._learn.known:
            return (
                "and no learner yet to look it up in. Read it during a fit, or after "
                "`learn.add_cb(…)`."
            )
        return (
            "and the Learner or the watched loop that it belonged to is gone. Keep the Learner, or "
            "what watch(…) returned, to read it."
        )

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


def _skips_init(cls: type[Callback]) -> bool:
    """Whether the class's `__init__` passes by that of its base, which is not `Callback`'s."""
    inits = [base.__dict__["__init__"] for base in cls.__mro__ if "__init__" in base.__dict__]
    return inits[1] not in (Callback.__init__, object.__init__) and not calls(inits[0], "__init__")


def calls(method: Any, name: str) -> bool:
    """Whether the code of `method` names a method `name`, as `super().name()` does."""
    code = getattr(method, "__code__", None)
    return code is None or name in code.co_names


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


def heard_by(cb: Callback, event: str) -> Callable[[], object] | None:
    """What to call at `event`: the method, or at every one the class's own `__call__`."""
    own = type(cb).__call__ is not Callback.__call__
    return partial(cb, event) if own else _method(cb, event)


def in_phase(cb: Callback, event: str, training: bool) -> bool:
    """Whether `event` is for `cb` now: `run_train` and `run_valid` switch those inside a batch."""
    return event not in BATCH_EVENTS or (cb.run_train if training else cb.run_valid)


def _near_events(cls: type, name: str) -> str:
    """The events that the method `name` was meant for; empty if it is one, or none is near.

    `before_` and `after_` are set aside, or everything that begins so would be near. A name of
    fastai v1 that another base of the class has is that library's event.
    """
    if name in V1_EVENTS and not any(hasattr(base, name) for base in cls.__bases__):
        return f"`{V1_EVENTS[name]}`"
    half, _, rest = name.partition("_")
    if half not in ("before", "after") or name in EVENTS:
        return ""
    rests = [e.removeprefix(f"{half}_") for e in EVENTS if e.startswith(f"{half}_")]
    return ", ".join(f"`{half}_{near}`" for near in nearest(rest, rests, n=2))
