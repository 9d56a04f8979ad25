"""A training as it stands: what `Learner.save` writes, and what `load` and `fit(resume=)` take up.

Builds on `saving`, which reads and writes the file. A checkpoint is made of state dicts: of model,
optimizer, scaler and callbacks, and of what draws random numbers. Each entry is there or not.
Whatever is taken up was checked before, and is undone if a later part fails: a Learner has all of
a file, or is as it was.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hookkit import ranks
from hookkit.callbacks.optimizers import bare_optimizer
from hookkit.callbacks.readout import across_ranks
from hookkit.data import loader_state, set_loader, start_workers
from hookkit.errors import HookkitError, HookkitWarning, OptionError
from hookkit.learner.saving import load_state, save_state
from hookkit.modules import inner_key
from hookkit.stats.unscaling import known_scaler

_COUNTS = "n_steps", "train_iter", "frozen_idx"


def write(learn: Any, where: Path, with_opt: bool) -> Path:
    """Writes the training as it stands; within `distrib_ctx` rank 0 does, and every rank calls.

    Raises:
        OptionError: a state dict has objects that could not be loaded again.
        OSError: the file cannot be written.
    """
    if not across_ranks(learn):
        return save_state(where, checkpoint(learn, with_opt))
    with ranks.together(f"call learn.save({where.stem!r}){learn._where()}"):
        state, error = checkpoint(learn, with_opt), None
        try:
            if ranks.rank() == 0:
                save_state(where, state)
        except (OptionError, OSError) as why:
            error = why
        if (error := ranks.gather_object(error)[0]) is not None:  # all have waited for the file
            raise error
    return where


def checkpoint(learn: Any, with_opt: bool) -> dict[str, Any]:
    """The training as it stands; without `with_opt` the weights alone."""
    state: dict[str, Any] = {"model": ranks.whole(plain_model(learn.model).state_dict())}
    if not with_opt:
        return state
    if learn.opt is not None:
        state["opt"] = ranks.whole(learn.opt.state_dict())
        state["opt_class"] = type(learn.opts[0]).__name__
    if (scaler := known_scaler(learn)) is not None:
        state["scaler"] = scaler.state_dict()
    event, rest = learn._firing
    waiting = [cb for cb, _ in copy.copy(rest)] if event == "after_epoch" else []
    names = learn._named()
    state["fit"] = {
        "epoch": learn._epochs_done,
        "within_epoch": learn._within_epoch,
        "waiting": [name for name, cb in names.items() if any(cb is w for w in waiting)],
        **{name: getattr(learn, name) for name in _COUNTS},
        "frozen": [name for name, p in _parameters(learn) if not p.requires_grad],
        "loss_facts": learn._loss_facts.__getstate__(),
    }
    found = {name: cb.state_dict() for name, cb in names.items()}
    state["callbacks"] = {name: of_cb for name, of_cb in found.items() if of_cb}
    own = _random_state()
    state["random"] = ranks.gather_object(own) if across_ranks(learn) else [own]
    state["loaders"] = [loader_state(dl) for dl in learn.dls.loaders] if learn.dls else []
    return state


def _parameters(learn: Any) -> Iterable[tuple[str, nn.Parameter]]:
    return plain_model(learn.model).named_parameters()


def plain_model(model: nn.Module) -> nn.Module:
    """The model inside of compile, DDP, DataParallel, …, so that names of weights are its own."""
    while (key := inner_key(model)) is not None and not isinstance(model, AveragedModel):
        model = model.get_submodule(key)
    return model


# --- back


def load_weights(learn: Any, where: Path, with_opt: bool, strict: bool) -> None:
    """The weights, and with `with_opt` the optimizer's state, if the file has it.

    Raises:
        OptionError: there is no such file, or it does not fit the Learner, which is as it was.
    """
    state = load_state(where)
    with _all_or_nothing(where) as undo:
        _take_weights(learn, state, with_opt, strict, undo)


def read_for_fit(where: Path, n_epoch: int) -> dict[str, Any]:
    """A checkpoint that a fit of `n_epoch` epochs can go on from.

    Raises:
        OptionError: there is no such file, it has weights alone, it was written within an epoch, or
            all epochs are done.
    """
    state = load_state(where)
    lacks = [name for name in ("opt", "fit", "callbacks", "random", "loaders") if name not in state]
    if lacks:
        raise OptionError(
            f"fit(resume=…): {where} has no {', '.join(lacks)}: it was saved without the optimizer "
            f"or before the first fit. Use learn.load(…) for the weights, and fit without resume."
        )
    epoch, within = state["fit"].get("epoch"), state["fit"].get("within_epoch")
    counts = [epoch, *(state["fit"].get(name) for name in _COUNTS)]
    if within not in (True, False) or not all(type(n) is int and 0 <= n < 2**53 for n in counts):
        raise OptionError(_MISFIT.format(where, "it does not say how many epochs were done"))
    if within:
        raise OptionError(
            f"fit(resume=…): {where} was saved within epoch {epoch}, and loaders start at the "
            f"beginning of an epoch. Save in `after_epoch`; or use learn.load(…) and "
            f"fit({n_epoch}, start_epoch={epoch}), which starts that epoch again."
        )
    if epoch > n_epoch:
        raise OptionError(
            f"fit({n_epoch}, resume=…): {epoch} epochs are done in {where}. Give the number of "
            f"epochs in all, of these and further ones."
        )
    return {**state, "where": where}


def resume_from(learn: Any, state: dict[str, Any]) -> None:
    """Takes up the training of `state`, after `before_fit`.

    Raises:
        OptionError: it does not fit the Learner, which is as it was.
    """
    fit = state["fit"]
    known = {name: cb for name, cb in learn._named().items() if learn._owns(cb)}
    with _all_or_nothing(state["where"]) as undo:
        for name, cb in known.items():
            if name in state["callbacks"]:
                undo.callback(vars(cb).update, dict(vars(cb)))
                cb.load_state_dict(state["callbacks"][name])
        _take_weights(learn, state, True, True, undo)
        if (scaler := known_scaler(learn)) is not None and "scaler" in state:
            undo.callback(scaler.load_state_dict, scaler.state_dict())
            scaler.load_state_dict(state["scaler"])
        for name, p in _parameters(learn):
            undo.callback(p.requires_grad_, p.requires_grad)
            p.requires_grad_(name not in fit["frozen"])
        _take_random(learn, state, undo)
        waiting = [cb for name, cb in known.items() if name in fit["waiting"]]
        vars(learn._loss_facts).update(fit["loss_facts"])
        counts = {name: fit[name] for name in _COUNTS}
        vars(learn).update(counts, epoch=max(fit["epoch"] - 1, 0))
    if absent := state["callbacks"].keys() - known.keys():
        warnings.warn(
            f"fit(resume=…): the checkpoint has the state of {', '.join(sorted(absent))}, and this "
            f"Learner has no such callback: it is left out. Add the callback to go on with it.",
            HookkitWarning,
            stacklevel=3,
        )
    having = [one for one in learn._having("after_epoch") if any(one[0] is cb for cb in waiting)]
    learn._fire("after_epoch", having)


@contextmanager
def _all_or_nothing(where: Path) -> Iterator[ExitStack]:
    """What is on the stack is undone if the block raises; so that errors name the file."""
    try:
        with ExitStack() as undo:
            yield undo
            undo.pop_all()
    except HookkitError:
        raise
    except Exception as why:  # of torch, of a callback's own method, of a file made by hand
        text = " ".join(f"{type(why).__name__}: {why}".split())
        raise OptionError(_MISFIT.format(where, text[:300])) from why


def _take_weights(
    learn: Any, state: dict[str, Any], with_opt: bool, strict: bool, undo: ExitStack
) -> None:
    if with_opt and "opt" in state:
        if learn.opt is None:
            undo.callback(setattr, learn, "opt", None)
            learn.create_opt()
        _check_groups(learn.opt, state)
        undo.callback(learn.opt.load_state_dict, copy.deepcopy(learn.opt.state_dict()))
    model = plain_model(learn.model)
    own = model.state_dict()
    undo.callback(model.load_state_dict, copy.deepcopy(own))
    found = {name: ranks.sharded_as(t, own.get(name)) for name, t in state["model"].items()}
    model.load_state_dict(found, strict=strict)
    if with_opt and "opt" in state:
        learn.opt.load_state_dict(_sharded_opt(learn.opt, state["opt"]))


def _take_random(learn: Any, state: dict[str, Any], undo: ExitStack) -> None:
    undo.callback(_set_random, _random_state())
    for dl, each in zip(learn.dls.loaders, state["loaders"], strict=True):
        undo.callback(set_loader, dl, loader_state(dl))
        start_workers(dl)
        set_loader(dl, each)
    for own in state["random"][ranks.rank() :][:1]:  # a rank that was not there has its own
        _set_random(own)


def _sharded_opt(opt: Any, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state, with what it has of each parameter sharded as that is."""
    parameters = [p for group in opt.param_groups for p in group["params"]]
    ids = [i for group in state["param_groups"] for i in group["params"]]
    held = {
        i: {name: ranks.sharded_as(x, p) for name, x in state["state"][i].items()}
        for i, p in zip(ids, parameters, strict=True)
        if i in state["state"]
    }
    return {**state, "state": {**state["state"], **held}}


def _check_groups(opt: Any, state: dict[str, Any]) -> None:
    """An OptionError if the optimizer's state is of another kind, or of other groups."""
    own, kind = type(bare_optimizer(opt)).__name__, state.get("opt_class")
    sizes = [len(group["params"]) for group in opt.param_groups]
    found = [len(group["params"]) for group in state["opt"]["param_groups"]]
    if sizes != found or kind not in (None, own):
        raise OptionError(
            f"load: the file has the state of {kind or 'an optimizer'} with groups of {found} "
            f"parameters, and this Learner's {own} has groups of {sizes}. Use the same opt_func, "
            f"splitter and model, or load(…, with_opt=False)."
        )


_MISFIT = "load: {} does not fit this Learner, which is as it was: {}. Give a file of its own."


# --- what draws random numbers


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "devices": _device_states(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "python": random.getstate(),
    }


def _device_states() -> list[torch.Tensor]:
    module = _device_module()
    if module is None:
        return []
    every = getattr(module, "get_rng_state_all", None)
    return [module.get_rng_state()] if every is None else list(every())


def _device_module() -> Any:
    """`torch.cuda`, `torch.mps`, … ; None where there is no accelerator."""
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _set_random(state: dict[str, Any]) -> None:
    """Sets all generators, after new ones have taken these states."""
    kind, keys, *rest = state["numpy"]
    words = kind, np.array(keys, np.uint32), *rest
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(words)
    torch.Generator().set_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(words)
    torch.set_rng_state(state["torch"])
    module = _device_module()
    if module is None:
        return
    if not hasattr(module, "set_rng_state_all"):
        module.set_rng_state(*state["devices"][:1])
        return
    for i, each in enumerate(state["devices"][: module.device_count()]):
        module.set_rng_state(each, i)
