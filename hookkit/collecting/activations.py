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
from hookkit.collecting.parts import IDS, Progress, damaged, file_of, load
from hookkit.errors import ArgumentError, OptionError, SelectionError, nearest

WHO = "Activations"
Places = np.ndarray[Any, Any]


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
        self.path, self._maps = check_path(WHO, path), dict[tuple[int, str], Tensor]()
        self._files = [*self.path.glob("rank*/progress.json")]
        if not self._files:
            raise OptionError(
                f"{WHO}: {self.path} has no activations. Give a folder that collect wrote."
            )

    @cached_property
    def _parts(self) -> list[Progress]:
        """Of all processes, in order."""
        parts = {part.settings["rank"]: part for part in (load(file, WHO) for file in self._files)}
        n = max(part.settings["ranks"] for part in parts.values())
        for rank in range(n):
            if problem := _problem(parts.get(rank), parts[min(parts)]):
                raise OptionError(
                    f"{WHO}: the part of rank {rank} of {n}, {self.path / f'rank{rank}'}, "
                    f"{problem}. Call collect there as before, and copy the folders of all ranks "
                    "into one."
                )
        return [parts[rank] for rank in range(n)]

    @property
    def n_rows(self) -> int:
        """How many rows each layer has."""
        return int(self._starts[-1]) if self._order is None else len(self._order)

    @cached_property
    def ids(self) -> Tensor:
        """The rows' ids, (n_rows,) int64; for tokens (n_rows, 2), sample and position in it.

        Cost: reads all ids.
        """
        ids = self._ids_in_files
        return ids if self._order is None else ids[torch.from_numpy(self._order)]

    @property
    def _ids_in_files(self) -> Tensor:
        shape, _ = self._parts[0].layers[IDS]
        found = [self._mapped(i, IDS) for i in range(len(self._shards))]
        return torch.cat([torch.empty(0, *shape, dtype=torch.int64, device="cpu"), *found])

    @cached_property
    def _order(self) -> Places | None:
        """The places in the files of the rows in order; None if they are as in the files."""
        if len(self._parts) == 1:
            return None
        ids = self._ids_in_files.numpy()
        ids = ids if ids.ndim == 2 else ids[:, None]
        order = np.lexsort(ids.T[::-1])
        return order[np.diff(ids[order], axis=0, prepend=ids[order][:1] - 1).any(1)]

    @cached_property
    def _shards(self) -> list[tuple[Path, int, int]]:
        """The folder, number and rows of each shard, those of the first process first."""
        return [
            (self.path / f"rank{rank}", i, n)
            for rank, part in enumerate(self._parts)
            for i, n in enumerate(part.rows)
        ]

    @cached_property
    def _starts(self) -> Places:
        """Where each shard's rows begin, and where the last one's end."""
        return np.cumsum([0, *(n for _, _, n in self._shards)])

    @cached_property
    def _keys(self) -> dict[str, str]:
        """The key of each layer, by name."""
        first = self._parts[0]
        return {first.name(key): key for key in first.layers if key != IDS}

    def _index(self) -> dict[str, Any]:
        """The files of each layer and of the ids, in order, and their rows: for other programs."""

        def files(key: str) -> list[str]:
            found = (file_of(folder, number, key) for folder, number, _ in self._shards)
            return [file.relative_to(self.path).as_posix() for file in found]

        layers = {name: files(key) for name, key in self._keys.items()}
        return {"rows": [n for *_, n in self._shards], "ids": files(IDS), "layers": layers}

    def _mapped(self, number: int, key: str) -> Tensor:
        """The rows of a layer in one shard, mapped into memory: not to be written to."""
        if (number, key) not in self._maps:
            folder, i, n = self._shards[number]
            file = file_of(folder, i, key)
            try:
                self._maps[number, key] = self._parts[0].mapped(file, key, n)
            except (OSError, ValueError, RuntimeError) as why:
                raise damaged(file, WHO, why) from why
        return self._maps[number, key]

    def __getitem__(self, name: str) -> Layer:
        if name in self._keys:
            return Layer(self, name)
        near = ", ".join(map(repr, nearest(str(name), self) or list(self)[:3])) or "there are none"
        raise SelectionError(
            f"{WHO}: {self.path} has no layer {name!r}. Nearest: {near}. list(acts) has all "
            f"{len(self)}."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": {}}  # a worker maps the files itself

    def __repr__(self) -> str:
        try:
            kinds = [(name, *self._parts[0].layers[key]) for name, key in self._keys.items()]
        except OptionError:
            return "Activations(not whole)"
        layers = [f"{name!r} {'×'.join(map(str, s)) or 'scalars'} {d}" for name, s, d in kinds]
        few = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        more = ", …" if layers[4:] else ""
        return f"Activations({self.n_rows} rows, {few}: {', '.join(layers[:4])}{more})"


def _problem(part: Progress | None, first: Progress) -> str:
    if part is None:
        return "is missing"
    if not part.done:
        return "is not finished"
    # of a sharded model each rank has other parameters
    same = [({**p.settings, "rank": 0, "model": ""}, p.layers) for p in (part, first)]
    return "" if same[0] == same[1] else "is of another model, other layers or settings"


class Layer(Dataset[Tensor]):
    """The rows of one layer: an array on disk, and a torch Dataset.

    `layer[3]` is a row; `layer[10:20]`, `layer[[3, 1]]` and `layer[mask]` are new tensors of rows.
    `DataLoader(layer, …)` gives batches of rows, `layer.batches(…)` gives them with their ids.

    Attributes:
        name: of the layer.
        shape: (n_rows, ...).
        dtype: of torch.
    """

    def __init__(self, acts: Activations, name: str) -> None:
        self._key = acts._keys[name]
        shape, dtype = acts._parts[0].layers[self._key]
        self._acts, self.name, self.dtype = acts, name, getattr(torch, dtype)
        self.shape, self.ndim = (acts.n_rows, *shape), 1 + len(shape)

    @property
    def ids(self) -> Tensor:
        """The rows' ids, see `Activations.ids`."""
        return self._acts.ids

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Tensor:
        places = self._places(rows)
        starts, flat = self._acts._starts, places.reshape(-1)
        found = torch.empty(len(flat), *self.shape[1:], dtype=self.dtype, device="cpu")
        shards = np.searchsorted(starts, flat, side="right") - 1
        for i in np.unique(shards):
            here = np.nonzero(shards == i)[0]
            t, at = self._acts._mapped(int(i), self._key), flat[here] - starts[i]
            if here[-1] - here[0] == at[-1] - at[0] == len(at) - 1 and (np.diff(at) == 1).all():
                # neighbours: many times as fast as by index
                found[here[0] : here[-1] + 1] = t[at[0] : at[-1] + 1]
            else:
                found[torch.from_numpy(here)] = t[torch.from_numpy(at)]
        return found.reshape(*places.shape, *self.shape[1:])

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Rows as a DataLoader fetches a batch of them: read at once."""
        return list(self[rows])

    def _places(self, rows: Any) -> Places:
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
        return index if self._acts._order is None else self._acts._order[index]

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

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.to_numpy(), dtype)

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {'×'.join(map(str, self.shape))} {self.dtype})"
