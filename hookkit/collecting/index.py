"""How far each process has come with its part, and the index of all parts.

acts/rank0/progress.json    of one process, which goes on there
acts/index.json             of all; rank 0 writes it once every part is whole
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hookkit.errors import OptionError, missing_extra
from hookkit.files import atomic_write

_FORMAT = 2
IDS = "ids"  # the key of the rows' ids


@dataclass
class Progress:
    """What one process has collected.

    Attributes:
        settings: what is collected, of which model; `rank` is the process's number, of `ranks`.
        layers: the shape of a row and the dtype by key, and of `IDS`; see `key_of`.
        rows: how many each shard has.
        n_rows: how many there are in all.
        batches: how many of the loader's were run.
        samples: how many samples were in these.
        first: the digest of the first batch.
        done: whether the loader has come to its end.
    """

    settings: dict[str, Any]
    layers: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    n_rows: int = 0
    batches: int = 0
    samples: int = 0
    first: str = ""
    done: bool = False

    def __post_init__(self) -> None:
        self.layers = {key: (tuple(shape), dtype) for key, (shape, dtype) in self.layers.items()}
        rank, of = self.settings["rank"], self.settings["ranks"]
        counts = [rank, of - rank - 1, *self.rows, self.n_rows, self.batches, self.samples]
        counts += [n for shape, dtype in self.layers.values() for n in shape if dtype_of(dtype)]
        if not all(type(n) is int and n >= 0 for n in counts) or type(self.done) is not bool:
            raise ValueError("a number in it is wrong")

    def name(self, key: str) -> str:
        """The layer's name; of a module that is called several times with the number of the call.

        >>> p = Progress({"rank": 0, "ranks": 1, "layers": ["a", "b"]})
        >>> p.layers = dict.fromkeys([key_of(0, 0), key_of(1, 0), key_of(1, 1)], ((3,), "float32"))
        >>> [p.name(key) for key in p.layers]
        ['a', 'b:0', 'b:1']
        """
        place, call = map(int, key.split("-"))
        name: str = self.settings["layers"][place]
        return f"{name}:{call}" if call or key_of(place, 1) in self.layers else name


def key_of(place: int, call: int) -> str:
    """What stands for a call of the module at a place of the settings' `layers`; they sort.

    >>> key_of(3, 0)
    '00003-00000'
    """
    return f"{place:05d}-{call:05d}"


def save(file: Path, parts: list[Progress]) -> None:
    """Writes them to `file`, aside first."""
    with atomic_write(file, text=True) as opened:
        json.dump({"format": _FORMAT, "parts": [asdict(part) for part in parts]}, opened)


def load(file: Path, who: str) -> list[Progress]:
    """What `save` wrote.

    Raises:
        OptionError: it is missing or damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise ValueError("it is of another version of hookkit")
        return [Progress(**part) for part in found["parts"]]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as why:
        raise damaged(file, who, why) from why


def whole(folder: Path, who: str, files: list[Path]) -> list[Progress]:
    """The parts of all processes, in order, that `files` name: the index, or what each wrote.

    Raises:
        OptionError: a part is missing, not finished or of something else; a file is damaged.
    """
    parts = {part.settings["rank"]: part for file in files for part in load(file, who)}
    n = max([1, *(part.settings["ranks"] for part in parts.values())])
    first = parts[min(parts)] if parts else None
    for rank in range(n):
        if problem := _problem(parts.get(rank), first, folder / f"rank{rank}"):
            raise OptionError(
                f"{who}: the part of rank {rank} of {n}, {folder / f'rank{rank}'}, {problem}. Call "
                "collect there as before, and copy the folders of all ranks into one."
            )
    return [parts[rank] for rank in range(n)]


def write_index(folder: Path, who: str) -> None:
    """Writes the index once every part is whole, and only if it is not there."""
    try:
        parts = whole(folder, who, [*folder.glob("rank*/progress.json")])
    except OptionError:
        return  # parts are made elsewhere, or later; reading says so
    file = folder / "index.json"
    if not file.exists() or load(file, who) != parts:
        save(file, parts)


def _problem(part: Progress | None, first: Any, folder: Path) -> str:
    if part is None or not folder.is_dir():
        return "is missing"
    if not part.done:
        return "is not finished"
    # of a sharded model each rank has other parameters
    same = [({**p.settings, "rank": 0, "model": ""}, p.layers) for p in (part, first)]
    return "" if same[0] == same[1] else "is of another model, other layers or settings"


def damaged(file: Path, who: str, why: Exception) -> OptionError:
    """The error for a file that cannot be read."""
    return OptionError(
        f"{who}: {file} cannot be read ({type(why).__name__}: {why}). Give a folder that collect "
        "wrote; if it is damaged, remove it and collect again."
    )


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


def file_of(folder: Path, number: int, key: str) -> Path:
    """The file of a layer's rows in a shard."""
    return folder / f"{number:05d}" / f"{key}.safetensors"
