"""Statistics of what a layer gives, in place of the data: `Mean`, `Covariance`, `TopK`.

Each has `update(rows, ids)` and `merge(other)`, and so has an object of your own. Merging is exact,
so it does not matter which process saw which rows.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.checks import check_number
from hookkit.collecting.batches import WHO
from hookkit.errors import ArgumentError, OptionError
from hookkit.hooks.snapshot import snapshot
from hookkit.nested import tmap


class Mean:
    """The mean of the rows, in float64.

    Attributes:
        n: how many rows there were.

    >>> m = Mean()
    >>> m.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.arange(2))
    >>> m.mean
    tensor([2., 4.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.n = 0
        self._origin: Any = None  # a row near the others, so that sums stay small
        self._sum: Any = None  # of the rows, less the origin

    @property
    def mean(self) -> Tensor | None:
        """Of the shape of a row, float64; None if there was no row."""
        return None if self._origin is None else self._origin + self._sum / self.n

    def update(self, rows: Tensor, ids: Tensor) -> None:
        """Takes rows (n, ...)."""
        if rows.is_complex():
            raise OptionError(
                f"{type(self).__name__}: rows are {rows.dtype}, and the sums are real. Give hook= "
                "torch.view_as_real, or torch.abs."
            )
        if not len(rows):
            return
        x = (rows.cpu() if rows.device.type == "mps" else rows).to(torch.float64)  # mps has none
        if self._origin is None:
            self._origin = x.mean(0)
            self._sum = torch.zeros_like(self._origin)
        self._add(x - self._origin)

    def _add(self, x: Tensor) -> None:
        self.n += len(x)
        self._sum += x.sum(0)

    def merge(self, other: Self) -> None:
        """Takes the rows of `other`."""
        if other._origin is None:
            return
        if self._origin is None:
            vars(self).update(copy.deepcopy(vars(other)))
            return
        self.n += other.n
        self._sum += other._sum + other.n * (other._origin - self._origin)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n} rows{_of(self._origin)})"


class Covariance(Mean):
    """The covariance matrix of the rows' elements, in float64.

    Cost: d² numbers for rows of d elements, and a d × d product for each batch.

    Attributes:
        n: how many rows there were.

    >>> c = Covariance()
    >>> c.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.arange(2))
    >>> c.cov
    tensor([[2., 4.],
            [4., 8.]], dtype=torch.float64)
    """

    _products: Any = None  # sum over rows of (x - origin)(x - origin)ᵀ

    @property
    def cov(self) -> Tensor | None:
        """(d, d) float64, as `torch.cov` of the flattened rows; None for less than two rows."""
        if self.n < 2:
            return None
        total = self._sum.flatten()
        cov: Tensor = (self._products - total.outer(total) / self.n) / (self.n - 1)
        return cov

    def _add(self, x: Tensor) -> None:
        super()._add(x)
        x = x.reshape(len(x), -1)
        if self._products is None:
            self._products = x.new_zeros(x.shape[1], x.shape[1])
        self._products.addmm_(x.T, x)  # in place: copies of d × d would cost as much again

    def merge(self, other: Self) -> None:
        """Takes the rows of `other`."""
        if self._origin is not None and other._origin is not None:
            total, gap = other._sum.flatten(), (other._origin - self._origin).flatten()
            cross = total.outer(gap)
            self._products += other._products + cross + cross.T + other.n * gap.outer(gap)
        super().merge(other)


class TopK:
    """The `k` greatest values of each unit (element of a row), and the rows that had them.

    Of equal values any may be kept.

    Args:
        k: how many.

    Attributes:
        values: (k, ...) of the shape and dtype of the rows, the greatest first; fewer than `k` if
            there were fewer rows, None if there was none.
        ids: (k, ...) int64, the ids of these rows; (k, ..., 2) for tokens.

    >>> t = TopK(2)
    >>> t.update(torch.tensor([[1.0, 9.0], [3.0, 6.0], [2.0, 0.0]]), torch.arange(3))
    >>> t.values.tolist(), t.ids.tolist()
    ([[3.0, 9.0], [2.0, 6.0]], [[1, 0], [2, 1]])
    """

    def __init__(self, k: int) -> None:
        self.k = check_number("TopK", "k", k, 1, whole=True, what="how many values of each unit")
        self.values: Tensor | None = None
        self.ids: Tensor | None = None

    def update(self, rows: Tensor, ids: Tensor) -> None:
        """Takes rows (n, ...) and their ids, (n,), or (n, 2) for tokens."""
        if rows.dtype is torch.bool:
            raise OptionError(
                "TopK: values of torch.bool have no order. Give hook= lambda o: o * 1"
            )
        if len(rows):
            values, at = rows.topk(min(self.k, len(rows)), dim=0)
            self._take(values, ids.to(at.device)[at])

    def merge(self, other: Self) -> None:
        """Takes the values of `other`."""
        if other.values is not None and other.ids is not None:
            self._take(other.values, other.ids)

    def _take(self, values: Tensor, ids: Tensor) -> None:
        if self.values is not None and self.ids is not None:
            values, ids = torch.cat([self.values, values]), torch.cat([self.ids, ids])
            values, at = values.topk(min(self.k, len(values)), dim=0)
            at = at.view(*at.shape, *[1] * (ids.ndim - at.ndim))  # ids of tokens are pairs
            ids = ids.gather(0, at.expand(-1, *ids.shape[1:]))
        self.values, self.ids = values, ids

    def __repr__(self) -> str:
        return f"TopK({self.k}{'' if self.values is None else _of(self.values[0])})"


def _of(row: Any) -> str:
    return "" if row is None else f" of {'×'.join(map(str, row.shape)) or 'one number'}"


class Accumulators:
    """A copy of an accumulator for each layer; a store of rows, as `Files`.

    Args:
        into: what is copied.
        layers: their names.
        with_ids: whether ids come with the batches, so that several processes may be given the
            same samples. They then tell each other the ids of each batch, and each counts once.

    Attributes:
        counts: the numbers of rows `n`, `samples`, `batches` and `items`.

    Raises:
        ArgumentError: `into` is no accumulator.
    """

    def __init__(self, into: Any, layers: list[str], with_ids: bool) -> None:
        if isinstance(into, type) or not (hasattr(into, "update") and hasattr(into, "merge")):
            raise ArgumentError(
                f"{WHO}(into={into!r}): give an accumulator, such as Mean() or TopK(10), or an "
                "object with update(rows, ids) and merge(other)."
            )
        self.into, self.layers, self.each = into, layers, dict[int, Any]()
        self.counts = dict.fromkeys(("n", "samples", "batches", "items"), 0)
        self.shared = with_ids and ranks.is_distributed()
        self.seen, self.all_done = set[int](), False

    def add(self, number: int, rows: Tensor, ids: Tensor) -> None:
        """Takes the rows that a layer gave for this batch."""
        if number not in self.each:
            self.each[number] = copy.deepcopy(self.into)
        self.each[number].update(snapshot(rows), ids)  # it may hold on to rows

    def fresh(self, ids: Tensor | None) -> Tensor | None:
        """Which of a batch's samples no process has had before: a mask, None for all.

        Args:
            ids: of the samples; None if this process has no batch left. All call it equally often.
        """
        if not self.shared:
            return None
        with ranks.together("run collect to its end"):
            everyone = ranks.gather_object(None if ids is None else ids.tolist())
        new = list[bool]()
        for rank, theirs in enumerate(everyone):
            for i in theirs or ():
                if rank == ranks.rank():
                    new.append(i not in self.seen)
                self.seen.add(i)
        self.all_done = all(theirs is None for theirs in everyone)
        return torch.tensor(new, dtype=torch.bool, device="cpu")

    def end_batch(self, ids: Tensor, n_samples: int, n_items: int) -> None:
        """Counts a batch."""
        self.counts["n"] += len(ids)
        self.counts["samples"] += n_samples

    def save(self, *, done: bool = False) -> None:
        """Waits for the other processes, if it is done; nothing is kept."""
        while done and self.shared and not self.all_done:
            self.fresh(None)

    def result(self) -> dict[str, Any]:
        """Those of all processes by the layers' names, on the CPU; each of them has to call."""
        for each in self.each.values():
            for name, value in getattr(each, "__dict__", {}).items():
                setattr(each, name, tmap(Tensor.cpu, value))
        with ranks.together("call collect"):
            everyone = ranks.gather_object(self.each)
        merged: dict[int, Any] = {}
        for number, each in (pair for other in everyone for pair in other.items()):
            if number in merged:
                merged[number].merge(each)
            else:
                merged[number] = each
        return {self.layers[number]: merged[number] for number in sorted(merged)}
