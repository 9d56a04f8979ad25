"""What one process has on disk: `Progress`, how far it has come, and files of rows.

    acts/rank0/progress.json                    what there is, and where to go on
    acts/rank0/00003/00001-00000.safetensors    a layer's rows in the fourth shard
    acts/rank0/00003/ids.safetensors            their ids
    acts/index.json                             of each layer and process, by rank 0: for others

A safetensors file is a header, in JSON, and the values behind it. Blanks at the end of the header
make it 4096 bytes long, so that it can be written once the number of rows is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookkit.errors import OptionError
from hookkit.files import atomic_write

_FORMAT = 4
IDS = "ids"  # the key of the rows' ids
HEAD = 4096  # bytes of a header, of which 100 are used
CODES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "float8_e4m3fn": "F8_E4M3"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "float8_e5m2": "F8_E5M2"},
}
"""The dtypes that rows can have, and what safetensors calls them."""


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
        first_rows: of each layer, by key, the sketch of what it gave for that batch.
        done: whether the loader has come to its end.
    """

    settings: dict[str, Any]
    layers: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    n_rows: int = 0
    batches: int = 0
    samples: int = 0
    first: str = ""
    first_rows: dict[str, list[float]] = field(default_factory=dict)
    done: bool = False

    def __post_init__(self) -> None:
        layers = sorted(self.layers.items())  # a first batch adds them as they run
        self.layers = {key: (tuple(shape), dtype) for key, (shape, dtype) in layers}
        rank, of = self.settings["rank"], self.settings["ranks"]
        counts = [rank, of - rank - 1, *self.rows, self.n_rows, self.batches, self.samples]
        counts += [n for shape, dtype in self.layers.values() for n in shape if CODES[dtype]]
        if not all(type(n) is int and n >= 0 for n in counts) or type(self.done) is not bool:
            raise ValueError("a number in it is wrong")

    def name(self, key: str) -> str:
        """The layer's name; of a module that is called several times with the number of the call.

        >>> p = Progress({"rank": 0, "ranks": 1, "layers": ["a", "b"]})
        >>> p.layers = dict.fromkeys([key_of(0, 0), key_of(1, 0), key_of(1, 1)], ((3,), "float32"))
        >>> [p.name(key) for key in p.layers]
        ['a', 'b:0', 'b:1']
        """
        if key == IDS:
            return IDS
        place, call = map(int, key.split("-"))
        name: str = self.settings["layers"][place]
        return f"{name}:{call}" if call or key_of(place, 1) in self.layers else name

    def header(self, key: str, n: int) -> bytes:
        """What is in front of `n` rows of a layer."""
        shape, dtype = self.layers[key]
        size = n * torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        entry = {"dtype": CODES[dtype], "shape": [n, *shape], "data_offsets": [0, size]}
        text = json.dumps({self.name(key)[:500]: entry}).encode()
        return (HEAD - 8).to_bytes(8, "little") + text.ljust(HEAD - 8)

    def mapped(self, file: Path, key: str, n: int) -> Tensor:
        """`n` rows of a layer in a file, mapped into memory.

        Raises:
            OSError, ValueError, RuntimeError: the file is missing, or of something else.
        """
        shape, dtype = self.layers[key]
        with file.open("rb") as opened:
            if opened.read(HEAD) != self.header(key, n):
                raise ValueError(f"it does not have {n} rows of {self.name(key)!r}")
        size = file.stat().st_size
        values = torch.from_file(str(file), size=size, dtype=torch.uint8, device="cpu")[HEAD:]
        return values.view(getattr(torch, dtype)).view(n, *shape)

    def save(self, file: Path) -> None:
        """Writes it to `file`, aside first."""
        with atomic_write(file, text=True) as opened:
            opened.write(json.dumps({"format": _FORMAT, **vars(self)}))


def load(file: Path, who: str) -> Progress:
    """What `Progress.save` wrote.

    Raises:
        OptionError: it is missing or damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("format") != _FORMAT:
            raise ValueError("it is of another version of hookkit")
        return Progress(**found)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as why:
        raise damaged(file, who, why) from why


def damaged(file: Path, who: str, why: Exception) -> OptionError:
    """The error for a file that cannot be read."""
    return OptionError(
        f"{who}: {file} cannot be read ({type(why).__name__}: {why}). Copy it anew, or remove the "
        "folder that collect wrote and collect again."
    )


def key_of(place: int, call: int) -> str:
    """What stands for a call of the module at a place of the settings' `layers`; they sort.

    >>> key_of(3, 0)
    '00003-00000'
    """
    return f"{place:05d}-{call:05d}"


def file_of(folder: Path, number: int, key: str) -> Path:
    """The file of a layer's rows in a shard."""
    return folder / f"{number:05d}" / f"{key}.safetensors"
