"""`trace`: one run of a model that changes nothing, recorded by module.

Builds on `preserve_state`, `tracer`, `fake_run`. The model itself runs, for real; a run that gets
long or large is stopped and repeated on fake tensors, which have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import GeneratorType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hookkit._core.pytree import Inputs
from hookkit.errors import ArgumentError
from hookkit.inspection.fake_run import may_run_fake, run_fake
from hookkit.inspection.preserve import copied_inputs, preserve_state, real_inputs
from hookkit.inspection.tracer import Stopped, Trace, Tracer
from hookkit.inspection.tree import Tree

T = TypeVar("T")

# How far a real run goes: multiply-accumulates, about a second of a CPU core, and bytes that
# autograd saves. Beyond them the model runs on fake tensors.
MAX_MACS, MAX_SAVED_BYTES = 2 * 10**10, 2**30

# Raised by torch.func.grad, vjp, jacrev and hessian, in torch 2.11 to 2.13, as the whole error.
_NO_SAVED_HOOKS = "don't yet support saved tensor hooks"


def trace(
    tree: Tree, inputs: Inputs, read: Callable[[Trace], T], *, training: bool | None = None
) -> T:
    """Run the model once and return `read(trace)`, called before the model is put back.

    The model's own error is stored in the trace. The run is repeated without values, on fake
    tensors, where it would take long or much memory (`MAX_MACS`, `MAX_SAVED_BYTES`) or has run out
    of it, and the model can run so (see `may_run_fake`). A model on meta runs on meta.

    Args:
        tree: of the model.
        inputs: the arguments of its forward, which gets copies.
        training: the mode of the run, None the model's own.

    Raises:
        ArgumentError: the model would wait for other processes.
    """
    _refuse_waiting(tree, training)
    is_meta = any(t.is_meta for t in tree.tensors)
    if is_meta:
        inputs = copied_inputs(inputs, lambda t: t.detach().to("meta"))

    def run(mode: Any = None, bounded: bool = False) -> tuple[Trace, T]:
        found = _run(tree, inputs, read, training, mode=mode, bounded=bounded)
        if _NO_SAVED_HOOKS in str(found[0].error):
            found = _run(tree, inputs, read, training, mode=mode, bounded=bounded, saves=False)
        return found

    if not is_meta and may_run_fake(tree):
        try:
            seen, result = run(bounded=True)
            if not _is_out_of_memory(seen.error):
                return result
        except Stopped:
            pass
        fake = run_fake(tree, run)
        if fake is not None:
            return fake
    return run()[1]


def _is_out_of_memory(error: Exception | None) -> bool:
    """Return whether an allocator raised `error`; the CPU's has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _refuse_waiting(tree: Tree, training: bool | None) -> None:
    """Raise if a run of this process alone would wait for the others."""
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
    mode: Any,
    bounded: bool,
    saves: bool = True,
) -> tuple[Trace, T]:
    """Run once, on the fake tensors of `mode` if there is one; `Stopped` is raised if `bounded`.

    Without `saves`, saved tensors are not seen: torch.func allows no hooks on them.
    """
    with ExitStack() as stack:
        # off for its own copies too, which a user's inference mode would mark
        stack.enter_context(torch.inference_mode(False))
        state = stack.enter_context(preserve_state(tree, training=training, grad=True, watch=False))
        bound = [(MAX_MACS, MAX_SAVED_BYTES)] if bounded else []
        is_meta = any(t.is_meta for t in tree.tensors)
        tracer = Tracer(
            tree, state.before_write, "meta" if is_meta else "fake" if mode else "real", *bound
        )
        tracer.trace.saves, tracer.trace.not_restored = saves, state.not_restored
        tracer.attach(stack)
        if torch.is_autocast_cache_enabled():
            # the run makes what was made before it again, and keeps none of its own
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        if mode is None:
            inputs = real_inputs(inputs)
        else:
            inputs = copied_inputs(inputs, lambda t: mode.from_tensor(t.detach()))
        try:
            with ExitStack() as seen:
                if mode is not None:
                    seen.enter_context(mode)
                if saves:
                    seen.enter_context(saved_tensors_hooks(tracer.pack, lambda saved: saved.tensor))
                seen.enter_context(tracer)
                try:
                    out = tree.model(*inputs, **inputs.kwargs)
                    out = list(out) if isinstance(out, GeneratorType) else out
                    # autograd may have saved the fake tensors that `mode` made of the parameters
                    fakes = map(mode.from_tensor, tree.tensors) if mode is not None else ()
                    tracer.ended(out, [*tree.tensors, *fakes])
                except Exception as e:
                    tracer.trace.error = e
            if tracer.stopped:
                raise Stopped
        finally:
            # The autograd graph refers to the tracer where Python's garbage collector cannot see
            # it. With an error in the trace, whose frames hold the graph, none would be freed.
            trace, tracer.trace = tracer.trace, Trace("none")
        return trace, read(trace)
