"""When the machine code of `loops.py` is loaded: once it pays, and without the training's notice.

numba is imported on a thread of its own, which the reader waits for. There no Ctrl-C leaves half a
numba behind, which nobody could import again, and none of PyTorch's modes, numpy's error state or a
debugger that the training has set is in force.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hookkit.errors import HookkitWarning

WORTH = 1 << 28
# Values read after which machine code is loaded (0.5 s; compiled first, 2 s, once a machine): numpy
# has taken 0.15 s for them, so a toy never waits, and a training of size has it within seconds.


class Machine:
    """The compiled loops, once they pay.

    Attributes:
        found: the module `loops`; None so far, or without numba.
        left: values to be read until it is looked for.
    """

    def __init__(self) -> None:
        self.found: Any = None
        self.left: float = WORTH

    def after(self, n: int) -> Any:
        """The module `loops`, after `n` values more; None so far, or without numba."""
        if self.found is None and self.left > 0:
            self.left -= n
            if self.left <= 0:
                self._load()
        return self.found

    def _load(self) -> None:
        told: list[str] = []
        loader = threading.Thread(target=self._find, args=(told,), name="hookkit loads numba")
        loader.start()
        loader.join()  # an interrupt ends the wait, not the loading
        for text in told:
            warnings.warn(f"{text} Update it: pip install -U numba", HookkitWarning, stacklevel=2)

    def _find(self, told: list[str]) -> None:
        try:
            if importlib.util.find_spec("numba") is None:
                return
            with _quiet():
                import numba

                if not numba.config.DISABLE_JIT:  # somebody debugs: these would be loops of Python
                    from hookkit.moments import loops

                    self.found = loops
        except Exception as e:  # what is slower is no reason to end a training
            text = f"numba does not work here ({type(e).__name__}: {e}), so numpy goes on in its"
            told.append(f"{text} place.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Where everything is logged, numba would tell of its compiling in 20,000 lines."""
    log = logging.getLogger("numba")
    if log.level != logging.NOTSET:  # somebody wants to know
        yield
        return
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)


machine = Machine()
