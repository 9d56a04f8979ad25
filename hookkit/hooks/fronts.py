# Until the other rooms use attach: the names by which they register recorders today.
"""Names that recorders, bridges and the summary import from files that are gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.hooks.attach import Handle, HookEntry, graph_task, is_compiling
from hookkit.hooks.block import KINDS, Block
from hookkit.hooks.grads import Receive, listen_inputs, listen_output
from hookkit.nested import pick, put

Kind = str
FUNCTION_OF = {**KINDS, "both": KINDS["backward"]}
Placed = tuple[HookEntry, dict[str, bool]]
_functorch = getattr(torch._C, "_functorch", None)
is_transformed: Callable[[Tensor], bool] = getattr(
    _functorch, "is_functorch_wrapped_tensor", lambda t: False
)
outside: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_DisableFuncTorch", nullcontext
)


def is_tracing() -> bool:
    """Whether torch.jit.trace records this forward."""
    return bool(torch.jit._trace.is_tracing())  # type: ignore[no-untyped-call]


def in_jit_trace() -> bool:
    """Whether torch.jit.trace records this forward."""
    return not is_compiling() and is_tracing()


def in_thread(thread: int | None) -> bool:
    """Whether this call is made by `thread`, or in a backward pass; None is every thread."""
    return thread is None or thread == get_ident() or (not is_compiling() and graph_task() != -1)


def counts_for(thread: int | None, module: nn.Module, again: bool = False) -> bool:
    """Whether a recorder that serves `thread` records this call of `module`."""
    if is_compiling():
        return True
    if graph_task() != -1:
        return again
    return in_thread(thread) or "_is_replica" in module.__dict__


class Options(Block):
    """A `Block` of these options; `entries(name, module, leaf)` gives what a recorder registers."""

    dtype: Any = None

    def __init__(
        self, who: str = "Hook", kind: str = "forward", func: Any = None, *how: bool, **more: Any
    ) -> None:
        entries, self.dtype = more.pop("entries", None), more.pop("dtype", None)
        more = {k: v for k, v in more.items() if v is not None}
        kind = {"both": "backward", "recorder": "forward"}.get(kind, kind)
        super().__init__(who, kind, func or more.pop("hook_func", None), *how, **more)
        self.hook_func = self.func
        if entries is not None:

            def put_all(hook: Any, module: nn.Module) -> tuple[Any, ...]:
                handle = Handle()
                for entry, where in entries(hook.name, module, hook.leaf):
                    entry.switch = hook.switch
                    handle.put(module, entry, **where)
                return tuple(handle._handles)

            self.entries, self.fast = put_all, False


class _GradEntry(HookEntry):
    __slots__ = ()

    @property
    def observes(self) -> bool:
        return True


class GradHooks:
    """The hook on a module that has a function receive the gradients of its output or inputs."""

    def __init__(
        self,
        begin: Callable[[nn.Module, Any], Receive | None],
        inputs: bool = False,
        leaf: str = "",
        each_place: bool = True,
    ) -> None:
        self.begin, self.inputs, self.leaf = begin, inputs, leaf

    def entries(self, first: bool = False, prepend: bool = False) -> list[Placed]:
        """What to register."""
        f = self._take if self.inputs else self._after
        return [(_GradEntry(f, edit=True), {"pre": self.inputs, "prepend": prepend})]

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        receive = self.begin(module, output)
        if receive is None:
            return None
        part = pick(output, self.leaf)
        new = listen_output(module, args, kwargs, part, receive)
        return None if new is None else put(output, self.leaf, new)

    def _take(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        receive = self.begin(module, (args, kwargs))
        return None if receive is None else listen_inputs(module, args, kwargs, receive)


class BothGrads:
    """A function called with all gradients of a call, by PyTorch's full backward hook."""

    def __init__(self, f: Callable[..., Any], *_: Any) -> None:
        self.f = f

    def entries(self, first: bool = False) -> list[Placed]:
        """What to register."""
        return [(HookEntry(self.f), {"backward": True})]


def keeps_output(module: nn.Module) -> bool:
    """False: gradient hooks need not run before others."""
    return False


def inputs_and_buffers(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The tensors that a module was called with, and its buffers: it may return any of them."""
    return (*args, *kwargs.values(), *module.buffers(recurse=False))


def unwrapped(t: Tensor) -> Tensor:
    """The values behind a tensor that torch.func has wrapped, vmap's dimension first; else `t`."""
    while not is_compiling() and is_transformed(t):
        assert _functorch is not None
        with outside():
            dim = _functorch.maybe_get_bdim(t) if _functorch.is_batchedtensor(t) else -1
            t = _functorch.get_unwrapped(t)
            t = t.movedim(dim, 0) if dim > 0 else t
    return t


def tap(t: Tensor) -> Tensor:
    """A tensor of its own with the values and the gradient of `t`."""
    return t.clone()
