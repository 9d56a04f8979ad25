"""`trace` runs a model once, records the run by module, and restores the model.

Builds on `preserve_state` and `tracer`. The model runs for real; if that takes long, it is stopped
and repeated on PyTorch's fake tensors. These have a shape, a dtype and a device but no values, so a
forward on them costs no memory and computes nothing. PyTorch makes a fake tensor of each parameter
that an operation meets. It computes some operations on a real tensor and a number, such as
`weight.div_(2)`, for real, which `preserve_state` undoes.

A forward may also store a tensor outside of its modules, such as in a global list or a cached
function. A fake tensor that stays there would come back in every later call, so it is an error.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from types import FrameType, GeneratorType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hookkit._core.pytree import Inputs
from hookkit.errors import ArgumentError, ModelRunError
from hookkit.hooks import Hook
from hookkit.hooks.attach import AttachedFunction
from hookkit.inspection.preserve import clone_inputs, copy_inputs, preserve_state
from hookkit.inspection.tracer import Saved, Stopped, Trace, Tracer
from hookkit.inspection.tree import Tree

T = TypeVar("T")

# The most multiply-accumulates of a real run, about a second of a CPU core. Beyond them the model
# runs on fake tensors.
MAX_MACS = 2 * 10**10

_FROZEN = gc.get_freeze_count()  # Python 3.12 begins with some objects of its own

_LEFT = (
    "{0} ran on fake tensors, which have no values, since its real run was stopped as too long, "
    "and its forward has stored some outside of its modules, in: {1}. Calls that read them will "
    "fail. Remove them there (from a cached function by its cache_clear()), or start a new "
    "process; and give summary a smaller input, with which the model runs for real."
)
_TRANSFORMED = (
    "hookkit: the forward differentiates by torch.func, inside which PyTorch does not tell what is "
    "saved for backward. Give summary the module that is differentiated."
)


def trace(
    tree: Tree, inputs: Inputs, read: Callable[[Trace], T], *, training: bool | None = None
) -> T:
    """Run the model once and return `read(trace)`, called before the model is restored.

    An error of the model is stored in the trace. If the run takes long (`MAX_MACS`) or runs out of
    memory, it is repeated on fake tensors if the model can run on them. A model on meta runs on
    meta.

    Args:
        tree: the model's `Tree`.
        inputs: the arguments of the forward, which gets copies.
        read: what to compute from the trace while the model is still as it ran.
        training: the mode of the run; None keeps the model's own.

    Raises:
        ArgumentError: the model would wait for other processes.
        ModelRunError: the forward has stored a fake tensor outside of the model's modules.
    """
    _refuse_waiting(tree, training)

    def run(**options: Any) -> tuple[Trace, T]:
        found = _run(tree, inputs, read, training, **options)
        if found[0].differentiates:
            found = _run(tree, inputs, read, training, **options, keeps=True)
        return found

    if tree.is_meta or not _may_run_fake(tree):
        return run()[1]
    try:
        seen, result = run(bounded=True)
        # the CPU's allocator has no error of its own
        is_full = isinstance(seen.error, torch.OutOfMemoryError | MemoryError)
        if not is_full and "DefaultCPUAllocator" not in str(seen.error):
            return result
    except Stopped:
        pass
    fake = _run_fake(tree, run)
    return run()[1] if fake is None else fake


def _refuse_waiting(tree: Tree, training: bool | None) -> None:
    """Raise if a run in this process alone would wait for other processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    for m in (*tree.wrappers, *tree.modules):
        if type(m).__module__.startswith("torch.distributed.fsdp"):
            raise ArgumentError(
                f"the model is sharded by FSDP ({type(m).__name__}): a run would wait for the "
                "other processes. Call it before fully_shard, on the model that one process holds."
            )
        trains = m.training if training is None else training
        if distributed and trains and isinstance(m, nn.SyncBatchNorm):
            raise ArgumentError(
                "the model has a SyncBatchNorm in training mode: a run would wait for the other "
                "processes. Call it before convert_sync_batchnorm, or on model.eval()."
            )


def _run(
    tree: Tree,
    inputs: Inputs,
    read: Callable[[Trace], T],
    training: bool | None,
    *,
    mode: Any = None,
    bounded: bool = False,
    keeps: bool = False,
) -> tuple[Trace, T]:
    """Run once, on the fake tensors of `mode` if it is given; raise `Stopped` if it gets too long.

    Only a `bounded` run is stopped. `keeps` is for a forward that differentiates, which needs the
    tensors that autograd saves.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # off before copies are made
        state = stack.enter_context(preserve_state(tree, training=training, grad=True, watch=False))
        kind = "meta" if tree.is_meta else "fake" if mode else "real"
        tracer = Tracer(tree, state.before_write, kind, keeps, MAX_MACS if bounded else inf)
        tracer.trace.not_restored = state.not_restored
        tracer.attach(stack)
        if torch.is_autocast_cache_enabled():
            # the run must not use casts from before it, and must not leave its own
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        # `mode` replaces the model's tensors by these, so these are what autograd saves
        own = [t for t in tree.tensors if mode is not None and not nn.parameter.is_lazy(t)]
        fakes = [mode.from_tensor(t) for t in own]
        if tree.is_meta:
            inputs = copy_inputs(inputs, lambda t: t.detach().to("meta"))
        elif mode is None:
            inputs = clone_inputs(inputs)
        else:
            inputs = copy_inputs(inputs, lambda t: mode.from_tensor(t.detach()))
        try:
            with ExitStack() as seen:
                if mode is not None:
                    seen.enter_context(mode)
                seen.enter_context(saved_tensors_hooks(tracer.pack, tracer.unpack))
                seen.enter_context(tracer)
                try:
                    out = tree.model(*inputs, **inputs.kwargs)
                    out = list(out) if isinstance(out, GeneratorType) else out
                    tracer.ended(out, [*tree.tensors, *fakes])
                except Exception as e:
                    if "saved tensor hooks" in str(e):
                        e.add_note(_TRANSFORMED)
                    tracer.trace.error = e
            if tracer.stopped:
                raise Stopped
        finally:
            # The autograd graph refers to the tracer where Python's garbage collector cannot see
            # it. With an error in the trace, whose frames hold the graph, none would be freed.
            trace, tracer.trace = tracer.trace, Trace("none")
        return trace, read(trace)


# --- runs on fake tensors


def _may_run_fake(tree: Tree) -> bool:
    """Return True unless the user has hooked the model or patched a forward.

    Such code expects values, which fake tensors do not have.
    """
    modules = (*tree.wrappers, *tree.modules)
    tables = [vars(m)[name] for m in modules for name in ("_forward_pre_hooks", "_forward_hooks")]
    # Private by their names, in torch 1.8 to 2.13. Without them a global hook gets fake tensors.
    names = ("_global_forward_pre_hooks", "_global_forward_hooks")
    tables += [getattr(nn.modules.module, name, {}) for name in names]
    for hook in [hook for table in tables if table for hook in table.values()]:
        home: str = getattr(hook, "__module__", None) or type(hook).__module__
        ours = isinstance(hook, (Hook, AttachedFunction))  # off in the run if it observes
        if not (hook.observes if ours else home.split(".")[0] == "torch"):
            return False
    return not any("forward" in vars(m) for m in modules)


def _run_fake(tree: Tree, run: Callable[..., tuple[Trace, T]]) -> T | None:
    """Run on fake tensors; return what `run` read, or None if the model raised.

    A model raises if it needs values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to load

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # torch's own and private by its name: it prints each operation that fails on fake tensors,
    # which is handled here. Under another name its records would be printed.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        seen, found = run(mode=mode)
        result: T | None = found if seen.error is None else None
        del seen, found  # the traceback of an error holds fake tensors
    finally:
        log.disabled = was_disabled
        if holders := _holders(mode):
            kinds = ", ".join(sorted({type(x).__name__ for x in holders}))
            raise ModelRunError(_LEFT.format(type(tree.model).__name__, kinds))
    return result


def _holders(mode: Any) -> list[Any]:
    """Return the Python objects that hold a fake tensor of `mode`.

    Tensors that only PyTorch holds (it never frees some autograd graphs) do no harm. After
    `gc.freeze()` Python cannot find the holders; then the tensors themselves are returned.
    """
    gc.collect()  # frees fake tensors in reference cycles
    fakes: tuple[Any, ...] = tuple(
        x
        for x in gc.get_objects()
        if issubclass(type(x), Tensor) and getattr(x, "fake_mode", None) is mode
    )
    if not fakes or gc.get_freeze_count() > _FROZEN:
        return [*fakes]
    found = gc.get_referrers(*fakes)  # `fakes` itself is among them from Python 3.12 on
    return [x for x in found if x is not fakes and type(x) not in (FrameType, Saved)]
