"""Loads `numba_kernels`, once in a process, when a watch or a fit begins.

Never in the middle of a run: the last digits of sums would change with the way of computing.
numba is imported on a thread of its own, which the caller waits for: a Ctrl-C there would leave a
half-imported numba that cannot be imported again, and PyTorch's modes, numpy's error state and a
debugger that the training has set apply to its own thread only.
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
    """The compiled loops: `found` is `numba_kernels`, None before `load` or where it fails."""

    def __init__(self) -> None:
        self.found: Any = None
        self._loader: threading.Thread | None = None
        self._problems: list[str] = []

    def load(self) -> None:
        """Loads them, if numba is installed: 0.5 s, or some seconds if they have to be compiled."""
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

                if not numba.config.DISABLE_JIT:  # for debugging: these would be loops of Python
                    from hookkit.moments import numba_kernels

                    self.found = numba_kernels
        except Exception as e:  # slower reading is no reason to end a training
            problem = f"{type(e).__name__}: {e}"
            self._problems.append(f"numba does not work here ({problem}), so numpy reads instead.")


_LOG = logging.getLogger("numba")


@block
def _quiet() -> Iterator[None]:
    """Keeps numba from logging its compilation, 20,000 lines where all levels are logged."""
    log = _LOG
    if log.level != logging.NOTSET:  # the user has set it
        yield
        return
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)


machine = Machine()
