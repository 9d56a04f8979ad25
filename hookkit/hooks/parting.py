"""Tells when a tap and the tensor that it was made of have parted.

A tap is a copy, handed on in the place of an input, a parameter or a view, so that its gradient
can be told from that of the original's other uses. An in-place operation on one of the two is not
seen by the other, as it would be without the hook. Mostly nobody looks at the other any more
(a Flatten with a ReLU(inplace=True) behind it); where somebody does, values change, and that must
not happen without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor

from hookkit.errors import OverwrittenWarning
from hookkit.hooks.capturing import is_transformed


def watch(original: Tensor, tapped: Tensor, told: Callable[[], str]) -> None:
    """Warns in the backward pass if `tapped` and `original` have parted by then.

    Tensors without plain memory (subclasses, sparse, under torch.func) are left out.

    Args:
        original: what the module took or gave.
        tapped: the copy that stands for it.
        told: gives the layer in words, or "" to be silent; must hold neither graph nor module.
    """
    plain = type(tapped) is Tensor and tapped.layout is torch.strided
    if plain and not is_transformed(tapped):
        tapped.register_hook(Parted(original, tapped, told).tap)  # type: ignore[no-untyped-call]


class Parted:
    """Whether a tap and the tensor it was made of still hold what they would hold without it.

    Of both it keeps the version counter, not the memory: an empty tensor on the same counter.
    """

    __slots__ = ("counters", "seen", "told", "users")

    def __init__(self, original: Tensor, tapped: Tensor, told: Callable[[], str]) -> None:
        base = original._base
        root = original if base is None else base
        self.users = ref(original), ref(root)
        self.counters = [(c, c._version) for c in map(_counter, (original, tapped))]
        self.seen: Tensor | None = None  # held, so that autograd does not add into its memory
        self.told = told
        if root.grad_fn is not None and root.numel() == original.numel():
            root.register_hook(self.root)  # type: ignore[no-untyped-call]

    def written(self) -> tuple[bool, bool]:
        """Whether the original and the tap have been written since."""
        original, tapped = (c._version != version for c, version in self.counters)
        return original, tapped

    def tap(self, grad: Tensor) -> None:
        """Tensor hook of the tap."""
        self.seen = grad.detach()
        original, tapped = self.written()
        if original or (tapped and any(user() is not None for user in self.users)):
            self.warn()

    def root(self, grad: Tensor) -> None:
        """Tensor hook of the original's own memory: has it another use, beside a written tap?"""
        seen, self.seen = self.seen, None
        alone = seen is not None and seen.data_ptr() == grad.data_ptr()
        if self.written()[1] and not alone:
            self.warn()

    def warn(self) -> None:
        """Tells it, once for each hook."""
        if layer := self.told():
            warnings.warn(
                f"gradients of {layer} were asked for, and what it returns shares its memory with "
                "its input or a parameter, or twice. One of the two was changed in place, which "
                "the other did not see, as it does without the hook: values may differ. Hook the "
                "layer before or after it instead, or make that operation out of place.",
                OverwrittenWarning,
                stacklevel=3,
            )


def _counter(t: Tensor) -> Tensor:
    """An empty tensor with the version counter of `t`."""
    t = t.detach()
    t.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return t
