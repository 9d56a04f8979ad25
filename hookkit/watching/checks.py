"""What `watch` is given, checked and unwrapped; and what it says when nothing comes of it.

Builds on `driving`. Every message tells what was given, what was found, and what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.callbacks.callback import Callback
from hookkit.checks import check_flag, kind_of, shown
from hookkit.errors import (
    ArgumentError,
    CompiledWarning,
    HookError,
    HookkitWarning,
    NeverFiredWarning,
)


def one_model(model: Any) -> nn.Module:
    """`model`, or the several models in a list or dict as one.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(model, nn.Module):
        return model
    if (
        isinstance(model, Mapping)
        and model
        and all(isinstance(m, nn.Module) for m in model.values())
    ):
        return nn.ModuleDict(dict(model))
    if isinstance(model, (list, tuple)) and model and all(isinstance(m, nn.Module) for m in model):
        return nn.ModuleList(model)
    raise ArgumentError(
        f"watch needs a model (nn.Module), or several in a list or dict, and was given "
        f"{model.__name__ + ', a class' if isinstance(model, type) else type(model).__name__}. "
        f"Write watch(model, opt, *callbacks)."
    )


def optimizers(opt: Any) -> list[Optimizer]:
    """The torch optimizers in `opt`: None, one, a list or a dict of them, in any wrapper.

    Raises:
        ArgumentError: there is something else in it.
    """
    if opt is None:
        return []
    several = list(opt.values()) if isinstance(opt, Mapping) else opt
    if not isinstance(several, (list, tuple)):
        several = [several]
    bare = [bare_optimizer(o) for o in several]
    return list({id(o): o for o in bare}.values())


def bare_optimizer(opt: Any) -> Optimizer:
    """The torch optimizer inside `opt`, whose step hooks fire.

    Accelerate, Lightning and others wrap it as `.optimizer`, fastai's `OptimWrapper` as `.opt`.

    Raises:
        ArgumentError: there is none.
    """
    found = opt
    for _ in range(8):  # a wrapper that wraps itself is nobody's optimizer
        inside = [getattr(found, name, None) for name in ("optimizer", "opt", "base_optimizer")]
        deeper = next((o for o in inside if hasattr(o, "param_groups")), None)
        if deeper is None:
            break
        found = deeper
    if isinstance(found, Optimizer) and "_optimizer_step_post_hooks" in vars(found):
        return found
    raise ArgumentError(_not_an_optimizer(opt))


def _not_an_optimizer(opt: Any) -> str:
    if hasattr(opt, "param_lists") and hasattr(opt, "hypers"):
        return (
            f"watch needs a torch optimizer to see the steps; {type(opt).__name__} is one of "
            f"fastai's own, which run no step hooks. Make it with fastai's "
            f"OptimWrapper(params, opt=torch.optim.AdamW), or train with hookkit's Learner."
        )
    kind = f"the class {opt.__name__}" if isinstance(opt, type) else f"a {type(opt).__name__}"
    return (
        f"watch needs a torch optimizer, a list of them, or None (any optimizer that steps the "
        f"model's parameters), and was given {kind}. Write watch(model, opt, *callbacks)."
    )


def check_free(callbacks: Iterable[Any]) -> None:
    """Raises if one of `callbacks` is at work in a fit that is under way.

    Raises:
        HookError: it is.
    """
    for cb in callbacks:
        driver = cb.learn if isinstance(cb, Callback) else None
        if getattr(driver, "fitting", False):
            raise HookError(
                f"watch was given {cb!r}, which records a run that is under way. "
                f"Give each run its own: {type(cb).__name__}()."
            )


OWN = ("epoch", "step")
"""What `watch` itself counts in the row of an epoch."""


def check_told(values: Mapping[str, Any]) -> None:
    """Raises unless `values` of an epoch are numbers, under names that `watch` does not count by.

    Raises:
        ArgumentError: one is no number (None is: there is none), or is named as what is counted.
    """
    for name, value in values.items():
        if not (value is None or isinstance(value, (Real, Tensor, np.ndarray))):
            raise ArgumentError(
                f"w.epoch({name}={shown(value)}): expected a number, found {kind_of(value)}. "
                f"Give a number, or a tensor."
            )
    if taken := [name for name in OWN if name in values]:
        raise ArgumentError(
            f"{' and '.join(taken)} {'was' if len(taken) == 1 else 'were'} told of an epoch; watch "
            f"counts {' and '.join(OWN)} itself. Leave it out, or tell it by another name: "
            f"my_{taken[0]}=…."
        )


def check_rest(callbacks: Iterable[Any], loss_func: Any, each_forward: Any) -> None:
    """Raises if what stands behind model and optimizer is not what it should be.

    Raises:
        ArgumentError: it is not.
    """
    for cb in callbacks:
        if isinstance(cb, Optimizer):
            raise ArgumentError(
                f"watch was given {type(cb).__name__} among the callbacks. The optimizer comes "
                f"second: watch(model, opt, *callbacks), several as a list."
            )
    if isinstance(loss_func, type) or not (loss_func is None or callable(loss_func)):
        raise ArgumentError(
            f"watch(loss_func={shown(loss_func)}): expected a function, found "
            f"{kind_of(loss_func)}. Give the loss function that you call, such as "
            f"nn.CrossEntropyLoss()."
        )
    check_flag("watch", "each_forward", each_forward)


def tell_twice(loss_func: Any) -> None:
    """Warns that the losses are only a part of what was trained on."""
    warnings.warn(
        f"watch saw {type(loss_func).__name__} called more than once in a batch: the last call's "
        f"value is what it kept as the batch's loss. Tell the whole: w.loss(loss).",
        HookkitWarning,
        stacklevel=5,
    )


def tell_no_loss(loss_func: Any) -> None:
    """Warns that `loss_func` was given and no loss was seen."""
    if isinstance(loss_func, nn.Module):
        why = f"{type(loss_func).__name__} was not called in any training batch that it could see"
        cure = "Call the very object that watch is given, or tell it: w.loss(loss)."
    else:
        name = getattr(loss_func, "__name__", type(loss_func).__name__)
        why = f"{name} is a plain function, whose calls cannot be seen"
        cure = "Tell it in each batch: w.loss(loss); or give and call a module, as nn.MSELoss()."
    warnings.warn(
        f"watch(loss_func=…) recorded no loss: {why}. {cure}", HookkitWarning, stacklevel=5
    )


def tell_foreign(opt: Optimizer, model: nn.Module) -> None:
    """Warns that `opt` holds no parameter of `model`."""
    name = type(model).__name__
    warnings.warn(
        f"watch was given {type(opt).__name__} for {name}, and it holds none of the model's "
        f"parameters: its steps are counted, but they change something else. Give the optimizer "
        f"made from {name}'s parameters(), or none.",
        HookkitWarning,
        stacklevel=4,
    )


def tell_unseen(model: nn.Module, compiled: bool) -> None:
    """Warns that the optimizer steps, and no forward came before."""
    if compiled:
        warnings.warn(_COMPILED, CompiledWarning, stacklevel=2)
        return
    warnings.warn(
        f"watch saw the optimizer step, and no training forward of {type(model).__name__} before "
        f"it: steps are recorded, activations are not. Give watch the object that you call (the "
        f"compiled or wrapped model), in train() mode; or say w.batch() as a batch begins.",
        NeverFiredWarning,
        stacklevel=2,
    )


_COMPILED = (
    "watch was given a model that runs only inside something compiled from it, where its hooks "
    "are part of the graph: steps are recorded, batches are not seen. Give watch what "
    "torch.compile returned; for a compiled train step, say w.batch() before each call of it."
)


def tell_unstepped(model: nn.Module, n_batches: int, opts: list[Optimizer], compiled: bool) -> None:
    """Warns that there were training batches and no step, and says the likely reason."""
    name = type(model).__name__
    if compiled:
        why = "its step is compiled. Compile the model, and call the optimizer's own step()."
    elif opts:
        why = (
            f"step() was never called, {type(opts[0]).__name__} is not what steps, a wrapper hides "
            f"its step, or a GradScaler left them all out. Give watch the one that steps, or none "
            f"to find it."
        )
    else:
        why = (
            f"no torch optimizer stepped a parameter of {name}. Give watch the optimizer, or "
            f"each_forward=True if the weights are changed by other means."
        )
    batches = f"{n_batches} training batch{'es' * (n_batches != 1)}"
    warnings.warn(
        f"watch saw {batches} of {name} and no optimizer step, so nothing was recorded: {why}",
        NeverFiredWarning,
        stacklevel=4,
    )


def tell_elsewhere(model: nn.Module) -> None:
    """Warns that the model is trained in another thread, and none of it was recorded."""
    warnings.warn(
        f"watch recorded nothing: {type(model).__name__} was trained in another thread than the "
        f"one that entered watch, and calls of other threads are not recorded. Enter watch in the "
        f"thread that trains.",
        NeverFiredWarning,
        stacklevel=4,
    )


def tell_idle(model: nn.Module, n_batches: int, opts: list[Optimizer]) -> None:
    """Warns that the steps have ceased, while the batches went on."""
    why = "a GradScaler leaves them all out, or the weights are changed by other means."
    if opts:
        why = (
            f"{type(opts[0]).__name__} steps no more. If another optimizer has taken over, give "
            f"watch a list of all, or none: then each that steps the model is found."
        )
    warnings.warn(
        f"watch saw no optimizer step in the last {n_batches} training batches of "
        f"{type(model).__name__}, so they were not recorded: {why}",
        NeverFiredWarning,
        stacklevel=4,
    )
