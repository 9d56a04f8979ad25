"""Gradients of what a module gives or takes, by tensor hooks that are set while the forward runs.

PyTorch's module backward hooks refuse in-place operations and see no dicts; a hook on the tensor
itself is right on all of them. Its gradient is autograd's: that of all uses of the tensor, as
`retain_grad()` gives it. Only a tensor that the module was given, a leaf, or one that it gives
twice is handed on as a view, which has uses of its own. What holds the receiving function is the
autograd graph, so it must not hold the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.nested import Inputs, leaves, parts_of, tmap

Receive = Callable[[int, Tensor], Any]
"""`receive(i, grad)` gets the gradient of leaf `i`; what it returns, unless None, replaces it."""


def listen_output(
    module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any, receive: Receive
) -> Any:
    """Has `receive` called for each leaf of `output`; called in a forward hook.

    Returns:
        What the hook has to return: None, or the output with views in the place of some tensors.
    """
    if not torch.is_grad_enabled():
        return None
    # Private: `Tensor._base`, see `snapshot`. A Linear on three dimensions gives a view of its
    # matrix product, and the next in-place operation would take that from the hook.
    if type(module) is nn.Linear and type(output) is Tensor and not torch.compiler.is_compiling():
        base = output._base
        own = base is not None and base.requires_grad and base.numel() == output.numel()
        if own and not any(base is x or base is getattr(x, "_base", None) for x in args):
            base.register_hook(partial(_reshaped, receive, output.shape))  # type: ignore
            return None
    users = [*args, *kwargs.values()]
    free = _free(output, lambda x: any(x is given for given in users))
    new = _listen(output, (args, kwargs), receive, free)
    return None if new is output else new


def listen_inputs(module: nn.Module, inputs: Inputs, part: Any, receive: Receive) -> Any:
    """Has `receive` called for each leaf of `part`, of the inputs; called in a forward-pre hook.

    Returns:
        `part`, each tensor as a view of its own. As they are: of a module that works in place, and
        what is in a list or a dict, which the module may change for its caller.
    """
    given = () if getattr(module, "inplace", False) else inputs
    may_change = isinstance(module, nn.Module)  # torch's functions change none
    return _listen(part, given, receive, _free(part, lambda x: may_change))


def _free(x: Any, is_users: Callable[[Any], bool]) -> list[bool]:
    """For each leaf of `x` whether it can be exchanged: it is in no list or dict of the user's."""
    if isinstance(x, Tensor):
        return [True]
    if isinstance(x, tuple) or not is_users(x):
        return [free for _, part in parts_of(x) for free in _free(part, is_users)]
    return [False] * len(leaves(x))


def _listen(x: Any, given: Any, receive: Receive, free: list[bool]) -> Any:
    """`x` with a hook on each tensor; views where it is among `given`, a leaf, or there twice.

    Only those that are `free` are exchanged.
    """
    # by identity, as a graph of torch.compile would be guarded by ids
    others = [*leaves(x), *leaves(given)]
    numbers = iter(range(len(leaves(x))))

    def one(t: Tensor) -> Tensor:
        i = next(numbers)
        if not t.requires_grad:
            return t
        if free[i] and (t.is_leaf or sum([t is other for other in others]) > 1):
            t = t.view_as(t) if t.layout is torch.strided and not t.is_nested else t
        t.register_hook(partial(receive, i))  # type: ignore[no-untyped-call]
        return t

    return tmap(one, x)


def _reshaped(receive: Receive, shape: torch.Size, grad: Tensor) -> Any:
    new = receive(0, grad.reshape(shape))
    return None if new is None else new.reshape(grad.shape)
