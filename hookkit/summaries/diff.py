"""What differs between two summaries, by qualified name: rows, numbers, totals.

Builds on `lines`. Own numbers are compared, not totals, so that a change shows in one row only;
MACs only where both have counted them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookkit.summaries.lines import Content
from hookkit.summaries.rows import NUMBERS, Row
from hookkit.texts import harmless, nbytes, pad, si, width

_WORDS = {
    "n_params": "params",
    "n_trainable": "trainable",
    "param_bytes": "param bytes",
    "buffer_bytes": "buffers",
    "macs": "MACs",
    "saved_bytes": "saved",
}
_FACTS = ("type", "outputs", "trainable", "calls", "dtype", "training", "notes")
_MARKS = {"changed": " ", "added": "+", "removed": "−"}


@dataclass(frozen=True)
class Change:
    """One row that differs.

    Attributes:
        kind: "changed", "added" or "removed".
        facts: what differs, each as `(what, before, after)`.
    """

    name: str
    type: str
    kind: str
    facts: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, repr=False)
class SummaryDiff:
    """The changes from one summary to another; true if there are any.

    Attributes:
        changes: the rows that differ, in the order of execution, removed ones last.
        totals: the numbers that changed, with their values before and after.
        types: the models' classes.
    """

    changes: tuple[Change, ...]
    totals: dict[str, tuple[int, int]]
    types: tuple[str, str] = ("", "")

    def __bool__(self) -> bool:
        return bool(self.changes or self.totals)

    def __len__(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        rows = [_cells(c) for c in self.changes]
        sizes = [max((width(r[i]) for r in rows), default=0) for i in range(3)]
        text = ["  ".join([*map(pad, r[:3], sizes), r[3]]).rstrip() for r in rows]
        moved = " · ".join(_moved(k, a, b) for k, (a, b) in self.totals.items())
        return "\n".join([*text, f"total {moved}" if moved else "totals are equal"])

    __repr__ = __str__


def _cells(c: Change) -> tuple[str, str, str, str]:
    """Mark, name, type and facts of a row, harmless to a terminal."""
    facts = (f"{what} {a} → {b}" if c.kind == "changed" else b or a for what, a, b in c.facts)
    name = harmless(c.name) or "(model)"
    return _MARKS[c.kind], name, harmless(c.type), harmless("   ".join(facts), 1000)


def _moved(key: str, a: int, b: int) -> str:
    share = f" ({100 * (b - a) / a:+.1f}%)".replace("-", "−") if a else ""
    return f"{_WORDS[key]} {_number(key, a)} → {_number(key, b)}{share}"


def _number(key: str, n: int) -> str:
    if key.endswith("bytes"):
        return nbytes(n)
    return si(n) if key == "macs" else f"{n:,}"


def compare(a: Content, b: Content) -> SummaryDiff:
    """The changes from `a` to `b`."""
    before, after = ({r.name: r for r in s} for s in (a, b))
    changes = []
    for name, row in after.items():
        if name not in before:
            changes.append(Change(name, row.type, "added", _content(row)))
        elif facts := _facts(before[name], row):
            changes.append(Change(name, row.type, "changed", facts))
    lost = [before[name] for name in before if name not in after]
    changes += [Change(r.name, r.type, "removed", _content(r)) for r in lost]
    pairs = {k: (getattr(a, k), getattr(b, k)) for k in NUMBERS}
    moved = {k: pair for k, pair in pairs.items() if _differ(*pair)}
    return SummaryDiff(tuple(changes), moved, (a.rows[0].type, b.rows[0].type))


def _content(r: Row) -> tuple[tuple[str, str, str], ...]:
    return (("params", "", f"{r.n_params:,} params"),) if r.n_params else ()


def _differ(a: int | None, b: int | None) -> bool:
    return a != b and a is not None and b is not None


def _facts(a: Row, b: Row) -> tuple[tuple[str, str, str], ...]:
    facts = [(k, _text(k, a), _text(k, b)) for k in _FACTS if getattr(a, k) != getattr(b, k)]
    known = {"n_trainable"} if a.trainable != b.trainable else set()
    for k in NUMBERS:
        if k not in known and _differ(getattr(a, k), getattr(b, k)):
            facts.append((_WORDS[k], _number(k, getattr(a, k)), _number(k, getattr(b, k))))
    return tuple(facts)


def _text(key: str, r: Row) -> str:
    value: Any = getattr(r, key)
    if key == "trainable":
        return {True: "✓", False: "frozen", None: "nothing"}.get(value) or f"{100 * value:.0f}%"
    if key == "training":
        return "train" if value else "eval"
    return " | ".join(value) or "–" if isinstance(value, tuple) else str(value)
