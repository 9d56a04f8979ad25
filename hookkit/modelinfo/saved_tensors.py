"""What autograd keeps for the backward pass: memory by storage, and which parameters it reaches.

Builds on nothing but `nested`. Used by `tracing` during a run, by `inventory` to count bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookkit.autograd_graph import graph_nodes
from hookkit.nested import leaves

# Private: the number that the next autograd node will get; without it all saved is detached.
_newest = getattr(torch._C._autograd, "_get_sequence_nr", None)


def storage_of(t: Tensor) -> tuple[Any, int]:
    """Identity and bytes of the memory behind `t`."""
    try:
        storage = t.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, nested, uninitialised
        return id(t), 0 if nn.parameter.is_lazy(t) else _stored(t)


def _stored(t: Tensor) -> int:
    if t.layout in (torch.sparse_coo,):
        return sum(p.numel() * p.element_size() for p in (t._indices(), t._values()))
    return int(t.numel() * t.element_size())


class Saved:
    """A tensor that autograd keeps for the backward pass; alive as long as autograd keeps it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def made_last(t: Tensor) -> bool:
    """True if `t` is the result of the newest autograd node.

    A node that keeps its own result keeps itself alive through it, for ever: it must be given a
    detached one. Detaching all that is saved would cost half a run on fake tensors.
    """
    node: Any = t.grad_fn
    return node is not None and (_newest is None or node._sequence_nr() + 1 == _newest())


def unused(model: nn.Module, out: Any) -> tuple[str, ...]:
    """Trainable parameters that no gradient of `out` reaches; none if that cannot be told."""
    reached = {id(t) for t in leaves(out)}
    has_graph = False
    for node, _ in graph_nodes(out):
        has_graph = True
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        elif "Checkpoint" in node.name():
            return ()  # what it recomputes is not in the graph yet
    names = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in reached]
    return tuple(names) if has_graph else ()
