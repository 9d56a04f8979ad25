"""Hooks on one tensor, on every module of the process, and on a model to print its sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from threading import local
from typing import Any, Self, TextIO

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hookkit.checks import check_flag, check_function, check_module
from hookkit.errors import ArgumentError, HookError
from hookkit.hooks.attach import called, recomputing
from hookkit.hooks.block import Block
from hookkit.hooks.collection import Hooks
from hookkit.hooks.eager import layer_by_layer
from hookkit.hooks.snapshot import store
from hookkit.modules import unwrap
from hookkit.nested import Inputs, describe, tmap
from hookkit.selecting import select


class _On:
    """A hook that is on when it is made, until `remove()` or the end of its `with`."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def remove(self) -> None:
        """Removes it; can be repeated."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class TensorHook(_On):
    """The gradient of one tensor: `stored` after each backward, None before. See `hook_tensor`."""

    stored: Tensor | None = None


def hook_tensor(t: Tensor, detach: bool = True, cpu: bool = False) -> TensorHook:
    """Stores the gradient of a tensor that PyTorch keeps none of, in `.stored`.

    Set it before the backward pass; each pass replaces what the last one stored.

    Args:
        t: a tensor that requires a gradient.
        detach: stores the gradient without a graph of its own.
        cpu: moves it to the CPU.

    Returns:
        A `TensorHook`, registered already: `.stored`, `.remove()`; also a context manager.

    Raises:
        ArgumentError: `t` is no tensor.
        HookError: `t` requires no gradient.

    >>> y = torch.ones(2, requires_grad=True) + 2
    >>> with hook_tensor(y) as h: (y**2).sum().backward()
    >>> h.stored
    tensor([6., 6.])
    """
    if not isinstance(t, Tensor):
        raise ArgumentError(
            f"hook_tensor: expected a tensor, found {type(t).__name__}. For what a module returns "
            "use hook_output(module, grad=True)."
        )
    if not t.requires_grad:
        raise HookError(
            f"hook_tensor: this {describe(t)} tensor does not require a gradient. "
            "Compute it from parameters or inputs with requires_grad=True, outside no_grad."
        )
    hook, block = TensorHook(), Block("hook_tensor", "grad", None, detach, cpu)
    handle = t.register_hook(lambda g: setattr(hook, "stored", store(g, block)))  # type: ignore
    hook._undo.callback(handle.remove)
    return hook


class GlobalHook(_On):
    """A function called at each call of every module of the process. See `hook_all`."""

    def __init__(self, func: Callable[..., Any], types: Any, pre: bool) -> None:
        super().__init__()
        self.func, self.types, self.n_calls, self._thread = func, types, 0, local()
        self._undo.enter_context(layer_by_layer())
        register = register_module_forward_pre_hook if pre else register_module_forward_hook
        self._undo.callback(register(self._call).remove)

    def _call(self, module: nn.Module, args: Any, *output: Any) -> None:
        busy = getattr(self._thread, "busy", False)  # the function may call a module itself
        if busy or recomputing() or not isinstance(module, self.types):
            return
        self.n_calls += 1
        self._thread.busy = True
        try:
            called(self.func, module, *[tmap(Tensor.detach, x) for x in (Inputs(args), *output)])
        finally:
            self._thread.busy = False


def hook_all(
    hook_func: Callable[..., Any],
    types: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    pre: bool = False,
) -> GlobalHook:
    """Calls `hook_func(module, input, output)` at each call of every module of the process.

    Also for modules made later, for losses, and for models that no variable refers to; each call
    costs about 1 µs more. Tensors are detached, keyword inputs are not given, and what the function
    returns is ignored. TorchScript runs no hooks; what is compiled runs eagerly meanwhile, in all
    threads.

    Args:
        hook_func: `f(module, input, output)` or `f(output)`; `input` is a tuple.
        types: only modules of these classes.
        pre: calls `hook_func(module, input)` before the forward.

    Returns:
        A `GlobalHook`, registered already: `.remove()`, `.n_calls`; also a context manager.

    Raises:
        ArgumentError: `hook_func` is no function, `types` no module classes, or `pre` neither True
            nor False.

    >>> seen = []
    >>> with hook_all(lambda m, i, o: seen.append(tuple(o.shape)), nn.Linear):
    ...     y = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))(torch.randn(4, 5))
    >>> seen
    [(4, 10), (4, 3)]
    """
    wanted: Any = nn.Module if types is None else types
    wanted = tuple(wanted) if isinstance(wanted, (tuple, list, set)) else (wanted,)
    pre = check_flag("hook_all", "pre", pre)
    func = check_function("hook_all", hook_func, "module", "input", *([] if pre else ["output"]))
    if not all(isinstance(t, type) and issubclass(t, nn.Module) for t in wanted):
        raise ArgumentError(
            f"hook_all: types must be module classes, found {types!r}. Pass nn.Linear, or a tuple."
        )
    return GlobalHook(func, wanted, pre)


def global_tables() -> list[dict[int, Any]]:
    """PyTorch's dicts of global forward hooks, from which `untouched` takes those of `hook_all`."""
    # Private by their names, in torch 1.8 to 2.13: no public function takes a global hook off that
    # another has registered. Without them `hook_all` sees the runs of summaries.
    names = ("_global_forward_pre_hooks", "_global_forward_hooks")
    return [getattr(nn.modules.module, name, {}) for name in names]


def is_of_hook_all(hook: Any) -> bool:
    """Whether `hook`, of one of the `global_tables`, is that of a `GlobalHook`."""
    return isinstance(getattr(hook, "__self__", None), GlobalHook)


def print_sizes(model: nn.Module, file: TextIO | None = None) -> Hooks:
    """Prints `input shape → output shape`, name and class of each module of `model` as it runs.

    A line is printed when a call ends, so inner modules come first.

    Args:
        model: a model.
        file: where to, as of `print`.

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
        name, kind = names.get(id(module), "(a copy)"), type(module).__name__  # DataParallel's
        print(f"{given} → {describe(output)}  {name} ({kind})", file=file or sys.stdout)

    return Hooks.made(ms, Block("print_sizes", "forward", write, keep="none"))
