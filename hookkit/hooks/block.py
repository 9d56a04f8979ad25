"""The `with` block of hooks, and its warnings at the end.

`Registered` registers and removes hooks, all or none, and is their `with` block. `Block` is what
the hooks of one block share: whose calls are recorded, how many blocks are open, and what ends the
forward pass early with `stop=True`. At its end a block warns of a stop that was not reached and of
hooks that never fired, each with the reason.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import nn

from hookkit.errors import CompiledWarning, NeverFiredWarning
from hookkit.hooks.compiling import FRAMES, compiled_modules, enter_eager, has_compiled, leave_eager
from hookkit.hooks.entries import Switch
from hookkit.interrupts import Guard, uninterrupted

if TYPE_CHECKING:
    from hookkit.hooks.capture import Capture
    from hookkit.hooks.snapshot import Options

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NO_BACKWARD = "no backward pass reached it inside the block"
_MISSED = {
    "thread": "called only from another thread; enter the block in the thread that runs the model",
    "replica": "called only in DataParallel's replicas, which run in threads of their own; hook "
    "the DataParallel module itself, or use DistributedDataParallel",
    "recomputed": "seen only while a checkpoint recomputed it; run the forward in the block too",
    "traced": "called only by torch.jit.trace, of which hooks record nothing; run the model itself "
    "in the block",
    "calls": "`calls` is true of none of the calls that it got",
    "no_gradient": "no gradient arrived inside the block",
    "frozen": "none of its outputs requires a gradient (its parameters and inputs are frozen)",
    "no_tensor": "hookkit finds no tensor there (it looks into tuples, lists, dicts, dataclasses); "
    "hook a layer inside it, or one that gives tensors",
    "no_grad": "it ran with gradients switched off (no_grad, inference_mode, or, of a function, a "
    "checkpoint with use_reentrant=True)",
}


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
    """What the hooks of one `with` block share.

    Attributes:
        thread: the thread whose calls are recorded; None records the calls of all threads. A block
            sets it to the thread that entered it; a callback sets it for hooks that stay.
        depth: how many blocks of these same hooks are open, one inside the other.
        waiting: in a block with `stop=True`, the hooks that have not fired, by id.
    """

    __slots__ = ("compiled", "depth", "guard", "options", "thread", "waiting", "warned")

    def __init__(self, options: Options) -> None:
        self.on, self.options = True, options
        self.thread: int | None = None
        self.waiting: dict[int, Capture] | None = None
        self.compiled: dict[int, str] | None = None  # result of `compiled_modules`
        self.warned: tuple[str, ...] = ()  # the warnings given, each once for all hooks
        self.guard = Guard()
        self.depth = 0

    def enter(self, hooks: Sequence[Capture]) -> None:
        """Records this thread's calls only, and has compiled code run eagerly, until `undo`."""
        self.depth += 1
        if self.depth > 1:
            return
        self.guard.begin()
        self.thread = get_ident()
        if hooks and self.options.stop:
            self.waiting = {id(h): h for h in hooks}
        if has_compiled():
            enter_eager(self)

    def undo(self) -> None:
        """Undoes `enter`, also where it was interrupted; can be repeated."""
        self.thread, self.waiting, self.depth = None, None, 0
        if FRAMES in sys.modules:
            leave_eager(self)
        self.guard.end()


class Registered:
    """Base of what is registered when it is made, and removed by `remove()` or a block's end.

    `Hook` and `Hooks` register their captures; others override `_register`, `_remove`, `removed`.
    """

    __slots__ = ()

    _block: Block
    _captures: Sequence[Capture] = ()

    @property
    def removed(self) -> bool:
        """Whether none of it is registered."""
        return all([c.callback is None for c in self._captures])  # noqa: C419

    @property
    def switch(self) -> Block:
        """Its `on` switches it off and on again; it stays registered."""
        return self._block

    def register(self) -> None:
        """Registers all of it, or nothing; does nothing where it is registered."""
        try:
            self._register()
        except BaseException:
            self.remove()
            raise

    @uninterrupted
    def remove(self) -> None:
        """Removes it from its modules; what was stored stays. Can be repeated."""
        try:
            for c in self._captures if self._block.options.edit else ():
                warn_if_compiled(c)
        finally:
            self._remove()

    @uninterrupted
    def _register(self) -> None:
        self._block.compiled = None  # a model may have been compiled since
        for c in self._captures:
            c.register()

    def _remove(self) -> None:
        """Called in an `uninterrupted` function, also of what is half registered."""
        for c in self._captures:
            c.remove()

    def _missed(self, waiting: dict[int, Capture] | None) -> str:
        """What a warning at the end of the block says of what never fired; empty for none."""
        return _missed(self._captures, waiting)

    def __enter__(self) -> Self:
        depth = self._block.depth
        try:
            if self.removed:
                for c in self._captures:
                    c.clear()
                self._register()
            self._block.enter(self._captures)
        except BaseException:
            if not depth:
                self.remove()
                self._block.undo()
            raise
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        block, captures = self._block, self._captures
        block.depth -= 1
        if block.depth > 0:  # another block of these hooks is still open around this one
            return False
        waiting = block.waiting
        try:
            self._remove()
        finally:
            block.undo()
        if e is None:
            if text := self._missed(waiting):
                warnings.warn(text, NeverFiredWarning, stacklevel=3)
        elif isinstance(e, StopForward):
            return e.owner is block
        elif isinstance(e, RuntimeError):
            _hint(captures, e)
        return False


def _hint(hooks: Sequence[Capture], e: BaseException) -> None:
    """Adds a note to PyTorch's error of an in-place operation that a full backward hook refuses."""
    names = ", ".join(h.label() for h in hooks if h.options.kind == "backward")
    if names and "BackwardHookFunction" in str(e):
        e.add_note(
            f"hookkit: the input or output of a layer with a full backward hook ({names}) was "
            "changed in place. Use hook_output(module, grad=True), which allows that."
        )


def reasons(hooks: Iterable[Capture]) -> dict[str, str]:
    """The hooks that have stored nothing, by label, each with the reason as far as it is known.

    Where two have the same label (modules without names), their positions are added.
    """
    each = [*hooks]
    if each and each[0].options.retain_grad:
        each += [h.grads for h in each if h.count and h.grads is not None]
    silent = [(i, h) for i, h in enumerate(each) if h.last is None and _is_silent(h)]
    if not silent:
        return {}
    times = Counter(h.label() for _, h in silent)
    return {
        h.label() if times[h.label()] == 1 else f"{h.label()} at [{i}]": reason(h)
        for i, h in silent
    }


def _is_silent(h: Capture) -> bool:
    """Whether `h`, which has stored nothing, never fired.

    The count says nothing of a gradient hook that stores: it counts forward calls.
    """
    if h.traced or h.options.kind == "recorder":
        return False
    return (
        not h.count
        or h.missed == "calls"
        or (h.options.keep != "none" and h.options.kind in ("grad", "pre_grad"))
    )


def reason(h: Capture) -> str:
    """Why `h` has recorded no call, as far as it is known."""
    module = h.module()
    if module is None:
        return "the module is gone"
    if isinstance(module, _CONTAINERS):
        return f"a {type(module).__name__} is never called itself; hook the modules inside it"
    if h.missed == "frozen" and h.options.kind == "pre_grad":
        return "none of its inputs requires a gradient"
    if h.missed in _MISSED:
        return _MISSED[h.missed]
    if h.count:
        return _NO_BACKWARD
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "MultiheadAttention uses its weights without calling it; hook the attention"
    if type(module).__name__ == "FunctionCall":  # one is made as the function is called
        return "its call gave nothing to hooks: it raised an error, or a compiler traced it"
    return "not called, or it raised an error (module.forward(x) runs no hooks, module(x) does)"


def _missed(hooks: Sequence[Capture], waiting: dict[int, Capture] | None) -> str:
    """A warning's text: of a stop that was not reached, of hooks that never fired; or empty."""
    silent = reasons(hooks)
    if not hooks or not (silent or hooks[0].options.stop):
        return ""
    o = hooks[0].options
    who = o.who
    texts = [f"{label}: {why}" for label, why in silent.items()]
    few = "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if len(texts) > 5 else "")
    if not o.stop:
        run = "loss.backward()" if _NO_BACKWARD in silent.values() else "the model"
        empty = "Run" if o.keep == "none" else "What they store is None: run"
        if run != "the model" and o.retain_grad:
            empty = "Their `grad` is None: run"
        return (
            f"{who}: {len(silent)} of {len(hooks)} hooks never fired: {few}. "
            f"{empty} {run} inside the block, or do not hook these modules."
        )
    if waiting:
        return (
            f"{who}: stop=True was never reached, so the whole forward ran. Never fired: {few}. "
            "Run the model inside the block, or do not hook these modules."
        )
    return (
        f"{who}: the model caught StopForward (by `except:` or `except BaseException`), so the "
        "forward continued. The stored values are correct. Use `except Exception` in the model."
    )


def warn_if_compiled(h: Capture) -> None:
    """Warns when an empty hook is read outside of a block and compiled code runs its module."""
    module, block = h.module(), h.switch
    if h.removed or h.count or h.traced or block.depth or module is None:
        return
    if h.options.kind == "recorder":
        return
    if block.compiled is None:  # searched once: code that is compiled later includes the hooks
        block.compiled = compiled_modules()
    what = block.compiled.get(id(module))
    if what is not None and "compiled" not in block.warned:
        block.warned += ("compiled",)
        warnings.warn(
            f"{h.options.who}: the hook on {h.label()} has seen no call, and the module is {what}: "
            "torch.compile ignores hooks that are added after its first call, of this model or of "
            "another of its class. Add the hook before that call, use it in a `with` block, or "
            "call torch.compiler.reset().",
            CompiledWarning,
            stacklevel=5,
        )
