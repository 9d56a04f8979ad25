"""Draws a `Summary` as text, or as HTML that folds; equal siblings share a line.

Builds on `summary_rows`. A line may stand for several rows, and shows the numbers of one: times its
fold, all lines add up to the totals, whatever is folded or cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from hookkit._core.html import fragment
from hookkit._core.text import clip, escape_controls, nbytes, percent, si, wrap
from hookkit.errors import OptionError
from hookkit.inspection.summary_rows import NUMBERS, Row, Totals

if TYPE_CHECKING:
    from hookkit.inspection.summary_result import Summary

_WIDE = 100  # without a terminal
_CELL, _NOTE = 40, 36  # characters of a cell, and of notes, that columns are not shortened for
_OPEN_ROWS = 24  # containers in HTML start open, level by level, until so many rows are in sight


@dataclass
class Line:
    """Describe a line of a drawing: a row, or the first of equal siblings, with the lines below it.

    Attributes:
        label: the name below its parent, `0..11` for folded siblings.
        fold: how many siblings are drawn as this one.
        shown: numbers of one of them: its own, or its total when it is closed.
        closed: the lines below it are not drawn.
        looks: the same number for lines that look alike, with all lines below them.
        size: how many lines these are.
    """

    row: Row
    label: str
    inside: list[Line] = field(default_factory=list)
    fold: int = 1
    shown: Totals = field(default_factory=Totals)
    closed: bool = False
    looks: int = 0
    size: int = 1


def tree(rows: tuple[Row, ...], fold: bool, depth: int | None) -> Line:
    """Return the rows as a tree: equal neighbouring siblings are folded, and it ends at `depth`."""
    root = Line(rows[0], rows[0].name)
    above, order = [root], [root]
    for row in rows[1:]:
        del above[row.depth :]
        line = Line(row, row.name.removeprefix(f"{above[-1].row.name}."))
        above[-1].inside.append(line)
        above.append(line)
        order.append(line)
    kinds: dict[Any, int] = {}
    for line in reversed(order):
        line.size = 1 + sum(below.size for below in line.inside)
        line.looks = kinds.setdefault(_looks(line), len(kinds))
        line.inside = _folded(line.inside) if fold else line.inside
    for line in walk(root):
        line.closed = bool(line.inside) and depth is not None and line.row.depth >= depth
        line.shown = line.row.total if line.closed else line.row
        line.inside = [] if line.closed else line.inside
    return root


def walk(line: Line) -> Iterator[Line]:
    """Yield `line` and all lines below it, in the order drawn."""
    stack = [line]
    while stack:
        at = stack.pop()
        yield at
        stack += reversed(at.inside)


def _looks(line: Line) -> Any:
    """Return a value that is equal for lines to be folded: names inside count, its own does not."""
    row = line.row
    parent = row.name.rpartition(".")[0] + "."
    notes = tuple(note.replace(parent, "") if parent != "." else note for note in row.notes)
    inside = tuple((below.label, below.looks) for below in line.inside)
    return row.kind, row.type, row.outputs, row.total, row.trainable, notes, row.extra, inside


def _folded(lines: list[Line]) -> list[Line]:
    """Fold runs of equal, numbered siblings into the first, if that saves two lines or more.

    Siblings without numbers stay: their names (`q`, `k`, `v`) say something.
    """
    out: list[Line] = []
    runs: list[list[Line]] = []
    for line in lines:
        first = runs[-1][0] if runs else line
        word = line.label.rstrip("0123456789")
        numbered = line.label != word == first.label.rstrip("0123456789")
        if runs and numbered and line.looks == first.looks:
            runs[-1].append(line)
        else:
            runs.append([line])
    for run in runs:
        first, n = run[0], len(run)
        if (n - 1) * first.size >= 2:
            first.fold, first.label = n, f"{first.label}..{run[-1].label}"
            out.append(first)
        else:
            out += run
    return out


# --- columns


def _train(line: Line) -> str:
    """Write `✓` for trainable, `frozen`, or the trainable share; nothing without parameters."""
    n, trainable = line.shown.n_params, line.shown.n_trainable
    state = line.row.trainable
    if line.closed:
        state = None if not n else trainable / n
    return "" if state is None else "✓" if state == 1 else percent(state, 1) if state else "frozen"


def _number(write: Callable[[int], str], name: str) -> Callable[[Line], str]:
    """Return a function that writes one of the numbers of `Totals`, and nothing for 0."""
    return lambda line: write(n) if (n := getattr(line.shown, name)) else ""


def _params(line: Line) -> str:
    n, tied = line.shown.n_params, any(note.startswith("tied") for note in line.row.notes)
    return f"{n:,}" if n or tied else ""


def _outputs(line: Line) -> str:
    """Write the different outputs of all calls, three at most."""
    outputs = line.row.outputs
    return " | ".join(outputs[:3]) + " | …" * (len(outputs) > 3)


COLUMNS: dict[str, tuple[str, Callable[[Line], str]]] = {
    "type": ("Type", lambda line: line.row.type),
    "input": ("Input", lambda line: line.row.inputs),
    "output": ("Output", _outputs),
    "params": ("Params", _params),
    "train": ("Train", _train),
    "macs": ("MACs", _number(si, "macs")),
    "saved": ("Saved", _number(nbytes, "saved_bytes")),
    "bytes": ("Bytes", _number(nbytes, "param_bytes")),
    "calls": ("Calls", lambda line: str(line.row.calls or "")),
    "dtype": ("Dtype", lambda line: line.row.dtype),
}
_RIGHT = ("params", "macs", "saved", "bytes", "calls")
_SHORT = {"output": 12, "input": 12, "type": 8, "layer": 14}  # what texts are cut to, in order


def checked_columns(columns: Any, has_run: bool) -> tuple[str, ...]:
    """Return the names of the columns to draw, the usual ones if `columns` is None."""
    usual = ("type", "output", "params", "train", "macs", "saved")
    names = (columns,) if isinstance(columns, str) else columns
    names = tuple(names or (usual if has_run else ("type", "params", "train")))
    for name in names:
        if name not in COLUMNS:
            raise OptionError(f'no column "{name}". There are {", ".join(COLUMNS)}')
    return names


def _cell(column: str, line: Line) -> str:
    return escape_controls(COLUMNS[column][1](line), 500)


def _notes(line: Line, s: Summary) -> list[str]:
    """Return the notes on a line: the sums of a fold, ties, calls, unusual dtypes."""
    row, notes = line.row, list(line.row.notes)
    if line.fold > 1:
        sums = {"params": line.fold * row.total.n_params, "MACs": line.fold * row.total.macs}
        parts = [f"{si(n)} {what}" for what, n in sums.items() if n]
        notes[:0] = [f"×{line.fold}: {', '.join(parts)}"] if parts else []
    if row.dtype and s.dtype and row.dtype != s.dtype and row.kind != "again":
        notes.append(row.dtype)
    if line.closed:
        n = sum(r.name.startswith(f"{row.name}.") for r in s.rows) if row.name else len(s) - 1
        notes.append(f"{n} inside")
    return [escape_controls(note) for note in notes]


# --- text


def as_text(
    s: Summary, columns: Any, fold: bool, depth: int | None, width: int | None = None
) -> str:
    """Draw the summary in `width` columns; cut outputs, types and names that do not fit."""
    n = width or shutil.get_terminal_size((_WIDE, 24)).columns
    names, root = checked_columns(columns, s.run != "none"), tree(s.rows, fold, depth)
    # the model itself is a line if it has something to show: a share of its own, or a failure
    own = not root.inside or any(getattr(s.rows[0], n) for n in NUMBERS) or s.failed[-1:] == ("",)
    lines = [*walk(root)][0 if own else 1 :]
    table = [["Layer", *(COLUMNS[c][0] for c in names)]]
    table += [[_label(line, s), *(_cell(c, line) for c in names)] for line in lines]
    notes = ["", *(" · ".join(_notes(line, s)) for line in lines)]
    sizes = [min(_CELL, max(map(len, texts))) for texts in zip(*table, strict=True)]
    room = n - 2 * len(sizes) - min(_NOTE, max(map(len, notes)))
    for c in _SHORT:
        for i in (i for i, name in enumerate(("layer", *names)) if name == c):
            sizes[i] -= max(0, min(sum(sizes) - room, sizes[i] - _SHORT[c]))
    drawn = []
    for row, note in zip(table, notes, strict=True):
        cells = [
            clip(text, size).rjust(size) if name in _RIGHT else clip(text, size).ljust(size)
            for name, text, size in zip(("layer", *names), row, sizes, strict=True)
        ]
        drawn.append(clip("  ".join([*cells, note]).rstrip(), n))
    rule = "─" * min(n, max(20, *map(len, drawn)))
    facts = [fact for part in s.footer() for fact in wrap(part, n)] + [f"⚠ {w}" for w in s.warnings]
    facts = [line for fact in facts for line in wrap(fact.split(" "), n, " ")]
    body = [clip(escape_controls(s.heading(), 1000), n), drawn[0], rule, *drawn[1:], rule]
    return "\n".join([*body, *(escape_controls(fact, 1000) for fact in facts)])


def _label(line: Line, s: Summary) -> str:
    mark = "✗ " if line.row.kind == "module" and line.row.name in s.failed else ""
    fold = f"  ×{line.fold}" if line.fold > 1 else ""
    label = escape_controls(line.label) or "(itself)"
    return "  " * max(0, line.row.depth - 1) + mark + label + fold


# --- HTML


def as_html(s: Summary, columns: Any, fold: bool, depth: int | None) -> str:
    """Draw the summary as nested `<details>`; containers show the totals of all inside them."""
    names, root = checked_columns(columns, s.run != "none"), tree(s.rows, fold, depth)
    opened, level, n = {id(root)}, root.inside, len(root.inside)
    while level:
        level = [line for line in level if line.fold == 1]
        n += sum(len(line.inside) for line in level)
        opened |= {id(line) for line in level} if n <= _OPEN_ROWS else set()
        level = [below for line in level for below in line.inside] if n <= _OPEN_ROWS else []

    def cells(line: Line) -> str:
        shown = ((c, escape(_cell(c, line))) for c in names)
        return "".join(f'<span class="{"n" if c in _RIGHT else "s"}">{x}</span>' for c, x in shown)

    def drawn(line: Line) -> str:
        head = _html_label(line, s)
        if not line.inside:
            total = replace(line, shown=_times(line.shown, line.fold))
            return f'<div class="g r">{head}{cells(total)}</div>'
        total = replace(line, shown=_times(line.row.total, line.fold), closed=True)
        is_open = id(line) in opened or line.row.name in s.failed
        inside = "".join(map(drawn, line.inside))
        return (
            f'<details{" open" * is_open}><summary class="g">{head}{cells(total)}</summary>'
            f"{inside}</details>"
        )

    heads = "".join(
        f'<span class="{"n" if c in _RIGHT else "s"}">{COLUMNS[c][0]}</span>' for c in names
    )
    every = [replace(line, shown=_times(line.row.total, line.fold)) for line in walk(root)]
    widest = [max(len(COLUMNS[c][0]), *(len(_cell(c, line)) for line in every)) for c in names]
    sizes = " ".join(f"{min(n, _CELL) + 1}ch" for n in widest)
    facts = "".join(
        f"<p>{escape(escape_controls(' · '.join(part), 1000))}</p>" for part in s.footer()
    )
    facts += "".join(f'<p class="x">⚠ {escape(escape_controls(w, 1000))}</p>' for w in s.warnings)
    return fragment(
        f'<div class="tree" style="--cols:minmax(24ch,1fr) {sizes}">'
        f"<p><b>{escape(escape_controls(s.heading(), 1000))}</b></p>"
        f'<div class="g h"><span class="l" style="--d:0">Layer</span>{heads}</div>{drawn(root)}'
        f'<div class="s">{facts}</div></div>'
    )


def _html_label(line: Line, s: Summary) -> str:
    label = escape(escape_controls(line.label) or "(model)") + f" ×{line.fold}" * (line.fold > 1)
    failed = line.row.kind == "module" and line.row.name in s.failed
    notes = "".join(f' <span class="b">{escape(note)}</span>' for note in _notes(line, s))
    mark = '<span class="x">✗</span> ' * failed
    return f'<span class="l" style="--d:{line.row.depth}">{mark}{label}{notes}</span>'


def _times(totals: Totals, n: int) -> Totals:
    return Totals(*(n * getattr(totals, number) for number in NUMBERS))
