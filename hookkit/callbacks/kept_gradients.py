"""`KeptGradients`: gradients that outlive their step, and gradients that no step uses.

Both are seen where they happen: of each optimizer one parameter is followed from a step to the
next. Without `zero_grad()` autograd adds to the gradient that the step has used; with a `step()`
outside the loop over batches there is none, though one was made since the last step.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookkit.interrupts import uninterrupted
from hookkit.nested import leaves

MANY = 16
"""Steps that are looked at: later ones cost nothing."""


class KeptGradients:
    """Of the first steps, how many used the gradient of the last one, too, or wasted those between.

    Nothing is read from the device until `read`, and nothing is computed where gradients are zeroed
    (or set to None). Gradients that autograd does not add to, as those of FSDP2, are not known, nor
    are those that something else has replaced before the step, as the mean of clipped ones.

    >>> w = nn.Parameter(torch.ones(2)); opt = torch.optim.SGD([w], 0.1)
    >>> kept = KeptGradients()
    >>> for _ in range(4):
    ...     w.sum().backward(); kept.step_began(opt); opt.step(); kept.step_ended(opt)
    >>> kept.read(); kept.remove()
    {'kept_gradients': [3, 3], 'wasted_gradients': [0, 3]}
    """

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Optimizer, _Followed] = WeakKeyDictionary()
        self._kept: list[Tensor | bool] = []
        self._n_wasted = 0

    def step_began(self, opt: Optimizer) -> None:
        """`opt` will use the gradients that there are."""
        followed = self._followed.get(opt)
        if followed is not None:
            followed.remove()
            del self._followed[opt]
            if followed.is_used() and len(self._kept) < MANY:
                self._kept.append(followed.kept)
                self._n_wasted += 0 if followed.of_inputs else followed.n_wasted

    def step_ended(self, opt: Optimizer) -> None:
        """`opt` has used them."""
        if len(self._kept) < MANY and not torch.compiler.is_compiling():
            params = (p for group in opt.param_groups for p in group["params"])
            # copies and pickles leave out the hooks of parameters only
            params = (p for p in params if isinstance(p, nn.Parameter))
            plain = (p for p in params if type(p.grad) is Tensor and not p.grad.is_sparse)
            if (p := next(plain, None)) is not None and p.requires_grad:
                self._followed[opt] = followed = _Followed(p)
                followed.attach(p)

    def see(self, given: Any) -> None:
        """A forward begins on `given`, any structure: are gradients for that meant, too?"""
        if self._followed and any(t.requires_grad for t in leaves(given)):
            for followed in self._followed.values():
                followed.of_inputs = True

    def remove(self) -> None:
        """Takes the hooks off; can be called at any time, and twice."""
        for followed in self._followed.values():
            followed.remove()
        self._followed.clear()

    def read(self) -> dict[str, Any]:
        """What is known, each with the number of steps of which it is.

        kept_gradients: steps that used the gradient of the one before, too.
        wasted_gradients: gradients that were set to None before any step used them. None are
            counted for a step where inputs had gradients, too, which an attack on images is after.
        """
        n = len(self._kept)
        kept, wasted = sum(map(bool, self._kept)), self._n_wasted
        return {"kept_gradients": [kept, n], "wasted_gradients": [wasted, n]} if n else {}


class _Followed:
    """The gradient of one parameter, from the end of a step on.

    Attributes:
        kept: whether the step's gradient is part of what there is now.
        n_wasted: gradients that have gone since.
        of_inputs: whether the model was given something since that has a gradient, too.
    """

    def __init__(self, p: Tensor) -> None:
        self.kept: Tensor | bool = False
        self.n_wasted, self.of_inputs = 0, False
        self._p, self._made = p, None  # type: Tensor, int | None
        self._left: tuple[int, int] | None = grad_state(p.grad)
        self._still: Tensor | bool = False
        self._is_gone = False
        self._handles: list[RemovableHandle] = []

    def is_used(self) -> bool:
        """Whether what autograd has made since is what the step will use."""
        now = grad_state(self._p.grad)
        return now is not None and now[0] == self._made

    @uninterrupted
    def attach(self, p: Any) -> None:
        self._handles.append(p.register_hook(lambda grad: self._before(p)))
        self._handles.append(p.register_post_accumulate_grad_hook(self._after))

    def _before(self, p: Tensor) -> None:
        """A gradient has come; also where `torch.autograd.grad` adds it to nothing."""
        grad = p.grad
        self._is_gone = grad is None
        if grad is None or self._left is None or grad_state(grad) != self._left:
            self._still = False
        else:
            with torch.no_grad():  # 0 by `grad.data.zero_()`, which leaves no other trace
                self._still = (grad != 0).any()

    def _after(self, p: Tensor) -> None:
        """It was added to what there was."""
        self.n_wasted += self._is_gone and self._made is not None
        self.kept = self._still if self._made is None else self.kept & self._still
        left = grad_state(p.grad)
        self._made = None if left is None else left[0]
        self._left = None if self._still is False else left

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def grad_state(grad: Tensor | None) -> tuple[int, int] | None:
    """Where a gradient is, and how often it has been changed in place."""
    if grad is None or grad.layout is not torch.strided:
        return None
    # Private: `_version`, the counter by which autograd knows of changes in place (since 0.4).
    return grad.data_ptr(), grad._version
