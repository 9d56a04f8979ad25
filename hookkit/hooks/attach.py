"""`attach`: call a function at each call of a module, for recorders; nothing is stored.

    switch = Switch()                              # shared by all hooks of one recorder
    handle = attach(module, f, switch=switch)      # f(module, args, kwargs, output)
    switch.on = False                              # registered still, but f is not called
    handle.remove()                                # any number of times

Hooks go on through PyTorch's public functions, so their order, `prepend` and `always_call` are
PyTorch's. A module's hooks are copied and pickled with it; the copies of an `AttachedFunction` do
nothing. `Hook` uses the checks of this file, and the note that names the hook on a user's error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookkit._core.checks import check_module
from hookkit._core.modules import can_run
from hookkit.errors import ArgumentError, HookError
from hookkit.hooks.calls import is_compiling


class Switch:
    """Holds whether the hooks that share it are on; a compiled graph guards only on `on`."""

    def __init__(self, on: bool = True) -> None:
        self.on = on


class AttachedFunction:
    """Calls `fn` while `switch` is on; `attach` registers it on a module. Copies do nothing.

    Attributes:
        fn: called with the module and PyTorch's arguments; None in a copy or a pickle.
        edit: whether the result of `fn` replaces the output (or the inputs), or is ignored.
        observes: whether the model computes the same without it.
        n_seen: how many arguments PyTorch passes after the module.
    """

    __slots__ = ("edit", "fn", "n_seen", "observes", "switch")

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        switch: Switch | None = None,
        edit: bool = False,
        observes: bool = True,
        n_seen: int = 3,
    ) -> None:
        self.fn, self.switch, self.edit = fn, switch or _ALWAYS, edit
        self.observes, self.n_seen = observes, n_seen

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        """Call `fn`, and return its result if it is to replace something."""
        # PyTorch still calls a hook that was removed while this call was running
        fn = self.fn
        if fn is None or not self.switch.on:
            return None
        # PyTorch notes in a second step that a hook takes keyword inputs, so a call in another
        # thread can come without them while the hook is being registered or removed.
        if len(seen) != self.n_seen:
            return None
        try:
            new = fn(module, *seen)
        except Exception as e:
            add_hook_note(e, fn, module_repr(module))
            raise
        return new if self.edit else None

    def __reduce__(self) -> Any:
        return AttachedFunction, ()


_ALWAYS = Switch()


def never_compiled_alone(code: CodeType) -> None:
    """Stop Dynamo from compiling `code` as a graph of its own after a graph break.

    Within its module's graph a hook is still traced. Graphs of single hooks would share the buffers
    that they write in their backward passes (statistics of gradients), and autograd raises.
    """
    # Private: `set_code_exec_strategy`, by which PyTorch's own wrappers are left out (2.11 has it;
    # it changes nothing for code that is traced within another's graph). Without it hooks are
    # compiled alone, as before.
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


never_compiled_alone(AttachedFunction.__call__.__code__)


def attach(
    module: nn.Module,
    fn: Callable[..., Any],
    *,
    pre: bool = False,
    prepend: bool = False,
    always_call: bool = False,
    edit: bool = False,
    backward: bool = False,
    observes: bool = False,
    switch: Switch | None = None,
) -> RemovableHandle:
    """Call `fn(module, args, kwargs, output)` at each forward of `module`; return PyTorch's handle.

    This is the bare mechanism for recorders: nothing is stored, detached, counted or skipped. The
    module holds `fn` strongly, the handle holds the module weakly; deepcopies and pickles of the
    module do not call `fn`. `torch.compile(fullgraph=True)` traces the hook if it can trace `fn`,
    when it is attached before the first call.

    Args:
        module: any module that is not scripted.
        fn: gets the positional inputs as a tuple, the keyword inputs as a dict, and the output.
        pre: call `fn(module, args, kwargs)` before the forward instead.
        prepend: run before the hooks that the module has, instead of after them.
        always_call: also run after a forward that raised; `output` is then None. Not for `pre`.
        edit: the result of `fn` (unless None) replaces the output; with `pre`, it is the pair
            `(args, kwargs)`. Without it the result is ignored.
        backward: call `fn(module, grad_inputs, grad_outputs)`, by PyTorch's full backward hook.
        observes: the `edit` returns equal values (views, or tensors with hooks).
        switch: `fn` is called only while it is on; one switch can serve many hooks.

    Raises:
        ArgumentError: `module` is no module, `fn` no function.
        HookError: `module` is scripted.

    >>> seen = []
    >>> layer = nn.Linear(2, 3)
    >>> handle = attach(layer, lambda m, args, kwargs, out: seen.append(tuple(out.shape)))
    >>> _ = layer(torch.ones(4, 2)); handle.remove(); _ = layer(torch.ones(5, 2)); seen
    [(4, 3)]
    """
    check_hookable(module, "attach")
    if not callable(fn):
        raise ArgumentError(
            f"attach: fn must be a function, found {type(fn).__name__}. "
            "Pass f(module, args, kwargs, output), or use hook_output(module) to store the output."
        )
    entry = AttachedFunction(fn, switch, edit, observes or not edit, 2 if pre or backward else 3)
    if backward:
        return module.register_full_backward_hook(entry, prepend=prepend)
    if pre:
        return module.register_forward_pre_hook(entry, prepend=prepend, with_kwargs=True)
    return module.register_forward_hook(
        entry, prepend=prepend, with_kwargs=True, always_call=always_call
    )


def remove_all(handles: Sequence[RemovableHandle]) -> None:
    """Remove the hooks of all `handles`, also if a Ctrl-C arrives meanwhile."""
    try:
        for handle in handles:
            handle.remove()
    except BaseException:
        for handle in handles:
            handle.remove()
        raise


_SINGLE = ("hook_output", "hook_input")


def check_hookable(module: Any, who: str) -> None:
    """Raise unless `module` is an nn.Module that runs its Python hooks: not scripted or traced."""
    if not isinstance(module, nn.Module):
        hint = ""
        if who in _SINGLE and isinstance(module, str):
            hint = f'By name: {who}s(select(model, "{module:.60}")).'
        elif who in _SINGLE and isinstance(module, Mapping | list | tuple):
            hint = f"{who}s takes several."
        check_module(who, module, hint)
    if isinstance(module, torch.jit.ScriptModule) and not can_run(module):
        raise HookError(
            f"{who}: {getattr(module, 'original_name', type(module).__name__)} is scripted or "
            "traced, and TorchScript runs no Python hooks. Hook the model it was made from."
        )


def call_with_note(fn: Callable[..., Any], module: nn.Module, *seen: Any) -> Any:
    """Return `fn(module, *seen)`; if it raises, add a note with the module to the error."""
    try:
        return fn(module, *seen)
    except Exception as e:
        add_hook_note(e, fn, module_repr(module))
        raise


def add_hook_note(e: Exception, fn: Callable[..., Any], label: str) -> None:
    """Add a note to `e`, which hook on which module raised it, unless the hook is hookkit's own."""
    while type(fn).__module__.startswith("hookkit.") and hasattr(fn, "f"):
        fn = fn.f  # the user's own function inside
    if is_compiling() or str(getattr(fn, "__module__", "")).startswith("hookkit."):
        return
    where = f"on {label}"
    if not any(n.startswith("hookkit:") and n.endswith(where) for n in getattr(e, "__notes__", ())):
        name = getattr(fn, "__qualname__", None) or type(fn).__name__
        e.add_note(f"hookkit: raised by the hook {name} {where}")


def module_repr(module: nn.Module) -> str:
    """Return a module in a few words: `Linear(in_features=5, out_features=10, bias=True)`, `Block`.

    >>> module_repr(nn.ReLU()), module_repr(nn.Sequential(nn.ReLU()))
    ('ReLU()', 'Sequential')
    """
    if isinstance(module, torch.jit.ScriptModule) or next(module.children(), None) is not None:
        return type(module).__name__
    text = repr(module).split("\n")[0]
    return text if len(text) <= 60 else type(module).__name__
