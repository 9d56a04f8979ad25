"""What happens at a call of a hooked module: the dispatchers of `Hook`, one for each of its kinds.

Each gets what PyTorch passes to such a hook, decides whether this call is to be recorded, runs
the user's function on what it may see, and stores its result in the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.hooks.entries import (
    Dispatcher,
    called,
    check_same,
    graph_task,
    in_thread,
    is_compiling,
    is_exporting,
    is_tracing,
    part_at,
    positional,
    untraced,
)
from hookkit.hooks.snapshot import Kept, Storer, lent, owned
from hookkit.hooks.taps import Receive
from hookkit.nested import Inputs, describe, leaves, put, tmap

if TYPE_CHECKING:
    from hookkit.hooks.hook import Hook


class Forward(Dispatcher):
    """Forward hook: `hook_func(module, input, output)`."""

    __slots__ = ()

    @property
    def keeps_live(self) -> bool:
        """Whether `hook_func`, or the user who reads what is stored, has the output's graph."""
        hook = self.target
        return hook is not None and (hook._options.edit or not hook._options.detach)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> Any:
        """After the forward."""
        hook = self.target
        if hook is None:
            return None
        o, leaf = hook._options, hook.leaf
        if not o.edit and not is_compiling() and is_tracing():
            with untraced():
                return self(module, args, kwargs, output)
        x = part_at(output, leaf, o.who, lambda: hook.label)
        if o.hook_func is None:
            return observe(hook, module, owned(module, args, kwargs), same, x)
        inputs, theirs = Inputs(args, kwargs), False
        if o.detach and not o.edit:
            theirs = isinstance(x, Tensor) and lent(x, owned(module, args, kwargs))
            inputs, x = tmap(Tensor.detach, inputs), tmap(Tensor.detach, x)
        given = (*inputs, *inputs.kwargs.values(), *((x,) if theirs else ()))
        new = observe(hook, module, given, called, o.hook_func, module, inputs, x)
        if new is None:
            return None
        check_same(o.who, lambda: hook.label, x, new)
        return put(output, leaf, new) if leaf else new

    def for_copy(self) -> Dispatcher | None:
        """One that edits as this does, for a hook of its own."""
        return edits_alike(self)


class Pre(Dispatcher):
    """Forward-pre hook: `hook_func(module, input)`."""

    __slots__ = ()

    is_pre = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Before the forward."""
        hook = self.target
        if hook is None:
            return None
        o, leaf, inputs = hook._options, hook.leaf, Inputs(args, kwargs)
        if not o.edit and not is_compiling() and is_tracing():
            with untraced():
                return self(module, args, kwargs)
        x = part_at(inputs, leaf, o.who, lambda: hook.label)
        if o.hook_func is None:
            return observe(hook, module, (*args, *kwargs.values()), same, x)
        if o.detach and not o.edit:
            x = tmap(Tensor.detach, x)
        given = (*x, *x.kwargs.values()) if isinstance(x, Inputs) else (x,)
        new = observe(hook, module, given, called, o.hook_func, module, x)
        if new is None:
            return None
        if leaf:
            check_same(o.who, lambda: hook.label, x, new)
            new = put(inputs, leaf, new)
        if isinstance(new, Inputs):
            return tuple(new), new.kwargs
        return positional(o.who, lambda: hook.label, inputs, new), kwargs

    def for_copy(self) -> Dispatcher | None:
        """One that edits as this does, for a hook of its own."""
        return edits_alike(self)


def edits_alike(call: Forward | Pre) -> Dispatcher | None:
    """`call` for a hook that is not the user's, and stores there; None unless it edits."""
    hook: Any = call.target
    if hook is None or not hook._options.edit or hook._block.thread not in (None, get_ident()):
        return None
    kind: Any = type(hook)
    own = kind.__new__(kind)
    own._revive(None, replace(hook._options, clone=False), hook.name, hook.leaf)
    return type(call)(own, call.key)


class Backward(Dispatcher):
    """PyTorch's full backward hook: `hook_func(module, grad_input, grad_output)`."""

    __slots__ = ()

    def put_on(self, module: nn.Module) -> None:
        """Registered as PyTorch does it; the key is its handle."""
        self.key = module.register_full_backward_hook(self)

    def take_off(self, module: nn.Module | None) -> None:
        """Also forgets that there was one, so that a hook of the other sort can follow."""
        self.target = None
        self.key.remove()
        if module is not None and not module._backward_hooks:
            module._is_full_backward_hook = None

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        """In the backward pass."""
        hook = self.target
        if hook is None:
            return None
        o = hook._options
        if o.detach and not o.edit:
            grad_input = tmap(Tensor.detach, grad_input)
            grad_output = tmap(Tensor.detach, grad_output)
        func = o.hook_func
        new = grad_output if func is None else called(func, module, grad_input, grad_output)
        hook._keep(Storer(o).keep(new))
        if not o.edit:
            return None
        return (new,) if isinstance(new, Tensor) else new  # PyTorch would take it for a tuple


class BackwardCheck(Dispatcher):
    """Forward hook that refuses, by name, outputs on which a full backward hook stays silent."""

    __slots__ = ()

    keeps_live = False

    def __call__(
        self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None
    ) -> None:
        """After the forward."""
        hook = self.target
        if hook is None or _flat(output) or not any(t.requires_grad for t in leaves(output)):
            return
        raise HookError(
            f"{hook._options.who}: a full backward hook on {hook.label} would stay silent or be "
            f"wrong, since it returns {describe(output)} and PyTorch hooks only a tensor or a "
            "flat tuple. Use hook_output(module, grad=True), which takes any structure."
        )


def _flat(output: Any) -> bool:
    if isinstance(output, Tensor):
        return True
    if not isinstance(output, tuple) or type(output).__module__ == "torch.return_types":
        return False
    return all(isinstance(t, Tensor) or not leaves(t) for t in output)


def same(x: Any) -> Any:
    """`x`: stands for a function of the user's where there is none."""
    return x


def observe(hook: Hook, module: nn.Module, given: Any, f: Callable[..., Any], *seen: Any) -> Any:
    """Stores `f(*seen)` if this call is to be recorded; what an edit hands on, else None.

    `given`: what the module was called with, if `f` may return that itself.
    """
    o = hook._options
    if is_compiling():
        return _observe_traced(hook, f, *seen)
    if not ours(hook, module):
        return None
    if graph_task() != -1:  # a checkpoint runs again: edits have to be there, records have not
        hook._missed = hook._missed or "recomputed"
        return f(*seen) if o.edit else None
    new = f(*seen)
    hook._keep(Storer(o, given).keep(new))
    if hook._block.stop is not None:
        hook._block.stop.fired(hook)
    return new if o.edit else None


def _observe_traced(hook: Hook, f: Callable[..., Any], *seen: Any) -> Any:
    """As `observe`, with nothing in it that breaks a graph: no count, no list, no version."""
    edit = hook._options.edit
    if is_exporting():
        return f(*seen) if edit else None
    new = f(*seen)
    hook._last = tmap(Storer(hook._options).tensor, new)
    hook._traced = True
    return new if edit else None


def ours(hook: Hook, module: nn.Module) -> bool:
    """Is this call made by the thread that the hook records? (A hook left in place records all.)"""
    block, replica = hook._block, "_is_replica" in module.__dict__
    if in_thread(block.thread) and (in_thread(block.owner) or replica):
        return True
    hook._missed = "replica" if replica else "thread"
    return False


# What fullgraph=True says; without it the graph breaks once for each hook, and all is right.
_IN_PYTHON = (
    "hookkit: a hook with grad=True stores gradients in Python, which no full graph can. Leave "
    "fullgraph=True out, use the hook in a `with` block, or attach_grad with a function that "
    "writes into a buffer."
)


class Grads:
    """The gradients of one forward call, filled in leaf by leaf; emptied by each new backward."""

    __slots__ = ("index", "kept", "task", "whole")

    def __init__(self, index: int, n: int) -> None:
        self.index, self.task = index, -1
        self.whole: tuple[Any, ...] | None = None
        self.kept: list[Kept | None] = [None] * n


def begin(hook: Hook, module: nn.Module, x: Any) -> Receive | None:
    """A forward call whose gradients are wanted: the function that receives them.

    Under a reentrant checkpoint the counted call runs without gradients, and the recomputed one
    has them: it takes the place that the counted call has left waiting.
    """
    x = part_at(x, hook.leaf, hook._options.who, lambda: hook.label)
    if is_compiling():
        hook._traced = True
        if not is_exporting():
            torch._dynamo.graph_break(msg=_IN_PYTHON)
        return receiver(ref(hook), Grads(0, len(leaves(x))))
    again = graph_task() != -1
    if not again and not ours(hook, module):
        return None
    if is_tracing():  # a tensor's hook is no part of the graph, and its tap would be
        hook._missed = "traced"
        return None
    found = leaves(x)
    if again:
        grads = hook._waiting.pop() if hook._waiting else None
        return None if grads is None else receiver(ref(hook), grads)
    hook._count += 1
    grads = Grads(hook._count, len(found))
    if hook._all is not None:
        hook._all.append(grads)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in found)):
        hook._missed = "frozen" if torch.is_grad_enabled() else "no_grad"
        hook._waiting.append(grads)
        return None
    return receiver(ref(hook), grads)


def receiver(hook: ref[Hook], grads: Grads) -> Receive:
    """Held by the autograd graph, which Python's garbage collector cannot see into: weak."""

    def receive(i: int, grad: Tensor) -> None:
        h = hook()
        if h is None or h.removed:
            return
        if grads.task != graph_task():
            grads.task, grads.kept, grads.whole = graph_task(), [None] * len(grads.kept), None
        grads.kept[i] = Storer(h._options).keep(grad)
        if not isinstance(h._last, Grads) or h._last.index <= grads.index:
            h._last = grads

    return receive
