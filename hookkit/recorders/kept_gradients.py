"""`KeptGradients`: finds gradients that were not zeroed after a step.

Without `zero_grad()`, autograd adds new gradients to those that the last step has used. One
parameter of each optimizer is followed from step to step, by hooks before and after each addition.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MANY = 16
"""How many first steps are looked at; later steps cost nothing."""


class KeptGradients:
    """Counts in how many of the first steps the gradient of the last step was used again.

    Nothing is read from the device until `read`. Nothing is computed if gradients are zeroed or set
    to None. Gradients that autograd does not add to, such as FSDP2's, are not counted.

    >>> w = nn.Parameter(torch.ones(2)); opt = torch.optim.SGD([w], 0.1)
    >>> kept = KeptGradients()
    >>> for _ in range(4):
    ...     w.sum().backward(); kept.see_step(opt); opt.step()
    >>> kept.read(); kept.remove()
    {'kept_gradients': [3, 3]}
    """

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Optimizer, _Followed] = WeakKeyDictionary()
        self._kept: list[Tensor | bool] = []  # for each step, whether a gradient was kept

    def see_step(self, opt: Optimizer) -> None:
        """Look at the gradients that `opt` is about to use, and follow one to the next step."""
        followed = self._followed.pop(opt, None)
        if followed is not None:
            followed.remove()
            if followed.is_autograds():
                self._kept.append(followed.kept)
        if len(self._kept) < MANY and not torch.compiler.is_compiling():
            for p in (p for group in opt.param_groups for p in group["params"]):
                # copies and pickles leave out the hooks of parameters only
                if isinstance(p, nn.Parameter) and _state(p.grad):
                    if p.requires_grad:
                        self._followed[opt] = followed = _Followed(p)
                        followed.attach()
                    break

    def remove(self) -> None:
        """Remove the hooks; a second call does nothing."""
        for followed in self._followed.values():
            followed.remove()
        self._followed.clear()

    def read(self) -> dict[str, Any]:
        """Return {"kept_gradients": [steps with kept gradients, steps]}, or {} without a step."""
        n = len(self._kept)
        return {"kept_gradients": [sum(map(bool, self._kept)), n]} if n else {}  # sync: one a step

    def __reduce__(self) -> Any:
        return KeptGradients, ()  # a copy follows nothing


class _Followed:
    """Follows the gradient of one parameter from one step to the next.

    Attributes:
        kept: whether the gradient still contains the one that the last step used: nothing but
            additions of autograd has changed it since.
    """

    def __init__(self, p: Any) -> None:
        self.kept: Tensor | bool = True
        self._p, self._left, self._added = p, _state(p.grad), False

    def attach(self) -> None:
        self._p.register_hook(self._before)
        self._p.register_post_accumulate_grad_hook(self._after)

    def _before(self, coming: Tensor) -> None:
        """Compare the gradient with the one seen last; autograd is about to add to it."""
        grad = self._p.grad
        if grad is None or self._left is None or _state(grad) != self._left:
            self.kept = False
        elif self.kept is not False:
            with torch.no_grad():  # `grad.data.zero_()` changes no `_version`: look for values
                self.kept = self.kept & (grad != 0).any()

    def _after(self, p: Tensor) -> None:
        self._added, self._left = True, _state(self._p.grad)

    def is_autograds(self) -> bool:
        """Return whether autograd made the gradient of the step, clipped since or not."""
        now = _state(self._p.grad)
        return self._added and bool(now and self._left and now[0] == self._left[0])

    def remove(self) -> None:
        # Private: the dicts of a tensor's hooks (since 0.4 and 2.1). Deleting from them needs no
        # handles, which Ctrl-C can lose between registration and assignment.
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(self._p, name, None) or {}
            for key in [k for k, f in hooks.items() if getattr(f, "__self__", None) is self]:
                del hooks[key]


def _state(grad: Tensor | None) -> tuple[int, int] | None:
    """Return address and `_version` of a plain gradient; None for other tensors."""
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return None
    # Private: `_version`, which counts in-place changes for autograd (since 0.4). Without it,
    # gradients that are zeroed in place would seem kept.
    return grad.data_ptr(), grad._version
