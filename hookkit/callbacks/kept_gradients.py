"""`KeptGradients`: whether steps use gradients to which those of the step before were added.

A forgotten `zero_grad()` is seen where it happens: of each optimizer one parameter is followed from
a step to the next, and as autograd adds to its gradient, that is still the one that the step used.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookkit.interrupts import uninterrupted

MANY = 16
"""Steps that are looked at: later ones cost nothing."""


class KeptGradients:
    """Of the first steps, how many used a gradient that had not been zeroed since the last one.

    Nothing is read from the device until `read`, and nothing is computed where gradients are zeroed
    (or set to None). Gradients that autograd does not add to, as those of FSDP2, are not known.

    >>> w = torch.ones(2, requires_grad=True); opt = torch.optim.SGD([w], 0.1)
    >>> kept = KeptGradients()
    >>> for _ in range(4):
    ...     w.sum().backward(); kept.step_began(opt); opt.step(); kept.step_ended(opt)
    >>> kept.read(); kept.remove()
    {'kept_gradients': [3, 3]}
    """

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Optimizer, _Followed] = WeakKeyDictionary()
        self._kept: list[Tensor | bool] = []

    def step_began(self, opt: Optimizer) -> None:
        """`opt` will use the gradients that there are."""
        followed = self._followed.get(opt)
        if followed is not None:
            followed.remove()
            del self._followed[opt]
            if followed.kept is not None and len(self._kept) < MANY:
                self._kept.append(followed.kept)

    def step_ended(self, opt: Optimizer) -> None:
        """`opt` has used them."""
        if len(self._kept) < MANY and not torch.compiler.is_compiling():
            params = (p for group in opt.param_groups for p in group["params"])
            plain = (p for p in params if type(p.grad) is Tensor and not p.grad.is_sparse)
            if (p := next(plain, None)) is not None and p.requires_grad:
                self._followed[opt] = followed = _Followed(p)
                followed.attach(p)

    def remove(self) -> None:
        """Takes the hooks off; can be called at any time, and twice."""
        for followed in self._followed.values():
            followed.remove()
        self._followed.clear()

    def read(self) -> dict[str, Any]:
        """`kept_gradients`: in how many steps it was so, and of how many that is known."""
        n = len(self._kept)
        return {"kept_gradients": [sum(map(bool, self._kept)), n]} if n else {}


class _Followed:
    """The gradient of one parameter, from the end of a step on.

    Attributes:
        kept: whether the step's gradient is part of what there is now; None: not known.
    """

    def __init__(self, p: Tensor) -> None:
        self.kept: Tensor | bool | None = None
        self._left: tuple[int, int] | None = _state(p.grad)
        self._still: Tensor | bool = False
        self._handles: list[RemovableHandle] = []

    @uninterrupted
    def attach(self, p: Any) -> None:
        self._handles.append(p.register_hook(lambda grad: self._before(p)))
        self._handles.append(p.register_post_accumulate_grad_hook(self._after))

    def _before(self, p: Tensor) -> None:
        """A gradient has come; also where `torch.autograd.grad` adds it to nothing."""
        grad = p.grad
        if grad is None or self._left is None or _state(grad) != self._left:
            self._still = False
        else:
            with torch.no_grad():  # 0 by `grad.data.zero_()`, which leaves no other trace
                self._still = (grad != 0).any()

    def _after(self, p: Tensor) -> None:
        """It was added to what there was."""
        self.kept = self._still if self.kept is None else self.kept & self._still
        self._left = None if self._still is False else _state(p.grad)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _state(grad: Tensor | None) -> tuple[int, int] | None:
    """Where a gradient is, and how often it has been changed in place."""
    # Private: `_version`, the counter by which autograd knows of changes in place (since 0.4).
    return None if grad is None else (grad.data_ptr(), grad._version)
