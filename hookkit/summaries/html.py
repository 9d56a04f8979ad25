"""A summary as HTML that folds, for notebooks: no script, no outside file, light and dark.

Builds on `lines` and `columns` as `text` does, and on `markup` for the style sheet. A closed
container shows the totals of all inside it (of all siblings folded into it). An open one shows its
own share, so that the numbers in sight add up, and its total after a Σ. Columns are as wide as
their longest word, so that none is broken (in a structured output a long one may be, after a name);
a table that does not fit scrolls sideways.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape

from hookkit.errors import OptionError
from hookkit.markup import fragment
from hookkit.summaries.columns import (
    COLUMNS,
    after_names,
    cell,
    check_counted,
    flow,
    notes_of,
    sums_of,
    usual,
)
from hookkit.summaries.lines import Content, Line, View, tree
from hookkit.summaries.rows import Row
from hookkit.summaries.text import footer_parts, shows_itself
from hookkit.texts import clip, harmless, width

_BARS = {"params": "parameters", "macs": "MACs", "saved": "bytes saved for backward"}
_OPEN_ROWS = 24  # containers start open, level by level, until this many rows are in sight
# Characters of a word, of one in a structured output, and of a cell; the rest is in a tooltip.
_WORD, _PART, _CELL = 40, 28, 160


def as_html(s: Content, view: View, by: str = "params") -> str:
    """One `div`: the table, then totals, how it was run and warnings."""
    if not isinstance(by, str) or by not in _BARS:
        raise OptionError(f'html(by="{by}"): bars show the share of {", ".join(_BARS)}')
    check_counted(s.macs is not None, [by], 'html(by="macs")')
    drawing = _Drawing(s, view, by)
    shown = f" <i>{escape(' '.join(flow(s)))}</i>" if s.run != "none" else ""
    title = f"<p><b>{escape(harmless(s.rows[0].type))}</b>{shown}</p>"
    table = drawing.table()  # before the legend, which says what is in it
    facts = "".join(_paragraph(" · ".join(part)) for part in footer_parts(s))
    warned = "".join(_paragraph(f"⚠ {w}", ' class="x"') for w in s.warnings)
    below = f'{drawing.legend()}<div class="s">{facts}</div>{warned}'
    return fragment(f'<div class="tree">{title}{table}{below}</div>')


def _paragraph(text: str, attributes: str = "") -> str:
    words = " ".join(harmless(word) for word in text.split(" "))
    return f"<p{attributes}>{escape(words)}</p>"


def _open_first(root: Line) -> set[int]:
    """Ids of the containers that start open: level by level, folded ones never."""
    found, level, rows = {id(root)}, root.inside, len(root.inside)
    while level:
        able = [line for line in level if line.inside and line.fold == 1]
        rows += sum(len(line.inside) for line in able)
        if rows > _OPEN_ROWS:
            break
        found |= {id(line) for line in able}
        level = [below for line in able for below in line.inside]
    return found


def _short(text: str, n: int = _WORD) -> str:
    return "".join(clip(word, n) for word in re.split(r"([ \n])", text))


class _Drawing:
    """One rendering; folded rows show the numbers of all of them while they are closed."""

    def __init__(self, s: Content, view: View, by: str) -> None:
        self.s, self.by, self.depth = s, by, view.depth
        self.columns = view.columns or usual(s)[1:]
        self.whole = getattr(s.total, COLUMNS[by].number)
        self.root, self.base = tree(s.rows, view.fold), 0
        self.open = _open_first(self.root)
        self.widest = {c: _words_of(COLUMNS[c].heading) for c in self.columns}
        self.label = 8.0
        self.folds = self.opened = False

    def table(self) -> str:
        """The heading and all rows."""
        skip = self.depth != 0 and not shows_itself(self.s) and self.root.inside
        self.base = 1 if skip else 0
        rows = "".join(map(self.line, self.root.inside if skip else [self.root]))
        kinds = {True: ' class="n"', False: ""}
        heads = "".join(
            f"<span{kinds[COLUMNS[c].is_right]}>{COLUMNS[c].heading}</span>" for c in self.columns
        )
        sizes = [f"minmax({self.label:.0f}ch,2.2fr)"]
        for c in self.columns:
            n = self.widest[c]
            sizes.append(f"{n}ch" if COLUMNS[c].is_right or c == "train" else f"minmax({n}ch,1fr)")
        head = f'<div class="g h"><span class="l" style="--d:0">Layer</span>{heads}</div>'
        least = self.label + sum(self.widest[c] + 2 for c in self.columns)
        style = f"--cols:{' '.join(sizes)};min-width:{least:.0f}ch"
        return f'<div style="{style}">{head}{rows}</div>'

    def legend(self) -> str:
        """What bars, sums and folds mean, where there are any."""
        said = []
        if self.by in self.columns and self.whole:
            said.append(f'<span class="k"></span>share of all {_BARS[self.by]}')
        if self.opened:
            said.append("Σ an open container with all inside it")
        if self.folds:
            said.append("×n so many equal ones; opened, one of them")
        return f'<p class="s">{" · ".join(said)}</p>' if said else ""

    def line(self, line: Line) -> str:
        """A row, or a container with the rows inside it."""
        row, inside = line.row, line.inside
        self.folds |= line.fold > 1
        if not inside or (self.depth is not None and row.depth >= self.depth):
            line = _with_numbers(line, closed=bool(inside))
            cells = "".join(self.wrapped(c, self.cell(c, line)) for c in self.columns)
            return f'<div class="g r">{self.name(line)}{cells}</div>'
        self.opened = True
        failed = self.s.failed and row.name in self.s.failed
        state = " open" if failed or id(line) in self.open else ""
        below = "".join(map(self.line, inside))
        head = self.name(line) + "".join(self.both(c, line) for c in self.columns)
        return f'<details{state}><summary class="g">{head}</summary>{below}</details>'

    def both(self, column: str, line: Line) -> str:
        """A cell of a container: its own share and Σ while it is open, the total while closed."""
        closed, opened = (_with_numbers(line, closed=state) for state in (True, False))
        number = COLUMNS[column].number
        total = self.cell(column, closed)
        own = self.cell(column, opened) if not number or getattr(opened.shown, number) else ""
        if number and (summed := cell(column, closed, self.s)):
            self.widest[column] = max(self.widest[column], _words_of(f"Σ {summed}"))
            own += f"<i>Σ {escape(summed)}</i>"
        if own == total:
            return self.wrapped(column, total)
        return self.wrapped(column, f'<span class="o">{own}</span><span class="c">{total}</span>')

    def wrapped(self, column: str, content: str) -> str:
        """`content` as a cell: numbers on the right."""
        kind = (
            ' class="n"' if COLUMNS[column].is_right else "" if column == "train" else ' class="s"'
        )
        return f"<span{kind}>{content}</span>"

    def cell(self, column: str, line: Line) -> str:
        """The content of a cell, with its bar if it is in the column of bars."""
        full = cell(column, line, self.s)
        text, n = full, _PART if column in ("input", "output") else _WORD
        if width(full) > n:  # most are short
            words = (after_names(word, n) for word in full.split(" "))
            text = clip(_short(" ".join(map("\n".join, words)), n), _CELL)
        self.widest[column] = max(self.widest[column], _words_of(text, COLUMNS[column].is_right))
        if column == "train" and text == "frozen":
            return '<span class="b">frozen</span>'
        part = getattr(line.shown, COLUMNS[self.by].number)
        if column != self.by or not (self.whole and part):
            shown = escape(text).replace("\n", "<wbr>")
            hover = f'<span title="{escape(full, quote=True)}">{shown}</span>'
            return shown if text.replace("\n", "") == full else hover
        size = f"{100 * part / self.whole:.1f}%"
        return f'<span class="w" style="--w:{size}">{escape(text)}</span>'

    def name(self, line: Line) -> str:
        """The name, the class if it has no column of its own, and the notes."""
        row, depth = line.row, line.row.depth - self.base
        label = _short(harmless(line.label)) or "(model)"
        kind = "" if "type" in self.columns else _short(harmless(row.type))
        fold = f"×{line.fold}" if line.fold > 1 else ""
        # A failure has a mark of its own, and what is inside can be opened.
        found = notes_of(replace(line, closed=False), self.s)
        notes = [_short(note) for note in found if not note.startswith("✗")]
        words = _words_of(" ".join([label, kind, fold, *notes]))
        self.label = max(self.label, words + 2 + 1.6 * depth)
        hover = escape(harmless(f"{row.name or row.type} {row.extra}".strip()), quote=True)
        text = f'<span class="l" style="--d:{depth}" title="{hover}">{escape(label)}'
        text += f" <i>{escape(kind)}</i>" if kind else ""
        text += f' <span class="b" title="{sums_of(line)}">{fold}</span>' if fold else ""
        text += "".join(f' <span class="b">{escape(w)}</span>' for w in notes)
        return f"{text}{self.failure(row)}</span>"

    def failure(self, row: Row) -> str:
        """The mark of a module that was running when the model raised."""
        if not self.s.failed or row.kind != "module" or row.name not in self.s.failed:
            return ""
        got = f" got {harmless(row.inputs)}" if row.name == self.s.failed[-1] else ""
        return f' <span class="x">✗{escape(got)}</span>'


def _with_numbers(line: Line, *, closed: bool) -> Line:
    """`line` with the numbers of all its siblings: their own, or their totals if it is closed."""
    one = line.row.total if closed else line.row.own
    return replace(line, closed=closed, shown=one.times(line.fold))


def _words_of(text: str, whole: bool = False) -> int:
    """The width of the longest word of `text`, in the unit `ch`; of all of it if `whole`."""
    words = [text] if whole else re.split(r"[ \n]", text)
    return max(3, max(map(width, words)) + 1)
