"""Handle the values that a hook sees: take a part, copy it to store it, check a replacement.

A stored tensor is a snapshot, which later in-place operations cannot change. On the CPU it is
torch's lazy clone (copy-on-write, 0.5 µs at any size), on other devices a clone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from fastcore.foundation import L
from torch import Tensor, nn

from hookkit._core.devices import begin_copy_to_host
from hookkit._core.pytree import (
    Inputs,
    describe,
    tree_get,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
)
from hookkit.errors import HookError

if TYPE_CHECKING:
    from hookkit.hooks.hook import Hook
    from hookkit.hooks.options import HookScope

# Private: `torch._lazy_clone` copies a tensor on its first write (copy-on-write, CPU, since 2.2).
# Without it each snapshot is a full copy.
lazy_clone: Callable[[Tensor], Tensor] = getattr(torch, "_lazy_clone", Tensor.clone)
# Private: whether a transform of torch.func (vmap, grad) is active, whose tensors end with it
# (since 2.0). Without it recorders treat them as plain ones.
is_transforming: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
is_grad_enabled = torch.is_grad_enabled
_ORDINARY = (Tensor, nn.Parameter)


# --- a part


def part_at(x: Any, path: str, who: str, label: Any) -> Any:
    """Return the part of `x` at `path`, such as `[0]`; `x` itself for the path "".

    Args:
        who: the public function that was called, for the message.
        label: names the layer that returned `x`; text, or a function that returns it.

    Raises:
        HookError: there is nothing at `path`.

    >>> part_at({"a": (1, 2)}, "['a'][1]", "Hook", "Linear")
    2
    """
    try:
        return tree_get(x, path)
    except (LookupError, AttributeError, TypeError, ValueError):
        paths = ", ".join([p for p, _ in tree_leaves_with_path(x) if p][:6])
        raise HookError(
            f"{who}: {label() if callable(label) else label} has nothing at {path}; there is "
            f"{describe(x)}. Select a path that is there: {paths or 'it needs none'}."
        ) from None


# --- a copy to store


def snapshot(t: Tensor) -> Tensor:
    """Return a detached copy of `t` that no later in-place operation on `t` can change.

    The copy is a lazy clone where torch can make one. The next in-place operation on `t` then moves
    `t` to new memory, so no NumPy array may share its memory: `Tensor.numpy()` marks such memory as
    not resizable. Torch refuses lazy clones of memory that it has not allocated itself. A part of
    larger memory is cloned, because a lazy clone would keep all of that memory alive. Do not call
    this in compiled code.
    """
    if type(t) in _ORDINARY:
        try:
            memory = t.untyped_storage()
            lazy = t.is_cpu and memory.resizable() and memory.nbytes() <= t.nbytes
            # torch 2.13 crashes on reading a lazy clone of a quantized tensor
            if lazy and not t.is_quantized:
                return lazy_clone(t.detach() if t.requires_grad and is_grad_enabled() else t)
        except (RuntimeError, NotImplementedError):  # sparse, torch.func, shared with processes
            pass
    return t.detach().clone()


def to_store(x: Any, scope: HookScope) -> Any:
    """Return `x` as the options ask to store it: its tensors copied, everything else as it is."""
    options = scope.options

    def one(t: Tensor) -> Tensor:
        if options.cpu and t.device.type not in ("cpu", "meta"):
            return _to_cpu(t.detach() if options.detach else t, scope.pending)
        if not options.detach:
            return t
        if not options.clone:
            return t.detach()
        return t.detach().clone() if torch.compiler.is_compiling() else snapshot(t)

    if type(x) is Tensor:
        return one(x)
    return tree_map(one, x, fresh=True)  # the model may change its own lists and dicts


def _to_cpu(t: Tensor, pending: set[torch.device]) -> Tensor:
    """Return a copy on the CPU; from CUDA it is on its way, and `wait_for` waits for it."""
    if not t.is_cuda or t.requires_grad or t.layout is not torch.strided or t.is_nested:
        return t.cpu()
    pending.add(t.device)
    return begin_copy_to_host(t)


def wait_for(pending: set[torch.device]) -> None:
    """Wait for the copies that are on their way from the devices in `pending`, and empty it."""
    while pending:
        torch.accelerator.synchronize(pending.pop())  # sync: once for each device


def out_of_inference(x: Any) -> Any:
    """Return `x`; outside of inference mode, replace the tensors that were made in it by clones.

    Autograd refuses inference tensors outside of the mode.
    """
    if torch.is_inference_mode_enabled():
        return x
    return tree_map(lambda t: t.clone() if t.is_inference() else t, x)


def version_of(x: Any) -> int:
    """Return how often the tensors in `x` were written in place; -1 if that is not known."""
    tensors = [x] if type(x) is Tensor else tree_leaves(x)
    if torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
        return -1
    # Private: `Tensor._version` (since before 2.0); no public name. Inference tensors have none.
    return sum([t._version for t in tensors])


class Values(L, list[Any]):  # type: ignore[misc]
    """Holds values as an `L` that is a list too, because `torch.stack` takes only lists and tuples.

    The list has the values; `items`, which all methods of `L` read, is a copy.
    """

    def __init__(self, items: Any = (), **_: Any) -> None:
        list.__init__(self, items)

    def __getitem__(self, at: Any) -> Any:
        found = L.__getitem__(self, at)
        return Values(found) if type(found) is L else found  # a slice, in fastcore up to 2.1

    @property
    def items(self) -> list[Any]:
        """Return the values as a plain list."""
        return list.copy(self)

    __len__, __iter__ = list.__len__, list.__iter__
    __setitem__, __delitem__ = list.__setitem__, list.__delitem__


# --- a replacement


def check_same(hook: Hook, old: Any, new: Any) -> None:
    """Raise unless `new`, the replacement of `old`, has tensors at the same paths."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return
    paths = [path for path, _ in tree_leaves_with_path(old)]
    same = type(old) is type(new)
    if paths and not (same and paths == [path for path, _ in tree_leaves_with_path(new)]):
        raise HookError(
            f"{hook.options.who} on {hook.label}: the replacement is {_described(new)}, the layer "
            f"gave {_described(old)}. Return the same structure, or None to leave it."
        )


def check_grad(hook: Hook, grad: Tensor, new: Any) -> None:
    """Raise unless `new`, the replacement of a gradient, has its shape."""
    if not isinstance(new, Tensor) or new.shape != grad.shape:
        raise HookError(
            f"{hook.options.who} on {hook.label}: the replacement is {_described(new)}, the "
            f"gradient is {describe(grad)}. Return a tensor of that shape, or None."
        )


def new_inputs(hook: Hook, inputs: Inputs, new: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the positional and keyword inputs that replace `inputs`, from a user's `new`.

    Raises:
        HookError: `new` has another number of positional inputs.
    """
    if isinstance(new, Inputs):
        return tuple(new), new.kwargs
    values = new if type(new) is tuple else (new,)  # a PackedSequence is one value
    if len(values) != len(inputs):
        raise HookError(
            f"{hook.options.who} on {hook.label}: {len(values)} positional inputs were returned, "
            f"the layer was called with {describe(inputs)}. Return as many, or Inputs(args, "
            "kwargs) for all."
        )
    return values, inputs.kwargs


def _described(x: Any) -> str:
    """Return a description of `x` that begins with its type, unless it is a tensor."""
    name, text = type(x).__name__, describe(x)
    return text if isinstance(x, Tensor) or text.startswith(name) else f"{name} {text}"
