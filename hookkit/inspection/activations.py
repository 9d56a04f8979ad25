"""The rows on disk: `Activations` reads what `RowFiles` wrote.

acts/rank0/layer0.npy    the rows of the first layer, of one process
acts/rank0/ids.npy       their ids
acts/rank0/index.json    the layers, shapes and dtypes; without it the part is incomplete
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils.data import Dataset

from hookkit._core import distributed as ranks
from hookkit._core.checks import check_path
from hookkit._core.files import atomic_write
from hookkit._core.messages import no_such
from hookkit.errors import OptionError

_OURS = re.compile(r"rank\d+(/(layer\d+\.npy|ids\.npy|index\.json|\.hookkit-\w+\.tmp))?")


class RowFiles:
    """Writes the rows of one process to a folder of its own in `out_dir`, which has to be empty.

    `overwrite` first deletes what an earlier call wrote there.
    """

    def __init__(self, out_dir: Any, overwrite: bool, layers: list[str]) -> None:
        folder = self.folder = check_path("collect", out_dir, "out_dir")
        with ranks.together("call collect"):
            if problems := [*filter(None, ranks.gather_object(_problem(folder, overwrite)))]:
                raise OptionError(f"collect: {problems[0]}")  # on all ranks, or on none
            for part in folder.glob("rank*"):
                shutil.rmtree(part, ignore_errors=True)  # the other ranks do the same
            ranks.gather_object(None)
        self.part, self.layers = folder / f"rank{ranks.rank()}", layers
        self.n_rows: dict[str, int] = {}  # by file

    def add(self, name: str, rows: Tensor, ids: Tensor) -> None:
        """Appends the rows that a layer gave for a batch, and their ids after the last layer's."""
        self._append(f"layer{self.layers.index(name)}.npy", rows)
        if name == self.layers[-1]:
            self._append("ids.npy", ids)

    def _append(self, file: str, t: Tensor) -> None:
        t = t.cpu().contiguous()
        try:
            array = t.numpy(force=True)
        except TypeError:  # numpy has no bfloat16 and float8: whole numbers with the same bits
            array = t.view(getattr(torch, f"uint{8 * t.itemsize}")).numpy()
        head = npy.header_data_from_array_1_0(array[:0])
        self.part.mkdir(parents=True, exist_ok=True)
        # opened each time: there may be more layers than files may be open
        with (self.part / file).open("ab" if file in self.n_rows else "xb") as out:
            if file not in self.n_rows:
                npy.write_array_header_1_0(out, head)
            out.write(array.data)
        self.n_rows[file] = self.n_rows.get(file, 0) + len(array)
        head["shape"] = (self.n_rows[file], *array.shape[1:])
        with (self.part / file).open("r+b") as out:  # numpy's header has room for a large number
            npy.write_array_header_1_0(out, head)

    def finish(self, kinds: Mapping[str, tuple[list[int], torch.dtype]]) -> None:
        """Writes the index."""
        layers = {k: [kinds[k][0], str(kinds[k][1]).removeprefix("torch.")] for k in self.layers}
        with atomic_write(self.part / "index.json", text=True) as file:
            json.dump({"format": 6, "ranks": ranks.world_size(), "layers": layers}, file)


def _problem(folder: Path, overwrite: bool) -> str:
    """Returns why nothing can be written to `folder`, or ""."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        ours = _OURS.fullmatch(name) and not path.is_symlink()
        if not ours or not overwrite:
            cure = "deletes what collect wrote" if ours else "would delete only what collect wrote"
            return f"{folder} holds {name}. Give an empty folder; overwrite=True {cure}."
    return ""


class Activations(dict[str, "Layer"]):
    """The activations in a folder that `collect` wrote: a dict from layer to its rows.

    Rows are in the order in which the loader gave them; of several processes, rank after rank.

    Args:
        folder: the `out_dir` of `collect`.

    Attributes:
        ids: the rows' ids, (n_rows,) int64; of tokens (n_rows, 2), sample and position in it.

    Raises:
        OptionError: there are none, or they are incomplete, or the parts of the ranks do not fit.

    >>> import tempfile
    >>> from torch import nn
    >>> from hookkit.inspection import collect
    >>> net, batches = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), [*torch.randn(10, 2, 4)]
    >>> acts = collect(net, batches, ["0", "1"], tempfile.mkdtemp())
    >>> acts
    Activations('0': 20×3 float32, '1': 20×3 float32)
    >>> acts["1"].shape, acts["1"][[3, 5, 19]].shape, acts.ids[:3]
    ((20, 3), torch.Size([3, 3]), tensor([0, 1, 2]))
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = check_path("Activations", folder, "folder")
        parts = {int(p.name[4:]): p for p in self.path.glob("rank*") if _OURS.fullmatch(p.name)}
        for part in parts.values():
            if not (part / "index.json").exists():
                n = len(np.load(part / "ids.npy")) if (part / "ids.npy").exists() else 0
                raise OptionError(
                    f"Activations: {part} is incomplete: {n} rows of each layer are whole. Collect "
                    "again, with overwrite=True, or read them with numpy.load."
                )
        indices = [json.loads((part / "index.json").read_text()) for part in parts.values()]
        wanted = [*range(indices[0]["ranks"])] if indices else [0]
        if sorted(parts) != wanted or any(index != indices[0] for index in indices):
            raise OptionError(
                f"Activations: {folder} is not what one collect wrote: it has parts of the ranks "
                f"{sorted(parts)}, and needs {wanted}, all with the same layers, shapes and dtypes."
            )
        in_order = [parts[rank] for rank in range(len(parts))]
        self.ids = torch.from_numpy(np.concatenate([np.load(p / "ids.npy") for p in in_order]))
        for i, (name, (shape, dtype)) in enumerate(indices[0]["layers"].items()):
            files = [part / f"layer{i}.npy" for part in in_order]
            self[name] = Layer(files, self.ids, shape, getattr(torch, dtype))

    def __missing__(self, name: Any) -> Layer:
        raise no_such(f"Activations: there is no layer {name!r}", name, self)

    def __repr__(self) -> str:
        few = [f"{name!r}: {layer}" for name, layer in [*self.items()][:3]]
        return f"Activations({', '.join(few)}{', …' if len(self) > 3 else ''})"


class Layer(Dataset[Tensor]):
    """The rows of one layer: a torch Dataset that is indexed as a numpy array.

    `layer[3]` is a row; `layer[10:20]`, `layer[[3, 1]]` and `layer[mask]` are new tensors of rows.
    Only rows that are read are loaded.

    Attributes:
        ids: the rows' ids, see `Activations`.
        shape: (n_rows, ...).
        dtype: of torch.
    """

    def __init__(self, files: list[Path], ids: Tensor, row: list[int], dtype: torch.dtype) -> None:
        self.files, self.ids, self.shape, self.dtype = files, ids, (len(ids), *row), dtype

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Tensor:
        rows = rows.numpy() if isinstance(rows, Tensor) else rows
        # mapped each time: there may be more layers than files may be open
        parts = [np.load(file, mmap_mode="r") for file in self.files]
        if len(parts) == 1:
            found = parts[0][rows]
        else:
            at = np.arange(len(self))[rows]
            found, start = np.empty((*at.shape, *self.shape[1:]), parts[0].dtype), 0
            for part in parts:
                here = (at >= start) & (at < start + len(part))
                found[here] = part[at[here] - start]
                start += len(part)
        return torch.from_numpy(np.array(found)).view(self.dtype)

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Returns the rows of a DataLoader's batch, read at once."""
        return list(self[rows])

    def __repr__(self) -> str:
        return f"{'×'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"
