"""`ProgressCallback`: a bar over the batches, and a table with a row for each epoch.

The bar is tqdm's. In a notebook bar and table are one output that is redrawn; at the end it is the
table alone, and no widget has to be installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.data import n_batches
from hookkit.errors import missing_extra
from hookkit.markup import Output, fragment, in_notebook, table

_PAUSE_S = 0.25  # between two readings of the loss, and between two drawings of the bar


class ProgressCallback(Callback):
    """A bar over the batches, and a table with a row per epoch in place of the plain log.

    The bar is shown in terminals and notebooks, not in files and pipes; the table everywhere.
    Of several processes the first one shows both.
    The loss beside the bar is read from the device four times a second at most.

    Raises:
        MissingExtraError: tqdm is not installed.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=ProgressCallback)
    >>> learn.fit(1)  # doctest: +ELLIPSIS
       epoch ...train_loss...
    """

    order = 60
    _bar: Any = None
    _cell: _Cell | None = None  # in a notebook
    _rows: Sequence[Sequence[str]] = ()
    _logger: Any = None
    _read_at = 0.0

    def __init__(self) -> None:
        try:
            import tqdm  # noqa: F401
        except ImportError:
            raise missing_extra("tqdm", "progress", "show a progress bar") from None

    def before_fit(self) -> None:
        """Takes over the log, if it is the plain one."""
        self._cell, self._rows = _Cell() if in_notebook() else None, []
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
        if self._bar is None or self._inside():
            return
        now = time.monotonic()
        if self.learn.training and now - self._read_at > _PAUSE_S:
            self._read_at, loss = now, self.learn.smooth_loss  # sync: by the clock, not by batch
            self._bar.set_postfix_str("" if loss is None else f"loss {loss:.4f}", refresh=False)
        self._bar.update()

    def after_train(self) -> None:
        """Closes the bar."""
        self._close()

    after_validate = after_train

    def cleanup_fit(self) -> None:
        """Closes the bar, restores the log."""
        self._close()
        self._cell = None
        if self._logger is not None:
            self.learn.logger, self._logger = self._logger, None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bar": None, "_cell": None}  # an open bar is no value

    def _open(self, part: str) -> None:
        from tqdm import tqdm

        if self._inside() or ranks.rank():
            return  # of several processes the first one shows a bar
        self._close()
        learn, self._read_at = self.learn, 0.0
        what = f"epoch {learn.epoch + 1}/{learn.n_epoch} {part}" if learn.fitting else part
        shown = self._cell is not None or (sys.stderr is not None and sys.stderr.isatty())
        self._bar = tqdm(
            desc=what,
            total=n_batches(learn.dl),
            leave=False,
            file=self._cell,
            mininterval=_PAUSE_S,
            disable=not shown,
        )

    def _close(self) -> None:
        if self._bar is not None and not self._inside():
            self._bar.close()
            self._bar = None

    def _inside(self) -> bool:
        """Whether this is a validation that a callback runs during a fit: the bar is the fit's."""
        return bool(self.learn.fitting and self.learn.eval_pass)

    def _write(self, log: Sequence[Any]) -> None:
        from tqdm import tqdm

        names = self.learn.recorder.metric_names
        new = [*([] if self._rows else [names]), [_text(value) for value in log]]
        self._rows = [*self._rows, *new]
        if self._cell is not None:
            self._cell.draw(self._rows)
            return
        for row in new:
            padded = (f"{text:>{max(len(name), 8)}}" for text, name in zip(row, names, strict=True))
            tqdm.write("  ".join(padded), file=sys.stdout)


class _Cell:
    """One output of a notebook, with the table and the bar: a file that tqdm writes its bar to."""

    encoding = "utf-8"  # or tqdm would draw with #

    def __init__(self) -> None:
        self._rows: Sequence[Sequence[str]] = ()
        self._bar, self._output = "", Output()

    def write(self, text: str) -> None:
        """Shows what tqdm writes; spaces when it closes."""
        if text.strip() != self._bar:
            self._bar = text.strip()
            self.draw(self._rows)

    def flush(self) -> None:
        """As tqdm calls it."""

    def draw(self, rows: Sequence[Sequence[str]]) -> None:
        """Draws bar and table anew."""
        self._rows = rows
        html = f"<pre>{escape(self._bar)}</pre>" if self._bar else ""
        html += table("", rows[0], rows[1:]) if rows else ""
        text = "\n".join("  ".join(f"{cell:>10}" for cell in row) for row in rows)
        self._output.show(fragment(html), text)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6f}" if isinstance(value, float) else str(value)
