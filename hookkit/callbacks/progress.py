"""`ProgressCallback`: a bar over the batches, and a table with a row for each epoch.

In a terminal the bar is tqdm's. In a notebook bar and table are one output that is redrawn; at the
end it is the table alone, and no widget has to be installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from hookkit.callbacks.callback import Callback
from hookkit.data import n_batches
from hookkit.errors import missing_extra
from hookkit.markup import fragment, table

_PAUSE_S = 0.25  # between two readings of the loss, and between two drawings in a notebook


class ProgressCallback(Callback):
    """A bar over the batches, and a table with a row per epoch in place of the plain log.

    The bar is shown in terminals and notebooks, not in files and pipes; the table everywhere.
    The loss beside the bar is read from the device four times a second at most.

    Raises:
        MissingExtraError: tqdm is not installed.
    """

    order = 60
    _screen: Any = None
    _logger: Any = None
    _shown = 0.0

    def __init__(self) -> None:
        try:
            import tqdm  # noqa: F401
        except ImportError:
            raise missing_extra("tqdm", "progress", "show a progress bar") from None

    def before_fit(self) -> None:
        """Takes over the log, if it is the plain one."""
        self._screen = _Notebook() if in_notebook() else _Terminal()
        if self.learn.fitting and self.learn.logger is print:
            self._logger, self.learn.logger = print, self._write

    def before_train(self) -> None:
        """Opens the bar."""
        self._open("train")

    def before_validate(self) -> None:
        """Opens the bar."""
        self._open("valid")

    def after_batch(self) -> None:
        """Moves the bar on."""
        note, now = None, time.monotonic()
        if self.learn.training and now - self._shown > _PAUSE_S:
            self._shown, loss = now, self.learn.smooth_loss  # sync: by the clock, not by the batch
            note = "" if loss is None else f"loss {loss:.4f}"
        if self._screen is not None and not self._inside():
            self._screen.step(note)

    def after_train(self) -> None:
        """Closes the bar."""
        self._close()

    def after_validate(self) -> None:
        """Closes the bar."""
        self._close()

    def cleanup_fit(self) -> None:
        """Closes the bar, restores the log."""
        self._close()
        self._screen = None
        if self._logger is not None:
            self.learn.logger, self._logger = self._logger, None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_screen": None}  # an open bar writes to a terminal

    def _open(self, part: str) -> None:
        learn, self._shown = self.learn, 0.0
        epoch = f"epoch {learn.epoch + 1}/{learn.n_epoch} " if learn.fitting else ""
        if self._screen is not None and not self._inside():
            self._screen.open(epoch + part, n_batches(learn.dl))

    def _close(self) -> None:
        if self._screen is not None and not self._inside():
            self._screen.close()

    def _inside(self) -> bool:
        """Whether this is a validation that a callback runs during a fit: the bar is the fit's."""
        return bool(self.learn.fitting and self.learn.eval_pass)

    def _write(self, log: Sequence[Any]) -> None:
        names = self.learn.recorder.metric_names
        self._screen.row(names, [_cell(v) for v in log])


class _Terminal:
    """tqdm's bar on stderr, if that is a terminal; the table on stdout."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._begun = False

    def open(self, what: str, total: int | None) -> None:
        from tqdm import tqdm

        self.close()
        shown = sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(desc=what, total=total, leave=False, disable=not shown)

    def step(self, note: str | None) -> None:
        if self._bar is not None:
            if note is not None:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def row(self, names: Sequence[str], cells: Sequence[str]) -> None:
        from tqdm import tqdm

        widths = [max(len(name), 8) for name in names]
        for row in [cells] if self._begun else [names, cells]:
            padded = (f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True))
            tqdm.write("  ".join(padded), file=sys.stdout)
        self._begun = True


class _Notebook:
    """One output with the bar and the table, redrawn as they change."""

    def __init__(self) -> None:
        self._rows: list[Sequence[str]] = []
        self._bar, self._handle = "", None  # type: tuple[str, Any]
        self._n, self._drawn, self._note = 0, 0.0, ""

    def open(self, what: str, total: int | None) -> None:
        self._what, self._total, self._n, self._note = what, total, 0, ""
        self._draw_bar()

    def step(self, note: str | None) -> None:
        self._n += 1
        self._note = self._note if note is None else note
        if time.monotonic() - self._drawn > _PAUSE_S:
            self._draw_bar()

    def close(self) -> None:
        if self._bar:
            self._bar = ""
            self._draw()

    def row(self, names: Sequence[str], cells: Sequence[str]) -> None:
        self._rows += [cells] if self._rows else [names, cells]
        self._draw()

    def _draw_bar(self) -> None:
        share = f' value="{self._n}" max="{self._total}"' if self._total else ""
        count = f"{self._n}/{self._total or '?'}"
        self._bar = f"<div>{self._what} <progress{share}></progress> {count} {self._note}</div>"
        self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        self._drawn = time.monotonic()
        html = self._bar + (table("", self._rows[0], self._rows[1:]) if self._rows else "")
        text = "\n".join("  ".join(f"{cell:>10}" for cell in row) for row in self._rows)
        data = {"text/html": fragment(html), "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config
