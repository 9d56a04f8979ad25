"""Mistakes in a loss that the shapes of its operations show: the wrong dimension, n times n.

Builds on `autograd_graph`.
"""

from __future__ import annotations

from typing import Any

from hookkit.autograd_graph import (
    SAME_ORDER,
    behind,
    first_input,
    only_input,
    op_name,
    shape_of,
    softmax_dim,
)


def wrong_dim(loss: Any, name: str) -> str:
    """In words, if the softmax before a likelihood is not over the dimension of its classes."""
    for node in behind(loss):
        if op_name(node) == "LogSoftmax":
            shape, dim = shape_of(node), softmax_dim(node)
            if not shape or dim is None:
                return ""
            right = 1 if name == "NllLoss2D" else len(shape) - 1
            dim %= len(shape)
            return f"over dimension {dim} of {shape}" if dim != right else ""
        if op_name(node) not in SAME_ORDER:
            return ""  # dimensions may have changed places
    return ""


def outer(node: Any) -> tuple[tuple[int, ...], ...]:
    """Three shapes, of both operands and the result, if (n, 1, …) and (n, …) make (n, n, …).

    The second operand, the targets, needs no gradient. Where both do, as in a ranking loss, all
    pairs are meant.
    """
    before = only_input(node)
    expands = op_name(before) == "Expand"
    whole, before = (shape_of(before), first_input(before)) if expands else (shape_of(node), before)
    given = shape_of(before)
    n, rest = (given or (0,))[0], given[1:]
    other = (n, *rest[1:]) if rest[:1] == (1,) else (n, 1, *rest)
    pairs = (n, n, *(rest[1:] if rest[:1] == (1,) else rest))
    return (given, other, whole) if n > 1 and whole == pairs else ()
