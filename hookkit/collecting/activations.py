"""`Activations`: reading what `collect` wrote.

Files are mapped into memory, and rows are copied as they are read: only what is read is loaded, and
what is done with it changes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hookkit.checks import check_number, check_path, shown
from hookkit.collecting.files import IDS, mapped, read_index
from hookkit.errors import ArgumentError, OptionError, SelectionError, nearest

WHO = "Activations"


class Activations(Mapping[str, "Layer"]):
    """The activations in a folder that `collect` wrote: a mapping from layer to its rows.

    Rows are in the order in which the loader gave them; where several processes wrote them, in the
    order of their ids, each once.

    Args:
        path: of the folder.

    Raises:
        OptionError: here, if there is nothing; as it is read, if a process's part is missing or not
            finished, or a file damaged.

    >>> import tempfile
    >>> from torch import nn
    >>> from hookkit.collecting import collect
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> acts = collect(net, [*torch.randn(10, 2, 4)], ["0", "1"], to=tempfile.mkdtemp())
    >>> acts
    Activations(20 rows, 2 layers: '0' 3 float32, '1' 3 float32)
    >>> acts["1"].shape, acts["1"][[3, 5, 19]].shape, acts.ids[:3]
    ((20, 3), torch.Size([3, 3]), tensor([0, 1, 2]))
    """

    def __init__(self, path: str | Path) -> None:
        self.path = check_path(WHO, path)
        self._files = [*self.path.glob("rank*/index.json")]
        if not self._files:
            raise OptionError(
                f"{WHO}: {self.path} has no activations. Give a folder that collect wrote."
            )

    @cached_property
    def _parts(self) -> list[dict[str, Any]]:
        """The indices of all processes, in order."""
        parts = {index["settings"]["rank"]: index for index in map(read_index, self._files)}
        first = parts[min(parts)]
        n = first["settings"]["ranks"]
        for rank in range(n):
            part, problem = parts.get(rank), ""
            if part is None:
                problem = "is missing"
            elif not part["done"]:
                problem = "is not finished"
            elif _common(part) != _common(first):
                problem = "is of other layers or settings"
            if problem:
                raise OptionError(
                    f"{WHO}: the part of rank {rank} of {n}, {self.path / f'rank{rank}'}, "
                    f"{problem}. Call collect there as before, and copy the folders of all ranks "
                    "into one."
                )
        return [parts[rank] for rank in range(n)]

    @property
    def n_rows(self) -> int:
        """How many rows each layer has."""
        return len(self.ids)

    @cached_property
    def ids(self) -> Tensor:
        """The rows' ids, (n_rows,) int64; for tokens (n_rows, 2), sample and position in it."""
        ids = torch.cat(self._mapped(IDS))
        return ids if self._order is None else ids[torch.from_numpy(self._order)]

    @cached_property
    def _order(self) -> np.ndarray[Any, Any] | None:
        """The places in the files of the rows in order; None if they are as in the files."""
        if len(self._parts) == 1:
            return None
        ids = (
            torch.cat(self._mapped(IDS)).flatten(1 if self._mapped(IDS)[0].ndim > 1 else 0).numpy()
        )
        ids = ids if ids.ndim == 2 else ids[:, None]
        order = np.lexsort(ids.T[::-1])
        return order[np.diff(ids[order], axis=0, prepend=ids[order][:1] - 1).any(1)]

    def _mapped(self, name: str) -> list[Tensor]:
        """The rows in the files of this name, of each process: not to be written to."""
        return [
            mapped(self.path / f"rank{rank}", name, part["kinds"][name], part["counts"]["n"])
            for rank, part in enumerate(self._parts)
        ]

    def __getitem__(self, name: str) -> Layer:
        if name in [*self]:
            return Layer(self, name)
        near = ", ".join(map(repr, nearest(str(name), self) or [*self][:3])) or "there are none"
        raise SelectionError(
            f"{WHO}: {self.path} has no layer {name!r}. Nearest: {near}. list(acts) has all "
            f"{len(self)}."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0]["settings"]["layers"])

    def __len__(self) -> int:
        layers: list[str] = self._parts[0]["settings"]["layers"]
        return len(layers)

    def __repr__(self) -> str:
        try:
            of = self._parts[0]["kinds"]
            kinds = [(name, *of[str(i)]) for i, name in enumerate(self)]
        except OptionError:
            return "Activations(not whole)"
        layers = [f"{name!r} {'×'.join(map(str, s)) or 'scalars'} {d}" for name, s, d in kinds]
        few = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        more = ", …" if layers[4:] else ""
        return f"Activations({self.n_rows} rows, {few}: {', '.join(layers[:4])}{more})"


def _common(part: dict[str, Any]) -> Any:
    """What all processes have to have in common; of a sharded model each has other weights."""
    own = ("rank", "model", "batches", "data set")
    return part["kinds"], {k: v for k, v in part["settings"].items() if k not in own}


class Layer(Dataset[Tensor]):
    """The rows of one layer: an array on disk, and a torch Dataset.

    `layer[3]` is a row; `layer[10:20]`, `layer[[3, 1]]` and `layer[mask]` are new tensors of rows.
    `DataLoader(layer, …)` gives batches of rows, `layer.batches(…)` gives them with their ids.

    Attributes:
        name: of the layer.
        ids: the rows' ids, see `Activations.ids`.
        shape: (n_rows, ...).
        dtype: of torch.
    """

    def __init__(self, acts: Activations, name: str) -> None:
        self.name, self.ids, self._path, self._order = name, acts.ids, acts.path, acts._order
        self._parts = acts._mapped(str([*acts].index(name)))
        self._starts = np.cumsum([0, *map(len, self._parts)])
        self.dtype, self.shape = self._parts[0].dtype, (acts.n_rows, *self._parts[0].shape[1:])
        self.ndim = len(self.shape)

    def __reduce__(self) -> Any:
        return _layer, (self._path, self.name)  # a worker maps the files itself

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Tensor:
        places = self._places(rows)
        flat = places.reshape(-1)
        found = torch.empty(len(flat), *self.shape[1:], dtype=self.dtype, device="cpu")
        for part, start in zip(self._parts, self._starts, strict=False):
            here = np.nonzero((flat >= start) & (flat < start + len(part)))[0]
            at = flat[here] - start
            if len(here) == len(flat) and len(at) and (np.diff(at) == 1).all():
                found[:] = part[at[0] : at[-1] + 1]  # neighbours: many times as fast as by index
            else:
                found[torch.from_numpy(here)] = part[torch.from_numpy(at)]
        return found.reshape(*places.shape, *self.shape[1:])

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Rows as a DataLoader fetches a batch of them: read at once."""
        return list(self[rows])

    def _places(self, rows: Any) -> np.ndarray[Any, Any]:
        """The places in the files of the rows that an index means."""
        is_slice = isinstance(rows, slice)
        index = np.arange(*rows.indices(len(self))) if is_slice else np.asarray(rows)
        if index.dtype == bool and index.shape == (len(self),):
            index = index.nonzero()[0]
        if isinstance(rows, tuple) or (index.size and index.dtype.kind not in "iu"):
            raise ArgumentError(
                f"{WHO}: {shown(rows)} is no index of the {len(self)} rows of {self.name!r}. Give "
                "whole numbers, a slice, or a mask with an entry for each row; of the rest of the "
                "dimensions index what is read: acts[name][rows][:, 3]."
            )
        index = index.astype(np.int64)
        if index.size and not -len(self) <= index.min() <= index.max() < len(self):
            # an IndexError: Python ends its loops over sequences by it
            raise IndexError(
                f"{WHO}: {shown(rows)} is beyond the {len(self)} rows of {self.name!r}"
            )
        index = np.where(index < 0, index + len(self), index)
        return index if self._order is None else self._order[index]

    def batches(
        self, size: int, *, shuffle: bool = False, seed: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of rows with their ids: `(size, ...)` and `(size,)`; the last may be smaller.

        Args:
            size: rows in a batch.
            shuffle: gives all rows in random order.
            seed: of that order; give another one in each epoch.
        """
        size = check_number("Layer.batches", "size", size, 1, whole=True, what="rows in a batch")
        n, random = len(self), torch.Generator().manual_seed(seed)
        order = torch.randperm(n, generator=random, device="cpu") if shuffle else None
        parts = [slice(i, min(i + size, n)) for i in range(0, n, size)]
        some = (part if order is None else order[part] for part in parts)
        return ((self[rows], self.ids[rows]) for rows in some)

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """All rows; as float32 what numpy has no dtype for (bfloat16, float8), which is exact."""
        t = self[:]
        try:
            return t.numpy()
        except TypeError:
            return t.float().numpy()

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {'×'.join(map(str, self.shape))} {self.dtype})"


def _layer(path: Path, name: str) -> Layer:
    return Activations(path)[name]
