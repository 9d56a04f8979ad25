"""The past of a run in bounded memory: tables by step, whose resolution halves when they are full.

A column is one record of all rows: (rows, fields) moments, counts or sums. When the last column is
full, neighbouring columns merge pairwise and exactly, and from then on each column takes twice as
many records. A ring buffer would forget the beginning of the run, where trainings go wrong, and a
growing stride alone would show it more finely than the end; halving keeps the resolution even over
the whole run. It builds on `moments.merge`, which is exact, so a merged column holds what one pass
over all its values would have given.

A `StepHistory` is a value: `with_records` returns a new one and leaves the old one as it was. New
columns are written into the old one's spare room, which it never reads. So an interrupt or an error
at any line leaves the old past or the new one, once the owner assigns the result, and nothing
between. Steps, epochs and spans are host numbers, so reading those waits for no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.moments.moments import empty_rows, merge

BUDGET_BYTES = 10 * 2**20
MAX_COLUMNS = 4096
MIN_COLUMNS = 64

Place = tuple[int, int, int]
"""Step, epoch and iteration of a record."""

Key = tuple[str, torch.device]
"""A table's name and device. Rows of "moments" are merged, those of all other tables are added."""


class Table(NamedTuple):
    """The columns of one table.

    Args:
        full: (columns, rows, fields) of those that are full, with room for more.
        last: (rows, fields) of a last one that is not full. It is no part of `full`, since adding
            to it there would change what an older value of the history reads.
    """

    full: Tensor
    last: Tensor | None


@dataclass(frozen=True)
class StepHistory:
    """Records of steps: which they are, and the tables of every device.

    Args:
        n: how many records there are.
        places: of each column, the place of its first record.
        stride: how many records a full column has.
        limit: most columns; even. 0 before the first record.

    >>> history = StepHistory()
    >>> loss = "loss", torch.device("cpu")
    >>> for step in range(3):
    ...     table = torch.full((1, 1, 1), float(step))  # one record, one row, one field
    ...     history = history.with_records([(step, 0, step)], {loss: table})
    >>> history.read(loss).flatten().tolist()
    [0.0, 1.0, 2.0]
    """

    n: int = 0
    places: tuple[Place, ...] = ()
    stride: int = 1
    limit: int = 0
    tables: Mapping[Key, Table] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def spans(self) -> list[int]:
        """How many records each column has."""
        return [min(self.stride, self.n - i) for i in range(0, self.n, self.stride)]

    def column(self, i: int) -> list[int]:
        """Of each column: 0 the step, 1 the epoch, 2 the iteration, 3 the number of records."""
        return self.spans if i == 3 else [place[i] for place in self.places]

    def with_records(self, places: Sequence[Place], new: Mapping[Key, Tensor]) -> StepHistory:
        """With records at these places, whose tables are (len(places), rows, fields) each.

        The first call sets `limit` to fit the budget.
        """
        with torch.inference_mode(False):
            history = self
            if not self.limit:
                fits = BUDGET_BYTES // max(sum(t[0].nbytes for t in new.values()), 1)
                limit = max(MIN_COLUMNS, min(MAX_COLUMNS, fits)) // 2 * 2
                history = replace(self, limit=limit)
            while len(places) > (room := history.limit * history.stride - history.n):
                if room:
                    fitting = {key: t[:room] for key, t in new.items()}
                    history = history._extended(places[:room], fitting)
                history = history._halved()
                places, new = places[room:], {key: t[room:] for key, t in new.items()}
            return history._extended(places, new)

    def _extended(self, places: Sequence[Place], new: Mapping[Key, Tensor]) -> StepHistory:
        """With records that there is room for."""
        n, begun = self.n + len(places), places[-self.n % self.stride :: self.stride]
        tables = {}
        for key in {**self.tables, **new}:
            t = new.get(key)
            if t is None:  # nothing of this device
                t = _blank(len(places), self.tables[key].full[0], key)
            tables[key] = self._added(key, t)
        return replace(self, n=n, places=(*self.places, *begun), tables=tables)

    def _added(self, key: Key, records: Tensor) -> Table:
        """The table with (n, rows, fields) records added."""
        n, stride = self.n, self.stride
        end, like = n + len(records), records[0]
        table = self.tables.get(key)
        if table is None:  # it has nothing of the records so far
            blank = _blank(max(16, n // stride), like, key)
            table = Table(blank, blank[0].clone() if n % stride else None)
        full, last = table
        room, rows = len(full), max(full.shape[1], len(like))
        if end // stride > room:
            room = max(end // stride, min(room * 3 // 2, self.limit))
        full, records = _sized(full, room, rows, key), _sized(records, len(records), rows, key)
        if stride == 1:
            full[n:end] = records
            return Table(full, None)
        if last is not None:
            last = _sized(last[None], 1, rows, key)[0]
        for i, record in enumerate(records, n + 1):
            last = record.clone() if last is None else _joined(key, last, record)
            if i % stride == 0:
                full[i // stride - 1], last = last, None
        return Table(full, last)

    def _halved(self) -> StepHistory:
        """With neighbouring columns merged, all of which are full."""
        tables = {}
        for key, (full, _) in self.tables.items():
            halved = _blank(len(full), full[0], key)
            for i in range(0, len(self), 64):
                pairs = full[i : min(i + 64, len(self))]
                halved[i // 2 : (i + len(pairs)) // 2] = _joined(key, pairs[::2], pairs[1::2])
            tables[key] = Table(halved, None)
        return replace(self, places=self.places[::2], stride=2 * self.stride, tables=tables)

    def with_table(self, key: Key, columns: Tensor) -> StepHistory:
        """With the (columns, rows, fields) of one table in place of what it had."""
        n = self.n // self.stride
        table = Table(columns[:n], columns[n].clone() if n < len(self) else None)
        return replace(self, tables={**self.tables, key: table})

    def whole(self, key: Key) -> Tensor:
        """(columns, rows, fields) of a table, on its device."""
        full, last = self.tables[key]
        columns = full[: self.n // self.stride]
        return columns if last is None else torch.cat([columns, last[None]])

    def read(self, key: Key) -> Tensor:
        """(columns, rows, fields) of a table on the CPU. One copy, one wait."""
        return self.whole(key).cpu()  # sync: one per read-out

    def on_cpu(self) -> StepHistory:
        """A copy on the CPU, where the tables of one name are one."""
        tables = dict[str, Tensor]()
        for key in self.tables:
            own, name = self.read(key), key[0]
            if (other := tables.get(name)) is not None:
                rows = max(own.shape[1], other.shape[1])
                own = _joined(key, *(_sized(t, len(t), rows, key) for t in (other, own)))
            tables[name] = own
        return self.of_cpu(tables)

    def of_cpu(self, tables: Mapping[str, Tensor]) -> StepHistory:
        """The same records with these (columns, rows, fields) on the CPU, and no other tables."""
        history = replace(self, tables={})
        for name, table in tables.items():
            history = history.with_table((name, torch.device("cpu")), table)
        return history

    def emptied(self) -> StepHistory:
        """The same records of nothing."""
        history = self
        for key, table in self.tables.items():
            history = history.with_table(
                key, _blank(len(self), table.full.new_empty(table.full.shape[1:]), key)
            )
        return history

    @property
    def n_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.full.nbytes for table in self.tables.values())

    def check_ranks(self, kind: str, layout: Any, found: str) -> None:
        """Raises `HookError` on every rank unless all recorded the same steps in the same layout.

        `layout` is what else the tables of all ranks have to share, `found` the same in few words.
        """
        steps, n = self.column(0), self.n
        many = f"{n} step{'s' * (n != 1)}" + (f" from {steps[0]} on" if n else "")
        ranks.check_alike(
            [(kind, steps, self.spans, layout)],
            [f"{kind}s of {many}, {found}"],
            problem="what all ranks recorded cannot be merged: they recorded different steps or "
            "layouts",
            cure="Record the same on every rank; each still reads its own.",
        )


def _joined(key: Key, a: Tensor, b: Tensor) -> Tensor:
    return merge(a, b) if key[0] == "moments" else a + b


def _blank(n: int, like: Tensor, key: Key) -> Tensor:
    """`n` columns without records, of the shape of `like`."""
    if key[0] == "moments":
        return empty_rows(n * len(like), like.device, like.dtype).view(n, *like.shape)
    return like.new_zeros(n, *like.shape)


def _sized(columns: Tensor, n: int, rows: int, key: Key) -> Tensor:
    """The same columns with room for `n` of `rows` rows; themselves if they have it."""
    if columns.shape[:2] == (n, rows):
        return columns
    new = _blank(n, columns.new_empty(rows, columns.shape[2]), key)
    new[: len(columns), : columns.shape[1]] = columns
    return new
