"""`Comparison` holds how far the layers of two models are apart, and where the difference begins.

Builds on `first_difference`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hookkit._core.text import escape_controls, si, wrap
from hookkit.inspection.first_difference import Localisation

MISSING, NOT_GIVEN = "no such layer in the ", "not given by the "  # "first" or "second"
_WIDTH = 100  # columns
_NEAR = 2  # rows shown on each side of the first
_MOST = 6  # things shown that were not judged
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # a part of a name
_HEAD = ("layer", "shape", "rel_error", "input_error", "sqnr_db", "max_abs_error", "n_different")


@dataclass(frozen=True)
class Row:
    """Holds how far one tensor of the two models is apart, or that only one of them has it.

    Attributes:
        name: of the module in the first model, with the path of the tensor in what it returns;
            in the second, if only that has it. Modules whose weights are one fused weight in the
            other model are `"attn.{q,k,v}"`.
        other_name: its name in the second model.
        type: the module's class; in a file that does not say it, `""`.
        what: `"output"`; with `grads=True` also `"grad"`, the gradient of an output, and
            `"param_grad"`, that of a parameter.
        call: the number of the module's call, from 0.
        shape: the first model's.
        max_abs_error: the largest `|a − b|`.
        rel_error: `‖a − b‖ / ‖a‖`.
        sqnr_db: the signal-to-quantization-noise ratio, `20 log10(‖a‖ / ‖a − b‖)`, in decibels.
        cosine: of the angle between the two.
        n_different: elements beyond the tolerance.
        input_error: the largest `rel_error` of the module's inputs; NaN if it is not known. A layer
            whose error is far above it makes errors or amplifies them.
        paired: how the two modules were paired: by `"name"`, `"names="`, `"weights"`, their
            `"order"`, or the pairs that they are `"around"`.
        place: for the first difference, where in the module's forward it begins, in words.
        problem: why the values could not be compared; `""` if they were.
        path: the path of the tensor in the module's output; `""` for the output itself.
    """

    name: str
    other_name: str
    type: str
    what: str
    call: int
    shape: tuple[int, ...] = ()
    max_abs_error: float = math.nan
    rel_error: float = math.nan
    sqnr_db: float = math.nan
    cosine: float = math.nan
    n_different: int = 0
    input_error: float = math.nan
    paired: str = ""
    place: str = ""
    problem: str = ""
    path: str = ""

    @property
    def differs(self) -> bool:
        """Return whether it is beyond the tolerance, or could not be compared."""
        return bool(self.problem or self.n_different)

    @property
    def is_alone(self) -> bool:
        """Return whether only one of the models has it."""
        return self.problem.startswith((MISSING, NOT_GIVEN))

    @property
    def label(self) -> str:
        """Return the module, its class and what the row is of, in words."""
        root = "" if self.name and self.name[0] not in "[." else "(model)"
        call = f"call {self.call}" if self.call else ""
        what = "" if self.what == "output" else self.what.replace("_", " ")
        return escape_controls(" ".join(filter(None, [root + self.name, self.type, call, what])))


@dataclass(frozen=True, repr=False)
class Comparison(Localisation):
    """Says how far the layers of two models are apart, in the order in which the first's finish.

    Iterates over its rows; `c["layer"]` gives those of one layer, `c[0]` the first of all. It is
    neither true nor false: ask `c.first is None`.

    Attributes:
        rows: one for each tensor of each call; gradients come after the outputs, in the order of
            the backward; what only the second has comes last.
        not_judged: what could not be compared, each with the reason: modules that only one of the
            two has, or that return more in one of them. None of it counts as equal.
        names: the modules that were compared under other names, `{in the first: in the second}`:
            keep it in a test, and give it as `names=`.
        first: the row where the difference begins, None if nothing differs. It is the innermost
            call whose inputs agree and whose output does not; `first.place` says where in it. If
            all outputs agree, the gradient that the backward reaches first. Beside a file, which
            has no inputs, the first row that differs.
    """

    rows: tuple[Row, ...]
    not_judged: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    _first: int | None = None
    _AGREES: ClassVar[str] = "the models agree"

    @property
    def first(self) -> Row | None:
        """Return the row where the difference begins; None if nothing differs."""
        return None if self._first is None else self.rows[self._first]

    @property
    def different(self) -> tuple[Row, ...]:
        """Return the rows that differ, or that only one model has."""
        return tuple(r for r in self.rows if r.differs)

    @property
    def verdict(self) -> str:
        """Return in one line how many tensors were compared, and where the difference begins."""
        n, n_differ, first = len(self.rows), len(self.different), self.first
        compared = f"{n} tensor{'s' * (n != 1)} compared"
        if first is None and n_differ:
            return f"{compared}, {n_differ} within the model beyond the tolerance as errors add up"
        if first is None:
            return f"{compared}: no difference beyond the tolerance"
        much = f"{si(first.n_different)} of {si(math.prod(first.shape))} elements"
        where = f"{first.label}{', ' * bool(first.place)}{first.place} ({first.problem or much})"
        return f"{compared}, {n_differ} differ{'s' * (n_differ == 1)}, first {where}"

    def text(self) -> str:
        """Return the verdict, the first difference with its neighbours, and what was not judged.

        If nothing differs, the rows that are farthest apart.
        """
        shown = self._shown()
        lines = _lines([_HEAD, *map(_cells, shown)]) if shown else []
        marks = ["  ", *("→ " if r is self.first else "  " for r in shown)]
        marked = [mark + line for mark, line in zip(marks, lines, strict=False)]
        rest = ["Those that differ most are shown"] if self.first is None and shown else []
        how = Counter(r.paired for r in self.rows if r.what == "output" and r.paired)
        if how.keys() - {"name", "names="}:
            rest.append("Paired by " + ", ".join(f"{kind} {n}" for kind, n in how.most_common()))
        lines = [self.verdict, *marked, *wrap(rest, _WIDTH, ". ")]
        alike = Counter(_NUMBER.sub("*", escape_controls(text)) for text in self.not_judged)
        lines += ["Not judged:"] * bool(alike)
        lines += [f"  {text}" + f" ({n} times)" * (n > 1) for text, n in [*alike.items()][:_MOST]]
        left = sum([*alike.values()][_MOST:])
        return "\n".join([*lines, *[f"  and {left} more (.not_judged)"] * bool(left)])

    def _shown(self) -> Sequence[Row]:
        if self._first is None:
            apart = sorted((r for r in self.rows if r.rel_error > 0), key=lambda r: -r.rel_error)
            return apart[: 2 * _NEAR + 1]
        return self.rows[max(0, self._first - _NEAR) : self._first + _NEAR + 1]


def _cells(r: Row) -> tuple[str, ...]:
    shape = "×".join(map(str, r.shape)) or "scalar"
    if r.problem:
        return (r.label, shape, r.problem, "", "", "", "")
    numbers = (r.rel_error, r.input_error, r.sqnr_db, r.max_abs_error)
    texts = ["–" if math.isnan(x) else f"{x:.3g}" for x in numbers]
    return (r.label, shape, *texts, si(r.n_different))


def _lines(cells: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose columns line up; a problem takes the place of numbers."""
    whole = [row for row in cells if "" not in row]
    sizes = [max(len(row[i]) for row in (cells if i < 2 else whole)) for i in range(len(_HEAD))]
    lines = []
    for label, shape, *values in cells:
        numbers = [v.rjust(n) for v, n in zip(values, sizes[2:], strict=True)]
        shown = values[:1] if "" in values else numbers
        lines.append("  ".join([label.ljust(sizes[0]), shape.ljust(sizes[1]), *shown]).rstrip())
    return lines
