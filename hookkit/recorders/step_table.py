"""`StepTable`: numbers by step in bounded memory, on the host.

A table has columns (recorded steps), rows (layers or parameters) and fields (nine moments, counts
of bins, sums). Each field is one array, which doubles when it is full. At `LIMIT` bytes it is
halved instead: neighbouring columns merge, and each column then covers twice as many steps. So a
step costs the same however many came before it, and a column is no Python object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hookkit.recorders.moments import EMPTY

Place = tuple[int, int, int]
"""Step, epoch and iteration."""

Numbers = dict[str, Any]
"""Name of a field → (rows, …) array."""

WAIT = 16
"""How many steps may wait. Then the older half is read: by then the device has sent them."""

LIMIT = 6 * 2**20  # bytes; half as much again while the arrays are halved
_PART = 256  # how many columns are merged at once


class Field(NamedTuple):
    """Describes the numbers of a row: their blank value, and how two steps merge.

    Args:
        blank: the numbers of a row without values; merging them changes nothing.
        merge: a function of two arrays whose last dimensions are those of `blank`; returns one.
    """

    blank: Any
    merge: Callable[[Any, Any], Any] = np.add

    def blanks(self, *shape: int) -> Any:
        """Return a blank array; `shape` is (rows,) or (columns, rows)."""
        array = np.empty((*shape, *self.blank.shape), self.blank.dtype)
        array[...] = self.blank
        return array


def _merge_moments(a: Any, b: Any) -> Any:
    """Return `moments.merge` of two (…, 9) arrays."""
    with np.errstate(all="ignore"):  # squares may leave float64
        whole = a + b
        share, apart = b[..., 1] / np.maximum(whole[..., 1], 1), b[..., 2] - a[..., 2]
        whole[..., 2] = a[..., 2] + apart * share
        whole[..., 3] += apart * (a[..., 1] * share) * apart
    np.minimum(a[..., 4], b[..., 4], out=whole[..., 4])
    np.maximum(a[..., 5], b[..., 5], out=whole[..., 5])
    return whole


MOMENTS = Field(np.array(EMPTY), _merge_moments)
"""The nine numbers of `moments`."""


def sums(n: int, kind: type = float) -> Field:
    """Return a field of `n` numbers that are summed over steps."""
    return Field(np.zeros(n, kind))


class StepTable:
    """Numbers by step and row in bounded memory: an array for each field.

    Attributes:
        fields: name → `Field`.
        n_steps: how many steps were added, with those that wait.
        rows: how many rows the columns have.
        stride: how many steps a new column covers.

    >>> table = StepTable(loss=sums(1))
    >>> for step in range(3):
    ...     table.later((step, 0, step), lambda: {"loss": np.ones((1, 1))})
    >>> table.settle()
    >>> table.read("loss").ravel().tolist(), table.places().tolist()[-1]
    ([1.0, 1.0, 1.0], [2, 0, 2, 1])
    """

    def __init__(self, **fields: Field) -> None:
        self.fields = fields
        self.n_steps, self.rows, self.stride = 0, 0, 1
        self._n = 0  # columns in use
        self._places = np.zeros((0, 4), np.int64)
        self._arrays = {name: field.blanks(0, 0) for name, field in fields.items()}
        self._waiting: list[tuple[Place, Callable[[], Numbers]]] = []

    # --- writing

    def later(self, place: Place, read: Callable[[], Numbers]) -> None:
        """Add a step; `read` returns its numbers, and may wait for a device."""
        self._waiting.append((place, read))
        self.n_steps += 1
        if len(self._waiting) >= WAIT:  # not the newest, which the device may still compute
            self.settle(keep=WAIT // 2)

    def settle(self, keep: int = 0) -> None:
        """Read the steps that wait, in order, except the `keep` newest."""
        while len(self._waiting) > keep:
            place, read = self._waiting.pop(0)
            self._append(place, read())

    def _append(self, place: Place, numbers: Numbers) -> None:
        rows = len(next(iter(numbers.values())))
        if rows > self.rows or self._n == len(self._places):
            self._make_room(max(rows, self.rows))
        n = self._n
        if n and self._places[n - 1, 3] < self.stride:  # the last column has room for this step
            for name, array in self._arrays.items():
                last = array[n - 1, :rows]
                last[:] = self.fields[name].merge(last, numbers[name])
            self._places[n - 1, 3] += 1
            return
        for name, array in self._arrays.items():
            array[n, :rows], array[n, rows:] = numbers[name], self.fields[name].blank
        self._places[n] = *place, 1
        self._n = n + 1

    def _make_room(self, rows: int) -> None:
        """Make room for one more column of `rows` rows: halve at `LIMIT`, or double the arrays."""
        column = 32 + rows * sum(field.blank.nbytes for field in self.fields.values())
        most = max(LIMIT // column, 2)
        while self._n >= most:
            self._halve()
        n, capacity, arrays = self._n, min(max(2 * self._n, 1), most), {}
        for name, old in self._arrays.items():
            arrays[name] = new = np.empty((capacity, rows, *old.shape[2:]), old.dtype)
            new[:n, : self.rows], new[:n, self.rows :] = old[:n], self.fields[name].blank
        places = np.empty((capacity, 4), np.int64)
        places[:n] = self._places[:n]
        self.rows, self._arrays, self._places = rows, arrays, places

    def _halve(self) -> None:
        """Merge pairs of neighbouring columns; if their number is odd, the last column stays."""
        half, odd = divmod(self._n, 2)
        arrays = {}
        for name, old in self._arrays.items():
            arrays[name] = new = np.empty_like(old)
            for i in range(0, half, _PART):  # in parts, to need less memory at once
                both = old[2 * i : 2 * min(i + _PART, half)]
                new[i : i + len(both) // 2] = self.fields[name].merge(both[::2], both[1::2])
            new[half : half + odd] = old[2 * half : self._n]
        places = np.empty_like(self._places)
        places[: half + odd] = self._places[: self._n : 2]
        places[:half, 3] += self._places[1 : 2 * half : 2, 3]
        n, stride = half + odd, 2 * self.stride
        # one statement: Ctrl-C interrupts before it or after it
        self._n, self.stride, self._arrays, self._places = n, stride, arrays, places

    # --- reading

    def __len__(self) -> int:
        """Return the number of columns; each step that waits counts as one."""
        return self._n + len(self._waiting)

    def places(self, first: int = 0) -> npt.NDArray[np.int64]:
        """Return (columns, 4) int64: first step, its epoch and iteration, and number of steps."""
        self.settle()
        return self._places[first : self._n].copy()

    def since(self, step: int) -> int:
        """Return the first column that begins after `step`, or the last column if none does."""
        self.settle()
        return max(min(bisect_right(self._places[: self._n, 0], step), self._n - 1), 0)

    def read(self, name: str, rows: int = 0, first: int = 0) -> Any:
        """Return a (columns, rows, …) copy of a field, from column `first` on.

        The copy has at least `rows` rows; rows that the table does not have are blank.
        """
        self.settle()
        whole = self.fields[name].blanks(self._n - first, max(rows, self.rows))
        whole[:, : self.rows] = self._arrays[name][first : self._n]
        return whole

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, with all steps read and no spare room."""
        self.settle()
        arrays = {name: array[: self._n].copy() for name, array in self._arrays.items()}
        return {**vars(self), "_arrays": arrays, "_places": self._places[: self._n].copy()}
