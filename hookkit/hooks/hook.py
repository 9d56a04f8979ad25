"""`Hook`: one module, one function, and what it stored.

The module holds the hook, through its `HookEntry`; the hook holds both weakly. They are two objects
since a copy must know how it was reached: through the module's dict, where it is a guest that does
nothing, or through a module that owns the hook, where it works. A `with` block records the calls of
its own thread; a hook that is left in place records those of all threads.

The fast path, in `_after`, serves `with hook_outputs(layers)`: what it costs is mostly the objects
that it makes, in a cache that the model has just emptied. `calls` does everything else.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from fastcore.foundation import L
from torch import Tensor, nn

from hookkit.checks import OfLast, check_flag
from hookkit.errors import HookError, OptionError
from hookkit.hooks import calls
from hookkit.hooks.backward import BothGrads
from hookkit.hooks.block import Block, warn_if_compiled
from hookkit.hooks.calls import Grads
from hookkit.hooks.entries import (
    Handle,
    HookEntry,
    Switch,
    brief,
    check_hookable,
    graph_task,
    is_tracing,
)
from hookkit.hooks.gradients import GradHooks, Placed
from hookkit.hooks.reading import Stored, read
from hookkit.hooks.snapshot import (
    Kept,
    Kind,
    Options,
    Storer,
    is_transforming,
    lazy_clone,
    owned,
    snapshot,
)
from hookkit.interrupts import uninterrupted
from hookkit.nested import describe, is_path

is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # a third of is_compiling's cost
is_grad_enabled = torch.is_grad_enabled
is_inference_mode = torch.is_inference_mode_enabled
# Private: `torch._C._set_grad_enabled`, which torch.set_grad_enabled calls (since 1.0). The public
# context managers cost ten times as much, at each captured layer; they are the fallback.
set_grad_enabled: Callable[[bool], Any] = getattr(
    torch._C, "_set_grad_enabled", torch.set_grad_enabled
)


class Hook:
    """One function, called at each forward (or backward) of one module; keeps what it returns.

    Args:
        m: the module. Held weakly; the module holds the hook.
        hook_func: `f(module, input, output)`, or `f(module, input)` with `pre=True`, or
            `f(module, grad_input, grad_output)` with `is_forward=False`. A function of one
            argument, or of none that Python can read, gets the last of these alone: `torch.mean`,
            `lambda o: o.std()`. What it returns is stored. `input` is an `Inputs`: a tuple of the
            positional inputs, keyword inputs by name. None stores the output (pre: the inputs) as
            it is.
        is_forward: False registers PyTorch's full backward hook.
        detach: `hook_func` sees detached tensors, and what is stored is detached. With `edit` it
            sees the live ones.
        cpu: what is stored is moved to the CPU; from CUDA without waiting, until it is read.
        gather: reading `stored` joins the ranks' batches; every rank has to read it.
        pre: before the forward instead of after it.
        edit: what `hook_func` returns (unless None) replaces the output (pre: the inputs, as one
            value, a tuple or `Inputs`; backward: `grad_input`). Of another structure it raises.
        keep: `"last"` call, `"all"` calls, in `.calls`, or `"none"`: no tensor is stored, which is
            what edits are made of.
        clone: None stores a snapshot (live tensors with `detach=False`); True clones; False
            stores the live tensor, and reading one that was overwritten since warns (torch does
            not notice what is written through `.data` or numpy).
        dtype: floating point tensors are stored as this.
        stop: in a `with` block, the forward ends, and the block with it, when this has fired.
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
        "_all",
        "_block",
        "_count",
        "_fast",
        "_handle",
        "_last",
        "_missed",
        "_module",
        "_options",
        "_traced",
        "_waiting",
        "leaf",
        "name",
        "removed",
    )

    _all: list[Any] | None
    _last: Any
    _missed: str | None  # why calls were not recorded, for the report
    _module: Callable[[], nn.Module | None]
    _waiting: deque[Grads]

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
        clone: bool | None = None,
        dtype: torch.dtype | None = None,
        stop: bool = False,
        name: str | None = None,
        leaf: str = "",
    ) -> None:
        kind = kind_of("Hook", is_forward, pre)
        o = Options("Hook", kind, hook_func, detach, cpu, gather, edit, keep, clone, dtype, stop)
        check_hookable(m, "Hook")
        if not isinstance(leaf, str) or not is_path(leaf):
            raise OptionError(
                f"Hook: leaf={leaf!r} is no path into what a module gives. Write it as [0], .name "
                "or ['key'], or one after the other."
            )
        self._set_up(m, o, Block(o), name, leaf)
        self._register_or_remove()

    @classmethod
    def made(cls, m: nn.Module, options: Options) -> Hook:
        """A registered hook with these `options`."""
        check_hookable(m, options.who)
        hook = cls.unregistered(m, options, Block(options))
        hook._register_or_remove()
        return hook

    @classmethod
    def unregistered(
        cls,
        m: nn.Module | None,
        options: Options,
        block: Block,
        name: str | None = None,
        leaf: str = "",
    ) -> Hook:
        """A hook that is on no module yet; `m` is one that `check_hookable` has passed."""
        hook = cls.__new__(cls)
        hook._set_up(m, options, block, name, leaf)
        return hook

    def _set_up(
        self, m: nn.Module | None, options: Options, block: Block, name: str | None, leaf: str
    ) -> None:
        self._module = _gone if m is None else ref(m)
        self._options, self._block, self.name, self.leaf = options, block, name, leaf
        self._fast, self.removed, self._handle = options.plain and not leaf, True, Handle()
        self._clear()

    # -- life ---------------------------------------------------------------------------------

    @uninterrupted
    def register(self) -> None:
        """Registers the hook on its module; nothing if it is there."""
        self._register()

    def _register(self) -> None:
        if not self.removed:
            return
        module = self._module()
        if module is None:
            raise HookError(
                f"{self._options.who}: the module of this hook is gone. Make a new hook."
            )
        self._block.compiled = None  # a model may have been compiled since
        self.removed = False
        self._handle.put_all(module, self._entries(module))

    def _register_or_remove(self) -> None:
        try:
            self.register()
        except BaseException:
            self.remove()
            raise

    def _entries(self, module: nn.Module) -> list[Placed]:
        """What goes on `module`, each entry with its place."""
        o, block = self._options, self._block
        if o.kind == "forward":
            return [(HookEntry(self._after, block, o.edit, o.edit or not o.detach), "after")]
        if o.kind == "pre":
            return [(HookEntry(self._before, block, o.edit), "before")]
        if o.kind == "backward":
            check = HookEntry(self._check_output, block, False, False)
            return [(check, "after"), (HookEntry(self._backward, block, o.edit), "backward")]
        if o.kind == "both":
            return self._both_grads().entries(module, block)
        return self._grad_hooks().entries(module, block)

    def _callbacks(self, n: int) -> list[Callable[..., Any]]:
        """What the `n` entries of a copied module are to call, in their order."""
        kind = self._options.kind
        if kind in ("forward", "pre"):
            return [self._after if kind == "forward" else self._before]
        if kind == "backward":
            return [self._check_output, self._backward]
        if kind == "both":
            inputs, outputs = self._both_grads().hooks()
            return [*inputs.callbacks(False), *outputs.callbacks(n > 4)]
        return self._grad_hooks().callbacks(n > 2)

    def _grad_hooks(self) -> GradHooks:
        return GradHooks(self._begin, self._options.kind == "pre_grad", self.leaf)

    def _both_grads(self) -> BothGrads:
        block, detach = self._block, self._options.detach
        return BothGrads(self._both, self.leaf, detach, block, block.thread)

    @uninterrupted
    def remove(self) -> None:
        """Removes the hook from its module; what was stored stays. Nothing if it is removed."""
        try:
            if self._options.edit:
                warn_if_compiled(self)
        finally:
            self._remove()

    def _remove(self) -> None:
        self._handle.remove_all()
        self.removed = True
        module = self._module() if self._options.kind == "backward" else None
        if module is not None and not module._backward_hooks:
            # Private: PyTorch sets `_is_full_backward_hook` with the first full backward hook and
            # never resets it (since 1.8). Without this line the module would go on refusing
            # backward hooks of the old sort after ours is gone.
            module._is_full_backward_hook = None

    def _clear(self) -> None:
        self._count, self._last, self._missed, self._traced = 0, None, None, False
        self._all = [] if self._options.keep == "all" else None
        if not self._fast:
            self._waiting = deque(maxlen=256)

    def __enter__(self) -> Self:
        self._block.enter_all([self])
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        return self._block.exit_all([self], e)

    # -- calls --------------------------------------------------------------------------------

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After the forward. First the fast path: a snapshot of one tensor, and nothing more."""
        thread = self._block.thread
        if (
            not self._fast
            or type(output) is not Tensor
            or is_dynamo_compiling()
            or graph_task() != -1
            or is_transforming()
            or is_tracing()
            or (thread is not None and thread != get_ident())
        ):
            return calls.after(self, module, args, kwargs, output)
        self._count += 1
        o, recording = self._options, is_grad_enabled()
        inference = not recording and is_inference_mode()
        if o.live or inference or not output.is_cpu or output._is_view():
            self._last = Storer(o, owned(module, args, kwargs)).keep(output)
            return None
        if output.is_leaf and (
            output.is_quantized
            or module._buffers
            or kwargs
            or args[1:]
            or not args
            or output is args[0]
        ):
            self._last = snapshot(output, owned(module, args, kwargs))
            return None
        try:
            if recording:  # half the cost of output.detach(), and one tensor less
                set_grad_enabled(False)
            self._last = lazy_clone(output)
        except RuntimeError:  # from_numpy, shared memory, sparse
            self._last = snapshot(output)
        finally:
            if recording:
                set_grad_enabled(True)
        return None

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return calls.before(self, module, args, kwargs)

    def _backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return calls.backward(self, module, grad_input, grad_output)

    def _check_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.check_output(self, output)

    def _begin(self, module: nn.Module, x: Any) -> Any:
        return calls.begin(self, module, x)

    def _both(self, module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        calls.both(self, module, grad_inputs, grad_outputs)

    def hook_fn(self, m: nn.Module, i: Any, o: Any) -> Any:
        """Calls `hook_func(m, i, o)` as PyTorch does, and stores what it returns.

        As fastai's method of that name, to call by hand. A hook for gradients that has no function
        stores those given.

        Args:
            m: the module.
            i: its inputs, a tuple (backward: grad_input).
            o: its output (backward: grad_output); not used by a `pre` hook.

        Returns:
            With `edit`, what replaces the output (pre: the inputs); else None.

        >>> m, x = nn.Linear(2, 3), torch.zeros(4, 2)
        >>> h = Hook(m, lambda m, i, o: o.shape)
        >>> h.remove(); h.hook_fn(m, (x,), m(x)); h.stored
        torch.Size([4, 3])
        """
        kind, args, kwargs = self._options.kind, i, getattr(i, "kwargs", {})
        if not isinstance(i, tuple):
            args = (i,)
        new = None
        if kind == "forward":
            new = self._after(m, args, kwargs, o)
        elif kind == "pre":
            new = self._before(m, args, kwargs)
        elif kind == "backward":
            new = self._backward(m, i, o)
        else:
            self._keep(Storer(self._options).keep(i if kind == "pre_grad" else o))
        return new

    def for_copy(self) -> Hook | None:
        """A hook that edits as this one does and stores nothing, for a copy of its module."""
        if self._block.thread not in (None, get_ident()):
            return None
        o = copy.copy(self._options)
        object.__setattr__(o, "keep", "none")
        return type(self).unregistered(None, o, Block(o), self.name, self.leaf)

    # -- what is stored -----------------------------------------------------------------------

    @property
    def hook_func(self) -> Callable[..., Any] | None:
        """The function it was made with; None stores what the module gives."""
        func = self._options.hook_func
        return func.f if isinstance(func, OfLast) else func

    @property
    def detach(self) -> bool:
        """Whether what is stored is detached."""
        return self._options.detach

    @property
    def cpu(self) -> bool:
        """Whether what is stored is moved to the CPU."""
        return self._options.cpu

    @property
    def gather(self) -> bool:
        """Whether reading `stored` joins the ranks."""
        return self._options.gather

    @property
    def hook(self) -> Self:
        """Itself: what fastai's Hook keeps here is the handle, with `remove()`."""
        return self

    @property
    def switch(self) -> Switch:
        """Its `on` switches the hook off and on again, which stays registered."""
        return self._block

    @property
    def module(self) -> nn.Module | None:
        """The hooked module, or None if it is gone."""
        return self._module()

    @property
    def stored(self) -> Any:
        """What the last call stored; None before the first.

        Waits for a copy from CUDA, warns of a live tensor that was overwritten, and with `gather`
        joins the ranks (all of them have to read it).
        """
        last = self._last
        if type(last) is Tensor and not (self._options.gather or self._traced):
            return last  # the fast path stores it bare
        return read([self._stored()], self._options.gather)[0]

    def _stored(self) -> Stored:
        """The last call's value, for `read`."""
        if self._last is None:
            warn_if_compiled(self)
        elif not isinstance(self._last, (Kept, Grads)):
            self._last = Kept(self._last)
        return self, self._last, ""

    @property
    def calls(self) -> L:
        """What each call stored, in the order of the forward calls; needs `keep="all"`."""
        if self._all is None:
            raise OptionError(
                f'{self._options.who}: .calls of {self.label} needs keep="all", and keep="last" '
                'stores only the last call. Make the hook with keep="all".'
            )
        self._not_traced(".calls")
        if not self._all:
            warn_if_compiled(self)
        each = [(self, kept, f" in call {i}") for i, kept in enumerate(self._all)]
        return L(read(each, self._options.gather))

    @property
    def n_calls(self) -> int:
        """How many forward calls were seen (by a full backward hook: backward calls)."""
        self._not_traced(".n_calls")
        if not self._count:
            warn_if_compiled(self)
        return self._count

    def _not_traced(self, what: str) -> None:
        if self._traced:
            raise HookError(
                f"{self._options.who}: {what} of {self.label} is not known, since it ran inside a "
                "compiled graph, which keeps only the last value. Run it in a `with` block."
            )

    def _keep(self, kept: Kept | None) -> None:
        self._last = kept
        self._count += 1
        if self._all is not None:
            self._all.append(kept)

    def _over_ranks(self) -> str:
        """What the hook stores, in words that are the same on all ranks."""
        name = type(self._module()).__name__ if self.name is None else f"'{self.name}'"
        return f"{_WHAT[self._options.kind]} of {name}{self.leaf}"

    def _words(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        """The module in words, for messages: its name where it is known, and its class."""
        module = self._module()
        if self.name is not None:
            return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")
        return "a module that is gone" if module is None else brief(module)

    def __repr__(self) -> str:
        seen = "1 call" if self._count == 1 else f"{self._count} calls"
        seen = "traced" if self._traced else seen
        seen += f", stored {held}" if (held := self._held()) else ""
        return f"Hook({self.label}, {seen}{', removed' if self.removed else ''})"

    def _held(self) -> str:
        """What is stored, in words; not of gradients, which are filled in later."""
        if self._last is None or isinstance(self._last, Grads):
            return ""
        return describe(self._last.value if isinstance(self._last, Kept) else self._last)

    # -- copies -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        """A hook on the copy of its module, if that is being copied too; else a removed one."""
        module = self._module()
        on = bool(memo) and not self.removed and module is not None
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        o = copy.copy(self._options)
        object.__setattr__(o, "hook_func", copy.deepcopy(o.hook_func, memo))
        new._set_up(copy.deepcopy(module, memo) if on else None, o, Block(o), self.name, self.leaf)
        return new._take_over(copy.deepcopy(self._handle, memo) if on else None)

    def __reduce__(self) -> Any:
        """No activations; the module only while the hook is on it, for a module that owns one."""
        module = None if self.removed else self._module()
        handle = None if module is None else self._handle
        return _unpickled, (type(self), module, self._options, self.name, self.leaf, handle)

    def _take_over(self, handle: Handle | None) -> Hook:
        """Makes the entries of a copied module call this hook."""
        if handle is not None:
            self._handle, self.removed = handle, False
            self._join(self._block)
        return self

    def _join(self, block: Block) -> None:
        """Has the hook share `block` with others, after a copy."""
        self._block = block
        entries = self._handle.entries
        for entry, callback in zip(entries, self._callbacks(len(entries)), strict=bool(entries)):
            entry.callback, entry.switch = callback, block


_WHAT: dict[Kind, str] = {
    "forward": "the output",
    "pre": "the inputs",
    "grad": "the gradient",
    "pre_grad": "the gradient of the inputs",
    "backward": "what the backward hook gave",
    "both": "what the backward hook gave",
}


def _gone() -> None:
    return None


def _unpickled(
    cls: type[Hook], module: nn.Module | None, o: Options, name: Any, leaf: str, handle: Any
) -> Hook:
    hook = cls.__new__(cls)
    hook._set_up(module, o, Block(o), name, leaf)
    return hook._take_over(handle)


def kind_of(who: str, is_forward: bool, pre: bool) -> Kind:
    """The kind of hook that `is_forward` and `pre` mean."""
    pre = check_flag(who, "pre", pre)
    is_forward = check_flag(who, "is_forward", is_forward)
    if pre and not is_forward:
        raise OptionError(
            f"{who}: pre=True is for forward hooks, and is_forward=False makes a backward one. "
            "Use hook_input(module, grad=True) for the gradients of inputs."
        )
    return "pre" if pre else "forward" if is_forward else "backward"
