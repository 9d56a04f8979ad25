"""Statistics of a layer's outputs, in place of the data: `Mean`, `Covariance`, `TopK`.

`collect` calls `update(rows, ids)` for each batch. `merge(other)` joins those of several processes;
the result does not depend on which of them saw which rows.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from hookkit._core.checks import check_number


class Mean:
    """Computes the mean of the rows, in float64 (complex128 for complex rows).

    Attributes:
        n: how many rows there were.
        mean: of the shape of a row; None if there was no row.

    >>> m = Mean()
    >>> m.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.arange(2))
    >>> m.mean
    tensor([2., 4.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.n = 0
        self.mean: Any = None

    def update(self, rows: Tensor, ids: Tensor) -> None:
        """Add rows (n, ...)."""
        if len(rows):
            self._join(len(rows), _widest(rows).mean(0))

    def merge(self, other: Self) -> None:
        """Add the rows of `other`."""
        if other.n:
            self._join(other.n, other.mean)

    def _join(self, n: int, mean: Tensor) -> Tensor:
        """Add the mean of `n` more rows; return its distance from the mean before."""
        # `view_as`: rows of another size are an error, and are not broadcast
        gap = torch.zeros_like(mean) if self.mean is None else mean.view_as(self.mean) - self.mean
        self.n += n
        self.mean = mean - gap * (1 - n / self.n)
        return gap

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n} rows)"


class Covariance(Mean):
    """Computes the covariance of the rows' elements, and their mean, in float64 (or complex128).

    Cost: d² numbers for rows of d elements, and a d × d product for each batch. Source: Chan et al.
    1983, eq. 2.1.

    >>> c = Covariance()
    >>> c.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.arange(2))
    >>> c.cov
    tensor([[2., 4.],
            [4., 8.]], dtype=torch.float64)
    """

    _products: Any = None  # sum over the rows of (x - mean)(x - mean)ᴴ

    @property
    def cov(self) -> Tensor | None:
        """Return `torch.cov` of the flattened rows, (d, d); None for less than two rows."""
        return self._products / (self.n - 1) if self.n > 1 else None

    def update(self, rows: Tensor, ids: Tensor) -> None:
        """Add rows (n, ...)."""
        if len(rows):
            x = _widest(rows)
            mean = x.mean(0)
            x = (x - mean).reshape(len(x), -1)
            self._join(len(x), mean)
            self._products.addmm_(x.T, x.conj())  # in place: a copy of d × d would cost as much

    def merge(self, other: Self) -> None:
        """Add the rows of `other`."""
        if other.n:
            self._join(other.n, other.mean)
            self._products += other._products

    def _join(self, n: int, mean: Tensor) -> Tensor:
        before, gap = self.n, super()._join(n, mean).flatten()
        if self._products is None:
            self._products = gap.new_zeros(len(gap), len(gap))
        self._products.addr_(gap, gap.conj(), alpha=before * n / self.n)
        return gap


class TopK:
    """Keeps the `k` greatest values of each unit (element of a row), and which rows had them.

    Of equal values any may be kept; NaN is greater than all, as in `torch.topk`.

    Args:
        k: how many values to keep of each unit.

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
        """Add rows (n, ...) and their ids, (n,), or (n, 2) for tokens."""
        if len(rows):
            values, at = rows.topk(min(self.k, len(rows)), dim=0)
            self._join(values, ids.to(at.device)[at])

    def merge(self, other: Self) -> None:
        """Add the values of `other`."""
        if other.values is not None and other.ids is not None:
            self._join(other.values, other.ids)

    def _join(self, values: Tensor, ids: Tensor) -> None:
        if self.values is not None and self.ids is not None:
            values, ids = torch.cat([self.values, values]), torch.cat([self.ids, ids])
            values, at = values.topk(min(self.k, len(values)), dim=0)
            at = at.view(*at.shape, *[1] * (ids.ndim - at.ndim))  # ids of tokens are pairs
            ids = ids.gather(0, at.expand(-1, *ids.shape[1:]))
        self.values, self.ids = values, ids

    def __repr__(self) -> str:
        return f"TopK({self.k})"


def _widest(rows: Tensor) -> Tensor:
    x = rows.cpu() if rows.device.type == "mps" else rows  # which has no float64
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
