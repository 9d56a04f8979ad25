"""What a callback sees as `self.learn` when a watched loop is over: the loop, not kept alive.

A recorder is read long after: it must not hold the model, its optimizer and its compiled graphs.
The Watcher holds them, and while somebody keeps it, nothing has changed for the callback.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from hookkit.callbacks.driving import Driver


class Past:
    """A loop that is over, held weakly: its attributes, as long as its Watcher is kept.

    >>> loop = Driver()
    >>> past = Past(loop)
    >>> loop.n_steps = 3; past.n_steps
    3
    >>> del loop; past.fitting
    False
    >>> hasattr(past, "n_steps")
    False
    """

    fitting = training = _broken = False

    def __init__(self, loop: Driver) -> None:
        self._loop = ref(loop)

    def __getattr__(self, name: str) -> Any:
        loop = self._loop()
        if loop is not None:
            return getattr(loop, name)
        raise AttributeError(
            f"{name!r} was asked of a watched loop that is over and gone. "
            f"Keep what watch(…) returned to read it.",
            name=name,
            obj=self,
        )

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy or a pickle of the callback belongs to nobody

    def _forget_order(self) -> None:
        """Somebody sets a callback's `order`, or one of its events."""
        loop = self._loop()
        if loop is not None:
            loop._forget_order()
