"""Files of a training: what `Learner.save` writes, and what `load` and `fit(resume=…)` take of it.

A file is a dict of state dicts: `model`, `opt`, and `fit`, which has what else a fit goes on from:
how many epochs and steps are done, the schedules, the GradScaler, and where torch's random
generators are. `torch.load` reads it as tensors, numbers and text, without running code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hookkit import ranks
from hookkit.callbacks import SchedulerCallback
from hookkit.data import generators_of
from hookkit.devices import accelerator
from hookkit.errors import OptionError
from hookkit.files import atomic_write
from hookkit.modules import unwrap


def write(learn: Any, where: Path, with_opt: bool) -> None:
    """Writes the training as it stands: rank 0 does, and the others wait for it."""
    sharded = getattr(learn.accelerator, "is_fsdp2", False)
    if sharded and with_opt:
        raise OptionError(
            "save: the optimizer's state is sharded. Use learn.save(…, with_opt=False), or "
            "learn.accelerator.save_state(folder)."
        )
    model = learn.model
    weights = learn.accelerator.get_state_dict(model) if sharded else unwrap(model).state_dict()
    state = {"model": weights}
    if with_opt and learn.opt is not None:
        state |= {"opt": learn.opt.state_dict(), "fit": _fit_state(learn)}
    if ranks.rank() == 0:
        with atomic_write(where) as f:
            torch.save(state, f)
    if learn.accelerator is not None:
        learn.accelerator.wait_for_everyone()


def _fit_state(learn: Any) -> dict[str, Any]:
    scaler = learn.step_scaler
    return {
        "epoch": learn.epochs_done,  # None within an epoch, which nothing goes on from
        "n_steps": learn.n_steps,
        "schedules": [_schedule(learn, cb) for cb in _schedulers(learn)],
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": random_state(learn),
    }


def _schedulers(learn: Any) -> list[SchedulerCallback]:
    """The fit's schedules; after a fit those of the last one."""
    cbs = learn.cbs if learn.fitting else [*learn._past, *learn.cbs]
    return [cb for cb in cbs if isinstance(cb, SchedulerCallback) and hasattr(cb, "scheduler")]


def _schedule(learn: Any, cb: SchedulerCallback) -> tuple[int, dict[str, Any]]:
    if cb.by_epoch and learn.fitting and cb.epochs_done != learn.epochs_done:
        raise OptionError(
            f"save: in this `after_epoch` {cb!r} comes later, so the file would have the schedule "
            f"of the epoch before. Set `order = {cb.order + 1}` on the callback that saves."
        )
    return cb.n_steps, cb.scheduler.state_dict()


def random_state(learn: Any) -> dict[str, Any]:
    """Where torch's random generators are: the CPU's, the current device's, the loaders' own."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if (device := accelerator()) != "cpu":
        state[device] = torch.get_device_module(device).get_rng_state()
    own = [[g.get_state() for g in generators_of(dl)] for dl in learn.dls or ()]
    return {**state, "loaders": own}


def set_random_state(learn: Any, state: dict[str, Any]) -> None:
    """Puts torch's random generators where they were, those that there are here."""
    for dl, states in zip(learn.dls or (), state["loaders"], strict=False):
        for generator, each in zip(generators_of(dl), states, strict=False):
            generator.set_state(each)
    if ranks.rank() == 0:  # the others draw numbers of their own
        torch.set_rng_state(state["cpu"])
        if (device := accelerator()) in state and device != "cpu":
            torch.get_device_module(device).set_rng_state(state[device])


# --- back


def read(where: Path, who: str) -> dict[str, Any]:
    """What `write` wrote, or a state dict of a model, on the CPU.

    Raises an OptionError if there is no such file.
    """
    if not where.exists():
        there = ", ".join(sorted(p.stem for p in where.parent.glob("*.pth"))) or "no .pth file"
        raise OptionError(f"{who}: {where} does not exist. The folder has {there}.")
    state = torch.load(where, map_location="cpu", weights_only=True)
    return state if "model" in state else {"model": state}


def read_for_fit(where: Path, n_epoch: int) -> dict[str, Any]:
    """A file that a fit of `n_epoch` epochs can go on from; else an OptionError."""
    state = read(where, "fit(resume=…)")
    n_done = state.get("fit", {}).get("epoch")
    why = f"{n_done} epochs are done in it, of {n_epoch} in all"
    if n_done is None:
        why = "it was saved without the optimizer, or within an epoch"
    if n_done is None or n_done > n_epoch:
        raise OptionError(
            f"fit(resume=…): {where} cannot be gone on from: {why}. Use a file that learn.save "
            f"wrote in `after_epoch`; or learn.load(…) and fit(…, start_epoch=…)."
        )
    return state


def take_weights(learn: Any, state: dict[str, Any], with_opt: bool, strict: bool = True) -> None:
    """The weights, and with `with_opt` the optimizer's state, if the file has it."""
    unwrap(learn.model).load_state_dict(state["model"], strict=strict)
    if with_opt and "opt" in state:
        if learn.opt is None:
            learn.create_opt()
        learn.opt.load_state_dict(state["opt"])


def take_up(learn: Any, state: dict[str, Any]) -> None:
    """All of `state`, in a fit that has had its `before_fit`; an OptionError if it does not fit."""
    fit, cbs = state["fit"], _schedulers(learn)
    lengths, own = [n for n, _ in fit["schedules"]], [cb.n_steps for cb in cbs]
    if lengths != own:
        raise OptionError(
            f"fit(resume=…): the file has schedules of {lengths} steps, and this fit of {own}. "
            f"Give the same number of epochs, callbacks and batches; or learn.load(…) and "
            f"fit(…, start_epoch={fit['epoch']})."
        )
    take_weights(learn, state, with_opt=True)
    for cb, (_, schedule) in zip(cbs, fit["schedules"], strict=True):
        cb.scheduler.load_state_dict(schedule)
    if learn.step_scaler is not None and fit["scaler"] is not None:
        learn.step_scaler.load_state_dict(fit["scaler"])
    learn.n_steps = fit["n_steps"]
    set_random_state(learn, fit["random"])
