"""What recorders' hooks do at a call of a layer: they show tensors to their switch's target.

The target is a `Tally`, or the norms of the flight recorder: it has `see(row, leaf, path, t)`.
One hook serves training and validation, since it finds the target in the switch. Which calls count
is in `entries.counts_for`; of a layer that is called on its own, after the model has returned, in
`_makes_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hookkit.hooks.attach import HookEntry, brief, called, graph_task, is_compiling
from hookkit.hooks.fronts import BothGrads, GradHooks, Placed, counts_for, is_tracing, keeps_output
from hookkit.hooks.parts import part_at
from hookkit.nested import Inputs, named_leaves, tmap
from hookkit.recording import RecordSwitch

Function = Callable[[nn.Module, Any, Any], Any]


def output_entries(
    switch: RecordSwitch, row: int, leaf: str, function: Function | None
) -> list[Placed]:
    """What shows the tensors that a layer gives: of its whole output, of its part at the path
    `leaf`, or of what the user's `function(m, i, o)` makes of them.
    """
    who = switch.options.who

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if switch.late and not _makes_loss(output):
            return
        if not counts_for(switch.thread, module):
            return
        # asked in this order, so that compiled graphs do not depend on `given`
        if not is_compiling() and switch.given is not None:
            switch.given(row, (args, kwargs))
        seen = part_at(output, leaf, who, lambda: brief(module)) if leaf else output
        if function is not None:
            inputs = tmap(Tensor.detach, Inputs(args, kwargs))
            seen = called(function, module, inputs, tmap(Tensor.detach, seen))
        if isinstance(seen, Tensor):  # most calls
            switch.target.see(row, 0, "", seen)
        else:
            _show(switch, row, seen)

    return [(HookEntry(hook, keeps_output=False), {})]


def input_entries(switch: RecordSwitch, row: int) -> list[Placed]:
    """What shows the tensors that a module is called with."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not switch.late and counts_for(switch.thread, module):
            _show(switch, row, (args, kwargs))

    return [(HookEntry(hook), {"pre": True})]


def gradient_entries(
    switch: RecordSwitch, row: int, leaf: str, function: Function | None, module: nn.Module
) -> list[Placed]:
    """What shows the gradients of a layer's output, or of its part at the path `leaf`; or what the
    user's `function(m, grad_inputs, grad_outputs)` makes of all gradients of a call.
    """
    who = switch.options.who

    def received(i: int, grad: Tensor) -> None:
        switch.target.see(row, 0, "", grad)

    def begin(module: nn.Module, output: Any) -> Any:
        # a checkpoint that runs again counts: the gradients come from that forward
        if not counts_for(switch.thread, module, again=True):
            return None
        if isinstance(output, Tensor) and not leaf:
            return received
        part = part_at(output, leaf, who, lambda: brief(module)) if leaf else output
        paths = [path for path, _ in named_leaves(part)]

        def receive(i: int, grad: Tensor) -> None:
            switch.target.see(row, i, paths[i], grad)

        return receive

    def show(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        assert function is not None
        _show(switch, row, called(function, module, grad_inputs, grad_outputs))

    if function is None:
        return GradHooks(begin, leaf=leaf).entries(keeps_output(module))
    return BothGrads(show, leaf, True, switch).entries(keeps_output(module))


def _show(switch: RecordSwitch, row: int, seen: Any) -> None:
    """Shows the switch's target every tensor in `seen`."""
    for leaf, (path, t) in enumerate(named_leaves(seen)):
        switch.target.see(row, leaf, path, t)


def _makes_loss(output: Any) -> bool:
    """Whether a layer that is called on its own takes part in the loss.

    A probe runs without gradients, what runs again in the backward pass was counted before, and
    torch.jit.trace trains nothing.
    """
    if not is_compiling() and (graph_task() != -1 or is_tracing()):
        return False
    return any(t.requires_grad for _, t in named_leaves(output))
