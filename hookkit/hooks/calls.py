"""What a hook does at a call of its module: after the forward, before it, in the backward.

Each function gets the `Capture` and what PyTorch passes to such a hook, decides whether this call
is recorded, runs the user's function on what it may see, and stores its result in the capture. The
fast path, for hooks that store the last output and nothing more, is `Capture.__call__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.hooks.entries import (
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
from hookkit.hooks.snapshot import Snapshotter, StoredValue, aliases_user_memory, inputs_and_buffers
from hookkit.hooks.taps import Receive
from hookkit.nested import Inputs, describe, leaves, put, tmap

if TYPE_CHECKING:
    from hookkit.hooks.capture import Capture


def after(hook: Capture, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """After the forward: `hook_func(module, input, output)`. What an edit returns, else None."""
    o, leaf = hook.options, hook.leaf
    if not o.edit and not is_compiling() and is_tracing():
        with untraced():
            return after(hook, module, args, kwargs, output)
    x = part_at(output, leaf, o.who, hook.label)
    if o.hook_func is None:
        return observe(hook, module, inputs_and_buffers(module, args, kwargs), _same, x)
    inputs, is_users = Inputs(args, kwargs), False
    if o.detach and not o.edit:
        is_users = isinstance(x, Tensor) and aliases_user_memory(
            x, inputs_and_buffers(module, args, kwargs)
        )
        inputs, x = tmap(Tensor.detach, inputs), tmap(Tensor.detach, x)
    given = (*inputs, *inputs.kwargs.values(), *((x,) if is_users else ()))
    new = observe(hook, module, given, _function(hook), module, inputs, x)
    if new is None:
        return None
    check_same(o.who, hook.label, x, new)
    return put(output, leaf, new) if leaf else new


def before(hook: Capture, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before the forward: `hook_func(module, input)`. What an edit calls it with, else None."""
    o, leaf, inputs = hook.options, hook.leaf, Inputs(args, kwargs)
    if not o.edit and not is_compiling() and is_tracing():
        with untraced():
            return before(hook, module, args, kwargs)
    x = part_at(inputs, leaf, o.who, hook.label)
    if o.hook_func is None:
        return observe(hook, module, (*args, *kwargs.values()), _same, x)
    if o.detach and not o.edit:
        x = tmap(Tensor.detach, x)
    given = (*x, *x.kwargs.values()) if isinstance(x, Inputs) else (x,)
    new = observe(hook, module, given, _function(hook), module, x)
    if new is None:
        return None
    if leaf:
        check_same(o.who, hook.label, x, new)
        new = put(inputs, leaf, new)
    if isinstance(new, Inputs):
        return tuple(new), new.kwargs
    return positional(o.who, hook.label, inputs, new), kwargs


def backward(hook: Capture, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    """In the backward: `hook_func(module, grad_input, grad_output)`."""
    o = hook.options
    if o.detach and not o.edit:
        grad_input = tmap(Tensor.detach, grad_input)
        grad_output = tmap(Tensor.detach, grad_output)
    func = o.hook_func
    new = grad_output if func is None else called(func, module, grad_input, grad_output)
    hook.keep(Snapshotter(o).keep(new))
    if not o.edit:
        return None
    return (new,) if isinstance(new, Tensor) else new  # PyTorch would take it for a tuple


def both(hook: Capture, module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
    """Once all gradients of a call are there: `hook_func(module, grad_inputs, grad_outputs)`."""
    new = called(hook.options.hook_func, module, grad_inputs, grad_outputs)  # type: ignore[arg-type]
    hook.keep(Snapshotter(hook.options).keep(new))


def check_output(hook: Capture, output: Any) -> None:
    """Refuses, by name, outputs on which PyTorch's full backward hook does nothing, or is wrong."""
    if _flat(output) or not any(t.requires_grad for t in leaves(output)):
        return
    raise HookError(
        f"{hook.options.who}: a full backward hook on {hook.label()} would stay silent or be "
        f"wrong, since it returns {describe(output)} and PyTorch hooks only a tensor or a "
        "flat tuple. Use hook_output(module, grad=True), which takes any structure."
    )


def _flat(output: Any) -> bool:
    if isinstance(output, Tensor):
        return True
    if not isinstance(output, tuple) or type(output).__module__ == "torch.return_types":
        return False
    return all(isinstance(t, Tensor) or not leaves(t) for t in output)


def _same(x: Any) -> Any:
    """`x`: stands for the user's function where there is none."""
    return x


def _function(hook: Capture) -> Callable[..., Any]:
    """The user's function; an exception in it gains a note, and a ready-made edit its hook."""
    func: Any = hook.options.hook_func

    def run(module: nn.Module, *seen: Any) -> Any:
        if getattr(func, "wants_hook", False) and not is_compiling():
            return func(module, *seen, hook=hook)
        return called(func, module, *seen)

    return run


def observe(hook: Capture, module: nn.Module, given: Any, f: Callable[..., Any], *seen: Any) -> Any:
    """Stores `f(*seen)` if this call is to be recorded; what an edit returns, else None.

    `given`: what the module was called with, if `f` may return that itself.
    """
    o = hook.options
    if is_compiling():
        return _observe_traced(hook, f, *seen)
    if not counts(hook, module):
        return None
    if graph_task() != -1:  # a checkpoint runs again: edits have to be there, records have not
        hook.missed = hook.missed or "recomputed"
        return f(*seen) if o.edit else None
    new = f(*seen)
    hook.keep(None if o.keep == "none" else Snapshotter(o, given).keep(new))
    if hook.switch.stop is not None:
        hook.switch.stop.fired(hook)
    return new if o.edit else None


def _observe_traced(hook: Capture, f: Callable[..., Any], *seen: Any) -> Any:
    """As `observe`, with nothing in it that breaks a graph: no count, no list, no version."""
    o = hook.options
    if is_exporting() and not o.edit:
        return None
    new = f(*seen)
    if o.keep != "none" and not is_exporting():
        hook.last, hook.version = tmap(Snapshotter(o).tensor, new), -1
    hook.traced = True
    return new if o.edit else None


def counts(hook: Capture, module: nn.Module) -> bool:
    """Whether the thread that the hook records makes this call. Notes why not, for the report."""
    replica = "_is_replica" in module.__dict__
    if in_thread(hook.switch.thread) or (replica and not hook.switch.depth):
        return True
    hook.missed = "replica" if replica else "thread"
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
        self.kept: list[StoredValue | None] = [None] * n


def begin(hook: Capture, module: nn.Module, x: Any) -> Receive | None:
    """A forward call whose gradients are wanted: the function that receives them.

    Under a reentrant checkpoint the counted call runs without gradients, and the recomputed one
    has them: it takes the place that the counted call has left waiting.
    """
    x = part_at(x, hook.leaf, hook.options.who, hook.label)
    if hook.options.edit:
        return _begin_edit(hook, module)
    if is_compiling():
        hook.traced = True
        if not is_exporting():
            torch._dynamo.graph_break(msg=_IN_PYTHON)
        return receiver(ref(hook), Grads(0, len(leaves(x))))
    again = graph_task() != -1
    if not again and not counts(hook, module):
        return None
    if is_tracing():  # a tensor's hook is no part of the graph, and its tap would be
        hook.missed = "traced"
        return None
    found = leaves(x)
    if again:
        grads = hook.waiting.pop() if hook.waiting else None
        return None if grads is None else receiver(ref(hook), grads)
    hook.count += 1
    grads = Grads(hook.count, len(found))
    if hook.options.keep == "all":
        hook.all.append(grads)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in found)):
        hook.missed = "frozen" if torch.is_grad_enabled() else "no_grad"
        hook.waiting.append(grads)
        return None
    return receiver(ref(hook), grads)


def receiver(hook: ref[Capture], grads: Grads) -> Receive:
    """Held by the autograd graph, which Python's garbage collector cannot see into: weak."""

    def receive(i: int, grad: Tensor) -> None:
        h = hook()
        if h is None or h.removed:
            return
        if grads.task != graph_task():
            grads.task, grads.kept, grads.whole = graph_task(), [None] * len(grads.kept), None
        grads.kept[i] = Snapshotter(h.options).keep(grad)
        if not isinstance(h.last, Grads) or h.last.index <= grads.index:
            h.last = grads

    return receive


def _begin_edit(hook: Capture, module: nn.Module) -> Receive | None:
    """As `begin`, for an edit: what receives a gradient returns the one that goes on."""
    if is_compiling():  # here: the graph of a gradient's hook may write no attribute
        hook.traced = True
        return _editor(ref(hook), ref(module))
    if not counts(hook, module):
        return None
    if is_tracing():
        raise HookError(
            f"{hook.options.who} on {hook.label()}: torch.jit.trace keeps no hooks on gradients, "
            "so the edit would not be in the traced model. Trace the model outside of the edit."
        )
    hook.missed = "no_gradient"
    return _editor(ref(hook), ref(module))


def _editor(hook: ref[Capture], module: ref[nn.Module]) -> Receive:
    def receive(i: int, grad: Tensor) -> Tensor | None:
        h, m = hook(), module()
        if h is None or m is None or h.removed:  # the graph has outlived the block
            return None
        new: Any = _function(h)(m, grad)
        if not is_compiling():
            h.count += 1
        if new is not None and (not isinstance(new, Tensor) or new.shape != grad.shape):
            raise HookError(
                f"{h.options.who} on {h.label()}: the replacement is {describe(new)}, the gradient "
                f"is {describe(grad)}. Return a tensor of that shape, or None."
            )
        return new

    return receive
