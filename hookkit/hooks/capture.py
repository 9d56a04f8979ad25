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

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import get_ident
from types import MethodType
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
    Placed,
    brief,
    entry_of,
    graph_task,
    is_tracing,
    register,
    unregister,
)
from hookkit.hooks.gradients import GradHooks, keeps_output
from hookkit.hooks.snapshot import (
    Kind,
    Options,
    Snapshotter,
    StoredValue,
    inputs_and_buffers,
    is_transforming,
    lazy_clone,
    snapshot,
)
from hookkit.nested import PLAIN

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
        callback: None while it is registered on no module.
        count: the calls seen.
        last: what is stored of the last call: a tensor (by the fast path), a `StoredValue`,
            `Grads`, or None.
        all: the same for each call, with `keep="all"`.
        grads: with `retain_grad=True`, what stores the gradients of the same calls.
        missed: why calls were not recorded, for the report.
        traced: it ran inside a compiled graph, which keeps the last value only.
        version: of a live tensor in `last`; -1 where it is not known.
        waiting: gradients of calls that a checkpoint is to run again.
    """

    __slots__ = (
        "__weakref__",
        "all",
        "count",
        "grads",
        "handles",
        "last",
        "leaf",
        "missed",
        "module",
        "name",
        "traced",
        "version",
        "waiting",
    )

    switch: Block
    all: list[Any]
    grads: Gradients | None
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
        if block is None:
            block = Block(_NOTHING)
        self.module = _gone if m is None else ref(m)
        self.switch, self.name, self.leaf = block, name, leaf
        self.callback, self.handles = None, ()
        self.count, self.last, self.missed, self.traced = 0, None, None, False
        if not block.options.plain:
            self.all, self.waiting, self.grads = [], deque(maxlen=256), None

    def clear(self) -> None:
        """Forgets what was stored and counted."""
        self.count, self.last, self.missed, self.traced = 0, None, None, False
        if not self.switch.options.plain:
            self.all, self.waiting = [], deque(maxlen=256)

    @property
    def edit(self) -> bool:  # type: ignore[override]
        """Whether what the user's function returns replaces what it saw."""
        return self.switch.options.edit

    @property
    def keeps_output(self) -> bool:  # type: ignore[override]
        """Whether it may store the output with its autograd graph."""
        o = self.switch.options
        return o.edit or o.live or not o.detach

    @property
    def options(self) -> Options:
        """How it captures."""
        return self.switch.options

    # -- registered ---------------------------------------------------------------------------

    @property
    def removed(self) -> bool:
        """Whether it is registered on no module."""
        return self.callback is None

    def register(self) -> None:
        """Registers it on its module; called in an `uninterrupted` function."""
        if self.callback is not None:
            return
        module, o = self.module(), self.switch.options
        if module is None:
            raise HookError(f"{o.who}: the module of this hook is gone. Make a new hook.")
        if o.kind == "forward" and not o.retain_grad:  # as `entries.register`, in fewer calls
            self.handles = (
                module.register_forward_hook(self, with_kwargs=True, prepend=o.prepend),
            )
            self.callback = calls.after
            return
        self.handles = ()
        for entry, where in self.placed(keeps_output(module)):
            self.handles += (register(module, entry, **where),)

    def placed(self, first: bool) -> list[Placed]:
        """What goes on a module, as `_entries`; it works from now on."""
        self.callback, o = calls.after, self.options
        if o.kind == "forward" and not o.retain_grad:
            return [(self, {"prepend": o.prepend})]
        found = self._entries(first)
        for entry, _ in found:
            entry.switch = self.switch
        return found

    def _entries(self, first: bool) -> list[Placed]:
        """What goes on a module, each entry with its place; `first`: see `GradHooks`."""
        o = self.options
        if o.entries is not None:
            module = self.module()
            return [] if module is None else o.entries(self.name, module, self.leaf)
        if o.kind in ("forward", "pre"):
            pre = o.kind == "pre"
            f = MethodType(calls.before if pre else calls.after, self)
            entry = HookEntry(f, edit=self.edit, keeps_output=self.keeps_output)
            placed, grads = (entry, {"pre": pre, "prepend": o.prepend}), self._of_grads(first)
            return [placed, *grads] if o.prepend else [*grads, placed]
        if o.kind == "backward":
            check = HookEntry(MethodType(calls.check_output, self), keeps_output=False)
            entry = HookEntry(MethodType(calls.backward, self), edit=self.edit)
            return [(check, {}), (entry, {"backward": True, "prepend": o.prepend})]
        if o.kind == "both":
            both = BothGrads(MethodType(calls.backward, self), self.leaf, o.detach, self.switch)
            return both.entries(first)
        begin = MethodType(calls.begin, self)
        return GradHooks(begin, o.kind == "pre_grad", self.leaf).entries(first, o.prepend)

    def _of_grads(self, first: bool) -> list[Placed]:
        """What stores the gradients, with `retain_grad`: before this hook, which sees aliases."""
        if not self.options.retain_grad:
            return []
        self.grads = Gradients(self)
        return self.grads._entries(first)

    def registered(self) -> tuple[tuple[RemovableHandle, HookEntry | None], ...]:
        """What is on the module, each entry with PyTorch's handle; for copies."""
        return tuple((handle, entry_of(handle)) for handle in self.handles)

    def join(self, block: Block, entries: Sequence[HookEntry | None]) -> None:
        """Has `entries`, on a copied module, call this, and it share `block` with others."""
        self.switch, kind = block, block.options.kind
        self.callback = calls.after if entries else None
        if kind == "recorder" or (entries and entries[0] is self):  # a copy records nothing
            return
        first = len(entries) > 2 + 2 * (kind == "both") + block.options.retain_grad
        for entry, (new, _) in zip(entries, self._entries(first), strict=False):
            if entry is not None:
                entry.callback, entry.switch = new.callback, block

    def remove(self) -> None:
        """Removes it from its module. Called in an `uninterrupted` function."""
        if self.callback is None:
            return
        self.callback, o = None, self.switch.options
        if o.kind == "forward" and not o.retain_grad:
            for handle in self.handles:
                handle.remove()
        else:
            unregister(self.handles)
        if o.retain_grad and self.grads is not None:
            self.grads.callback = None
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
            or (
                (kwargs or len(args) != 1 or output is args[0])
                and not _is_new(output, args, kwargs)
            )
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

    def keep(self, kept: StoredValue | None) -> None:
        """Stores what a call gave."""
        self.last = kept
        self.count += 1
        if self.switch.options.keep == "all":
            self.all.append(kept)

    # -- copied -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        return Capture()

    def __reduce__(self) -> Any:
        return Capture, ()

    # -- words --------------------------------------------------------------------------------

    def label(self) -> str:
        """The module's name, where it is known, and its class, for messages."""
        module = self.module()
        if self.name is not None:
            return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")
        return "a module that is gone" if module is None else brief(module)


class Gradients(Capture):
    """The gradients of what another capture stores; registered and removed with it."""

    __slots__ = ("own",)

    def __init__(self, values: Capture) -> None:
        super().__init__(values.module(), values.switch, values.name, values.leaf)
        kind: Kind = "pre_grad" if values.options.kind == "pre" else "grad"
        self.own = replace(values.options, kind=kind, retain_grad=False)
        self.callback = calls.after

    @property
    def options(self) -> Options:
        """Those of the values, for gradients."""
        return self.own


def _is_new(output: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether no input can be `output`, as far as it is seen without a search in structures."""
    given = (*args, *kwargs.values())
    return all([x is not output and (type(x) is Tensor or type(x) in PLAIN) for x in given])  # noqa: C419


def _gone() -> None:
    return None


_NOTHING = Options()  # of a copy, which captures nothing until a `Hook` takes it over
