"""The rows of one process on disk, which survive a kill.

    acts/rank0/index.json    the settings, the layers, and how many rows and batches are whole
    acts/rank0/0.npy         the rows of the first layer
    acts/rank0/ids.npy       their ids

Rows are appended as the layers run. `index.json` is replaced as a whole now and then; what is
behind the rows that it counts is written again by a run that goes on.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.errors import HookError, OptionError
from hookkit.files import atomic_write

IDS = "ids"
HEAD = 128  # bytes of a header
_FORMAT = 5
_EVERY_BYTES, _EVERY_S = 2**28, 10.0  # between two states of the index


class Files:
    """Rows of each layer, and where to go on.

    Args:
        folder: the part of this process.
        settings: what is collected; they have to be those of the rows that are there.

    Attributes:
        counts: the numbers of whole rows `n`, of `samples` and `batches`, and of `items`, the
            samples in what the loader gave.
        kinds: the shape of a row and the dtype of each file.
        done: whether the loader has come to its end.

    Raises:
        OptionError: the rows that are there are of something else, or damaged.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.file = folder, folder / "index.json"
        if folder.parent.is_file():
            raise OptionError(f"collect: {folder.parent} is a file. Give a folder in to=.")
        self.settings, self.kinds, self.done = settings, dict[str, Any](), False
        self.counts = {"n": 0, "samples": 0, "batches": 0, "items": 0}
        if self.file.exists():
            index = read_index(self.file)
            self.kinds, self.counts, self.done = index["kinds"], index["counts"], index["done"]
            self._check(index["settings"])
        self.unsaved, self.saved_at = 0, time.monotonic()

    def _check(self, old: dict[str, Any]) -> None:
        for key, new in json.loads(json.dumps(self.settings)).items():
            if old.get(key) != new:
                raise OptionError(
                    f"collect: {self.folder} has rows of something else: {key} is {old.get(key)} "
                    f"there and {new} here. Give another folder in to=, or remove this one."
                )
        for name, kind in self.kinds.items():
            mapped(self.folder, name, kind, self.counts["n"])

    def add(self, number: int | str, rows: Tensor, ids: Tensor) -> None:
        """Appends the rows that a layer gave for this batch."""
        name = str(number)
        dtype = str(rows.dtype).removeprefix("torch.")
        kind = [[*rows.shape[1:]], dtype]
        if name not in self.kinds:
            _header((10**12, *rows.shape[1:]), stored_dtype(dtype))  # is there room for its shape?
        if (known := self.kinds.setdefault(name, kind)) != kind:
            raise HookError(
                f'collect: rows of "{self.settings["layers"][int(name)]}" are {_words(kind)} in '
                f"this batch and {_words(known)} in those before. Give hook= a function that "
                "returns rows of one shape and dtype."
            )
        rows = rows.cpu().contiguous().resolve_conj()
        row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
        self._write(name, HEAD + self.counts["n"] * row_bytes, rows.view(torch.uint8).numpy().data)
        self.unsaved += rows.nbytes

    def _write(self, name: str, at: int, data: Any) -> None:
        file = self.folder / f"{name}.npy"
        self.folder.mkdir(parents=True, exist_ok=True)
        # opened each time: there may be more layers than files may be open
        with file.open("r+b" if file.exists() else "w+b") as out:
            out.seek(at)
            out.write(data)

    def end_batch(self, ids: Tensor, n_samples: int, n_items: int) -> None:
        """Counts a batch whose rows are there."""
        self.add(IDS, ids, ids)
        new = {"n": len(ids), "samples": n_samples, "batches": 1, "items": n_items}
        self.counts = {key: self.counts[key] + new[key] for key in new}
        if self.unsaved >= _EVERY_BYTES or time.monotonic() - self.saved_at > _EVERY_S:
            self.save()

    def save(self, *, done: bool = False) -> None:
        """Writes how many rows are whole, if there are some."""
        if not self.counts["batches"]:
            return
        for name, (shape, dtype) in self.kinds.items():
            self._write(name, 0, _header((self.counts["n"], *shape), stored_dtype(dtype)))
        index = {"settings": self.settings, "counts": self.counts, "kinds": self.kinds}
        with atomic_write(self.file, text=True) as file:
            json.dump({"format": _FORMAT, **index, "done": done}, file)
        self.unsaved, self.saved_at = 0, time.monotonic()


def read_index(file: Path) -> dict[str, Any]:
    """The content of an `index.json`.

    Raises:
        OptionError: it is damaged.
    """
    try:
        index: dict[str, Any] = json.loads(file.read_text())
        if index["format"] != _FORMAT:
            raise ValueError("it is of another version of hookkit")
        return index
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise _damaged(file, why) from why


def mapped(folder: Path, name: str, kind: Any, n: int) -> Tensor:
    """The first `n` rows in a file, mapped into memory; what is written to them changes no file.

    Raises:
        OptionError: the file is missing or too short.
    """
    shape, dtype = (n, *kind[0]), kind[1]
    if not math.prod(shape):
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    file = folder / f"{name}.npy"
    try:
        rows: Any = np.memmap(file, stored_dtype(dtype), "c", HEAD, shape)
    except (OSError, ValueError) as why:
        raise _damaged(file, why) from why
    return torch.from_numpy(rows).view(getattr(torch, dtype))


def _damaged(file: Path, why: Exception) -> OptionError:
    return OptionError(
        f"{file} cannot be read ({type(why).__name__}: {why}). Collect into another folder, or "
        "remove this one."
    )


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Numpy's dtype of the same name, or, where it has none, whole numbers of as many bytes."""
    bits = f"uint{8 * getattr(torch, dtype).itemsize}"
    return np.dtype(dtype if hasattr(np, dtype) else bits)


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Of a .npy file, format 1.0 (numpy.lib.format), of `HEAD` bytes."""
    about = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    text = repr(about).encode().ljust(HEAD - 11) + b"\n"
    if len(text) > HEAD - 10:
        raise HookError(
            f"collect: rows of {len(shape) - 1} dimensions, {shape[1:]}, are too many for the head "
            "of a file. Give hook= a function that flattens them."
        )
    return b"\x93NUMPY\x01\x00" + (HEAD - 10).to_bytes(2, "little") + text


def _words(kind: Any) -> str:
    return f"{'×'.join(map(str, kind[0])) or 'scalars'} of {kind[1]}"
