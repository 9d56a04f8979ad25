"""Recorded numbers as a small table of bounded size: text for a terminal, HTML for a notebook.

`StatsList` and `BatchStats` show themselves so. Builds on `texts` (text widths).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hookkit.markup import fragment, table
from hookkit.texts import clip, pad, width

MOST_ROWS = 12
"""Layers shown; of more, the first and the last half of these."""

MOST_COLUMNS = 36
"""Of a layer's label, in a terminal."""


@dataclass(frozen=True)
class Table:
    """A title, a row for each layer, and a line below; of many rows the middle is not shown.

    Args:
        title: above the table.
        head: the columns' names, the layer's first.
        rows: a row for each layer, its label first, all text.
        note: below the table; "" for none.

    >>> print(Table("2 layers", ("layer", "mean"), [("0 Linear", "0.5"), ("1 ReLU", "1")]).text())
    2 layers
    layer     mean
    0 Linear   0.5
    1 ReLU       1
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def text(self) -> str:
        """The table in columns; numbers are aligned on the right."""
        rows = [self.head, *self._shown()]
        rows = [(clip(" ".join(row[0].split()), MOST_COLUMNS), *row[1:]) for row in rows]
        wide = [max(map(width, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                pad(cell, n, right=i > 0) for i, (cell, n) in enumerate(zip(row, wide, strict=True))
            )
            for row in rows
        ]
        return "\n".join(
            [self.title, *(line.rstrip() for line in lines), *[self.note] * bool(self.note)]
        )

    def html(self) -> str:
        """The same as HTML for a notebook."""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return fragment(table(self.title, self.head, self._shown()) + note)

    def _shown(self) -> list[tuple[str, ...]]:
        rows = list(self.rows)
        if len(rows) <= MOST_ROWS:
            return rows
        half = MOST_ROWS // 2
        left_out = (f"… {len(rows) - 2 * half} more", *[""] * (len(self.head) - 1))
        return [*rows[:half], left_out, *rows[-half:]]


def number(value: float) -> str:
    """A number in three digits; – for NaN.

    >>> number(0.12345), number(float("nan")), number(2.0)
    ('0.123', '–', '2')
    """
    return "–" if math.isnan(value) else f"{value:.3g}"
