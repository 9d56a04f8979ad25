"""`Capture`: what a hook does at the calls of its module, and what it has stored.

The module holds the capture, the user holds a `Hook` around it. They are two objects since a copy
has to know how it was reached: through the module's dict of hooks, where the copy does nothing, or
through a module that owns the `Hook` as an attribute, where the copy works.

A `with hook_outputs(layers)` makes one capture a layer for one forward pass, and what that costs
are mostly the objects made, in a cache that the model has just emptied. So a capture is itself the
entry that is registered after the forward, and its call begins with the fast path; `calls` does
everything else. A collection makes the `Hook` around it on demand. (Over 300 lines: one class.)
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit.errors import HookError
from hookkit.hooks import calls
from hookkit.hooks.backward import BothGrads
from hookkit.hooks.block import Block
from hookkit.hooks.calls import Grads
from hookkit.hooks.entries import (
    HookEntry,
    brief,
    entry_of,
    graph_task,
    is_tracing,
    register,
    unregister,
)
from hookkit.hooks.gradients import GradHooks, Placed
from hookkit.hooks.snapshot import (
    Options,
    Snapshotter,
    StoredValue,
    inputs_and_buffers,
    is_transforming,
    lazy_clone,
    snapshot,
)

is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # a third of is_compiling's cost
is_grad_enabled = torch.is_grad_enabled
is_inference_mode = torch.is_inference_mode_enabled
# Private: `torch._C._set_grad_enabled`, which torch.set_grad_enabled calls (since 1.0). The public
# context managers cost ten times as much, at each captured layer; they are the fallback.
set_grad_enabled: Callable[[bool], Any] = getattr(
    torch._C, "_set_grad_enabled", torch.set_grad_enabled
)


class Capture(HookEntry):
    """One hook on one module: its options (through its `Block`), its calls, and what it stored.

    Holds the module weakly.

    Attributes:
        switch: the block, which all hooks of a collection share.
        removed: it is registered on no module. Compiled edits of gradients read it, and PyTorch's
            compiler cannot read `handles`.
        count: the calls seen.
        last: what is stored of the last call: a tensor (by the fast path), a `StoredValue`,
            `Grads`, or None.
        all: the same for each call, with `keep="all"`.
        missed: why calls were not recorded, for the report.
        traced: it ran inside a compiled graph, which keeps the last value only.
        version: of a live tensor in `last`; -1 where it is not known.
        waiting: gradients of calls that a checkpoint is to run again.
    """

    __slots__ = (
        "__weakref__",
        "all",
        "count",
        "handles",
        "last",
        "leaf",
        "missed",
        "module",
        "name",
        "removed",
        "traced",
        "version",
        "waiting",
    )

    switch: Block
    all: list[Any]
    handles: tuple[RemovableHandle, ...]
    last: Any
    missed: str | None
    module: Callable[[], nn.Module | None]
    version: int
    waiting: deque[Grads]

    def __init__(
        self,
        m: nn.Module | None = None,
        block: Block | None = None,
        name: str | None = None,
        leaf: str = "",
    ) -> None:
        block = block or Block(_NOTHING)
        o = block.options
        self.module = _gone if m is None else ref(m)
        self.switch, self.name, self.leaf = block, name, leaf
        self.callback, self.removed, self.edit, self.handles = None, True, o.edit, ()
        self.keeps_output = o.edit or o.live or not o.detach
        self.count, self.last, self.missed, self.traced = 0, None, None, False
        if not o.plain:
            self.all, self.waiting = [], deque(maxlen=256)

    def clear(self) -> None:
        """Forgets what was stored and counted."""
        self.count, self.last, self.missed, self.traced = 0, None, None, False
        if not self.switch.options.plain:
            self.all, self.waiting = [], deque(maxlen=256)

    @property
    def options(self) -> Options:
        """How it captures."""
        return self.switch.options

    # -- registered ---------------------------------------------------------------------------

    def register(self) -> None:
        """Registers it on its module; called in an `uninterrupted` function."""
        if not self.removed:
            return
        module, block = self.module(), self.switch
        if module is None:
            raise HookError(
                f"{block.options.who}: the module of this hook is gone. Make a new hook."
            )
        block.compiled = None  # a model may have been compiled since
        self.removed = False
        if block.options.kind == "forward":  # as `entries.register`, in fewer calls
            self.handles = (module.register_forward_hook(self, with_kwargs=True),)
            self.callback = calls.after
        else:
            self.handles = ()
            for entry, where in self._entries(module):
                self.handles += (register(module, entry, **where),)

    def _entries(self, module: nn.Module) -> list[Placed]:
        """What goes on `module`, each entry with its place."""
        kind, block = self.options.kind, self.switch
        if block.options.entries is not None:
            return block.options.entries(self.name, module, self.leaf)
        if kind == "pre":
            return [(HookEntry(self.before, block, self.edit), {"pre": True})]
        if kind == "backward":
            check = HookEntry(self.check_output, block, keeps_output=False)
            entry = HookEntry(self.backward, block, self.edit)
            return [(check, {}), (entry, {"backward": True})]
        if kind == "both":
            return self._both_grads().entries(module, block)
        return self._grad_hooks().entries(module, block)

    def _callbacks(self, n: int) -> list[Callable[..., Any]]:
        """What the `n` entries of a copied module are to call, in their order."""
        kind = self.options.kind
        if kind == "recorder":  # a copy records nothing
            return []
        if kind == "pre":
            return [self.before]
        if kind == "backward":
            return [self.check_output, self.backward]
        if kind == "both":
            inputs, outputs = self._both_grads().hooks()
            return [*inputs.callbacks(False), *outputs.callbacks(n > 4)]
        return self._grad_hooks().callbacks(n > 2)

    def _grad_hooks(self) -> GradHooks:
        return GradHooks(self.begin, self.options.kind == "pre_grad", self.leaf)

    def _both_grads(self) -> BothGrads:
        block = self.switch
        return BothGrads(self.both, self.leaf, block.options.detach, block, lambda: block.thread)

    def registered(self) -> tuple[tuple[RemovableHandle, HookEntry | None], ...]:
        """What is on the module, each entry with PyTorch's handle; for copies."""
        return tuple((handle, entry_of(handle)) for handle in self.handles)

    def join(self, block: Block, entries: Sequence[HookEntry | None]) -> None:
        """Has `entries`, on a copied module, call this, and it share `block` with others."""
        self.switch = block
        if block.options.kind == "forward":
            self.callback = calls.after if entries else None
            return
        for entry, callback in zip(entries, self._callbacks(len(entries)), strict=False):
            if entry is not None:
                entry.callback, entry.switch = callback, block

    def remove(self) -> None:
        """Removes it from its module. Called in an `uninterrupted` function."""
        if self.removed:
            return
        o = self.switch.options
        if o.kind == "forward":
            self.callback = None
            for handle in self.handles:
                handle.remove()
        else:
            unregister(self.handles)
        self.removed = True
        if o.live:
            self.settle()
        module = self.module() if o.kind == "backward" else None
        if module is not None and not module._backward_hooks:
            # Private: PyTorch sets `_is_full_backward_hook` with the first full backward hook and
            # never resets it (since 1.8). Without this line the module would go on refusing
            # backward hooks of the old sort after hookkit's is gone.
            module._is_full_backward_hook = None

    # -- called -------------------------------------------------------------------------------

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> Any:
        """After the forward. First the fast path: a snapshot of one tensor, and nothing more."""
        block = self.switch
        if self.callback is None or not block.on:
            return None
        o, thread = block.options, block.thread
        if (
            not o.plain
            or type(output) is not Tensor
            or self.leaf
            or is_dynamo_compiling()
            or graph_task() != -1
            or is_transforming()
            or is_tracing()
            or (thread is not None and thread != get_ident())
        ):
            return self.callback(self, module, args, kwargs, output)
        self.count += 1
        recording = is_grad_enabled()
        inference = not recording and is_inference_mode()
        if inference or not output.is_cpu or output._is_view():
            self.last = Snapshotter(o, inputs_and_buffers(module, args, kwargs)).keep(output)
            return None
        if o.live:
            self.last, self.version = output, output._version
            if thread is None:
                self.settle()
            return None
        if output.is_leaf and (
            output.is_quantized
            or module._buffers
            or kwargs
            or args[1:]
            or not args
            or output is args[0]
        ):
            self.last = snapshot(output, inputs_and_buffers(module, args, kwargs))
            return None
        try:
            if recording:  # half the cost of output.detach(), and one tensor less
                set_grad_enabled(False)
            self.last = lazy_clone(output)
        except RuntimeError:  # from_numpy, shared memory, sparse
            self.last = snapshot(output)
        finally:
            if recording:
                set_grad_enabled(True)
        return None

    def settle(self) -> None:
        """Detaches a live output that is stored; in a block at its end, where that costs less."""
        t = self.last
        if type(t) is Tensor and t.requires_grad and self.switch.options.detach:
            self.last = t.detach()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        return calls.before(self, module, args, kwargs)

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        """In the backward, of PyTorch's full backward hook."""
        return calls.backward(self, module, grad_input, grad_output)

    def check_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After the forward of a module with a full backward hook."""
        calls.check_output(self, output)

    def begin(self, module: nn.Module, x: Any) -> Any:
        """At a forward whose gradients are wanted: what receives them."""
        return calls.begin(self, module, x)

    def both(self, module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        """Once all gradients of a call are there."""
        calls.both(self, module, grad_inputs, grad_outputs)

    def keep(self, kept: StoredValue | None) -> None:
        """Stores what a call gave."""
        self.last = kept
        self.count += 1
        if self.switch.options.keep == "all":
            self.all.append(kept)

    # -- copied -------------------------------------------------------------------------------

    def for_copy(self) -> HookEntry | None:
        """The entry that edits as this one does and stores nothing, for a copy of its module."""
        twin = self.uncounted()
        if twin is None or not self.edit:
            return None
        if self.options.kind == "forward":
            twin.callback = calls.after
            return twin
        return None

    def uncounted(self) -> Capture | None:
        """One that edits as this does and stores nothing; None in another thread's block."""
        block = self.switch
        if block.thread not in (None, get_ident()):
            return None
        o = copy.copy(block.options)
        object.__setattr__(o, "keep", "none")
        return Capture(None, Block(o), self.name, self.leaf)

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        return Capture()

    def __reduce__(self) -> Any:
        return Capture, ()

    # -- words --------------------------------------------------------------------------------

    def label(self) -> str:
        """The module in words, for messages: its name where it is known, and its class."""
        module = self.module()
        if self.name is not None:
            return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")
        return "a module that is gone" if module is None else brief(module)


def _gone() -> None:
    return None


_NOTHING = Options()  # of a copy, which captures nothing until a `Hook` takes it over
