"""What a hook does at a call of its module: after the forward, before it, in the backward.

A base of `Hook`. It decides whether the call counts, runs the user's function on what it may see,
and stores the result.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.errors import HookError, NeverFiredWarning, warn
from hookkit.hooks.attach import graph_task, is_tracing, note, recomputing
from hookkit.hooks.block import TRACED, StopForward
from hookkit.hooks.grads import Receive, listen_inputs, listen_output
from hookkit.hooks.parts import check_grad, check_same, new_inputs, part_at
from hookkit.hooks.reading import Reading
from hookkit.hooks.snapshot import store, version_of
from hookkit.nested import Inputs, leaves, put, tmap

is_compiling = torch.compiler.is_dynamo_compiling  # a third of the cost of is_compiling
is_grad_enabled = torch.is_grad_enabled

# Private: `torch.compiler._is_exporting_flag`, True while torch.export traces. The public
# `is_exporting()` is folded to True in any trace by torch 2.11, so edits would be left out of
# compiled graphs. Without it, the public one is used.
if hasattr(torch.compiler, "_is_exporting_flag"):

    def is_exporting() -> bool:
        """Whether torch.export is tracing."""
        return bool(torch.compiler._is_exporting_flag)

else:
    is_exporting = torch.compiler.is_exporting


MISSING = object()
"""What PyTorch did not pass."""


class Calls(Reading):
    """What a `Hook` does at a call."""

    def _run(self, module: nn.Module, args: Any, x: Any, output: Any) -> Any:
        """A call of any kind; `x` is what PyTorch passes after the inputs."""
        block, kind = self.switch, self.switch.kind
        if kind == "backward":
            return self._backward(module, args, x)
        if kind == "forward" and block.fast and not self.leaf:  # registered without keyword inputs
            return self._forward(module, args, {}, x)
        # as in `HookEntry`: a call in another thread while this hook is registered or removed
        if (x if kind.startswith("pre") else output) is MISSING:
            return None
        if kind.endswith("grad"):
            return self._listen(module, args, x, output)
        return self._forward(module, args, x, output)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
        """After the forward, or before it: stores the output, or the inputs, or what the function
        makes of them; gives the replacement, if the hook edits.
        """
        block, pre = self.switch, self.switch.kind == "pre"
        # a checkpoint repeats the edits of its forward; without any, that ran outside the block
        unseen = block.edit and not self.n_calls and recomputing()
        if (unseen or not block.edit) and not self._counts():
            return None
        value = Inputs(args, kwargs) if pre else output
        part = self._part(value)
        if block.func is None:
            self._keep(part)
            return None
        seen = (part,) if pre or block.of_last else (Inputs(args, kwargs), part)
        if block.detach and not block.edit:
            seen = tuple([tmap(Tensor.detach, x) for x in seen])
        new = self._call(module, *seen)
        if is_compiling() or graph_task() == -1:  # else a checkpoint runs the layer again
            self._keep(new)
        if not block.edit or new is None:
            return None
        if self.leaf or not pre:
            check_same(self, part, new)
            new = put(value, self.leaf, new)
        return new_inputs(self, value, new) if pre else new

    def _backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        """In the backward pass, by PyTorch's full backward hook."""
        block = self.switch
        if block.detach and not block.edit:
            grad_input = tmap(Tensor.detach, grad_input)
            grad_output = tmap(Tensor.detach, grad_output)
        new = grad_output
        if block.func is not None:
            new = self._call(module, grad_input, grad_output)
        self._keep(new)
        if not block.edit:
            return None
        return (new,) if isinstance(new, Tensor) else new  # else PyTorch reads its first rows

    def _listen(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """In the forward: has the gradients of what the module gives, or takes, arrive here."""
        pre = self.switch.kind == "pre_grad"
        value = Inputs(args, kwargs) if pre else output
        part = self._part(value)
        if not self._expects(leaves(part)):
            return None
        receive = self._edit_grad(module) if self.switch.edit else self._store_grads(part)
        if not pre:
            new = listen_output(module, args, kwargs, part, receive, self.switch.edit)
            return None if new is None else put(output, self.leaf, new)
        new = put(value, self.leaf, listen_inputs(module, value, part, receive))
        return tuple(new), new.kwargs

    def _counts(self) -> bool:
        """Whether this call counts: none that a checkpoint runs again does, none of an export."""
        if is_compiling() or graph_task() == -1:
            return not is_exporting()
        self.why = self.why or (
            "seen only while a checkpoint recomputed it; run the forward in the block too"
        )
        return False

    def _part(self, x: Any) -> Any:
        """The part of `x` that is meant."""
        return part_at(x, self.leaf, self.switch.who, lambda: self.label) if self.leaf else x

    def _call(self, module: nn.Module, *seen: Any) -> Any:
        """The user's function; a ready-made edit also gets the hook."""
        block = self.switch
        func: Any = block.func
        try:
            if block.wants_hook:
                return func(module, *seen, hook=self)
            return func(module, *seen)
        except Exception as e:
            note(e, func, self.label)
            raise

    def _keep(self, x: Any) -> None:
        """Stores what a call gave, counts the call, and ends the forward if it was the last."""
        block = self.switch
        if block.keep != "none":
            self.last = store(x, block)
            if not block.detach or not block.clone:
                self.version = version_of(self.last)
        if is_compiling():
            self.why = TRACED
            if block.keep == "all":
                raise HookError(f'{block.who}: compiled code lists no calls. Use keep="last".')
            return
        self.n_calls += 1
        if block.keep == "all":
            self.all = self.all or []
            self.all.append(self.last)
        if block.waiting is not None:
            block.waiting.discard(id(self))
            if not block.waiting:  # one pass only: later ones are complete
                block.waiting = None
                raise StopForward(block)
        elif block.stop and not block.depth and not block.warned:
            block.warned = True
            warn(
                f"{block.who}: stop=True ends a forward inside of a `with` only, so this one runs "
                "to its end. Write `with h:` around the model.",
                NeverFiredWarning,
            )

    def _expects(self, tensors: list[Tensor]) -> bool:
        """Whether gradients of this call, which gave or took `tensors`, are to come; counts it."""
        block = self.switch
        if not is_compiling() and is_tracing():
            self.why = self.why or "torch.jit.trace ran it, where no gradient is hooked"
            return False
        again = not is_compiling() and graph_task() != -1
        if not again and not block.edit and not is_compiling():
            self.n_calls += 1
            if block.keep == "all":
                self.all = self.all or []
                self.all.append((None,) * len(tensors))
        if not (is_grad_enabled() and any(t.requires_grad for t in tensors)):
            self.why = self.why or _without_gradient(tensors, block.kind)
            return False
        if again and block.keep == "all" and self.n_calls > 1:
            self.why = 'a checkpoint with use_reentrant=True ran its calls again; use keep="last"'
            self.last = None  # it would be an earlier call's
            return False
        self.why = "no gradient arrived inside the block" if block.edit else ""
        return True

    # The graph holds these functions, so they hold the hook weakly: Python's garbage collector
    # finds no reference cycle that goes through the graph.

    def _store_grads(self, part: Any) -> Receive:
        """Return the function that receives the gradients of `part`, of this call.

        `last` keeps those of the latest call; a new backward pass begins a new tuple.
        """
        hook, n = ref(self), len(leaves(part))
        # A checkpoint that runs several calls again gives all of them the same number, and their
        # gradients arrive from the last call to the first: the first one to arrive is stored.
        again = -1 if is_compiling() else graph_task()
        source = (self.n_cleared, self.n_calls, again)
        task, grads = -1, list[Tensor | None]()

        def receive(i: int, grad: Tensor) -> None:
            nonlocal task, grads
            h = hook()
            if h is None or not h.registered or not h.switch.on:
                return
            if not grads or task != graph_task():
                task, grads = graph_task(), [None] * n
            try:
                grads[i] = store(grad, h.switch)
            except RuntimeError as e:
                if "Batching rule" not in str(e):
                    raise
                raise HookError(
                    f"{h.switch.who} on {h.label}: several backward passes run as one (with "
                    "is_grads_batched=True, or vectorize=True of a Jacobian), and PyTorch cannot "
                    "take their gradients apart. Run them one by one, or without the hook."
                ) from e
            if source > h.source or (source == h.source and (again < 0 or source is h.source)):
                h.last, h.source = tuple(grads), source
            if h.all is not None and source[0] == h.n_cleared:
                h.all[source[1] - 1] = tuple(grads)

        return receive

    def _edit_grad(self, module: nn.Module) -> Receive:
        """What replaces each gradient by what the user's function returns for it."""
        hook, owner = ref(self), ref(module)

        def receive(i: int, grad: Tensor) -> Any:
            h, m = hook(), owner()
            if h is None or m is None or not h.registered or not h.switch.on:
                return None
            new: Any = h._call(m, grad)
            if not torch.compiler.is_compiling():
                h.n_calls += 1
            if new is not None:
                check_grad(h, grad, new)
            return new

        return receive


def _without_gradient(tensors: list[Tensor], kind: str) -> str:
    """Why there will be no gradient of a call that gave, or took, `tensors`."""
    if not tensors:
        return "hookkit finds no tensor there; hook a layer inside it, or one that gives tensors"
    if is_grad_enabled():
        what = "inputs" if kind == "pre_grad" else "outputs"
        return f"none of its {what} requires a gradient (its parameters and inputs are frozen)"
    return (
        "it ran with gradients switched off (no_grad, inference_mode, or a checkpoint with "
        "use_reentrant=True)"
    )
