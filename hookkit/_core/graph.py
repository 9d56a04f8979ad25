"""Walk the autograd graph behind a tensor: its nodes, each once, and their names.

A node (`t.grad_fn`) has the nodes whose results it takes in `next_functions`. A node without any
stands for a parameter or another leaf, its `variable`. Nothing here computes a tensor or keeps one
alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hookkit._core.pytree import tree_leaves

SAME_ORDER = frozenset(
    ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "ToCopy")
)
"""Operations whose result holds the values of their input, in the same order."""

SAME_VALUES = SAME_ORDER | {"Transpose", "T", "Permute"}
"""The same in any order."""

PARTS = frozenset(
    (
        *("Alias", "Slice", "Select", "Split", "SplitWithSizes", "Chunk", "Unbind", "Narrow"),
        *("Expand", "Index", "IndexSelect", "Gather", "MaskedSelect"),
    )
)
"""Operations whose result holds some of the values of their input, or repeats them."""


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes whose results `node` takes."""
    return [before for before, _ in node.next_functions if before is not None]


def walk(
    nodes: Iterable[Any],
    through: Callable[[Any], bool] = lambda node: True,
    after: Callable[[Any], list[Any]] = inputs_of,
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each node that is reached from `nodes`, once, with the nodes that come after it.

    Args:
        nodes: where the walk begins; they are yielded too.
        through: whether the walk goes on after a node.
        after: the next nodes; by default back through the graph, towards the parameters.
    """
    todo = list(dict.fromkeys(nodes))
    reached = set(todo)
    while todo:
        node = todo.pop()
        following = after(node)
        yield node, following
        new = [x for x in dict.fromkeys(following) if x not in reached] if through(node) else []
        reached.update(new)
        todo += new


def graph_nodes(x: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield `(node, the nodes whose results it takes)` of all that made the tensors in `x`.

    Args:
        x: any structure of tensors; those without a `grad_fn` have no graph.

    Cost: one step per node, on the host alone. Do not rely on the order.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> [op_name(node) for node, _ in graph_nodes({"loss": (w * 3).relu().sum()})]
    ['Sum', 'Relu', 'Mul', 'AccumulateGrad']
    """
    return walk(t.grad_fn for t in tree_leaves(x) if t.grad_fn is not None)


def users_of(x: Any) -> dict[Any, list[Any]]:
    """Return, for each node of the graph that made `x`, the nodes that take its result.

    >>> import torch
    >>> users = users_of((torch.ones(2, requires_grad=True) * 3).relu())
    >>> {op_name(node): [op_name(user) for user in by] for node, by in users.items()}
    {'Relu': [], 'Mul': ['Relu'], 'AccumulateGrad': ['Mul']}
    """
    users: dict[Any, list[Any]] = {}
    for node, inputs in graph_nodes(x):
        users.setdefault(node, [])
        for before in inputs:
            users.setdefault(before, []).append(node)
    return users


def op_name(node: Any) -> str:
    """Return the operation of a node: `"Relu"` for a `ReluBackward0`.

    >>> import torch
    >>> op_name(torch.ones(2, requires_grad=True).relu().grad_fn), op_name(None)
    ('Relu', 'NoneType')
    """
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def first_input(node: Any) -> Any:
    """Return the node whose result `node` takes first; None if that needs no gradient."""
    return node.next_functions[0][0] if node.next_functions else None


def only_input(node: Any) -> Any:
    """Return the only node whose result `node` takes; None if there are several or none."""
    inputs = inputs_of(node)
    return inputs[0] if len(inputs) == 1 else None


def source(node: Any, through: Callable[[Any], bool]) -> Any:
    """Return the nearest node before `node`, by first inputs, that the walk cannot pass."""
    for _ in range(8):
        node = first_input(node)
        if node is None or not through(node):
            return node
    return None


def saved(node: Any, name: str) -> Any:
    """Return an argument that an operation was called with, with its sign; None if not known.

    >>> import torch
    >>> saved(torch.ones(2, 3, requires_grad=True).sum(-1).grad_fn, "dim")
    (-1,)
    """
    # Private: `_saved_NAME`, where autograd keeps what it needs (since 1.9): dimensions, as
    # unsigned numbers. Tensors among them are freed by backward() and never read here. Without
    # them each caller takes the usual case.
    value = getattr(node, f"_saved_{name}", None)
    if isinstance(value, tuple):
        return tuple(v - (1 << 64) if v >> 63 else v for v in value)
    return value - (1 << 64) if isinstance(value, int) and value >> 63 else value


def softmax_dim(node: Any) -> int | None:
    """Return the dimension of a softmax, or log softmax, as it was given; None if not known."""
    dim = saved(node, "dim") if "Softmax" in op_name(node) else None
    return dim if isinstance(dim, int) else None


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's first result; () if it is a number, or not known.

    >>> import torch
    >>> shape_of(torch.ones(2, 3, requires_grad=True).relu().grad_fn)
    (2, 3)
    """
    # Private: `_input_metadata`, the sizes of the gradients that a node takes (since 2.1), which
    # are those of its results; it outlives backward(). Without it shapes are not known.
    known = getattr(node, "_input_metadata", ())
    try:
        shape = getattr(known[0], "shape", ()) if known else ()
    except RuntimeError:  # a strided nested tensor has none
        return ()
    return tuple(n for n in shape if isinstance(n, int))
