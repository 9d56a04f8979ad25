"""Ctrl-C: whatever hookkit has changed is restored, whenever the interrupt comes.

Python raises KeyboardInterrupt where it next looks for signals: as a function begins, after a call,
when a loop starts its next turn. Three rules keep hooks, switches and modules from staying behind:

1. A change is noted before it is made, and undoing it can be repeated. So a constructor or an
   `__enter__` needs only `try: … except BaseException: undo; raise`.
2. An `__exit__` needs more: Python looks for signals as it begins, before any `try` inside it. So
   an open block has a `Guard`: a SIGINT handler that passes a Ctrl-C on to the user's handler at
   once, unless a function marked `uninterrupted` is running, which then ends first.
3. A second Ctrl-C is never delayed, so a process that hangs need not be killed.

There is a guard in the main thread only, which alone gets signals, and where the handler is a
Python function. It is removed with the last block, unless other code has set a handler since.

    Guard              the handler of one open block; the others are built on it
    uninterrupted      a function that ends before a Ctrl-C is raised: registering, removing
    interruptible      user code inside such a function: a Ctrl-C is raised at once
    Undo               `with` around many undo steps (as contextlib.ExitStack)
    block              `with` from a generator       (as contextlib.contextmanager)
"""

from __future__ import annotations

import sys

# The C functions behind `signal.signal` and `signal.getsignal`, whose enum conversions cost 8 µs a
# call against 0.7. CPython's own `signal` module is made of them since 3.5.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from signal import SIGINT
from threading import get_ident, main_thread
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_NUMBER = int(SIGINT)
# The one thread that gets signals. A child that another thread has forked has no guard.
_MAIN = main_thread().ident


class _Handler:
    """The SIGINT handler of open guards: passes a Ctrl-C on to `users` now, or afterwards."""

    users: Callable[[int, FrameType | None], Any]
    n_guards = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _delayed
        if _delayed is None and _is_uninterrupted(frame):
            _delayed = self
        else:
            self.users(number, frame)


# The handler that has delayed a Ctrl-C. Only the main thread reads and writes it.
_delayed: _Handler | None = None


class Guard:
    """The SIGINT handler of a block, from `begin` to `end`; both can be repeated."""

    _handler: _Handler | None = None

    def __reduce__(self) -> Any:
        return Guard, ()  # of a copy, whose block is not open

    def begin(self) -> None:
        """Sets the handler, where a KeyboardInterrupt can come. Cost: 1.5 µs."""
        if self._handler is not None or get_ident() != _MAIN:
            return
        users = getsignal(_NUMBER)
        new = None
        if type(users) is not _Handler:
            if not callable(users):
                return  # SIGINT is ignored, or its handler is no Python function
            new = _Handler()
            new.users = users
        # There is no call between these three: no signal comes in between.
        self._handler = handler = new or users
        handler.n_guards += 1
        if new is not None:
            signal(_NUMBER, new)

    def end(self) -> None:
        """Restores the user's handler if this was the last guard and there is no newer handler."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        handler.n_guards -= 1
        # A block that ends in another thread cannot restore it; this one passes every Ctrl-C on.
        if not handler.n_guards and getsignal(_NUMBER) is handler and get_ident() == _MAIN:
            signal(_NUMBER, handler.users)

    def __del__(self) -> None:
        if self._handler is not None:  # the block was abandoned
            self.end()


def uninterrupted(f: Callable[P, T]) -> Callable[P, T]:
    """`f`, in which no Ctrl-C is raised: it is raised right after `f`.

    For the few microseconds of registering and removing; user code inside is `interruptible`.

    >>> @uninterrupted
    ... def both(a: list[int], b: list[int]) -> None:
    ...     a.append(1)
    ...     b.append(1)
    >>> both(a := [], b := []); a == b
    True
    """
    global _uninterrupted_code

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        guard = Guard()
        try:
            guard.begin()
            return f(*args, **kwargs)
        finally:
            guard.end()
            if _delayed is not None:
                _raise_delayed(sys._getframe().f_back)

    _uninterrupted_code = run.__code__  # one object, whatever `f` is
    return wraps(f)(run)


def interruptible(f: Callable[P, T]) -> Callable[P, T]:
    """`f`, in which Ctrl-C is raised at once, also when an `uninterrupted` function calls it."""
    global _interruptible_code

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        _raise_delayed(sys._getframe())
        return f(*args, **kwargs)

    _interruptible_code = run.__code__
    return wraps(f)(run)


_uninterrupted_code: CodeType | None = None
_interruptible_code: CodeType | None = None


def _is_uninterrupted(frame: FrameType | None) -> bool:
    """Whether the innermost marked function around `frame` is an uninterrupted one."""
    while frame is not None:
        if frame.f_code is _uninterrupted_code:
            return True
        if frame.f_code is _interruptible_code:
            return False
        frame = frame.f_back
    return False


def _raise_delayed(frame: FrameType | None) -> None:
    """Passes a delayed Ctrl-C on to the user's handler, unless `frame` must end first."""
    global _delayed
    if _delayed is None or get_ident() != _MAIN or _is_uninterrupted(frame):
        return
    handler, _delayed = _delayed, None
    handler.users(_NUMBER, frame)


# `_Block` and `Undo` each spell out `__enter__`. With a common one that they call, Python would
# look for signals once more, after the block has begun and before the `with` holds it.


class Undo:
    """A `with` block at whose end its callbacks all run, the last first, whenever Ctrl-C comes.

    Before each change call `callback` with what undoes it.

    >>> with Undo() as undo:
    ...     _ = undo.callback(print, "undone")
    ...     print("done")
    done
    undone
    """

    def __init__(self) -> None:
        self._guard, self._stack = Guard(), ExitStack()
        self.callback = self._stack.callback

    def __enter__(self) -> Self:
        try:
            self._guard.begin()
        except BaseException:
            self._guard.end()
            raise
        return self

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        try:
            self._stack.close()
        finally:
            self._guard.end()

    @uninterrupted
    def enter_context(self, cm: AbstractContextManager[T, Any]) -> T:
        """Enters `cm`, to be exited at the end: a Ctrl-C in between is raised afterwards."""
        return self._stack.enter_context(cm)


def block(f: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T, bool | None]]:
    """`contextlib.contextmanager` for a generator whose `finally` no Ctrl-C can cut short.

    >>> @block
    ... def opened():
    ...     try:
    ...         yield print("open")
    ...     finally:
    ...         print("closed")
    >>> with opened():
    ...     print("inside")
    open
    inside
    closed
    """
    make = contextmanager(f)

    @wraps(f)
    def made(*args: P.args, **kwargs: P.kwargs) -> _Block[T]:
        return _Block(make(*args, **kwargs))

    return made


class _Block(AbstractContextManager[T, bool | None]):
    """The `with` block of a generator."""

    def __init__(self, made: Any) -> None:
        self._made, self._guard = made, Guard()

    def __enter__(self) -> T:
        try:
            self._guard.begin()
            value: T = self._made.__enter__()
        except BaseException:
            self._made.gen.close()  # after an interrupt behind the `yield` this runs its `finally`
            self._guard.end()
            raise
        return value

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        try:
            swallowed: bool | None = self._made.__exit__(kind, e, tb)
            if swallowed and e is not None:
                # Since Python 3.12 the generator's frame in the traceback keeps its callers, one of
                # which has `e`: a cycle that would hold all tensors of the model's frames.
                e.__traceback__ = None
            return swallowed
        finally:
            self._guard.end()
