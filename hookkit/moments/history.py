"""The past of a run in bounded memory: tables by step, whose resolution halves when they are full.

A column is one record of all rows: (rows, fields) moments, counts or sums. When the last column is
full, neighbouring columns merge pairwise and exactly, and from then on each column takes twice as
many records. A ring buffer would forget the beginning of the run, where trainings go wrong, and a
growing stride alone would show it more finely than the end; halving keeps the resolution even over
the whole run. It builds on `moments.merge`, which is exact, so a merged column holds what one pass
over all its values would have given.

All classes here are values: `with_records` returns a new one and leaves the old one as it was. New
columns are written into the old one's spare room, which it never reads. So an interrupt or an error
at any line leaves the old past or the new one, once the owner assigns the result, and nothing
between. Steps, epochs and spans are host numbers, so the index needs no read of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.moments.moments import empty_rows, merge

BUDGET_BYTES = 10 * 2**20
MAX_COLUMNS = 4096
MIN_COLUMNS = 64

Place = tuple[int, int, int]
"""Step, epoch and iteration of a record."""

Column = tuple[int, int, int, int]
"""The place of a column's first record, and how many records it has."""

Key = tuple[str, torch.device]
"""A table's name and device. Rows of "moments" are merged, those of all other tables are added."""


@dataclass(frozen=True)
class StepIndex:
    """Which steps the columns are of; shared by the tables of all devices.

    Args:
        columns: place and number of records of each.
        stride: how many records a full column has.
        limit: most columns; even. 0 before the first record.
    """

    columns: tuple[Column, ...] = ()
    stride: int = 1
    limit: int = 0

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def n(self) -> int:
        """How many records there are: the number of the next one."""
        return (len(self) - 1) * self.stride + self.columns[-1][3] if self.columns else 0

    @property
    def is_open(self) -> bool:
        """Whether the next record merges into the last column."""
        return bool(self.columns) and self.columns[-1][3] < self.stride

    def column(self, i: int) -> list[int]:
        """Of each column: 0 the step, 1 the epoch, 2 the iteration, 3 the number of records."""
        return [column[i] for column in self.columns]

    def with_records(self, places: Iterable[Place], column_bytes: int) -> StepIndex:
        """The index with these records added; the first call sets `limit` to fit the budget."""
        columns, stride, limit = list(self.columns), self.stride, self.limit
        if not limit:
            fits = BUDGET_BYTES // max(column_bytes, 1)
            limit = max(MIN_COLUMNS, min(MAX_COLUMNS, fits)) // 2 * 2
        for place in places:
            if columns and columns[-1][3] < stride:
                *first, span = columns[-1]
                columns[-1] = (first[0], first[1], first[2], span + 1)
                continue
            if len(columns) >= limit:
                columns, stride = _halved(columns), 2 * stride
            columns.append((*place, 1))
        return StepIndex(tuple(columns), stride, limit)

    def check_ranks(self, kind: str, layout: Any, found: str) -> None:
        """Raises on every rank, unless all of them recorded the same steps in the same `layout`.

        Args:
            kind: of the record.
            layout: what else the tables of all ranks have to share before they are merged.
            found: `layout` in a few words.

        Raises:
            HookError: the ranks differ.
        """
        steps, spans, n = self.column(0), self.column(3), self.n
        many = f"{n} step{'s' * (n != 1)}" + (f" from {steps[0]} on" if n else "")
        ranks.check_alike(
            [(kind, steps, spans, layout)],
            [f"{kind}s of {many}, {found}"],
            problem="record() merges what all ranks recorded, and they recorded different steps or "
            "layouts",
            cure="Record the same on every rank, or use record(local=True) for this rank's own.",
        )


def _halved(columns: list[Column]) -> list[Column]:
    """Neighbouring columns merged; the first one's place counts."""
    spans = [span for _, _, _, span in columns] + [0] * (len(columns) % 2)
    pairs = zip(columns[::2], spans[::2], spans[1::2], strict=True)
    return [(step, epoch, i, a + b) for (step, epoch, i, _), a, b in pairs]


@dataclass(frozen=True)
class DecimatedHistory:
    """The columns of one table.

    Args:
        data: (columns, rows, fields), with room for more.
        is_moments: True if rows are moments to be merged, False if they are added.
        stride: how many records a full column has.
        n: how many records there are.
        last: (rows, fields) of a last column that is not full. It is kept beside `data`, because
            a merge into `data` would change what an older value of this history reads.
    """

    data: Tensor
    is_moments: bool
    stride: int = 1
    n: int = 0
    last: Tensor | None = None

    @classmethod
    def blank(cls, like: Tensor, is_moments: bool) -> DecimatedHistory:
        """Without records; of the fields, dtype and device of the (rows, fields) `like`."""
        return cls(_blank(16, like, is_moments), is_moments)

    @classmethod
    def of(cls, data: Tensor, index: StepIndex, is_moments: bool) -> DecimatedHistory:
        """Of the columns `data`, which hold all records of `index`."""
        last = data[-1].clone() if index.is_open else None
        return cls(data, is_moments, index.stride, index.n, last)

    def _resized(self, n: int, rows: int, old: Tensor | None = None) -> Tensor:
        """The columns (or `old`) with room for `n` columns of `rows` rows."""
        old = self.data if old is None else old
        new = _blank(n, old.new_empty(rows, old.shape[2]), self.is_moments)
        keep = min(n, len(old))
        new[:keep, : old.shape[1]] = old[:keep]
        return new

    def with_records(self, first: int, tables: Tensor, limit: int) -> DecimatedHistory:
        """With (n, rows, fields) `tables`, the records from number `first` on.

        Args:
            limit: columns that will ever be needed; room grows by halves up to it.
        """
        end, stride, last = first + len(tables), self.stride, self.last
        data = self._with_room((end - 1) // stride, tables.shape[1], limit)
        if stride == 1:
            data[first:end, : tables.shape[1]] = tables
            return replace(self, data=data, n=end)
        at = (self.n - 1) // stride if last is not None else -1
        for column, rows in zip((i // stride for i in range(first, end)), tables, strict=True):
            last = self._joined(last, rows) if last is not None and column == at else rows.clone()
            at = column
            data[at, : len(last)] = last  # an older value reads its own `last` here
        return replace(self, data=data, n=end, last=last if end % stride else None)

    def _joined(self, a: Tensor, b: Tensor) -> Tensor:
        rows = max(len(a), len(b))
        a, b = (t if len(t) == rows else self._resized(1, rows, t[None])[0] for t in (a, b))
        return merge(a, b) if self.is_moments else a + b

    def _with_room(self, column: int, rows: int, limit: int) -> Tensor:
        n, rows = len(self.data), max(self.data.shape[1], rows)
        if column < n and rows == self.data.shape[1]:
            return self.data
        wanted = n if column < n else min(column * 3 // 2, limit)
        return self._resized(max(n, wanted, column + 1), rows)

    def halved(self, stride: int) -> DecimatedHistory:
        """With neighbouring columns merged until each takes `stride` records."""
        if self.stride >= stride:
            return self
        columns = -(-self.n // self.stride)
        data = self._whole(columns)
        halved = self._resized(len(self.data), data.shape[1], data[:0])
        for start in range(0, columns // 2, 32):
            end = min(start + 32, columns // 2)
            first, second = data[2 * start : 2 * end : 2], data[2 * start + 1 : 2 * end : 2]
            halved[start:end] = merge(first, second) if self.is_moments else first + second
        if columns % 2:
            halved[columns // 2] = data[columns - 1]
        twice = 2 * self.stride
        last = halved[(self.n - 1) // twice].clone() if self.n % twice else None
        return DecimatedHistory(halved, self.is_moments, twice, self.n, last).halved(stride)

    def _whole(self, columns: int) -> Tensor:
        """(columns, rows, fields), the last one included."""
        if self.last is None and columns <= len(self.data):
            return self.data[:columns]
        data = self._resized(columns, self.data.shape[1])
        if self.last is not None and (self.n - 1) // self.stride < columns:
            data[(self.n - 1) // self.stride, : len(self.last)] = self.last
        return data

    def rows(self, parts: list[slice]) -> DecimatedHistory:
        """Of these rows alone."""
        data = torch.cat([self.data[:, :0], *(self.data[:, part] for part in parts)], 1)
        last = self.last
        if last is not None:
            last = torch.cat([last[:0], *(last[part] for part in parts)])
        return replace(self, data=data, last=last)

    def read(self, columns: int) -> Tensor:
        """The first columns on the CPU: (columns, rows, fields). One copy, one wait."""
        return self._whole(columns).cpu()  # sync: one per read-out


def _blank(n: int, like: Tensor, is_moments: bool) -> Tensor:
    """`n` columns without records, of the shape of `like`."""
    if is_moments:
        return empty_rows(n * len(like), like.device, like.dtype).view(n, *like.shape)
    return like.new_zeros(n, *like.shape)


@dataclass(frozen=True)
class StepHistory:
    """Records of steps: an index, and the tables of every device.

    >>> history = StepHistory()
    >>> loss = "loss", torch.device("cpu")
    >>> for step in range(3):
    ...     table = torch.full((1, 1, 1), float(step))  # one record, one row, one field
    ...     history = history.with_records([(step, 0, step)], {loss: table})
    >>> history.read(loss).flatten().tolist()
    [0.0, 1.0, 2.0]
    """

    index: StepIndex = field(default_factory=StepIndex)
    tables: Mapping[Key, DecimatedHistory] = field(default_factory=dict)

    def with_records(self, places: list[Place], new: Mapping[Key, Tensor]) -> StepHistory:
        """With records at these places, whose tables are (len(places), rows, fields) each."""
        with torch.inference_mode(False):
            n_bytes = sum(t[0].numel() * t.element_size() for t in new.values())
            index = self.index.with_records(places, n_bytes)
            tables = {key: table.halved(index.stride) for key, table in self.tables.items()}
            for key, t in new.items():
                before = tables.get(key)
                if before is None:
                    blank = DecimatedHistory.blank(t[0], key[0] == "moments")
                    before = replace(blank, stride=index.stride)
                tables[key] = before.with_records(self.index.n, t, index.limit)
            return StepHistory(index, tables)

    def with_table(self, key: Key, table: DecimatedHistory) -> StepHistory:
        """With another table in place of one."""
        return replace(self, tables={**self.tables, key: table})

    def read(self, key: Key) -> Tensor:
        """(columns, rows, fields) of a table on the CPU."""
        return self.tables[key].halved(self.index.stride).read(len(self.index))

    @property
    def n_bytes(self) -> int:
        """Memory of all tables."""
        return sum(t.data.numel() * t.data.element_size() for t in self.tables.values())
