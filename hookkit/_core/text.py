"""Write text in columns of a terminal, and numbers in short forms.

One character is taken for one column.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def clip(text: str, n: int) -> str:
    """Return `text` in at most `n` columns; an ellipsis replaces what is cut.

    >>> clip("TransformerEncoder", 12)
    'Transformer…'
    """
    return text if len(text) <= n else text[: max(0, n - 1)] + "…" * (n > 0)


def escape_controls(text: str, n: int = 200) -> str:
    """Return `text` on one line, with its control characters escaped.

    Characters that control a terminal or reorder a line can come from the names of a user's modules
    and classes. A text longer than `n` characters loses its middle.

    >>> escape_controls("a\\x1b[31m\\nb\\u202e"), escape_controls("x" * 300, 9)
    ('a\\\\x1b[31m\\\\nb\\\\u202e', 'xxxx…xxxx')
    """
    if len(text) > n:
        text = f"{text[: n // 2]}…{text[len(text) - n // 2 :]}"
    if text.isprintable():  # all that is not is a separator, a control or format character
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def csv_line(cells: Iterable[Any]) -> str:
    """Return a line of a CSV file, without its end: numbers in full precision, nothing for None.

    >>> csv_line([1, 0.5, None, "a, b", "a\\nb"])
    '1,0.5,,"a, b","a\\nb"'
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)  # which quotes text with a line end
    return line.getvalue()[:-1]


def columns(rows: Sequence[Sequence[str]], n_left: int) -> list[str]:
    """Return a line for each row, its cells in columns: the first `n_left` flush left.

    >>> columns([("layer", "error"), ("fc", "0.5")], n_left=1)
    ['layer  error', 'fc       0.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(n) if i < n_left else cell.rjust(n)
            for i, (cell, n) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrap(parts: list[str], n: int, sep: str = " · ") -> list[str]:
    """Join `parts` by `sep` into lines of at most `n` columns; a longer part stays whole.

    >>> wrap(["one", "two", "three"], 10)
    ['one · two', 'three']
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1] + sep + part) <= n:
            lines[-1] += sep + part
        else:
            lines.append(part)
    return lines


def si(n: float) -> str:
    """Return `n` in three digits with a unit of thousands, so that counts compare at a glance.

    >>> [si(n) for n in (0, 999, 25_165_824, 4_089_184_256, 999_999)]
    ['0', '999', '25.2 M', '4.09 G', '1.00 M']
    """
    return _scaled(n, ("", "k", "M", "G", "T", "P", "E"))


def nbytes(n: float) -> str:
    """Return `n` bytes in decimal units, three digits.

    >>> [nbytes(n) for n in (0, 520, 1_572_864, 86_120_000)]
    ['0 B', '520 B', '1.57 MB', '86.1 MB']
    """
    return _scaled(n, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def _scaled(n: float, units: tuple[str, ...]) -> str:
    size, unit = float(n), 0
    while abs(size) >= 999.5 and unit < len(units) - 1:
        size, unit = size / 1000, unit + 1
    if unit == 0:
        return f"{n:.0f} {units[0]}".rstrip()
    digits = 0 if abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:.{digits}f} {units[unit]}"


def percent(part: float, whole: float) -> str:
    """Return `part` of `whole` in whole percents, never rounded to all or to nothing.

    >>> percent(1, 1000), percent(999, 1000), percent(1, 2), percent(3, 3)
    ('<1%', '>99%', '50%', '100%')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"


def format_time(seconds: float) -> str:
    """Return a duration as `MM:SS`, with hours when there are any.

    >>> format_time(75), format_time(3675)
    ('01:15', '1:01:15')
    """
    minutes, s = divmod(int(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m:02d}:{s:02d}"
