"""The rows on disk: `RowFiles` writes them, `Activations` reads them.

acts/layer0.npy          the rows of the first layer
acts/ids.npy             their ids
acts/activations.json    the layers, shapes and dtypes; empty until all rows are written
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils.data import Dataset

from hookkit._core.checks import check_path
from hookkit._core.files import atomic_write
from hookkit._core.messages import no_such
from hookkit.errors import OptionError

_INDEX = "activations.json"
_OURS = re.compile(r"layer\d+\.npy|ids\.npy|activations\.json|\.hookkit-\w+\.tmp")


class RowFiles:
    """Writes the rows of each layer to a file in `out_dir`, which has to be empty.

    `overwrite` first deletes the files of an earlier call.
    """

    def __init__(self, out_dir: Any, overwrite: bool, layers: list[str]) -> None:
        folder = self.folder = check_path("collect", out_dir, "out_dir")
        self.layers, self.n_rows, self.n_bytes = layers, dict[str, int](), dict[str, int]()
        if folder.is_file():
            raise OptionError(f"collect: {folder} is a file. Give a folder for the rows.")
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in found:
            ours = _OURS.fullmatch(path.name) and path.is_file() and not path.is_symlink()
            ours = ours and folder / _INDEX in found
            if not ours or not overwrite:
                cure = "deletes what collect wrote" if ours else "deletes only what collect wrote"
                raise OptionError(
                    f"collect: {folder} holds {path.name}. Give an empty folder; overwrite=True "
                    f"{cure}."
                )
        for path in found:
            path.unlink(missing_ok=True)  # another run may do the same

    def add(self, name: str, rows: Tensor, ids: Tensor) -> None:
        """Append the rows that a layer gave for a batch, and their ids after the last layer's.

        Raises:
            OptionError: something else writes to this folder.
        """
        try:
            if not self.n_rows:  # "x": of two processes one makes the file
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / _INDEX).open("x").close()
            self._append(f"layer{self.layers.index(name)}.npy", rows)
            if name == self.layers[-1]:
                self._append("ids.npy", ids)
        except (FileExistsError, FileNotFoundError) as e:
            raise self._shared() from e

    def _shared(self) -> OptionError:
        return OptionError(
            f"collect: another process or run writes to {self.folder}. Give each a folder of its "
            'own, such as out_dir=f"acts/{rank}".'
        )

    def _append(self, file: str, t: Tensor) -> None:
        t = t.cpu().contiguous()
        try:
            array = t.numpy(force=True)
        except TypeError:  # numpy has no bfloat16 and float8: whole numbers with the same bits
            array = t.view(getattr(torch, f"uint{8 * t.itemsize}")).numpy()
        head, is_new = npy.header_data_from_array_1_0(array[:0]), file not in self.n_rows
        # opened each time: there may be more layers than files may be open
        with (self.folder / file).open("xb" if is_new else "r+b") as out:
            if is_new:
                npy.write_array_header_1_0(out, head)
            elif out.seek(0, os.SEEK_END) != self.n_bytes[file]:
                raise FileExistsError(f"{file} has grown")
            out.write(array.data)
            self.n_bytes[file] = out.tell()
            self.n_rows[file] = self.n_rows.get(file, 0) + len(array)
            head["shape"] = (self.n_rows[file], *array.shape[1:])
            out.seek(0)  # last: until then the header counts rows that are there
            npy.write_array_header_1_0(out, head)  # which has room for a large number

    def finish(self, kinds: Mapping[str, tuple[list[int], torch.dtype]]) -> None:
        """Write the index: from then on the rows can be read.

        Raises:
            OptionError: something else has written to this folder.
        """
        for name, n in self.n_bytes.items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size != n:
                raise self._shared()
        layers = {k: [kinds[k][0], str(kinds[k][1]).removeprefix("torch.")] for k in self.layers}
        with atomic_write(self.folder / _INDEX, text=True) as file:
            json.dump({"format": 7, "layers": layers}, file)


class Activations(dict[str, "Layer"]):
    """Reads the activations in a folder that `collect` wrote: a dict from layer to its rows.

    Rows are in the order in which the loader gave them.

    Args:
        folder: the `out_dir` of `collect`.

    Attributes:
        ids: the rows' ids, (n_rows,) int64; of tokens (n_rows, 2), sample and position in it.

    Raises:
        OptionError: the folder has no activations, or they are incomplete.

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
        index, ids = self.path / _INDEX, self.path / "ids.npy"
        if not index.is_file():
            raise OptionError(
                f"Activations: {folder} has no {_INDEX}, which collect(model, loader, layers, "
                "out_dir) writes. Give the folder of a collect."
            )
        if not (text := index.read_text()):
            n = len(np.load(ids)) if ids.exists() else 0
            raise OptionError(
                f"Activations: {folder} is incomplete: {n} rows of each layer are whole. Collect "
                "again, with overwrite=True, or read them with numpy.load."
            )
        self.ids = torch.from_numpy(np.load(ids))
        for i, (name, (shape, dtype)) in enumerate(json.loads(text)["layers"].items()):
            file = self.path / f"layer{i}.npy"
            self[name] = Layer(file, self.ids, shape, getattr(torch, dtype))

    def __missing__(self, name: Any) -> Layer:
        raise no_such(f"Activations: there is no layer {name!r}", name, self)

    def __repr__(self) -> str:
        few = [f"{name!r}: {layer}" for name, layer in [*self.items()][:3]]
        return f"Activations({', '.join(few)}{', …' if len(self) > 3 else ''})"


class Layer(Dataset[Tensor]):
    """Reads the rows of one layer: a torch Dataset that is indexed as a numpy array.

    `layer[3]` is a row; `layer[10:20]`, `layer[[3, 1]]` and `layer[mask]` are new tensors of rows.
    Only rows that are read are loaded.

    Attributes:
        ids: the rows' ids, see `Activations`.
        shape: (n_rows, ...).
        dtype: of torch.
    """

    def __init__(self, file: Path, ids: Tensor, row: list[int], dtype: torch.dtype) -> None:
        self.file, self.ids, self.shape, self.dtype = file, ids, (len(ids), *row), dtype

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Tensor:
        # Mapped each time: there may be more layers than files may be open. Read-only: a tensor of
        # torch.from_file is mapped for writing, which Linux refuses if the file exceeds the memory.
        whole = np.load(self.file, mmap_mode="r")
        found = whole[rows.numpy() if isinstance(rows, Tensor) else rows]
        return torch.from_numpy(np.array(found)).view(self.dtype)

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Return the rows of a DataLoader's batch, read at once."""
        return list(self[rows])

    def __repr__(self) -> str:
        return f"{'×'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"
