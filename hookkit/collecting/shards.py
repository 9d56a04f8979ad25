"""Rows on disk: what one process has written, as safetensors files and their index.

    acts/rank0/index.json            the settings, the layers, the shards
    acts/rank0/00000.safetensors     whole batches: a tensor for each layer, and the ids

A shard is written aside and renamed, and then the index is: whatever kills the process, the index
names whole shards only, and says at which batch to go on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.collecting.batches import WHO, digest
from hookkit.collecting.rows import Rows
from hookkit.errors import ArgumentError, HookError, OptionError, missing_extra
from hookkit.files import atomic_write
from hookkit.modules import class_name, unwrap

IDS = "::ids"  # beside the layers' names, none of which has colons in front
_FORMAT = 1


@dataclass
class Index:
    """What one process has written.

    Attributes:
        settings: what was collected, of which model.
        layers: the shape of a row and the dtype by layer, and of `IDS`.
        rows: how many each file has.
        batches: how many of the loader's are written.
        samples: how many samples were in these.
        first: the digest of the first batch.
        done: whether the loader has come to its end.
    """

    settings: dict[str, Any]
    layers: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    batches: int = 0
    samples: int = 0
    first: str = ""
    done: bool = False

    def save(self, folder: Path) -> None:
        """Writes it to `folder`."""
        with atomic_write(folder / "index.json", text=True) as file:
            json.dump({"format": _FORMAT, **asdict(self)}, file)

    @classmethod
    def load(cls, folder: Path, who: str) -> Index:
        """The index in `folder`.

        Raises:
            OptionError: it is missing or damaged.
        """
        try:
            found = json.loads((folder / "index.json").read_text(encoding="utf-8"))
            if found.pop("format") != _FORMAT:
                raise ValueError("it is of another version of hookkit")
            index = cls(**found)
            index._check()
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as why:
            raise OptionError(
                f"{who}: {folder / 'index.json'} cannot be read ({type(why).__name__}: {why}). "
                "Give a folder that collect wrote; if it is damaged, remove it and collect again."
            ) from why
        return index

    def _check(self) -> None:
        """Raises for anything that would not have been saved."""
        self.layers = {name: (tuple(shape), d) for name, (shape, d) in self.layers.items()}
        rank, of = self.settings["rank"], self.settings["ranks"]
        counts = [rank, of - rank - 1, *self.rows, self.batches, self.samples]
        counts += [n for shape, dtype in self.layers.values() for n in shape if dtype_of(dtype)]
        if not all(type(n) is int and n >= 0 for n in counts) or type(self.done) is not bool:
            raise ValueError("a number in it is wrong")


def check_extra(purpose: str) -> None:
    """Raises MissingExtraError if safetensors is not installed."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise missing_extra("safetensors", "collect", purpose) from None


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; raises ValueError if there is none."""
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def file_of(folder: Path, number: int) -> Path:
    """The file of a shard.

    >>> file_of(Path("rank0"), 3).name
    '00003.safetensors'
    """
    return folder / f"{number:05d}.safetensors"


def fingerprint(model: nn.Module) -> dict[str, str]:
    """What tells a model from others, in words: class and parameters, and the modules' modes.

    Raises:
        ArgumentError: parameters have no shape yet.
    """
    root = unwrap(model)
    named = dict(root.named_parameters())
    if lazy := [name for name, p in named.items() if nn.parameter.is_lazy(p)]:
        raise ArgumentError(f"{WHO}: '{lazy[0]}' has no shape yet. Run the model once.")
    # of a sharded parameter this rank's part
    values = digest(p.to_local() if hasattr(p, "to_local") else p for p in named.values())
    modes = [m.training for m in root.modules()]
    mixed = f"training in {modes.count(True)} modules, {digest([torch.tensor(modes)])}"
    return {
        "model": f"{class_name(root)} with parameters {values}",
        "mode": mixed if len({*modes}) == 2 else "training" if modes[0] else "evaluation",
    }


class Shards:
    """The shards of this process: goes on where an index ends, or begins one.

    Args:
        folder: of the whole data set.
        settings: what is collected, of which model; `rank` is the process's number, of `ranks`.
        shard_bytes: how large a file becomes, about; one batch at least.

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
        self._buffers: dict[str, Tensor] = {}
        self._n, self._end = 0, (self.index.batches, self.index.samples)  # rows that wait

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
        columns, n = {**rows[0], IDS: rows[1]}, len(rows[1])
        self._check_layers(columns)
        room = len(self._buffers[IDS]) if self._buffers else -1
        if self._n + n > room:
            self._flush()
            if n > room:
                self._buffers = self._blank(n)
        for name, t in columns.items():
            self._buffers[name][self._n : self._n + n].copy_(t)
        self._n, self._end = self._n + n, (batches, samples)

    def finish(self) -> None:
        """Writes what is left, and that there is no more."""
        self._flush()
        self.index.done = True
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

    def _blank(self, n: int) -> dict[str, Tensor]:
        """Buffers for the rows of a shard, of `n` at least."""
        kinds = {name: (shape, dtype_of(d)) for name, (shape, d) in self.index.layers.items()}
        each = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds.values())
        n = max(n, self.shard_bytes // each)
        return {name: torch.empty(n, *shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}

    def _flush(self) -> None:
        """Writes the rows that wait as a shard."""
        from safetensors.torch import save_file

        if self._n:
            with atomic_write(file_of(self.folder, len(self.index.rows))) as file:
                save_file({name: t[: self._n] for name, t in self._buffers.items()}, file.name)
            self.index.rows.append(self._n)
            self.index.batches, self.index.samples = self._end
            self.index.save(self.folder)
            self._n = 0


def _words(layer: tuple[tuple[int, ...], str] | None) -> str:
    if layer is None:
        return "missing"
    return f"{'×'.join(map(str, layer[0])) or 'scalars'} of {layer[1]}"
