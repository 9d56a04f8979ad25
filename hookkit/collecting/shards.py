"""Rows on disk: what one process has written, as safetensors files and their index.

    acts/rank0/index.json            the settings, the layers, the shards
    acts/rank0/00000.safetensors     a tensor for each layer, and the ids

Rows go to the file of a shard as they come. A full shard is ended in another thread, which waits
for the disk, renames the file, and then replaces the index: whatever kills the process, the index
names whole shards only, and says at which row of which batch to go on.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hookkit.collecting.batches import WHO
from hookkit.collecting.index import IDS, Index, Layers, check_extra, dtype_of, file_of
from hookkit.collecting.rows import Rows
from hookkit.errors import HookError, OptionError

_MOVED_BYTES = 2**22


class Shard:
    """A file that rows are written to as they come; it gets its name when it is whole.

    Until then each layer has a region of it, of `room` rows. Appending to one file for each layer
    would do without regions, and a model of 1000 layers could not open them all.

    Args:
        target: the file.
        layers: the shape of a row and the dtype, by layer.
        room: how many rows fit.
    """

    def __init__(self, target: Path, layers: Layers, room: int) -> None:
        kinds = [(name, torch.Size(shape), dtype_of(d)) for name, (shape, d) in layers.items()]
        # the widest first, as safetensors has them: values stay aligned
        self._kinds = sorted(kinds, key=lambda kind: -kind[2].itemsize)
        self._codes = {dtype: _code(dtype) for _, _, dtype in kinds}
        self.target, self.room, self.n = target, room, 0
        self._head = len(self._header(room))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = target.with_name(f".hookkit-{target.stem}.tmp")
        self._file = self._temporary.open("w+b")

    @property
    def is_full(self) -> bool:
        """Whether no row fits any more."""
        return self.n == self.room

    def add(self, columns: dict[str, Tensor], first: int) -> int:
        """Writes the rows from `first` on that fit; the number of the first that does not."""
        end = min(len(columns[IDS]), first + self.room - self.n)
        for (name, shape, dtype), start in zip(self._kinds, self._starts(self.room), strict=False):
            self._file.seek(self._head + start + self.n * shape.numel() * dtype.itemsize)
            t = columns[name][first:end].reshape(-1).resolve_neg().cpu()
            self._file.write(t.view(torch.uint8).numpy().data)  # no copy where rows are contiguous
        self.n += end - first
        return end

    def close(self) -> None:
        """Ends the file, waits for the disk, and gives it its name."""
        if not self.is_full:
            self._close_gaps()
        self._file.seek(0)
        self._file.write(self._header(self.n))
        self._file.flush()
        os.fsync(self._file.fileno())  # else a crash may leave the name on an empty file
        self._file.close()
        self._temporary.replace(self.target)

    def discard(self) -> None:
        """Removes the file."""
        with suppress(OSError):  # a full disk refuses what is still in the buffer
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _starts(self, n: int) -> list[int]:
        """Where the regions of `n` rows begin behind the header, and where the last one ends."""
        sizes = (n * shape.numel() * dtype.itemsize for _, shape, dtype in self._kinds)
        return [*accumulate(sizes, initial=0)]

    def _header(self, n: int) -> bytes:
        """The header of `n` rows, as long as that of `room` rows."""
        starts, codes = self._starts(n), self._codes
        entries = {
            name: {"dtype": codes[dtype], "shape": [n, *shape], "data_offsets": starts[i : i + 2]}
            for i, (name, shape, dtype) in enumerate(self._kinds)
        }
        text = json.dumps(entries).encode()
        size = self._head - 8 if n < self.room else -(-len(text) // 8) * 8
        return size.to_bytes(8, "little") + text.ljust(size)

    def _close_gaps(self) -> None:
        """Moves the regions together, in place: safetensors allows no bytes between them."""
        starts = self._starts(self.n)
        for old, new, end in zip(self._starts(self.room), starts, starts[1:], strict=False):
            for at in range(0, end - new, _MOVED_BYTES):
                self._file.seek(self._head + old + at)
                data = self._file.read(min(_MOVED_BYTES, end - new - at))
                self._file.seek(self._head + new + at)
                self._file.write(data)
        self._file.truncate(self._head + starts[-1])


def _code(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype."""
    from safetensors.torch import save

    return str(json.loads(save({"x": torch.empty(0, dtype=dtype)})[8:])["x"]["dtype"])


class Shards:
    """The shards of this process: goes on where an index ends, or begins one.

    Args:
        folder: of the whole data set.
        settings: what is collected, of which model; `rank` is the process's number, of `ranks`.
        shard_bytes: how large a file becomes at most, about; one row at least.

    Raises:
        OptionError: there are rows of another model, other layers or settings.
        MissingExtraError: safetensors is not installed.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], shard_bytes: int) -> None:
        check_extra("write activations")
        self.folder, self.shard_bytes = folder / f"rank{settings['rank']}", shard_bytes
        self.index = Index(settings)
        if (self.folder / "index.json").exists():
            self.index = Index.load(self.folder, WHO)
            self._check_settings(settings)
        elif folder.exists() and not folder.is_dir():
            raise OptionError(f"{WHO}: {folder} is a file. Give a folder in to=.")
        for left in self.folder.glob(".hookkit-*.tmp"):  # of a process that was killed
            left.unlink()
        self._shard: Shard | None = None
        self._end = (self.index.batches, self.index.samples, self.index.skip)
        self._number = len(self.index.rows)
        self._disk = ThreadPoolExecutor(1, "collect")
        self._closing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._disk.shutdown()
        if self._shard is not None:  # after an error
            self._shard.discard()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        there = self.index.settings
        for name in {**settings, **there}:
            if there.get(name) != settings.get(name):
                raise OptionError(
                    f"{WHO}: the rows in {self.folder.parent} are of something else: {name} is "
                    f"{there.get(name)} there and {settings.get(name)} here. Give another folder "
                    "in to=, or remove that one."
                )

    def check_first(self, digest: str) -> None:
        """Raises unless the loader begins as the one before did."""
        self.index.first = self.index.first or digest
        if self.index.first != digest:
            raise OptionError(
                f"{WHO}: the first batch of the loader is not the one that {self.folder.parent} "
                "has rows of, so it cannot go on there. Give a loader with the same batches in the "
                "same order (with a seeded generator if it shuffles), or another folder in to=."
            )

    def add(self, rows: Rows, batches: int, samples: int) -> None:
        """Takes the rows of a batch: until then there were so many batches and samples."""
        columns, at = {**rows[0], IDS: rows[1]}, self._end[2]
        self._check_layers(columns)
        while at < len(rows[1]):
            self._shard = self._shard or self._new()
            at = self._shard.add(columns, at)
            if self._shard.is_full:
                self._close((*self._end[:2], at) if at < len(rows[1]) else (batches, samples, 0))
        self._end = (batches, samples, 0)

    def finish(self) -> None:
        """Writes what is left, and that there is no more."""
        if self._shard is not None:
            self._close(self._end)
        self._wait()
        self.index.done = True
        self.index.save(self.folder)

    def _new(self) -> Shard:
        layers = self.index.layers
        each = sum(torch.Size(shape).numel() * dtype_of(d).itemsize for shape, d in layers.values())
        target, self._number = file_of(self.folder, self._number), self._number + 1
        return Shard(target, layers, max(1, self.shard_bytes // each))

    def _close(self, end: tuple[int, int, int]) -> None:
        """Ends the shard in another thread, while the next one is written: one at a time."""
        self._wait()
        self._closing, self._shard = self._disk.submit(self._ended, self._shard, end), None

    def _wait(self) -> None:
        if self._closing is not None:
            self._closing.result()

    def _ended(self, shard: Any, end: tuple[int, int, int]) -> None:
        """Ends a shard, and then has the index name it."""
        try:
            shard.close()
        except BaseException:  # such as a full disk
            shard.discard()
            raise
        self.index.rows.append(shard.n)
        self.index.batches, self.index.samples, self.index.skip = end
        self.index.save(self.folder)

    def _check_layers(self, columns: dict[str, Tensor]) -> None:
        found = {n: (tuple(t.shape[1:]), str(t.dtype).split(".")[1]) for n, t in columns.items()}
        known = self.index.layers = self.index.layers or found
        for name in {**known, **found}:
            if known.get(name) != found.get(name):
                before, now = (_words(x.get(name)) for x in (known, found))
                raise HookError(
                    f'{WHO}: rows of "{name}" are {now} in this batch and {before} before. Give '
                    'hook= a function that returns rows of one shape, or use per="token".'
                )


def _words(layer: tuple[tuple[int, ...], str] | None) -> str:
    if layer is None:
        return "missing"
    return f"{'×'.join(map(str, layer[0])) or 'scalars'} of {layer[1]}"
