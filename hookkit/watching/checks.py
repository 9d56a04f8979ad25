"""`watch`'s arguments, checked and unwrapped; and its warnings for runs that recorded little.

Builds on `checks`. Every message says what was given, what was found, and what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.callbacks.loss_facts import loss_name
from hookkit.callbacks.optimizers import bare_optimizer
from hookkit.checks import check_callable, check_flag, kind_of, shown
from hookkit.errors import ArgumentError, CompiledWarning, HookkitWarning, NeverFiredWarning


def one_model(model: Any) -> nn.Module:
    """`model`, or the several models in a list or dict as one; else an ArgumentError."""
    if isinstance(model, nn.Module):
        return model
    several = list(model.values()) if isinstance(model, Mapping) else model
    listed = isinstance(several, (list, tuple)) and len(several) > 0
    if listed and all(isinstance(m, nn.Module) for m in several):
        return nn.ModuleDict(model) if isinstance(model, Mapping) else nn.ModuleList(several)
    raise ArgumentError(
        f"watch: expected a model (nn.Module), or several in a list or dict, found "
        f"{kind_of(model)}. Write watch(model, opt, *callbacks)."
    )


def optimizers(opt: Any) -> list[Optimizer]:
    """The torch optimizers in `opt`: None, one, a list or a dict of them, in any wrapper.

    Raises an ArgumentError if there is something else in it.
    """
    if opt is None:
        return []
    several = list(opt.values()) if isinstance(opt, Mapping) else opt
    if not isinstance(several, (list, tuple)):
        several = [several]
    found: dict[int, Optimizer] = {}
    for given in several:
        bare = bare_optimizer(given)
        # Private: `_optimizer_step_post_hooks`, set by Optimizer.__init__ (since 2.0). An optimizer
        # without it never called that, and runs no step hooks.
        if not isinstance(bare, Optimizer) or "_optimizer_step_post_hooks" not in vars(bare):
            raise ArgumentError(_not_an_optimizer(given))
        found[id(bare)] = bare
    return list(found.values())


def _not_an_optimizer(opt: Any) -> str:
    if hasattr(opt, "param_lists") and hasattr(opt, "hypers"):
        return (
            f"watch needs a torch optimizer to see the steps; {type(opt).__name__} is one of "
            f"fastai's own, which run no step hooks. Make it with fastai's "
            f"OptimWrapper(params, opt=torch.optim.AdamW), or train with hookkit's Learner."
        )
    return (
        f"watch: expected a torch optimizer, a list of them, or None (any optimizer that steps the "
        f"model's parameters), found {kind_of(opt)}. Write watch(model, opt, *callbacks)."
    )


COUNTED = ("epoch", "step")
"""What `watch` itself counts in the row of an epoch."""


def check_reported(values: Mapping[str, Any]) -> None:
    """An ArgumentError unless `values` are numbers or None, under names that are not counted."""
    for name, value in values.items():
        if not (value is None or isinstance(value, (Real, Tensor, np.ndarray))):
            raise ArgumentError(
                f"w.epoch({name}={shown(value)}): expected a number, found {kind_of(value)}. "
                f"Give a number, or a tensor."
            )
    if taken := [name for name in COUNTED if name in values]:
        raise ArgumentError(
            f"w.epoch({', '.join(f'{name}=…' for name in taken)}): watch counts "
            f"{' and '.join(COUNTED)} itself. Omit it, or use another name: my_{taken[0]}=…."
        )


def check_rest(callbacks: Iterable[Any], loss_func: Any, each_forward: Any) -> None:
    """An ArgumentError if an argument after model and optimizer is of a kind that cannot work."""
    for cb in callbacks:
        if isinstance(cb, Optimizer):
            raise ArgumentError(
                f"watch: {type(cb).__name__} is among the callbacks. The optimizer comes second: "
                f"watch(model, opt, *callbacks), several as a list."
            )
    cure = "the loss function that you call, such as nn.CrossEntropyLoss()"
    check_callable("watch", "loss_func", loss_func, cure)
    check_flag("watch", "each_forward", each_forward)


def warn_foreign(opt: Optimizer, model: nn.Module) -> None:
    """Warns that `opt` holds no parameter of `model`."""
    name = type(model).__name__
    warnings.warn(
        f"watch: {type(opt).__name__} holds none of the parameters of {name}: its steps are "
        f"counted, but they change something else. Give the optimizer made from {name}'s "
        f"parameters(), or none.",
        HookkitWarning,
        stacklevel=4,
    )


def warn_unseen(model: nn.Module, *, compiled: bool, in_eval: bool) -> None:
    """Warns that the optimizer stepped, and no forward in training came before."""
    if compiled:
        warnings.warn(_COMPILED, CompiledWarning, stacklevel=2)
        return
    name = type(model).__name__
    why = (
        f"and no training forward of {name} before it: steps are recorded, activations are not. "
        f"Give watch the object that you call (the compiled or wrapped model), or call w.batch() "
        f"as a batch begins."
    )
    if in_eval:
        why = (
            f"but {name} was in eval mode in the forward before it: steps are recorded, "
            f"activations are not, and dropout and batch norm work as in validation. Call "
            f"model.train() before training and after each validation. To train in eval mode, call "
            f"w.batch() as a batch begins."
        )
    warnings.warn(f"watch saw the optimizer step, {why}", NeverFiredWarning, stacklevel=2)


_COMPILED = (
    "watch: the model runs only inside something that was compiled from it, where its hooks are "
    "part of the graph: steps are recorded, batches are not seen. Give watch what torch.compile "
    "returned; for a compiled train step, call w.batch() before each call of it."
)


def why_no_loss(loss_func: Any, n_losses: int, twice: bool) -> str:
    """What is missing of the recorded losses, and what to do; empty if nothing is."""
    if not n_losses and isinstance(loss_func, nn.Module):
        return (
            f"watch(loss_func=…) recorded no loss: {loss_name(loss_func)} was not called in any "
            f"training batch. Call the very object that watch is given, or report the loss: "
            f"w.loss(loss)."
        )
    if not n_losses and loss_func is not None:
        return (
            f"watch(loss_func=…) recorded no loss: {loss_name(loss_func)} is a plain function, "
            f"which cannot be hooked. Report it in each batch: w.loss(loss); or use a module, such "
            f"as nn.MSELoss()."
        )
    if twice:
        return (
            f"watch: {loss_name(loss_func)} was called more than once in a batch, and only the "
            f"last call's value is recorded as the batch's loss. Report the whole: w.loss(loss)."
        )
    return ""


def why_unrecorded(loop: Any) -> str:
    """Why batches of an `ExternalLoop` were not recorded, and what to do; empty if all were."""
    name, n_batches, opts = type(loop.model).__name__, loop.train_iter, loop.opts
    if loop.other_thread and not (loop.n_own_steps or n_batches):
        return (
            f"watch recorded nothing: {name} was trained in another thread than the one that "
            f"entered watch, and calls of other threads are not recorded. Enter watch in the "
            f"thread that trains."
        )
    if loop.n_own_steps or loop.n_cancelled_steps or loop.each_forward:
        return _why_no_more_steps(name, loop.n_batches_since_step, [] if loop.finds_opts else opts)
    if not (n_batches or loop.compiled_step):
        return ""
    why = (
        f"no torch optimizer stepped a parameter of {name}. Give watch the optimizer, or "
        f"each_forward=True if the weights are changed by other means."
    )
    if loop.compiled_step:
        why = "its step is compiled. Compile the model, and call the optimizer's own step()."
    elif opts:
        why = (
            f"step() was never called, {type(opts[0]).__name__} is not what steps, a wrapper hides "
            f"its step, or a GradScaler skipped them all. Give watch the one that steps, or none "
            f"to find it."
        )
    batches = f"{n_batches} training batch{'es' * (n_batches != 1)}"
    return f"watch saw {batches} of {name} and no optimizer step, so nothing was recorded: {why}"


def _why_no_more_steps(name: str, n_batches: int, opts: list[Optimizer]) -> str:
    if not n_batches:
        return ""
    why = "a GradScaler skips them all, or the weights are changed by other means."
    if opts:
        why = (
            f"{type(opts[0]).__name__} steps no more. If another optimizer has taken over, give "
            f"watch a list of all, or none: then each that steps the model is found."
        )
    return (
        f"watch saw no optimizer step in the last {n_batches} training batches of {name}, so they "
        f"were not recorded: {why}"
    )
