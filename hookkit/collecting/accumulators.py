"""Statistics of what a layer gives, in place of the data: `Mean`, `Covariance`, `TopK`.

    acts/rank0/accumulators.pt    those of each layer, and how far they have come, if they are kept

Each has `update(rows, ids)` and `merge(other)`, and so has an object of your own. Merging is exact,
so it does not matter which process saw which rows.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.checks import check_number
from hookkit.collecting.batches import WHO
from hookkit.collecting.parts import Progress, damaged
from hookkit.collecting.shards import Store
from hookkit.errors import ArgumentError, OptionError
from hookkit.files import atomic_write
from hookkit.hooks.snapshot import snapshot
from hookkit.nested import PLAIN, tmap


class Mean:
    """The mean of the rows, in float64.

    Attributes:
        n: how many rows there were.
        mean: of the shape of a row, float64; None if there was no row.

    >>> m = Mean()
    >>> m.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.arange(2))
    >>> m.mean
    tensor([2., 4.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.n = 0
        self.mean: Tensor | None = None

    def update(self, rows: Tensor, ids: Tensor) -> None:
        """Takes rows (n, ...)."""
        if len(rows):
            self._add(len(rows), _exact(rows).mean(0))

    def merge(self, other: Self) -> None:
        """Takes the rows of `other`."""
        if other.mean is not None:
            self._add(other.n, other.mean)

    def _add(self, n: int, mean: Tensor) -> None:
        """Takes `n` rows of this mean (Chan et al. 1983, eq. 2.1)."""
        old = torch.zeros_like(mean) if self.mean is None else self.mean
        self.n += n
        self.mean = old + (mean - old) * (n / self.n)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n} rows{_of(self.mean)})"


class Covariance(Mean):
    """The covariance matrix of the rows' elements, in float64.

    Cost: d² numbers for rows of d elements, and a d × d product for each batch.

    Attributes:
        n: how many rows there were.
        mean: of the shape of a row, float64.

    >>> c = Covariance()
    >>> c.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.arange(2))
    >>> c.cov
    tensor([[2., 4.],
            [4., 8.]], dtype=torch.float64)
    """

    _scatter: Tensor | None = None  # sum over rows of (x - mean)(x - mean)ᵀ

    @property
    def cov(self) -> Tensor | None:
        """(d, d) float64, as `torch.cov` of the flattened rows; None for less than two rows."""
        return None if self._scatter is None or self.n < 2 else self._scatter / (self.n - 1)

    def update(self, rows: Tensor, ids: Tensor) -> None:
        """Takes rows (n, ...)."""
        if len(rows):
            x = _exact(rows)
            mean = x.mean(0)
            x = (x - mean).reshape(len(x), -1)
            self._take(len(x), mean, x.T @ x)

    def merge(self, other: Self) -> None:
        """Takes the rows of `other`."""
        if other.mean is not None and other._scatter is not None:
            self._take(other.n, other.mean, other._scatter)

    def _take(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        if self.mean is not None and self._scatter is not None:
            gap = (mean - self.mean).flatten()
            scatter = scatter + self._scatter + gap.outer(gap) * (n * self.n / (n + self.n))
        self._scatter = scatter
        self._add(n, mean)


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


def _exact(rows: Tensor) -> Tensor:
    """As float64, on the CPU where the device has none."""
    return (rows.cpu() if rows.device.type == "mps" else rows).to(torch.float64)


def _of(row: Any) -> str:
    return "" if row is None else f" of {'×'.join(map(str, row.shape)) or 'one number'}"


class Accumulators(Store):
    """A copy of `into` for each layer, kept in `folder` if there is one; see `Store`.

    After `every_bytes` of rows, or ten times as many as the accumulators have.
    """

    def __init__(
        self, into: Any, folder: Path | None, settings: dict[str, Any], every_bytes: int
    ) -> None:
        if isinstance(into, type) or not (hasattr(into, "update") and hasattr(into, "merge")):
            raise ArgumentError(
                f"{WHO}(into={into!r}): give an accumulator, such as Mean() or TopK(10), or an "
                "object with update(rows, ids) and merge(other)."
            )
        self.into, self.found = into, dict[str, Any]()
        plain = {k: v for k, v in getattr(into, "__dict__", {}).items() if type(v) in PLAIN}
        settings = {**settings, "into": f"{type(into).__qualname__} {plain}"}
        file = folder and folder / f"rank{settings['rank']}" / "accumulators.pt"
        super().__init__(file, settings, every_bytes)

    def _loaded(self, file: Path) -> Progress:
        try:
            kept = torch.load(file, weights_only=True)
            for key, state in kept["accumulators"].items():
                vars(self._of(key)).update(state)
            return Progress(**kept["progress"])
        except Exception as why:  # of many kinds
            raise damaged(file, WHO, why) from why

    def _of(self, key: str) -> Any:
        if key not in self.found:
            self.found[key] = copy.deepcopy(self.into)
        return self.found[key]

    def _put(self, key: str, rows: Tensor, ids: Tensor) -> None:
        self._of(key).update(snapshot(rows), ids)  # it may hold on to rows

    def _keep(self) -> None:
        if self.file is None:
            return
        is_first = not self.file.exists()
        try:
            states = {key: vars(each) for key, each in self.found.items()}
            with atomic_write(self.file) as file:
                torch.save({"progress": asdict(self.progress), "accumulators": states}, file)
            if is_first:
                torch.load(self.file, weights_only=True)
        except OSError:
            raise
        except Exception as why:
            self.file.unlink(missing_ok=True)
            raise OptionError(
                f"{WHO}: what {type(self.into).__qualname__} has cannot be kept in a file that is "
                f"safe to read ({type(why).__name__}). Give it numbers, texts, tensors, lists and "
                "dicts alone, or leave to= out: it then starts anew after an interruption."
            ) from why
        self.every_bytes = max(self.every_bytes, 10 * self.file.stat().st_size)

    def result(self) -> dict[str, Any]:
        """Those of all processes by the layers' names, on the CPU; each of them has to call."""
        found = {self.progress.name(key): self.found[key] for key in sorted(self.found)}
        for each in found.values():
            for name, value in getattr(each, "__dict__", {}).items():
                setattr(each, name, tmap(Tensor.cpu, value))
        with ranks.together("call collect"):
            everyone = ranks.gather_object(found)
        merged: dict[str, Any] = everyone[0]
        for name, each in (pair for other in everyone[1:] for pair in other.items()):
            if name in merged:
                merged[name].merge(each)
            else:
                merged[name] = each
        return merged
