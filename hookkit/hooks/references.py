"""Objects that hold tensors and are no container: stored as references, and watched for changes.

A hook copies the tensors in tuples, lists, dicts, dataclasses and deques. What else a module takes
and returns (a set, a KV cache, a distribution, any object) is stored as it is: a copy may take half
the memory of a GPU. So what is stored can change later, and is not detached; `warning_of` says when
that is so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from gc import get_referents
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor, nn

from hookkit import ranks
from hookkit.nested import PLAIN, is_container, parts_of

if TYPE_CHECKING:
    from hookkit.hooks.snapshot import Options

# These lead to tensors that are not part of a value: a module's parameters, a function's globals,
# a generator's local variables.
_NO_VALUE = (
    nn.Module,
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    CodeType,
    GeneratorType,
)
_MOST = 2000  # objects looked at: a cache of 80 layers has some 500


def tensors_held(x: Any) -> list[Tensor]:
    """The tensors that object `x` holds, in attributes, slots, items or containers inside.

    Found as Python's garbage collector finds them, so that none of the object's own code runs.

    >>> import torch
    >>> len(tensors_held({torch.ones(1), torch.ones(2)})), tensors_held(nn.Linear(2, 2))
    (2, [])
    """
    found, seen, queue = [], {id(x)}, deque([x])
    while queue and len(seen) < _MOST:
        for each in () if isinstance(queue[0], _NO_VALUE) else get_referents(queue[0]):
            if type(each) in PLAIN or id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, Tensor):
                found.append(each)
            else:
                queue.append(each)
        queue.popleft()
    return found


class Reference:
    """One object as it was when it was stored: the tensors in it, and their versions."""

    __slots__ = ("held", "path", "tensors")

    def __init__(self, path: str, held: Any) -> None:
        self.path, self.held = path, held
        self.tensors = [(ref(t), _version(t)) for t in tensors_held(held)]

    def faults(self, options: Options) -> list[str]:
        """What is not as it would be if this were a copy, in words; most often nothing."""
        now = tensors_held(self.held)
        same = [(weak() is t, v == _version(t)) for (weak, v), t in zip(self.tensors, now)]  # noqa: B905
        changed = len(now) != len(self.tensors) or not all(a and b for a, b in same)
        found = {
            "the model has changed it since": changed,
            "its tensors are not detached": options.detach and any(t.requires_grad for t in now),
            "its tensors are not moved": options.cpu and any(t.device.type != "cpu" for t in now),
            "its tensors have kept their dtype": options.dtype is not None
            and any(t.is_floating_point() and t.dtype != options.dtype for t in now),
            "it is this rank's own": options.gather and ranks.is_distributed() and bool(now),
        }
        return [fault for fault, is_so in found.items() if is_so]


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version  # private, see `snapshot`


def references(x: Any, path: str = "") -> list[Reference]:
    """The objects in structure `x` that are stored as references and can hold tensors."""
    if isinstance(x, Tensor) or type(x) in PLAIN or isinstance(x, _NO_VALUE):
        return []
    if is_container(x):
        return [found for key, part in parts_of(x) for found in references(part, path + key)]
    return [Reference(path, x)]


def warning_of(label: str, options: Options, kept: Sequence[Reference]) -> str:
    """What is wrong with the first reference of `kept` that is not as a copy would be; or ""."""
    for each in kept:
        if faults := each.faults(options):
            what = type(each.held).__name__ + (f" at {each.path}" if each.path else "")
            pre = ", pre=True" if options.kind == "pre" else ""
            return (
                f"{options.who}: what is stored of {label} has a {what}, which "
                f"is stored as a reference, not as a copy: {' and '.join(faults)}. Give a hook "
                f"function that returns the tensors you need of it: Hook(module, f{pre})."
            )
    return ""
