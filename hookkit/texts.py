"""Text that lines up: columns in a terminal, and short forms of numbers.

A terminal gives CJK characters and emoji two columns and combining marks none, so `len` is not the
width. The rule is `wcwidth`'s, by Unicode's East Asian Width (UAX #11) from the standard library,
one character at a time: an emoji made of several (a family, a skin tone) counts each of its parts.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_JOINERS = "\u200d\u200c"  # between emoji that make one picture; between letters in Persian


@lru_cache(maxsize=4096)
def width(text: str) -> int:
    """Columns that `text` takes in a terminal.

    >>> width("conv"), width("卷积"), width("e\\u0301"), width("👍")
    (4, 4, 1, 2)
    """
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # combining marks, joiners
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad(text: str, n: int, *, right: bool = False) -> str:
    """`text` with spaces up to `n` columns: after it, or before it with `right=True`.

    >>> pad("卷积", 6) + "|", pad("12", 4, right=True)
    ('卷积  |', '  12')
    """
    spaces = " " * max(0, n - width(text))
    return spaces + text if right else text + spaces


def clip(text: str, n: int) -> str:
    """`text` in at most `n` columns; an ellipsis replaces what is cut.

    >>> clip("TransformerEncoder", 12), clip("卷积层一二三", 6)
    ('Transformer…', '卷积…')
    """
    if len(text) <= n and text.isascii():  # most names
        return text
    used = fit = 0  # columns so far; how many characters fit with the ellipsis
    for i, character in enumerate(text):
        used += _columns(character)
        if used > n:
            return text[:fit] + "…" if n > 0 else ""
        if used < n:
            fit = i + 1
    return text


def harmless(text: str, n: int = 200) -> str:
    """`text` on one line, with escapes for characters that control a terminal or reorder a line.

    Control characters, marks of writing direction, line separators and halves of surrogate pairs
    can come from the names of a user's modules and classes. A text longer than `n` characters
    loses its middle.

    >>> harmless("a\\x1b[31m\\nb\\u202e"), harmless("x" * 300, 9)
    ('a\\\\x1b[31m\\\\nb\\\\u202e', 'xxxx…xxxx')
    """
    if len(text) > n:
        text = f"{text[: n // 2]}…{text[len(text) - n // 2 :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_harmless(c) else ascii(c)[1:-1] for c in text)


def _is_harmless(c: str) -> bool:
    return c in _JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def csv_cell(text: str) -> str:
    """`text` as a cell of a CSV file that a spreadsheet does not read as a formula.

    >>> csv_cell("=1+1"), csv_cell("layer1.0")
    ("'=1+1", 'layer1.0')
    """
    text = harmless(text, len(text))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def csv_line(cells: Iterable[Any]) -> str:
    """A line of a CSV file, without its end: numbers to full precision, nothing for None.

    >>> csv_line([1, 0.5, None, "a, b", "=1"])
    '1,0.5,,"a, b",\\'=1'
    """
    line = io.StringIO()
    safe = (csv_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    csv.writer(line, lineterminator="").writerow(safe)
    return line.getvalue()


def wrap(parts: list[str], n: int, sep: str = " · ") -> list[str]:
    """`parts` joined by `sep` into lines of at most `n` columns (a longer part stays whole).

    >>> wrap(["one", "two", "three"], 10)
    ['one · two', 'three']
    """
    lines: list[str] = []
    for part in parts:
        if lines and width(lines[-1] + sep + part) <= n:
            lines[-1] += sep + part
        else:
            lines.append(part)
    return lines


def si(n: float) -> str:
    """`n` in three digits with a unit of thousands: for counts too long to compare at a glance.

    >>> [si(n) for n in (0, 999, 25_165_824, 4_089_184_256, 999_999)]
    ['0', '999', '25.2 M', '4.09 G', '1.00 M']
    """
    return _scaled(n, ("", "k", "M", "G", "T", "P", "E"))


def nbytes(n: float) -> str:
    """`n` bytes in decimal units, three digits.

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
    """`part` of `whole` in whole percents, never rounded to all or to nothing.

    >>> percent(1, 1000), percent(999, 1000), percent(1, 2), percent(3, 3)
    ('<1%', '>99%', '50%', '100%')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"


def format_time(seconds: float) -> str:
    """A duration as `MM:SS`, with hours when there are any.

    >>> format_time(75), format_time(3675)
    ('01:15', '1:01:15')
    """
    minutes, s = divmod(int(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m:02d}:{s:02d}"
