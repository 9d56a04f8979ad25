"""Files that `Learner.save` writes and `load` reads: the state dicts of model and optimizer.

`torch.load` reads such a file as tensors, numbers and text, without running code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hookkit import ranks
from hookkit.errors import OptionError
from hookkit.files import atomic_write
from hookkit.modules import unwrap


def write(learn: Any, where: Path, with_opt: bool) -> None:
    """Write the whole weights and, with `with_opt`, the optimizer's state; rank 0 writes."""
    sharded = ranks.is_sharded(learn.model)
    if sharded and with_opt and learn.opt is not None:
        raise OptionError(
            "save: the model is sharded, and so is the optimizer's state. Use "
            "learn.save(…, with_opt=False), or torch.distributed.checkpoint for both."
        )
    model = unwrap(learn.model)
    state = {"model": ranks.whole_state(model) if sharded else model.state_dict()}
    if with_opt and learn.opt is not None:
        state["opt"] = learn.opt.state_dict()
    if ranks.rank() == 0:
        with atomic_write(where) as f:
            torch.save(state, f)
    if learn.accelerator is not None:
        learn.accelerator.wait_for_everyone()


def read(where: Path) -> dict[str, Any]:
    """Return what `write` wrote, or a state dict of a model, on the CPU.

    Raises an OptionError if there is no such file.
    """
    if not where.exists():
        there = ", ".join(sorted(p.stem for p in where.parent.glob("*.pth"))) or "no .pth file"
        raise OptionError(f"load: {where} does not exist. The folder has {there}.")
    state = torch.load(where, map_location="cpu", weights_only=True)
    return state if "model" in state else {"model": state}


def take(learn: Any, state: dict[str, Any], with_opt: bool, strict: bool) -> None:
    """Load the weights and, with `with_opt`, the optimizer's state, if the file has it.

    The optimizer keeps its own settings: those in the file may be of the middle of a schedule.
    Raises an OptionError, before anything is loaded, if the state is of another kind of optimizer.
    """
    model, with_opt = unwrap(learn.model), with_opt and "opt" in state
    if with_opt:
        if learn.opt is None:
            learn.create_opt()
        _check_kind(learn.opt, state["opt"])
    if ranks.is_sharded(model):
        ranks.load_whole_state(model, state["model"], strict)
    else:
        model.load_state_dict(state["model"], strict=strict)
    if with_opt:
        own = [{k: v for k, v in g.items() if k != "params"} for g in learn.opt.param_groups]
        learn.opt.load_state_dict(state["opt"])
        for group, settings in zip(learn.opt.param_groups, own, strict=True):
            params = group["params"]
            group.clear()
            group.update(settings, params=params)


def _check_kind(opt: Any, state: dict[str, Any]) -> None:
    """Raise an OptionError if the state has other settings than `opt`, and lacks some of them."""
    own, theirs = set(opt.param_groups[0]), set(state["param_groups"][0])
    theirs -= {"initial_lr", "max_lr", "min_lr"}  # of schedules
    if own - theirs and theirs - own:  # another version of torch has more of them, or less
        raise OptionError(
            f"load: the file has the state of another optimizer, with {sorted(theirs - own)}, and "
            f"this one is {type(opt).__name__}. Use learn.load(…, with_opt=False), or give the "
            f"Learner the same opt_func."
        )
