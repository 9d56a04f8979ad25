"""What a hook does at a call of its module: after the forward, before it, in the backward.

A base of `Hook`. It decides whether the call counts, runs the user's function on what it may see,
and stores the result.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.hooks.attach import graph_task, note
from hookkit.hooks.block import TRACED, StopForward
from hookkit.hooks.grads import Receive, listen_inputs, listen_output
from hookkit.hooks.parts import check_same, edits_grad, part_at, positional, stores_grads
from hookkit.hooks.reading import Reading
from hookkit.hooks.snapshot import aliases_user_memory, store, version_of
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


def _without_gradient(found: list[Tensor], kind: str) -> str:
    """Why there will be no gradient of a call that gave, or took, the tensors in `found`."""
    if not found:
        return "hookkit finds no tensor there; hook a layer inside it, or one that gives tensors"
    if is_grad_enabled():
        what = "inputs" if kind == "pre_grad" else "outputs"
        return f"none of its {what} requires a gradient (its parameters and inputs are frozen)"
    return (
        "it ran with gradients switched off (no_grad, inference_mode, or a checkpoint with "
        "use_reentrant=True)"
    )


def owned(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What a module was called with, and its buffers: memory that the user may share with numpy."""
    # Private: `Module._buffers` (since before 2.0); `buffers(recurse=False)` costs several times
    # as much, at each call of a hook.
    return (*args, *kwargs.values(), *module._buffers.values())


class Calls(Reading):
    """What a `Hook` does at a call."""

    __slots__ = ()

    def _run(self, module: nn.Module, args: Any, x: Any, output: Any) -> Any:
        """A call of any kind; `x` is what PyTorch passes after the inputs."""
        block, kind = self.switch, self.switch.kind
        if kind == "forward":
            plain = block.fast and not self.leaf  # registered without keyword inputs
            kwargs, output = ({}, x) if plain else (x, output)
            return self._after(module, args, kwargs, output)
        if kind == "pre":
            return self._before(module, args, x)
        if kind == "backward":
            return self._backward(module, args, x)
        inputs = kind == "pre_grad"
        seen = self._part(Inputs(args, x) if inputs else output)
        receive = self._receiver(module, seen)
        if receive is None:
            return None
        if inputs:
            return listen_inputs(module, args, x, receive)
        new = listen_output(module, args, x, seen, receive)
        return None if new is None else put(output, self.leaf, new)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After the forward: stores the output, or what the function makes of it."""
        block = self.switch
        if not self._counts():
            return None
        x = self._part(output)
        if block.func is None:
            self._keep(x, owned(module, args, kwargs))
            return None
        inputs, given = Inputs(args, kwargs), list(owned(module, args, kwargs))
        if not block.edit and block.detach:
            users = [i for i, t in enumerate(leaves(x)) if aliases_user_memory(t, given)]
            inputs, x = tmap(Tensor.detach, inputs), tmap(Tensor.detach, x)
            given += [inputs, inputs.kwargs, *(leaves(x)[i] for i in users)]
        new = self._call(module, inputs, x)
        self._seen(new, given)
        if not block.edit or new is None:
            return None
        check_same(block.who, self.label, x, new)
        return put(output, self.leaf, new)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward: stores the inputs, or what the function makes of them."""
        block, inputs = self.switch, Inputs(args, kwargs)
        if not self._counts():
            return None
        x = self._part(inputs)
        if block.func is None:
            self._keep(x, owned(module, args, kwargs))
            return None
        x = x if block.edit or not block.detach else tmap(Tensor.detach, x)
        new = self._call(module, x)
        self._seen(new, (*owned(module, args, kwargs), x))
        if not block.edit or new is None:
            return None
        if self.leaf:
            check_same(block.who, self.label, x, new)
            new = put(inputs, self.leaf, new)
        if isinstance(new, Inputs):
            return tuple(new), new.kwargs
        return positional(block.who, self.label, inputs, new), kwargs

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

    def _counts(self) -> bool:
        """Whether this call counts. Of what a checkpoint runs again, only edits are repeated."""
        if is_compiling() or graph_task() == -1 or self.switch.edit:
            return not is_exporting() or self.switch.edit
        self.why = self.why or (
            "seen only while a checkpoint recomputed it; run the forward in the block too"
        )
        return False

    def _part(self, x: Any) -> Any:
        """The part of `x` that is meant."""
        return part_at(x, self.leaf, self.switch.who, self.label) if self.leaf else x

    def _call(self, module: nn.Module, *seen: Any) -> Any:
        """The user's function; a ready-made edit also gets the hook."""
        func: Any = self.switch.func
        try:
            if getattr(func, "wants_hook", False):
                return func(module, *seen, hook=self)
            return func(module, *seen)
        except Exception as e:
            note(e, func, self.label)
            raise

    def _seen(self, new: Any, given: Any) -> None:
        """Keeps what the function returned, unless a checkpoint has run the layer again."""
        if is_compiling() or graph_task() == -1:
            self._keep(new, given)

    def _keep(self, x: Any, given: Any = ()) -> None:
        """Stores what a call gave, counts the call, and ends the forward if it was the last."""
        block = self.switch
        if block.keep != "none":
            self.last = store(x, block, given)
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

    def _receiver(self, module: nn.Module, x: Any) -> Receive | None:
        """What gets the gradients of this call of `module`; None if there will be none."""
        block, found = self.switch, leaves(x)
        again = not is_compiling() and graph_task() != -1
        learns = is_grad_enabled() and any(t.requires_grad for t in found)
        if not again and not block.edit and not is_compiling():
            self.n_calls += 1
            if block.keep == "all":
                self.all = self.all or []
                self.all.append((None,) * len(found))
        if not learns:
            self.why = self.why or _without_gradient(found, block.kind)
            return None
        call = self.n_calls
        if again and block.keep == "all":  # a reentrant checkpoint: which call is that?
            empty = [
                i for i, grads in enumerate(self.all or ()) if not any(map(torch.is_tensor, grads))
            ]
            if len(empty) != 1:
                return None
            call = empty[0] + 1
        self.why = "no gradient arrived inside the block" if block.edit else ""
        if block.edit:
            return edits_grad(ref(self), ref(module))
        return stores_grads(ref(self), len(found), call)
