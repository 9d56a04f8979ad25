"""`Comparison`: how far the layers of two models are apart, as a value.

Builds on `measures`, `texts` and `markup`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from hookkit.errors import SelectionError, missing_extra, nearest
from hookkit.markup import fragment, table
from hookkit.texts import clip, harmless, pad, si, wrap

_NEAR = 2  # rows shown on each side of the first that differs
_HEAD = ("layer", "call", "shape", "max |a−b|", "‖a−b‖/‖a‖", "cosine", "beyond")


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
        own_rel: `rel` of what the second module returns for the first one's inputs: the error
            that it adds itself. NaN without `isolate=True`, and where it cannot be given them.
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
        own = self.own_different
        return bool(self.problem or (self.n_different if own is None else own))


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
        return next((r for r in self.rows if r.differs), None)

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
        """The first difference and its neighbours, then how many rows differ, and what is unpaired.

        Args:
            width: in columns.
        """
        near = self._near()
        lines = _lines([_HEAD, *map(self._cells, near)], width) if near else []
        return "\n".join([self.headline, *lines, *wrap(self._rest(), width, ". ")])

    @property
    def headline(self) -> str:
        """In one line: how many tensors were compared, and where the first difference is."""
        of = f"{len(self.rows)} tensors compared"
        if self.first is None:
            return f"{of}: no difference beyond the tolerance" if self.rows else "nothing compared"
        where = _label(self.first)
        by = self.first.problem or (
            f"{si(self.first.n_different)} of {si(self.first.n)} elements beyond the tolerance"
            if self.first.own_different is None
            else f"own error {self.first.own_rel:.3g}"
        )
        return f"{of}, {len(self.different)} differ, first {where} ({by})"

    def _near(self) -> tuple[Row, ...]:
        if self.first is None:
            apart = sorted((r for r in self.rows if r.rel > 0), key=lambda r: -r.rel)
            return tuple(apart[: 2 * _NEAR + 1])
        at = self.rows.index(self.first)
        return self.rows[max(0, at - _NEAR) : at + _NEAR + 1]

    def _cells(self, r: Row) -> tuple[str, ...]:
        mark = "→ " if r is self.first else "  "
        own = () if r.own_different is None else (f"own {r.own_rel:.2g}",)
        numbers = (f"{r.max_abs:.3g}", f"{r.rel:.3g}", f"{r.cosine:.6f}", si(r.n_different))
        values = (r.problem,) if r.problem else numbers
        return (mark + _label(r), str(r.call), "×".join(map(str, r.shape)) or "scalar",
                *values, *own)  # fmt: skip

    def _rest(self) -> list[str]:
        below = ["Shown are those that differ most"] if self.first is None and self._near() else []
        missing = [f"Unpaired: {', '.join(self.unpaired[:6])}"] if self.unpaired else []
        more = len(self.unpaired) - 6
        missing[:1] = [f"{m}, and {more} more" if more > 0 else m for m in missing]
        return [*below, *map(harmless, missing), *self.notes]

    def _repr_html_(self) -> str:
        """A table of all rows that differ, else of all, at most 200 of them."""
        rows = self.different or self.rows
        cells = [[c.strip() for c in self._cells(r)] for r in rows[:200]]
        width = max(map(len, cells), default=len(_HEAD))
        head = [*_HEAD, *[""] * (width - len(_HEAD))]
        body = table(self.headline, head, [c + [""] * (width - len(c)) for c in cells])
        return fragment(body + "".join(f"<p>{escape(line)}</p>" for line in self._rest()))

    def to_df(self) -> Any:
        """A pandas DataFrame with a line for each row.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise missing_extra("pandas", "pandas", "make a DataFrame") from None
        return pd.DataFrame([asdict(r) for r in self.rows])

    def plot(self, *, ax: Any = None) -> Any:
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


def _label(r: Row) -> str:
    what = "" if r.what == "output" else r.what.replace("_", " ")
    return " ".join(filter(None, [harmless(r.name) or "(model)", harmless(r.type), what]))


def _lines(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """Columns that line up; the first is cut where they would be wider than `width`."""
    n = max(map(len, rows))
    rows = [(*r, *[""] * (n - len(r))) for r in rows]
    sizes = [max(len(r[i]) for r in rows) for i in range(n)]
    sizes[0] = min(sizes[0], max(12, width - sum(sizes[1:]) - 2 * (n - 1)))
    return [
        "  ".join(pad(clip(cell, size), size, right=i > 2) for i, (cell, size) in enumerate(
            zip(r, sizes, strict=True))).rstrip()
        for r in rows
    ]  # fmt: skip
