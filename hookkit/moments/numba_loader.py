"""Loads the machine code of `loops.py`, once in a process, when a watch or a fit begins.

So one run has one way of computing: were it to change during a run, the last digits of what is
summed up would change with it. numba is imported on a thread of its own, which the reader waits
for. There no Ctrl-C leaves half a numba behind, which nobody could import again, and none of
PyTorch's modes, numpy's error state or a debugger that the training has set is in force.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from hookkit.errors import HookkitWarning
from hookkit.interrupts import block


class Machine:
    """The compiled loops, once they are loaded.

    Attributes:
        found: the module `loops`; None before `load`, or where numba does not serve.
    """

    def __init__(self) -> None:
        self.found: Any = None
        self._loader: threading.Thread | None = None
        self._problems: list[str] = []

    def load(self) -> None:
        """Loads them, where numba is installed: 0.5 s once in a process, then nothing.

        On a machine that has not compiled them yet it takes some seconds.
        """
        if self._loader is None:
            loader = threading.Thread(target=self._find, name="hookkit loads numba")
            loader.start()
            self._loader = loader
        self._loader.join()  # an interrupt ends the wait, not the loading
        while self._problems:
            text = self._problems.pop()
            warnings.warn(f"{text} Update it: pip install -U numba", HookkitWarning, stacklevel=2)

    def _find(self) -> None:
        try:
            if importlib.util.find_spec("numba") is None:
                return
            with _quiet():
                import numba

                if not numba.config.DISABLE_JIT:  # somebody debugs: these would be loops of Python
                    from hookkit.moments import numba_kernels

                    self.found = numba_kernels
        except Exception as e:  # what is slower is no reason to end a training
            problem = f"{type(e).__name__}: {e}"
            self._problems.append(f"numba does not work here ({problem}), so numpy reads instead.")


_LOG = logging.getLogger("numba")


@block
def _quiet() -> Iterator[None]:
    """Where everything is logged, numba would log its compiling in 20,000 lines."""
    log = _LOG
    if log.level != logging.NOTSET:  # somebody wants to know
        yield
        return
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)


machine = Machine()
