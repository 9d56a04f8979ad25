"""What is stored of what a module returned: detached, copied, moved, and read back safely.

A stored tensor is a snapshot: a later in-place operation cannot change it. On the CPU that is
torch's lazy clone (copy-on-write, 0.5 µs whatever the size), elsewhere a clone. What is stored
live instead is watched by its version counter, and reading it warns if it was overwritten. (Over
300 lines, since what an option means and what is stored for it are read together.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hookkit.checks import check_choice, check_flag, check_function
from hookkit.devices import sent
from hookkit.errors import OptionError, OverwrittenWarning
from hookkit.hooks.entries import is_compiling
from hookkit.hooks.references import Reference, references
from hookkit.nested import leaves, tmap

Kind = Literal["forward", "pre", "grad", "pre_grad", "backward", "both", "recorder"]

# Private: `torch._lazy_clone` copies a tensor on its first write (copy-on-write, CPU, since 2.2).
# Without it each snapshot is a full copy.
lazy_clone: Callable[[Tensor], Tensor] = getattr(torch, "_lazy_clone", Tensor.clone)
# Private: `torch._C._functorch`, `_are_functorch_transforms_active` and `_DisableFuncTorch` (since
# 2.0). In a transform of torch.func (vmap, grad, …) a module sees wrappers that cannot be used once
# the transform has ended; `unwrapped` gives the values behind one. Without them captures are right
# outside of transforms only.
_functorch = getattr(torch._C, "_functorch", None)
is_transformed: Callable[[Tensor], bool] = getattr(
    _functorch, "is_functorch_wrapped_tensor", lambda t: False
)
is_transforming: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
outside: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_DisableFuncTorch", nullcontext
)
# Private, here and in `references`, `reading`, `capture`, `gradients`, `taps` and `views`:
# `Tensor._version`, the number of in-place operations on its memory, `Tensor._base`, the tensor
# that it is a view of, and `Tensor._is_view()` (all since before 2.0). Without them overwritten
# values would not be noticed, and gradients of views and of returned inputs would be wrong. PyTorch
# has no public name for them, so there is no fallback.
_USUAL = ("forward", None, "last", None)
_FLAGS = ("detach", "cpu", "gather", "edit", "stop", "clone", "retain_grad", "prepend")


FUNCTION_OF: dict[Kind, tuple[str, ...]] = {
    "forward": ("module", "input", "output"),
    "pre": ("module", "input"),
    "backward": ("module", "grad_input", "grad_output"),
    "both": ("module", "grad_input", "grad_output"),
    "grad": ("module", "grad"),
}
"""What a hook function of each kind is called with; that of "grad" is an edit."""

BY_NAME = "Modules by name come from select(model, name); options are best given by name."
"""The cure for a flag that is given a layer's name, as in `hook_outputs(layers, "fc")`."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a hook captures: the arguments of `Hook`, checked once for all modules.

    Hooks of kind "recorder" store and count nothing: `entries(name, module, leaf)` gives what is
    registered on a module in their place, each entry with keywords of `entries.register`; their
    block is the switch of all.
    """

    who: str = "Hook"
    kind: Kind = "forward"
    hook_func: Callable[..., Any] | None = None
    detach: bool = True
    cpu: bool = False
    gather: bool = False
    edit: bool = False
    keep: str = "last"
    clone: bool | None = None
    dtype: torch.dtype | None = None
    stop: bool = False
    entries: Callable[..., list[Any]] | None = None
    retain_grad: bool = False
    prepend: bool = False
    plain: bool = field(init=False)  # the last output and nothing more: the fast path
    live: bool = field(init=False)  # as it is: a later in-place operation changes what is stored

    def __post_init__(self) -> None:
        for what in _FLAGS:
            flag = getattr(self, what)
            if flag is not True and flag is not False and (what != "clone" or flag is not None):
                object.__setattr__(self, what, check_flag(self.who, what, flag, BY_NAME))
        if self.hook_func is not None:
            func = check_function(self.who, self.hook_func, *FUNCTION_OF[self.kind])
            object.__setattr__(self, "hook_func", func)
        check_choice(self.who, "keep", self.keep, ("last", "all", "none"))
        self._check_together()

        # compared as one tuple, since this runs at each `with hook_outputs(…)`
        usual = (self.kind, self.hook_func, self.keep, self.dtype) == _USUAL
        plain = usual and not (
            self.clone or self.cpu or self.gather or self.stop or self.retain_grad
        )
        live = self.clone is False or (self.clone is None and not self.detach)
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "live", live)

    def _check_together(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise OptionError(
                f"{self.who}: dtype={self.dtype!r} is no torch dtype. Use one, as torch.float32."
            )
        of_values = self.kind in ("forward", "pre")
        if self.retain_grad and not of_values:
            raise OptionError(
                f"{self.who}: grad=True stores gradients alone, in `stored`; retain_grad=True "
                "stores values, and their gradients in `grad`. Give one of the two."
            )
        if self.stop and (self.retain_grad or not of_values):
            raise OptionError(
                f"{self.who}: stop=True ends the forward pass, but gradients need all of it. "
                "Drop stop=True, or capture values instead."
            )
        if self.edit and self.hook_func is None:
            raise OptionError(
                f"{self.who}: edit=True needs a function whose result replaces what it sees. "
                "Use Hook(module, hook_func, edit=True), or edit_output(module, f)."
            )


def aliases_user_memory(t: Tensor, given: Iterable[Any]) -> bool:
    """True if `t` aliases a tensor that the user made: a parameter, or a leaf behind `given`.

    `given` is what a module was called with and owns. A view of such a tensor has its memory too,
    also if it is the view that was given.
    """
    root = t if is_compiling() or t._base is None else t._base
    return root.is_leaf and (isinstance(root, nn.Parameter) or any(_holds(x, root) for x in given))


def _holds(x: Any, t: Tensor) -> bool:
    parts = (x,) if isinstance(x, Tensor) else leaves(x)
    return any(part is t or (not is_compiling() and part._base is t) for part in parts)


def inputs_and_buffers(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The tensors that a module was called with, and its buffers: it may return any of them."""
    # Private: `Module._buffers`, its own buffers (since before 2.0). The fallback would be
    # `buffers(recurse=False)`, which costs several times as much, at each call of a hook.
    return (*args, *kwargs.values(), *module._buffers.values())


def snapshot(t: Tensor, given: Iterable[Any] = ()) -> Tensor:
    """A detached copy of `t` that no later in-place operation on `t` can change.

    A lazy clone on the CPU where torch can make one, else a clone: also of a small view, which
    would keep the whole of its storage alive, and of a tensor that the user made. That one (a
    parameter, a leaf among `given`, a module's inputs, or a view of one) may share its memory with
    a numpy array, and a lazy clone gives it new memory at its next in-place operation.
    """
    is_users = aliases_user_memory(t, given)
    t = t.detach()
    if (
        not is_users
        and t.is_cpu
        and t.layout is torch.strided
        and not t.is_quantized  # torch 2.13 crashes on reading a lazy one
        and not is_compiling()
        and not is_transformed(t)
    ):
        try:
            return t.clone() if _is_small_view(t) else lazy_clone(t)
        except RuntimeError:  # from_numpy, shared memory
            pass
    return t.clone()


def unwrapped(t: Tensor) -> Tensor:
    """The values behind a tensor that torch.func has wrapped, vmap's dimension first; else `t`.

    The wrapper cannot be used once its transform has ended, the values can.
    """
    while not is_compiling() and is_transformed(t):
        assert _functorch is not None
        with outside():
            dim = _functorch.maybe_get_bdim(t) if _functorch.is_batchedtensor(t) else -1
            t = _functorch.get_unwrapped(t)
            t = t.movedim(dim, 0) if dim > 0 else t
    return t


Versions = list[tuple[Tensor, int]]


class StoredValue:
    """One stored value with what is needed to read it: versions of live tensors, events of copies.

    Attributes:
        references: the objects in it that are no copies.
        whole: True once `value` holds what all ranks stored.
    """

    __slots__ = ("events", "fresh", "references", "value", "versions", "whole")

    references: Sequence[Reference]

    def __init__(self, value: Any, versions: Versions | None = None, events: Any = ()) -> None:
        self.value, self.versions, self.events, self.fresh = value, versions, events, True
        self.whole, self.references = False, ()

    def read(self, who: str, label: Callable[[], str]) -> Any:
        """The value: arrived, not overwritten (else a warning, once)."""
        if self.events:
            for event in self.events:
                event.synchronize()  # sync: once per copied tensor, at its first read
            self.events = ()
        if self.versions and any(t._version != v for t, v in self.versions):
            self.versions = None
            warnings.warn(overwritten(who, label()), OverwrittenWarning, stacklevel=5)
        if self.fresh:
            self.fresh = torch.is_inference_mode_enabled()  # to be settled after it
            self.value = tmap(_settled, self.value)
        return self.value


def copied_containers(x: Any) -> Any:
    """A copy of the containers of `x` with the same tensors, as the model may mutate its own."""
    found = iter(leaves(x))
    return tmap(lambda t: next(found), tmap(Tensor.detach, x))


def overwritten(who: str, name: str) -> str:
    """The text of the warning that what is stored of `name` has been changed since."""
    return (
        f"{who}: what is stored of {name} was overwritten in place after it was stored (a layer "
        "with inplace=True, or an operation such as `+=`), so this is not what the layer gave. "
        "Pass clone=True to keep a copy."
    )


def _settled(t: Tensor) -> Tensor:
    """`t` as it can be used later: without torch.func's wrappers, not an inference tensor after the
    inference mode has ended, not a small view of a large storage."""
    t = unwrapped(t)
    if t.is_inference() and not torch.is_inference_mode_enabled():
        return t.clone()
    if not t.requires_grad and _is_small_view(t):
        return t.clone()
    return t


def _is_small_view(t: Tensor) -> bool:
    """A small view, which keeps the whole of its storage alive."""
    try:
        return t.untyped_storage().nbytes() > 4 * t.numel() * t.element_size() + 64
    except (RuntimeError, NotImplementedError):  # no storage: sparse, nested, fake
        return False


class Snapshotter:
    """Turns what a hook saw into what it stores, one tensor at a time, as `Options` ask."""

    __slots__ = ("events", "given", "options")

    def __init__(self, options: Options, given: Iterable[Any] = ()) -> None:
        self.options, self.given = options, given
        self.events: tuple[Any, ...] = ()

    def keep(self, x: Any) -> StoredValue:
        """`x` as it is stored: tensors inside are treated, everything else is by reference."""
        bare = type(x) is Tensor
        value = self.tensor(x) if bare else tmap(self.tensor, x)
        if value is x and self.options.live and not isinstance(x, Tensor):
            value = copied_containers(x)
        versions = None
        if self.options.live and not is_compiling():
            found = (value,) if bare else leaves(value)
            versions = [(t, t._version) for t in found if not t.is_inference()]
        events, self.events = self.events, ()
        kept = StoredValue(value, versions, events)
        if not bare and not is_compiling():
            kept.references = references(value)
        return kept

    def tensor(self, t: Tensor) -> Tensor:
        """One tensor as it is stored."""
        o = self.options
        whole = unwrapped(t)
        before = t = whole.detach() if o.detach else whole
        if o.dtype is not None and t.is_floating_point() and t.dtype != o.dtype:
            t = t.to(o.dtype)
        if o.cpu and t.device.type not in ("cpu", "meta"):
            t = self._offloaded(t)
        # an inference tensor has no graph to stay in, and no count of writes to warn by
        graphless = o.clone is None and not is_compiling() and t.is_inference()
        if t is not before or (o.live and not graphless):
            return t
        return t.clone() if o.clone else snapshot(whole, self.given)

    def _offloaded(self, t: Tensor) -> Tensor:
        # pinned memory holds plain tensors: no sparse, nested, quantized ones, no subclasses'
        plain = t.layout is torch.strided and not (t.is_nested or t.is_quantized)
        if not plain or t.requires_grad or is_compiling():
            return t.cpu()
        host, event = sent(t)
        if event is not None:
            self.events = (*self.events, event)  # the parts may be on several devices
        return host
