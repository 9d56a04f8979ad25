"""Gradients of outputs and inputs, by tensor hooks that are set while the forward runs.

PyTorch's backward hooks of modules refuse in-place operations and see no dicts; a hook on the
tensor itself is right in these cases too. It receives the gradient of all uses of the tensor, as
`retain_grad()` does. Some tensors are used elsewhere too: an input that the module returns, a
parameter, a tensor that is returned twice. In place of such a tensor the hook returns a view, which
has a gradient of its own.

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
        edits: the results of `receive` replace the gradients.

    Returns:
        The result of the hook: None, or the output with views in place of some tensors.
    """
    if not torch.is_grad_enabled():
        return None
    users = [*args, *kwargs.values()]
    free = _exchangeable(output, lambda x: any(x is user for user in users))
    new = _listen(output, (args, kwargs), receive, free, partial(_base_of, module, edits))
    return None if new is output else new


def listen_inputs(module: nn.Module, inputs: Inputs, part: Any, receive: Receive) -> Any:
    """Call `receive` with the gradient of each tensor in `part`, of the inputs; in a pre-hook.

    Returns:
        `part`, each tensor as a view of its own. Not exchanged are the tensors of a module that
        works in place, and those in a list or dict, which the module may change for its caller.
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
    """Return `x` with a hook on each tensor, and views of those without a gradient of their own.

    Args:
        others: structure of tensors; one that is also in `x` gets a view.
        free: for each tensor whether it can be exchanged.
        base_of: returns the tensor that also has to be hooked, or None.
    """
    # by identity, as a graph of torch.compile would be guarded by ids
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
    """Return for each tensor in `x` whether a view may replace it: not in a user's list or dict.

    Args:
        is_users: returns True for a list, a dict or an object that belongs to the caller.
    """
    if isinstance(x, Tensor):
        return [True]
    if isinstance(x, tuple) or not is_users(x):
        return [free for _, part in tree_children(x) for free in _exchangeable(part, is_users)]
    return [False] * len(tree_leaves(x))


def _base_of(module: nn.Module, edits: bool, t: Tensor) -> Tensor | None:
    """Return the tensor that gets the gradient of the output `t` if `t` is written in place."""
    if torch.compiler.is_compiling() or t.layout is not torch.strided or t.is_nested:
        return None
    # Private: `Tensor._base`, the tensor that a view is of (since before 2.0). There is no public
    # name; without it a view that is written in place has no gradient.
    base = t._base
    if base is None or base.grad_fn is None:
        return None
    # A Linear on three dimensions gives a view of its matrix product, which has no other use.
    if type(module) is nn.Linear and base.numel() == t.numel():
        return base if base.is_contiguous() and t.is_contiguous() else None
    # The same tensor once more, as handed on here or by a hook on a module inside. It may have
    # other uses, whose gradient an edit must not change.
    same = base.shape == t.shape and base.stride() == t.stride()
    made: Any = t.grad_fn
    direct = same and any(node is base.grad_fn for node, _ in made.next_functions)
    return base if direct and not edits else None


def _listen_to_both(t: Tensor, base: Tensor, receive: Callable[[Tensor], Any]) -> None:
    """Call `receive` with the gradient of `t`, a view of `base`; if none arrives, that of `base`.

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
