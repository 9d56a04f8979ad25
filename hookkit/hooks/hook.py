"""`Hook`: one function on one module, and what it stored.

A `Hook` is what PyTorch calls. It is registered when it is made, removed by `remove()` or at the
end of its `with` block, and shares its `Block` with the hooks that were made with it. The module
holds the hook, the hook holds the module weakly. Copies and pickles of a hook, also those made with
its module, are on no module and do nothing.

The class reads in this order: how it is made and registered, what it does when PyTorch calls it,
what it stores, how that is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit import ranks
from hookkit.checks import OfLast, check_flag
from hookkit.errors import (
    CompiledWarning,
    HookError,
    NeverFiredWarning,
    OptionError,
    OverwrittenWarning,
    nearest,
    warn,
)
from hookkit.hooks.attach import (
    HookEntry,
    brief,
    check_hookable,
    graph_task,
    is_exporting,
    is_tracing,
    note,
    recomputing,
)
from hookkit.hooks.block import NOT_WANTED, TRACED, Block, Registered, StopForward
from hookkit.hooks.eager import has_compiled
from hookkit.hooks.grads import Receive, listen_inputs, listen_output
from hookkit.hooks.parts import check_grad, check_same, new_inputs, part_at
from hookkit.hooks.snapshot import settled, snapshot, store, version_of
from hookkit.nested import Inputs, describe, is_path, leaves, put, tmap

is_compiling = torch.compiler.is_dynamo_compiling  # a third of the cost of is_compiling
is_grad_enabled = torch.is_grad_enabled

MISSING = object()
"""What PyTorch did not pass."""


class Values(L, list[Any]):  # type: ignore[misc]
    """An `L` that is a list: PyTorch takes no other sequence of tensors (`torch.stack`).

    The values are the list's own; `items`, which all methods of `L` read, is a copy.
    """

    def __init__(self, items: Any = (), **_: Any) -> None:
        list.__init__(self, items)

    def __getitem__(self, at: Any) -> Any:
        found = L.__getitem__(self, at)
        return Values(found) if type(found) is L else found  # a slice, in fastcore up to 2.1

    @property
    def items(self) -> list[Any]:
        """The values as a plain list."""
        return list.copy(self)

    __len__, __iter__ = list.__len__, list.__iter__
    __setitem__, __delitem__ = list.__setitem__, list.__delitem__


class Hook(HookEntry, Registered):
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

    >>> import torch
    >>> m = nn.Linear(2, 3)
    >>> with Hook(m, lambda m, i, o: tuple(o.shape)) as h:
    ...     y = m(torch.zeros(4, 2))
    >>> h.stored, h.n_calls
    ((4, 3), 1)
    """

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
        self._module: Callable[[], nn.Module | None] = _gone if m is None else ref(m)
        self.switch, self.observes, self.name, self.leaf = block, not block.edit, name, leaf
        self.handle: RemovableHandle | None = None
        self.registered = False  # what a compiled graph can ask, unlike the handle
        self.n_calls, self.version, self.why, self.n_cleared = 0, -1, "", 0
        self.last: Any = None
        self.all: list[Any] | None = None
        self.source: tuple[int, ...] = ()  # which call the gradients in `last` are of

    def _clear(self) -> None:
        self.n_calls, self.last, self.all, self.version, self.why = 0, None, None, -1, ""
        self.source, self.n_cleared = (), self.n_cleared + 1

    def _each(self) -> tuple[Hook]:
        return (self,)

    def _put(self) -> None:
        """Registers it on its module."""
        if self.registered:
            return
        m, block = self._module(), self.switch
        if m is None:
            raise HookError(f"{block.who}: the module of this hook is gone. Make a new hook.")
        kind, first = block.kind, block.prepend
        if kind == "forward" or kind == "grad":
            kwargs = not block.fast or self.leaf != ""
            self.handle = m.register_forward_hook(self, prepend=first, with_kwargs=kwargs)
        elif kind == "backward":
            self.handle = m.register_full_backward_hook(self, prepend=first)
        else:
            self.handle = m.register_forward_pre_hook(self, prepend=first, with_kwargs=True)
        self.registered = True

    # -- called by PyTorch --------------------------------------------------------------------

    def __call__(
        self, module: nn.Module, args: Any, x: Any = MISSING, output: Any = MISSING
    ) -> Any:
        """After the forward, before it, or in the backward. First a snapshot of one tensor."""
        block = self.switch
        # PyTorch calls a hook that was removed during this same call once more
        if not self.registered or not block.on:
            return None
        if not block.fast or type(x) is not Tensor or is_compiling() or graph_task() != -1:
            return self._run(module, args, x, output)
        self.n_calls += 1
        if block.detach:
            self.last = snapshot(x)
        else:
            self.last, self.version = x, version_of(x)
        return None

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

    # -- what is read -------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module | None:
        """The hooked module, or None if it is gone."""
        return self._module()

    @property
    def stored(self) -> Any:
        """What the last call stored; None before the first.

        Waits for a copy from CUDA, warns of a live tensor that was written in place since, and with
        `gather` joins the ranks (all of them have to read it, equally often).
        """
        value = self._own()
        if self.switch.gather:
            value = ranks.gather([value], [f"what is stored of {self.label}"])[0]
        return value

    def _own(self) -> Any:
        """What this rank stored."""
        wait_for(self.switch)
        if self.last is None:
            self._warn_if_compiled()
        elif self.version != -1 and self._is_live() and version_of(self.last) != self.version:
            self.version = -1
            warn(
                f"{self.switch.who}: what is stored of {self.label} was overwritten in place after "
                "it was stored (a layer with inplace=True, or an operation such as `+=`), so this "
                "is not what the layer gave. Store a copy: Hook(m, torch.clone, detach=False).",
                OverwrittenWarning,
            )
        self.last = settled(self.last)
        return self.last

    def _is_live(self) -> bool:
        """Whether the tensors of the model themselves are stored."""
        block = self.switch
        return not block.kind.endswith("grad") and not (block.detach and block.clone)

    @property
    def calls(self) -> L:
        """What each call stored, in the order of the forward calls; needs `keep="all"`."""
        if self.switch.keep != "all":
            raise OptionError(
                f'{self.switch.who}: .calls of {self.label} needs keep="all", and it has '
                f'keep="{self.switch.keep}". Make the hook with keep="all".'
            )
        wait_for(self.switch)
        values = settled(self.all or [])
        if self.switch.gather:
            names = [f"what is stored of {self.label} in call {i}" for i in range(len(values))]
            values = ranks.gather(values, names)
        return Values(values)

    def _warn_if_compiled(self) -> None:
        """Warns once that compiled code may be why a hook that stays has seen nothing."""
        block = self.switch
        if block.depth or block.warned or not self.registered or self.n_calls or self.why:
            return
        if not has_compiled() or self.module is None:
            return
        block.warned = True
        warn(
            f"{block.who}: the hook on {self.label} has seen no call. If it is part of a compiled "
            "model that had run before: torch.compile ignores hooks that are added after the first "
            "call, of this model or of another of its class. Add the hook before that call, use it "
            "in a `with` block, or call torch.compiler.reset().",
            CompiledWarning,
        )

    if not TYPE_CHECKING:  # a checker shall see a misspelt name

        def __getattr__(self, name: str) -> Any:
            """Only for a name that is not there: what somebody looks for in the tensor."""
            own = {n for n in dir(type(self)) if n[0] != "_"}.difference(HookEntry.__slots__)
            has = hasattr(self.last, name)
            near = "" if has else "".join(f"nearest: .{n}; " for n in nearest(name, own, n=1))
            cure = f"{near}what it stored is in .stored. Write .stored{f'.{name}' if has else ''}."
            raise AttributeError(f"a Hook has no {name!r}: {cure}", name=name, obj=self)

    @property
    def fired(self) -> bool:
        """Whether it has stored something, or seen a call that stores nothing."""
        block = self.switch
        if self.last is not None:
            return True
        if block.kind.endswith("grad") and not block.edit:
            return False  # it counts forward calls
        return self.n_calls > 0 and self.why != NOT_WANTED

    @property
    def label(self) -> str:
        """The module's name, where it is known, and its class, for messages."""
        module = self._module()
        if self.name is None:
            return "a module that is gone" if module is None else brief(module)
        return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")

    def __repr__(self) -> str:
        seen = "1 call" if self.n_calls == 1 else f"{self.n_calls} calls"
        held = f", stored {text}" if (text := self._held()) else ""
        return f"Hook({self.label}, {seen}{held}{', removed' if self.removed else ''})"

    def _held(self) -> str:
        """What is stored, in words; not of gradients, which are filled in later."""
        grads = self.switch.kind.endswith("grad")
        return "" if self.last is None or grads else describe(self.last)

    # fastai's names

    @property
    def hook_func(self) -> Callable[..., Any] | None:
        """The function it was made with; None stores what the module gives."""
        func = self.switch.func
        return func.f if isinstance(func, OfLast) else func

    @property
    def detach(self) -> bool:
        """Whether what is stored is detached."""
        return self.switch.detach

    @property
    def cpu(self) -> bool:
        """Whether what is stored is moved to the CPU."""
        return self.switch.cpu

    @property
    def gather(self) -> bool:
        """Whether reading `stored` joins the ranks."""
        return self.switch.gather

    @property
    def hook(self) -> Self:
        """Itself: what fastai's Hook keeps here is the handle, with `remove()`."""
        return self

    def hook_fn(self, m: nn.Module, i: Any, o: Any) -> Any:
        """Calls `hook_func(m, i, o)` as PyTorch does, and stores what it returns.

        >>> import torch
        >>> m, x = nn.Linear(2, 3), torch.zeros(4, 2)
        >>> h = Hook(m, lambda m, i, o: o.shape)
        >>> h.remove(); h.hook_fn(m, (x,), m(x)); h.stored
        torch.Size([4, 3])
        """
        args, kwargs = i if isinstance(i, tuple) else (i,), getattr(i, "kwargs", {})
        if self.switch.kind in ("forward", "pre"):
            return self._forward(m, args, kwargs, o)
        return self._backward(m, i, i if self.switch.kind == "pre_grad" else o)

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


def _gone() -> None:
    return None


def _inert() -> Hook:
    """What a copy or a pickle of a hook is: on no module."""
    hook = Hook.__new__(Hook)
    hook._set(None, Block(), None, "")
    return hook


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


def wait_for(block: Block) -> None:
    """Waits for copies to the CPU that are on their way."""
    while block.pending:
        torch.accelerator.synchronize(block.pending.pop())  # sync: once for each device
