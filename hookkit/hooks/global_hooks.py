"""Hooks that are not on chosen modules: on one tensor, or on every module.

`hook_tensor` stores the gradient of one tensor, `hook_all` calls a function at each call of every
module of the process, and `print_sizes` prints the shapes that go through a whole model.

`hook_all` uses PyTorch's global hooks. While they are on, each call of every module costs about
1 µs more, so use it to look at a model, not in training. The file is longer than 300 lines, since
two of the three functions have their class beside them, and none of them is large.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from threading import Lock, local
from typing import Any, Self, TextIO
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from hookkit import ranks
from hookkit.checks import check_flag, check_function, check_module, kind_of
from hookkit.errors import ArgumentError, HookError, OverwrittenWarning
from hookkit.hooks.block import Block, Registered
from hookkit.hooks.collection import Hooks
from hookkit.hooks.entries import (
    HookEntry,
    Placed,
    called,
    in_thread,
    is_compiling,
    is_tracing,
    recomputing,
)
from hookkit.hooks.snapshot import Options, Snapshotter, StoredValue
from hookkit.hooks.views import ViewGradient, listen
from hookkit.interrupts import uninterrupted
from hookkit.nested import Inputs, describe, tmap
from hookkit.selecting import select, unwrap

# Private: `_global_forward_hooks_with_kwargs` of torch.nn.modules.module, which notes the global
# hooks that take keyword inputs (since 2.0). The public handle's `remove()` leaves the note behind,
# and torch.compile then warns of a global hook that is gone. Without the dict nothing is done, and
# that warning stays.
_with_kwargs: dict[int, bool] = getattr(
    torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {}
)


class TensorHook(Registered):
    """The gradient of one tensor: `stored` after each backward, None before. See `hook_tensor`."""

    removed = False

    def __init__(self, t: Tensor, options: Options) -> None:
        self._block, self._kept = Block(options), None
        self.shape = t.shape
        self._handle = listen(t, _weakly(ref(self)))

    _kept: StoredValue | None

    @property
    def stored(self) -> Tensor | None:
        """The gradient of the last backward pass, detached; None before the first.

        Warns if none could be stored, since the tensor has another node in the graph by now.
        """
        kept = self._kept
        if kept is None and isinstance(self._handle, ViewGradient) and self._handle.lost:
            self._warn_lost()
        gradient: Tensor | None = (
            None if kept is None else kept.read("hook_tensor", lambda: self.label)
        )
        if self._block.options.gather and (kept is None or not kept.whole):
            gradient = ranks.gather([gradient], ["the gradient of a tensor"])[0]
            if kept is not None:
                kept.value, kept.whole = gradient, True
        return gradient

    def _warn_lost(self) -> None:
        warnings.warn(
            f"hook_tensor: nothing is stored of {self.label}. The tensor is a view of a leaf (a "
            "parameter or an input) that was written in place after the hook was set, so autograd "
            "gave the view a new node. Set the hook after that operation, or hook the leaf.",
            OverwrittenWarning,
            stacklevel=3,
        )

    @property
    def label(self) -> str:
        """The tensor in words."""
        return f"the gradient of a {'×'.join(map(str, self.shape)) or 'scalar'} tensor"

    def _remove(self) -> None:
        self._handle.remove()
        self.removed = True

    def __enter__(self) -> Self:
        # As that of `Registered`, but compiled code goes on running compiled.
        try:
            self._block.depth += 1
            self._block.guard.begin()
        except BaseException:
            self._block.undo()
            raise
        return self

    def __repr__(self) -> str:
        return f"TensorHook({self.label}, {'empty' if self._kept is None else 'stored'})"


def _weakly(hook: ref[TensorHook]) -> Callable[[Tensor], None]:
    """The function that stores the gradient; the graph holds it, but not what is stored."""

    def receive(grad: Tensor) -> None:
        if (h := hook()) is not None and h._block.on:
            h._kept = Snapshotter(h._block.options).keep(grad)

    return receive


def hook_tensor(
    t: Tensor, detach: bool = True, cpu: bool = False, gather: bool = False
) -> TensorHook:
    """Stores the gradient of any intermediate tensor, which PyTorch does not keep, in `.stored`.

    Set it before the backward pass; each pass replaces what the last one stored. The gradient is
    that of the tensor as it is now: an in-place operation afterwards is one of its uses. If the
    tensor is a view and its memory is written, uses of the tensor that it is a view of count too.

    Args:
        t: a tensor that requires a gradient.
        detach: stores the gradient without a graph of its own.
        cpu: moves it to the CPU; from CUDA without waiting, until it is read.
        gather: reading `stored` joins the batches of all ranks; every rank has to read it.

    Returns:
        A `TensorHook`, registered already: `.stored`, `.remove()`; also a context manager.

    Raises:
        ArgumentError: `t` is no tensor.
        HookError: `t` requires no gradient.

    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> y = x + 2
    >>> h = hook_tensor(y)
    >>> (y**2).mean().backward()
    >>> h.stored
    tensor([[1.5000, 1.5000],
            [1.5000, 1.5000]])
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
    return TensorHook(t, Options("hook_tensor", "grad", None, detach, cpu, gather))


# The fused path of TransformerEncoder checks for hooks on its modules, not for global hooks or
# skipped modules, so it is off while there are any. They can end in any order, so their ids are
# kept in a set.
_lock = Lock()
_global: set[int] = set()  # the ids of those that there are
_fast_path = True


def switch_fused_path(hook: object, on: bool) -> None:
    """Switches the fused path off for the first of them, and restores it after the last."""
    global _fast_path
    with _lock:
        if on and not _global:
            _fast_path = torch.backends.mha.get_fastpath_enabled()
        if on:
            _global.add(id(hook))
        elif id(hook) in _global:
            _global.discard(id(hook))
        else:
            return
        torch.backends.mha.set_fastpath_enabled(_fast_path and not _global)


def _is_real() -> bool:
    """Whether the forward runs for its values: not to be compiled, traced or repeated."""
    return not (is_compiling() or recomputing() or is_tracing())


class GlobalHook(Registered):
    """A function called at each call of every module of the process. See `hook_all`."""

    _handle: RemovableHandle | None = None

    def __init__(self, func: Callable[..., Any], types: Any, pre: bool) -> None:
        self._func, self._types, self._pre = func, types, pre
        self._block, self._busy = Block(Options("hook_all")), local()
        self.n_calls = 0

    @property
    def removed(self) -> bool:
        """Whether it is not registered."""
        return self._handle is None

    @uninterrupted
    def _register(self) -> None:
        if self._handle is not None:
            return
        if self._pre:
            self._handle = register_module_forward_pre_hook(self._before)
        else:
            self._handle = register_module_forward_hook(self._after, with_kwargs=True)
        switch_fused_path(self, True)

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            _with_kwargs.pop(self._handle.id, None)
            switch_fused_path(self, False)
            self._handle = None

    def _before(self, module: nn.Module, args: Any) -> None:
        self._call(module, args, {})

    def _after(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        # PyTorch passes no kwargs if another thread removes this hook during the call.
        if len(kwargs_and_output) == 2:
            self._call(module, args, *kwargs_and_output)

    def _call(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if not _is_real() or self.removed or not isinstance(module, self._types):
            return
        if getattr(self._busy, "now", False):  # hook_func calls a module itself
            return
        if not (self._block.on and in_thread(self._block.thread)):
            return
        self._busy.now = True
        try:
            self.n_calls += 1
            seen = (tmap(Tensor.detach, x) for x in (Inputs(args, kwargs), *output))
            called(self._func, module, *seen)
        finally:
            self._busy.now = False

    def __repr__(self) -> str:
        return f"GlobalHook({self.n_calls} calls{', removed' if self.removed else ''})"


def global_tables() -> list[dict[int, Any]]:
    """PyTorch's dicts of global forward hooks, from which `untouched` takes those of `hook_all`."""
    # Private by their names, in torch 1.8 to 2.13: no public function takes a global hook off that
    # another has registered. Without them `hook_all` sees the runs of summaries.
    home = torch.nn.modules.module
    names = ("_global_forward_pre_hooks", "_global_forward_hooks")
    return [getattr(home, name, {}) for name in names]


def is_of_hook_all(hook: Any) -> bool:
    """Whether `hook`, of one of the `global_tables`, is that of a `GlobalHook`."""
    return isinstance(getattr(hook, "__self__", None), GlobalHook)


def hook_all(
    hook_func: Callable[..., Any],
    types: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    pre: bool = False,
) -> GlobalHook:
    """Calls `hook_func(module, input, output)` at each call of every module of the process.

    Also for modules made later, for losses, and for models that no variable refers to. Use it in a
    `with` block, which sees the calls of its own thread only, or `remove()` it. Tensors are
    detached. What the function returns is ignored, as are modules that it calls. TorchScript runs
    no hooks.

    Args:
        hook_func: `f(module, input, output)` or `f(output)`; `input` is an `Inputs`, a tuple that
            has keyword inputs by name.
        types: only modules of these classes.
        pre: calls `hook_func(module, input)` before the forward; PyTorch's global hooks give it the
            positional inputs only.

    Returns:
        A `GlobalHook`, registered already: `.remove()`; also a context manager.

    Raises:
        ArgumentError: `hook_func` is no function, `types` no module classes, or `pre` neither True
            nor False.

    >>> seen = []
    >>> with hook_all(lambda m, i, o: seen.append(tuple(o.shape)), nn.Linear):
    ...     y = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))(torch.randn(4, 5))
    >>> seen
    [(4, 10), (4, 3)]
    """
    several = (tuple, list, set, frozenset)
    wanted = tuple(types) if isinstance(types, several) else (types,)
    wanted = (nn.Module,) if types is None else wanted
    if isinstance(hook_func, nn.Module):
        raise ArgumentError(
            f"hook_all: hook_func must be a function, found {kind_of(hook_func)}. hook_all sees "
            "every model; for one use Hooks(model.modules(), f) or print_sizes(model)."
        )
    pre = check_flag("hook_all", "pre", pre)
    seen = ("module", "input") if pre else ("module", "input", "output")
    func = check_function("hook_all", hook_func, *seen)
    if not wanted or not all(isinstance(t, type) and issubclass(t, nn.Module) for t in wanted):
        raise ArgumentError(
            f"hook_all: types must be module classes, found {types!r}. Pass nn.Linear, or a tuple."
        )
    hook = GlobalHook(func, wanted, pre)
    hook.register()
    return hook


def print_sizes(model: nn.Module, file: TextIO | None = None) -> Hooks:
    """Prints `input shape → output shape`, name and class of each module of `model` as it runs.

    A line is printed when a call ends, so inner modules come first. Use it in a `with` block, or
    `remove()` it.

    Args:
        model: a model.
        file: where to, as of `print`; the standard output by default.

    Returns:
        The `Hooks`, registered already.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with print_sizes(net):
    ...     y = net(torch.randn(4, 5))
    4×5 → 4×10  0 (Linear)
    4×10 → 4×10  1 (ReLU)
    4×5 → 4×10  (model) (Sequential)
    """
    if file is not None and not callable(getattr(file, "write", None)):
        raise ArgumentError(
            f"print_sizes: file must be an open text file, found {kind_of(file)}. Pass "
            'open("sizes.txt", "w"), or nothing to print.'
        )
    found = {"": unwrap(check_module("print_sizes", model)), **select(model)}
    ms = {name: m for name, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}

    def entries(name: str, module: nn.Module, leaf: str) -> list[Placed]:
        return [(HookEntry(_printer(name, file)), {})]

    return Hooks.of(ms, Options("print_sizes", "recorder", keep="none", entries=entries))


def _printer(name: str, file: TextIO | None) -> Callable[..., None]:
    """The hook that prints the sizes of the module called `name`."""

    def write(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not _is_real():
            return
        given = describe(args[0] if len(args) == 1 and not kwargs else Inputs(args, kwargs))
        line = f"{given} → {describe(output)}  {name or '(model)'} ({type(module).__name__})"
        (file or sys.stdout).write(line + "\n")

    return write
