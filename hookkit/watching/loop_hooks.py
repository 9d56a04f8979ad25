"""`LoopHooks`: where a batch and a step begin and end, in the user's own training loop.

Builds on `hooks.entries` and on PyTorch's step hooks of optimizers, and sends signals to an
`ExternalLoop`. Two pairs of hooks see everything: forward hooks on the model and on each of its
wrappers (for the user may call any of them), and the optimizers' step hooks. One more, on a loss
function that is a module, sees the loss.

    model(x) ─ forward_began ─ … ─ forward_ended(output), or forward_failed
    opt.step() ─ step_began(opt, closure) ─ (closure_ran) ─ … ─ step_ended(opt)

A forward is for training when the model is in training mode with gradients on; validation and a
rollout under `no_grad` are not. Only the outermost call is reported, and no recomputation by
activation checkpointing. Calls of the model in other threads than the one that attached the hooks
are ignored. One class, and therefore a file of a little more than 300 lines.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import chain
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as global_hooks

from hookkit.hooks.entries import (
    Handle,
    HookEntry,
    check_hookable,
    graph_task,
    in_thread,
    is_tracing,
    recomputing,
)
from hookkit.interrupts import uninterrupted
from hookkit.modules import unwrap, wrappers
from hookkit.watching.backward import BackwardRoot
from hookkit.watching.external_loop import ExternalLoop
from hookkit.watching.losses import one_number

_ANY_OPTIMIZER: Any = (
    global_hooks.register_optimizer_step_pre_hook,
    global_hooks.register_optimizer_step_post_hook,
)

_IN_STEP = "num_items_in_batch"
"""A model that transformers' Trainer gives this, the items of the whole step, divides its loss by
it (since 4.46): the losses of the step's batches then add up to the step's."""


class LoopHooks:
    """Reports each forward of `model` and each step of its optimizers to `loop`.

    Args:
        model: any module, wrapped or not. If its own forward never runs (a ModuleDict of two
            nets, or a model that is called layer by layer), a call of any of its parts begins a
            batch, and the next begins when that part runs again after a backward pass or a step.
        opts: torch optimizers; empty: every optimizer that holds a parameter of `model`.
        loop: gets its signals at once, in the user's thread, whose code gets what it raises.

    Attributes:
        loss_twice: the loss function was called again within a batch, whose loss is the last one.
    """

    def __init__(self, model: nn.Module, opts: Iterable[Optimizer], loop: ExternalLoop):
        self.model, self.loop, self.opts = model, loop, list(opts)
        self.root = unwrap(model)
        self.loss_twice, self._last_loss = False, None  # type: bool, Tensor | None
        self._thread: int | None = None
        self._handle = Handle()
        self._parts: dict[nn.Module, Handle] = {}  # that may begin a batch, as no whole does
        self._wholes: set[nn.Module] = set()  # those of them that were called
        self._undo: list[Callable[[], None]] = []
        self._depth, self._reporting = 0, False
        self._steps: list[Optimizer] = []  # under way: a step may call another's, or super().step
        self._error: BaseException | None = None
        self._root = BackwardRoot(loop.backward_began)
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]]
        self._owned = weakref.WeakKeyDictionary()

    @uninterrupted
    def attach(self) -> None:
        """Registers the hooks; `detach` removes all of them, also when this was cut short."""
        self._depth, self._reporting, self._steps, self._last_loss = 0, False, [], None
        self._thread = get_ident()
        for module in wrappers(self.model):
            self._attach_module(module)
        if not self.loop.root_ran:
            for part in self.root.modules():
                # the root has its own; a ScriptModule runs no Python hooks
                if part is not self.root and not isinstance(part, torch.jit.ScriptModule):
                    handle = self._parts[part] = Handle()
                    handle.put(part, HookEntry(self._before_part), pre=True, prepend=True)
        if isinstance(self.loop.loss_func, nn.Module):
            check_hookable(self.loop.loss_func, "watch")
            self._handle.put(self.loop.loss_func, HookEntry(self._after_loss))
        pairs: list[Any] = [
            (o.register_step_pre_hook, o.register_step_post_hook) for o in self.opts
        ]
        for register_pre, register_post in pairs or [_ANY_OPTIMIZER]:
            self._undo.append(register_pre(self._before_step).remove)
            self._undo.append(register_post(self._after_step).remove)

    @uninterrupted
    def detach(self) -> None:
        """Removes what `attach` registered; can be called at any time, and twice."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._root.remove()
        for handle in (self._handle, *self._parts.values()):
            handle.remove()
        self._handle, self._parts, self._wholes = Handle(), {}, set()

    def _attach_module(self, module: nn.Module) -> None:
        check_hookable(module, "watch")
        # before the user's hooks, which belong to the batch
        self._handle.put(module, HookEntry(self._before), pre=True, prepend=True)
        # always called: a forward that raised must be known to have ended
        self._handle.put(module, HookEntry(self._after), always_call=True)
        # Private: `Module._compiled_call_impl`, what `module.compile()` made (since 2.0). It holds
        # the hooks in its graph, where they do not run. Without it such a model is reported as one
        # that was never seen to run.
        if (compiled := module._compiled_call_impl) is not None:
            self._undo.append(self._around_compiled(module, compiled))

    def _around_compiled(
        self, module: nn.Module, compiled: Callable[..., Any]
    ) -> Callable[[], None]:
        """Replaces a compiled call by one that reports it; the function that restores it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(module, args, kwargs)
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

    # --- forward

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self.loop.compiled = True  # written only: no guard, no graph break
            return
        if _is_replica(module):
            return
        if not in_thread(self._thread):
            self.loop.other_thread |= _learns(self.root) and not recomputing()
            return
        self._depth += 1
        if self._depth == 1:
            self._error = sys.exception()
            self._reporting = not (recomputing() or is_tracing())  # a trace is no batch
            if self._reporting:
                self._report_forward(_learns(self.root), (args, kwargs))

    def _report_forward(self, training: bool, given: Any) -> None:
        self.loop.in_eval = not training and torch.is_grad_enabled()
        if training and not self.loop.root_ran:
            self.loop.root_ran = True
            self._forget_parts_of(self.root)
        self.loop.forward_began(training)
        if training:
            self._begin_to_learn(given)
        elif self.loop.in_eval:
            self.loop.sensors.see_batch(given, any(m.training for m in self.root.modules()))

    def _begin_to_learn(self, given: Any) -> None:
        """A training forward begins on `given`: a look at it, and at the backward pass to come."""
        self.loop.sensors.see_batch(given)
        if self._thread is not None:
            self._root.expect(self.root.parameters(), self._thread)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or _is_replica(module):
            return
        if not in_thread(self._thread):
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth or not self._reporting:
            return
        self._reporting = False
        if sys.exception() is not self._error:
            self.loop.forward_failed()
        else:
            self.loop.forward_ended(output, kwargs.get(_IN_STEP) is not None)

    def _before_part(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self.loop.compiled = True
        elif not self._depth and not recomputing():
            learns = _learns(module)
            if not in_thread(self._thread):
                self.loop.other_thread |= learns
                return
            self.loop.in_eval = not learns and torch.is_grad_enabled()
            if learns:
                self._part_learns(module, (args, kwargs))
            elif self.loop.in_eval:
                self.loop.sensors.see_batch((args, kwargs), False)

    def _part_learns(self, part: nn.Module, given: Any) -> None:
        if part not in self._wholes:
            self._wholes.add(part)
            self._forget_parts_of(part)
        if self.loop.part_began(part):
            self._begin_to_learn(given)

    def _forget_parts_of(self, whole: nn.Module) -> None:
        """Takes the hooks off the parts of a module that is called itself."""
        for part in whole.modules():
            if part is not whole and (handle := self._parts.pop(part, None)) is not None:
                handle.remove()

    def _after_loss(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Reports what the loss function returned, if it is one number, as the batch's loss."""
        loop = self.loop
        if torch.compiler.is_compiling() or not loop.training or not in_thread(self._thread):
            return
        if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
            self.loss_twice |= loop.loss is not None and loop.loss is self._last_loss
            loop.report_loss(one_number(output))
            self._last_loss = loop.loss
            if args:
                loop.sensors.see_scores(module, args[0])

    # --- step

    def _before_step(self, opt: Optimizer, args: Any, kwargs: Any) -> Any:
        """Reports the step; what it returns are the arguments that the step is called with."""
        if torch.compiler.is_compiling():
            self.loop.compiled_step = True
        elif self._is_followed(opt) and self._steps_here():
            if self._steps and not _is_stepping(self._steps[0], 1 + (self._steps[0] is opt)):
                self._steps = []  # it raised
            self._steps.append(opt)
            if len(self._steps) == 1:
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
                # a user's own optimizer may take a number there, or the model
                is_closure = callable(closure) and not isinstance(closure, nn.Module)
                self.loop.step_began(opt, is_closure)
                if is_closure:
                    reported = self._reported(closure)
                    if "closure" in kwargs:
                        return args, {**kwargs, "closure": reported}
                    return (args[0], reported, *args[2:]), kwargs
        return None

    def _reported(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """`closure`, and at its end a signal: PyTorch has no hook for it."""

        @wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            self.loop.closure_ran()
            return result

        return call

    def _after_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_followed(opt) or not self._steps:
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

    def _is_followed(self, opt: Optimizer) -> bool:
        return bool(self.opts) or self.owns(opt)

    def owns(self, opt: Optimizer) -> bool:
        """Whether `opt` holds a parameter of the model; looked up again if it gets more groups."""
        n, owned = self._owned.get(opt, (-1, False))
        if n != len(opt.param_groups):
            own = {id(p) for p in chain(self.model.parameters(), self.root.parameters())}
            owned = any(id(p) in own for group in opt.param_groups for p in group["params"])
            self._owned[opt] = (len(opt.param_groups), owned)
        return owned


def _is_replica(module: nn.Module) -> bool:
    """Whether `module` is one of DataParallel's copies: DataParallel's own call is the forward."""
    # Private: `_is_replica`, set by torch.nn.parallel.replicate (since 1.5). Without it the part of
    # a batch on each device would count as a batch.
    return "_is_replica" in module.__dict__


def _learns(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _is_stepping(opt: Optimizer, times: int) -> bool:
    """Whether `opt.step` is under way, so many times, on this thread's stack.

    Only looked up when a step begins while another seems to be under way: PyTorch calls no hook
    when a step raises. Private: it finds the frames of `profile_hook_step`'s `wrapper` in
    torch.optim.optimizer (since 1.8). Without them such a step counts as one that raised, and a
    step that calls another optimizer's as two.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and times:
        is_step = frame.f_code.co_name == "wrapper" and frame.f_globals is vars(global_hooks)
        times -= is_step and frame.f_locals.get("self") is opt
        frame = frame.f_back
    return not times
