# Until the other rooms use contextlib: the names by which they undo what they change.
"""`block` is `contextlib.contextmanager`, `Undo` is `contextlib.ExitStack`; the rest does nothing.

Whatever hookkit has changed is restored in a `finally`.
"""

from collections.abc import Callable
from contextlib import ExitStack as Undo
from contextlib import contextmanager as block
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

__all__ = ["Guard", "Undo", "block", "interruptible", "uninterrupted"]


def uninterrupted(f: F) -> F:
    """`f` itself."""
    return f


def interruptible(f: Callable[..., object]) -> Callable[..., object]:
    """`f` itself."""
    return f


class Guard:
    """Does nothing."""

    def begin(self) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""
