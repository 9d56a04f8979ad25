"""One edit on one module: calls the user's function, checks what it gives, puts it in place.

Built on `attach(edit=True)` for outputs and inputs, on tensor hooks (`gradients`) for gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import get_ident
from typing import Any, Literal
from weakref import ref

from torch import Tensor, nn

from hookkit.editing.changing import Change, Where
from hookkit.errors import HookError
from hookkit.hooks.entries import (
    Attached,
    Handle,
    attach,
    called,
    check_same,
    is_compiling,
    is_tracing,
    positional,
    recomputing,
)
from hookkit.hooks.gradients import GradState, grad_dispatchers
from hookkit.hooks.taps import Receive
from hookkit.nested import Inputs, describe, paths_of, pick, put

Kind = Literal["output", "input", "grad"]
Function = Callable[..., Any]


class Edit:
    """One edit on one module. The module holds it; it holds the module weakly."""

    def __init__(
        self, who: str, name: str | None, module: nn.Module, leaf: str, f: Function, kind: Kind
    ):
        self.who, self.name, self.module, self.leaf = who, name, ref(module), leaf
        self.f, self.kind = f, kind
        self.handle: Attached | Handle | None = None
        self.thread: int | None = None
        self.n_calls, self.elsewhere, self.traced = 0, False, False

    def register(self) -> None:
        """Puts the edit on its module; nothing if it is there."""
        module = self.module()
        if self.handle is not None:
            return
        if module is None:
            raise HookError(f"{self.who}: the module of this edit is gone. Make a new edit.")
        if self.kind == "output":
            self.handle = attach(module, self.on_output, edit=True)
        elif self.kind == "input":
            self.handle = attach(module, self.on_input, pre=True, edit=True)
        else:
            state = GradState(self.on_forward, self.leaf)
            self.handle = Attached(module, *grad_dispatchers(state, False, module)).put_on()

    def remove(self) -> None:
        """Takes it off; nothing if it is off."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def uncounted(self) -> Edit:
        """The same edit with a count of its own, for a copy of the model."""
        return copy.copy(self)

    # -- what the hooks call

    def on_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook: the output to hand on, or None."""
        if not self.ours():
            return None
        value = self.picked(output) if self.leaf else output
        new = self.changed(module, value, Inputs(args, kwargs), value)
        if new is None:
            return None
        check_same(self.who, self.label, value, new)
        return put(output, self.leaf, new) if self.leaf else new

    def on_input(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward-pre hook: the `(args, kwargs)` to call with, or None."""
        if not self.ours():
            return None
        inputs = Inputs(args, kwargs)
        value = self.picked(inputs) if self.leaf else inputs
        new = self.changed(module, value, value)
        if new is None:
            return None
        if self.leaf:
            check_same(self.who, self.label, value, new)
            new = put(inputs, self.leaf, new)
        elif not isinstance(new, Inputs):
            new = Inputs(positional(self.who, self.label, inputs, new), kwargs)
        return tuple(new), new.kwargs

    def on_forward(self, module: nn.Module, output: Any) -> Receive | None:
        """Forward hook: what receives the gradients of this call's output."""
        if not self.ours():
            return None
        if not is_compiling() and is_tracing():
            raise HookError(
                f"{self.who} on {self.label()}: torch.jit.trace keeps no hooks on gradients, so "
                "the edit would not be in the traced model. Trace the model outside of the edit."
            )
        if self.leaf:
            self.picked(output)
        if is_compiling():  # here: the graph of a gradient's hook may write no attribute
            self.traced = True
        return _receiver(ref(self), ref(module))

    def on_grad(self, module: nn.Module, grad: Tensor) -> Tensor | None:
        """Tensor hook: the gradient to hand on, or None."""
        if self.handle is None:  # the graph has outlived the block
            return None
        new = self.changed(module, grad, grad)
        if new is not None and (not isinstance(new, Tensor) or new.shape != grad.shape):
            raise HookError(
                f"{self.who} on {self.label()}: the replacement is {describe(new)}, the gradient "
                f"is {describe(grad)}. Return a tensor of that shape, or None."
            )
        return new

    def changed(self, module: nn.Module, value: Any, *seen: Any) -> Any:
        """What the user's function makes of `value`; counted unless this is a recomputation."""
        if is_compiling():
            if self.kind != "grad":
                self.traced = True
            return self.f(module, *seen)
        if isinstance(self.f, Change):
            where = Where(module, self.name, self.leaf, self.n_calls)
            new = self.f.on(value, where)
        else:
            new = called(self.f, module, *seen)
        if self.kind == "grad" or not recomputing():
            self.n_calls += 1
        return new

    # -- checks and words

    def ours(self) -> bool:
        """True unless this call is another thread's and the edit belongs to a `with` block."""
        if is_compiling() or self.thread is None or self.thread == get_ident():
            return True
        self.elsewhere = True
        return False

    def picked(self, x: Any) -> Any:
        """What is at the leaf path; else an error with the paths that there are."""
        try:
            return pick(x, self.leaf)
        except (KeyError, IndexError, AttributeError, TypeError) as e:
            raise HookError(
                f"{self.who}: {self.label()} has nothing at {self.leaf}; there is {describe(x)}. "
                f"Select a path that is there: {paths_of(x)}."
            ) from e

    def is_idle(self) -> bool:
        """True for an edit that is in place, outside of a block, and was never reached."""
        used = self.n_calls or self.traced
        return not used and self.handle is not None and self.thread is None

    def label(self) -> str:
        """The layer in words, for messages."""
        module = self.module()
        if module is None:
            return f'"{self.name}"' if self.name else "a module that is gone"
        return Where(module, self.name).label

    def why(self) -> str:
        """Why it was never reached, as far as it is known."""
        if self.elsewhere:
            return "called only from another thread"
        return "no gradient arrived" if self.kind == "grad" else "not called"


def _receiver(edit: ref[Edit], module: ref[nn.Module]) -> Receive:
    """Held by the autograd graph, so it holds nothing: see `gradients`."""

    def receive(i: int, grad: Tensor) -> Tensor | None:
        e, m = edit(), module()
        return None if e is None or m is None else e.on_grad(m, grad)

    return receive
