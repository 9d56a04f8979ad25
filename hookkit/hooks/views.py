"""The gradient of one tensor, also if its memory is written in place later: `listen`.

A hook on a tensor belongs to the node that the tensor has in the graph at that time. An in-place
operation on a view, or on the tensor that it is a view of (its base), gives the view another node,
and the hook would never run. So the base of a view is hooked too. After the write, autograd treats
view and base as one tensor, and the view's gradient is the view's part of the base's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hookkit.hooks.entries import graph_task, is_compiling
from hookkit.hooks.snapshot import is_transformed


def listen(t: Tensor, receive: Callable[[Tensor], Any]) -> ViewGradient | RemovableHandle:
    """Calls `receive(grad)` in each backward pass with the gradient of `t`.

    The graph holds `receive`. What it returns, unless None, replaces the gradient. The handle's
    `remove()` removes the hook.
    """
    # Private, here and below: `_base` and `_version` of a tensor, see `snapshot`.
    base = None if is_compiling() else t._base
    if base is not None and is_plain(t) and is_plain(base) and not t.is_neg():
        return ViewGradient(t, base, receive)
    handle: RemovableHandle = t.register_hook(receive)  # type: ignore[no-untyped-call]
    return handle


def is_plain(t: Tensor) -> bool:
    """Whether `t` has memory of its own or is a view of such a tensor: no subclass, not sparse."""
    return type(t) is Tensor and t.layout is torch.strided and not is_transformed(t)


class ViewGradient:
    """The gradient of a view, whether or not its memory is written in place before the backward.

    It takes two hooks: one on the view, which has the gradient if the memory was not written, and
    one on the node that the base has now, which has it if the memory was written. To know which, it
    keeps the tensor's version counter, without its memory.
    """

    __slots__ = (
        "base",
        "collected",
        "counter",
        "handles",
        "inside",
        "key",
        "receive",
        "task",
        "version",
        "view",
    )

    def __init__(self, view: Tensor, base: Tensor, receive: Callable[[Tensor], Any]) -> None:
        self.receive, self.view, self.base = receive, _Place(view), _Place(base)
        self.counter, self.version = _counter(view), view._version
        self.collected: Tensor | None = None
        self.inside, self.task, self.key = False, -1, object()
        self.handles = [view.register_hook(self._of_view)]  # type: ignore[no-untyped-call]
        if base.grad_fn is not None:  # a leaf that needs a gradient cannot be written
            self.handles.append(base.register_hook(self._of_base))  # type: ignore[no-untyped-call]

    @property
    def written(self) -> bool:
        """Whether the memory was written in place after the hooks were set."""
        return bool(self.counter._version != self.version)

    @property
    def lost(self) -> bool:
        """Whether it was, in no_grad, and the base is a leaf, which has no hook."""
        return self.written and len(self.handles) == 1

    def remove(self) -> None:
        """Removes both hooks."""
        for handle in self.handles:
            handle.remove()

    def mark(self, base: Tensor) -> None:
        """Marks the node that `base` has now, so that `follow` finds it again."""
        node: Any = base.grad_fn
        if node is not None:
            node.metadata[self.key] = True

    def follow(self, base: Tensor) -> None:
        """Separates in-place operations after `mark` from the uses that `base` had before.

        The first of these operations passes its gradient to the marked node. Other uses of that
        node are not uses of the view, so the hook goes on that operation's node.
        """
        later: Any = None
        node: Any = base.grad_fn
        while node is not None and self.key not in node.metadata:
            later, node = node, node.next_functions[0][0] if node.next_functions else None
        if node is not None and later is not None:
            later.register_hook(self._of_first)
            self.inside = True

    def _of_view(self, grad: Tensor) -> Any:
        if not self.written or self.lost:
            return self.receive(grad)
        if self.inside:
            self._collect(grad)
        return None

    def _of_first(self, grads: tuple[Tensor | None, ...], _: Any) -> None:
        if grads[0] is not None:
            self._collect(self._part(grads[0]))

    def _collect(self, grad: Tensor) -> None:
        if self.task != graph_task():
            self.task, self.collected = graph_task(), None
        self.collected = grad if self.collected is None else self.collected + grad

    def _of_base(self, grad: Tensor) -> Tensor | None:
        if not self.written:
            return None
        part = self.collected if self.inside else self._part(grad)
        self.collected = None
        new = None if part is None else self.receive(part)
        if new is None or part is None:
            return None
        whole = self.base.laid_out(grad)
        change = new - part if self.inside else new - self.view.of(whole, self.base)
        self.view.of(whole, self.base).add_(change)
        return whole

    def _part(self, grad: Tensor) -> Tensor:
        if self.view.same_as(self.base):
            return grad
        return self.view.of(self.base.laid_out(grad), self.base)


class _Place:
    """Where a tensor's values are in its storage, and how they are read."""

    __slots__ = ("conj", "offset", "real", "size", "stride")

    def __init__(self, t: Tensor) -> None:
        self.size, self.stride, self.offset = t.size(), t.stride(), t.storage_offset()
        self.real, self.conj = not t.is_complex(), t.is_conj()

    def same_as(self, other: _Place) -> bool:
        """Whether both read the same values."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def laid_out(self, grad: Tensor) -> Tensor:
        """A copy of `grad` with the memory layout of the tensor."""
        return torch.empty_strided(
            self.size, self.stride, dtype=grad.dtype, device=grad.device
        ).copy_(grad)

    def of(self, whole: Tensor, base: _Place) -> Tensor:
        """The part of `whole`, which has the layout of `base`, that this tensor is of `base`."""
        offset = base.offset
        if self.real and not base.real:
            whole, offset = torch.view_as_real(whole), 2 * offset
        elif base.real and not self.real:
            n = whole.untyped_storage().nbytes() // whole.element_size() // 2
            whole, offset = torch.view_as_complex(whole.as_strided((n, 2), (2, 1), 0)), offset // 2
        part = whole.as_strided(self.size, self.stride, self.offset - offset)
        return part.conj() if self.conj != base.conj else part


def _counter(t: Tensor) -> Tensor:
    """An empty tensor that shares the version counter of `t`, and not its memory."""
    t = t.detach()
    t.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return t
