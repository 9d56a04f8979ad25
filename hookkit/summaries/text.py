"""A summary as text that fits the terminal.

What is too wide gives way in this order: notes move to a line of their own, shapes and types are
shortened with an ellipsis, then names, down to a quarter of the width; then all of them further.
Only where that is not enough, as in 40 columns, columns go, from the right, and the footer says
which. What names and class names hold that would act on a terminal is written as an escape.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from hookkit.errors import ArgumentError, OptionError, nearest
from hookkit.summaries.lines import Content, Line, View, lines
from hookkit.texts import clip, harmless, nbytes, pad, percent, si, width, wrap

_WIDE = 100  # where there is no terminal to fit
_GAP = "  "


def _blank(f: Callable[[Any], str], n: int) -> str:
    return f(n) if n else ""


def _params(line: Line, s: Content) -> str:
    return f"{line.shown.n_params:,}" if line.shown.n_params or line.row.tied else ""


def train_mark(line: Line) -> str:
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


def outputs(line: Line) -> str:
    """The outputs of all calls; three different ones at most."""
    found = line.row.outputs
    return " | ".join(found[:3]) + (" | …" if len(found) > 3 else "")


def _percent(line: Line, s: Content) -> str:
    return percent(line.shown.n_params, s.n_params) if line.shown.n_params else ""


# name -> (heading, numbers stand on the right, what to write)
COLUMNS: dict[str, tuple[str, bool, Callable[[Line, Content], str]]] = {
    "type": ("Type", False, lambda line, s: line.row.type),
    "input": ("Input", False, lambda line, s: line.row.inputs),
    "output": ("Output", False, lambda line, s: outputs(line)),
    "params": ("Params", True, _params),
    "percent": ("Share", True, _percent),
    "train": ("Train", False, lambda line, s: train_mark(line)),
    "macs": ("MACs", True, lambda line, s: _blank(si, line.shown.macs)),
    "saved": ("Saved", True, lambda line, s: _blank(nbytes, line.shown.saved_bytes)),
    "bytes": ("Bytes", True, lambda line, s: _blank(nbytes, line.shown.param_bytes)),
    "buffers": ("Buffers", True, lambda line, s: _blank(nbytes, line.shown.buffer_bytes)),
    "calls": ("Calls", True, lambda line, s: _blank(str, line.row.calls or 0)),
    "dtype": ("Dtype", False, lambda line, s: line.row.dtype),
    "mode": ("Mode", False, lambda line, s: "train" if line.row.training else "eval"),
}
_RUN = ("type", "output", "params", "train", "macs", "saved")
_NO_RUN = ("type", "params", "train")


_CELL = 500  # signs of a structured output that are worth a line


def cell(column: str, line: Line, s: Content) -> str:
    """What stands in `column` of a line, harmless to a terminal."""
    return harmless(COLUMNS[column][2](line, s), _CELL)


def check_columns(columns: tuple[str, ...] | None) -> None:
    """Raises OptionError for a column that does not exist."""
    for name in columns or ():
        if not isinstance(name, str) or name not in COLUMNS:
            near = nearest(str(name), COLUMNS, n=1)
            hint = f'Did you mean "{near[0]}"? ' if near else ""
            raise OptionError(f'no column "{name}". {hint}There are {", ".join(COLUMNS)}')


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
    check_columns(names)
    return names


def notes_of(line: Line, s: Content) -> list[str]:
    """What stands behind a line: folds, ties, calls, odd types, failures."""
    row, notes = line.row, list(line.row.notes)
    if row.dtype and s.dtype and row.dtype != s.dtype and row.kind != "again":
        notes.append(row.dtype)
    if s.failed and row.name == s.failed[-1] and row.kind == "module":
        given = f"✗ got {row.inputs}" if row.inputs else "✗"
        notes.insert(0, f"{given}, is {row.type}({row.extra})" if row.extra else given)
    if line.closed:
        n = (
            len([r for r in s.rows if r.name.startswith(row.name + ".")])
            if row.name
            else len(s) - 1
        )
        notes.append(f"{n} inside")
    return [harmless(note, _CELL) for note in notes]


def body(s: Content, view: View) -> list[Line]:
    """The lines to draw; the model's own only if it owns something or has nothing inside."""
    found = lines(s.rows, fold=view.fold, depth=view.depth)
    return found if len(found) == 1 or body_is_whole(s) else found[1:]


def body_is_whole(s: Content) -> bool:
    """True if the model itself has something to show: a share of its own, or a failure."""
    return any(vars(s.rows[0].own).values()) or s.failed[-1:] == ("",)


def _label(line: Line, s: Content, base: int) -> str:
    text = harmless(line.label) or "(itself)"
    mark = "✗ " if s.failed and line.row.kind == "module" and line.row.name in s.failed else ""
    fold = f"  ×{line.fold}" if line.fold > 1 else ""
    return "  " * max(0, line.depth - base) + mark + text + fold


def _indented(label: str, n: int) -> str:
    """A label in `n` columns; its indent gives way first, to one column a level."""
    text = label.lstrip(" ")
    indent = len(label) - len(text)
    indent = min(indent, max(n - width(text), min(indent // 2, n // 3)))
    return " " * indent + clip(text, n - indent)


def as_text(s: Content, view: View, n: int | None = None) -> str:
    """The whole summary in `n` columns: heading, table, totals, how it was run, warnings."""
    check_columns(view.columns)
    n = n or shutil.get_terminal_size((_WIDE, 24)).columns
    drawn = body(s, view)
    names = view.columns or (_RUN if s.run != "none" else _NO_RUN)
    table, missing = _table(s, drawn, names, n)
    parts = [*heading(s, n), *table, *footer(s, n)]
    if any(line.fold > 1 for line in drawn):
        folds = sorted({line.fold for line in drawn if line.fold > 1})
        some = ", ".join(f"×{k}" for k in folds[:4]) + (", …" if len(folds) > 4 else "")
        parts += _in_words(f"Rows marked {some} show one of so many equal ones.", n)
    if missing:
        cut = ", ".join(COLUMNS[c][0] for c in missing)
        parts += _in_words(f"Not shown in {n} columns: {cut}. Choose with columns=, or widen.", n)
    return "\n".join(parts + [line for w in s.warnings for line in _in_words(f"⚠ {w}", n)])


def heading(s: Content, n: int) -> list[str]:
    """The model's class, what went in, and what came out: on a line of its own if it must."""
    name, n = harmless(s.rows[0].type), max(n, 20)
    if s.run == "none":
        return [clip(name, n)]
    inputs, output = harmless(s.inputs, _CELL), harmless(s.output, _CELL)
    given, got = f"{name}   {inputs}", f"→ {output or ('✗' if s.failed else '–')}"
    lines = [f"{given} {got}"] if width(f"{given} {got}") <= n else [given, f"  {got}"]
    return [clip(line, n) for line in lines]


def _in_words(line: str, n: int) -> list[str]:
    """A sentence in as many lines as it needs; a word that is too long for one stays whole."""
    return wrap([harmless(word) for word in line.split(" ")], n, " ")


def _table(
    s: Content, drawn: list[Line], names: tuple[str, ...], n: int
) -> tuple[list[str], list[str]]:
    base = min(line.depth for line in drawn if line.depth or len(drawn) == 1)
    first = ["Layer", *(_label(line, s, base) for line in drawn)]
    cells = {c: [COLUMNS[c][0], *(cell(c, line, s) for line in drawn)] for c in names}
    notes = ["", *(" · ".join(notes_of(line, s)) for line in drawn)]
    shown, missing = list(names), []
    natural = {"layer": _widest(first), **{c: _widest(cells[c]) for c in names}}
    limits, fits = _fitted(natural, shown, n)
    while not fits and len(shown) > 1:
        missing.append(shown.pop())
        limits, fits = _fitted(natural, shown, n)
    room = n - sum(limits[c] + 2 for c in ("layer", *shown))
    aside = _widest(notes) <= room
    out = []
    for i, label in enumerate(first):
        parts = [pad(_indented(label, limits["layer"]), limits["layer"])]
        for c in shown:
            right = COLUMNS[c][1]
            parts.append(pad(clip(cells[c][i], limits[c]), limits[c], right=right))
        text = _GAP.join(parts)
        if notes[i] and (aside or width(notes[i]) <= room):
            text += _GAP + notes[i]
        out.append(text.rstrip())
        if i == 0:
            out.append("─" * min(n, max(width(text), 20)))
        elif notes[i] and not (aside or width(notes[i]) <= room):
            indent = " " * (min(len(label) - len(label.lstrip()), n // 3) + 2)
            out += [clip(f"{indent}↳ {line}", n) for line in wrap(notes[i].split(" · "), n - 8)]
    rule = "─" * min(n, max(width(line) for line in out))
    out[1] = rule
    return [*out, rule], missing[::-1]


def _widest(texts: list[str]) -> int:
    return max(map(width, texts))


# How far text gives way: first so far that it reads well, then so far that no column has to go.
_SHORTEST = {"output": 14, "input": 14, "type": 10, "layer": 14}
_TIGHT = {"output": 8, "input": 8, "type": 7, "layer": 14}


def _fitted(natural: dict[str, int], shown: list[str], n: int) -> tuple[dict[str, int], bool]:
    """The columns' widths, shortened to fit in `n`; False if they do not fit at their shortest.

    Names are shortened last, and least: layers are selected by them.
    """
    limits = {c: natural[c] for c in ("layer", *shown)}
    for shortest in ({**_SHORTEST, "layer": max(_SHORTEST["layer"], n // 4)}, _TIGHT):
        while (over := sum(w + 2 for w in limits.values()) - 2 - n) > 0:
            able = [c for c in limits if limits[c] > shortest.get(c, 10**9)]
            able = [c for c in able if c != "layer"] or able
            if not able:
                break
            widest = max(able, key=lambda c: limits[c] - shortest[c])
            limits[widest] -= min(over, limits[widest] - shortest[widest], 4)
    return limits, over <= 0


def footer(s: Content, n: int) -> list[str]:
    """Totals, memory and how the numbers were found."""
    facts = (fact for parts in footer_parts(s) for fact in wrap(parts, n))
    return [line for fact in facts for line in _in_words(fact, n)]


def footer_parts(s: Content) -> list[list[str]]:
    """The facts below the table, by line."""
    kind = f" {s.dtype}" if s.dtype else ""
    held = f"{s.n_params:,} params, {nbytes(s.param_bytes)}{kind}" if s.n_params else "no params"
    buffers = f"buffers {nbytes(s.buffer_bytes)}" if s.buffer_bytes else "no buffers"
    parts = [[held, f"{s.n_trainable:,} trainable", buffers]]
    if s.run != "none" and not s.failed and not s.error:
        parts.append([f"{si(s.macs)} MACs forward", f"{nbytes(s.saved_bytes)} saved for backward"])
        if s.n_trainable:
            parts[-1].append(f"training step ≈ {nbytes(s.step_bytes)} {state_text(s)}")
    if s.optimizer:
        parts += group_lines(s.optimizer)
    if s.uncounted:
        listed = [f"{name} ×{k}" for name, k in s.uncounted.items()]
        parts.append([f"MACs not counted: {listed[0]}", *listed[1:]])
    if s.wrappers:
        parts.append([f"Seen without its wrapper: {', '.join(s.wrappers)}"])
    return [*parts, *([f] for f in s.footnotes), [run_text(s)]]


def state_text(s: Content) -> str:
    """Which optimizer the memory of a step was reckoned with."""
    if not s.optimizer:
        return "before the optimizer's state"
    state = s.optimizer["state_bytes"]
    return f"with {s.optimizer['name']}" + (" (state unknown)" if state is None else "")


def group_lines(opt: dict[str, Any]) -> list[list[str]]:
    """One line per parameter group of the optimizer."""
    state = opt["state_bytes"]
    about = "" if state is None else f"   state {nbytes(state)}{opt['state_from']}"
    out = [[f"Optimizer {opt['name']}{about}"]]
    for g in opt["groups"]:
        free, n = g["n_trainable"], g["n_params"]
        frozen = f"frozen ({n:,})" if not free else f"{free:,} of {n:,} trainable"
        what = [f"{k} {g[k]:g}" for k in ("lr", "weight_decay") if g.get(k) is not None]
        name = f" {g['name']}" if g["name"] else ""
        out.append([f"  group {g['index']}{name}: {frozen if n else 'empty'}", *what])
    return out


def run_text(s: Content) -> str:
    """How the numbers were found, and that nothing was changed by it."""
    if s.run == "none":
        return "No input given: nothing was run."
    if s.error:
        return "The forward raised an error; nothing was changed."
    if s.run == "fake":
        return "Run on fake tensors: nothing computed, nothing changed."
    why = f" ({s.why})" if s.why else ""
    return f"Real run on a copy, since it cannot run on fake tensors{why}: nothing changed."
