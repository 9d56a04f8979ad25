"""`edit_options`: of hooks that edit by a user's function, by a ready-made edit, or by several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from hookkit._core.checks import check_function, is_whole, short_repr
from hookkit.edits.changes import add, patch_from, replace, scale, zero
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.hooks.attach import add_hook_note
from hookkit.hooks.calls import call_kind
from hookkit.hooks.hook import NOT_WANTED
from hookkit.hooks.options import KINDS, HookOptions

Function = Callable[..., Any]
Calls = int | Collection[int] | Callable[[int], bool] | None
_MAKERS: tuple[Function, ...] = (add, patch_from, replace, scale, zero)


def edit_options(who: str, kind: str, f: Any, calls: Calls = None) -> HookOptions:
    """Return the options of hooks that edit by `f` (or a dict, by name) and store nothing.

    Args:
        who: the function called, for messages.
        kind: of the hooks, which says what an edit is called with.
        f: a function of these arguments, or of the last one; or a ready-made edit, which is given
            the hook.
        calls: as in `edit_output`.
    """
    wanted = None if calls is None else _wanted(who, calls)

    def edit(f: Any) -> Any:
        if any(f is maker for maker in _MAKERS):
            raise ArgumentError(
                f"{who}: {f.__name__} makes an edit, and is none itself. Call it: {f.__name__}(…)."
            )
        if not getattr(f, "wants_hook", False):
            f = check_function(who, f, *KINDS[kind], name="f")
        return f if wanted is None else _SomeCalls(who, f, wanted)

    several = isinstance(f, Mapping)
    func = _ByLayer({name: edit(one) for name, one in f.items()}) if several else edit(f)
    return HookOptions(who, kind, func, edit=True, keep="none")


def _call(f: Any, module: nn.Module, seen: Any, hook: Any) -> Any:
    return f(module, *seen, hook=hook) if getattr(f, "wants_hook", False) else f(module, *seen)


class _SomeCalls:
    """An edit at those calls of a module whose number is wanted."""

    wants_hook = True

    def __init__(self, who: str, f: Any, wanted: Callable[[int], bool]) -> None:
        self.who, self.f, self.wanted = who, f, wanted

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """Return the replacement, or None to leave what is there."""
        call = call_kind()
        if call == "compiled" or (call == "recomputed" and hook.n_calls > 1):
            raise HookError(
                f"{self.who} on {hook.label}: compiled code and checkpoints that run a layer "
                "several times do not say which call this is, so `calls` cannot be followed. Use "
                "the edit in a `with` block, without checkpoints."
            )
        edits = self.wanted(0 if call == "recomputed" else hook.n_calls)
        hook.silent_reason = "edited" if edits else hook.silent_reason or NOT_WANTED
        return _call(self.f, module, seen, hook) if edits else None


class _ByLayer:
    """Another edit for each layer, by the name of its hook."""

    wants_hook = True

    def __init__(self, edits: Mapping[str, Any]) -> None:
        self.edits = edits

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """Return the replacement of the layer's edit."""
        edit = self.edits[hook.name]
        try:
            return _call(edit, module, seen, hook)
        except Exception as e:
            add_hook_note(e, edit, hook.label)
            raise


def _wanted(who: str, calls: Any) -> Any:
    """Return `f(number)`, which says whether a call is one of `calls`."""
    if callable(calls):
        return check_function(who, calls, "number", name="calls")
    numbers = calls if isinstance(calls, Collection) else [calls]
    if not all(is_whole(n) and n >= 0 for n in numbers):
        raise OptionError(
            f"{who}(calls={short_repr(calls)}): calls are numbered 0, 1, … in each `with`. Give a "
            "collection of such numbers, or a function f(number) that is true for some."
        )
    return frozenset(numbers).__contains__
