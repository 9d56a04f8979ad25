"""`StatsList` and `BatchStats`: what was recorded as fastai's lists of dicts, shown as tables.

A table has a row for each layer, of many layers the first and the last, and fastai's three
statistics. It is text in a terminal and HTML in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from fastcore.foundation import L
from torch import Tensor

from hookkit.errors import SelectionError, nearest
from hookkit.markup import fragment, table
from hookkit.records import Record, label
from hookkit.texts import clip, pad

MOST_ROWS = 12
"""Layers shown; of more, the first and the last half of these."""

MOST_COLUMNS = 36
"""Of a layer's label, in a terminal."""

_SHOWN = ("mean", "std", "near_zero")


class _Shown(L):  # type: ignore[misc]
    """A list that shows itself as a table, if `_batches` gives any; else as an `L`."""

    def _batches(self) -> tuple[str, list[BatchStats]] | None:
        """The table's title, and the records in it: one, or the first and the last."""
        raise NotImplementedError

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        # a slice is a plain L in fastcore up to 2.1
        return self._new(found) if type(found) is L and not isinstance(at, int) else found

    def __repr__(self) -> str:
        if (shown := self._batches()) is None:
            return str(super().__repr__())
        head, rows, note = _table(shown[1])
        rows = [(clip(" ".join(row[0].split()), MOST_COLUMNS), *row[1:]) for row in [head, *rows]]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(pad(row[i], n, right=i > 0) for i, n in enumerate(wide)) for row in rows]
        return "\n".join([shown[0], *(line.rstrip() for line in lines), *[note] * bool(note)])

    def _repr_html_(self) -> str | None:
        if (shown := self._batches()) is None:
            return None
        head, rows, note = _table(shown[1])
        below = f"<p>{escape(note)}</p>" if note else ""
        return fragment(table(shown[0], head, rows) + below)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # L's writes out every number


class StatsList(_Shown):
    """`stats[batch][layer]["mean"]`: an `L` of records, each an `L` of dicts; and v1's tensor."""

    def tensor(self) -> Tensor:
        """(2, n_modules, n_batches) float32, mean and std on the first axis, as in fastai v1."""
        rows = [[[layer[s] for layer in batch] for batch in self] for s in ("mean", "std")]
        n = len(self[0]) if len(self) else 0
        table = torch.tensor(rows, dtype=torch.float32, device="cpu").reshape(2, len(self), n)
        return table.transpose(1, 2).contiguous()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # the list's own
        except AttributeError:
            if name.startswith("__") or not hasattr(Tensor, name):
                raise
            raise AttributeError(
                f"StatsList has no attribute {name!r}: it is a list of records, where fastai v1's "
                f"stats was a tensor. Use `stats.tensor().{name}`; it has the shape "
                f"(2, n_modules, n_records).",
                name=name,
                obj=self,
            ) from None

    def _batches(self) -> tuple[str, list[BatchStats]] | None:
        if not len(self) or not all(map(_is_batch, (self[0], self[-1]))):
            return None  # made from one, by map or itemgot
        first, last = self[0], self[-1]
        span = f"steps {first.step}–{last.step}, first → last" if len(self) > 1 else last._when()
        title = f"StatsList({_n(len(self), 'record')} of {_n(len(last), 'layer')}, {span})"
        return title, [first, last] if len(self) > 1 else [last]

    def __repr__(self) -> str:
        return super().__repr__() if len(self) else "StatsList(0 records)"


class BatchStats(_Shown):
    """The layers of one record, by number or by name; and where it was made.

    Attributes:
        names: of the layers.
        types: the classes of their modules.
        step, epoch, iteration: optimizer step, epoch and training batch, 0-based.
    """

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    step = epoch = iteration = -1

    def __getitem__(self, layer: Any) -> Any:
        if not isinstance(layer, str):
            return self._placed(super().__getitem__(layer), layer)
        if layer not in self.names:
            near = nearest(layer, self.names) or list(self.names[:3])
            listed = ", ".join(f'"{name}"' for name in near)
            raise SelectionError(f'no recorded layer is called "{layer}". Nearest: {listed}.')
        return self.items[self.names.index(layer)]

    def _placed(self, found: Any, index: Any) -> Any:
        """`found`, with names and place if it is some of these layers."""
        if isinstance(found, BatchStats):
            found.names = tuple(L(self.names)[index])
            found.types = tuple(L(self.types)[index])
            found.step, found.epoch, found.iteration = self.step, self.epoch, self.iteration
        return found

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.names)

    def _when(self) -> str:
        return f"step {self.step}, epoch {self.epoch}"

    def _batches(self) -> tuple[str, list[BatchStats]] | None:
        if not _is_batch(self):
            return None
        return f"BatchStats({_n(len(self), 'layer')}, {self._when()})", [self]


def _n(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _is_batch(batch: Any) -> bool:
    """Whether `batch` is a record's layers, and not what `map` or a slice without names gave."""
    if not isinstance(batch, BatchStats) or len(batch.names) != len(batch):
        return False
    return all(isinstance(layer, dict) and "mean" in layer for layer in batch.items)


def _table(
    batches: list[BatchStats],
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]], str]:
    """Head, rows and a note: each layer's numbers in each of `batches`, with an arrow between."""
    last = batches[-1]
    shown = [s for s in _SHOWN if len(last) and s in last.items[0]]
    rest = [s for s in (last.items[0] if len(last) else ()) if s not in shown]
    rows = []
    for i, name in enumerate(last.names):
        kind = last.types[i] if i < len(last.types) else ""
        cells = [[number(batch.items[i][s]) for batch in batches] for s in shown]
        rows.append((label(name, kind), *map(" → ".join, cells)))
    if (n := len(rows) - MOST_ROWS) > 0:
        half = MOST_ROWS // 2
        rows[half:-half] = [(f"… {n} more", *[""] * len(shown))]
    return ("layer", *shown), rows, f"also {' '.join(rest)}" if rest else ""


def number(value: float) -> str:
    """A number in three digits; – for NaN.

    >>> number(0.12345), number(float("nan")), number(2.0)
    ('0.123', '–', '2')
    """
    return "–" if math.isnan(value) else f"{value:.3g}"


def listed(record: Record, rows: list[int]) -> StatsList:
    """`rows` of `record`, as a list of its steps."""
    tables = {name: table[rows].T.tolist() for name, table in record.values.items()}
    batches, names = [], tuple(record.names[row] for row in rows)
    types = tuple(record.types[row] for row in rows)
    for i in range(len(record)):
        layers = []
        for j, row in enumerate(rows):
            layer: dict[str, Any] = {name: table[i][j] for name, table in tables.items()}
            if record.hist is not None:
                layer["hist"] = torch.from_numpy(record.hist[row, :, i]).float()
            layers.append(layer)
        batch = BatchStats(layers)
        batch.names, batch.types, batch.step = names, types, int(record.steps[i])
        batch.epoch, batch.iteration = int(record.epochs[i]), int(record.iters[i])
        batches.append(batch)
    return StatsList(batches)
