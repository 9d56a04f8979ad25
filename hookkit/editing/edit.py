"""`Edit`: what a hook calls for a user's function, or a ready-made edit, and `edit_options`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import nn

from hookkit.checks import OfLast, check_function, is_whole, shown
from hookkit.editing.changes import add, patch_from, replace, scale, zero
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.hooks.attach import note
from hookkit.hooks.calls import call_kind
from hookkit.hooks.hook import NOT_WANTED
from hookkit.hooks.options import KINDS, HookOptions

Function = Callable[..., Any]
Calls = int | Collection[int] | Callable[[int], bool] | None
_MAKERS: tuple[Function, ...] = (add, patch_from, replace, scale, zero)


def edit_options(who: str, kind: str, f: Any, calls: Calls = None) -> HookOptions:
    """Return the options of hooks that edit by `f` (or a dict, by name) and store nothing."""
    if isinstance(f, Mapping):
        each = {name: Edit(who, edit, *KINDS[kind], calls=calls) for name, edit in f.items()}
        return HookOptions(who, kind, _ByLayer(each), edit=True, keep="none")
    return HookOptions(who, kind, Edit(who, f, *KINDS[kind], calls=calls), edit=True, keep="none")


class Edit:
    """What a hook calls for the user's `f`: at the calls that are wanted, with what `f` asks for.

    Args:
        who: the function called, for messages.
        f: a function of `arguments`, or of the last one, and of `name` (without a default) if it
            likes; or a ready-made edit, which is given the hook.
        arguments: names of what it is called with.
        calls: as in `edit_output`.
    """

    wants_hook = True

    def __init__(self, who: str, f: Any, *arguments: str, calls: Calls = None) -> None:
        if any(f is maker for maker in _MAKERS):
            raise ArgumentError(
                f"{who}: {f.__name__} makes an edit, and is none itself. Call it: {f.__name__}(…)."
            )
        self.who, self.f, self.takes_name, self.of_last = who, f, False, False
        if not getattr(f, "wants_hook", False):  # else it is a ready-made one
            self.takes_name = _takes_name(f)
            plain = partial(f, name="") if self.takes_name else f
            self.of_last = isinstance(check_function(who, plain, *arguments, name="f"), OfLast)
        self.wanted = None if calls is None else _wanted(who, calls)

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """The replacement, or None to leave what is there."""
        if self.wanted is not None and not self._edits(self.wanted, hook):
            return None
        given = seen[-1:] if self.of_last else (module, *seen)
        if self.takes_name:
            return self.f(*given, name=hook.label if hook.name is None else hook.name)
        if getattr(self.f, "wants_hook", False):
            return self.f(*given, hook=hook)
        return self.f(*given)

    def _edits(self, wanted: Callable[[int], bool], hook: Any) -> bool:
        """Whether this call of the module is a wanted one."""
        call = call_kind()
        if call == "compiled" or (call == "recomputed" and hook.n_calls > 1):
            raise HookError(
                f"{self.who} on {hook.label}: compiled code and checkpoints that run a layer "
                "several times do not say which call this is, so `calls` cannot be followed. Use "
                "the edit in a `with` block, without checkpoints."
            )
        edits = wanted(0 if call == "recomputed" else hook.n_calls)
        hook.why = "edited" if edits else hook.why or NOT_WANTED
        return edits


class _ByLayer:
    """Another edit for each layer, by the name of its hook."""

    wants_hook = True

    def __init__(self, edits: Mapping[str, Edit]) -> None:
        self.edits = edits

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """What the layer's edit gives."""
        edit = self.edits[hook.name]
        try:
            return edit(module, *seen, hook=hook)
        except Exception as e:
            note(e, edit, hook.label)
            raise


def _takes_name(f: Any) -> bool:
    """Whether `f` has a parameter `name`; one with a default, `name=name`, is the user's own."""
    try:
        parameters = signature(f).parameters
    except (TypeError, ValueError):
        return False
    own = parameters.get("name")
    return own is not None and own.default is Parameter.empty and len(parameters) > 1


def _wanted(who: str, calls: Any) -> Any:
    """`f(number)`: whether a call is one of `calls`."""
    if callable(calls):
        return check_function(who, calls, "number", name="calls")
    numbers = calls if isinstance(calls, Collection) else [calls]
    if not all(is_whole(n) and n >= 0 for n in numbers):
        raise OptionError(
            f"{who}(calls={shown(calls)}): calls are numbered 0, 1, … in each `with`. Give a "
            "collection of such numbers, or a function f(number) that is true for some."
        )
    return frozenset(numbers).__contains__
