"""`Comparison`: how far the layers of two models are apart, as a value.

Builds on `texts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hookkit._core.text import escape_controls, si, wrap
from hookkit.inspection.first_difference import Localisation

MISSING, NOT_GIVEN = "no such layer in the ", "not given by the "  # "first" or "second"
_NO_DIFFERENCE = "no difference beyond the tolerance"
_WIDTH = 100  # columns
_NEAR = 2  # rows shown on each side of the first that differs
_HEAD = ("layer", "shape", "max_abs_error", "rel_error", "cosine", "n_different")


@dataclass(frozen=True)
class Row:
    """One tensor of both models, or one that only one of them has.

    Attributes:
        name: of the module in the first model, with the path of the tensor in what it returns;
            in the second, if only that has it.
        path: that path, `""` if the module returns the tensor itself.
        other_name: its name in the second model.
        type: the module's class; in a file that does not say it, `""`.
        what: `"output"`; with `grads=True` also `"grad"`, the gradient of an output, and
            `"param_grad"`, that of a parameter.
        call: the number of the module's call, from 0.
        shape: the first model's.
        max_abs_error: the largest `|a − b|`.
        rel_error: `‖a − b‖ / ‖a‖`.
        cosine: of the angle between the two.
        n_different: elements beyond the tolerance.
        own_rel: with `isolate=True`, `rel_error` for what the second model's module gives when
            it is called alone on what the first one's received: without the errors of the layers
            before it, with those of the layers inside. NaN where that is not known.
        own_different: elements beyond the tolerance then; None where `own_rel` is NaN.
        own_note: why there is no own error, or which inputs the module was called without.
        problem: why the values could not be compared; `""` where they were.
    """

    name: str
    other_name: str
    type: str
    what: str
    call: int
    shape: tuple[int, ...] = ()
    max_abs_error: float = math.nan
    rel_error: float = math.nan
    cosine: float = math.nan
    n_different: int = 0
    own_rel: float = math.nan
    own_different: int | None = None
    own_note: str = ""
    problem: str = ""
    path: str = ""

    @property
    def differs(self) -> bool:
        """Whether it is beyond the tolerance, or could not be compared."""
        return bool(self.problem or self.n_different)

    @property
    def is_alone(self) -> bool:
        """Whether only one of the models has it."""
        return self.problem.startswith((MISSING, NOT_GIVEN))

    @property
    def label(self) -> str:
        """The module, its class and what the row is of, in words."""
        root = "" if self.name and self.name[0] not in "[." else "(model)"
        call = f"call {self.call}" if self.call else ""
        what = "" if self.what == "output" else self.what.replace("_", " ")
        return escape_controls(" ".join(filter(None, [root + self.name, self.type, call, what])))


@dataclass(frozen=True, repr=False)
class Comparison(Localisation):
    """What two models have for each layer, in the order in which the first one's finish.

    Iterates over its rows; `c["layer"]` gives those of one layer, `c[0]` the first of all. It is
    neither true nor false: ask `c.first is None`.

    Attributes:
        rows: one for each tensor of each call; those that only the second has come last.
        not_judged: what only one of the two has, in words; with `names=` also modules that are
            built otherwise, and beside a file objects without tensors, which have no row.
    """

    rows: tuple[Row, ...]
    not_judged: tuple[str, ...] = ()
    _AGREES: ClassVar[str] = "the models agree"

    @property
    def different(self) -> tuple[Row, ...]:
        """The rows that differ, or that only one model has.

        With `isolate=True` those that differ by their own error, without the modules around them;
        where none does, those that differ and whose own error is not known.
        """
        if not self._isolated:
            return tuple(r for r in self.rows if r.differs)
        own = [r for r in self.rows if r.own_different or (
            r.own_different is None and r.problem.startswith(MISSING))]  # fmt: skip
        inner = tuple(r for r in own if not any(_is_around(r, other) for other in own))
        return inner or tuple(r for r in self.rows if r.differs and r.own_different is None)

    @property
    def first(self) -> Row | None:
        """The first of the rows that are `different`; None if there is none."""
        return next(iter(self.different), None)

    @property
    def _isolated(self) -> bool:
        return any(r.own_different is not None for r in self.rows)

    def text(self) -> str:
        """The first difference and its neighbours, or with `isolate=True` the largest own errors.

        Above them, how many rows differ; below, what only one model has, and which layers have no
        own error.
        """
        rows = self._shown()
        marks = ["  ", *("→ " if r is self.first else "  " for r in rows)]
        lines = _lines(self._cells(rows)) if rows else []
        marked = [mark + line for mark, line in zip(marks, lines, strict=False)]
        return "\n".join([self.verdict, *marked, *wrap(self._rest(), _WIDTH, ". ")])

    @property
    def verdict(self) -> str:
        """How many tensors were compared and where the first difference is, in one line."""
        both = [r for r in self.rows if not r.is_alone]
        n, n_beyond, n_alone = len(both), sum(r.differs for r in both), len(self) - len(both)
        compared = f"{n} tensor{'s' * (n != 1)} compared"
        differ = f"{n_beyond} differ{'s' * (n_beyond == 1)}"
        differ += f", {n_alone} in one of the models alone" * bool(n_alone)
        first = self.first
        if first is None:
            none = f"{differ}, none by itself: small ones add up, or come from elsewhere"
            return f"{compared}, {none}" if n_beyond else f"{compared}: {_NO_DIFFERENCE}"
        by_own = f", {len(self.different)} by their own error" if self._isolated else ""
        why = f"{si(first.n_different)} of {si(math.prod(first.shape))} elements"
        why = f"own error {first.own_rel:.3g}" if first.own_different else first.problem or why
        return f"{compared}, {differ}{by_own}, first {first.label} ({why})"

    def _shown(self) -> tuple[Row, ...]:
        first = self.first
        if first is None:
            apart = sorted((r for r in self.rows if r.rel_error > 0), key=lambda r: -r.rel_error)
            return tuple(apart[: 2 * _NEAR + 1])
        if self._isolated:
            largest = sorted(self.different, key=lambda r: -r.own_rel)[: 2 * _NEAR]
            return tuple(r for r in self.rows if r is first or any(r is x for x in largest))
        at = self.rows.index(first)
        return self.rows[max(0, at - _NEAR) : at + _NEAR + 1]

    def _cells(self, rows: Sequence[Row]) -> list[tuple[str, ...]]:
        """The heading and a line for each of `rows`; with `own_rel` where one of all has it."""
        cells: list[tuple[str, ...]] = [(*_HEAD, *["own_rel"] * self._isolated)]
        for r in rows:
            own = "–" if r.own_different is None else f"{r.own_rel:.3g}"
            numbers = (
                f"{r.max_abs_error:.3g}",
                f"{r.rel_error:.3g}",
                f"{r.cosine:.6f}",
                si(r.n_different),
            )
            values = (r.problem, "", "", "") if r.problem else numbers
            shape = "×".join(map(str, r.shape)) or "scalar"
            cells.append((r.label, shape, *values, *[own] * self._isolated))
        return cells

    def _rest(self) -> list[str]:
        rest = ["Those that differ most are shown"] if self.first is None and self._shown() else []
        rest += _listed("Not judged", self.not_judged, ".not_judged")
        if self._isolated:
            notes = {f"{r.name or '(model)'} ({r.own_note})": 0 for r in self.rows if r.own_note}
            rest += _listed("Not called alone as it is", [*notes], ".own_note")
        return rest


def _is_around(row: Row, other: Row) -> bool:
    """Whether a row is of a module around that of another."""
    name, inner = (r.name.removesuffix(r.path) for r in (row, other))
    return inner != name and inner.startswith(f"{name}." * bool(name))


def _listed(what: str, texts: Sequence[str], where: str) -> list[str]:
    """The first six of `texts` in one; none if there are none."""
    some, more = [escape_controls(text) for text in texts[:6]], len(texts) - 6
    some += [f"and {more} more ({where})"] * (more > 0)
    return [f"{what}: {', '.join(some)}"] * bool(some)


def _lines(cells: list[tuple[str, ...]]) -> list[str]:
    """Columns that line up."""
    whole = [row for row in cells if "" not in row]  # a problem takes the place of all numbers
    sizes = [max(len(row[i]) for row in (cells if i < 2 else whole)) for i in range(len(cells[0]))]
    lines = []
    for label, shape, *values in cells:
        numbers = [v.rjust(n) for v, n in zip(values, sizes[2:], strict=True)]
        shown = values[:1] if "" in values else numbers
        lines.append("  ".join([label.ljust(sizes[0]), shape.ljust(sizes[1]), *shown]).rstrip())
    return lines
