"""One run of a model, seen by module: calls in order, shapes, multiply-accumulates, saved bytes.

`trace(tree, inputs)` runs a copy on fake tensors, so that nothing is computed or changed. A model
whose control flow reads values cannot run so; then a real copy runs on copies of the inputs and, if
a module refuses to be copied, the model itself, which is restored afterwards (see `sandbox`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import GeneratorType

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hookkit.errors import ArgumentError
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.interrupts import Undo, uninterrupted
from hookkit.modelinfo import fake_tensors, sandbox
from hookkit.modelinfo.fake_kernels import FakeKernels
from hookkit.modelinfo.hook_copies import HookCopies
from hookkit.modelinfo.tracer import Trace, Tracer
from hookkit.modelinfo.tree import Tree
from hookkit.modules import Parts
from hookkit.nested import Inputs, leaves

# Raised by torch.func.grad, vjp, jacrev and hessian, in torch 2.11 to 2.13, as the whole error.
_NO_HOOKS = "don't yet support saved tensor hooks"


def trace(tree: Tree, given: Inputs, *, training: bool | None = None, macs: bool = True) -> Trace:
    """Runs a copy of the model of `tree` on copies of `given`; the model's error is stored.

    `training` is the mode of the copy, None the model's own; with `macs` they are counted. Raises
    an ArgumentError if the model is sharded: a run would wait for the other processes.
    """
    _refuse_sharded(tree)
    hooks = HookCopies(tree)
    with sandbox.preserve_global_state():
        with sandbox.preserve_random_states(lambda: False):  # nothing is drawn; a forward may seed
            done = _run_fake(tree, hooks, given, training, macs)
        if done is None or done.error is not None:
            why = _reason(done, tree, given)
            done = _run_real(tree, hooks, given, training, macs)
            done.why = why
    done.n_hooks = hooks.n_running()
    return done


def _refuse_sharded(tree: Tree) -> None:
    for m in (*tree.wrappers, *tree.modules):
        if type(m).__module__.startswith("torch.distributed.fsdp"):
            raise ArgumentError(
                f"the model is sharded by FSDP ({type(m).__name__}): a run would wait for the "
                "other processes. Call it before fully_shard, on the model that one process holds."
            )


def _reason(done: Trace | None, tree: Tree, given: Inputs) -> str:
    if done is None:
        return "sparse tensors" if fake_tensors.has_sparse(tree, given) else ""
    where = f" in {done.failed[-1] or 'the model itself'}" if done.failed else ""
    return f"{type(done.error).__name__}{where}"


# On fake tensors torch 2.13 calls Python from C++ functions that must not throw (it looks up
# `find_torch_dispatch_rule`): a Ctrl-C in there aborts the process. Nothing is computed here, so
# the wait is short: till the next call of a module. A second Ctrl-C is raised at once.
@uninterrupted
def _run_fake(
    tree: Tree, hooks: HookCopies, given: Inputs, training: bool | None, macs: bool
) -> Trace | None:
    mode = fake_tensors.new_mode()
    if mode is None or fake_tensors.has_sparse(tree, given):
        return None
    try:
        home = next((t.device for t in leaves(given) if not t.is_meta), None)
        copied = _tree_of_copy(fake_tensors.fake_copy(tree, hooks, mode, home), tree)
        fakes = fake_tensors.fake_inputs(given, mode)
    except Exception:  # whatever cannot be copied without values is run for real
        return None
    real = {id(fake): t for fake, t in zip(leaves(fakes), leaves(given), strict=True)}
    made = [weakref.ref(t) for t in leaves(fakes)]
    kernels = FakeKernels(mode, real, made, macs=macs)
    with fake_tensors.cleaned_up(tree, hooks, copied.model, made):
        with sandbox.without_collections(), mode:
            done = _run(copied, fakes, training, partial(Tracer, kernels=kernels, macs=macs))
        if done.error is not None:
            done.error = done.error.with_traceback(None)  # its frames hold what the run made
        del fakes
    return done


def _run_real(
    tree: Tree, hooks: HookCopies, given: Inputs, training: bool | None, macs: bool
) -> Trace:
    new = partial(Tracer, kernels=None, macs=macs)
    done: Trace | None = None
    with sandbox.preserve_random_states(lambda: done is None or done.drew):
        try:
            copied = _tree_of_copy(sandbox.real_copy(tree, hooks), tree)
        except Exception:  # a module refuses to be copied, or memory is short
            with sandbox.restore_after(tree):
                hooks.remove_observers()
                done = _run(tree, sandbox.real_inputs(given), training, new)
            done.how = "itself"
        else:
            before = _versions(tree) if sandbox.shares_params(tree) else {}
            done = _run(copied, sandbox.real_inputs(given), training, new)
            if before:
                done.how, now = "shared", _versions(tree)
                done.written = tuple(name for name, n in before.items() if now.get(name) != n)
    return done


def _versions(tree: Tree) -> dict[str, int]:
    """How often each parameter was written in place; not those through `.data`.

    `_version` counts them, see `sandbox`; an inference tensor has none.
    """
    return {name: p._version for name, p in tree.params if not p.is_inference()}


def _tree_of_copy(model: nn.Module, original: Tree) -> Tree:
    """The tree of a copy, which must not run modules of the original."""
    tree = Tree(model)
    if not {*map(id, tree.modules)}.isdisjoint(map(id, original.modules)):
        raise TypeError("the __deepcopy__ of a module returns the module itself")
    return tree


def _run(tree: Tree, given: Inputs, training: bool | None, new: Callable[[Tree], Tracer]) -> Trace:
    """Runs the model, twice if the first call makes layers, which only a second one can see."""
    sandbox.set_mode(tree, training)
    parts = Parts(tree.model)
    done = _once(new, tree, given)
    if not parts.changed():
        return done
    tree = Tree(tree.model)
    if done.error is not None:
        done.tree = tree
        return done
    again = _once(new, tree, given)
    again.drew |= done.drew
    return again


def _once(new: Callable[[Tree], Tracer], tree: Tree, given: Inputs) -> Trace:
    """One call; once more without a look at saved tensors if torch.func refuses that."""
    done = _called(new(tree), given, saved=True)
    if _NO_HOOKS not in str(done.error):
        return done
    again = _called(new(tree), given, saved=False)
    again.drew |= done.drew
    again.saves = False
    return again


def _called(tracer: Tracer, given: Inputs, *, saved: bool) -> Trace:
    with Undo() as stack:
        tracer.attach(stack)
        stack.callback(leave_eager, tracer)
        _enter_eager(tracer)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if saved:
            stack.enter_context(saved_tensors_hooks(tracer.pack, lambda packed: packed.tensor))
        stack.enter_context(tracer)
        try:
            out = tracer.trace.tree.model(*given, **given.kwargs)
            if isinstance(out, GeneratorType):
                out = list(out)
            tracer.ended(out)
        except Exception as e:
            tracer.trace.error = e
    return tracer.trace


def _enter_eager(owner: object) -> None:
    """Compiled parts run as they are written: the compiler would compile the tracer with them.

    Flex attention loads the compiler when it is called, which would be too late.
    """
    if "torch.nn.attention.flex_attention" in sys.modules:
        # Private, in torch 2.11 to 2.13: what `enter_eager` needs to be loaded. Without it flex
        # attention would be compiled in the run.
        import_module("torch._dynamo.eval_frame")
    enter_eager(owner)
