"""`BackwardRoot`: the tensor on which the first backward pass of a run is called.

Builds on `hooks.entries`. Many loops report their loss as a number, as in `w.loss(loss.item())`,
and a number has no graph that says what kind of loss it is. The tensor that backward() is called on
has. PyTorch has no hook for that call, so it is looked up from within the pass, once a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

_TRIES = 3
"""Batches in which it is looked for: the first may have no backward pass."""


class BackwardRoot:
    """Calls `seen(root)` in the first backward pass that reaches one of some parameters.

    >>> from threading import get_ident
    >>> w, roots = torch.ones(2, requires_grad=True), []
    >>> root = BackwardRoot(roots.append)
    >>> root.expect([w], get_ident()); (w * 3).sum().backward()
    >>> roots
    [tensor(6., grad_fn=<SumBackward0>)]
    """

    def __init__(self, seen: Callable[[Tensor], object]) -> None:
        self._seen, self._tries = seen, _TRIES
        self._remove: Callable[[], None] = lambda: None

    def expect(self, params: Iterable[Tensor], thread: int) -> None:
        """A batch begins; `thread` will call backward(). Nothing is done once a root was seen."""
        self.remove()
        if self._tries <= 0:
            return
        self._tries -= 1

        def look(grad: Tensor) -> None:
            self.remove()
            if (root := _root_of(thread)) is not None:
                self._tries = 0
                self._seen(root)

        leaves = [p for p in params if p.requires_grad and p.is_leaf]
        self._remove = register_multi_grad_hook(leaves, look, mode="any").remove

    def remove(self) -> None:
        """Removes the hooks; can be called at any time, and twice."""
        self._remove()
        self._remove = lambda: None


def _root_of(thread: int) -> Tensor | None:
    """The one tensor that the backward pass under way in a thread began with; None if not known.

    Autograd runs hooks in threads of its own on a GPU; the user's thread waits in `backward`.
    """
    frame, given = sys._current_frames().get(thread), None
    while frame is not None:  # the outermost call is the user's: a checkpoint's are inside
        if frame.f_code is torch.autograd.backward.__code__:
            # Its first parameter, which `backward` makes a tuple. By another name no root is known.
            given = frame.f_locals.get("tensors")
        frame = frame.f_back
    roots = [given] if isinstance(given, Tensor) else list(given or ())
    return roots[0] if len(roots) == 1 and isinstance(roots[0], Tensor) else None
