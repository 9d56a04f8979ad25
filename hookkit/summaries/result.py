"""A summary as a value: rows of plain numbers and text, with totals, and no reference to the model.

Builds on `lines` for its content and on `text`, `html` and `diff`, which draw and compare it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from hookkit.checks import check_flag, check_number, kind_of
from hookkit.errors import ArgumentError, OptionError, SelectionError, nearest
from hookkit.records.frames import pandas
from hookkit.summaries.columns import as_columns, check_counted
from hookkit.summaries.diff import SummaryDiff, compare
from hookkit.summaries.html import as_html
from hookkit.summaries.lines import Content, View
from hookkit.summaries.rows import NUMBERS, Row
from hookkit.summaries.text import as_text

if TYPE_CHECKING:
    from pandas import DataFrame

_WRAPPED = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module)(\.|$))+")


@dataclass(frozen=True, repr=False)
class Summary(Content):
    """A model at a glance. Prints as a table, folds in notebooks, compares with `diff`.

    Iterating gives the rows in execution order; `s["layer1.0"]` finds one by name. Its numbers and
    texts are those of `Content`: rows, totals, inputs and output, run, warnings, optimizer, error.
    """

    def __contains__(self, name: object) -> bool:
        return any(r.name == name for r in self.rows)

    @overload
    def __getitem__(self, name: str | int) -> Row: ...
    @overload
    def __getitem__(self, name: slice) -> list[Row]: ...
    def __getitem__(self, name: str | int | slice) -> Row | list[Row]:
        if isinstance(name, slice):
            return list(self.rows[name])
        if isinstance(name, int) and not isinstance(name, bool):
            return self.rows[name]
        if not isinstance(name, str):
            raise ArgumentError(f"s[{name!r}]: give the name of a row, its index, or a slice")
        inner = _WRAPPED.sub("", name)  # as a wrapped model names it
        found = {r.name: r for r in self.rows if r.name in (name, inner)}
        if not found:
            near = nearest(name, (r.name for r in self.rows))
            hint = f"Nearest: {', '.join(near)}" if near else "list(s) gives all rows"
            raise SelectionError(f'no row "{name}" among {len(self.rows)}. {hint}')
        return found.get(name) or found[inner]

    def top(self, by: str = "macs", n: int = 5) -> list[Row]:
        """The `n` rows with the largest own `by`, largest first, without those that have none.

        Args:
            by: "macs", "n_params", "n_trainable", "saved_bytes", "param_bytes" or "buffer_bytes";
                "params" and "saved" work too.
        """
        key = {"params": "n_params", "saved": "saved_bytes"}.get(str(by), by)
        if not isinstance(key, str) or key not in NUMBERS:
            raise OptionError(f'top(by="{by}"): choose one of {", ".join(NUMBERS)}')
        check_counted(self.macs is not None, [key], 'top(by="macs")')
        if n is not None:
            check_number("top", "n", n, 0, whole=True)
        rows = sorted(self.rows, key=lambda r: -getattr(r, key))
        return [r for r in rows[:n] if getattr(r, key)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, numbers and text, ready for JSON.

        `macs` are None where they were not counted.
        """
        plain = asdict(self)
        del plain["view"]
        totals = asdict(self.total)
        return {**plain, "totals": totals, **totals}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def to_df(self) -> DataFrame:
        """The rows as a pandas DataFrame, one row each, indexed by name.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        skip = ("shape", "in_shape", "total")
        rows = [{k: v for k, v in vars(r).items() if k not in skip} for r in self.rows]
        return pandas().DataFrame(rows).set_index("name")

    def text(
        self,
        *,
        width: int | None = None,
        fold: bool | None = None,
        depth: int | None = None,
        columns: Any = None,
    ) -> str:
        """The table as text, at most `width` columns wide (that of the terminal by default).

        Args:
            fold: draw equal siblings once, as `0..11 ×12`.
            depth: show modules down to this depth; those at it carry what is below them.
            columns: names of columns, in the order drawn: type, input, output, params, percent,
                train, macs, saved, bytes, buffers, calls, dtype, mode.
        """
        if width is not None:
            check_number("text", "width", width, 1, whole=True)
        return as_text(self, self._viewed(fold, depth, columns), width)

    def html(
        self,
        *,
        by: str = "params",
        fold: bool | None = None,
        depth: int | None = None,
        columns: Any = None,
    ) -> str:
        """The table as one piece of HTML that folds.

        Args:
            by: what its bars show the share of: "params", "macs" or "saved".
            fold, depth, columns: as for `text`.
        """
        return as_html(self, self._viewed(fold, depth, columns), by)

    def diff(self, other: Summary) -> SummaryDiff:
        """What is different in `other`, by qualified name; prints as a table.

        Raises:
            ArgumentError: `other` is no Summary.
        """
        if not isinstance(other, Summary):
            kind = kind_of(other)
            hint = "hookkit.summary(model, x)" if hasattr(other, "forward") else "a Summary"
            raise ArgumentError(f"Summary.diff: expected a Summary, found {kind}. Give {hint}.")
        return compare(self, other)

    def _viewed(self, fold: bool | None, depth: int | None, columns: Any) -> View:
        if depth is not None:
            check_number("text", "depth", depth, 0, whole=True)
        view, columns = self.view, as_columns(columns)
        check_counted(self.macs is not None, columns, 'the column "macs"')
        view = view if fold is None else replace(view, fold=check_flag("Summary", "fold", fold))
        view = view if depth is None else replace(view, depth=depth)
        return view if columns is None else replace(view, columns=columns)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__  # the prompt shows the table

    def _repr_html_(self) -> str:
        return self.html()
