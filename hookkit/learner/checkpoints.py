"""A training as it stands: what `Learner.save` writes, and what `load` takes of it.

Builds on `saving`, which reads and writes the file; `resuming` is `fit(resume=…)`. A checkpoint is
made of state dicts: of model, optimizer, scaler and callbacks, and of what draws random numbers.
Each entry is there or not.
Whatever is taken up was checked before, and is undone if a later part fails: a Learner has all of
a file, or is as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.callbacks.optimizers import bare_optimizer
from hookkit.callbacks.readout import across_ranks
from hookkit.data import loader_state
from hookkit.errors import HookkitError, OptionError
from hookkit.events import CANCEL_EXCEPTIONS
from hookkit.learner.random_states import random_state
from hookkit.learner.saving import load_state, save_state
from hookkit.modules import inner_key
from hookkit.stats.unscaling import known_scaler

COUNTS = "n_steps", "train_iter", "frozen_idx"


def end_event(learn: Any) -> str:
    """Lets the callbacks that come later have the event under way: a checkpoint is of its end.

    The name of the `Cancel…Exception` that one of them raised, "" if none did. The loop gets it
    when the callback that saves has returned.
    """
    event, rest = learn._firing
    if learn.eval_pass or event not in ("after_batch", "after_epoch"):
        return ""
    try:
        learn._fire_rest()
    except CANCEL_EXCEPTIONS as cancel:
        last = Callback()
        last.learn = learn
        rest.append((last, partial(_raise, cancel)))
        return type(cancel).__name__
    return ""


def _raise(error: Exception) -> None:
    raise error


def write(learn: Any, where: Path, with_opt: bool, cancelled: str = "") -> Path:
    """Writes the training as it stands; within `distrib_ctx` rank 0 does, and every rank calls.

    Args:
        cancelled: what `end_event` gave.

    Raises:
        OptionError: a state dict has objects that could not be loaded again.
        OSError: the file cannot be written.
    """
    if not across_ranks(learn):
        return save_state(where, checkpoint(learn, with_opt, cancelled))
    with ranks.together(f"call learn.save({where.stem!r}){learn._where()}"):
        state, error = checkpoint(learn, with_opt, cancelled), None
        try:
            if ranks.rank() == 0:
                save_state(where, state)
        except (OptionError, OSError) as why:
            error = why
        if (error := ranks.gather_object(error)[0]) is not None:  # all have waited for the file
            raise error
    return where


def checkpoint(learn: Any, with_opt: bool, cancelled: str = "") -> dict[str, Any]:
    """The training as it stands; without `with_opt` the weights alone."""
    state: dict[str, Any] = {"model": ranks.whole(plain_model(learn.model).state_dict())}
    if not with_opt:
        return state
    if learn.opt is not None:
        state["opt"] = ranks.whole(learn.opt.state_dict())
        state["opt_class"] = type(learn.opts[0]).__name__
    if (scaler := known_scaler(learn)) is not None:
        state["scaler"] = scaler.state_dict()
    state["fit"] = {
        "epoch": learn._epochs_done,
        "within_epoch": learn._within_epoch,
        "n_batches": (n_batches := _n_batches(learn)),
        "cancelled": cancelled,
        **{name: getattr(learn, name) for name in COUNTS},
        "frozen": [name for name, p in parameters(learn) if not p.requires_grad],
        "sensors": learn.sensors.__getstate__(),
    }
    found = {name: cb.state_dict() for name, cb in learn._named().items()}
    if not n_batches and "recorder" in found:  # metrics of training begin anew in each epoch
        found["recorder"].pop("train_metrics", None)
    state["callbacks"] = {name: of_cb for name, of_cb in found.items() if of_cb}
    own = random_state()
    state["random"] = ranks.gather_object(own) if across_ranks(learn) else [own]
    state["loaders"] = [loader_state(dl) for dl in learn.dls.loaders] if learn.dls else []
    at_end = learn._epochs_done > 0 and not learn._within_epoch
    if (n_batches or at_end) and is_stateful(learn):
        state["loader"] = learn.dls.train.state_dict()
    return state


def _n_batches(learn: Any) -> int:
    """How many batches of the epoch were trained on, if it can be gone on with, else 0.

    Not between the batches of one step, whose gradients and statistics no file has.
    """
    if not (learn._within_epoch and learn.training and learn._firing[0] == "after_batch"):
        return 0
    ps = (p for group in learn.opt.param_groups for p in group["params"])
    part = any(p.grad is not None and bool(p.grad.any()) for p in ps)
    return learn.iter + 1 if is_stateful(learn) and not (part or learn.eval_pass) else 0


def is_stateful(learn: Any) -> bool:
    """Whether the training loader can go on within an epoch, as torchdata's StatefulDataLoader.

    Not accelerate's, which read a batch ahead, and shuffle anew as an epoch begins.
    """
    both = "state_dict", "load_state_dict"
    train = getattr(learn.dls, "train", None)
    return learn.accelerator is None and all(callable(getattr(train, name, None)) for name in both)


def parameters(learn: Any) -> Iterable[tuple[str, nn.Parameter]]:
    """The model's parameters, with their names in it."""
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
    state = load_state(where, f"load({where.stem!r})")
    with all_or_nothing(where) as undo:
        take_weights(learn, state, with_opt, strict, undo)


@contextmanager
def all_or_nothing(where: Path) -> Iterator[ExitStack]:
    """What is on the stack is undone if the block raises; so that errors name the file."""
    try:
        with ExitStack() as undo:
            yield undo
            undo.pop_all()
    except HookkitError:
        raise
    except Exception as why:  # of torch, of a callback's own method, of a file made by hand
        text = " ".join(f"{type(why).__name__}: {why}".split())
        raise OptionError(MISFIT.format(where, text[:300])) from why


def take_weights(
    learn: Any, state: dict[str, Any], with_opt: bool, strict: bool, undo: ExitStack
) -> None:
    """The weights, and with `with_opt` the optimizer's state, if `state` has it."""
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
        learn.opt.load_state_dict(sharded_opt(learn.opt, state["opt"]))


def sharded_opt(opt: Any, state: dict[str, Any]) -> dict[str, Any]:
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


MISFIT = "load: {} does not fit this Learner, which is as it was: {}. Give a file of its own."
