"""Checkpoint files: dicts of state dicts, written whole and read without running code.

Builds on `files`. `checkpoints` says what is in one. `torch.load` reads all of it, as tensors,
numbers and text. What callbacks recorded is one tensor of bytes in there, a file of its own kind:
recorders are made of the classes in `RECORDED`, and torch's unpickler makes no others.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from hookkit.callbacks.losses import LossHistory, Scalars
from hookkit.errors import OptionError, nearest
from hookkit.files import atomic_write, check_zip
from hookkit.records import Incident

_ARRAYS = [np.zeros(0).__reduce__()[0], np.ndarray, np.dtype]
_ARRAYS += [type(np.dtype(kind)) for kind in (np.float64, np.int64)]
_OF_LOSSES = [LossHistory, Scalars, array]
RECORDED: list[Any] = [Incident, *_OF_LOSSES, *_ARRAYS]


def _allowed() -> Any:
    """Lets torch's unpickler make the classes in `RECORDED`, until the end of the `with`."""
    known = get_safe_globals()  # those of the user's stay afterwards
    return safe_globals([kind for kind in RECORDED if kind not in known])


def save_state(where: Path, state: dict[str, Any]) -> Path:
    """Writes a checkpoint to `where`, which is returned; an OSError leaves the old file.

    Raises an OptionError if it holds objects that `load_state` would refuse.
    """
    who = f"save({where.stem!r})"
    if "callbacks" in state:
        with _allowed():
            _write(who, state["callbacks"], packed := BytesIO())
        state = {**state, "callbacks": torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)}
    with atomic_write(where) as file:
        _write(who, state, file)
    return where


def _write(who: str, state: dict[str, Any], file: Any) -> None:
    try:
        torch.save(_plain(state), file)
        file.flush()
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's writer hides it behind its own
            raise error.__context__ from None
        raise
    if isinstance(file, BytesIO):
        file.seek(0)
    written = file if isinstance(file, BytesIO) else file.name
    if refused := get_unsafe_globals_in_checkpoint(written):
        raise OptionError(
            f"{who}: {', '.join(sorted(refused))} cannot be loaded again, since a file may hold "
            f"tensors, numbers and text only. Give these in the state_dict() of the model, the "
            f"optimizer or the callback that has them."
        )


def _plain(x: Any) -> Any:
    """`x` with numbers of numpy's, as metrics and schedulers have them, as Python's."""
    if isinstance(x, np.generic):
        return x.item()
    if type(x) is dict:
        return {key: _plain(value) for key, value in x.items()}
    return type(x)(map(_plain, x)) if type(x) in (list, tuple) else x


def load_state(where: Path, who: str = "load") -> dict[str, Any]:
    """What `save_state` wrote, on the CPU; only tensors, numbers, text and `RECORDED` are made.

    `who` asks for it, in the words of a message. Raises an OptionError if there is no such file, or
    `save_state` did not write it.
    """
    if not where.exists():
        there = sorted(p.stem for p in where.parent.glob("*.pth"))
        raise OptionError(
            f"{who}: {where} does not exist. The folder has "
            f"{', '.join(nearest(where.stem, there) or there[:5]) or 'no .pth file'}."
        )
    try:
        state: dict[str, Any] = _read(where)
    except Exception as why:  # a damaged file may raise anything, of the kinds in its own content
        what = "is damaged, was not written by torch.save, or holds more than tensors and numbers"
        raise OptionError(_FOREIGN.format(where, what)) from why
    for entry in ("model", "opt", "fit", "callbacks"):
        if not isinstance(state, dict) or not isinstance(state.get(entry, {}), Mapping):
            raise OptionError(_FOREIGN.format(where, f"has something else as its {entry!r}"))
    if "model" not in state:
        what = 'has no entry "model"; a state dict goes to learn.model.load_state_dict(…)'
        raise OptionError(_FOREIGN.format(where, what))
    return state


def _read(where: Path) -> Any:
    with where.open("rb") as file:
        check_zip(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    packed = state.get("callbacks") if isinstance(state, dict) else None
    if isinstance(packed, torch.Tensor):
        with _allowed():
            state["callbacks"] = torch.load(BytesIO(packed.numpy().tobytes()), weights_only=True)
    return state


_FOREIGN = "load: {} {}. Give a file that learn.save(…) wrote."
