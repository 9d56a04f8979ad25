"""A Learner's arguments, checked; and its messages about what is missing.

Builds on `checks`.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

from fastcore.foundation import L
from torch import nn
from torch.utils.data import DataLoader

from hookkit.callbacks.metrics import as_metric
from hookkit.checks import check_callable, check_number, kind_of
from hookkit.data import DataLoaders
from hookkit.errors import ArgumentError, HookkitWarning, OptionError
from hookkit.health.sensors import loss_name
from hookkit.nested import describe


def check_function(what: str, f: Any) -> None:
    """An ArgumentError unless `f` is None or can be called."""
    cure = "a function, or an object such as nn.CrossEntropyLoss()"
    if hasattr(f, "param_groups"):
        name = type(f).__name__
        cure = f"the class, such as torch.optim.{name}, and set learn.opt to use this one"
    check_callable("Learner", what, f, cure)


def check_epochs(n_epoch: Any, start_epoch: Any, resume: Any) -> None:
    """An OptionError unless both are whole numbers from 0, the start not after the end."""
    check_number("fit", "n_epoch", n_epoch, 0, whole=True)
    check_number("fit", "start_epoch", start_epoch, 0, whole=True)
    if start_epoch and resume is not None:
        raise OptionError(
            f"fit(start_epoch={start_epoch}, resume=…): the checkpoint says which epoch comes "
            f"next. Leave out start_epoch."
        )
    if start_epoch > n_epoch:
        raise OptionError(
            f"fit({n_epoch}, start_epoch={start_epoch}): that is no further epoch, since the "
            f"first number counts all epochs. For {n_epoch} more: "
            f"fit({start_epoch + n_epoch}, start_epoch={start_epoch})."
        )


def check_optimizer(model: nn.Module, opt: Any) -> Any:
    """`opt` if it can step parameters of `model`, as one from `opt_func`; else an ArgumentError."""
    if not (hasattr(opt, "param_groups") and callable(getattr(opt, "step", None))):
        raise ArgumentError(
            f"Learner: opt_func returned {kind_of(opt)}, which is no optimizer. Return one from "
            f"opt_func(groups, lr=…), or give a class, such as torch.optim.Adam."
        )
    if _needs_closure(opt):
        name = type(opt).__name__
        raise ArgumentError(
            f"Learner: {name}.step(closure) evaluates the loss again and again in each step, and "
            f"the Learner does so once. Use another optimizer; or {name} in a loop of your own, "
            f"recorded by watch(model, opt, …)."
        )
    if any(p.requires_grad for p in model.parameters()) and not _holds_some(model, opt):
        raise ArgumentError(
            f"Learner: splitter(model) returned no parameter of {type(model).__name__}, so nothing "
            f"of it would be trained. Return parameters of the model that it is called with."
        )
    return opt


def _needs_closure(opt: Any) -> bool:
    """Whether `opt.step()` lacks an argument, as that of LBFGS does."""
    try:
        inspect.signature(opt.step).bind()
    except TypeError:
        return True
    except ValueError:  # a function without a signature
        return False
    return False


def _holds_some(model: nn.Module, opt: Any) -> bool:
    """Whether `opt` has a parameter of `model`."""
    held = {id(p) for group in opt.param_groups for p in group["params"]}
    return any(id(p) in held for p in model.parameters())


def check_trained(model: nn.Module, opt: Any) -> None:
    """Warns if `opt` holds no parameter of `model`: a fit would not change it."""
    if not _holds_some(model, opt):
        warnings.warn(
            f"fit: {type(opt).__name__} holds no parameter of {type(model).__name__}, so it trains "
            f"something else. If learn.model is a new one: fit(…, reset_opt=True).",
            HookkitWarning,
            stacklevel=3,
        )


def check_decay(who: str, wd: Any) -> None:
    """An OptionError unless `wd` is None or a number from 0."""
    if wd is not None:
        check_number(who, "wd", wd, 0, what="the weight decay, None for the optimizer's own")


def checked_metrics(metrics: Any) -> L:
    """`metrics` as a list, each of a kind that can work; else an ArgumentError."""
    listed = L([metrics] if callable(metrics) or hasattr(metrics, "update") else metrics)
    for metric in listed:
        as_metric(metric)
    return listed


def no_loss(loss_func: Any, xb: tuple[Any, ...]) -> str:
    """The message about a training batch without a loss."""
    if loss_func is None:
        return (
            "Training needs a loss; there is no loss_func, no dls.train_ds.loss_func, and the "
            "model returns none. Give Learner(…, loss_func=…)."
        )
    return (
        f"Training needs a loss; {loss_name(loss_func)} compares with targets, and the batch has "
        f"none: {describe(xb)} is all input. Give batches (x, y), a smaller "
        f"DataLoaders(…, n_inp=…), or no loss_func if the model returns its loss."
    )


def as_loaders(dls: Any) -> Any:
    """`DataLoaders`, from those, a pair, or one loader to train on.

    An object with `train` and `valid` stays as it is.
    """
    if dls is None or hasattr(dls, "train"):
        return dls
    if isinstance(dls, DataLoader):
        return DataLoaders(dls)
    if isinstance(dls, (tuple, list)) and len(dls) == 2:
        return DataLoaders(*dls)
    raise ArgumentError(
        f"Learner(dls=…): expected DataLoaders, found {kind_of(dls)}. Give "
        f"DataLoaders(train, valid), the pair (train, valid), or one DataLoader."
    )


def warn_unwritten(where: Path, error: OSError) -> None:
    """Warns that a file could not be written during a fit."""
    warnings.warn(
        f"save: {where} was not written ({error.strerror or error}), and what was there before "
        f"stays; training goes on. Free the disk, or save to another folder.",
        HookkitWarning,
        stacklevel=3,
    )
