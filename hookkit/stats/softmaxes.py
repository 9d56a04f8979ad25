"""Softmaxes inside a model whose weights sum to 1 over another dimension than they are added up.

Builds on `autograd_graph`. Attention multiplies its weights by values, in a matrix product that
adds up over the keys, and the weights have to sum to 1 over the keys. A softmax over another
dimension shares them among queries, heads or samples. The dimension is followed from the softmax to
the product, through dropout, casts, views and expansions; beyond any other operation nothing is
said.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from hookkit.autograd_graph import first_input, op_name, shape_of, softmax_dim, takes_one

_VIEWS = frozenset(("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"))
_COPIES = frozenset(("Clone", "ToCopy", "NativeDropout"))

Users = dict[Any, list[Any]]


def wrong_softmaxes(users: Users) -> list[str]:
    """In words, each softmax that is not over the dimension in which its weights are added up.

    Found are those over queries (rows of a matrix that, as it is, is the left side of a product),
    heads (one of several square matrices) and samples (dimension 0). Others may be meant: shares of
    clusters or capsules, of which each adds up its own. So may weights that are divided again.

    Args:
        users: of the model's output, see `users_of`.

    >>> import torch
    >>> from hookkit.autograd_graph import users_of
    >>> x = torch.ones(2, 3, 4, requires_grad=True)
    >>> wrong_softmaxes(users_of((x @ x.mT).softmax(-1) @ x))
    []
    >>> wrong_softmaxes(users_of((x @ x.mT).softmax(-2) @ x))
    ['over dimension 1 of (2, 3, 3)']
    """
    found = []
    for node in users:
        shape, dim = shape_of(node), softmax_dim(node) if op_name(node) == "Softmax" else None
        if dim is None or len(shape) < 2 or shape[dim] < 2:
            continue
        dim %= len(shape)
        if any(_is_wrong(of, at, user, dim) for of, at, user in _uses(users, node, dim)):
            found.append(f"over dimension {dim} of {shape}")
    return found


def _uses(users: Users, node: Any, dim: int) -> Iterator[tuple[Any, int, Any]]:
    """Each operation that does more with the weights than change their shape.

    With the node whose result it takes, and the dimension of that which `dim` has become.
    """
    todo = [(node, dim)]
    while todo:
        place, at = todo.pop()
        for user in users[place]:
            moved = _moved(place, at, user)
            if moved is None:
                yield place, at, user
            else:
                todo.append((user, moved))


def _moved(place: Any, dim: int, user: Any) -> int | None:
    """Where `dim` is in the result of `user`; None if that does more than change the shape."""
    name, before, after = op_name(user), shape_of(place), shape_of(user)
    by_mask = name == "Mul" and takes_one(user)  # dropout, on a CPU
    if (by_mask or name in _COPIES) and before == after:
        return dim
    if name == "Expand":
        return dim + len(after) - len(before)
    if name not in _VIEWS:
        return None
    low, high = prod(before[dim + 1 :]), prod(before[dim:])
    for i, size in enumerate(after):
        rest = prod(after[i + 1 :])
        if size > 1 and rest <= low and high <= rest * size:  # it is, or contains, `dim`
            return i
    return None


def _is_wrong(place: Any, at: int, user: Any, dim: int) -> bool:
    """Whether `user` adds up the weights that `place` gives over another dimension than `at`.

    `dim` is that of the softmax itself.
    """
    shape = shape_of(place)
    if op_name(user) not in ("Bmm", "Mm"):
        return False
    left = first_input(user) is place
    rows, keys = (len(shape) - 2, len(shape) - 1)[:: 1 if left else -1]
    if at == rows:
        return left
    return at != keys and (dim == 0 or shape[-1] == shape[-2] > 1)
