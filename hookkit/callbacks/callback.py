"""`Callback`: something to do at some of the events of training. A `CallbackRunner` calls it.

It is written to be inherited from: a subclass has a method for each event it needs, reads the
state of the run as its own attributes, and changes it through `self.learn`.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MethodType
from typing import Any, ClassVar

from hookkit.checks import kind_of, shown
from hookkit.errors import ArgumentError, HookkitWarning, OptionError, nearest
from hookkit.events import BATCH_EVENTS, EVENTS, not_an_event

# What the loop itself reads: a callback that sets one of these on itself means the learner's.
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
"""fastai v1's events, and those of today."""

_NOTICED = LOOP_STATE | frozenset(EVENTS) | {"order"}


class Owner:
    """The runner that a callback belongs to, held weakly. Copies and pickles have none."""

    __slots__ = ("get",)

    def __init__(self, runner: Any = None) -> None:
        weak = getattr(type(runner), "holds_callbacks", False)  # else a test's own object
        self.get: Callable[[], Any] = weakref.ref(runner) if weak else lambda: runner

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
        learn: the Learner (or watched loop) it belongs to, held weakly, since that holds the
            callback; None if there is none, or it no longer exists.
        run: False skips it until the end of the fit.
        run_train: whether it gets the events within a batch while training.
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
    _saved: ClassVar[tuple[str, ...]] = ()  # names of the attributes that `state_dict` has
    _last_step: int = 0  # steps that a recorder has seen: see `CallbackRunner._remember_step`
    _learn: Owner = Owner()

    def __init__(self, **events: Callable[[Any], object]) -> None:
        for event, f in events.items():
            if event not in EVENTS:
                raise OptionError(f"{type(self).__name__}({event}=…): {not_an_event(event)}")
            if not callable(f):
                raise ArgumentError(
                    f"{type(self).__name__}({event}={shown(f)}): expected a function, found "
                    f"{kind_of(f)}. Give a function of one argument, the callback."
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
        """The runner it belongs to, or None."""
        return self._learn.get()

    @learn.setter
    def learn(self, runner: Any) -> None:
        object.__setattr__(self, "_learn", Owner(runner))

    @property
    def name(self) -> str:
        """The class name in snake case, without a trailing `Callback`."""
        return _snake_case(type(self).__name__)

    def cleanup_fit(self) -> None:
        """Takes down what `before_fit` set up. Not an event: it is called however a fit has ended.

        Also if `before_fit` itself failed, so that there may be nothing to do.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of the callback: nothing, unless its class overrides this.

        Give tensors, numbers and text, in dicts, lists and tuples: `learn.save(…)` refuses others.
        """
        own = self.__getstate__() if self._saved else {}
        return {n: own[n] if n in own else getattr(type(self), n) for n in self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. `learn.fit(resume=…)` calls it after `before_fit`.

        Raises:
            OptionError: it is of another class, or damaged.
        """
        own = Callback.state_dict(self)
        if own.keys() != state.keys() or not all(_alike(own[name], state[name]) for name in own):
            raise OptionError(
                f"{type(self).__name__}.load_state_dict: the state is of another class. It has "
                f"{', '.join(state) or 'nothing'}; needed: {', '.join(own) or 'nothing'}."
            )
        vars(self).update(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_learn": Owner()}  # a copy has no runner

    def __call__(self, event: str) -> None:
        """Runs the method for `event`, if there is one and `run` (`run_train`, …) allows it."""
        f = _method(self, event)
        if f is not None and self.run and in_phase(self, event, getattr(self, "training", True)):
            f()

    def __getattr__(self, name: str) -> Any:
        # Python also calls this for a property that raises AttributeError: show its own error
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        own, learn, why = type(self).__name__, self.learn, ""
        if name in self._renamed:
            why = f", its name in fastai v1. Use `{self._renamed[name]}`."
        elif learn is None and not name.startswith("__"):
            why = (
                ", and the Learner or watched loop that could have it is not known yet, or no "
                "longer exists. Keep the Learner, or what watch(…) returned, and read it in a fit "
                "or later."
            )
        if why or learn is None or name.startswith("__"):
            raise AttributeError(f"{own} has no attribute {name!r}{why}", name=name, obj=self)
        try:
            return getattr(learn, name)
        except AttributeError as error:
            if _skips_init(type(self)):
                which = f"does not call super().__init__(…), which may set {name!r}"
                error.add_note(f"{own}.__init__ {which}")
            if near := nearest(name, [n for n in dir(type(self)) if n[0] != "_"]):
                error.add_note(f"nearest in {own}: {', '.join(near)}")
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NOTICED and self.learn is not None:
            self._notice(name)
        object.__setattr__(self, name, value)

    def _notice(self, name: str) -> None:
        if name not in LOOP_STATE:  # an event or the order: the runner's lists are stale
            self.learn._forget_order()
        elif not hasattr(type(self), name) and name not in vars(self):
            warnings.warn(
                f"{type(self).__name__} sets `self.{name}`: that is an attribute of the callback, "
                f"and the loop's `{name}` stays as it is. To change the loop's, set "
                f"`self.learn.{name}`.",
                HookkitWarning,
                stacklevel=4,
            )

    def __repr__(self) -> str:
        return type(self).__name__


def _alike(a: Any, b: Any) -> bool:
    return a is None or b is None or type(a) is type(b)


def _skips_init(cls: type[Callback]) -> bool:
    """Whether the class's `__init__` does not call that of its base, which is not `Callback`'s."""
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
    """The callback's own method for `event`; never the learner's or the model's."""
    if event in vars(cb) or hasattr(type(cb), event):
        f: Callable[[], object] = object.__getattribute__(cb, event)
        return f
    return None


def method_for(cb: Callback, event: str) -> Callable[[], object] | None:
    """What to call at `event`: the method, or for any event the class's own `__call__`."""
    own = type(cb).__call__ is not Callback.__call__
    return partial(cb, event) if own else _method(cb, event)


def in_phase(cb: Callback, event: str, training: bool) -> bool:
    """Whether `cb` gets `event` now: `run_train` and `run_valid` switch those within a batch."""
    return event not in BATCH_EVENTS or (cb.run_train if training else cb.run_valid)


def _near_events(cls: type, name: str) -> str:
    """The events that the method `name` was meant for; empty if it is one, or none is near.

    Compared without `before_` and `after_`, or everything that begins so would be near. A name of
    fastai v1 that another base of the class has is an event of that library.
    """
    if name in V1_EVENTS and not any(hasattr(base, name) for base in cls.__bases__):
        return f"`{V1_EVENTS[name]}`"
    half, _, rest = name.partition("_")
    if half not in ("before", "after") or name in EVENTS:
        return ""
    rests = [e.removeprefix(f"{half}_") for e in EVENTS if e.startswith(f"{half}_")]
    return ", ".join(f"`{half}_{near}`" for near in nearest(rest, rests, n=2))
