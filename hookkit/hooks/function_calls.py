"""`FunctionCalls`: the mode that runs calls of torch functions as calls of modules.

A `TorchFunctionMode` sees each call of a torch function in its thread while it is on. It runs one
that is wanted as a `FunctionCall`, which calls hooks as a module does: storing, gradients, edits
and recorders are those of modules, unchanged. Which module made the call is read from the stack;
hooks on the modules, which note that a forward begins and that it ends, cost 20 µs for each.
Which functions a mode sees, and which of them are the same, is in `torch_functions`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from hookkit.errors import HookkitWarning, OptionError
from hookkit.hooks.block import Block
from hookkit.hooks.collection import Modules, Named, named_modules_of
from hookkit.hooks.entries import check_hookable, graph_task, in_thread
from hookkit.hooks.function_call import FunctionCall, run_edited
from hookkit.hooks.torch_functions import (
    end_suspended,
    opened,
    overridden,
    same_functions,
    take_off,
)
from hookkit.modules import unwrap
from hookkit.selecting import select

# Private: `Module._call_impl` runs a module's hooks and its forward (since 1.7): its frame has the
# module, whatever that forward is. Under another name no call would count within a module.
_CALL = "Module._call_impl"

Within = nn.Module | Modules | None

_FUSED = (
    "inside the block PyTorch does not use its fused kernels for nn.TransformerEncoderLayer and "
    "nn.MultiheadAttention in eval mode, since a function mode switches them off. What the model "
    "gives can differ in the last digits, and at padded positions, which the fused kernels set to "
    "0. torch.backends.mha.set_fastpath_enabled(False) gives the same numbers everywhere."
)

_HOME = str(Path(__file__).parents[1]) + os.sep
# Files of hookkit that make calls of a model: the last pass them on from an outer block
_MODELS = (f"{_HOME}testing", f"{_HOME}demo", f"{_HOME}hooks{os.sep}function_call")


def _is_hookkits(caller: FrameType) -> bool:
    """True for what recorders, hooks and edits compute beside the model."""
    file = caller.f_code.co_filename
    return file.startswith(_HOME) and not file.startswith(_MODELS)


class FunctionCalls(TorchFunctionMode):
    """The mode that runs each wanted call as the call of a `FunctionCall`.

    Args:
        functions: the torch functions that are wanted.
        within: modules, by name, in whose forward a call counts; None counts every call.
        block: calls count in its thread, while it is on.
        begin: called with each new `FunctionCall` before it runs, to put hooks on it; can be set.
        numbered: the number at the end of a call's name counts the calls of the function in the
            innermost module of `within`. Without it all of these are calls of one `FunctionCall`.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        within: list[Named] | None,
        block: Block,
        begin: Callable[[FunctionCall], None] | None,
        numbered: bool = True,
    ) -> None:
        super().__init__()
        self.modules = {id(m): name for name, m, _ in within or ()}
        self.names: dict[Any, str] = {}
        for f in functions:
            self.names.update(same_functions(block.options.who, f))
        self.within, self.block, self.begin, self.numbered = within, block, begin, numbered
        self.on = False
        self.reset()

    def reset(self) -> None:
        """Forgets all calls."""
        self.counts: dict[str, dict[str, int]] = {}
        self.calls: dict[str, FunctionCall] = {}
        self.others: dict[Any, Callable[..., Any] | None] = {}  # unwanted functions, see `opened`
        self.opened: list[tuple[Any, int]] = []  # those that run, and what for

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch in the place of `func`; the mode is off meanwhile."""
        kwargs = kwargs or {}
        if func is multi_head_attention_forward:
            self._warn_if_fused(args, kwargs)
        name = self.names.get(func)
        if name is None:
            # The first is most calls. torch.jit.trace compares the lines that calls come from, so a
            # function that need not be opened has its first call here too.
            if self.others.get(func, self) is None or (inner := self._opened(func)) is None:
                return func(*args, **kwargs)
            return self._other(inner, func, types, args, kwargs)
        if not self.on or _is_hookkits(sys._getframe(1)) or (module := self._module()) is None:
            return func(*args, **kwargs)
        call = self._call(module, name)
        call.__dict__["function"] = func  # Module.__setattr__ costs 1 µs
        if self.block.options.edit and not self.block.options.kind.endswith("grad"):
            return run_edited(self.block.options, call, args, kwargs)
        return call(*args, **kwargs)

    def _module(self) -> str | None:
        """The name of the module of `within` that makes this call; None if it does not count."""
        if not self.block.on or not in_thread(self.block.thread):
            return None
        again = graph_task() != -1  # a checkpoint runs it again, which counts for edits only
        if again and not self.block.options.edit:
            return None
        if self.within is None:
            return ""
        name = self._called()
        return _module_run_again(self.within) if name is None and again else name

    def _called(self) -> str | None:
        """The name of the innermost module of `within` whose call is on the stack, None if none."""
        frame = currentframe()
        while frame is not None:
            if frame.f_code.co_qualname == _CALL:
                name = self.modules.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return None

    def _call(self, module: str, name: str) -> FunctionCall:
        """What runs this call: a new one, unless its name was there before."""
        full = f"{module}/{name}" if module else name
        if self.numbered:
            counts = self.counts.setdefault(module, {})
            n = counts[name] = counts.get(name, -1) + 1
            full = f"{full}:{n}"
        call = self.calls.get(full)
        if call is None:
            call = FunctionCall(full)
            if self.begin is not None:
                self.begin(call)
            self.calls[full] = call
        return call

    def _opened(self, func: Any) -> Callable[..., Any] | None:
        """An unwanted function that may call a wanted one, to be run with the mode on; or None."""
        if func not in self.others:
            self.others[func] = opened(func, self.names)
        return self.others[func]

    def _other(
        self, inner: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Runs `inner`, an unwanted function that was opened, with the mode on."""
        this = func, id(args[0]) if args else 0
        # One that calls its C form is reported twice: `Tensor.unflatten` calls `super().unflatten`
        if overridden(types) or this in self.opened:
            return func(*args, **kwargs)
        self.opened.append(this)
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self.opened.remove(this)

    def __exit__(self, *_: object) -> None:
        take_off(self, True)

    # -- on and off

    def turn_on(self) -> None:
        """Sees calls from now on."""
        take_off(self, self.on)  # of a forward that was interrupted
        self.opened.clear()
        self.on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def turn_off(self) -> None:
        """Undoes `turn_on`; can be repeated, as where it was called while a call is under way."""
        end_suspended()
        while take_off(self, self.on):  # a Ctrl-C can have left it there twice
            pass
        self.on = False

    def _warn_if_fused(self, args: Any, kwargs: Any) -> None:
        """Warns once if PyTorch would have run this attention by a fused kernel."""
        training = kwargs.get("training", args[13] if len(args) > 13 else True)
        same = len(args) > 2 and args[0] is args[1] is args[2]
        on = torch.backends.mha.get_fastpath_enabled()
        learns = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in args)
        if training or not same or not on or learns or self.block.warned:
            return
        self.block.warned = True
        warnings.warn(f"{self.block.options.who}: {_FUSED}", HookkitWarning, stacklevel=2)


def _module_run_again(within: list[Named]) -> str | None:
    """The name of the module of `within` whose code a checkpoint runs again, None if of none.

    A checkpoint of a method or of a closure runs it again outside the forward of its module, so no
    hook on the module says so: the modules whose code is running are read from the stack, up to
    the backward pass. Of several that hold one of them the smallest counts, which is innermost.
    """
    frame = currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.autograd.graph":
        code = frame.f_code
        for variable in (*code.co_varnames[:1], *code.co_freevars):
            runs = frame.f_locals.get(variable)
            if isinstance(runs, nn.Module):
                held = [(name, [*m.modules()]) for name, m, _ in within]
                sizes = {name: len(ms) for name, ms in held if any(m is runs for m in ms)}
                if sizes:
                    return min(sizes, key=lambda name: sizes[name])
        frame = frame.f_back
    return None


def modules_within(who: str, within: Within) -> list[Named] | None:
    """The modules of `within`, each checked: of one module all that are in it."""
    if within is None:
        return None
    if isinstance(within, nn.Module):  # scripted modules run no Python hooks
        found = {"": unwrap(within), **select(within)}
        within = {n: m for n, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}
    named: list[Named] = []
    for i, (name, m, leaf) in enumerate(named_modules_of(within, who)):
        check_hookable(m, who)
        if leaf:
            raise OptionError(
                f'{who}: within takes modules, and "{name}" selects a part of an output. Leave out '
                f"{leaf}."
            )
        named.append((str(i) if name is None else name, m, ""))
    return named
