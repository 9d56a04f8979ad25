"""A model on fake tensors, which have shapes and no values: its copy, and the cleaning up.

Builds on `sandbox` for copies. Two things a fake run needs that PyTorch does not give:

- Copies that are cheap and keep ties (`fake_copy`, `fake_inputs`).
- A mask behind `lru_cache`, a global dict, an attribute of a class: a forward may keep tensors
  there, and the next real forward would meet fake ones. `cleaned_up` takes them out.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.interrupts import block
from hookkit.modelinfo.flops import SPARSE
from hookkit.modelinfo.hook_copies import HookCopies, content_of, tables_of
from hookkit.modelinfo.sandbox import copied_inputs, copy_memo, deep_copy
from hookkit.modelinfo.tree import Tree
from hookkit.nested import Inputs, leaves

# Private, in torch 2.11 to 2.13: fake tensors have no public home, and real tensors can be read in
# the middle of a fake run only with the modes off; a kernel takes fake tensors for tensors on meta
# inside `in_kernel_invocation_manager`. Without them every run is real.
try:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import (
        in_kernel_invocation_manager as in_kernel_invocation_manager,
    )
    from torch.utils._python_dispatch import _disable_current_modes as _disable_current_modes
except ImportError:  # pragma: no cover
    FakeCopyMode = FakeTensor = FakeTensorMode = None  # type: ignore[assignment, misc, unused-ignore]
    in_kernel_invocation_manager = _disable_current_modes = None  # type: ignore[assignment, unused-ignore]


# --- copies


def new_mode() -> Any:
    """A mode in which tensors are fake; None where torch has none."""
    return None if FakeTensorMode is None else FakeTensorMode(allow_non_fake_inputs=True)


def has_sparse(tree: Tree, given: Inputs) -> bool:
    """True if a parameter, buffer or input is sparse: a fake one does not know its elements."""
    return any(t.layout in SPARSE for t in (*tree.tensors, *leaves(given)))


def fake_copy(tree: Tree, hooks: HookCopies, mode: Any, home: torch.device | None) -> nn.Module:
    """A deep copy of the model whose tensors are fake: shapes, dtypes and ties without values.

    Tensors on `meta` are taken to be on `home`, the device of the inputs.
    """
    with torch.no_grad():
        memo = copy_memo(tree, hooks)
        attributes = [v for m in tree.modules for v in vars(m).values() if isinstance(v, Tensor)]
        for t in (*tree.tensors, *(v for v in attributes if v.is_meta)):
            if id(t) not in memo and _is_plain(t):
                memo[id(t)] = _faked(t, mode, home)
        with FakeCopyMode(mode):
            made = deep_copy(tree.model, memo)
            hooks.put_on(memo)
            return made


def fake_inputs(given: Inputs, mode: Any) -> Inputs:
    """A deep copy of `given` with fake tensors: the forward may fill a cache among them."""

    def fake(t: Tensor) -> Any:
        return mode.from_tensor(t.detach().requires_grad_(t.requires_grad) if t.grad_fn else t)

    with FakeCopyMode(mode):
        return copied_inputs(given, fake)


def _is_plain(t: Tensor) -> bool:
    """True for ordinary dense tensors; torch's converter takes the others, ten times as slowly."""
    usual = type(t) in (Tensor, nn.Parameter, nn.Buffer) and t.layout is torch.strided
    return usual and not (t.is_quantized or t.is_nested or t.is_inference() or t.is_conj())


def _faked(t: Tensor, mode: Any, home: torch.device | None) -> Tensor:
    """What torch's converter makes of a plain tensor; it keeps no aliases."""
    elem = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    fake: Tensor = FakeTensor(mode, elem, home if home and t.is_meta else t.device)
    if isinstance(t, nn.Parameter):
        # Private, since torch 1.13: what makes a tensor of another class a Parameter. The public
        # constructor sets it on `detach()`, which takes half of the time of a copy.
        fake._is_param = True
        fake.requires_grad_(t.requires_grad)
    return fake


# --- fake tensors that a forward stored outside of the copy

_LEVELS = 6  # tensor, tuple, link of the cache, its table, the cache
_OF_NAMESPACES = ("__module__", "__name__")  # names in the dict of a class or a module
_Contents = dict[int, tuple[Any, Any]]  # by id: a list, dict or cell, and what it held


@block
def cleaned_up(
    tree: Tree, hooks: HookCopies, copied: nn.Module, made: list[weakref.ref[Tensor]]
) -> Iterator[None]:
    """Removes what is still alive of `made` at the end from caches and containers, not the copy's.

    Weak references show it: normally all have died with the run. For the others the garbage
    collector names the containers, one level after the other. What a fake tensor replaced in an
    attribute of the modules' classes, or where the user's hooks refer to, is restored.
    """
    kinds = {c for m in tree.modules for c in type(m).__mro__ if issubclass(c, nn.Module)}
    classes = {c: dict(vars(c)) for c in kinds if not c.__module__.startswith("torch.")}
    before = {
        id(x): (x, content_of(x) if isinstance(x, CellType) else copy.copy(x))
        for x in hooks.containers()
    }
    try:
        yield
    finally:
        _restore_classes(classes)
        if alive := [t for ref in made if (t := ref()) is not None]:
            ran = Tree(copied)
            own = {*map(id, ran.tensors)}
            lost: list[Any] = [t for t in alive if id(t) not in own]
            tables = {id(held) for m in ran.modules for held in tables_of(m)}
            _remove(lost, tables | {id(alive)}, before)


def _remove(lost: list[Any], seen: set[int], before: _Contents) -> None:
    """Takes `lost` out of what holds them, and of what holds that; not out of `seen`."""
    seen.add(id(lost))
    for _ in range(_LEVELS):
        if not lost:
            return  # the next line looks through all objects of the process
        above = [o for o in gc.get_referrers(*lost) if id(o) not in seen]
        seen |= {id(above), *map(id, above)}
        ids = {*map(id, lost)}
        lost = [o for o in above if not _emptied(o, ids, before)]
        seen.add(id(lost))


def _restore_classes(classes: dict[type, dict[str, Any]]) -> None:
    for kind, held in classes.items():
        for key in [k for k, v in vars(kind).items() if held.get(k) is not v]:
            if key in held:
                setattr(kind, key, held[key])
            elif isinstance(vars(kind)[key], Tensor):
                delattr(kind, key)


def _emptied(container: Any, lost: set[int], before: _Contents) -> bool:
    """Takes `lost` out of `container`; True if nothing that holds the container needs a look."""
    # from Python 3.13 on the collector names an object in place of its `__dict__`
    attributes = getattr(container, "__dict__", None)
    container = attributes if id(attributes) in before else container
    _, old = before.get(id(container), (None, None))
    if callable(clear := getattr(container, "cache_clear", None)):
        clear()
    elif type(container) is list:
        n = len(old or ())
        kept = [(i, v) for i, v in enumerate(container) if id(v) not in lost or i < n]
        container[:] = [old[i] if id(v) in lost else v for i, v in kept]
    elif isinstance(container, CellType) and id(container) in before:
        container.cell_contents = old
    else:
        is_dict = type(container) is dict
        if is_dict and (old is not None or container.keys().isdisjoint(_OF_NAMESPACES)):
            for key in [k for k, v in container.items() if id(v) in lost]:
                if old is not None and key in old:
                    container[key] = old[key]
                else:
                    del container[key]
        # a link of a cache, or its table, is looked at again
        kind = type(container)
        return not (issubclass(kind, tuple | dict) or "lru_list_elem" in kind.__name__)
    return True
