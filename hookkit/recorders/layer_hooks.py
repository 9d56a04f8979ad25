"""`LayerHooks`: the hooks of one recorder. They pass the tensors of layers to its target.

The target is a `RunningStats`, or the norms of the flight recorder. A hook calls its `update(row,
number, path, t)` with tensor number `number`, at `path`, in the output of the layer in `row`.
`_counts` decides which calls are recorded; `_makes_loss` decides for layers that are called after
the model's forward has returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit._core.messages import warn
from hookkit._core.modules import is_replica
from hookkit._core.pytree import Inputs, tree_leaves_with_path, tree_map, tree_set
from hookkit.hooks.attach import Switch, attach, call_with_note, module_repr, remove_all
from hookkit.hooks.calls import call_kind, graph_task, is_compiling, is_tracing
from hookkit.hooks.grads import listen_output
from hookkit.hooks.values import part_at

Function = Callable[[nn.Module, Any, Any], Any]


class LayerHooks(Switch):
    """Registers the hooks of one recorder, and is the switch that they share.

    A compiled graph guards on the switch, so it is compiled twice at most.

    Attributes:
        on: whether the hooks record.
        who: the recorder's class, for messages.
        thread: the thread whose forwards are recorded.
        late: the model's forward has returned. A layer that is called now is recorded only if it
            takes part in the loss.
        target: the object whose `update` gets the tensors.
        on_inputs: a function to call with the row and the inputs of each layer, or None.
    """

    def __init__(self, who: str) -> None:
        super().__init__(on=False)
        self.who, self.thread, self.late = who, get_ident(), False
        self.target: Any = None
        self.on_inputs: Callable[[int, Any], None] | None = None
        self._handles: list[RemovableHandle] = []
        self._backward = -1, True  # the number of the last backward pass; whether it makes a step
        self._warned = False  # whether the warning of two backward passes was shown

    def remove(self) -> None:
        """Remove the hooks from their modules; a second call does nothing."""
        remove_all(self._handles)
        self._handles = []

    def attach_output_stats(
        self, module: nn.Module, row: int, path: str, function: Function | None
    ) -> None:
        """Record a layer's output, or its part at `path`; or what `function(m, i, o)` returns."""

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.late and not _makes_loss(output):
                return
            if not _counts(self.thread, module):
                return
            # a graph that read `on_inputs` would guard on it, and be compiled again
            if not is_compiling() and self.on_inputs is not None:
                self.on_inputs(row, (args, kwargs))
            if path:
                output = part_at(output, path, self.who, lambda: module_repr(module))
            if function is not None:
                inputs = tree_map(Tensor.detach, Inputs(args, kwargs))
                output = call_with_note(function, module, inputs, tree_map(Tensor.detach, output))
            if isinstance(output, Tensor):  # most calls
                self.target.update(row, 0, "", output)
            else:
                self._show(row, output)

        self._handles.append(attach(module, hook, switch=self))

    def attach_input_stats(self, module: nn.Module, row: int) -> None:
        """Record the tensors in a module's inputs."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.late and _counts(self.thread, module):
                self._show(row, (args, kwargs))

        self._handles.append(attach(module, hook, pre=True, switch=self))

    def attach_gradient_stats(
        self, module: nn.Module, row: int, path: str, function: Function | None
    ) -> None:
        """Record the gradients of a layer's output, or of its part at `path`.

        With a `function`, record what `function(m, grad_inputs, grad_outputs)` returns instead.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            # under activation checkpointing, gradients come from the forward that runs again
            if not _counts(self.thread, module, again=True):
                return None
            part = part_at(output, path, self.who, lambda: module_repr(module)) if path else output
            if isinstance(part, Tensor):
                paths = [""]
            else:
                paths = [at for at, _ in tree_leaves_with_path(part)]
            if is_compiling():

                def receive(i: int, grad: Tensor) -> None:
                    self.target.update(row, i, paths[i], grad)

            else:
                receive = partial(self._receive, row, paths, {})
                if not path and _is_new(output, args, kwargs):  # the usual case, made fast
                    output.register_hook(partial(receive, 0))
                    return None
            new = listen_output(module, args, kwargs, part, receive)
            return None if new is None else tree_set(output, path, new)

        def show(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
            assert function is not None
            if is_compiling() or self._trains():
                self._show(row, call_with_note(function, module, grad_inputs, grad_outputs))

        if function is not None:
            self._handles.append(attach(module, show, backward=True, switch=self))
        else:
            self._handles.append(attach(module, hook, edit=True, observes=True, switch=self))

    def _show(self, row: int, seen: Any) -> None:
        for number, (path, t) in enumerate(tree_leaves_with_path(seen)):
            self.target.update(row, number, path, t)

    def _receive(
        self, row: int, paths: list[str], passes: dict[int, int], i: int, grad: Tensor
    ) -> None:
        """Record the gradient of tensor `i` of one call, if this backward pass trains.

        Warn if a second backward pass goes through the same forward. The true gradient is the sum
        of the two, and computing it would need both in memory. `passes` is: tensor → number of the
        backward pass in which it first got a gradient.
        """
        if not self._trains():
            return
        task = graph_task()
        if passes.setdefault(i, task) != task and not self._warned:
            self._warned = True
            warn(
                f"{self.who}: backward() was called more than once through one forward, and "
                f"each call's gradients of outputs are recorded as samples of their own, not as "
                f"their sum. Add the losses, and call backward() once: (loss_a + loss_b).backward()"
            )
        self.target.update(row, i, paths[i], grad)

    def _trains(self) -> bool:
        """Return whether the current backward pass computes gradients for an optimizer step.

        Any `backward()` does. `torch.autograd.grad` usually computes part of a loss (the penalty of
        a WGAN-GP, the derivatives of a PINN). It trains only if it is asked for the gradients of
        parameters and frees the graph. The answer is computed once per backward pass.
        """
        task = graph_task()
        if self._backward[0] != task:
            call = _engine_call(sys._getframe(1))
            if call is None:  # on a GPU hooks run in threads of autograd's own
                call = _engine_call(sys._current_frames().get(self.thread))  # the user's thread
            trains = call is None or call.f_code is torch.autograd.backward.__code__
            if not trains:
                args = call.f_locals
                keeps = args.get("create_graph") or args.get("retain_graph")
                of = args.get("inputs", ())
                trains = not keeps and any(isinstance(x, nn.Parameter) for x in of)
            self._backward = task, trains
        return self._backward[1]


def _engine_call(frame: Any) -> Any:
    """Return the frame of the innermost `backward` or `grad` around `frame`; None if there is none.

    The stack is searched because PyTorch has no hook for the start of a backward pass.
    """
    calls = torch.autograd.backward.__code__, torch.autograd.grad.__code__
    while frame is not None and frame.f_code not in calls:
        frame = frame.f_back
    return frame


def _is_new(output: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the call made `output` as a new tensor: others need `listen_output`."""
    made = type(output) is Tensor and output.grad_fn is not None and output._base is None
    return made and not kwargs and all(type(x) is Tensor and x is not output for x in args)


def _counts(thread: int, module: nn.Module, again: bool = False) -> bool:
    """Return whether a recorder that serves `thread` records this call of `module`.

    Args:
        again: whether a forward that activation checkpointing runs again counts.
    """
    kind = call_kind(thread)
    if kind == "other thread":
        return is_replica(module)
    return kind in ("first", "compiled") or (kind == "recomputed" and again)


def _makes_loss(output: Any) -> bool:
    """Return whether a layer, called after the model's forward, takes part in the loss.

    It does if its output requires grad, unless the call is a recomputation in the backward pass,
    which was recorded before, or a call of torch.jit.trace.
    """
    if not is_compiling() and (graph_task() != -1 or is_tracing()):
        return False
    return any(t.requires_grad for _, t in tree_leaves_with_path(output))
