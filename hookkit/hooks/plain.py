"""Plain hooks: those that store the last output and nothing more. They have to be fast.

A `with hook_outputs(layers)` puts one hook on each layer for one forward pass, and what it costs is
mostly the objects that it makes, in a cache that the model has just emptied. So there is one small
object a layer, `Plain`, which is what the module holds and what remembers; the `Hook` around it is
made when somebody asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.hooks.block import Block
from hookkit.hooks.entries import Dispatcher, graph_task, is_tracing, new_key
from hookkit.hooks.hook import Hook
from hookkit.hooks.observing import observe, same
from hookkit.hooks.snapshot import (
    Kept,
    Options,
    Storer,
    is_transforming,
    lazy_clone,
    owned,
    snapshot,
)

is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # a third of is_compiling's cost
is_grad_enabled = torch.is_grad_enabled
is_inference_mode = torch.is_inference_mode_enabled
set_grad_enabled = torch._C._set_grad_enabled  # the context managers cost ten times as much


class Plain(Dispatcher):
    """Forward hook that stores a snapshot of the last output, here. Its target is its block.

    It stands in for its `Hook` wherever a dispatcher asks for one, so that none need exist. The
    block is kept besides: another thread may take this off in the middle of a call.
    """

    __slots__ = ("_block", "_count", "_last", "_missed", "_traced", "_version")

    with_kwargs = False
    keeps_live = False
    _all = None
    _version: int  # of what is stored live

    def __init__(self, target: Block | None = None, key: int | None = None) -> None:
        super().__init__(target, key)
        self._block: Any = target
        self._count, self._traced = 0, False
        self._last: Any = None
        self._missed: str | None = None

    @property
    def _options(self) -> Options:
        return self._block.options  # type: ignore[no-any-return]

    def _keep(self, kept: Kept) -> None:
        self._last = kept
        self._count += 1

    def _settle(self) -> None:
        """Makes what is stored fit to stay when the block ends."""

    def _kept(self) -> Any:
        return self._last

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward."""
        block = self.target
        if block is None:
            return
        thread = block.thread
        if (
            type(output) is not Tensor
            or is_dynamo_compiling()
            or graph_task() != -1
            or is_transforming()
            or is_tracing()
            or (thread is not None and thread != get_ident())
        ):
            observe(cast("Hook", self), module, _given(module, args), same, output)
            return
        self._count += 1
        recording = is_grad_enabled()
        if not output.is_cpu or output._is_view() or not (recording or not is_inference_mode()):
            self._last = Storer(block.options, _given(module, args)).keep(output)
            return
        if output.is_leaf and (
            output.is_quantized or module._buffers or args[1:] or not args or output is args[0]
        ):
            self._last = snapshot(output, _given(module, args))
            return
        try:
            if recording:  # half the cost of output.detach(), and one tensor less
                set_grad_enabled(False)
            self._last = lazy_clone(output)
        except RuntimeError:  # from_numpy, shared memory, sparse
            self._last = snapshot(output)
        finally:
            if recording:
                set_grad_enabled(True)


def _given(module: nn.Module, args: Any) -> tuple[Any, ...]:
    """What `module`, whose hook calls this, was called with and owns.

    To be handed the keyword inputs costs each call. Where there are no others they are found in the
    frame that called the hook: PyTorch's, which has them as `kwargs`.
    """
    found = None if args or is_dynamo_compiling() else sys._getframe(2).f_locals.get("kwargs")
    return owned(module, args, found if type(found) is dict else {})


class Live(Plain):
    """The same for `clone=False`: the output itself, with the version that it had.

    In a block it is detached at the end of the block, where that is cheap.
    """

    __slots__ = ()

    keeps_live = True

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward."""
        block = self.target
        if block is None:
            return
        thread = block.thread
        if (
            type(output) is not Tensor
            or is_dynamo_compiling()
            or graph_task() != -1
            or is_transforming()
            or is_tracing()
            or (thread is not None and thread != get_ident())
        ):
            observe(cast("Hook", self), module, (), same, output)
            if is_dynamo_compiling():
                self._version = -1  # not known of what a graph gives
            return
        self._count += 1
        if output._is_view() or output.is_inference():
            self._last = Storer(block.options).keep(output)
            return
        self._last, self._version = output, output._version
        if thread is None:
            self._settle()

    def _settle(self) -> None:
        if self._block.options.detach and type(self._last) is Tensor:
            self._last = self._last.detach()

    def _kept(self) -> Any:
        if type(self._last) is Tensor and self._version >= 0:
            if self._block.thread is not None:
                self._settle()
            self._last = Kept(self._last, [(self._last, self._version)])
        return self._last


def kind_of(options: Options) -> type[Plain]:
    """What stands on the module, for these plain `options`."""
    return Live if options.live else Plain


def _of_plain(name: str) -> Any:
    def read(self: PlainHook) -> Any:
        return getattr(self._plain, name)

    def write(self: PlainHook, value: Any) -> None:
        setattr(self._plain, name, value)

    return property(read, write)


class PlainHook(Hook):
    """The `Hook` around a `Plain`, which remembers for it. It holds it; nothing holds the hook."""

    _plain: Plain
    _count = _of_plain("_count")
    _last = property(lambda self: self._plain._kept(), _of_plain("_last").fset)
    _missed = _of_plain("_missed")
    _traced = _of_plain("_traced")

    def _take_off(self) -> None:
        super()._take_off()
        self._plain._settle()

    def _dispatchers(self, module: nn.Module) -> tuple[Dispatcher, ...]:
        self._plain.target = self._plain._block = self._block
        return (self._plain,)

    def _on_module(self) -> list[Dispatcher]:
        return [self._plain]

    def _take_over(self, placed: Sequence[Dispatcher]) -> Hook:
        self._plain = cast("Plain", placed[0]) if placed else kind_of(self._options)()
        self._plain._block = self._block
        self._plain.target, self.removed = (self._block, False) if placed else (None, True)
        return self


class Plains:
    """Plain hooks for many modules, in the order of `calls`; the modules held weakly.

    `put_on` registers them: this exists before they do, so no interrupt can part them.

    Attributes:
        on: False once they were all taken off.
    """

    __slots__ = ("block", "calls", "modules", "names", "on")

    def __init__(self, names: Sequence[str | None] | None, block: Block) -> None:
        self.calls: list[Plain] = []
        self.modules: list[ref[nn.Module]] = []
        self.block, self.names, self.on = block, names, True

    def put_on(self, modules: Iterable[nn.Module]) -> None:
        """Registers a hook on each of `modules`, or none."""
        block = self.block
        try:
            kind = kind_of(block.options)
            for module in modules:  # as kind(block).put_on(module): 1 µs less each
                call = kind.__new__(kind)
                call.target = call._block = block
                call.key = new_key()
                call._count, call._last, call._missed, call._traced = 0, None, None, False
                self.calls.append(call)
                self.modules.append(ref(module))
                module._forward_hooks[call.key] = call
        except BaseException:
            self.take_off()
            raise

    def take_off(self) -> bool:
        """Takes all off their modules, and makes them inert for a call under way.

        Returns:
            Whether each has stored something.
        """
        fired = True
        for call, weak in zip(self.calls, self.modules):  # noqa: B905 (as long, unless interrupted)
            module, call.target = weak(), None
            if module is not None and call.key in module._forward_hooks:
                del module._forward_hooks[call.key]
            if call._last is None:
                fired = False
        self.on = False
        if self.block.options.live:
            for call in self.calls:
                call._settle()
        return fired

    @property
    def bare(self) -> list[Tensor] | None:
        """What each stored, where all of them can be given as they are: most often."""
        live = self.block.options.live
        if live and self.block.thread is not None:
            for call in self.calls:
                call._settle()
        found = [c._last for c in self.calls if type(c._last) is Tensor and not c._traced]
        if len(found) < len(self.calls):
            return None
        if live and any([c._last._version != c._version for c in self.calls]):  # noqa: C419
            return None
        return found

    def hooks(self) -> list[Hook]:
        """A `Hook` around each."""
        return [self._hook(i) for i in range(len(self.calls))]

    def _hook(self, i: int) -> Hook:
        hook = PlainHook.__new__(PlainHook)
        hook._plain, hook._module, hook._block = self.calls[i], self.modules[i], self.block
        hook._options, hook.name = self.block.options, self.names[i] if self.names else None
        hook.removed = hook._plain.target is None
        return hook
