"""What the hooks of one `with` block share, and the block itself.

`Block` has the options, checked once, and the switch. `Registered` registers hooks, all or none,
and removes them; at the end of a block it warns of hooks that never fired, each with the reason as
far as it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from hookkit.checks import OfLast, check_choice, check_flag, check_function
from hookkit.errors import NeverFiredWarning, OptionError, warn
from hookkit.hooks.attach import Switch
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
"""What a hook function of each kind is called with."""

BY_NAME = "Modules by name come from select(model, name); options are best given by name."
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NO_BACKWARD = "no backward pass reached it inside the block, or its memory was written in place"


TRACED = "it ran in a compiled graph, which counts no calls"
NOT_WANTED = "`calls` is true of none of the calls that it got"
"""Why an edit at some calls never happened."""


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


class Block(Switch):
    """How the hooks of one block capture (the options of `Hook`), and whether they are on.

    Attributes:
        fast: the last output and nothing more is stored.
        of_last: the function takes the output (or inputs) alone.
        wants_hook: the function is a ready-made edit, which asks for the hook.
        depth: how many blocks of these same hooks are open, one inside the other.
        waiting: in a block with `stop=True`, the ids of the hooks that have not fired.
        pending: devices from which copies are on their way.
        positions: the hooks' names are places in a list, not names in a model.
    """

    positions = False

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
        given = {"detach": detach, "cpu": cpu, "gather": gather, "edit": edit, "clone": clone}
        for name, flag in {**given, "stop": stop, "prepend": prepend}.items():
            if flag is not True and flag is not False:
                check_flag(who, name, flag, BY_NAME)
        check_choice(who, "keep", keep, ("last", "all", "none"))
        self.who, self.kind = who, kind
        self.wants_hook = getattr(func, "wants_hook", False)
        if func is not None and not self.wants_hook and not isinstance(func, OfLast):
            func = check_function(who, func, *KINDS[kind])
        self.func = func
        self.of_last = isinstance(func, OfLast) or getattr(func, "of_last", False)
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
        self.on, self.depth, self.warned = True, 0, False
        self.waiting: set[int] | None = None
        self.pending: set[torch.device] = set()

    def enter(self, hooks: Sequence[Hook]) -> None:
        """Has compiled code run eagerly until `leave`, since it would ignore the hooks."""
        self.depth += 1
        if self.depth == 1:
            self.waiting = {id(h) for h in hooks} if hooks and self.stop else None
            enter_eager(self)

    def leave(self) -> None:
        """Undoes `enter`; can be repeated."""
        self.depth, self.waiting = 0, None
        EAGER.end(self)


class Registered:
    """Base of what is registered when it is made, and removed by `remove()` or a block's end."""

    switch: Block
    """Its `on` switches the hooks off and on again; they stay registered."""

    def _each(self) -> Sequence[Hook]:
        """The hooks."""
        raise NotImplementedError

    @property
    def removed(self) -> bool:
        """Whether none of it is registered."""
        return all(not h.registered for h in self._each())

    def register(self) -> None:
        """Registers all of it, or nothing; does nothing where it is registered."""
        try:
            for h in self._each():
                h._put()
        except BaseException:
            self._remove_twice()
            raise

    def remove(self) -> None:
        """Removes it from its modules; what was stored stays. Can be repeated."""
        try:
            for h in self._each() if self.switch.edit else ():
                h._warn_if_compiled()
        finally:
            self._remove_twice()

    def _remove_twice(self) -> None:
        try:
            self._remove()
        except BaseException:  # a Ctrl-C: once more
            self._remove()
            raise

    def _remove(self) -> bool:
        """Whether each hook has stored something."""
        fired = True
        for h in self._each():
            if h.handle is not None:
                h.handle.remove()
            h.handle, h.registered = None, False
            fired = fired and (h.last is not None or h.fired)
        for m in [h.module for h in self._each()] if self.switch.kind == "backward" else ():
            if m is not None and not m._backward_hooks:
                # Private: PyTorch sets `_is_full_backward_hook` with the first full backward hook
                # and never resets it (since 1.8). Without this line the module would go on refusing
                # backward hooks of the old sort.
                m._is_full_backward_hook = None
        return fired

    def _begin(self) -> None:
        """Registers it for a block. Without such a block around this one it begins anew."""
        if not self.switch.depth:
            for h in self._each():
                if h.n_calls or h.last is not None or h.why:
                    h._clear()
        if self.removed:
            self.register()

    def __enter__(self) -> Self:
        try:
            self._begin()
            self.switch.enter(self._each())
        except BaseException:
            self._remove_twice()
            self.switch.leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        block = self.switch
        if block.depth > 1:  # another block of these hooks is still open around this one
            block.depth -= 1
            return False
        missed = block.waiting
        try:
            fired = self._remove()
        except BaseException:
            self._remove()
            raise
        finally:
            block.leave()
        if e is None:
            if (not fired or block.stop) and (text := self._missed(missed)):
                warn(text, NeverFiredWarning)
        elif isinstance(e, StopForward):
            return e.owner is block
        elif isinstance(e, RuntimeError) and block.kind == "backward":
            hint(e)
        return False

    def _missed(self, waiting: set[int] | None) -> str:
        """What a warning at the end of the block says of what never fired; "" for nothing."""
        block, idle = self.switch, reasons(self._each())
        texts = [f"{label}: {why}" for label, why in idle.items()]
        few = "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if texts[5:] else "")
        if block.stop and waiting:
            what = "stop=True was never reached, so the whole forward ran. Never fired: "
        elif block.stop and self._each():
            return (
                f"{block.who}: the model caught StopForward (by `except:` or `except "
                "BaseException`), so the forward continued. The stored values are correct. Use "
                "`except Exception` in the model."
            )
        elif not idle:
            return ""
        else:
            what = f"{len(idle)} of {len(self._each())} hooks never fired: "
        run = "loss.backward()" if _NO_BACKWARD in idle.values() else "the model"
        return (
            f"{block.who}: {what}{few}. Run {run} inside the block, or do not hook these modules."
        )


def hint(e: BaseException) -> None:
    """Adds a note to PyTorch's error of an in-place operation that a full backward hook refuses."""
    if "BackwardHookFunction" in str(e):
        e.add_note(
            "hookkit: the input or output of a layer with a full backward hook was changed in "
            "place. Use hook_output(module, grad=True), which allows that."
        )


def reasons(hooks: Sequence[Hook]) -> dict[str, str]:
    """The hooks that never fired, by label, each with the reason as far as it is known.

    Where two have the same label (modules without names), their positions are added.
    """
    idle = [(i, h) for i, h in enumerate(hooks) if not h.fired]
    times = Counter(h.label for _, h in idle)
    names = [h.label if times[h.label] == 1 else f"{h.label} at [{i}]" for i, h in idle]
    return {name: reason(h) for name, (_, h) in zip(names, idle, strict=True)}


def reason(h: Hook) -> str:
    """Why `h` has recorded no call, as far as it is known."""
    module = h.module
    if module is None:
        return "the module is gone"
    if isinstance(module, _CONTAINERS):
        return f"a {type(module).__name__} is never called itself; hook the modules inside it"
    if h.why:
        return h.why
    if h.n_calls:
        return _NO_BACKWARD
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "MultiheadAttention uses its weights without calling it; hook the attention"
    return "not called, or it raised an error (module.forward(x) runs no hooks, module(x) does)"
