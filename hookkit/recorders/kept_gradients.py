"""`KeptGradients`: whether the gradient of one step is still there when the next one is computed.

Without `zero_grad()` autograd adds new gradients to those that the last step has used. One
parameter of each optimizer is followed from a step to the next, by hooks where autograd adds.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MANY = 16
"""Steps that are looked at: later ones cost nothing."""


class KeptGradients:
    """Counts in how many of the first steps the gradient of the step before was used, too.

    Nothing is read from the device until `read`, and nothing is computed where gradients are zeroed
    or set to None. Gradients that autograd does not add to, such as FSDP2's, are not counted.

    >>> w = nn.Parameter(torch.ones(2)); opt = torch.optim.SGD([w], 0.1)
    >>> kept = KeptGradients()
    >>> for _ in range(4):
    ...     w.sum().backward(); kept.see_step(opt); opt.step()
    >>> kept.read(); kept.remove()
    {'kept_gradients': [3, 3]}
    """

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[Optimizer, _Followed] = WeakKeyDictionary()
        self._kept: list[Tensor | bool] = []  # for each step that is known

    def see_step(self, opt: Optimizer) -> None:
        """Look at an optimizer that is about to use the gradients that there are."""
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
        """Take the hooks off; can be called at any time, and twice."""
        for followed in self._followed.values():
            followed.remove()
        self._followed.clear()

    def read(self) -> dict[str, Any]:
        """Return `kept_gradients`: in how many steps, of how many that are known; {} if none is."""
        n = len(self._kept)
        return {"kept_gradients": [sum(map(bool, self._kept)), n]} if n else {}  # sync: one a step

    def __reduce__(self) -> Any:
        return KeptGradients, ()  # a copy follows nothing


class _Followed:
    """The gradient of one parameter, from one step to the next.

    Attributes:
        kept: whether what the step used is part of what there is now: each addition was to what the
            one before had left.
    """

    def __init__(self, p: Any) -> None:
        self.kept: Tensor | bool = True
        self._p, self._left, self._added = p, _state(p.grad), False

    def attach(self) -> None:
        self._p.register_hook(self._before)
        self._p.register_post_accumulate_grad_hook(self._after)

    def _before(self, coming: Tensor) -> None:
        """Compare what there is, to which a gradient is about to be added."""
        grad = self._p.grad
        if grad is None or self._left is None or _state(grad) != self._left:
            self.kept = False
        elif self.kept is not False:
            with torch.no_grad():  # 0 by `grad.data.zero_()`, which leaves no other trace
                self.kept = self.kept & (grad != 0).any()

    def _after(self, p: Tensor) -> None:
        self._added, self._left = True, _state(self._p.grad)

    def is_autograds(self) -> bool:
        """Return whether autograd has made the step's gradient; it may have been clipped since."""
        now = _state(self._p.grad)
        return self._added and bool(now and self._left and now[0] == self._left[0])

    def remove(self) -> None:
        # Private: the dicts of a tensor's hooks, which handles delete from (since 0.4 and 2.1). A
        # Ctrl-C may come after a hook is registered and before its handle is there.
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(self._p, name, None) or {}
            for key in [k for k, f in hooks.items() if getattr(f, "__self__", None) is self]:
                del hooks[key]


def _state(grad: Tensor | None) -> tuple[int, int] | None:
    """Return where a plain gradient is, and how often it was changed in place; None for others."""
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return None
    # Private: `_version`, the counter by which autograd knows of changes in place (since 0.4).
    # Without it zeroing in place is not seen, and gradients that are zeroed seem kept.
    return grad.data_ptr(), grad._version
