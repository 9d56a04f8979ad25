"""The columns of a drawn summary: their names, headings, cells and notes.

Builds on `lines`; `text` and `html` draw the same columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hookkit.errors import ArgumentError, OptionError, nearest
from hookkit.summaries.lines import Content, Line
from hookkit.texts import harmless, nbytes, percent, si, width, wrap

MAX_CELL = 500  # characters of a structured output that are shown


@dataclass(frozen=True)
class Column:
    """One column: its heading, what it shows of a line, and the number of `Totals` in it, if any.

    The numbers of a column add up; they are aligned on the right.
    """

    heading: str
    write: Callable[[Line, Content], str]
    number: str = ""
    is_right: bool = False


def _numbers(heading: str, number: str, write: Callable[[int], str]) -> Column:
    """A column of one of the numbers of `Totals`, empty where it is 0."""

    def shown(line: Line, s: Content) -> str:
        n = getattr(line.shown, number)
        return write(n) if n else ""

    return Column(heading, shown, number, is_right=True)


def _params(line: Line, s: Content) -> str:
    return f"{line.shown.n_params:,}" if line.shown.n_params or line.row.tied else ""


def _percent(line: Line, s: Content) -> str:
    return percent(line.shown.n_params, s.n_params) if line.shown.n_params else ""


def _train(line: Line, s: Content) -> str:
    """`✓` trainable, `frozen`, the trainable share, or nothing where there is nothing to train."""
    if line.closed:
        n, trainable = line.shown.n_params, line.shown.n_trainable
        return "" if not n else "✓" if n == trainable else _share(trainable, n)
    state = line.row.trainable
    if state is None:
        return ""
    return "✓" if state is True else _share(float(state), 1.0)


def _share(part: float, whole: float) -> str:
    return percent(part, whole) if part else "frozen"


def _outputs(line: Line, s: Content) -> str:
    """The outputs of all calls; three different ones at most."""
    found = line.row.outputs
    return " | ".join(found[:3]) + (" | …" if len(found) > 3 else "")


COLUMNS: dict[str, Column] = {
    "type": Column("Type", lambda line, s: line.row.type),
    "input": Column("Input", lambda line, s: line.row.inputs),
    "output": Column("Output", _outputs),
    "params": Column("Params", _params, "n_params", is_right=True),
    "percent": Column("Share", _percent, "n_params", is_right=True),
    "train": Column("Train", _train),
    "macs": _numbers("MACs", "macs", si),
    "saved": _numbers("Saved", "saved_bytes", nbytes),
    "bytes": _numbers("Bytes", "param_bytes", nbytes),
    "buffers": _numbers("Buffers", "buffer_bytes", nbytes),
    "calls": Column("Calls", lambda line, s: str(line.row.calls or ""), is_right=True),
    "dtype": Column("Dtype", lambda line, s: line.row.dtype),
    "mode": Column("Mode", lambda line, s: "train" if line.row.training else "eval"),
}


_RUN = ("type", "output", "params", "train", "macs", "saved")
_NO_RUN = ("type", "params", "train")


def usual(s: Content) -> tuple[str, ...]:
    """The columns that are drawn if none are chosen."""
    names = _NO_RUN if s.run == "none" else _RUN
    return names if s.macs is not None else tuple(c for c in names if c != "macs")


def flow(s: Content) -> tuple[str, str]:
    """What went into the model and what came out, harmless to a terminal."""
    output = harmless(s.output, MAX_CELL) or ("✗" if s.failed else "–")
    return harmless(s.inputs, MAX_CELL), f"→ {output}"


def cell(column: str, line: Line, s: Content) -> str:
    """The text in `column` of a line, harmless to a terminal."""
    return harmless(COLUMNS[column].write(line, s), MAX_CELL)


# Where a part of a structure may be broken: after `ModelOutput(`, `x=` and `'x': `.
_NAMES = re.compile(r"(?<=\w[(\[{])|(?<==)|(?<=: )")


def after_names(part: str, n: int) -> list[str]:
    """A part of a structure, broken after its names if it is wider than `n` columns.

    >>> after_names("ModelOutput(logits=1×128×1000", 20)
    ['ModelOutput(logits=', '1×128×1000']
    """
    return [part] if width(part) <= n else wrap(_NAMES.split(part), n, "")


def as_columns(columns: Any) -> tuple[str, ...] | None:
    """Checked names of columns; one name alone is one column, None stays None."""
    if columns is None:
        return None
    try:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
    except TypeError:
        raise ArgumentError(f"columns={columns!r}: give names of columns, as a list") from None
    if not names:
        raise OptionError("columns=[] draws nothing: give names of columns, or None for the usual")
    for name in names:
        if not isinstance(name, str) or name not in COLUMNS:
            near = nearest(str(name), COLUMNS, n=1)
            hint = f'Did you mean "{near[0]}"? ' if near else ""
            raise OptionError(f'no column "{name}". {hint}There are {", ".join(COLUMNS)}')
    return names


def sums_of(line: Line) -> str:
    """What all siblings that are drawn as one have together: `×6: 2.67 M params, 179 M MACs`."""
    if line.fold == 1:
        return ""
    total = line.row.total.times(line.fold)
    numbers = {"params": total.n_params, "MACs": total.macs}
    said = [f"{si(n)} {what}" for what, n in numbers.items() if n]
    return f"×{line.fold}: {', '.join(said)}" if said else ""


def check_counted(counted: bool, names: Iterable[str] | None, what: str) -> None:
    """Raises an `OptionError` if "macs" is among `names` of a summary that did not count them."""
    if not counted and "macs" in (names or ()):
        raise OptionError(f"{what}: with macs=False MACs are not counted. Leave one of them out.")


def notes_of(line: Line, s: Content) -> list[str]:
    """The notes on a line: failures, ties, calls, unusual dtypes, what is not drawn."""
    row, notes = line.row, list(line.row.notes)
    if row.dtype and s.dtype and row.dtype != s.dtype and row.kind != "again":
        notes.append(row.dtype)
    if s.failed and row.name == s.failed[-1] and row.kind == "module":
        given = f"✗ got {row.inputs}" if row.inputs else "✗"
        notes.insert(0, f"{given}, is {row.type}({row.extra})" if row.extra else given)
    if line.closed:
        inside = [r for r in s.rows if r.name.startswith(f"{row.name}.")]
        notes.append(f"{len(inside) if row.name else len(s) - 1} inside")
    return [harmless(note, MAX_CELL) for note in notes]
