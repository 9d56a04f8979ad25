"""Where a batch and a step begin and end, in a training loop that is not ours.

Builds on `walking`. Two pairs of hooks tell all of it: forward hooks on the model (on
each of its wrappers too, for the user may call any of them) say when a batch goes in and comes
out; the optimizer's step hooks say when weights are about to change and have changed.

    model(x) ─ forward_began ─ … ─ forward_ended(output)
    opt.step() ─ step_began(opt, closure) ─ (closure_ran) ─ … ─ step_ended(opt)

A forward is for training when the model is in training mode with gradients on; validation and a
rollout under `no_grad` are not. Only the outermost call is told, and no recomputation by activation
checkpointing. What another thread than the one that attached does with the model is its own affair.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from itertools import chain
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as global_hooks
from torch.utils.hooks import RemovableHandle

from hookkit.hooks.entries import (
    Dispatcher,
    check_hookable,
    graph_task,
    in_thread,
    is_tracing,
    put_first,
    recomputing,
)
from hookkit.interrupts import uninterrupted
from hookkit.modules import inner_key, submodules, unwrap
from hookkit.watching.external_loop import ExternalLoop


_ANY_OPTIMIZER: Any = (
    global_hooks.register_optimizer_step_pre_hook,
    global_hooks.register_optimizer_step_post_hook,
)

_IN_STEP = "num_items_in_batch"
"""A model that transformers' Trainer gives this, the items of the whole step, divides its loss by
it (since 4.46): the losses of the step's batches then add up to the step's."""


def wrappers(model: nn.Module) -> list[nn.Module]:
    """`model` and what it wraps (compile, DDP, DataParallel, FSDP), outermost first."""
    found = [model]
    while (key := inner_key(found[-1])) is not None:
        found.append(submodules(found[-1])[key])
    return found


class _Tell(Dispatcher):
    """Passes a call on; in a copy or a pickle of the module it does nothing."""

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        if self.target is not None:
            self.target(*args)


def _first(module: nn.Module, hook: _Tell) -> RemovableHandle:
    """Registers a forward-pre hook before those that are there."""
    handle = module.register_forward_pre_hook(hook)
    put_first(module._forward_pre_hooks, handle.id)
    return handle


class LoopHooks:
    """Tells `listener` of each training forward of `model` and each step of its optimizers.

    Args:
        model: any module, wrapped or not. If its own forward never runs (a ModuleDict of two
            nets, a module used through other methods), its children tell where a batch begins.
        opts: torch optimizers; empty: every optimizer that owns a parameter of `model`; None: no
            optimizer is hooked.
        listener: told at once, in the user's thread; what it raises reaches the user's code.

    `compiled` and `compiled_step` become True when the model, or the step, ran inside a graph
    that `torch.compile` made of something around it: there Python cannot be told. `in_eval` says
    that the last forward was in eval mode with gradients on. `elsewhere` says that another
    thread has made training forwards, which are not recorded.
    """

    def __init__(self, model: nn.Module, opts: Iterable[Optimizer] | None, loop: ExternalLoop):
        self.model, self.loop = model, loop
        self.opts = None if opts is None else list(opts)
        self.root = unwrap(model)
        self.compiled = self.compiled_step = self.root_ran = self.in_eval = False
        self.elsewhere, self._thread = False, None  # type: tuple[bool, int | None]
        self._undo: list[Callable[[], None]] = []
        self._heads: list[Callable[[], None]] = []
        self._depth, self._telling = 0, False
        self._steps: list[Optimizer] = []  # under way: a step may call another's, or super().step
        self._error: BaseException | None = None
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]]
        self._owned = weakref.WeakKeyDictionary()

    @uninterrupted
    def attach(self) -> None:
        """Sets the hooks; `detach` removes all of them, also when this was cut short."""
        self._depth, self._telling, self._steps = 0, False, []
        self.elsewhere, self._thread = False, get_ident()
        for module in wrappers(self.model):
            self._attach_module(module)
        if not self.root_ran:
            inside = [m for child in self.root.children() for m in wrappers(child)]
            for module in inside:
                if not isinstance(module, torch.jit.ScriptModule):  # runs no Python hooks
                    self._heads.append(_first(module, _Tell(self._before_head)).remove)
        pairs: list[Any] = [
            (o.register_step_pre_hook, o.register_step_post_hook) for o in self.opts or ()
        ]
        if self.opts == []:
            pairs = [_ANY_OPTIMIZER]
        for register_pre, register_post in pairs:
            self._undo.append(register_pre(self._before_step).remove)
            self._undo.append(register_post(self._after_step).remove)

    @uninterrupted
    def detach(self) -> None:
        """Removes what `attach` set; safe to call at any time, and twice."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._drop_heads()

    def _attach_module(self, module: nn.Module) -> None:
        check_hookable(module, "watch")
        self._undo.append(_first(module, _Tell(self._before)).remove)
        # always called: a forward that raised must be known as ended
        after = _Tell(self._after)
        post = module.register_forward_hook(after, with_kwargs=True, always_call=True)
        self._undo.append(post.remove)
        # PyTorch may call it once more in this very call, and then without keyword inputs
        self._undo.append(partial(setattr, after, "target", None))
        if (compiled := module._compiled_call_impl) is not None:
            self._undo.append(self._around_compiled(module, compiled))

    def _around_compiled(
        self, module: nn.Module, compiled: Callable[..., Any]
    ) -> Callable[[], None]:
        """`module.compile()` compiles the hooks along; a call around the compiled one is told."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(module, args)
            output = None
            try:
                output = compiled(*args, **kwargs)
            finally:
                self._after(module, args, kwargs, output)
            return output

        def undo() -> None:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = compiled

        module._compiled_call_impl = call  # copies and pickles of a module leave it out
        return undo

    # -- forward ----------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self.compiled = True  # written only: no guard, no graph break
            return
        if "_is_replica" in module.__dict__:  # DataParallel: its own call is the forward
            return
        if not in_thread(self._thread):
            self.elsewhere |= _learns(self.root) and not recomputing()
            return
        self._depth += 1
        if self._depth == 1:
            self._error = sys.exception()
            self._telling = not (recomputing() or is_tracing())  # a trace is no batch
            if self._telling:
                training = _learns(self.root)
                self.in_eval = not training and torch.is_grad_enabled()
                if training:
                    self.root_ran = True
                    self._drop_heads()
                self.loop.forward_began(training)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or "_is_replica" in module.__dict__:
            return
        if not in_thread(self._thread):
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth or not self._telling:
            return
        self._telling = False
        if sys.exception() is not self._error:
            self.loop.forward_failed()
        else:
            self.loop.forward_ended(output, kwargs.get(_IN_STEP) is not None)

    def _before_head(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self.compiled = True
        elif not self._depth and _learns(module) and not recomputing():
            if in_thread(self._thread):
                self.loop.part_began(module)
            else:
                self.elsewhere = True

    @uninterrupted
    def _drop_heads(self) -> None:
        for undo in self._heads:
            undo()
        self._heads.clear()

    # -- step -------------------------------------------------------------------------------

    def _before_step(self, opt: Optimizer, args: Any, kwargs: Any) -> Any:
        """Tells of the step; what it returns, the step is called with."""
        if torch.compiler.is_compiling():
            self.compiled_step = True
        elif self._ours(opt) and self._steps_here():
            if self._steps and not _is_stepping(self._steps[0], 1 + (self._steps[0] is opt)):
                self._steps = []  # it raised
            self._steps.append(opt)
            if len(self._steps) == 1:
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
                # an optimizer of one's own may take a number there, or the model
                is_closure = callable(closure) and not isinstance(closure, nn.Module)
                self.loop.step_began(opt, is_closure)
                if is_closure:
                    told = self._told(closure)
                    if "closure" in kwargs:
                        return args, {**kwargs, "closure": told}
                    return (args[0], told, *args[2:]), kwargs
        return None

    def _told(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """`closure`, of whose end the listener is told: PyTorch has no hook for it."""

        @wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            self.loop.closure_ran()
            return result

        return call

    def _after_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._ours(opt) or not self._steps:
            return
        if not self._steps_here():
            return
        self._steps.pop()
        if not self._steps:
            self._depth = 0  # a forward cut short by Ctrl-C that the user caught ends here
            self.loop.step_ended(opt)

    def _steps_here(self) -> bool:
        """Whether the thread that attached makes this step; a thread of autograd's works for it."""
        return in_thread(self._thread) or graph_task() != -1

    def _ours(self, opt: Optimizer) -> bool:
        return bool(self.opts) or self.owns(opt)

    def owns(self, opt: Optimizer) -> bool:
        """Does `opt` hold a parameter of the model? Remembered while its groups stay as many."""
        n, owned = self._owned.get(opt, (-1, False))
        if n != len(opt.param_groups):
            mine = {id(p) for p in chain(self.model.parameters(), self.root.parameters())}
            owned = any(id(p) in mine for group in opt.param_groups for p in group["params"])
            self._owned[opt] = (len(opt.param_groups), owned)
        return owned


def _learns(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _is_stepping(opt: Optimizer, times: int) -> bool:
    """Is `opt.step` under way, so many times, on this thread's stack? Else it has raised."""
    frame: Any = sys._getframe(1)
    while frame is not None and times:
        mine = frame.f_code.co_name == "wrapper" and frame.f_globals is vars(global_hooks)
        times -= mine and frame.f_locals.get("self") is opt
        frame = frame.f_back
    return not times
