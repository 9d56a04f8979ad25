"""Options of hooks (`HookOptions`), and the time for which hooks are on (`HookScope`).

Hooks that are made together share one scope, and the scope has their options. There are two
lifetimes. Hooks that store, and a `Hook` or `Hooks` with a user's function, are registered when
they are made, until `remove()` or the end of a `with` block. Edits, functions and attention are on
inside their `with` block alone (`only_in_with`). Entering a block begins anew: counts and stored
values are cleared. `remove()` turns hooks off at once, and `register()` turns them on again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookkit._core.checks import OfLast, check_choice, check_flag, check_function
from hookkit._core.messages import warn
from hookkit.errors import HookError, NeverFiredWarning, OptionError
from hookkit.hooks.eager import EAGER, enter_eager

if TYPE_CHECKING:
    from hookkit.hooks.hook import Hook

KINDS = {
    "forward": ("module", "input", "output"),
    "pre": ("module", "input"),
    "backward": ("module", "grad_input", "grad_output"),
    "grad": ("module", "grad"),
    "pre_grad": ("module", "grad"),
}
"""The arguments of a hook function of each kind."""

BY_NAME = "Modules by name come from select(model, name); options are best given by name."
NO_BACKWARD = "no backward pass reached it inside the block, or its memory was written in place"


class StopForward(BaseException):
    """Ends a forward pass once every hook of a `with … stop=True` block has fired.

    It is not an `Exception`, so `except Exception` in a model does not catch it. The block does.
    """

    def __init__(self, owner: object) -> None:
        super().__init__(
            "stop=True: the last wanted layer has fired. Run the model inside the `with` block "
            "of the hooks, which ends here."
        )
        self.owner = owner


def hook_kind(who: str, is_forward: bool, pre: bool) -> str:
    """Return the kind of hook, a key of `KINDS`, that `is_forward` and `pre` ask for."""
    pre = check_flag(who, "pre", pre)
    is_forward = check_flag(who, "is_forward", is_forward)
    if pre and not is_forward:
        raise OptionError(
            f"{who}: pre=True is for forward hooks, and is_forward=False makes a backward one. "
            "Use hook_input(module, grad=True) for the gradients of inputs."
        )
    return "pre" if pre else "forward" if is_forward else "backward"


class HookOptions:
    """Holds the options of `Hook`, checked. Nothing changes them afterwards.

    Attributes:
        who: the public function that was called, for messages.
        kind: when PyTorch calls the hook: a key of `KINDS`.
        func: called with the arguments of `KINDS[kind]`; None stores the output (or inputs).
        takes_last: `func` takes the last argument alone.
        wants_hook: `func` is a ready-made edit, which is also given the hook.
        fast: the hook does nothing but store the last output.
        The other attributes are arguments of `Hook`.
    """

    def __init__(
        self,
        who: str = "Hook",
        kind: str = "forward",
        func: Callable[..., Any] | None = None,
        detach: bool = True,
        cpu: bool = False,
        gather: bool = False,
        *,
        edit: bool = False,
        keep: str = "last",
        clone: bool = True,
        stop: bool = False,
        prepend: bool = False,
    ) -> None:
        flags = {"detach": detach, "cpu": cpu, "gather": gather, "edit": edit, "clone": clone}
        for name, flag in {**flags, "stop": stop, "prepend": prepend}.items():
            if flag is not True and flag is not False:
                check_flag(who, name, flag, BY_NAME)
        check_choice(who, "keep", keep, ("last", "all", "none"))
        self.who, self.kind = who, kind
        self.wants_hook = getattr(func, "wants_hook", False)
        if func is not None and not self.wants_hook and not isinstance(func, OfLast):
            func = check_function(who, func, *KINDS[kind])
        self.func = func
        self.takes_last = isinstance(func, OfLast) or getattr(func, "of_last", False)
        self.detach, self.cpu, self.gather = bool(detach), bool(cpu), bool(gather)
        self.edit, self.keep, self.clone = bool(edit), keep, bool(clone)
        self.stop, self.prepend = bool(stop), bool(prepend)
        if stop and kind not in ("forward", "pre"):
            raise OptionError(
                f"{who}: stop=True ends the forward pass, but gradients need all of it. "
                "Drop stop=True, or capture values instead."
            )
        if edit and func is None:
            raise OptionError(
                f"{who}: edit=True needs a function whose result replaces what it sees. "
                "Use Hook(module, hook_func, edit=True), or edit_output(module, f)."
            )
        self.fast = kind == "forward" and func is None and keep == "last"
        self.fast = self.fast and self.clone and not (self.cpu or self.stop)


class HookScope:
    """Registers, enters and removes hooks that were made together.

    Attributes:
        only_in_with: the hooks are on inside their `with` block alone.
        names_are_positions: the hooks' names are positions in a list, not names in a model.
        on: False switches the hooks off while they stay registered. A compiled graph guards on it.
        n_entered: how many outermost `with` blocks were begun.
        depth: how many `with` blocks are open, one inside the other.
        waiting: in a block with `stop=True`, the ids of the hooks that have not fired; else None.
        warned: whether a warning that is given only once was given.
        pending: devices from which copies are on their way to the CPU.
    """

    def __init__(
        self,
        options: HookOptions,
        *,
        only_in_with: bool = False,
        names_are_positions: bool = False,
    ) -> None:
        self.options, self.only_in_with = options, only_in_with
        self.names_are_positions, self.on, self.warned = names_are_positions, True, False
        self.n_entered, self.depth = 0, 0
        self.waiting: set[int] | None = None
        self.pending = set[torch.device]()

    def register(self, hooks: Sequence[Hook]) -> None:
        """Register all hooks on their modules, or none; registered hooks are not changed.

        Raises:
            HookError: a module is gone; or the hooks are `only_in_with`, and no `with` is open.
        """
        if self.only_in_with and not self.depth:
            raise HookError(
                f"{self.options.who}: edits and hooks on functions are on inside their `with` "
                "only. Write `with h:` around the model."
            )
        try:
            for h in hooks:
                h._register()
        except BaseException:
            self.unregister(hooks)
            raise

    def unregister(self, hooks: Sequence[Hook]) -> bool:
        """Take all hooks off their modules; return True if each of them has fired."""
        try:
            return _unregister(hooks)
        except BaseException:  # after Ctrl-C, remove the hooks that are left
            _unregister(hooks)
            raise

    def enter(self, hooks: Sequence[Hook]) -> None:
        """Begin a `with` block; the outermost clears stored values and runs compiled code eagerly.

        Compiled code would ignore hooks that are added after its first run.
        """
        self.depth += 1
        try:
            if self.depth == 1:
                self.n_entered += 1
                for h in hooks:
                    if h.n_calls or h.last is not None or h.silent_reason:
                        h._clear()
                self.waiting = {id(h) for h in hooks} if hooks and self.options.stop else None
            if all(not h.registered for h in hooks):
                self.register(hooks)
            if self.depth == 1:
                enter_eager(self)
        except BaseException:
            self._end(hooks)
            raise

    def exit(self, hooks: Sequence[Hook], e: BaseException | None) -> bool:
        """End a `with` block; the outermost removes the hooks, and warns of those that never fired.

        Returns:
            True if `e` is the `StopForward` of these hooks, which ends here.
        """
        if self.depth > 1:
            self.depth -= 1
            return False
        waiting = self.waiting
        fired = self._end(hooks)
        if e is None:
            if (not fired or self.options.stop) and (text := self._unfired(hooks, waiting)):
                warn(text, NeverFiredWarning)
        elif isinstance(e, StopForward):
            return e.owner is self
        elif isinstance(e, RuntimeError) and self.options.kind == "backward":
            add_inplace_hint(e)
        return False

    def __del__(self) -> None:
        EAGER.end(self)  # if a block was entered and never left
        if self.only_in_with and not self.n_entered:
            warn(
                f"{self.options.who}: it was never entered, so it did nothing. Edits and hooks on "
                f"functions are on inside their `with` only: `with {self.options.who}(…):`.",
                NeverFiredWarning,
            )

    def _end(self, hooks: Sequence[Hook]) -> bool:
        try:
            return self.unregister(hooks)
        finally:
            self.depth, self.waiting = 0, None
            EAGER.end(self)

    def _unfired(self, hooks: Sequence[Hook], waiting: set[int] | None) -> str:
        """Return the warning about hooks that never fired in the block; "" if there is none."""
        who, idle = self.options.who, silent_reasons(hooks)
        texts = [f"{label}: {why}" for label, why in idle.items()]
        few = "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if texts[5:] else "")
        if self.options.stop and waiting:
            what = "stop=True was never reached, so the whole forward ran. Never fired: "
        elif self.options.stop and hooks:
            return (
                f"{who}: the model caught StopForward (by `except:` or `except BaseException`), so "
                "the forward continued. The stored values are correct. Use `except Exception` in "
                "the model."
            )
        elif not idle:
            return ""
        else:
            what = f"{len(idle)} of {len(hooks)} hooks never fired: "
        run = "loss.backward()" if NO_BACKWARD in idle.values() else "the model"
        return f"{who}: {what}{few}. Run {run} inside the block, or do not hook these modules."


def _unregister(hooks: Sequence[Hook]) -> bool:
    fired = True
    for h in hooks:
        if h.handle is not None:
            h.handle.remove()
        h.handle, h.registered = None, False
        fired = fired and (h.last is not None or h.fired)
    return fired


def silent_reasons(hooks: Sequence[Hook]) -> dict[str, str]:
    """Return label → reason, as far as it is known, of the hooks that never fired.

    If two have the same label (modules without names), their positions are added.
    """
    idle = [(i, h) for i, h in enumerate(hooks) if not h.fired]
    times = Counter(h.label for _, h in idle)
    names = [h.label if times[h.label] == 1 else f"{h.label} at [{i}]" for i, h in idle]
    return {name: h._reason_in_words() for name, (_, h) in zip(names, idle, strict=True)}


def add_inplace_hint(e: BaseException) -> None:
    """Add a note if `e` is PyTorch's error about in-place writes around a full backward hook."""
    if "BackwardHookFunction" in str(e):
        e.add_note(
            "hookkit: the input or output of a layer with a full backward hook was changed in "
            "place. Use hook_output(module, grad=True), which allows that."
        )
