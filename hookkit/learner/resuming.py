"""`fit(resume=…)`: a training that goes on from a checkpoint, at the end of an epoch or within one.

Builds on `checkpoints`, which says what is in one. At the end of an epoch it is taken up after
`before_fit`. Within an epoch it is taken up once more before the next batch, since callbacks may
change or reset things in the `before_epoch` and `before_train` that come between.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hookkit import ranks
from hookkit.data import loader_state, set_loader, start_workers
from hookkit.errors import HookkitWarning, OptionError
from hookkit.events import CANCEL_EXCEPTIONS
from hookkit.learner.checkpoints import (
    COUNTS,
    MISFIT,
    all_or_nothing,
    is_stateful,
    parameters,
    take_weights,
)
from hookkit.learner.random_states import random_state, set_random
from hookkit.learner.saving import load_state
from hookkit.stats.unscaling import known_scaler


def read_for_fit(where: Path, n_epoch: int) -> dict[str, Any]:
    """A checkpoint that a fit of `n_epoch` epochs can go on from.

    Raises:
        OptionError: there is no such file, it has weights alone, it was written within an epoch, or
            all epochs are done.
    """
    state = load_state(where, "fit(resume=…)")
    lacks = [name for name in ("opt", "fit", "callbacks", "random", "loaders") if name not in state]
    if lacks:
        raise OptionError(
            f"fit(resume=…): {where} has no {', '.join(lacks)}: it was saved without the optimizer "
            f"or before the first fit. Use learn.load(…) for the weights, and fit without resume."
        )
    epoch, within = state["fit"].get("epoch"), state["fit"].get("within_epoch")
    counts = [epoch, *(state["fit"].get(name) for name in ("n_batches", *COUNTS))]
    if within not in (True, False) or not all(type(n) is int and 0 <= n < 2**53 for n in counts):
        raise OptionError(MISFIT.format(where, "it does not say how many epochs were done"))
    if within and not state["fit"]["n_batches"]:
        raise OptionError(
            f"fit(resume=…): {where} was saved within epoch {epoch}, and loaders start at the "
            f"beginning of an epoch. Save in `after_epoch`; or in `after_batch`, after a step, in "
            f"one process, with a training loader that has state_dict() and load_state_dict(), "
            f"such as torchdata's StatefulDataLoader; or use learn.load(…) and "
            f"fit({n_epoch}, start_epoch={epoch}), which starts that epoch again."
        )
    if epoch + within > n_epoch:
        raise OptionError(
            f"fit({n_epoch}, resume=…): {epoch} epochs are done in {where}"
            f"{', and a part of one' * within}. Give the number of epochs in all, of these and "
            f"further ones."
        )
    return {**state, "where": where}


def resume_from(learn: Any, state: dict[str, Any]) -> None:
    """Takes up the training of `state`, after `before_fit`; within an epoch before its next batch.

    Raises:
        OptionError: it does not fit the Learner, which is as it was.
        Cancel…Exception: the training was cancelled as the checkpoint was written.
    """
    fit = state["fit"]
    within = fit["n_batches"] > 0
    with all_or_nothing(state["where"]) as undo:
        _take_loaders(learn, state, undo)
        # `before_epoch` and `before_train` may change what is taken up now
        _take(learn, {**state, "callbacks": copy.deepcopy(state["callbacks"])}, undo)
        learn.epoch = max(fit["epoch"] - 1, 0)
    owned = {name for name, cb in learn._named().items() if learn._owns(cb)}
    if absent := state["callbacks"].keys() - owned:
        warnings.warn(
            f"fit(resume=…): the checkpoint has the state of {', '.join(sorted(absent))}, and this "
            f"Learner has no such callback: it is left out. Add the callback to go on with it.",
            HookkitWarning,
            stacklevel=3,
        )
    if within:
        learn._resumed = partial(_next_batch, learn, state)
    else:
        _cancel_again(fit)


def _next_batch(learn: Any, state: dict[str, Any]) -> int:
    """Takes up the training within its epoch; which batch comes next."""
    fit = state["fit"]
    if learn.epoch != fit["epoch"]:  # a callback has cancelled the rest of that epoch
        return 0
    with all_or_nothing(state["where"]) as undo:
        _take(learn, state, undo)
        _take_random(learn, state)
    n: int = fit["n_batches"]
    if learn.n_iter:
        learn.pct_train = (learn.epoch + n / learn.n_iter) / learn.n_epoch
    _cancel_again(fit)
    return n


def _cancel_again(fit: dict[str, Any]) -> None:
    for kind in CANCEL_EXCEPTIONS:
        if kind.__name__ == fit["cancelled"]:
            raise kind


def _take(learn: Any, state: dict[str, Any], undo: ExitStack) -> None:
    """What `state` has, but for random numbers and loaders."""
    fit = state["fit"]
    for name, cb in learn._named().items():
        if learn._owns(cb) and name in state["callbacks"]:
            undo.callback(vars(cb).update, dict(vars(cb)))
            cb.load_state_dict(state["callbacks"][name])
    take_weights(learn, state, True, True, undo)
    if (scaler := known_scaler(learn)) is not None and "scaler" in state:
        undo.callback(scaler.load_state_dict, scaler.state_dict())
        scaler.load_state_dict(state["scaler"])
    for name, p in parameters(learn):
        undo.callback(p.requires_grad_, p.requires_grad)
        p.requires_grad_(name not in fit["frozen"])
    vars(learn.sensors).update(fit["sensors"])
    vars(learn).update({name: fit[name] for name in COUNTS})


def _take_loaders(learn: Any, state: dict[str, Any], undo: ExitStack) -> None:
    """Where the training loader was, and all random numbers."""
    undo.callback(set_random, random_state())
    for dl in learn.dls.loaders:
        undo.callback(set_loader, dl, loader_state(dl))
        start_workers(dl)
    if "loader" in state and is_stateful(learn):
        train = learn.dls.train
        undo.callback(train.load_state_dict, train.state_dict())
        train.load_state_dict(state["loader"])
        train.state_dict()  # torchdata draws a seed for this, which it would do in the next epoch
    elif state["fit"]["n_batches"]:
        raise OptionError(
            f"fit(resume=…): {state['where']} was saved within an epoch, and this Learner's "
            f"training loader has no state_dict() and load_state_dict(), or is accelerate's. Give "
            f"a loader as the one before, outside distrib_ctx."
        )
    _take_random(learn, state)


def _take_random(learn: Any, state: dict[str, Any]) -> None:
    for dl, each in zip(learn.dls.loaders, state["loaders"], strict=True):
        set_loader(dl, each)
    for own in state["random"][ranks.rank() :][:1]:  # a rank that was not there has its own
        set_random(own)
