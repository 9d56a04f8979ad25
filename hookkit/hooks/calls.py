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
from hookkit.hooks.block import StopForward
from hookkit.hooks.entries import (
    called,
    check_same,
    graph_task,
    in_jit_trace,
    in_thread,
    is_compiling,
    is_exporting,
    is_tracing,
    part_at,
    positional,
)
from hookkit.hooks.snapshot import Snapshotter, StoredValue, aliases_user_memory, inputs_and_buffers
from hookkit.hooks.taps import Receive
from hookkit.nested import Inputs, describe, leaves, put, tmap

if TYPE_CHECKING:
    from hookkit.hooks.capture import Capture


def after(hook: Capture, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """After the forward: runs `hook_func(module, input, output)`; returns an edit's new output."""
    o, leaf = hook.options, hook.leaf
    if not o.edit and _is_traced(hook):
        return None
    x = part_at(output, leaf, o.who, hook.label)
    if o.hook_func is None:
        return observe(hook, module, inputs_and_buffers(module, args, kwargs), lambda x: x, x)
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
    """Before the forward: runs `hook_func(module, input)`; returns an edit's `(args, kwargs)`."""
    o, leaf, inputs = hook.options, hook.leaf, Inputs(args, kwargs)
    if not o.edit and _is_traced(hook):
        return None
    x = part_at(inputs, leaf, o.who, hook.label)
    if o.hook_func is None:
        return observe(hook, module, (*args, *kwargs.values()), lambda x: x, x)
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
    """In the backward pass: runs `hook_func(module, grad_input, grad_output)`."""
    o = hook.options
    if o.detach and not o.edit:
        grad_input = tmap(Tensor.detach, grad_input)
        grad_output = tmap(Tensor.detach, grad_output)
    func = o.hook_func
    new = grad_output if func is None else called(func, module, grad_input, grad_output)
    hook.keep(Snapshotter(o).keep(new))
    if not o.edit:
        return None
    return (new,) if isinstance(new, Tensor) else new  # else PyTorch reads the tensor as a tuple


def check_output(hook: Capture, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Raises for outputs with which PyTorch's full backward hook does nothing, or is wrong."""
    if _flat(output) or not any(t.requires_grad for t in leaves(output)):
        return
    raise HookError(
        f"{hook.options.who}: a full backward hook on {hook.label()} would not run, or give wrong "
        f"gradients, since it returns {describe(output)} and PyTorch hooks only a tensor or a "
        "flat tuple. Use hook_output(module, grad=True), which takes any structure."
    )


def _flat(output: Any) -> bool:
    """Whether PyTorch's full backward hook sees all tensors of `output`."""
    if isinstance(output, Tensor):
        return True
    if not isinstance(output, tuple) or type(output).__module__ == "torch.return_types":
        return False
    return all(isinstance(t, Tensor) or not leaves(t) for t in output)


def _function(hook: Capture) -> Callable[..., Any]:
    """The user's function, with a note on its exceptions; a ready-made edit also gets the hook."""

    def run(module: nn.Module, *seen: Any) -> Any:
        return call(hook, hook.options.hook_func, module, *seen)

    return run


def call(hook: Any, func: Any, module: nn.Module, *seen: Any) -> Any:
    """`func(module, *seen)`, to which one that `wants_hook` also gets the hook."""
    if getattr(func, "wants_hook", False) and not is_compiling():
        return func(module, *seen, hook=hook)
    return called(func, module, *seen)


def observe(hook: Capture, module: nn.Module, given: Any, f: Callable[..., Any], *seen: Any) -> Any:
    """Stores `f(*seen)` if this call is recorded; returns it for an edit, else None.

    `given`: what the module was called with, since `f` may return a part of that.
    """
    o = hook.options
    if is_compiling():
        return _observe_traced(hook, f, *seen)
    if not counts(hook, module):
        return None
    if graph_task() != -1:  # a checkpoint recomputes this call: edit it again, do not record it
        hook.missed = hook.missed or "recomputed"
        return f(*seen) if o.edit else None
    new = f(*seen)
    stores = o.keep != "none" and not is_tracing()
    hook.keep(Snapshotter(o, given).keep(new) if stores else None)
    if (waiting := hook.switch.waiting) is not None:
        waiting.pop(id(hook), None)
        if not waiting:  # one pass only: even if the block fails to close, later ones are complete
            hook.switch.waiting = None
            raise StopForward(hook.switch)
    return new if o.edit else None


def _is_traced(hook: Capture) -> bool:
    """Whether torch.jit.trace runs this forward, of which only edits are a part. Notes it."""
    if not in_jit_trace():
        return False
    hook.missed = "traced"
    return True


def _observe_traced(hook: Capture, f: Callable[..., Any], *seen: Any) -> Any:
    """As `observe`, without what would break a graph: it does not count, list or read versions."""
    o = hook.options
    if is_exporting() and not o.edit:
        return None
    new = f(*seen)
    if o.keep != "none" and not is_exporting():
        hook.last, hook.version = tmap(Snapshotter(o).tensor, new), -1
    hook.traced = True
    return new if o.edit else None


def counts(hook: Capture, module: nn.Module) -> bool:
    """Whether the thread that the hook records makes this call. If not, notes why."""
    # Private: `_is_replica`, see `entries.counts_for`.
    replica = "_is_replica" in module.__dict__
    if in_thread(hook.switch.thread) or (replica and not hook.switch.depth):
        return True
    hook.missed = "replica" if replica else "thread"
    return False


# The error with fullgraph=True. Without it the graph breaks at each hook, and the values are right.
_IN_PYTHON = (
    "hookkit: a hook with grad=True stores gradients in a Python object, which code compiled with "
    "fullgraph=True cannot do. Compile without fullgraph=True, use the hook in a `with` block, or "
    "use attach_grad with a function that writes into a buffer."
)


class Grads(StoredValue):
    """The gradients of one forward call, set leaf by leaf; each new backward pass clears them."""

    __slots__ = ("index", "kept", "task")

    def __init__(self, index: int, n: int) -> None:
        super().__init__(None)
        self.index, self.task = index, -1
        self.kept: list[StoredValue | None] = [None] * n

    def read(self, who: str, label: Callable[[], str]) -> Any:
        """The gradients; None for each that has not come."""
        return self.value if self.whole else tuple(k and k.read(who, label) for k in self.kept)


def begin(hook: Capture, module: nn.Module, x: Any) -> Receive | None:
    """Notes a forward call; returns the function that receives its gradients, None to skip it.

    Under a reentrant checkpoint the first run of the forward has no gradients and the recomputed
    one has them. The first run therefore adds its `Grads` to `hook.waiting`, and the recomputed one
    takes them from there.
    """
    x = part_at(x, hook.leaf, hook.options.who, hook.label)
    if hook.options.edit:
        return _begin_edit(hook, module, x)
    if is_compiling():
        hook.traced = True
        if not is_exporting():
            # Private: `torch._dynamo.graph_break` ends the traced graph here (since 2.0; `msg` in
            # 2.11). Without it the hook on the gradient would be traced, which fails where it
            # writes into a Python object. There is no public function for it and no fallback.
            torch._dynamo.graph_break(msg=_IN_PYTHON)
        return receiver(ref(hook), Grads(0, len(leaves(x))))
    again = graph_task() != -1
    if not again and not counts(hook, module):
        return None
    if _is_traced(hook):  # the hook would not be in the traced graph, but the alias for it would
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
        without = "frozen" if torch.is_grad_enabled() else "no_grad"
        hook.missed = without if found else "no_tensor"
        hook.waiting.append(grads)
        return None
    return receiver(ref(hook), grads)


def receiver(hook: ref[Capture], grads: Grads) -> Receive:
    """The function that stores each gradient in `grads`.

    It holds the hook weakly: the autograd graph holds this function, and Python's garbage collector
    finds no reference cycle that goes through the graph.
    """

    def receive(i: int, grad: Tensor) -> None:
        h = hook()
        if h is None or h.removed:
            return
        if grads.task != graph_task():
            grads.task, grads.kept, grads.whole = graph_task(), [None] * len(grads.kept), False
        grads.kept[i] = Snapshotter(h.options).keep(grad)
        if not isinstance(h.last, Grads) or h.last.index <= grads.index:
            h.last = grads

    return receive


def _begin_edit(hook: Capture, module: nn.Module, x: Any) -> Receive | None:
    """As `begin`, for an edit: the function that is returned replaces the gradients it gets."""
    if is_compiling():  # noted here, since a compiled hook on a gradient cannot set an attribute
        hook.traced = True
        return _editor(ref(hook), ref(module))
    if not counts(hook, module):
        return None
    if is_tracing():
        raise HookError(
            f"{hook.options.who} on {hook.label()}: torch.jit.trace keeps no hooks on gradients, "
            "so the edit would not be in the traced model. Trace the model outside of the edit."
        )
    hook.missed = "no_gradient" if leaves(x) else "no_tensor"
    return _editor(ref(hook), ref(module))


def _editor(hook: ref[Capture], module: ref[nn.Module]) -> Receive:
    """The function that replaces each gradient by what the user's function returns for it."""

    def receive(i: int, grad: Tensor) -> Tensor | None:
        h, m = hook(), module()
        if h is None or m is None or h.removed:  # the block ended before the backward pass
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
