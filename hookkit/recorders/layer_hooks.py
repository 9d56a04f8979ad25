"""What recorders put on a layer: hooks that show its tensors to their switch's target.

The target is a `RunningStats`, or the norms of the flight recorder: it has `update(row, leaf,
path, t)`. One hook serves training and validation, since it finds the target in the switch.
`_counts` decides which calls are recorded; `_makes_loss` decides for layers that are called on
their own, after the model's forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit.callbacks.hook_callback import RecordSwitch
from hookkit.errors import warn
from hookkit.hooks.attach import (
    attach,
    brief,
    called,
    graph_task,
    in_thread,
    is_compiling,
    is_tracing,
)
from hookkit.hooks.grads import Receive, listen_output
from hookkit.hooks.values import part_at
from hookkit.nested import Inputs, named_leaves, put, tmap

Function = Callable[[nn.Module, Any, Any], Any]


def see_outputs(
    module: nn.Module, switch: RecordSwitch, row: int, leaf: str, function: Function | None
) -> RemovableHandle:
    """Shows the tensors that a layer gives: of its whole output, of its part at the path `leaf`, or
    of what the user's `function(m, i, o)` makes of them.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if switch.late and not _makes_loss(output):
            return
        if not _counts(switch.thread, module):
            return
        # asked in this order, so that compiled graphs do not depend on `given`
        if not is_compiling() and switch.given is not None:
            switch.given(row, (args, kwargs))
        seen = _part(output, leaf, switch, module)
        if function is not None:
            inputs = tmap(Tensor.detach, Inputs(args, kwargs))
            seen = called(function, module, inputs, tmap(Tensor.detach, seen))
        if isinstance(seen, Tensor):  # most calls
            switch.target.update(row, 0, "", seen)
        else:
            _show(switch, row, seen)

    return attach(module, hook, switch=switch)


def see_inputs(module: nn.Module, switch: RecordSwitch, row: int) -> RemovableHandle:
    """Shows the tensors that a module is called with."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not switch.late and _counts(switch.thread, module):
            _show(switch, row, (args, kwargs))

    return attach(module, hook, pre=True, switch=switch)


def see_gradients(
    module: nn.Module, switch: RecordSwitch, row: int, leaf: str, function: Function | None
) -> RemovableHandle:
    """Shows the gradients of a layer's output, or of its part at the path `leaf`; or what the
    user's `function(m, grad_inputs, grad_outputs)` makes of all gradients of a call.
    """

    def received(i: int, grad: Tensor) -> None:
        switch.target.update(row, 0, "", grad)

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # a checkpoint that runs again counts: the gradients come from that forward
        if not _counts(switch.thread, module, again=True):
            return None
        if isinstance(output, Tensor) and not leaf:
            receive = received if is_compiling() else _of_the_loss(switch, received)
            return listen_output(module, args, kwargs, output, receive)
        part = _part(output, leaf, switch, module)
        paths = [path for path, _ in named_leaves(part)]

        def received_part(i: int, grad: Tensor) -> None:
            switch.target.update(row, i, paths[i], grad)

        receive = received_part if is_compiling() else _of_the_loss(switch, received_part)
        new = listen_output(module, args, kwargs, part, receive)
        return None if new is None else put(output, leaf, new)

    def show(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        assert function is not None
        if not (is_compiling() or _trains(switch)):
            return
        _show(switch, row, called(function, module, grad_inputs, grad_outputs))

    if function is not None:
        return attach(module, show, backward=True, switch=switch)
    return attach(module, hook, edit=True, observes=True, switch=switch)


def _of_the_loss(switch: RecordSwitch, receive: Receive) -> Receive:
    """Return `receive` for one forward: without the gradients of other things than the loss.

    Of a second `backward()` through the same forward it warns, since two gradients of one tensor
    are no two samples, and their sum is known only to who keeps both.
    """
    passes = dict[int, int]()  # by leaf the backward pass in which it got a gradient

    def of_the_loss(i: int, grad: Tensor) -> None:
        if not _trains(switch):
            return
        task = graph_task()
        if passes.setdefault(i, task) != task and not switch.warned:
            switch.warned = True
            warn(
                f"{switch.who}: backward() was called more than once through one forward, and "
                f"each call's gradients of outputs are recorded as samples of their own, not as "
                f"their sum. Add the losses, and call backward() once: (loss_a + loss_b).backward()"
            )
        receive(i, grad)

    return of_the_loss


def _trains(switch: RecordSwitch) -> bool:
    """Tell whether the backward pass under way makes the gradients of a step; asked once a pass."""
    task = graph_task()
    if switch.backward[0] != task:
        switch.backward = task, _is_for_a_step(switch.thread)
    return switch.backward[1]


def _is_for_a_step(thread: int | None) -> bool:
    """Tell whether the backward pass under way makes the gradients that a step will use.

    That is any `backward()`. `torch.autograd.grad` computes parts of a loss (the penalty of a
    WGAN-GP, the derivatives of a PINN) and weights of losses; it trains only where it is asked for
    parameters' gradients and frees the graph.
    """
    call = _engine_call(sys._getframe(1))
    if call is None:  # on a GPU hooks run in threads of autograd's own
        call = _engine_call(sys._current_frames().get(thread or 0))
    if call is None or call.f_code is torch.autograd.backward.__code__:
        return True
    given = call.f_locals
    if given.get("create_graph") or given.get("retain_graph"):
        return False
    return any(isinstance(x, nn.Parameter) for x in given.get("inputs", ()))


def _engine_call(frame: Any) -> Any:
    """Return the innermost call of `backward` or `grad` that a frame is in; None if there is none.

    PyTorch has no hook that says who began a backward pass.
    """
    calls = torch.autograd.backward.__code__, torch.autograd.grad.__code__
    while frame is not None and frame.f_code not in calls:
        frame = frame.f_back
    return frame


def _part(output: Any, leaf: str, switch: RecordSwitch, module: nn.Module) -> Any:
    return part_at(output, leaf, switch.who, lambda: brief(module)) if leaf else output


def _show(switch: RecordSwitch, row: int, seen: Any) -> None:
    """Shows the switch's target every tensor in `seen`."""
    for leaf, (path, t) in enumerate(named_leaves(seen)):
        switch.target.update(row, leaf, path, t)


def _counts(thread: int | None, module: nn.Module, again: bool = False) -> bool:
    """Whether a recorder that serves `thread` records this call of `module`."""
    if is_compiling():
        return True
    if graph_task() != -1:
        return again
    return in_thread(thread) or "_is_replica" in module.__dict__


def _makes_loss(output: Any) -> bool:
    """Whether a layer that is called on its own takes part in the loss.

    A probe runs without gradients, what runs again in the backward pass was counted before, and
    torch.jit.trace trains nothing.
    """
    if not is_compiling() and (graph_task() != -1 or is_tracing()):
        return False
    return any(t.requires_grad for _, t in named_leaves(output))
