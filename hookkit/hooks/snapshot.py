"""What is stored of what a module gave: a snapshot that later in-place operations cannot change.

On the CPU that is torch's lazy clone (copy-on-write, 0.5 µs whatever the size), elsewhere a clone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookkit.nested import leaves, tmap

if TYPE_CHECKING:
    from hookkit.hooks.block import Block

# Private: `torch._lazy_clone` copies a tensor on its first write (copy-on-write, CPU, since 2.2).
# Without it each snapshot is a full copy.
lazy_clone: Callable[[Tensor], Tensor] = getattr(torch, "_lazy_clone", Tensor.clone)
# Private: `torch._C._set_grad_enabled`, which torch.set_grad_enabled calls (since 1.0). The public
# context managers cost ten times as much, at each captured layer; they are the fallback.
set_grad_enabled: Callable[[bool], Any] = getattr(
    torch._C, "_set_grad_enabled", torch.set_grad_enabled
)
# Private: whether a transform of torch.func (vmap, grad) is active (since 2.0). Without it
# recorders treat its tensors as plain ones.
is_transforming: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
# Private: whether torch.func has wrapped a tensor (since 2.0). Without it such tensors are taken as
# they are.
is_transformed: Callable[[Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda t: False
)
is_grad_enabled = torch.is_grad_enabled
_ORDINARY = (Tensor, nn.Parameter)


def snapshot(t: Tensor) -> Tensor:
    """Return a detached copy of `t` that no later in-place operation on `t` can change.

    A lazy clone where torch can make one. `t` gets new memory at its next in-place operation then,
    so its memory must be nobody else's: `Tensor.numpy()` marks memory that an array shares as not
    resizable, and torch refuses lazy clones of memory that it has not allocated itself. A `t` that
    is a part of larger memory is cloned, as a lazy clone would keep all of it. Not for compiled
    code.
    """
    if type(t) in _ORDINARY:
        try:
            memory = t.untyped_storage()
            lazy = t.is_cpu and memory.resizable() and memory.nbytes() <= t.nbytes
            # torch 2.13 crashes on reading a lazy clone of a quantized tensor
            if lazy and not t.is_quantized:
                if not is_grad_enabled():
                    return lazy_clone(t)
                try:
                    set_grad_enabled(False)  # half the cost of t.detach(), and one tensor less
                    return lazy_clone(t)
                finally:
                    set_grad_enabled(True)
        except (RuntimeError, NotImplementedError):  # sparse, torch.func, shared with processes
            pass
    return t.detach().clone()


def store(x: Any, block: Block) -> Any:
    """`x` as `block` asks to store it: its tensors treated, everything else by reference."""

    def one(t: Tensor) -> Tensor:
        if block.cpu and t.device.type not in ("cpu", "meta"):
            return _sent(t.detach() if block.detach else t, block)
        if not block.detach:
            return t
        if not block.clone:
            return t.detach()
        return t.detach().clone() if torch.compiler.is_compiling() else snapshot(t)

    if type(x) is Tensor:
        return one(x)
    return tmap(one, x, fresh=True)  # the model may change its own lists and dicts


def _sent(t: Tensor, block: Block) -> Tensor:
    """A copy on the CPU; from CUDA it is on its way, and reading waits for it."""
    if not t.is_cuda or t.requires_grad or t.layout is not torch.strided or t.is_nested:
        return t.cpu()
    block.pending.add(t.device)
    host = torch.empty_like(t, device="cpu", pin_memory=True)
    return host.copy_(t, non_blocking=True)


def settled(x: Any) -> Any:
    """`x` as it can be used after an inference mode: its tensors belong to that mode alone."""
    if torch.is_inference_mode_enabled():
        return x
    return tmap(lambda t: t.clone() if t.is_inference() else t, x)


def version_of(x: Any) -> int:
    """How often the tensors in `x` have been written in place; -1 where it is not known."""
    tensors = [x] if type(x) is Tensor else leaves(x)
    if torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
        return -1
    # Private: `Tensor._version` (since before 2.0); no public name. Inference tensors have none.
    return sum([t._version for t in tensors])
