"""Weights and optimizer state, to a file and back: what `Learner.save` and `Learner.load` do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookkit.errors import OptionError, nearest
from hookkit.files import atomic_write


def save_state(where: Path, model: nn.Module, opt: Any = None) -> Path:
    """Writes the state of `model`, and of `opt` unless it is None; `where`."""
    state: dict[str, Any] = {"model": model.state_dict()}
    if opt is not None:
        state["opt"] = opt.state_dict()
    with atomic_write(where) as file:
        torch.save(state, file)
    return where


def load_state(where: Path, device: torch.device | None) -> dict[str, Any]:
    """What `save_state` wrote, its tensors on `device`; only tensors and numbers are unpickled.

    Raises:
        OptionError: there is no such file, or `save_state` did not write it.
    """
    if not where.exists():
        there = sorted(p.stem for p in where.parent.glob("*.pth"))
        raise OptionError(
            f"load({where.stem!r}): {where} does not exist. The folder has "
            f"{', '.join(nearest(where.stem, there) or there[:5]) or 'no .pth file'}."
        )
    try:
        state = torch.load(where, map_location=device, weights_only=True)
    except (*UNREADABLE, RuntimeError) as why:
        raise OptionError(
            _FOREIGN.format(where, "is damaged, or was not written by torch.save")
        ) from why
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        what = 'has no entry "model"; a state dict goes to learn.model.load_state_dict(…)'
        raise OptionError(_FOREIGN.format(where, what))
    return state


UNREADABLE = (pickle.UnpicklingError, OSError, EOFError, LookupError, TypeError, ValueError)
_FOREIGN = "load: {} {}. Give a file that learn.save(…) wrote."
