"""Hooks on one tensor, on every module of the process, and on a model to print its sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hookkit.checks import check_function
from hookkit.hooks.attach import called
from hookkit.hooks.calls import recomputing
from hookkit.hooks.collection import Hooks, hooks_of, named_modules_of
from hookkit.hooks.eager import layer_by_layer
from hookkit.hooks.functions import modules_inside
from hookkit.hooks.options import KINDS, HookOptions
from hookkit.nested import Inputs, describe, tmap


class GlobalHook(ExitStack):
    """A hook that is on when it is made, until `remove()` or the end of its `with`."""

    remove = ExitStack.close


class TensorHook(GlobalHook):
    """The gradient of one tensor: `stored` after each backward, None before. See `hook_tensor`."""

    stored: Tensor | None = None


def hook_tensor(t: Tensor) -> TensorHook:
    """Store a copy of the gradient of `t`, of which PyTorch keeps none, in `.stored`.

    Call it before the backward pass; each pass replaces what the last one stored. The hook is on at
    once. If `t` requires no gradient, PyTorch raises a RuntimeError.

    >>> import torch
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
    """Call `hook_func(module, input, output)` at each call of every module of the process.

    This is PyTorch's global hook, on at once, also for modules made later, for losses, and for what
    summaries run. Tensors are detached, keyword inputs are not given, and what the function returns
    is ignored; it must not call such a module itself. TorchScript runs no hooks; compiled code runs
    eagerly meanwhile, in all threads.

    Args:
        hook_func: `f(module, input, output)` or `f(output)`; `input` is a tuple.
        types: only modules of this class, or of one of a tuple of classes.

    >>> import torch
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
    """Print `input shape → output shape`, name and class of each module of `model` as it runs.

    A line is printed when a call ends, so inner modules come first. The `Hooks` are on at once.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with print_sizes(net): y = net(torch.randn(4, 5))
    4×5 → 4×10  0 (Linear)
    4×10 → 4×10  1 (ReLU)
    4×5 → 4×10  (model) (Sequential)
    """
    modules = modules_inside(model, "print_sizes")
    names = {id(m): name or "(model)" for name, m in modules.items()}

    def write(module: nn.Module, inputs: Inputs, output: Any) -> None:
        name = names.get(id(module), "(a copy)")  # DataParallel's
        line = f"{describe(inputs)} → {describe(output)}  {name} ({type(module).__name__})"
        print(line)  # noqa: T201 - it is what the function is for

    options = HookOptions("print_sizes", "forward", write, keep="none")
    return hooks_of(named_modules_of(modules, "print_sizes"), options)
