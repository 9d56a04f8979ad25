"""A summary as a value: rows of plain numbers and text, with totals, and no reference to the model.

Each row holds what its module owns itself, so that every column adds up to the totals; what is
below it too stands in `row.total`. Text, HTML and comparison are drawn from here (`texttable`,
`htmltable`, `comparing`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, overload

from hookkit.checks import check_flag, check_number
from hookkit.errors import (
    ArgumentError,
    OptionError,
    SelectionError,
    missing_extra,
    nearest,
)

NUMBERS = ("n_params", "n_trainable", "param_bytes", "buffer_bytes", "macs", "saved_bytes")

_WRAPPED = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module)(\.|$))+")


@dataclass(frozen=True)
class Totals:
    """Sums over a module and all below it; `macs` and `saved_bytes` are 0 where nothing ran."""

    n_params: int = 0
    n_trainable: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    macs: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, n) + getattr(other, n) for n in NUMBERS))


@dataclass(frozen=True)
class Row:
    """One module, bare parameter, or further place of a shared module.

    Attributes:
        name: qualified, without wrappers; "" for the model itself.
        kind: "module", "parameter" (held beside child modules) or "again" (shared, see `notes`).
        depth: 0 for the model.
        outputs: the different outputs of its calls as text, `4×10` or `(4×10, {'h': 2×3})`.
        shape, in_shape: of the first call as lists in the containers they came in; None if unknown.
        calls: times it ran; None where nothing was run or it has no forward of its own.
        n_params .. saved_bytes: its own share; parameters and memory count where they come first.
        macs: multiply-accumulates of one forward that no module inside it accounts for.
        saved_bytes: memory that autograd keeps for the backward pass.
        trainable: True, False, the trainable share of its own parameters, None without any.
        tied: where its first tied parameter stands; "" if it has none.
        total: its own share and that of all rows below it.
    """

    name: str
    kind: str
    type: str
    depth: int
    inputs: str = ""
    outputs: tuple[str, ...] = ()
    shape: Any = None
    in_shape: Any = None
    calls: int | None = None
    n_params: int = 0
    n_trainable: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    macs: int = 0
    saved_bytes: int = 0
    trainable: bool | float | None = None
    tied: str = ""
    notes: tuple[str, ...] = ()
    dtype: str = ""
    extra: str = ""
    training: bool = True
    leaf: bool = True
    total: Totals = Totals()

    @property
    def own(self) -> Totals:
        """Its own share, as `Totals`."""
        return Totals(*(getattr(self, n) for n in NUMBERS))


@dataclass(frozen=True)
class View:
    """How a summary is drawn unless asked otherwise; `columns=None` are the usual ones."""

    fold: bool = True
    depth: int | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, repr=False)
class Summary:
    """A model at a glance. Prints as a table, folds in notebooks, compares with `diff`.

    Iterating gives the rows in execution order; `s["layer1.0"]` finds one by name.

    Attributes:
        dtype: the type of most parameters.
        grad_bytes: what the gradients of one backward pass take.
        run: "fake" (on tensors without values), "real" (values were needed) or "none" (no input).
        why: what needed values, for a real run.
        uncounted: operations for which no MAC formula is known, with how often each ran.
        optimizer: what `optimizing.describe` tells of the optimizer that was given.
        failed: names of the modules that were running when the model raised, outermost first.
    """

    rows: tuple[Row, ...]
    inputs: str = ""
    output: str = ""
    dtype: str = ""
    grad_bytes: int = 0
    run: str = "none"
    why: str = ""
    wrappers: tuple[str, ...] = ()
    uncounted: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    footnotes: tuple[str, ...] = ()
    optimizer: dict[str, Any] | None = None
    failed: tuple[str, ...] = ()
    error: str = ""
    view: View = View()

    @property
    def total(self) -> Totals:
        """All sums at once."""
        return self.rows[0].total

    @property
    def n_params(self) -> int:
        """Distinct parameters, in elements."""
        return self.total.n_params

    @property
    def n_trainable(self) -> int:
        """Distinct parameters with `requires_grad`, in elements."""
        return self.total.n_trainable

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward."""
        return self.total.macs

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps for the backward pass of one forward."""
        return self.total.saved_bytes

    @property
    def param_bytes(self) -> int:
        """Bytes of the distinct storages of the parameters."""
        return self.total.param_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the distinct storages of the buffers."""
        return self.total.buffer_bytes

    @property
    def step_bytes(self) -> int:
        """A training step at its fullest: parameters, buffers, gradients, optimizer, saved bytes.

        Without workspaces of kernels and passing intermediates, which depend on the device.
        """
        state = (self.optimizer or {}).get("state_bytes") or 0
        held = self.param_bytes + self.buffer_bytes
        return held + self.grad_bytes + int(state) + self.saved_bytes

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

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
            raise ArgumentError(f"s[{name!r}]: give the name of a row, its place, or a slice")
        inner = _WRAPPED.sub("", name)  # as a wrapped model names it
        found = {r.name: r for r in self.rows if r.name in (name, inner)}
        if not found:
            near = nearest(name, (r.name for r in self.rows))
            hint = f"Nearest: {', '.join(near)}" if near else "list(s) gives all rows"
            raise SelectionError(f'no row "{name}" among {len(self.rows)}. {hint}')
        return found.get(name) or found[inner]

    def top(self, by: str = "macs", n: int = 5) -> list[Row]:
        """The `n` rows with the largest own `by`, largest first; rows with none are left out.

        Args:
            by: "macs", "n_params", "n_trainable", "saved_bytes", "param_bytes" or "buffer_bytes";
                "params" and "saved" work too.
        """
        key = {"params": "n_params", "saved": "saved_bytes"}.get(str(by), by)
        if not isinstance(key, str) or key not in NUMBERS:
            raise OptionError(f'top(by="{by}"): choose one of {", ".join(NUMBERS)}')
        if n is not None:
            check_number("top", "n", n, 0, whole=True)
        rows = sorted(self.rows, key=lambda r: -getattr(r, key))
        return [r for r in rows[:n] if getattr(r, key)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, numbers and text, ready for JSON."""
        plain = asdict(self)
        del plain["view"]
        totals = asdict(self.total)
        return {**plain, "totals": totals, **totals}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def to_df(self) -> Any:
        """The rows as a pandas DataFrame, one row each, indexed by name.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise missing_extra("pandas", "pandas", "make a DataFrame") from None
        skip = ("shape", "in_shape", "total")
        rows = [{k: v for k, v in vars(r).items() if k not in skip} for r in self.rows]
        return pd.DataFrame(rows).set_index("name")

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
            columns: names out of `texttable.COLUMNS`, in the order wanted.
        """
        from hookkit.summaries.text import render

        if width is not None:
            check_number("text", "width", width, 1, whole=True)
        return render(self, self._viewed(fold, depth, columns), width)

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
        from hookkit.summaries.html import render

        return render(self, self._viewed(fold, depth, columns), by)

    def diff(self, other: Summary) -> Any:
        """What is different in `other`, by qualified name; prints, and shows as HTML."""
        from hookkit.summaries.diff import compare

        if not isinstance(other, Summary):
            kind = type(other).__name__
            hint = "hookkit.summary(model, x)" if hasattr(other, "forward") else "a Summary"
            raise ArgumentError(f"diff of a Summary and a {kind}: give {hint}")
        return compare(self, other)

    def _viewed(self, fold: bool | None, depth: int | None, columns: Any) -> View:
        from hookkit.summaries.text import as_columns

        if depth is not None:
            check_number("text", "depth", depth, 0, whole=True)
        view, columns = self.view, as_columns(columns)
        view = view if fold is None else replace(view, fold=check_flag("Summary", "fold", fold))
        view = view if depth is None else replace(view, depth=depth)
        return view if columns is None else replace(view, columns=columns)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__  # at the prompt one wants the table

    def _repr_html_(self) -> str:
        return self.html()
