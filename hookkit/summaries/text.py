"""A summary as text that fits the terminal.

Builds on `lines` and `columns`; `html` has the same footer. Text that is too wide is shortened in
this order: notes move to a line of their own, outputs continue below after a comma or a `×` of a
shape, types get an ellipsis, then names, down to a quarter of the width; then all of them further.
Only where that is not enough, as in 40 columns, columns are dropped, from the right, and the footer
names them. Characters in names that would control a terminal are written as escapes.
"""

from __future__ import annotations

import re
import shutil
from typing import Any

from hookkit.summaries.columns import COLUMNS, after_names, cell, flow, notes_of, sums_of, usual
from hookkit.summaries.lines import Content, Line, View, lines
from hookkit.texts import clip, harmless, nbytes, pad, si, width, wrap

_WIDE = 100  # without a terminal
_GAP = "  "


def as_text(s: Content, view: View, n: int | None = None) -> str:
    """The whole summary in `n` columns: heading, table, totals, how it was run, warnings."""
    n = n or shutil.get_terminal_size((_WIDE, 24)).columns
    drawn = body(s, view)
    table, missing = _table(s, drawn, view.columns or usual(s), n)
    facts = (fact for parts in footer_parts(s) for fact in wrap(parts, n))
    parts = [*_heading(s, n), *table, *(line for fact in facts for line in _in_words(fact, n))]
    if folds := sorted({line.fold for line in drawn if line.fold > 1}):
        some = ", ".join(f"×{k}" for k in folds[:4]) + (", …" if len(folds) > 4 else "")
        parts += _in_words(f"Rows marked {some} show one of so many equal ones.", n)
    if missing:
        cut = ", ".join(COLUMNS[c].heading for c in missing)
        parts += _in_words(f"Not shown in {n} columns: {cut}. Choose with columns=, or widen.", n)
    return "\n".join(parts + [line for w in s.warnings for line in _in_words(f"⚠ {w}", n)])


def body(s: Content, view: View) -> list[Line]:
    """The lines to draw; the model's own only if it owns something or has nothing inside."""
    found = lines(s.rows, fold=view.fold, depth=view.depth)
    return found if len(found) == 1 or shows_itself(s) else found[1:]


def shows_itself(s: Content) -> bool:
    """True if the model itself has something to show: a share of its own, or a failure."""
    return any(vars(s.rows[0].own).values()) or s.failed[-1:] == ("",)


def _heading(s: Content, n: int) -> list[str]:
    """The model's class, what went in, and what came out: on a line of its own if it must."""
    name, n = harmless(s.rows[0].type), max(n, 20)
    if s.run == "none":
        return [clip(name, n)]
    inputs, got = flow(s)
    given = f"{name}   {inputs}"
    if width(f"{given} {got}") <= n:
        return [f"{given} {got}"]
    lines = ["\n    ".join(_broken(text, n - 4)) for text in (given, got)]
    return [clip(line, n) for line in "\n  ".join(lines).split("\n")]


# Where a structure may continue on the next line: after a comma, and between different outputs.
_COMMAS = re.compile(r"(?<=,) | (?=\| )")
_SIZES = re.compile(r"(?<=\d×)")  # where a shape may, if it is too long for one


def _broken(text: str, n: int) -> list[str]:
    """A structured text in lines of `n` columns; a word that is too long for one stays whole."""
    if width(text) <= n:
        return [text]
    parts = (part for whole in _COMMAS.split(text) for part in after_names(whole, n))
    lines = (line.rstrip() for line in wrap([*parts], n, " "))
    return [part for line in lines for part in _within(line, n)]


def _within(line: str, n: int) -> list[str]:
    """A line of a structure, with a shape that is wider than `n` columns broken after a `×`."""
    return [line] if width(line) <= n else wrap(_SIZES.split(line), n, "")


def _in_words(line: str, n: int) -> list[str]:
    """A sentence in as many lines as it needs; a word that is too long for one is not broken."""
    return wrap([harmless(word) for word in line.split(" ")], n, " ")


def _table(
    s: Content, drawn: list[Line], names: tuple[str, ...], n: int
) -> tuple[list[str], list[str]]:
    """The lines of the table with its rules, and the columns that do not fit."""
    cells = {"layer": ["Layer", *(_label(line, s) for line in drawn)]}
    cells |= {c: [COLUMNS[c].heading, *(cell(c, line, s) for line in drawn)] for c in names}
    limits, missing = _fitted({c: _wide(c, texts, _WIDEST) for c, texts in cells.items()}, n)
    limits = {c: min(limit, _wide(c, cells[c], limit)) for c, limit in limits.items()}
    rows = [_row({c: cells[c][i] for c in limits}, limits) for i in range(len(drawn) + 1)]
    room = n - sum(size + len(_GAP) for size in limits.values())
    out = [rows[0][0].rstrip()]
    for line, label, (row, *below) in zip(drawn, cells["layer"][1:], rows[1:], strict=True):
        notes = [*filter(None, [sums_of(line)]), *notes_of(line, s)]
        if notes and width(" · ".join(notes)) <= room:
            row, notes = _GAP.join([row, " · ".join(notes)]), []
        out += [part.rstrip() for part in (row, *below)]
        indent = " " * (min(len(label) - len(label.lstrip()), n // 3) + 2)
        out += [clip(f"{indent}↳ {part}", n) for part in wrap(notes, n - 8)]
    rule = "─" * min(n, max(20, *map(width, out)))
    return [out[0], rule, *out[1:], rule], missing


def _label(line: Line, s: Content) -> str:
    text = harmless(line.label) or "(itself)"
    mark = "✗ " if s.failed and line.row.kind == "module" and line.row.name in s.failed else ""
    fold = f"  ×{line.fold}" if line.fold > 1 else ""
    return "  " * max(0, line.row.depth - 1) + mark + text + fold


# Columns of a structured output, also where there is room for more, and its lines.
_WIDEST, _HIGHEST = 40, 6


def _lines_of(column: str, text: str, n: int) -> list[str]:
    """The content of a cell in its lines: numbers and names have one."""
    if column == "layer" or COLUMNS[column].is_right:
        return [text]
    lines = _broken(text, n)
    return lines if len(lines) <= _HIGHEST else [*lines[: _HIGHEST - 1], "…"]


def _wide(column: str, texts: list[str], n: int) -> int:
    """The width of a column whose structured cells are broken at `n`."""
    return max(width(line) for text in {*texts} for line in _lines_of(column, text, n))


def _row(cells: dict[str, str], limits: dict[str, int]) -> list[str]:
    """The lines of a row, each cell in its width: as many as its longest structure has."""
    parts = [[pad(_indented(cells["layer"], limits["layer"]), limits["layer"])]]
    for c, n in [*limits.items()][1:]:
        right, lines = COLUMNS[c].is_right, _lines_of(c, cells[c], n)
        parts.append([pad(clip(line, n), n, right=right) for line in lines])
    high = max(map(len, parts))
    for part, n in zip(parts, limits.values(), strict=True):
        part += [" " * n] * (high - len(part))
    return [*map(_GAP.join, zip(*parts, strict=True))]


def _indented(label: str, n: int) -> str:
    """A label in `n` columns; its indent is shortened first, to one column a level."""
    text = label.lstrip(" ")
    indent = len(label) - len(text)
    indent = min(indent, max(n - width(text), min(indent // 2, n // 3)))
    return " " * indent + clip(text, n - indent)


# How short texts may become: first so that they read well, then so that no column is dropped.
_SHORT = {"output": 14, "input": 14, "type": 10, "layer": 14}
_SHORTEST = {"output": 8, "input": 8, "type": 7, "layer": 14}


def _fitted(natural: dict[str, int], n: int) -> tuple[dict[str, int], list[str]]:
    """The widths of the columns, shortened to fit in `n`, and the columns that do not fit."""
    natural, missing = dict(natural), list[str]()
    while True:
        limits, fits = _shortened(natural, n)
        if fits or len(limits) <= 2:  # one column remains beside the names
            return limits, missing
        missing.insert(0, natural.popitem()[0])


def _shortened(natural: dict[str, int], n: int) -> tuple[dict[str, int], bool]:
    """Widths that fit in `n`; False if they do not at their shortest.

    Names are shortened last, and least: layers are selected by them.
    """
    limits = dict(natural)
    for least in ({**_SHORT, "layer": max(_SHORT["layer"], n // 4)}, _SHORTEST):
        while (over := sum(w + len(_GAP) for w in limits.values()) - len(_GAP) - n) > 0:
            able = [c for c in limits if limits[c] > least.get(c, limits[c])]
            able = [c for c in able if c != "layer"] or able
            if not able:
                break
            widest = max(able, key=lambda c: limits[c] - least[c])
            limits[widest] -= min(over, limits[widest] - least[widest], 4)
    return limits, over <= 0


def footer_parts(s: Content) -> list[list[str]]:
    """The facts below the table, by line: totals, memory and how the numbers were found."""
    kind = f" {s.dtype}" if s.dtype else ""
    held = f"{s.n_params:,} params, {nbytes(s.param_bytes)}{kind}" if s.n_params else "no params"
    buffers = f"buffers {nbytes(s.buffer_bytes)}" if s.buffer_bytes else "no buffers"
    parts = [[held, f"{s.n_trainable:,} trainable", buffers]]
    if s.run != "none" and not s.failed and not s.error:
        parts.append([f"{si(s.macs)} MACs forward"] if s.macs is not None else [])
        parts[-1].append(f"{nbytes(s.saved_bytes)} saved for backward")
        if s.n_trainable:
            parts[-1].append(f"training step ≈ {nbytes(s.step_bytes)} {_state_text(s)}")
    if s.optimizer:
        parts += _group_lines(s.optimizer)
    if s.uncounted:
        listed = [f"{name} ×{k}" for name, k in s.uncounted.items()]
        parts.append([f"MACs not counted: {listed[0]}", *listed[1:]])
    if s.wrappers:
        parts.append([f"Seen without its wrapper: {', '.join(s.wrappers)}"])
    return [*parts, *([f] for f in s.footnotes), [_run_text(s)]]


def _state_text(s: Content) -> str:
    """Which optimizer's state is in the memory of a step."""
    if not s.optimizer:
        return "before the optimizer's state"
    state = s.optimizer["state_bytes"]
    return f"with {s.optimizer['name']}" + (" (state unknown)" if state is None else "")


def _group_lines(opt: dict[str, Any]) -> list[list[str]]:
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


def _run_text(s: Content) -> str:
    """How the numbers were found, and that nothing was changed by it."""
    if s.run == "none":
        return "No input given: nothing was run."
    if s.error and s.run != "shared":
        return "The forward raised an error; nothing was changed."
    if s.run == "fake":
        return "Run on fake tensors: nothing computed, nothing changed."
    why = f"since it cannot run on fake tensors{f' ({s.why})' if s.why else ''}"
    if s.run == "itself":
        return f"Real run of the model itself, {why} and cannot be copied: it was restored."
    if s.run == "shared":
        return f"Real run on a copy that shares the parameters, {why}: nothing else changed."
    return f"Real run on a copy, {why}: nothing changed."
