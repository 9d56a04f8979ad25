"""Hooks that remember: `Hook` for one module, `Hooks` for many, and the functions that make them.

Builds on `dispatching` (how a hook sits in a module), `capturing` (what is stored), `gradients`
(tensor hooks) and `compiling`. A hook is registered when it is made and removed by `remove()` or
at the end of its `with` block, whatever happens in it; entering it again registers it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hookkit.capturing import Options
from hookkit.dispatching import attach, recomputing
from hookkit.gradients import attach_grad, on_grad
from hookkit.hooking import Hook, Hooks, StopForward
from hookkit.nested import Inputs

__all__ = [
    "Hook",
    "Hooks",
    "Inputs",
    "StopForward",
    "attach",
    "attach_grad",
    "hook_input",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "on_grad",
    "recomputing",
]

Modules = Iterable[nn.Module] | Mapping[str, nn.Module]


def hook_output(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
) -> Hook:
    """A `Hook` that stores what `module` returns, or with `grad=True` the gradient of that.

    `stored` has the structure of the output. With `grad` it is a tuple with the gradient of each
    tensor of the output (None where none arrived), filled in by the backward pass.

    >>> m = nn.Linear(5, 3)
    >>> with hook_output(m) as h:
    ...     y = m(torch.randn(4, 5))
    >>> torch.equal(h.stored, y), h.stored.requires_grad
    (True, False)
    """
    kind = "grad" if grad else "forward"
    o = Options("hook_output", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
    return Hook.of(module, o)


def hook_outputs(
    modules: Modules,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
) -> Hooks:
    """`Hooks` that store what each of `modules` returns, or the gradients of that: `hook_output`.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    >>> with hook_outputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(o.shape) for o in h.stored]
    [(4, 10), (4, 10), (4, 3)]
    """
    kind = "grad" if grad else "forward"
    o = Options("hook_outputs", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
    return Hooks.of(modules, o)


def hook_input(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
) -> Hook:
    """A `Hook` that stores what `module` is called with, as `Inputs`, before it can change it.

    With `grad=True` the gradients of that: a tuple with one entry for each tensor among the
    positional inputs and then the keyword inputs, None where none arrived.

    >>> m = nn.Linear(5, 3)
    >>> with hook_input(m) as h:
    ...     y = m(input=torch.randn(4, 5))
    >>> h.stored["input"].shape
    torch.Size([4, 5])
    """
    kind = "pre_grad" if grad else "pre"
    o = Options("hook_input", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
    return Hook.of(module, o)


def hook_inputs(
    modules: Modules,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
) -> Hooks:
    """`Hooks` that store what each of `modules` is called with, or the gradients: `hook_input`.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with hook_inputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(i[0].shape) for i in h.stored]
    [(4, 5), (4, 10)]
    """
    kind = "pre_grad" if grad else "pre"
    o = Options("hook_inputs", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
    return Hooks.of(modules, o)
