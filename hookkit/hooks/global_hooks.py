"""Hooks on one tensor, on every module of the process, and on a model to print its sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hookkit.checks import check_function, check_module
from hookkit.hooks.attach import called, recomputing
from hookkit.hooks.block import KINDS, Block
from hookkit.hooks.collection import Hooks
from hookkit.hooks.eager import layer_by_layer
from hookkit.modules import unwrap
from hookkit.nested import Inputs, describe, tmap
from hookkit.selecting import select


class GlobalHook(ExitStack):
    """A hook that is on when it is made, until `remove()` or the end of its `with`."""

    remove = ExitStack.close


class TensorHook(GlobalHook):
    """The gradient of one tensor: `stored` after each backward, None before. See `hook_tensor`."""

    stored: Tensor | None = None


def hook_tensor(t: Tensor) -> TensorHook:
    """Stores a copy of the gradient of a tensor that PyTorch keeps none of, in `.stored`.

    Set it before the backward pass; each pass replaces what the last one stored.

    Args:
        t: a tensor that requires a gradient.

    Returns:
        A `TensorHook`, registered already: `.stored`, `.remove()`; also a context manager.

    Raises:
        RuntimeError: PyTorch's own, if `t` requires no gradient.

    >>> y = torch.ones(2, requires_grad=True) + 2
    >>> with hook_tensor(y) as h: (y**2).sum().backward()
    >>> h.stored
    tensor([6., 6.])
    """
    hook = TensorHook()

    def keep(grad: Tensor) -> None:
        hook.stored = grad.detach().clone()

    hook.callback(t.register_hook(keep).remove)  # type: ignore[no-untyped-call]
    return hook


def hook_all(
    hook_func: Callable[..., Any],
    types: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module,
) -> GlobalHook:
    """Calls `hook_func(module, input, output)` at each call of every module of the process.

    It is PyTorch's global hook, also for modules made later, for losses, and for what summaries
    run. Tensors are detached, keyword inputs are not given, and what the function returns is
    ignored; it must not call such a module itself. TorchScript runs no hooks; what is compiled runs
    eagerly meanwhile, in all threads.

    Args:
        hook_func: `f(module, input, output)` or `f(output)`; `input` is a tuple.
        types: only modules of this class, or of one of a tuple of classes.

    Returns:
        The hook, registered already: `.remove()`; also a context manager.

    Raises:
        ArgumentError: `hook_func` is no function.
        TypeError: `types` has what is no class.

    >>> seen = []
    >>> with hook_all(lambda m, i, o: seen.append(tuple(o.shape)), nn.Linear):
    ...     y = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))(torch.randn(4, 5))
    >>> seen
    [(4, 10), (4, 3)]
    """
    func = check_function("hook_all", hook_func, *KINDS["forward"])
    isinstance(None, types)  # Python's error now, and not in the first call

    def call(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, types) and not recomputing():
            called(func, module, tmap(Tensor.detach, Inputs(args)), tmap(Tensor.detach, output))

    hook = GlobalHook()
    hook.enter_context(layer_by_layer())
    hook.callback(register_module_forward_hook(call).remove)
    return hook


def print_sizes(model: nn.Module) -> Hooks:
    """Prints `input shape → output shape`, name and class of each module of `model` as it runs.

    A line is printed when a call ends, so inner modules come first.

    Args:
        model: a model.

    Returns:
        The `Hooks`, registered already.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with print_sizes(net): y = net(torch.randn(4, 5))
    4×5 → 4×10  0 (Linear)
    4×10 → 4×10  1 (ReLU)
    4×5 → 4×10  (model) (Sequential)
    """
    found = {"": unwrap(check_module("print_sizes", model)), **select(model)}
    ms = {name: m for name, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}
    names = {id(m): name or "(model)" for name, m in ms.items()}

    def write(module: nn.Module, inputs: Inputs, output: Any) -> None:
        given = describe(inputs[0] if len(inputs) == 1 and not inputs.kwargs else inputs)
        name = names.get(id(module), "(a copy)")  # DataParallel's
        line = f"{given} → {describe(output)}  {name} ({type(module).__name__})"
        print(line)  # noqa: T201 - it is what the function is for

    return Hooks.made(ms, Block("print_sizes", "forward", write, keep="none"))
