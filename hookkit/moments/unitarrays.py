"""Units judged on a CPU, by numpy: there a record's hundred operations on small tables cost most.

The tables are those of `Units`, seen as arrays; `Units` itself is what this is tested against.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from hookkit.moments.units import TAU, Units


class UnitsByArrays(Units):
    """`Units` of a CPU."""

    def __init__(self, window: int) -> None:
        super().__init__(window, torch.device("cpu"))
        self._moved()

    def _moved(self) -> None:
        self._arrays, self._kept = self.live.numpy(), self.kept.numpy()
        self._older, self._newer = self.older.numpy(), self.newer.numpy()
        self._row_of, self._bounded = self.row_of.numpy(), self.bounded.numpy()

    def drop(self) -> None:
        """Forget the batch at hand."""
        _wipe(self._arrays)

    def fold(self) -> None:
        """Keep the batch at hand for the step it belongs to."""
        _add(self._kept, self._arrays)
        _wipe(self._arrays)

    def forget(self) -> None:
        """Forget everything since the last commit."""
        _wipe(self._arrays)
        _wipe(self._kept)

    def commit(self, column: int, into: bool, rows: int, most: int) -> None:
        """Close a record: (rows, 5) shares go into the ring."""
        with np.errstate(all="ignore"):
            self.fold()
            _add(self._newer, self._kept)
            shares = self._shares(rows)
        self.turn += 1
        self.ring.put(column, torch.from_numpy(shares), into, most)
        _wipe(self._kept)
        if self.turn % max(self.window // 2, 1) == 0:
            self.older, self.newer = self.newer, self.older
            self._older, self._newer = self._newer, self._older
            _wipe(self._newer)

    def _shares(self, rows: int) -> Any:
        """`_judge`, by numpy."""
        seen = self._older + self._newer
        top = np.maximum(self._older[0], self._newer[0])
        place = np.minimum(self._row_of, rows)
        n = np.maximum(np.bincount(place, minlength=rows + 1), 1)
        size = seen[1] / np.maximum(seen[2], 1)
        mean = (np.bincount(place, size, rows + 1) / n)[place]
        ever, ran = seen[2] > 0, self._kept[2] > 0
        flags = (
            (top <= 0) & ever,
            (size <= np.float32(TAU) * mean) & ever,
            seen[3] > 0.5 * seen[2],
            ran,
            ran & self._bounded,
        )
        table = np.stack([np.bincount(place, flag, rows + 1) for flag in flags], 1)
        table = np.where(table[:, 3:4] > 0, table / n[:, None], 0.0)
        return table[:rows].astype(np.float32)

    def __getstate__(self) -> dict[str, Any]:
        views = dict.fromkeys(("_kept", "_older", "_newer", "_row_of", "_bounded"))
        return {**super().__getstate__(), **views}


def _add(a: Any, b: Any) -> None:
    """`_join`, by numpy."""
    np.maximum(a[0], b[0], out=a[0])
    a[1:] += b[1:]


def _wipe(table: Any) -> None:
    table[1:] = 0
    table[0] = -math.inf
