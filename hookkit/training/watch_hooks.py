"""`LoopHooks`: the hooks by which a `WatchedLoop` sees forwards, losses and optimizer steps.

Two pairs of hooks see everything: forward hooks on the model and on each of its wrappers (the user
may call any of them), and the step hooks of optimizers. One more, on a loss function that is a
module, sees the loss. Counted are outermost calls of the thread that entered `watch`; no
recomputation by activation checkpointing, and no trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from itertools import chain
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer as global_hooks
from torch.utils.hooks import RemovableHandle

from hookkit.callbacks.optimizers import skips_step
from hookkit.hooks.attach import attach, check_hookable, graph_task, is_tracing, remove_all
from hookkit.modules import unwrap, wrappers
from hookkit.training.watch_losses import one_number

if TYPE_CHECKING:
    from hookkit.training.watched_loop import WatchedLoop

_IN_STEP = "num_items_in_batch"
"""A model that transformers' Trainer gives this divides its loss by the items of the whole step."""

is_compiling = torch.compiler.is_compiling


class LoopHooks:
    """Tells a `WatchedLoop` of each forward of its model and of each step of its optimizers.

    Where the model's own forward never runs (Lightning's training_step, a dict of two nets), a
    training call of any of its parts begins a batch, and the next call of that same part another.

    Attributes:
        loop: the `WatchedLoop`, from `attach` to `remove`. It holds this object, so that a longer
            reference would keep the model until the garbage collector runs.
        root_ran: a training forward of the model itself was seen.
        in_graph: the model ran inside a graph that `torch.compile` made of something around it.
        loss_twice: the loss function was called again within a batch.
        elsewhere: a training forward was seen in another thread.
    """

    loop: WatchedLoop

    def __init__(self, model: nn.Module) -> None:
        self.outer, self.model = model, unwrap(model)
        self.root_ran = self.in_graph = self.loss_twice = self.elsewhere = False
        self._first_part: nn.Module | None = None  # the part that began the batch
        self._of_model: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        self._begin()

    def _begin(self) -> None:
        self._thread = get_ident()
        self._depth, self._error = 0, None  # type: int, BaseException | None
        self._steps: list[Optimizer] = []  # under way: a step may call another's
        self._evaluates = self._evaluated = False  # the closure of a step
        self._last_loss: Tensor | None = None  # of the loss function
        self._handles, self._on_parts = list[RemovableHandle](), list[RemovableHandle]()

    def attach(self, loop: WatchedLoop) -> None:
        """Registers the hooks; `remove` removes all of them, also if this was cut short."""
        self._begin()
        self.loop = loop
        for module in wrappers(self.outer):
            check_hookable(module, "watch")
            # before the user's hooks, which belong to the batch; after a forward that raised, too
            self._handles.append(attach(module, self._before, pre=True, prepend=True))
            self._handles.append(attach(module, self._after, always_call=True))
        if not self.root_ran:
            for part in self.model.modules():  # a ScriptModule runs no Python hooks
                if part is not self.model and not isinstance(part, torch.jit.ScriptModule):
                    before = attach(part, self._before_part, pre=True, prepend=True)
                    self._on_parts.append(before)
        if isinstance(self.loop.loss_func, nn.Module):
            check_hookable(self.loop.loss_func, "watch")
            self._handles.append(attach(self.loop.loss_func, self._after_loss))
        _listen(self, True)

    def remove(self) -> None:
        """Removes what `attach` registered; can be called at any time, and twice."""
        _listen(self, False)
        remove_all([*self._handles, *self._on_parts])
        self._thread, self._evaluated = 0, True  # what is under way no longer counts
        vars(self).pop("loop", None)

    def owns(self, opt: Optimizer) -> bool:
        """Whether `opt` holds a parameter of the model; looked up again if it gets more groups."""
        n, owned = self._of_model.get(opt, (-1, False))
        if n != len(opt.param_groups):
            own = {id(p) for p in chain(self.outer.parameters(), self.model.parameters())}
            owned = any(id(p) in own for group in opt.param_groups for p in group["params"])
            self._of_model[opt] = len(opt.param_groups), owned
        return owned

    # --- forwards

    def _counts(self) -> bool:
        return get_ident() == self._thread and graph_task() == -1 and not is_tracing()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():
            self.in_graph = True  # written only: no guard, no graph break
        elif self._counts():
            self._depth += 1
            if self._depth == 1:
                self._error = sys.exception()
                self._begin_forward(self.model, args, kwargs)
        elif module.training and get_ident() != self._thread and graph_task() == -1:
            self.elsewhere |= torch.is_grad_enabled() and "_is_replica" not in module.__dict__

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._evaluates:
            self._steps.clear()  # a step that is under way has raised
        with_grad = torch.is_grad_enabled()
        if module is self.model and module.training and with_grad and not self.root_ran:
            self.root_ran = True
            remove_all(self._on_parts)
        self.loop.forward_began(module.training, with_grad, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or not self._counts():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        failed, shared = sys.exception() is not self._error, kwargs.get(_IN_STEP) is not None
        self.loop.forward_ended(output, failed, shared)

    def _before_part(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():
            self.in_graph = True
        elif not self._depth and torch.is_grad_enabled() and self._counts():
            # all others that run in a batch are called by the part that began it, or after it
            if not part.training:
                self.loop.eval_part_began((args, kwargs))
            elif part is self._first_part or not self.loop.in_batch:
                self._first_part = part
                self._begin_forward(part, args, kwargs)

    def _after_loss(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or not self.loop.training or not self._counts():
            return
        if self.loop.rolled_out and self.loop.loss is not None:
            return  # of a validation with gradients on, after a batch that was not stepped
        if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
            self.loss_twice |= self._last_loss is not None and self.loop.loss is self._last_loss
            if args:
                self.loop.probes.see_scores(module, args[0])
            self.loop.report_loss(one_number(output))
            self._last_loss = self.loop.loss

    # --- steps

    def _follows(self, opt: Optimizer) -> bool:
        """Whether a step of `opt` counts; in a backward pass a thread of autograd's may make it."""
        if is_compiling() or (get_ident() != self._thread and graph_task() == -1):
            return False
        loop = vars(self).get("loop")  # another thread may just have ended it
        return loop is not None and (self.owns(opt) or opt in loop.opts)

    def before_step(self, opt: Optimizer, args: Any, kwargs: Any) -> Any:
        """A step of any optimizer begins; returns its arguments, if its closure is reported."""
        if not self._follows(opt) or skips_step(opt):
            return None
        self._steps.append(opt)
        if len(self._steps) > 1:  # within another's, or super().step()
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # a user's own optimizer may take a number there, or the model
        is_closure = callable(closure) and not isinstance(closure, nn.Module)
        self.loop.step_began(opt, is_closure)
        if not is_closure:
            return None
        closure, self._evaluated = self._reported(closure), False
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _reported(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """`closure`, whose first evaluation is reported: PyTorch has no hook for it."""

        @wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._evaluates = True
            try:
                result = closure(*args, **kwargs)
            finally:
                self._evaluates = False
            if not self._evaluated:
                self._evaluated = True
                self.loop.closure_ran()
            return result

        return call

    def after_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        """A step of any optimizer ends."""
        if not self._steps or self._steps[-1] is not opt:
            return  # its begin was not followed
        self._steps.pop()
        if not self._steps:
            self._depth = 0  # a forward that Ctrl-C has cut short ends here
            self.loop.step_ended(opt)


# --- hooks on the steps of any optimizer: one may be made later, or be inside of another's step
#
# PyTorch iterates over its global hooks while they run. Another thread that trains, with or without
# watch, would fail if a hook came or went in the meantime. So there is one for all watched loops,
# from the first that begins to the last that ends.

_listening: tuple[LoopHooks, ...] = ()  # replaced, never changed: another thread may iterate
_handles: list[RemovableHandle] = []
_lock = Lock()


def _listen(hooks: LoopHooks, on: bool) -> None:
    """Tells `hooks` of each step of an optimizer from now on, or no more."""
    global _listening
    with _lock:
        others = tuple(each for each in _listening if each is not hooks)
        _listening = (*others, hooks) if on else others
        if not _listening:
            remove_all(_handles)
            _handles.clear()
        elif not _handles:
            register: Any = global_hooks.register_optimizer_step_pre_hook
            _handles.append(register(_before_step))
            register = global_hooks.register_optimizer_step_post_hook
            _handles.append(register(_after_step))


def _before_step(opt: Optimizer, args: Any, kwargs: Any) -> Any:
    changed = None
    for hooks in _listening:
        if (result := hooks.before_step(opt, args, kwargs)) is not None:
            changed = args, kwargs = result
    return changed


def _after_step(opt: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in _listening:
        hooks.after_step(opt, args, kwargs)
