"""Where a run is shown while it trains: in a notebook, in a terminal, or as lines.

    Notebook   one output, redrawn: the picture if matplotlib is there, and the findings
    Terminal   a block of a few lines, redrawn below whatever else is printed
    Lines      findings alone: in files and pipes nothing can be redrawn

Builds on `markup`, `texts` and `plotting`. IPython and matplotlib are imported where they are used.
"""

from __future__ import annotations

import os
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from threading import get_ident
from typing import Any

from hookkit.health import Diagnosis
from hookkit.interrupts import uninterrupted
from hookkit.live.glance import ASCII_BLOCKS, BLOCKS
from hookkit.markup import fragment, in_notebook
from hookkit.records import Run
from hookkit.texts import clip, harmless


class Lines:
    """Findings as lines on stderr; the base of the others.

    Attributes:
        draws: whether it shows pictures.
        blocks: characters for bars that it can show.
    """

    draws = False
    blocks = BLOCKS

    def open(self) -> None:
        """The training begins. `close` undoes it, also if it is interrupted."""

    def tell(self, line: str) -> None:
        """Prints a line that stays, above the bars of tqdm if there are any."""
        _print(line, sys.stderr)

    def show(self, lines: Sequence[str], found: Diagnosis) -> None:
        """Shows how the run is now.

        Args:
            lines: how far it is, a line for each record, the verdict.
            found: what is clear by now.
        """

    def draw(self, run: Run, found: Diagnosis) -> None:
        """Draws a picture of the run, if `draws`."""

    def close(self) -> None:
        """What is shown last stays."""


class Notebook(Lines):
    """One output of a cell, redrawn: the first line, the picture or the other lines, findings."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lines: Sequence[str] = ()
        self._found: Diagnosis | tuple[()] = ()
        self._picture = b""
        try:
            import hookkit.plotting  # noqa: F401  a second, which the training must not wait for
        except ImportError:
            return
        self.draws = True

    def tell(self, line: str) -> None:
        """Does nothing: findings stand below the picture."""

    def show(self, lines: Sequence[str], found: Diagnosis) -> None:
        """Redraws the output."""
        self._lines, self._found = lines, found
        self._update()

    def draw(self, run: Run, found: Diagnosis) -> None:
        """Draws the picture anew."""
        from hookkit.plotting import offscreen, plot_run, png

        with offscreen():
            self._picture = png(plot_run(run, findings=found.findings))
        self._update()

    def _update(self) -> None:
        from IPython.display import display

        text = "\n".join([*self._lines, *map(str, self._found)])
        data = {"text/html": self._html(), "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def _html(self) -> str:
        first, *rest, verdict = self._lines
        if self._picture:
            source = f"data:image/png;base64,{b64encode(self._picture).decode()}"
            body = f'<img src="{source}" alt="the run at a glance" style="max-width:100%">'
        else:
            body = f"<pre>{escape(chr(10).join(rest))}</pre>"
        html = fragment(f"<p>{escape(first)}</p>{body}")
        return html + (self._found._repr_html_() if self._found else f"<p>{escape(verdict)}</p>")


class Terminal(Lines):
    """A block of lines at the end of what a terminal shows.

    To redraw it the cursor goes up by its lines, so it must be the last thing on the screen. While
    it may be, `write` of sys.stdout and sys.stderr is wrapped where they are terminals: whatever
    Python prints first erases the block, and the next look draws it below. The streams themselves
    are not replaced (as `rich` does), so that loggers and bars which hold them are noticed too.
    While a line is open, as that of a progress bar, no block is drawn.
    """

    def __init__(self, stream: Any) -> None:
        self._write: Callable[[str], object] = stream.write
        self._stream, self._process = stream, os.getpid()
        self._n, self._line = 0, ""  # lines of the block; what others left of a line: `_rest`
        self._writers: set[int] = set()  # threads that are about to print, or just do
        self._wrapped: list[tuple[Any, Any, Any]] = []  # stream, our `write`, the one before
        coding = str(getattr(stream, "encoding", None) or "").lower()
        self.blocks = BLOCKS if coding.startswith("utf") else ASCII_BLOCKS

    def open(self) -> None:
        """Begins to notice what others print."""
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):  # some are replaced
            if hasattr(stream, "__dict__") and not getattr(stream, "closed", False):
                self._wrap(stream)

    def _wrap(self, stream: Any) -> None:
        if any(stream is known for known, _, _ in self._wrapped) or not _is_terminal(stream):
            return
        write = stream.write

        def noticed(text: str) -> Any:
            try:
                self._writers.add(get_ident())
                self._make_way(text)
                return write(text)
            finally:
                self._writers.discard(get_ident())

        self._wrapped.append((stream, noticed, vars(stream).get("write")))
        vars(stream)["write"] = noticed

    @uninterrupted
    def close(self) -> None:
        """The block stays, and is erased no more."""
        self._n = 0
        while self._wrapped:
            stream, ours, before = self._wrapped.pop()
            if vars(stream).get("write") is not ours:
                continue  # somebody has wrapped it since: ours does nothing any more
            if before is None:
                del vars(stream)["write"]
            else:
                vars(stream)["write"] = before

    def tell(self, line: str) -> None:
        """Prints a line above the block."""
        self._erase()
        _print("\n" * (self._line != "" and not _bars()) + line, self._stream)

    def show(self, lines: Sequence[str], found: Diagnosis) -> None:
        """Redraws the block, unless somebody's line is open, such as that of a bar."""
        columns = _columns(self._stream)
        texts = [clip(_plain(line, self._stream), columns - 1) for line in lines]
        below = "\x1b[J" + "".join(f"{text}\n" for text in texts)
        # Something that was not noticed may have left a line open: with a full line of spaces the
        # cursor comes to the next one, and stays where it is if it was at the beginning of a line.
        first = " " * columns + "\r"
        # A bar may be older than this, and its `write` not wrapped.
        if self._line or self._writers or _bars():
            return
        start = f"\r\x1b[{self._n}A" if self._n else first
        self._n = len(texts)
        self._write(start + below)
        self._stream.flush()

    def _make_way(self, text: str) -> None:
        """Something else is written: below what was there before the block."""
        if not text or os.getpid() != self._process:  # a worker's, forked since
            return
        self._line = _rest(self._line + text)
        with suppress(OSError, ValueError):  # the terminal is gone, and not what is printed to
            self._erase()

    def _erase(self) -> None:
        n, self._n = self._n, 0
        if n:
            self._write(f"\r\x1b[{n}A\x1b[J")
            self._stream.flush()


def screen() -> Lines:
    """The one that fits where this runs."""
    if in_notebook():
        return Notebook()
    for stream in (sys.stderr, sys.stdout):
        if _is_terminal(stream) and os.environ.get("TERM") != "dumb":
            return Terminal(stream)
    return Lines()


def _is_terminal(stream: Any) -> bool:
    isatty = getattr(stream, "isatty", None)  # what replaces sys.stdout, to log it, may have none
    return isatty is not None and bool(isatty())


def _columns(stream: Any) -> int:
    """Of this terminal: `shutil` asks stdout, which may be a file."""
    with suppress(OSError, ValueError, AttributeError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _rest(text: str) -> str:
    """What `text` leaves in its last line, in short; "" if nothing, with the cursor at its start.

    >>> _rest("a\\n"), _rest("\\rstep 5"), _rest("step 5\\r"), _rest("step 5\\r      \\r")
    ('', 'x', 'x\\r', '')
    """
    line = text.rpartition("\n")[2]
    shown = next((part for part in reversed(line.split("\r")) if part), "")
    at_start = line.endswith("\r")
    if shown.strip():
        return "x\r" if at_start else "x"
    return "" if at_start or not shown else " "


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
