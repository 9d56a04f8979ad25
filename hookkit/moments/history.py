"""Memory that never grows past a bound: a ring of records that halves its resolution when full.

A column is one record of all rows: (rows, fields) moments and, if wanted, (rows, bins) counts.
When the last column is full, neighbours merge pairwise and exactly, and from then on each column
takes twice as many recorded steps: the resolution stays even over the whole run, its start
included. Steps, epochs and spans are host numbers that nobody has to wait for.

Nothing here is ever half done: what an axis or a ring holds is one tuple, built beside the old one
and put in its place by one assignment. Records have numbers, so what was put before is known and
passed over: whoever was interrupted simply does it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.moments import empty_rows, merge

BUDGET_BYTES = 10 * 2**20
MAX_COLUMNS = 4096
MIN_COLUMNS = 64

Column = tuple[int, int, int, int]
"""Step, epoch and iteration of a column's first record, and how many records it has."""


class Axis:
    """The columns' places in time, shared by the rings of all devices.

    Args:
        limit: most columns; even.
    """

    def __init__(self, limit: int = MAX_COLUMNS) -> None:
        self.limit = limit
        self._state: tuple[list[Column], int] = [], 1

    def __len__(self) -> int:
        return len(self._state[0])

    @property
    def stride(self) -> int:
        """How many recorded steps a column takes."""
        return self._state[1]

    @property
    def n(self) -> int:
        """How many records there are: the number of the next one."""
        columns, stride = self._state
        return (len(columns) - 1) * stride + columns[-1][3] if columns else 0

    @property
    def open(self) -> bool:
        """Whether the next record still merges into the last column."""
        columns, stride = self._state
        return bool(columns) and columns[-1][3] < stride

    @property
    def full(self) -> bool:
        """Whether the next record needs a column that the limit does not leave."""
        return len(self) >= self.limit and not self.open

    @property
    def steps(self) -> list[int]:
        """The optimizer step of each column's first record."""
        return [step for step, _, _, _ in self._state[0]]

    @property
    def epochs(self) -> list[int]:
        """Its epoch."""
        return [epoch for _, epoch, _, _ in self._state[0]]

    @property
    def iters(self) -> list[int]:
        """Its training batch."""
        return [iteration for _, _, iteration, _ in self._state[0]]

    @property
    def spans(self) -> list[int]:
        """How many records each column has."""
        return [span for _, _, _, span in self._state[0]]

    def add(self, step: int, epoch: int, iteration: int) -> bool:
        """Note a record; True if it merges into the last column."""
        columns = self._state[0]
        if self.open:
            *place, span = columns[-1]
            columns[-1] = (place[0], place[1], place[2], span + 1)
            return True
        columns.append((step, epoch, iteration, 1))
        return False

    def make_room(self) -> None:
        """Have room for one more record."""
        while self.full:
            self.halve()

    def halve(self) -> None:
        """Merge neighbouring columns; the first one's place counts."""
        columns, stride = self._state
        spans = [span for _, _, _, span in columns] + [0] * (len(columns) % 2)
        pairs = zip(columns[::2], spans[::2], spans[1::2], strict=True)
        merged = [(step, epoch, i, a + b) for (step, epoch, i, _), a, b in pairs]
        self._state = merged, 2 * stride

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
        n = self.n
        many = f"{n} step{'s' * (n != 1)}" + (f" from {self.steps[0]} on" if n else "")
        ranks.check_same(
            (kind, self.steps, self.spans, layout),
            asked="record() merges what all ranks recorded, and they recorded different steps or "
            "layouts",
            found=f"{kind}s of {many}, {found}",
            cure="Record the same on every rank, or use record(local=True) for this rank's own.",
        )


class Ring:
    """The columns of one device: grown as needed, halved when the axis says so.

    Args:
        rows: how many rows a column has; more may be added later.
        fields: (rows, fields) is a column; moments have nine, counts as many as there are bins.
        counts: True if columns are added up, False if they are rows of moments to be merged.
    """

    def __init__(self, rows: int, fields: int, dtype: torch.dtype, device: Any, counts: bool):
        self.counts = counts
        # columns, records a column takes, number of the next record, and the rows of a column that
        # is still open: merging into `data` itself could not be done twice
        self._state: tuple[Tensor, int, int, Tensor | None]
        self._state = self._blank(16, rows, fields, dtype, device), 1, 0, None

    @classmethod
    def of(cls, data: Tensor, axis: Axis, counts: bool) -> Ring:
        """A ring that holds the columns `data` of all records of `axis`."""
        new = cls(1, data.shape[2], data.dtype, data.device, counts)
        new._state = data, axis.stride, axis.n, data[-1].clone() if axis.open else None
        return new

    @property
    def data(self) -> Tensor:
        """(columns, rows, fields), with room for more."""
        return self._state[0]

    @property
    def n(self) -> int:
        """The number of the next record."""
        return self._state[2]

    def _blank(self, n: int, rows: int, fields: int, dtype: torch.dtype, device: Any) -> Tensor:
        if self.counts:
            return torch.zeros(n, rows, fields, dtype=dtype, device=device)
        return empty_rows(n * rows, device, dtype).view(n, rows, fields)

    def _resized(self, old: Tensor, n: int, rows: int) -> Tensor:
        """`old` with `n` columns of `rows` rows, blank where it had none."""
        new = self._blank(n, rows, old.shape[2], old.dtype, old.device)
        keep = min(n, len(old))
        new[:keep, : old.shape[1]] = old[:keep]
        return new

    def put(self, first: int, tables: Tensor, most: int = MAX_COLUMNS) -> None:
        """Add (n, rows, fields) `tables`, the records `first` and on; those it has are passed over.

        Args:
            most: columns that will ever be needed; room grows by halves up to it.
        """
        data, stride, n, last = self._state
        tables, k = tables[max(n - first, 0) :], max(first, n)
        if not len(tables):
            return
        end = k + len(tables)
        data = self._with_room(data, (end - 1) // stride, tables.shape[1], most)
        if stride == 1:
            data[k:end, : tables.shape[1]] = tables
        else:
            at = (n - 1) // stride if last is not None else -1
            for column, rows in zip((i // stride for i in range(k, end)), tables, strict=True):
                last = self._joined(last, rows) if last is not None and column == at else rows
                at = column
                data[at, : len(last)] = last
        self._state = data, stride, end, last if end % stride else None

    def _joined(self, a: Tensor, b: Tensor) -> Tensor:
        rows = max(len(a), len(b))
        a, b = (t if len(t) == rows else self._resized(t[None], 1, rows)[0] for t in (a, b))
        return a + b if self.counts else merge(a, b)

    def _with_room(self, data: Tensor, column: int, rows: int, most: int) -> Tensor:
        n, rows = len(data), max(data.shape[1], rows)
        if column < n and rows == data.shape[1]:
            return data
        wanted = n if column < n else min(column * 3 // 2, most)
        return self._resized(data, max(n, wanted, column + 1), rows)

    def catch_up(self, stride: int) -> None:
        """Halve the resolution until each column takes `stride` records."""
        while self._state[1] < stride:
            self._halve()

    def _halve(self) -> None:
        """Merge neighbouring columns."""
        data, stride, n, last = self._state
        columns, stride = -(-n // stride), 2 * stride
        if last is not None:  # as `read` has it
            data[columns - 1, : len(last)] = last
        halved = self._resized(data[:0], len(data), data.shape[1])
        for start in range(0, columns // 2, 32):
            end = min(start + 32, columns // 2)
            first, second = data[2 * start : 2 * end : 2], data[2 * start + 1 : 2 * end : 2]
            halved[start:end] = first + second if self.counts else merge(first, second)
        if columns % 2:
            halved[columns // 2] = data[columns - 1]
        last = halved[(n - 1) // stride].clone() if n % stride else None
        self._state = halved, stride, n, last

    def rows(self, parts: list[slice]) -> Ring:
        """A ring of these rows alone."""
        data, stride, n, last = self._state
        new = Ring(1, data.shape[2], data.dtype, data.device, self.counts)
        kept = torch.cat([data[:, :0], *(data[:, part] for part in parts)], 1)
        if last is not None:
            last = torch.cat([last[:0], *(last[part] for part in parts)])
        new._state = kept, stride, n, last
        return new

    def read(self, n: int) -> Tensor:
        """The first `n` columns on the CPU: (n, rows, fields). One copy, one wait."""
        data, stride, end, last = self._state
        if n > len(data):
            data = self._resized(data, n, data.shape[1])
        if last is not None and (end - 1) // stride < n:  # an interrupt may have left more there
            data[(end - 1) // stride, : len(last)] = last
        return data[:n].cpu()  # sync: one per read-out

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: on the CPU, so that it loads anywhere."""
        data, stride, n, last = self._state
        return {
            "counts": self.counts,
            "_state": (data.cpu(), stride, n, None if last is None else last.cpu()),
        }
