"""`Index`: what one process has written, and how far it has come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hookkit.errors import OptionError, missing_extra
from hookkit.files import atomic_write

IDS = "::ids"  # beside the layers' names, none of which has colons in front
_FORMAT = 1

Layers = dict[str, tuple[tuple[int, ...], str]]
"""The shape of a row and the dtype, by layer."""


@dataclass
class Index:
    """What one process has written.

    Attributes:
        settings: what was collected, of which model.
        layers: the shape of a row and the dtype by layer, and of `IDS`.
        rows: how many each file has.
        batches: how many of the loader's are written.
        samples: how many samples were in these.
        skip: how many rows of the next batch are written.
        first: the digest of the first batch.
        done: whether the loader has come to its end.
    """

    settings: dict[str, Any]
    layers: Layers = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    batches: int = 0
    samples: int = 0
    skip: int = 0
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
        counts = [rank, of - rank - 1, *self.rows, self.batches, self.samples, self.skip]
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
