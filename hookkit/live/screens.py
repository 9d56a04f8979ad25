"""Where a run is shown while it trains: in a notebook, in a terminal, or as lines.

    Notebook   one output, redrawn: the picture if matplotlib is there, and the findings
    Terminal   a block of a few lines at the bottom, below whatever else is printed
    Lines      findings alone: in files and pipes nothing can be redrawn

Builds on `markup`, `texts` and `plotting`. IPython and matplotlib are imported where they are used.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from importlib.util import find_spec
from threading import Lock
from typing import Any

from hookkit.health import Diagnosis
from hookkit.interrupts import uninterrupted
from hookkit.markup import Output, fragment, in_notebook
from hookkit.records import Run
from hookkit.texts import clip, harmless

SAVE, RESTORE = "\x1b7", "\x1b8"  # of the cursor
LEAST_ROWS = 4  # that a terminal keeps beside a block


class Lines:
    """Findings as lines on stderr; the base of the others. `draws` says if it shows pictures."""

    draws = False

    def print_line(self, line: str) -> None:
        """Prints a line that stays, above the bars of tqdm if there are any."""
        _print(line, sys.stderr)

    def show(self, lines: Sequence[str], found: Diagnosis) -> None:
        """Shows how the run is now: `lines`, of which the last is the verdict; what is clear."""

    def draw(self, run: Run, found: Diagnosis) -> None:
        """Draws a picture of the run, if `draws`."""

    def close(self) -> None:
        """What is shown last stays."""


class Notebook(Lines):
    """One output of a cell, redrawn: the first line, the picture or the other lines, findings."""

    def __init__(self) -> None:
        self._output = Output()
        self._lines: Sequence[str] = ()
        self._found: Diagnosis | tuple[()] = ()
        self._picture = ""
        self.draws = find_spec("matplotlib") is not None  # imported by the first picture

    def print_line(self, line: str) -> None:
        """Does nothing: findings stand below the picture."""

    def show(self, lines: Sequence[str], found: Diagnosis) -> None:
        """Redraws the output."""
        self._lines, self._found = lines, found
        self._update()

    def draw(self, run: Run, found: Diagnosis) -> None:
        """Draws the picture anew."""
        from hookkit.plotting import offscreen, plot_run
        from hookkit.plotting.svg import svg

        with offscreen():
            alt = "Layer by step heat-maps of the run. " + "; ".join(self._lines)
            self._picture = svg(plot_run(run, findings=found.findings), alt, 100)
        self._update()

    def _update(self) -> None:
        self._output.show(self._html(), "\n".join([*self._lines, *map(str, self._found)]))

    def _html(self) -> str:
        first, *rest, verdict = self._lines
        body = self._picture or f"<pre>{escape(chr(10).join(rest))}</pre>"
        body += "<style>.hk svg{max-width:100%;height:auto}</style>"
        html = fragment(f"<p>{escape(first)}</p>{body}")
        return html + (self._found._repr_html_() if self._found else f"<p>{escape(verdict)}</p>")


class Terminal(Lines):
    """A block of lines at the bottom of a terminal; whatever is printed scrolls above it.

    The last rows are taken out of the region that scrolls (DECSTBM, of the VT100; apt shows its
    progress so). So the lines of bars, threads, loggers and other processes go where they would
    have gone; a block redrawn from the cursor up is right only if nobody has printed since.
    """

    _one = Lock()  # a terminal has one region: held while a block is shown

    def __init__(self, stream: Any) -> None:
        self._stream, self._is_mine = stream, False
        self._rows, self._texts = 0, list[str]()  # of the terminal, as the block was drawn

    def print_line(self, line: str) -> None:
        """Prints a line above the block, in a row of its own."""
        if not _bars():
            # An open line ends: a row of spaces wraps, unless the cursor is where a row begins.
            self._stream.write(" " * _size(self._stream)[0] + "\r")
        super().print_line(line)

    def show(self, lines: Sequence[str], found: Diagnosis) -> None:
        """Redraws the block, if there is room for it, and no other one."""
        columns, rows = _size(self._stream)
        n = len(lines)
        self._is_mine = self._is_mine or self._one.acquire(blocking=False)
        if not self._is_mine or rows < n + LEAST_ROWS:
            return
        texts = [clip(_plain(line, self._stream), columns - 1) for line in lines]
        drawn = "".join(f"\x1b[{rows - n + i};1H\x1b[2K{t}" for i, t in enumerate(texts, 1))
        room = ""
        if (self._rows, len(self._texts)) != (rows, n):
            atexit.register(self.close)  # also if nobody ends the loop
            down_and_up = "\x1bD" * n + f"\x1b[{n}A"  # \n would go to the first column
            room = f"{self._without(rows)}{down_and_up}{SAVE}\x1b[1;{rows - n}r{RESTORE}"
        self._rows, self._texts = rows, texts  # before it is drawn: Ctrl-C may come in between
        self._stream.write(room + SAVE + drawn + RESTORE)
        self._stream.flush()

    def _without(self, rows: int) -> str:
        """What erases the block and lets all `rows` scroll; the cursor stays."""
        known = self._texts and rows == self._rows  # else the block has moved, who knows where
        erased = f"\x1b[{rows - len(self._texts) + 1};1H\x1b[J" if known else ""
        return f"{SAVE}\x1b[r{erased}{RESTORE}"

    @uninterrupted
    def close(self) -> None:
        """The block goes to where the next line would, and stays there; all scrolls again."""
        atexit.unregister(self.close)
        with suppress(OSError, ValueError):  # the terminal is gone
            if self._texts:
                below = "" if _bars() else "\x1bD\r"  # whatever is in this row stays
                self._stream.write(self._without(_size(self._stream)[1]) + below)
            for text in self._texts:
                _print(text, self._stream)
        self._texts = []
        if self._is_mine:
            self._is_mine = False
            self._one.release()


def screen() -> Lines:
    """The one that fits where this runs."""
    if in_notebook():
        return Notebook()
    for stream in (sys.stderr, sys.stdout):
        isatty = getattr(stream, "isatty", bool)  # what replaces sys.stdout, to log it, may lack it
        if isatty() and os.environ.get("TERM") != "dumb":
            return Terminal(stream)
    return Lines()


def _size(stream: Any) -> tuple[int, int]:
    """Columns and rows of this terminal: `shutil` asks stdout, which may be a file."""
    with suppress(OSError, ValueError, AttributeError):
        columns, rows = os.get_terminal_size(stream.fileno())
        if columns and rows:
            return columns, rows
    return shutil.get_terminal_size()


def _print(line: str, stream: Any) -> None:
    if stream is None:
        return
    line = _plain(line, stream)
    if bars := _bars():
        bars.write(line, file=stream)
        return
    stream.write(f"{line}\n")
    stream.flush()


def _bars() -> Any:
    """The class of tqdm's bars, if one is shown."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    # Private: `tqdm._instances`, the bars that are open (since 2.0; `tqdm.write` reads it too).
    # Without it a line is printed behind a bar.
    return tqdm if getattr(tqdm, "_instances", None) else None


def _plain(line: str, stream: Any) -> str:
    """`line` without what controls a terminal, and in characters that the stream can write."""
    coding = getattr(stream, "encoding", None) or "utf-8"
    start = line[: len(line) - len(line.lstrip("\n"))]
    return start + harmless(line.lstrip("\n"), 600).encode(coding, "replace").decode(coding)
