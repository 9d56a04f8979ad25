"""Memory that never grows past a bound: a ring of records that halves its resolution when full.

A column is one record of all rows: (rows, fields) moments and, if wanted, (rows, bins) counts.
When the last column is full, neighbours merge pairwise and exactly, and from then on each column
takes twice as many recorded steps: the resolution stays even over the whole run, its start
included. Steps, epochs and spans are host numbers that nobody has to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.moments import empty_rows, merge

BUDGET_BYTES = 10 * 2**20
MAX_COLUMNS = 4096
MIN_COLUMNS = 64


@dataclass
class Axis:
    """The columns' places in time, shared by the rings of all devices.

    Args:
        limit: most columns; even.
        stride: how many recorded steps a column takes.
    """

    limit: int = MAX_COLUMNS
    stride: int = 1
    steps: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    iters: list[int] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def open(self) -> bool:
        """Whether the next record still merges into the last column."""
        return bool(self.spans) and self.spans[-1] < self.stride

    @property
    def full(self) -> bool:
        """Whether the next record needs a column that the limit does not leave."""
        return len(self) >= self.limit and not self.open

    def add(self, step: int, epoch: int, iteration: int) -> bool:
        """Note a record; True if it merges into the last column."""
        if self.open:
            self.spans[-1] += 1
            return True
        for values, value in zip(self._lists(), (step, epoch, iteration, 1), strict=True):
            values.append(value)
        return False

    def halve(self) -> None:
        """Merge neighbouring columns; the first one's place counts."""
        odd = len(self) % 2
        spans = self.spans + [0] * odd
        self.spans[:] = [a + b for a, b in zip(spans[::2], spans[1::2], strict=True)]
        for values in self._lists()[:-1]:
            values[:] = values[::2]
        self.stride *= 2

    def fit(self, column_bytes: int) -> None:
        """Set the limit so that `column_bytes` per record stay within the budget."""
        fits = BUDGET_BYTES // max(column_bytes, 1)
        self.limit = max(MIN_COLUMNS, min(MAX_COLUMNS, fits)) // 2 * 2

    def check_ranks(self, kind: str, layout: Any, found: str) -> None:
        """Raises on every rank, unless all of them recorded the same steps in the same `layout`.

        Args:
            kind: of the record.
            layout: what else the tables of all ranks have to share before they are merged.
            found: `layout` in a few words.

        Raises:
            HookError: the ranks differ.
        """
        n = sum(self.spans)
        many = f"{n} step{'s' * (n != 1)}" + (f" from {self.steps[0]} on" if n else "")
        ranks.check_same(
            (kind, self.steps, self.spans, layout),
            asked="record() merges what all ranks recorded, and they recorded different steps or "
            "layouts",
            found=f"{kind}s of {many}, {found}",
            cure="Record the same on every rank, or use record(local=True) for this rank's own.",
        )

    def _lists(self) -> tuple[list[int], ...]:
        return self.steps, self.epochs, self.iters, self.spans


class Ring:
    """The columns of one device: grown as needed, halved when the axis says so.

    Args:
        rows: how many rows a column has; more may be added later.
        fields: (rows, fields) is a column; moments have nine, counts as many as there are bins.
        counts: True if columns are added up, False if they are rows of moments to be merged.
    """

    def __init__(self, rows: int, fields: int, dtype: torch.dtype, device: Any, counts: bool):
        self.counts = counts
        self.data = self._blank(16, rows, fields, dtype, device)

    def _blank(self, n: int, rows: int, fields: int, dtype: torch.dtype, device: Any) -> Tensor:
        if self.counts:
            return torch.zeros(n, rows, fields, dtype=dtype, device=device)
        return empty_rows(n * rows, device, dtype).view(n, rows, fields)

    def _resize(self, n: int, rows: int) -> None:
        old = self.data
        self.data = self._blank(n, rows, old.shape[2], old.dtype, old.device)
        keep = min(n, len(old))
        self.data[:keep, : old.shape[1]] = old[:keep]

    def put(self, column: int, values: Tensor, into: bool, most: int = MAX_COLUMNS) -> None:
        """Write (rows, fields) `values` as `column`, or merge them into it.

        Args:
            most: columns that will ever be needed; room grows by halves up to it.
        """
        self._make_room(column, len(values), most)
        here = self.data[column, : len(values)]
        if not into:
            here.copy_(values)
        elif self.counts:
            here.add_(values)
        else:
            here.copy_(merge(here, values))

    def put_all(self, column: int, values: Tensor, most: int = MAX_COLUMNS) -> None:
        """Write (n, rows, fields) `values` as so many new columns, the first of them `column`."""
        n, rows, _ = values.shape
        self._make_room(column + n - 1, rows, most)
        self.data[column : column + n, :rows] = values

    def _make_room(self, column: int, rows: int, most: int) -> None:
        n, rows = len(self.data), max(self.data.shape[1], rows)
        if column >= n or rows > self.data.shape[1]:
            wanted = n if column < n else min(column * 3 // 2, most)
            self._resize(max(n, wanted, column + 1), rows)

    def halve(self, n: int) -> None:
        """Merge the first `n` columns pairwise, in place; an odd one out stays alone."""
        pairs = n // 2
        for start in range(0, pairs, 32):
            end = min(start + 32, pairs)
            first, second = (
                self.data[2 * start : 2 * end : 2],
                self.data[2 * start + 1 : 2 * end : 2],
            )
            merged = first + second if self.counts else merge(first, second)
            self.data[start:end] = merged
        if n % 2:
            self.data[pairs] = self.data[n - 1]

    def read(self, n: int) -> Tensor:
        """The first `n` columns on the CPU: (n, rows, fields). One copy, one wait."""
        if n > len(self.data):
            self._resize(n, self.data.shape[1])
        return self.data[:n].cpu()  # sync: one per read-out
