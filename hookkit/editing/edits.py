"""Change what a layer gives, takes, or gets as gradient, for the time of a `with`.

An edit is a hook that replaces what it sees and stores nothing: `Hooks(edit=True, keep="none")`.
Hooks run in the order in which they were written: what captures a layer before the edit sees the
layer's own output, what captures it after the edit sees the edited one.

    with hook_output(layer) as own, edit_output(layer, zero()), hook_output(layer) as edited:
        model(x)

The ready-made edits (`zero`, `scale`, `add`, `replace`, `patch_from`) are in `changes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from hookkit.checks import check_function, is_whole, shown
from hookkit.editing.changes import add, patch_from, replace, scale, zero
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.hooks import Hooks
from hookkit.hooks.calls import call
from hookkit.hooks.collection import Modules, Named, named_modules_of
from hookkit.hooks.entries import brief, check_hookable, recomputing
from hookkit.hooks.snapshot import FUNCTION_OF, Kind, Options

Function = Callable[..., Any]
Calls = int | Collection[int] | Callable[[int], bool] | None
_MAKERS: tuple[Function, ...] = (add, patch_from, replace, scale, zero)


def edit_output(
    module: nn.Module, f: Function, *, calls: Calls = None, prepend: bool = False
) -> Hooks:
    """Replaces what `module` returns by what `f(module, input, output)` returns.

    Registered at once, and removed by `remove()` or at the end of its `with` block, which warns if
    the layer was never reached. In the block, calls from other threads are not edited, and compiled
    models run eagerly. `Hook(module, f, edit=True)` edits in the same way, and stores the result.

    Args:
        module: the layer.
        f: gets the positional and keyword inputs as an `Inputs` tuple, and the live output; gives
            the replacement, of the same structure, or None to leave it. A function of one argument
            gets the output alone. Or a ready-made edit: `zero`, `scale`, `add`, `replace`,
            `patch_from`. It must not write into the output.
        calls: which calls of the module are edited, by their number, from 0 in each `with`: a
            collection of numbers, one number, or a function `f(number)`; None edits all. In
            `generate` 0 is the prompt, and each further call a token; give each its own `with`.
        prepend: before the hooks that the module has, which then see what is edited.

    Returns:
        `Hooks` that store nothing. `n_calls` counts the calls that reached each layer (or the
        gradients), by name; not those that a checkpoint repeats, nor those of a compiled graph.

    Raises:
        ArgumentError: `module` is no module, or `f` no function.
        OptionError: `calls` has what is no number of a call.
        HookError: `module` is scripted; later, in the forward: a replacement of another structure,
            a ready-made edit of an object in which no tensor is found, or `calls` where numbers are
            not known: outside of a `with` in a graph compiled with `fullgraph=True`, and in a
            checkpoint's recomputation of one of several calls.

    >>> import torch
    >>> net = nn.Sequential(nn.Identity(), nn.Flatten())
    >>> with edit_output(net[0], lambda module, input, output: output + 1):
    ...     net(torch.zeros(1, 2))
    tensor([[1., 1.]])
    """
    return _edits("edit_output", "forward", _one(module, "edit_output"), f, calls, prepend)


def edit_outputs(
    modules: Modules, f: Function, *, calls: Calls = None, prepend: bool = False
) -> Hooks:
    """`edit_output` for several modules, registered all or none. One given twice is edited once.

    Args:
        modules: an iterable of modules, a Sequential (its children), or what `select` returns,
            which brings names and leaf paths: of `"lstm[0]"` only that tensor is given to `f`.
        f: gets the module, its inputs and its output, or the output alone, as in `edit_output`.
        calls, prepend: as in `edit_output`, for each module.

    Returns:
        `Hooks` that store nothing; `n_calls` counts the calls that reached each layer, by name.

    Raises:
        ArgumentError, OptionError, HookError: as `edit_output`.

    >>> import torch
    >>> from hookkit.selecting import select
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> with edit_outputs(select(net, nn.Linear), zero()) as edits:
    ...     net(torch.ones(1, 2)).sum().item(), edits.n_calls
    (0.0, {'0': 1, '2': 1})
    """
    return _edits(
        "edit_outputs", "forward", named_modules_of(modules, "edit_outputs"), f, calls, prepend
    )


def edit_input(
    module: nn.Module, f: Function, *, calls: Calls = None, prepend: bool = False
) -> Hooks:
    """Replaces what `module` is called with by what `f(module, input)` returns.

    Registered, removed and limited to a block as `edit_output` is.

    Args:
        module: the layer.
        f: gets an `Inputs`: a tuple of the positional inputs, keyword inputs by name
            (`input["mask"]`, `input.kwargs`). It gives the one positional input, a tuple of as many
            as there are (keyword inputs stay), an `Inputs` for all, or None. Or a ready-made edit.
        calls, prepend: as in `edit_output`.

    Returns:
        `Hooks` that store nothing; `n_calls` counts the calls that reached the layer.

    Raises:
        ArgumentError, OptionError, HookError: as `edit_output`.

    >>> import torch
    >>> with edit_input(layer := nn.Identity(), scale(2)):
    ...     layer(torch.ones(2))
    tensor([2., 2.])
    """
    return _edits("edit_input", "pre", _one(module, "edit_input"), f, calls, prepend)


def edit_inputs(
    modules: Modules, f: Function, *, calls: Calls = None, prepend: bool = False
) -> Hooks:
    """`edit_input` for several modules, registered all or none.

    Args:
        modules: an iterable of modules, a Sequential (its children), or what `select` returns;
            leaf paths are into the inputs.
        f: as in `edit_input`.
        calls, prepend: as in `edit_output`, for each module.

    Returns:
        `Hooks` that store nothing; `n_calls` counts the calls that reached each layer, by name.

    Raises:
        ArgumentError, OptionError, HookError: as `edit_output`.

    >>> import torch
    >>> net = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit_inputs(net, scale(3)):
    ...     net(torch.ones(2))
    tensor([9., 9.])
    """
    return _edits("edit_inputs", "pre", named_modules_of(modules, "edit_inputs"), f, calls, prepend)


def edit_grad(module: nn.Module, f: Function) -> Hooks:
    """Replaces the gradient of each tensor that `module` returns by what `f(module, grad)` returns.

    Backward goes on from there with the replacement. Forward and backward have to run inside the
    block. It sees the gradient after the edits and hooks that were written before it.

    Args:
        module: the layer.
        f: is called for each tensor of the output by itself, when its gradient arrives, and gives a
            tensor of its shape, or None; it must not write into the gradient. Or a ready-made edit.

    Returns:
        `Hooks` that store nothing; `n_calls` counts the gradients that were edited.

    Raises:
        ArgumentError, HookError: as `edit_output`.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> with edit_grad(layer := nn.Identity(), scale(5)):
    ...     layer(x).sum().backward()
    >>> x.grad
    tensor([5., 5.])
    """
    return _edits("edit_grad", "grad", _one(module, "edit_grad"), f)


def edit_grads(modules: Modules, f: Function) -> Hooks:
    """`edit_grad` for several modules, registered all or none.

    Args:
        modules: an iterable of modules, a Sequential (its children), or what `select` returns.
        f: as in `edit_grad`.

    Returns:
        `Hooks` that store nothing; `n_calls` counts the gradients of each layer, by name.

    Raises:
        ArgumentError, HookError: as `edit_output`.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> with edit_grads(net := nn.Sequential(nn.Identity(), nn.Identity()), scale(5)):
    ...     net(x).sum().backward()
    >>> x.grad
    tensor([25., 25.])
    """
    return _edits("edit_grads", "grad", named_modules_of(modules, "edit_grads"), f)


def _one(module: nn.Module, who: str) -> list[Named]:
    check_hookable(module, who)
    return [(None, module, "")]


def _edits(
    who: str,
    kind: Kind,
    modules: Iterable[Named],
    f: Function,
    calls: Calls = None,
    prepend: bool = False,
) -> Hooks:
    """Registered hooks that edit and store nothing."""
    return Hooks.of_named(modules, edit_options(who, kind, f, calls, prepend))


def edit_options(
    who: str, kind: Kind, f: Function, calls: Calls = None, prepend: bool = False
) -> Options:
    """The options of hooks that edit by `f`, which is checked, and store nothing."""
    f = check_edit(who, f, *FUNCTION_OF[kind])
    if calls is not None:
        f = _AtCalls(who, f, calls)
    return Options(who, kind, f, edit=True, keep="none", prepend=prepend)


def check_edit(who: str, f: Any, *arguments: str) -> Function:
    """`f`, a function of `arguments`, or of the last one; not a maker of edits."""
    if any(f is maker for maker in _MAKERS):
        raise ArgumentError(
            f"{who}: {f.__name__} makes an edit, and is none itself. Call it: "
            f"{'zero()' if f is zero else f.__name__ + '(…)'}."
        )
    checked: Function = check_function(who, f, *arguments, name="f")
    return checked


class _AtCalls:
    """An edit that is made at some calls of its module only, by their number."""

    wants_hook = True

    def __init__(self, who: str, f: Function, calls: Any) -> None:
        self.who, self.f = who, f
        self.wanted: Callable[[int], bool]
        if callable(calls):
            self.wanted = check_function(who, calls, "number", name="calls")
            return
        numbers = calls if isinstance(calls, Collection) else [calls]
        if isinstance(calls, str) or not all(is_whole(n) and n >= 0 for n in numbers):
            raise OptionError(
                f"{who}(calls={shown(calls)}): calls are numbered 0, 1, … in each `with`. Give a "
                "collection of such numbers, or a function f(number) that is true for some."
            )
        self.wanted = frozenset(numbers).__contains__

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """What the edit gives, at a call that is wanted; else None."""
        if hook is None:
            raise HookError(
                f"{self.who} on {brief(module)}: compiled code does not count calls, so `calls` "
                "cannot be followed. Use the edit in a `with` block around the calls."
            )
        if not self._is_wanted(hook):
            if not hook.count:  # nothing was edited so far
                hook.missed = "calls"
            return None
        if hook.missed == "calls":
            hook.missed = None
        return call(hook, self.f, module, *seen)

    def _is_wanted(self, hook: Any) -> bool:
        if not recomputing():
            return bool(self.wanted(hook.count))
        answers = {bool(self.wanted(n)) for n in range(hook.count)}
        if len(answers) > 1:
            raise HookError(
                f"{self.who} on {hook.label()}: a checkpoint runs this layer again, and which of "
                f"its {hook.count} calls that is cannot be known. Drop `calls`, or the checkpoint."
            )
        return True in answers
