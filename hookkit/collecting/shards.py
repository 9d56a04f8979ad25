"""`Store`: takes the rows of one process. `Shards`: one that writes them to disk, see `parts`.

A layer's rows are appended to its file as the layer runs, so that no more than one layer's output
is in memory. A shard ends with a batch. Another thread then waits for the disk, renames the shard's
folder and replaces `progress.json`: whatever kills the process, that names whole shards only.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.collecting.activations import Activations
from hookkit.collecting.batches import WHO, alike, sketch
from hookkit.collecting.parts import IDS, Progress, file_of, load
from hookkit.errors import HookError, OptionError
from hookkit.files import atomic_write

_OPEN = 100  # files that stay open, to open one costs 50 µs; a process may have 256 on some systems


class Store:
    """Takes rows of each layer, and keeps them in `file` whenever there are `every_bytes` of them.

    What is there must be of the same settings. Without a file nothing is kept.
    """

    def __init__(self, file: Path | None, settings: dict[str, Any], every_bytes: int) -> None:
        self.file, self.every_bytes, self._n_bytes = file, every_bytes, 0
        self.progress = Progress(settings)
        self._seen: set[str] = set()  # the keys of this batch
        if file is not None and file.exists():
            self.progress = self._loaded(file)
            self._check_settings(settings, file.parents[1])
        elif file is not None and (blocked := [p for p in file.parents[:2] if p.is_file()]):
            raise OptionError(f"{WHO}: {blocked[0]} is a file. Give a folder in to=.")
        self._clear()  # what a killed process was writing

    def _loaded(self, file: Path) -> Progress:
        raise NotImplementedError

    def _put(self, key: str, rows: Tensor, ids: Tensor) -> None:
        raise NotImplementedError

    def _keep(self) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        """What `collect` returns; each process has to call."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def _clear(self) -> None:
        for left in self.file.parent.glob(".hookkit-*.tmp") if self.file is not None else ():
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _check_settings(self, here: dict[str, Any], folder: Path) -> None:
        there = self.progress.settings
        for name in {**here, **there}:
            if there.get(name) != here.get(name):
                raise OptionError(
                    f"{WHO}: the rows in {folder} are of something else: {name} is "
                    f"{there.get(name)} there and {here.get(name)} here. Give another folder in "
                    "to=, or remove that one."
                )

    def check_first(self, digest: str) -> None:
        """Raises unless the loader begins as the one before did."""
        self.progress.first = self.progress.first or digest
        if self.progress.first != digest and self.file is not None:
            raise OptionError(
                f"{WHO}: the first batch of the loader is not the one that {self.file.parents[1]} "
                "has rows of, so it cannot go on there. Give a loader with the same batches in the "
                "same order (with a seeded generator if it shuffles), or another folder in to=."
            )

    def check_rows(self, again: dict[str, list[float]]) -> None:
        """Raises unless the layers give for the first batch what they gave before, by key."""
        assert self.file is not None
        before = {k: v for k, v in self.progress.first_rows.items() if k != IDS}
        for key in sorted({**before, **again}):
            if not alike(before.get(key, []), again.get(key, [])):
                raise OptionError(
                    f"{WHO}: the rows in {self.file.parents[1]} are of something else: for the "
                    f'first batch "{self.progress.name(key)}" gives other values here than there. '
                    "The model, what is hooked to it, or a function that was given has changed. "
                    "Give another folder in to=, or remove that one."
                )

    def add(self, key: str, rows: Tensor, ids: Tensor) -> None:
        """Takes the rows of a layer, whose `key` is as in `Progress.layers`."""
        kind, layers = (tuple(rows.shape[1:]), str(rows.dtype)[6:]), self.progress.layers
        if not self.progress.batches:
            layers.setdefault(key, kind)
            if self.file is not None:
                self.progress.first_rows.setdefault(key, sketch(rows))
        self._check_kind(key, kind)
        self._put(key, rows, ids)
        self._seen.add(key)
        self._n_bytes += rows.nbytes

    def _check_kind(self, key: str, kind: Any) -> None:
        if (before := self.progress.layers.get(key)) != kind:
            raise HookError(
                f'{WHO}: rows of "{self.progress.name(key)}" are {_words(kind)} in this batch and '
                f"{_words(before)} before. Give hook= a function that returns rows of one shape, "
                'or use per="token".'
            )

    def end_batch(self, n_samples: int, ids: Tensor) -> None:
        """Ends a batch, of which the rows of all layers were added."""
        p = self.progress
        for key in p.layers.keys() - self._seen:
            self._check_kind(key, None)
        self._seen.clear()
        p.batches, p.samples, p.n_rows = p.batches + 1, p.samples + n_samples, p.n_rows + len(ids)
        if self._n_bytes >= self.every_bytes:
            self._keep()
            self._n_bytes = 0

    def finish(self) -> None:
        """Keeps what is left, and that there is no more."""
        self.progress.done = True
        self._keep()


class Shards(Store):
    """The shards of this process in `folder`, of about `shard_bytes` each; see `Store`."""

    def __init__(self, folder: Path, settings: dict[str, Any], shard_bytes: int) -> None:
        self.folder = folder / f"rank{settings['rank']}"
        super().__init__(self.folder / "progress.json", settings, shard_bytes)
        self._disk = ThreadPoolExecutor(1, "collect")
        self._ending: Future[None] | None = None
        self._open: dict[str, BinaryIO] = {}  # files of this shard

    def _loaded(self, file: Path) -> Progress:
        return load(file, WHO)

    def __exit__(self, *error: object) -> None:
        self._disk.shutdown()
        for file in self._open.values():  # after an error
            with suppress(OSError):  # a full disk refuses what is still in the buffer
                file.close()
        self._clear()

    @property
    def _shard(self) -> Path:
        """The folder of the shard that is being written."""
        return self.folder / f".hookkit-{len(self.progress.rows)}.tmp"

    def _put(self, key: str, rows: Tensor, ids: Tensor) -> None:
        data = rows.reshape(-1).resolve_neg().cpu().view(torch.uint8).numpy().data
        file = self._open.get(key) or self._opened(key)
        file.write(data)
        if key not in self._open:
            file.close()

    def _opened(self, key: str) -> BinaryIO:
        if not self._open:
            self._shard.mkdir(parents=True, exist_ok=True)
        file = (self._shard / f"{key}.safetensors").open("ab")
        if len(self._open) < _OPEN:
            self._open[key] = file
        if not file.tell():
            file.write(self.progress.header(key, 0))
        return file

    def end_batch(self, n_samples: int, ids: Tensor) -> None:
        """As `Store.end_batch`."""
        self.add(IDS, ids, ids)
        super().end_batch(n_samples, ids)

    def finish(self) -> None:
        """As `Store.finish`; waits for the disk."""
        self._wait()
        self.progress.done = True
        self._ended()()

    def _keep(self) -> None:
        """Ends the shard in another thread, while the next one is written: one at a time."""
        self._wait()
        self._ending = self._disk.submit(self._ended())

    def _wait(self) -> None:
        if self._ending is not None:
            self._ending.result()

    def _ended(self) -> Callable[[], None]:
        """Ends the shard, but for what waits for the disk, which it returns."""
        shard, files, p = self._shard, self._open, self.progress
        self._open = {}
        if n := p.n_rows - sum(p.rows):
            p.rows.append(n)
        return partial(self._end, shard, n, files, copy.deepcopy(p))

    def _end(self, shard: Path, n: int, files: dict[str, BinaryIO], progress: Progress) -> None:
        for file in files.values():
            file.close()
        for key in progress.layers if n else ():
            with (shard / f"{key}.safetensors").open("r+b") as whole:
                whole.write(progress.header(key, n))
                whole.flush()
                os.fsync(whole.fileno())  # else a crash may leave the name on an empty file
        if n:
            target = file_of(self.folder, len(progress.rows) - 1, IDS).parent
            shutil.rmtree(target, ignore_errors=True)  # of a process killed before the next line
            shard.rename(target)
        progress.save(self.folder / "progress.json")

    def result(self) -> Activations:
        """The rows of all processes; rank 0 writes the index."""
        with ranks.together("call collect"):
            ranks.gather_object(None)  # until all parts are written
        found, file = Activations(self.folder.parent), self.folder.parent / "index.json"
        if not ranks.rank() and not file.exists():
            with suppress(OptionError):  # parts are made elsewhere, or later: reading says so
                index = found._index()
                with atomic_write(file, text=True) as opened:
                    json.dump(index, opened)
        return found


def _words(kind: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if kind is None else f"{'×'.join(map(str, kind[0])) or 'scalars'} of {kind[1]}"
