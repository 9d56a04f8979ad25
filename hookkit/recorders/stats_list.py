"""`StatsList`: a record as nested lists, as fastai's `stats`, and as the tensor of fastai v1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor

from hookkit._core.messages import no_such
from hookkit.records import Record


class StatsList(L):  # type: ignore[misc]
    """`stats[record][layer]["mean"]`: a list of records, each a list of dicts, by number or name.

    Attributes:
        names: of the layers, in one record.
    """

    names: tuple[str, ...] = ()

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, str):
            if i not in self.names:
                cure = "Write stats[record][layer], such as stats[-1][0]."
                raise no_such(f"stats has no layer {i!r}", i, self.names, cure)
            i = self.names.index(i)
        if isinstance(i, (int, np.integer)) and not -len(self) <= i < len(self):
            raise IndexError(
                f"stats[…] has {len(self)} entries, and {i} is none of them."
                + " Nothing was recorded: a recorder records while its model trains, in learn.fit "
                "or inside `with watch(model, opt, recorder) as w:`." * (not len(self))
            )
        return super().__getitem__(i)

    def tensor(self) -> Tensor:
        """Return (2, n_modules, n_records) float32: means and stds, fastai v1's `stats`."""
        rows = [[[layer[s] for layer in record] for record in self] for s in ("mean", "std")]
        n = len(self[0]) if len(self) else 0
        table = torch.tensor(rows, dtype=torch.float32, device="cpu").reshape(2, len(self), n)
        return table.transpose(1, 2).contiguous()

    def __repr__(self) -> str:
        if len(self) and isinstance(self[0], StatsList):  # L's writes out every number
            return f"StatsList({len(self)} records of {len(self[0])} layers)"
        return str(super().__repr__())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def list_stats(record: Record, rows: list[int]) -> StatsList:
    """Return `rows` of `record` as a list of its steps."""
    tables = {name: table[rows].T.tolist() for name, table in record.values.items()}
    stats, names = StatsList(), tuple(record.names[row] for row in rows)
    for i in range(len(record)):
        each = ({name: table[i][j] for name, table in tables.items()} for j in range(len(rows)))
        layers = StatsList(each)
        layers.names = names
        if record.hist is not None:
            for layer, row in zip(layers, rows, strict=True):
                layer["hist"] = torch.from_numpy(record.hist[row, :, i].astype(np.float32))
        stats.append(layers)
    return stats
