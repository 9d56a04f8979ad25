"""`Summary`: a model at a glance as plain numbers and text, with no reference to the model.

Builds on `summary_rows`; draws itself by `summary_drawing`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hookkit._core.messages import import_pandas, no_such
from hookkit._core.text import nbytes, si
from hookkit.inspection.summary_drawing import as_html, as_text
from hookkit.inspection.summary_rows import NUMBERS, Row, Totals

if TYPE_CHECKING:
    from pandas import DataFrame

_WRAPPED = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module)(\.|$))+")
_RUNS = {
    "real": "One forward was run, and the model put back as it was",
    "fake": "Run on fake tensors, since it is large: nothing computed, nothing changed",
    "meta": "Run on meta: nothing computed, nothing changed",
    "none": "No input given: nothing was run",
}
_COLUMNS = (
    *("name", "kind", "type", "depth", "inputs", "outputs", "calls", *NUMBERS),
    *("trainable", "notes", "dtype", "extra", "leaf"),
)  # of a data frame


@dataclass(frozen=True, repr=False, kw_only=True)
class Summary(Totals):
    """Describe a model at a glance. Prints as a table, folds in notebooks.

    Iterating gives the rows in execution order; `s["layer1.0"]` finds one by name. The numbers
    `n_params`, `n_trainable`, `param_bytes`, `buffer_bytes`, `macs` and `saved_bytes` are the sums
    of the column over all rows, where a row `r` has its own share, and `r.total` all below it too.

    Attributes:
        dtype: the dtype of most parameters.
        grad_bytes: bytes of the gradients of one backward pass.
        run: "real", "fake" or "meta" (on tensors without values), or "none" (no input).
        uncounted: operations for which no MAC formula is known, with how often each ran.
        not_restored: attributes and globals that the run has changed, or may have, for good.
        optimizer: name, groups and state of the optimizer that was given.
        failed: names of the modules that were running when the model raised, outermost first.
        view: how it is drawn by default: `fold`, `depth` and `columns`.
    """

    rows: tuple[Row, ...]
    inputs: str = ""
    output: str = ""
    dtype: str = ""
    grad_bytes: int = 0
    run: str = "none"
    uncounted: dict[str, int] = field(default_factory=dict)
    not_restored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    optimizer: dict[str, Any] | None = None
    failed: tuple[str, ...] = ()
    view: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Totals:
        """All sums at once."""
        return self.rows[0].total

    @property
    def step_bytes(self) -> int:
        """Bytes of parameters, buffers, gradients, optimizer and saved tensors in a training step.

        Without passing intermediates and workspaces that autograd does not save.
        """
        state = int((self.optimizer or {}).get("state_bytes") or 0)
        return self.param_bytes + self.buffer_bytes + self.grad_bytes + state + self.saved_bytes

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        return any(r.name == name for r in self.rows)

    def __getitem__(self, name: str | int) -> Row:
        if isinstance(name, int):
            return self.rows[name]
        for known in (name, _WRAPPED.sub("", str(name))):  # also as a wrapped model names it
            for row in self.rows:
                if row.name == known:
                    return row
        raise no_such(f'no row "{name}" among {len(self.rows)}', name, (r.name for r in self.rows))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, numbers and text, ready for JSON."""
        plain = asdict(self)
        del plain["view"]
        return {**plain, "totals": asdict(self.total)}

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def to_df(self) -> DataFrame:
        """Return the rows as a pandas DataFrame, indexed by name.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        rows = [{k: getattr(r, k) for k in _COLUMNS} for r in self.rows]
        return import_pandas().DataFrame(rows).set_index("name")

    def text(
        self,
        *,
        width: int | None = None,
        fold: bool | None = None,
        depth: int | None = None,
        columns: Any = None,
    ) -> str:
        """Draw the table as text, at most `width` characters wide (by default as the terminal is).

        Args:
            width: in characters; outputs, types, names and notes that do not fit are cut.
            fold: draw equal siblings once, as `0..11 ×12`.
            depth: show modules down to this depth; those at it carry what is below them.
            columns: names of columns, in the order drawn: type, input, output, params, train,
                macs, saved, bytes, calls, dtype.

        Raises:
            OptionError: there is no such column.
        """
        return as_text(self, **self._viewed(fold, depth, columns), width=width)

    def html(
        self, *, fold: bool | None = None, depth: int | None = None, columns: Any = None
    ) -> str:
        """Draw the table as one piece of HTML that folds; arguments as for `text`."""
        return as_html(self, **self._viewed(fold, depth, columns))

    def _viewed(self, fold: bool | None, depth: int | None, columns: Any) -> dict[str, Any]:
        chosen = {"fold": fold, "depth": depth, "columns": columns}
        view = {"fold": True, "depth": None, "columns": None, **self.view}
        return view | {k: v for k, v in chosen.items() if v is not None}

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__  # the prompt shows the table

    def _repr_html_(self) -> str:
        return self.html()

    def heading(self) -> str:
        """Return the model's class with its inputs and its output."""
        output = self.output or ("✗" if self.failed else "–")
        flow = f"   {self.inputs} → {output}" if self.run != "none" else ""
        return f"{self.rows[0].type}{flow}"

    def footer(self) -> list[list[str]]:
        """Return the facts below the table, by line: totals, memory, and how they were found."""
        held = f"{self.n_params:,} params, {nbytes(self.param_bytes)} {self.dtype}".rstrip()
        buffers = f"buffers {nbytes(self.buffer_bytes)}" if self.buffer_bytes else "no buffers"
        trainable = f"{self.n_trainable:,} trainable"
        parts = [[held if self.n_params else "no params", trainable, buffers]]
        if self.run != "none" and not self.failed:
            parts.append(
                [f"{si(self.macs)} MACs forward", f"{nbytes(self.saved_bytes)} saved for backward"]
            )
            if self.n_trainable:
                with_state = "before the optimizer's state"
                if self.optimizer:
                    unknown = " (state unknown)" * (self.optimizer["state_bytes"] is None)
                    with_state = f"with {self.optimizer['name']}{unknown}"
                parts[-1].append(f"training step ≈ {nbytes(self.step_bytes)} {with_state}")
        parts += _optimizer_lines(self.optimizer) if self.optimizer else []
        if self.failed:
            row = self[self.failed[-1]]
            what = f"{row.type}({row.extra})" if row.extra else row.type
            parts.append([f"✗ {row.name or '(itself)'} got {row.inputs or 'nothing'}, is {what}"])
        if self.uncounted:
            listed = [f"{name} ×{k}" for name, k in self.uncounted.items()]
            parts.append([f"MACs not counted: {listed[0]}", *listed[1:]])
        first, *others = self.not_restored or ("",)
        run = _RUNS[self.run] + (f", except: {first}" if first else ".")
        return [*parts, *([note] for note in self.notes), [run, *others]]


def _optimizer_lines(opt: dict[str, Any]) -> list[list[str]]:
    """Return one line for the optimizer and one for each of its parameter groups."""
    state = opt["state_bytes"]
    about = "" if state is None else f"   state {nbytes(state)}{opt['state_from']}"
    out = [[f"Optimizer {opt['name']}{about}"]]
    for g in opt["groups"]:
        free, n = g["n_trainable"], g["n_params"]
        trains = f"{free:,} of {n:,} trainable" if free else f"frozen ({n:,})" if n else "empty"
        what = [f"{k} {g[k]:g}" for k in ("lr", "weight_decay") if k in g]
        name = f" {g['name']}" if g["name"] else ""
        out.append([f"  group {g['index']}{name}: {trains}", *what])
    return out
