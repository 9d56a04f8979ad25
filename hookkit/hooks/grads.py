"""Receive the gradients of outputs and inputs, by tensor hooks that are set in the forward.

PyTorch's backward hooks of modules refuse in-place operations and see no dicts; a hook on the
tensor itself handles both. It receives the gradient of all uses of the tensor, as `retain_grad()`
does. But some tensors have other uses too: an input that the module returns, a parameter, a tensor
that is returned twice. The hook replaces such a tensor by a view, which has its own gradient.

The autograd graph keeps `receive` alive, so `receive` must not reference tensors of the graph, or
nothing is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookkit._core.pytree import Inputs, tree_children, tree_leaves, tree_map

Receive = Callable[[int, Tensor], Any]
"""`receive(i, grad)` gets the gradient of tensor `i`; its result, unless None, replaces it."""


def listen_output(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Any,
    output: Any,
    receive: Receive,
    edits: bool = False,
) -> Any:
    """Call `receive` with the gradient of each tensor in `output`; for use in a forward hook.

    Args:
        edits: whether the results of `receive` replace the gradients.

    Returns:
        What the forward hook has to return: None, or the output with views for some tensors.
    """
    if not torch.is_grad_enabled():
        return None
    users = [*args, *kwargs.values()]
    free = _exchangeable(output, lambda x: any(x is user for user in users))
    new = _listen(output, (args, kwargs), receive, free, partial(_base_of, module, edits))
    return None if new is output else new


def listen_inputs(module: nn.Module, inputs: Inputs, part: Any, receive: Receive) -> Any:
    """Call `receive` with the gradient of each tensor in `part` of the inputs; for a pre-hook.

    Returns:
        `part` with a view for each tensor. The tensors of a module that works in place are not
        replaced, nor those in a list or dict, which the module may change for its caller.
    """
    others = () if getattr(module, "inplace", False) else inputs
    may_change = isinstance(module, nn.Module)  # torch's functions change none
    return _listen(part, others, receive, _exchangeable(part, lambda x: may_change))


def _listen(
    x: Any,
    others: Any,
    receive: Receive,
    free: list[bool],
    base_of: Callable[[Tensor], Tensor | None] = lambda t: None,
) -> Any:
    """Hook each tensor of `x`; return `x` with views for tensors that have other uses too.

    Args:
        others: structure of tensors; a tensor that is also in `x` is replaced by a view.
        free: for each tensor of `x` whether a view may replace it.
        base_of: returns the tensor that also has to be hooked, or None.
    """
    # compared with `is`: a set of ids would make torch.compile guard its graph by the ids
    own, known = tree_leaves(x), tree_leaves(others)
    numbers = iter(range(len(own)))

    def one(t: Tensor) -> Tensor:
        i = next(numbers)
        if not t.requires_grad:
            return t
        if free[i] and (t.is_leaf or sum([t is other for other in (*own, *known)]) > 1):
            t = t.view_as(t) if t.layout is torch.strided and not t.is_nested else t
        base = base_of(t)
        if base is None or any(base is other for j, other in enumerate(own) if j != i):
            t.register_hook(partial(receive, i))  # type: ignore[no-untyped-call]
        else:
            _listen_to_both(t, base, partial(receive, i))
        return t

    return tree_map(one, x)


def _exchangeable(x: Any, is_users: Callable[[Any], bool]) -> list[bool]:
    """Return for each tensor in `x` whether a view may replace it: not in the caller's containers.

    Args:
        is_users: returns True for a list, a dict or an object that belongs to the caller.
    """
    if isinstance(x, Tensor):
        return [True]
    if isinstance(x, tuple) or not is_users(x):
        return [free for _, part in tree_children(x) for free in _exchangeable(part, is_users)]
    return [False] * len(tree_leaves(x))


def _base_of(module: nn.Module, edits: bool, t: Tensor) -> Tensor | None:
    """Return the base of view `t` whose gradient counts after an in-place write to `t`, or None."""
    if torch.compiler.is_compiling() or t.layout is not torch.strided or t.is_nested:
        return None
    # Private: `Tensor._base`, the tensor that a view is of (since before 2.0). There is no public
    # name; without it a view that is written in place has no gradient.
    base = t._base
    if base is None or base.grad_fn is None:
        return None
    # A Linear on three dimensions returns a view of its matrix product, which has no other use.
    if type(module) is nn.Linear and base.numel() == t.numel():
        return base if base.is_contiguous() and t.is_contiguous() else None
    # `t` may be a view that this file, or a hook on a module inside, has put in place of `base`.
    # `base` may have other uses, whose gradient an edit must not change.
    same = base.shape == t.shape and base.stride() == t.stride()
    made: Any = t.grad_fn
    direct = same and any(node is base.grad_fn for node, _ in made.next_functions)
    return base if direct and not edits else None


def _listen_to_both(t: Tensor, base: Tensor, receive: Callable[[Tensor], Any]) -> None:
    """Call `receive` with the gradient of `t`, a view of `base`; if none arrives, with `base`'s.

    An in-place operation on a view takes its hooks out of the graph, and leaves those of its base.
    """
    arrived, shape = False, t.shape

    def at_view(grad: Tensor) -> Any:
        nonlocal arrived
        arrived = True
        return receive(grad)

    def at_base(grad: Tensor) -> Any:
        new = None if arrived else receive(grad.reshape(shape))
        return None if new is None else new.reshape(grad.shape)

    t.register_hook(at_view)  # type: ignore[no-untyped-call]
    base.register_hook(at_base)  # type: ignore[no-untyped-call]
