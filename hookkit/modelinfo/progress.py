"""`Progress`: a line on stderr that says how far a long run is, and is gone afterwards.

In terminals and notebooks, not in files and pipes. The text is tqdm's where that is installed; its
bar is not used, as it starts a thread that stays.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress

from hookkit.markup import in_notebook

_WAIT_S = 2.0  # a run shorter than this shows nothing
_PAUSE_S = 0.25  # between two drawings


class Progress:
    """How many of `n` modules or batches are done; a model may have more modules than it calls."""

    def __init__(self, n: int | None, unit: str = "modules") -> None:
        self._n, self._unit, self._drawn = n, unit, 0  # _drawn: the width of the line that is shown
        self._start = time.monotonic()
        self._next = self._start + _WAIT_S

    def called(self, n: int) -> None:
        """Draws the line for `n` of them, if it is time to. Cost: one look at the clock."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _PAUSE_S
        if in_notebook() or (sys.stderr is not None and sys.stderr.isatty()):
            width = shutil.get_terminal_size().columns - 1
            self._write(self._text(n, now - self._start, width)[:width])

    def close(self) -> None:
        """Removes the line."""
        if self._drawn:
            self._write("")

    def _text(self, n: int, elapsed_s: float, width: int) -> str:
        try:
            from tqdm import tqdm
        except ImportError:
            return f"{n} of {self._n or '?'} {self._unit}, {elapsed_s:.0f} s"
        coding = getattr(sys.stderr, "encoding", None) or ""
        text: str = tqdm.format_meter(
            n,
            self._n,
            elapsed_s,
            ncols=width,
            unit=f" {self._unit}",
            ascii=not coding.startswith("utf"),
        )
        return text

    def _write(self, text: str) -> None:
        line = "\r" + text.ljust(self._drawn) + ("" if text else "\r")
        self._drawn = len(text)
        with suppress(OSError, ValueError):  # a terminal that was closed: the summary goes on
            sys.stderr.write(line)
            sys.stderr.flush()
