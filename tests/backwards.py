"""A backward pass in a thread of PyTorch's own: on a GPU every one runs so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BackwardIn = Callable[[Callable[[], object]], None]

_DEPTH = 70  # PyTorch runs 60 backward passes within each other in the thread that began them


def here(backward: Callable[[], object]) -> None:
    """Calls `backward` as on a CPU."""
    backward()


def pytorchs_thread(backward: Callable[[], object], depth: int = _DEPTH) -> None:
    """Calls `backward` so deep within other backward passes that PyTorch takes another thread."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        _Within.apply(x, backward, depth).sum().backward()


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[], object], depth: int) -> Tensor:
        ctx.inner, ctx.depth = backward, depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth:
            pytorchs_thread(ctx.inner, ctx.depth - 1)
        else:
            ctx.inner()
        return grad, None, None
