"""Softmaxes inside a model whose weights sum to 1 over another dimension than they are added up.

Builds on `autograd_graph`. Attention multiplies its weights by values and adds the products up, by
a matrix product or a sum. The weights have to sum to 1 over that dimension, the keys. A softmax
over another one shares them among queries, heads or samples. The dimension is followed from the
softmax to the product, through the operations that only change a tensor's shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from hookkit.autograd_graph import (
    first_input,
    graph_nodes,
    op_name,
    saved,
    shape_of,
    softmax_dim,
    takes_one,
)

_VIEWS = frozenset(("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"))
_COPIES = frozenset(("Clone", "ToCopy", "NativeDropout"))


class Place(NamedTuple):
    """A result of the graph that holds a softmax's weights.

    Args:
        node: what gives it.
        dim: the dimension over which the weights sum to 1, or one that this became a part of.
        turned: dimensions have changed places since the softmax.
    """

    node: Any
    dim: int
    turned: bool


def wrong_softmaxes(output: Any) -> list[str]:
    """In words, each softmax that is not over the dimension in which its weights are added up.

    Found are those over queries (rows of a matrix that, as it is, is the left side of a product),
    heads (one of several square matrices) and samples (dimension 0). Others may be meant: shares of
    clusters or capsules, of which each adds up its own. So may weights that are divided again.

    Cost: one walk through the graph, on the host alone; nothing is kept.

    >>> import torch
    >>> x = torch.ones(2, 3, 4, requires_grad=True)
    >>> wrong_softmaxes((x @ x.mT).softmax(-1) @ x), wrong_softmaxes((x @ x.mT).softmax(-2) @ x)
    ([], ['over dimension 1 of (2, 3, 3)'])
    >>> wrong_softmaxes((x @ x.mT).softmax(0) @ x)
    ['over dimension 0 of (2, 3, 3)']
    """
    users: dict[Any, list[Any]] = {}
    for node, inputs in graph_nodes(output):
        users.setdefault(node, [])
        for before in inputs:
            users.setdefault(before, []).append(node)
    found = []
    for node in users:
        shape, dim = shape_of(node), _normalised(node)
        if dim is None or len(shape) < 2 or shape[dim] < 2:
            continue
        if any(_is_wrong(users, place, user, dim) for place, user in _uses(users, node, dim)):
            found.append(f"over dimension {dim} of {shape}")
    return found


def _normalised(node: Any) -> int | None:
    """The dimension of a softmax, PyTorch's or exponentials divided by their sum; else None."""
    n = len(shape_of(node))
    dim: Any = softmax_dim(node) if op_name(node) == "Softmax" else None
    if op_name(node) == "Div" and op_name(first_input(node)) == "Exp":
        total = node.next_functions[1][0]
        if op_name(total) == "Sum" and first_input(total) is first_input(node):
            dims = saved(total, "dim")
            dim = dims[0] if isinstance(dims, tuple) and len(dims) == 1 else None
    return None if dim is None or not n else dim % n


def _uses(users: dict[Any, list[Any]], node: Any, dim: int) -> Iterator[tuple[Place, Any]]:
    """Each operation that does more with the weights than change their shape."""
    todo = [Place(node, dim, False)]
    while todo:
        place = todo.pop()
        for user in users[place.node]:
            dim_there = _moved(place, user)
            if dim_there is None:
                yield place, user
            else:
                turned = place.turned or op_name(user) in ("Transpose", "Permute", "T")
                todo.append(Place(user, dim_there, turned))


def _moved(place: Place, user: Any) -> int | None:
    """Where `place.dim` is in the result of `user`; None if that is no change of shape."""
    name, before, after = op_name(user), shape_of(place.node), shape_of(user)
    by_mask = name == "Mul" and takes_one(user)  # dropout, on a CPU
    if (by_mask or name in _COPIES) and before == after:
        return place.dim
    if name == "Expand":
        return place.dim + len(after) - len(before)
    if name in ("T", "Transpose"):
        ends = (saved(user, "dim0"), saved(user, "dim1")) if name == "Transpose" else (0, 1)
        pair = [d % len(before) for d in ends if isinstance(d, int)]
        return pair[1 - pair.index(place.dim)] if place.dim in pair else place.dim
    if name == "Permute":
        dims = saved(user, "dims")
        return [d % len(before) for d in dims].index(place.dim) if dims else None
    return _in_view(before, after, place.dim) if name in _VIEWS else None


def _in_view(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """The dimension of a view that is, or contains, dimension `dim` of what is viewed."""
    low, high = prod(before[dim + 1 :]), prod(before[dim:])
    for i, size in enumerate(after):
        rest = prod(after[i + 1 :])
        if size > 1 and rest <= low and high <= rest * size:
            return i
    return None


def _is_wrong(users: dict[Any, list[Any]], place: Place, user: Any, dim: int) -> bool:
    """Whether `user` multiplies the weights by values and adds up over another dimension.

    `dim` is that of the softmax itself.
    """
    shape, name = shape_of(place.node), op_name(user)
    if name == "Mul" and not takes_one(user):
        whole = len(shape_of(user))
        sums = [u for u in users[user] if op_name(u) == "Sum"]
        over = [saved(u, "dim") for u in sums]
        at = place.dim + whole - len(shape)
        other = [d for d in over if isinstance(d, tuple) and at not in {i % whole for i in d}]
        return dim == at == 0 and whole > 2 and len(sums) == len(users[user]) == len(other) > 0
    if name not in ("Bmm", "Mm"):
        return False
    left = first_input(user) is place.node
    rows, keys = (len(shape) - 2, len(shape) - 1)[:: 1 if left else -1]
    if place.dim == rows:
        return left and not place.turned
    return place.dim != keys and (dim == 0 or shape[-1] == shape[-2] > 1)
