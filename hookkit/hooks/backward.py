"""A function called in each backward pass with a module's gradients, of its inputs and outputs.

Built on the tensor hooks of `gradients`, not on PyTorch's module backward hooks: those raise on
in-place operations, say nothing of dict outputs, and warn at every first layer, which a recorder
must not do to somebody's training. The function is called once all gradients of a forward call are
there, or at the end of the backward pass for calls of which some never came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.autograd import Variable

from hookkit.hooks.block import Block
from hookkit.hooks.entries import Placed, called, counts_for, graph_task, part_at
from hookkit.hooks.gradients import GradHooks
from hookkit.hooks.taps import Receive
from hookkit.nested import leaves

Function = Callable[[nn.Module, Any, Any], Any]


class _Call:
    """One forward call: which gradients can come, and which came in this pass."""

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        self.module = ref(module)
        self.wanted = [[t.requires_grad for t in inputs], list[bool]()]
        self.task = -1

    def begin_pass(self, task: int) -> None:
        """Empties what an earlier backward pass has brought."""
        self.task, self.fired = task, False
        self.grads: list[list[Tensor | None]] = [[None] * len(side) for side in self.wanted]

    def missing(self) -> bool:
        """Whether a gradient that can come has not come yet."""
        pairs = zip(self.wanted, self.grads, strict=True)
        return any(w and g is None for ws, gs in pairs for w, g in zip(ws, gs, strict=True))


class BothGrads:
    """Calls `fn(module, grad_inputs, grad_outputs)` in each backward, for each forward of a module.

    Both are tuples with an entry for each tensor among the inputs (positional, then keyword) and
    in the output; None where no gradient came. An input that is passed twice has the sum in both
    places (`hook_input(m, grad=True)` gives each its own). What `fn` returns is ignored.

    The entries hold it, and `fn`; the autograd graph holds it weakly.

    Args:
        fn: what is called.
        leaf: path of the part of the output that is meant.
        detach: gives detached gradients.
        block: `fn` is called for forwards of its thread, and for backwards, while it is on.
    """

    def __init__(self, fn: Function, leaf: str, detach: bool, block: Block) -> None:
        self.fn, self.leaf, self.detach, self.block = fn, leaf, detach, block
        self.open: list[_Call] = []  # calls under way: a module may call itself

    def entries(self, first: bool) -> list[Placed]:
        """The entries to register, which hold this; as `GradHooks.entries`."""
        # A layer that tests `query is key` must find it true: else its forward is another.
        inputs = GradHooks(self.begin_inputs, True, each_place=False)
        outputs = GradHooks(self.begin_outputs, False, self.leaf)
        return [*inputs.entries(False), *outputs.entries(first)]

    def begin_inputs(self, module: nn.Module, inputs: Any) -> Receive | None:
        """Before a forward: what receives the gradients of its inputs."""
        # a checkpoint's second run too: the gradients come from that forward
        if not counts_for(self.block.thread, module, again=True):
            return None
        del self.open[:-256]  # of forwards that raised
        self.open.append(call := _Call(module, leaves(inputs)))
        return _receiver(self, call, 0)

    def begin_outputs(self, module: nn.Module, output: Any) -> Receive | None:
        """After a forward: what receives the gradients of its output."""
        if not self.open or not counts_for(self.block.thread, module, again=True):
            return None
        call = self.open.pop()
        part = part_at(output, self.leaf, "HookCallback", lambda: type(module).__name__)
        call.wanted[1] = [t.requires_grad for t in leaves(part)]
        return _receiver(self, call, 1)

    def receive(self, call: _Call, side: int, i: int, grad: Tensor) -> None:
        """Takes one gradient of `call`; calls the function if it was the last."""
        if not self.block.on:
            return
        if call.task != graph_task():
            call.begin_pass(graph_task())
            weak = ref(self)
            # Private: `queue_callback` of autograd's engine runs a function at the end of the
            # backward pass under way (since 1.0; DDP and FSDP use it). Without it, calls of which
            # some gradient never comes would not be reported.
            Variable._execution_engine.queue_callback(lambda: _end_of_pass(weak(), call))
        call.grads[side][i] = grad.detach() if self.detach else grad
        if not call.missing():
            self.fire(call)

    def fire(self, call: _Call) -> None:
        """Calls the function for `call`, once a pass."""
        module = call.module()
        if call.fired or module is None:
            return
        call.fired = True
        grad_in, grad_out = (tuple(grads) for grads in call.grads)
        call.grads = []
        called(self.fn, module, grad_in, grad_out)


def _receiver(calls: BothGrads, call: _Call, side: int) -> Receive:
    weak = ref(calls)

    def receive(i: int, grad: Tensor) -> None:
        if (c := weak()) is not None:
            c.receive(call, side, i, grad)

    return receive


def _end_of_pass(calls: BothGrads | None, call: _Call) -> None:
    if calls is not None and calls.block.on and not call.fired:
        calls.fire(call)
