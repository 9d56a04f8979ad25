"""`FunctionCalls`: the mode that runs calls of torch functions as calls of modules.

A `TorchFunctionMode` sees each call of a torch function in its thread while it is on. It runs one
that is wanted as a `FunctionCall`, which calls hooks as a module does: storing, gradients, edits
and recorders are those of modules, unchanged. Which module made the call is known from two hooks on
each module of `within`, which note when its forward begins and ends.
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
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from hookkit.errors import HookkitWarning, OptionError
from hookkit.hooks.block import Block
from hookkit.hooks.collection import Hooks, Modules, Named, named_modules_of
from hookkit.hooks.entries import HookEntry, Placed, check_hookable, graph_task, in_thread
from hookkit.hooks.function_call import FunctionCall, run_edited
from hookkit.hooks.snapshot import Options
from hookkit.hooks.torch_functions import (
    end_suspended,
    opened,
    overridden,
    same_functions,
    take_off,
)
from hookkit.modules import unwrap
from hookkit.selecting import select

Within = nn.Module | Modules | None
Numbers = Literal["block", "forward", "none"]

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
        numbers: the number at the end of a call's name counts the calls of the function in the
            innermost module of `within`: all in the block, or those of one forward; "none" has no
            number, so that all calls of the function in a module are calls of one `FunctionCall`.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        within: list[Named] | None,
        block: Block,
        begin: Callable[[FunctionCall], None] | None,
        numbers: Numbers = "block",
    ) -> None:
        super().__init__()
        self.names: dict[Any, str] = {}
        for f in functions:
            self.names.update(same_functions(block.options.who, f))
        self.within, self.block, self.begin, self.numbers = within, block, begin, numbers
        self.hooks: Hooks | None = None
        self.on = False
        self.reset()

    def reset(self) -> None:
        """Forgets all calls."""
        self.inside: list[str] = []  # the modules of `within` whose forward runs
        self.elsewhere = False  # whether one of them ran in another thread
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
            if self.others.get(func, self) is None:  # most calls
                return func(*args, **kwargs)
            return self._other(func, types, args, kwargs)
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
        if self.inside:
            return self.inside[-1]
        if self.within is None:
            return ""
        return _module_run_again(self.within) if again else None

    def _call(self, module: str, name: str) -> FunctionCall:
        """What runs this call: a new one, unless its name was there before."""
        full = f"{module}/{name}" if module else name
        if self.numbers != "none":
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

    def _other(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an unwanted function; if it calls a wanted one itself, with the mode on."""
        if func not in self.others:
            self.others[func] = opened(func, self.names)
        inner, this = self.others[func], (func, id(args[0]) if args else 0)
        # One that calls its C form is reported twice: `Tensor.unflatten` calls `super().unflatten`
        if inner is None or overridden(types) or this in self.opened:
            return func(*args, **kwargs)
        self.opened.append(this)
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self.opened.remove(this)

    def __exit__(self, *_: object) -> None:
        take_off(self, True)

    # -- which modules run

    def start(self) -> None:
        """Sees calls from now on, and which module of `within` makes them."""
        self.hook_modules()
        self.turn_on()

    def stop(self) -> None:
        """Undoes `start`; can be repeated, as where it was called while a call is under way."""
        self.turn_off()
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None

    def hook_modules(self) -> None:
        """Puts hooks on the modules of `within`, which work while this is on."""
        if self.within is not None:
            o = Options(self.block.options.who, "recorder", keep="none", entries=self.entries)
            self.hooks = Hooks.of_named(self.within, o)
            self.hooks.switch.on = False

    def turn_on(self) -> None:
        """Sees calls from now on."""
        take_off(self, self.on)  # of a forward that was interrupted
        self.inside.clear()
        self.opened.clear()
        self.on = True
        if self.hooks is not None:
            self.hooks.switch.on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def turn_off(self) -> None:
        """Undoes `turn_on`; can be repeated."""
        end_suspended()
        while take_off(self, self.on):  # a Ctrl-C can have left it there twice
            pass
        self.on = False
        self.inside.clear()
        if self.hooks is not None:
            self.hooks.switch.on = False

    def entries(self, name: str, module: nn.Module, leaf: str) -> list[Placed]:
        """What notes that the forward of a module begins, and that it ends, by an error too."""

        def enter(*_: Any) -> None:
            if not in_thread(self.block.thread):
                self.elsewhere = True
                return
            self.inside.append(name)
            if self.numbers == "forward":
                self.counts.pop(name, None)

        def leave(*_: Any) -> None:
            if in_thread(self.block.thread) and name in self.inside:
                while self.inside.pop() != name:
                    pass  # it was left by an exception that runs no hooks

        return [(HookEntry(enter), {"pre": True}), (HookEntry(leave), {"always_call": True})]

    def _warn_if_fused(self, args: Any, kwargs: Any) -> None:
        """Warns once if PyTorch would have run this attention by a fused kernel."""
        training = kwargs.get("training", args[13] if len(args) > 13 else True)
        same = len(args) > 2 and args[0] is args[1] is args[2]
        on = torch.backends.mha.get_fastpath_enabled()
        learns = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in args)
        if training or not same or not on or learns or "fused" in self.block.warned:
            return
        self.block.warned += ("fused",)
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
