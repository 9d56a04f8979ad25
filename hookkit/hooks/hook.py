"""`Hook`: one function on one module, and what it stored.

A `Hook` is what PyTorch calls. It is registered when it is made, removed by `remove()` or at the
end of its `with` block, and shares its `Block` with the hooks that were made with it. The module
holds the hook, the hook holds the module weakly. Copies and pickles of a hook, also those made with
its module, are on no module and do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit.checks import check_flag
from hookkit.errors import HookError, OptionError
from hookkit.hooks.attach import HookEntry, check_hookable, graph_task, note
from hookkit.hooks.block import TRACED, Block, Registered, StopForward
from hookkit.hooks.grads import Receive, listen_inputs, listen_output
from hookkit.hooks.parts import check_same, edits_grad, part_at, positional, stores_grads
from hookkit.hooks.reading import Reading
from hookkit.hooks.snapshot import (
    aliases_user_memory,
    lazy_clone,
    set_grad_enabled,
    snapshot,
    store,
    version_of,
)
from hookkit.nested import Inputs, is_path, leaves, put, tmap

is_compiling = torch.compiler.is_dynamo_compiling  # a third of the cost of is_compiling
is_grad_enabled = torch.is_grad_enabled


class Hook(HookEntry, Reading, Registered):
    """One function, called at each forward (or backward) of one module; keeps what it returns.

    Args:
        m: the module. Held weakly; the module holds the hook.
        hook_func: `f(module, input, output)`, or `f(module, input)` with `pre=True`, or
            `f(module, grad_input, grad_output)` with `is_forward=False`. A function of one
            argument, or of none that Python can read, gets the last of these alone: `torch.mean`,
            `lambda o: o.std()`. What it returns is stored. `input` is an `Inputs`: a tuple of the
            positional inputs, keyword inputs by name. None stores the output (pre: the inputs).
        is_forward: False registers PyTorch's full backward hook.
        detach: `hook_func` sees detached tensors, and what is stored is a snapshot. Without it
            the tensors themselves are stored, in their graph; reading one that was written in place
            since warns. An `edit` always sees the live tensors.
        cpu: what is stored is moved to the CPU; from CUDA without waiting, until it is read.
        gather: reading `stored` joins the ranks' batches; every rank has to read it.
        pre: before the forward instead of after it.
        edit: what `hook_func` returns (unless None) replaces the output (pre: the inputs, as one
            value, a tuple or `Inputs`; backward: `grad_input`). Of another structure it raises.
        keep: `"last"` call, `"all"` calls, in `.calls`, or `"none"`: nothing is stored.
        clone: False stores the detached tensor without a copy.
        stop: in a `with` block, the forward ends, and the block with it, when this has fired.
        prepend: before the hooks that the module has, instead of after them.
        name: what messages call the module.
        leaf: path into the output, such as `[0]`: stands for the output everywhere.

    Raises:
        ArgumentError: `m` is no module, `hook_func` no function.
        OptionError: an option has a value that cannot work.
        HookError: `m` is scripted; or, as the model runs, an edit gave another structure.

    >>> m = nn.Linear(2, 3)
    >>> with Hook(m, lambda m, i, o: tuple(o.shape)) as h:
    ...     y = m(torch.zeros(4, 2))
    >>> h.stored, h.n_calls
    ((4, 3), 1)
    """

    __slots__ = (
        "__weakref__",
        "_module",
        "all",
        "handles",
        "last",
        "leaf",
        "n_calls",
        "name",
        "registered",
        "version",
        "why",
    )

    n_calls: int
    switch: Block

    def __init__(
        self,
        m: nn.Module,
        hook_func: Callable[..., Any] | None,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = False,
        gather: bool = False,
        *,
        pre: bool = False,
        edit: bool = False,
        keep: str = "last",
        clone: bool = True,
        stop: bool = False,
        prepend: bool = False,
        name: str | None = None,
        leaf: str = "",
    ) -> None:
        kind = kind_of("Hook", is_forward, pre)
        block = Block(
            "Hook",
            kind,
            hook_func,
            detach,
            cpu,
            gather,
            edit=edit,
            keep=keep,
            clone=clone,
            stop=stop,
            prepend=prepend,
        )
        check_hookable(m, "Hook")
        if not isinstance(leaf, str) or not is_path(leaf):
            raise OptionError(
                f"Hook: leaf={leaf!r} is no path into what a module gives. Write it as [0], .name "
                "or ['key'], or one after the other."
            )
        self._set(m, block, name, leaf)
        self.register()

    @classmethod
    def of(cls, m: nn.Module, block: Block, name: str | None = None, leaf: str = "") -> Self:
        """A hook of `block` on `m`, which is not registered yet."""
        hook = cls.__new__(cls)
        hook._set(m, block, name, leaf)
        return hook

    def _set(self, m: nn.Module | None, block: Block, name: str | None, leaf: str) -> None:
        self._module = _gone if m is None else ref(m)
        self.switch, self.name, self.leaf = block, name, leaf
        self.handles: tuple[RemovableHandle, ...] = ()
        self.registered = False  # what a compiled graph can ask, unlike the handles
        self.n_calls, self.last, self.all, self.version, self.why = 0, None, None, -1, ""

    def _clear(self) -> None:
        self.n_calls, self.last, self.all, self.version, self.why = 0, None, None, -1, ""

    @property
    def observes(self) -> bool:
        """Whether it only looks: the model computes the same without it."""
        return not self.switch.edit

    def _each(self) -> tuple[Hook]:
        return (self,)

    def _put(self) -> None:
        """Registers it on its module."""
        if self.registered:
            return
        m, block = self._module(), self.switch
        if m is None:
            raise HookError(f"{block.who}: the module of this hook is gone. Make a new hook.")
        if block.entries is not None:
            self.handles = block.entries(self, m)
        elif block.kind == "forward" or block.kind == "grad":
            kwargs = not block.fast or bool(self.leaf)
            self.handles = (
                m.register_forward_hook(self, prepend=block.prepend, with_kwargs=kwargs),
            )
        elif block.kind == "backward":
            self.handles = (m.register_full_backward_hook(self, prepend=block.prepend),)
        else:
            self.handles = (
                m.register_forward_pre_hook(self, prepend=block.prepend, with_kwargs=True),
            )
        self.registered = True

    # -- called by PyTorch --------------------------------------------------------------------

    def __call__(self, module: nn.Module, args: Any, x: Any, output: Any = None) -> Any:
        """After the forward, before it, or in the backward. First a snapshot of one tensor."""
        block = self.switch
        # PyTorch calls a hook that was removed during this same call once more
        if not self.registered or not block.on:
            return None
        if not block.fast or type(x) is not Tensor or is_compiling() or graph_task() != -1:
            return self._run(module, args, x, output)
        self.n_calls += 1
        if is_grad_enabled():
            # Private: `Tensor._is_view()` (since before 2.0). Without it a view of an input would
            # be a lazy clone, and a numpy array could lose the input's memory.
            if x.is_leaf or not x.is_cpu or x._is_view():
                self.last = snapshot(x, owned(module, args, {}))
                return None
            try:
                set_grad_enabled(False)  # half the cost of x.detach(), and one tensor less
                self.last = lazy_clone(x)
            except (RuntimeError, NotImplementedError):  # shared memory, sparse
                self.last = x.detach().clone()
            finally:
                set_grad_enabled(True)
        elif x.is_cpu and not (
            x._is_view() or x.is_quantized or module._buffers or (args and args[0] is x)
        ):
            try:
                self.last = lazy_clone(x)
            except (RuntimeError, NotImplementedError):
                self.last = x.clone()
        else:
            self.last = snapshot(x, owned(module, args, {}))
        return None

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

    # -- gradients ----------------------------------------------------------------------------

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
        if again and block.keep == "all":  # which call that is cannot be known
            return None
        self.why = "no gradient arrived inside the block" if block.edit else ""
        if block.edit:
            return edits_grad(ref(self), ref(module))
        return stores_grads(ref(self), len(found), self.n_calls)

    @property
    def hook(self) -> Self:
        """Itself: what fastai's Hook keeps here is the handle, with `remove()`."""
        return self

    def hook_fn(self, m: nn.Module, i: Any, o: Any) -> Any:
        """Calls `hook_func(m, i, o)` as PyTorch does, and stores what it returns.

        >>> m, x = nn.Linear(2, 3), torch.zeros(4, 2)
        >>> h = Hook(m, lambda m, i, o: o.shape)
        >>> h.remove(); h.hook_fn(m, (x,), m(x)); h.stored
        torch.Size([4, 3])
        """
        args, kwargs = i if isinstance(i, tuple) else (i,), getattr(i, "kwargs", {})
        kind = self.switch.kind
        if kind == "forward":
            return self._after(m, args, kwargs, o)
        if kind == "pre":
            return self._before(m, args, kwargs)
        return self._backward(m, i, i if kind == "pre_grad" else o)

    def __reduce__(self) -> Any:
        return _inert, ()


def kind_of(who: str, is_forward: bool, pre: bool) -> str:
    """The kind of hook that `is_forward` and `pre` mean."""
    pre = check_flag(who, "pre", pre)
    is_forward = check_flag(who, "is_forward", is_forward)
    if pre and not is_forward:
        raise OptionError(
            f"{who}: pre=True is for forward hooks, and is_forward=False makes a backward one. "
            "Use hook_input(module, grad=True) for the gradients of inputs."
        )
    return "pre" if pre else "forward" if is_forward else "backward"


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


def _gone() -> None:
    return None


def _inert() -> Hook:
    """What a copy or a pickle of a hook is: on no module."""
    hook = Hook.__new__(Hook)
    hook._set(None, Block(), None, "")
    return hook
