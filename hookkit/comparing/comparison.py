"""`Comparison`: how far the layers of two models are apart, as a value.

Builds on `measures`, `texts` and `markup`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from hookkit.errors import SelectionError, nearest
from hookkit.markup import fragment, table
from hookkit.records.frames import pandas
from hookkit.texts import harmless, pad, si, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

_NEAR = 2  # rows shown on each side of the first that differs
_HEAD = ("layer", "shape", "max_abs", "rel", "cosine", "n_different")


@dataclass(frozen=True)
class Row:
    """One tensor of both models: what one module returned in one call, or a gradient.

    Attributes:
        name: of the module in the first model, with the path of the tensor in what it returns.
        other_name: its name in the second model.
        type: the module's class in the first model.
        what: `"output"`; with `grads=True` also `"grad"`, the gradient of an output, and
            `"param_grad"`, that of a parameter.
        call: the number of the module's call, from 0.
        shape: the first model's.
        dtype: the first model's, such as `"float32"`.
        max_abs: the largest `|a − b|`.
        rel: `‖a − b‖ / ‖a‖`.
        cosine: of the angle between the two.
        n_different: elements beyond the tolerance.
        n: elements.
        own_rel: the error that the second module's own code adds to the first one's values: the
            largest `rel` of what it returns, and of what it hands to other modules, where it is
            given what the first one received, and those return what the first one's did. NaN
            without `isolate=True`, and where it cannot be given that.
        own_different: elements beyond the tolerance then; None where `own_rel` is NaN.
        problem: why the values could not be compared; `""` where they were.
    """

    name: str
    other_name: str
    type: str
    what: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    rel: float
    cosine: float
    n_different: int
    n: int
    own_rel: float = math.nan
    own_different: int | None = None
    problem: str = ""

    @property
    def differs(self) -> bool:
        """Whether it is beyond the tolerance; by its own error where that is known."""
        if self.own_different is not None:
            return bool(self.own_different)
        return bool(self.problem or self.n_different)


@dataclass(frozen=True, repr=False)
class Comparison:
    """What two models have for each layer, in the order in which the first one's finish.

    Iterates over its rows; `c["layer"]` gives those of one layer, `c[0]` the first of all.

    Attributes:
        rows: one for each tensor of each call.
        unpaired: what only one of the two has, in words.
        notes: what else is to be known of this comparison.
    """

    rows: tuple[Row, ...]
    unpaired: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def different(self) -> tuple[Row, ...]:
        """The rows beyond the tolerance; with `isolate=True` those that are so by themselves."""
        return tuple(r for r in self.rows if r.differs)

    @property
    def first(self) -> Row | None:
        """The first row beyond the tolerance; None if there is none."""
        return next(iter(self.different), None)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | str) -> Any:
        if not isinstance(key, str):
            return self.rows[key]
        found = tuple(r for r in self.rows if key in (r.name, r.other_name))
        if not found:
            names = dict.fromkeys(r.name for r in self.rows)
            near = nearest(key, names) or list(names)[:3]
            raise SelectionError(
                f'Comparison: no row is called "{key}". Nearest: '
                f"{', '.join(map(repr, near)) or 'there are none'}."
            )
        return found

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def text(self, width: int = 100) -> str:
        """The first difference and its neighbours, or with `isolate=True` the largest own errors.

        Above them, how many rows differ; below, what is unpaired.

        Args:
            width: in columns.
        """
        near = self._near()
        marks = ["  ", *("→ " if r is self.first else "  " for r in near)]
        table = self._table(near)
        if max(len(r[0]) for r in table) > _room(table, width - 2):
            table = self._table(near, types=False)
        lines = _lines(table, width - 2) if near else []
        marked = [mark + line for mark, line in zip(marks, lines, strict=False)]
        return "\n".join([self.headline, *marked, *wrap(self._rest(), width, ". ")])

    @property
    def headline(self) -> str:
        """How many tensors were compared and where the first difference is, in one line."""
        n = len(self.rows)
        n_beyond = sum(bool(r.problem or r.n_different) for r in self.rows)
        of = f"{n} tensor{'s' * (n != 1)} compared"
        if self.first is None and n_beyond:
            return f"{of}, {_differ(n_beyond)}, none by itself: small errors add up"
        if self.first is None:
            return f"{of}: no difference beyond the tolerance" if self.rows else "nothing compared"
        where = _label(self.first)
        if self.first.own_different is not None:
            own = f", {sum(bool(r.own_different) for r in self.rows)} by their own error"
            by = f"own error {self.first.own_rel:.3g}"
        else:
            beyond = f"{si(self.first.n_different)} of {si(self.first.n)} elements"
            own, by = "", self.first.problem or f"{beyond} beyond the tolerance"
        return f"{of}, {_differ(n_beyond)}{own}, first {where} ({by})"

    def _near(self) -> tuple[Row, ...]:
        if self.first is None:
            apart = sorted((r for r in self.rows if r.rel > 0), key=lambda r: -r.rel)
            return tuple(apart[: 2 * _NEAR + 1])
        if self.first.own_different is not None:
            own = sorted(self.different, key=lambda r: (r.own_different is None, -r.own_rel))
            shown = {id(r) for r in (self.first, *own[: 2 * _NEAR])}
            return tuple(r for r in self.rows if id(r) in shown)
        at = self.rows.index(self.first)
        return self.rows[max(0, at - _NEAR) : at + _NEAR + 1]

    def _table(self, rows: Iterable[Row], *, types: bool = True) -> list[tuple[str, ...]]:
        """The heading and a line for each of `rows`; with `own_rel` where one of all has it."""
        isolated = any(r.own_different is not None for r in self.rows)
        lines: list[tuple[str, ...]] = [(*_HEAD, *["own_rel"] * isolated)]
        for r in rows:
            own = "–" if r.own_different is None else f"{r.own_rel:.3g}"
            numbers = (f"{r.max_abs:.3g}", f"{r.rel:.3g}", f"{r.cosine:.6f}", si(r.n_different))
            values = (r.problem, "", "", "") if r.problem else numbers
            shape = "×".join(map(str, r.shape)) or "scalar"
            lines.append((_label(r, types=types), shape, *values, *[own] * isolated))
        return lines

    def _rest(self) -> list[str]:
        most = ["Those that differ most are shown"] if self.first is None and self._near() else []
        names, more = [harmless(text) for text in self.unpaired[:6]], len(self.unpaired) - 6
        names += [f"and {more} more (.unpaired)"] * (more > 0)
        return [*most, *[f"Unpaired: {', '.join(names)}"] * bool(names), *self.notes]

    def _repr_html_(self) -> str:
        """A table of all rows that differ, else of all, at most 200 of them."""
        head, *cells = self._table((self.different or self.rows)[:200])
        body = table(self.headline, head, cells)
        return fragment(body + "".join(f"<p>{escape(line)}</p>" for line in self._rest()))

    def to_df(self) -> DataFrame:
        """A pandas DataFrame with a line for each row.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return pandas().DataFrame([asdict(r) for r in self.rows])

    def plot(self, *, ax: Any = None) -> Axes:
        """The error by depth: `rel` of each row, and `own_rel` where it is known.

        Args:
            ax: matplotlib axes to draw in; new ones by default.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from hookkit.plotting.errors import plot_errors

        return plot_errors(self, ax=ax)


def _differ(n: int) -> str:
    return f"{n} differ{'s' * (n == 1)}"


def _label(r: Row, *, types: bool = True) -> str:
    name = harmless(r.name)
    what = "" if r.what == "output" else r.what.replace("_", " ")
    call = f"call {r.call}" if r.call else ""
    root = "" if name and name[0] not in "[." else "(model)"
    return " ".join(filter(None, [root + name, harmless(r.type) if types else "", call, what]))


def _room(rows: list[tuple[str, ...]], width: int) -> int:
    """How wide the first column can be, at least 12."""
    return max(12, width - sum(_sizes(rows)[1:]) - 2 * (len(rows[0]) - 1))


def _sizes(rows: list[tuple[str, ...]]) -> list[int]:
    whole = [r for r in rows if "" not in r]  # a problem takes the place of all numbers
    return [max(len(r[i]) for r in (rows if i < 2 else whole)) for i in range(len(rows[0]))]


def _lines(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """Columns that line up; the first loses its beginning where they are wider than `width`."""
    sizes, lines = _sizes(rows), []
    sizes[0] = min(sizes[0], _room(rows, width))
    for label, shape, *values in rows:
        # the end of a name says more than its beginning, which neighbours share
        short = label if len(label) <= sizes[0] else "…" + label[1 - sizes[0] :]
        numbers = [pad(v, n, right=True) for v, n in zip(values, sizes[2:], strict=True)]
        shown = values[:1] if "" in values else numbers
        lines.append("  ".join([pad(short, sizes[0]), pad(shape, sizes[1]), *shown]).rstrip())
    return lines
