"""`BackwardHooks`: a function called in each backward pass with a module's gradients, in and out.

It has the face of `Hooks` and stands on the tensor hooks of `gradients`, not on PyTorch's module
backward hooks: those raise on in-place operations, say nothing of dict outputs, and warn at every
first layer, which a monitor must not do to somebody's training. A call's function runs once all its
gradients are there, or at the end of the pass for those of which some never came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any
from weakref import ref

from fastcore.foundation import L
from torch import Tensor, nn
from torch.autograd import Variable

from hookkit.errors import SelectionError, nearest
from hookkit.hooks.entries import (
    Attached,
    called,
    check_hookable,
    graph_task,
    in_thread,
    is_compiling,
)
from hookkit.hooks.gradients import GradState, grad_dispatchers
from hookkit.hooks.snapshot import Options, Storer
from hookkit.hooks.taps import Receive
from hookkit.nested import leaves, pick
from hookkit.selecting import Selection

Func = Callable[[nn.Module, Any, Any], Any]


class _Call:
    """One forward call of a module: which gradients can come, and which came in this pass."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.slots = [[t.requires_grad for t in inputs], list[bool]()]
        self.task = -1

    def begin_pass(self, task: int) -> None:
        self.task, self.fired = task, False
        self.grads: list[list[Tensor | None]] = [[None] * len(wanted) for wanted in self.slots]

    def missing(self) -> bool:
        pairs = zip(self.slots, self.grads, strict=True)
        return any(w and g is None for ws, gs in pairs for w, g in zip(ws, gs, strict=True))


class BackwardHook:
    """The backward hook of one module; `BackwardHooks` makes them.

    Attributes:
        name: of the module.
        stored: what the function returned at the last call; None before the first.
    """

    def __init__(
        self, m: nn.Module, name: str, func: Func, options: Options, leaf: str = ""
    ) -> None:
        check_hookable(m, options.who)
        self.name, self.leaf, self.on = name, leaf, True
        self._module, self._func, self._options = ref(m), func, options
        self._thread = get_ident()
        self._last: Any = None
        self._open: list[_Call] = []  # calls under way: a module may call itself
        me = ref(self)
        # A layer that asks `query is key` must see that: a training stays as it is, bit by bit.
        inputs = GradState(lambda m, x: _begin_inputs(me(), m, x), each_place=False)
        outputs = GradState(lambda m, x: _begin_outputs(me(), m, x), leaf)
        calls = (*grad_dispatchers(inputs, True, m), *grad_dispatchers(outputs, False, m))
        self._handle = Attached(m, *calls).put_on()

    @property
    def module(self) -> nn.Module | None:
        """The hooked module, or None if it is gone."""
        return self._module()

    @property
    def stored(self) -> Any:
        """What the function returned at the last call, detached and on the CPU if so asked."""
        return None if self._last is None else self._last.read(self._options.who, lambda: self.name)

    def listen(self, on: bool) -> None:
        """Has the hook answer, or keep still until told otherwise; what is stored stays."""
        self.on = on

    def answers(self, module: nn.Module) -> bool:
        """Whether this forward of `module` is the fit's own, and not another thread's."""
        # a checkpoint that runs again is listened to: the gradients come from that forward
        ours = is_compiling() or in_thread(self._thread)
        return ours or graph_task() != -1 or "_is_replica" in module.__dict__

    def remove(self) -> None:
        """Takes the hook off; what was stored stays."""
        self.on = False
        self._handle.remove()
        self._open = []

    def _receive(self, call: _Call, side: int, i: int, grad: Tensor) -> None:
        if not self.on:
            return
        if call.task != graph_task():
            call.begin_pass(graph_task())
            me = ref(self)
            Variable._execution_engine.queue_callback(lambda: _end_of_pass(me(), call))
        call.grads[side][i] = grad.detach() if self._options.detach else grad
        if not call.missing():
            self._fire(call)

    def _fire(self, call: _Call) -> None:
        module = self._module()
        if call.fired or module is None:
            return
        call.fired = True
        grad_in, grad_out = (tuple(grads) for grads in call.grads)
        call.grads = []
        self._last = Storer(self._options).keep(called(self._func, module, grad_in, grad_out))


# The graph holds these functions where the garbage collector cannot see them: weak to the hook.


def _begin_inputs(hook: BackwardHook | None, m: nn.Module, inputs: Any) -> Receive | None:
    if hook is None or not hook.on or not hook.answers(m):
        return None
    hook._open.append(call := _Call(leaves(inputs)))
    return _receiver(hook, call, 0)


def _begin_outputs(hook: BackwardHook | None, m: nn.Module, output: Any) -> Receive | None:
    if hook is None or not hook._open or not hook.answers(m):
        return None
    call = hook._open.pop()
    call.slots[1] = [t.requires_grad for t in leaves(pick(output, hook.leaf))]
    return _receiver(hook, call, 1)


def _receiver(hook: BackwardHook, call: _Call, side: int) -> Receive:
    me = ref(hook)

    def receive(i: int, grad: Tensor) -> None:
        if (h := me()) is not None:
            h._receive(call, side, i, grad)

    return receive


def _end_of_pass(hook: BackwardHook | None, call: _Call) -> None:
    if hook is not None and hook.on and not call.fired:
        hook._fire(call)


class BackwardHooks:
    """`func(m, grad_inputs, grad_outputs)` for many modules: all of them registered, or none.

    Both gradients are tuples with an entry for each tensor among the inputs (positional, then
    keyword) and in the output; None where no gradient came. An input that is passed twice has the
    sum in both places (`hook_input(m, grad=True)` gives each its own).

    Args:
        modules: by name.
        func: what it returns is stored.
        detach: gives and stores detached gradients.
        cpu: moves what is stored to the CPU.

    >>> import torch
    >>> net = nn.Linear(2, 3)
    >>> hooks = BackwardHooks({"": net}, lambda m, gi, go: go[0].sum())
    >>> net(torch.ones(1, 2)).sum().backward(); hooks.remove(); hooks.stored[0]
    tensor(3.)
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], func: Func, detach: bool = True, cpu: bool = False
    ) -> None:
        options = Options("HookCallback", "forward", func, detach, cpu)
        self.hooks: list[BackwardHook] = []
        try:
            for name, module in modules.items():
                leaf = modules.leaf(name) if isinstance(modules, Selection) else ""
                self.hooks.append(BackwardHook(module, name, func, options, leaf))
        except BaseException:
            self.remove()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The modules' names."""
        return tuple(h.name for h in self.hooks)

    @property
    def stored(self) -> L:
        """What each hook stored last, in order; None where no backward pass came by."""
        return L(h.stored for h in self.hooks)

    def remove(self) -> None:
        """Takes all hooks off; what was stored stays."""
        for h in self.hooks:
            h.remove()

    def __len__(self) -> int:
        return len(self.hooks)

    def __iter__(self) -> Iterator[BackwardHook]:
        return iter(self.hooks)

    def __getitem__(self, i: int | str) -> BackwardHook:
        if isinstance(i, int):
            return self.hooks[i]
        if i not in self.names:
            near = nearest(i, self.names) or list(self.names)[:3]
            raise SelectionError(
                f'No hook is called "{i}". Nearest: {", ".join(map(repr, near))}. '
                f".names lists all {len(self)}."
            )
        return self.hooks[self.names.index(i)]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.names)

    def __repr__(self) -> str:
        return f"BackwardHooks({len(self)} modules)"
