"""The part of a value that is meant, whether a replacement fits it, and what receives gradients."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.hooks.attach import graph_task
from hookkit.hooks.grads import Receive
from hookkit.hooks.snapshot import store
from hookkit.nested import Inputs, describe, named_leaves, pick


def part_at(x: Any, path: str, who: str, label: Any) -> Any:
    """The part of `x` at `path`, such as `[0]`; all of it without a path. Or it raises `HookError`.

    >>> part_at({"a": (1, 2)}, "['a'][1]", "Hook", "Linear")
    2
    """
    try:
        return pick(x, path)
    except (LookupError, AttributeError, TypeError, ValueError):
        paths = ", ".join([p for p, _ in named_leaves(x) if p][:6])
        raise HookError(
            f"{who}: {label() if callable(label) else label} has nothing at {path}; there is "
            f"{describe(x)}. Select a path that is there: {paths or 'it needs none'}."
        ) from None


def check_same(who: str, label: str, old: Any, new: Any) -> None:
    """Raises unless `new`, the replacement of `old`, has its tensors at the same places."""
    paths = [path for path, _ in named_leaves(old)]
    same = type(old) is type(new) or (isinstance(old, Tensor) and isinstance(new, Tensor))
    if paths and not (same and paths == [path for path, _ in named_leaves(new)]):
        raise HookError(
            f"{who} on {label}: the replacement is {_described(new)}, the layer gave "
            f"{_described(old)}. Return the same structure, or None to leave it."
        )


def _described(x: Any) -> str:
    name, text = type(x).__name__, describe(x)
    return text if isinstance(x, Tensor) or text.startswith(name) else f"{name} {text}"


def positional(who: str, label: str, inputs: Inputs, new: Any) -> tuple[Any, ...]:
    """The positional inputs that `new` stands for; raises unless there are as many of them."""
    values = new if isinstance(new, tuple) else (new,)
    if len(values) != len(inputs):
        raise HookError(
            f"{who} on {label}: {len(values)} positional inputs were returned, the layer was "
            f"called with {describe(inputs)}. Return as many, or Inputs(args, kwargs) for all."
        )
    return values


# The graph holds these functions, so they hold the hook weakly: Python's garbage collector finds
# no reference cycle that goes through the graph.


def stores_grads(hook: ref[Any], n: int, call: int) -> Receive:
    """What stores the gradients of the `n` leaves of one call, the `call`-th of its hook.

    Of several calls `last` is the last one's. A new backward pass begins anew.
    """
    task, grads = -1, list[Tensor | None]()

    def receive(i: int, grad: Tensor) -> None:
        nonlocal task, grads
        h = hook()
        if h is None or not h.registered or not h.switch.on:
            return
        if not grads or task != graph_task():
            task, grads = graph_task(), [None] * n
        grads[i] = store(grad, h.switch)
        if call >= h.version:
            h.last, h.version = tuple(grads), call
        if h.all is not None:
            h.all[call - 1] = tuple(grads)

    return receive


def edits_grad(hook: ref[Any], module: ref[nn.Module]) -> Receive:
    """What replaces each gradient by what the user's function returns for it."""

    def receive(i: int, grad: Tensor) -> Tensor | None:
        h, m = hook(), module()
        if h is None or m is None or not h.registered or not h.switch.on:
            return None
        new: Any = h._call(m, grad)
        if not torch.compiler.is_compiling():
            h.n_calls += 1
        if new is not None and (not isinstance(new, Tensor) or new.shape != grad.shape):
            raise HookError(
                f"{h.switch.who} on {h.label}: the replacement is {_described(new)}, the gradient "
                f"is {describe(grad)}. Return a tensor of that shape, or None."
            )
        return new

    return receive
