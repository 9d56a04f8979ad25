"""`untouched`: a block that runs a model and leaves it, and the process, as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hookkit.hooks.entries import HookEntry
from hookkit.interrupts import block
from hookkit.modelinfo.tree import Tree

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@block
def untouched(model: nn.Module | Tree, *, observers: bool = False) -> Iterator[None]:
    """Restores at the end what a forward may change.

    That are modes, attributes (one level deep: a list that grew shrinks again), hooks, buffers and
    other tensors in attributes, and the random states of PyTorch, Python and NumPy; parameters are
    not. hookkit's own hooks that only observe are off, unless `observers`. Cost: a clone of each
    buffer and tensor in an attribute.
    """
    tree = model if isinstance(model, Tree) else Tree(model)
    modules = [(m, type(m), {**vars(m)}) for m in (*tree.wrappers, *tree.modules)]
    held = [v for *_, own in modules for v in own.values()]
    contents = [(v, v.copy()) for v in held if isinstance(v, dict | list | set)]
    own = {id(p) for _, p in tree.params}
    lazy = [(t, type(t), t.data) for t in tree.tensors if nn.parameter.is_lazy(t)]
    tensors = [t for t in (*tree.tensors, *held) if isinstance(t, Tensor)]
    saved = [
        (t, t.detach().clone())
        for t in tensors
        if id(t) not in own and not (nn.parameter.is_lazy(t) or t.is_inference())
    ]
    modes = [(m, m.training) for m in tree.scripted]
    grad, numpy = torch.is_grad_enabled(), sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    cuda = torch.cuda.is_initialized()
    try:
        with torch.random.fork_rng(enabled=True, devices=None if cuda else []):
            if not observers:
                _without_observers(tree)
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        torch.set_grad_enabled(grad)
        for m, kind, attributes in modules:
            m.__class__ = kind
            m.__dict__.clear()
            m.__dict__.update(attributes)
        for container, inside in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(inside)
        for m, mode in modes:
            m.training = mode
        for t, kind, empty in lazy:
            t.data, t.__class__, t.grad = empty, kind, None
        with torch.no_grad():
            for t, content in saved:
                if t.is_meta or t.layout is not torch.strided or not torch.equal(t, content):
                    t.copy_(content)


def _without_observers(tree: Tree) -> None:
    for m in tree.modules:
        for name in _HOOKS:
            hooks = vars(m).get(name) or {}
            for key in [
                k for k, h in hooks.items() if isinstance(h, HookEntry) and h.for_copy() is None
            ]:
                del hooks[key]
