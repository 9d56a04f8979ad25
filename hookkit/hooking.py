"""`Hook` and `Hooks`: what is registered, what was stored, and what never came.

The module holds the hook (through its dispatchers), the hook holds the module weakly. A `with`
block records the calls of its own thread; a hook that is simply left in place records all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from threading import get_ident
from types import TracebackType
from typing import Any, Self, overload
from weakref import ref

import torch
from fastcore.foundation import L
from torch import Tensor, nn

from hookkit.capturing import (
    Kept,
    Kind,
    Options,
    Storer,
    is_transformed,
    lazy_clone,
    outside_inference,
)
from hookkit.compiling import enter_eager, leave_eager
from hookkit.dispatching import (
    Dispatcher,
    brief,
    called,
    check_hookable,
    graph_task,
    insert,
    is_compiling,
    withdraw,
)
from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, OptionError, SelectionError
from hookkit.errors import nearest
from hookkit.gradients import GradState, Receive, grad_dispatchers
from hookkit.nested import Inputs, describe, leaves, pick, put, tmap


class StopForward(BaseException):
    """Ends a forward pass once every hook of a `with … stop=True` block has fired.

    No `Exception`, so that a model's own `except Exception` lets it through; the block swallows it.
    """

    def __init__(self, owner: object) -> None:
        super().__init__(
            "stop=True: the last wanted layer has fired. Run the model inside the `with` block, "
            "which ends here."
        )
        self.owner = owner


class Stop:
    """Which hooks a stop still waits for."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self.waiting = {id(h) for h in hooks}
        self.raised = False

    def fired(self, hook: Hook) -> None:
        self.waiting.discard(id(hook))
        if not self.waiting:
            self.raised = True
            raise StopForward(self)


class _Plain(Dispatcher):
    """Forward hook that stores a snapshot of a bare tensor: the path that has to be fast."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        hook = self.target
        if hook is None:
            return
        if (
            type(output) is not Tensor
            or is_compiling()
            or graph_task() != -1
            or is_transformed(output)
            or not output.is_cpu
            or output._is_view()
            or (hook._thread is not None and hook._thread != get_ident())
        ):
            hook._on_forward(module, args, {}, output)
            return
        try:
            hook._last = lazy_clone(output.detach() if output.requires_grad else output)
        except RuntimeError:  # from_numpy, shared memory
            hook._last = output.detach().clone()
        hook._count += 1


class _Forward(Dispatcher):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return (
            None if self.target is None else self.target._on_forward(module, args, kwargs, output)
        )


class _Pre(Dispatcher):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.target is None else self.target._on_pre(module, args, kwargs)


class _Backward(Dispatcher):
    """What PyTorch's full backward hook calls."""

    __slots__ = ()

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        if self.target is not None:
            return self.target._on_backward(module, grad_input, grad_output)


class _BackwardCheck(Dispatcher):
    """Forward hook that refuses, by name, outputs on which a full backward hook stays silent."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.target is not None:
            self.target._check_backward(output)


class _Grads:
    """The gradients of one forward call, filled in leaf by leaf; emptied by each new backward."""

    __slots__ = ("index", "kept", "task")

    def __init__(self, index: int, n: int) -> None:
        self.index, self.task = index, -1
        self.kept: list[Kept | None] = [None] * n


class Hook:
    """One function, called at each forward (or backward) of one module; keeps what it returns.

    Args:
        m: the module. Held weakly; the module holds the hook.
        hook_func: `f(module, input, output)`, or `f(module, input)` with `pre=True`, or
            `f(module, grad_input, grad_output)` with `is_forward=False`. What it returns is
            stored, so it is also the place to reduce: `lambda m, i, o: o.mean()`. `input` is an
            `Inputs`: a tuple of the positional inputs, keyword inputs by name. None stores the
            output (pre: the inputs) as it is.
        is_forward: False registers PyTorch's full backward hook.
        detach: `hook_func` sees detached tensors, and what is stored is detached. With `edit` it
            sees the live ones.
        cpu: what is stored is moved to the CPU; from CUDA without waiting, until it is read.
        gather: reading `stored` joins the ranks' batches; every rank has to read it.
        pre: before the forward instead of after it.
        edit: what `hook_func` returns (unless None) replaces the output (pre: the inputs, as one
            value, a tuple or `Inputs`; backward: `grad_input`).
        keep: `"last"` call, or `"all"` calls, in `.calls`.
        clone: None stores a snapshot (live tensors with `detach=False`); True clones; False
            stores the live tensor, and reading one that was overwritten since warns.
        dtype: floating point tensors are stored as this.
        stop: in a `with` block, the forward ends, and the block with it, when this has fired.
        name: what messages call the module.
        leaf: path into the output, such as `[0]`: stands for the output everywhere.

    Raises:
        ArgumentError: `m` is no module, `hook_func` no function.
        OptionError: an option has a value that cannot work.
        HookError: `m` is scripted.

    >>> m = nn.Linear(2, 3)
    >>> with Hook(m, lambda m, i, o: tuple(o.shape)) as h:
    ...     y = m(torch.zeros(4, 2))
    >>> h.stored, h.n_calls
    ((4, 3), 1)
    """

    _count = 0
    _last: Any = None
    _all: list[Any] | None = None
    _missed: str | None = None
    _traced = False
    _thread: int | None = None
    _stop: Stop | None = None
    _stance: Any = None
    removed = True

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
        self._set_up(m, o, name, leaf)
        self.register()

    @classmethod
    def of(cls, m: nn.Module, options: Options, name: str | None = None, leaf: str = "") -> Hook:
        """A registered hook with these `options`."""
        hook = cls.__new__(cls)
        hook._set_up(m, options, name, leaf)
        hook.register()
        return hook

    def _set_up(self, m: nn.Module, options: Options, name: str | None, leaf: str) -> None:
        check_hookable(m, options.who)
        self._module = ref(m)
        self._options = options
        self.name = name
        self.leaf = leaf
        self._calls: list[Dispatcher] = []
        self._keys: list[Any] = []
        self._clear()

    # -- life ---------------------------------------------------------------------------------

    def register(self) -> None:
        """Puts the hook on its module; nothing if it is there."""
        if not self.removed:
            return
        module = self._module()
        if module is None:
            raise HookError(
                f"{self._options.who}: the module of this hook is gone. Make a new hook."
            )
        self._calls = self._dispatchers()
        self._keys = [self._insert(module, call) for call in self._calls]
        self.removed = False

    def _dispatchers(self) -> list[Dispatcher]:
        o = self._options
        if o.kind == "forward":
            return [_Plain(self)] if o.plain and not self.leaf else [_Forward(self)]
        if o.kind == "pre":
            return [_Pre(self)]
        if o.kind == "backward":
            return [_BackwardCheck(self), _Backward(self)]
        return list(grad_dispatchers(GradState(self._begin), o.kind == "pre_grad"))

    def _insert(self, module: nn.Module, call: Dispatcher) -> Any:
        if isinstance(call, _Backward):
            return module.register_full_backward_hook(call)
        return insert(module, call, pre=_is_pre(call), with_kwargs=not isinstance(call, _Plain))

    def remove(self) -> None:
        """Takes the hook off its module; what was stored stays. Nothing if it is off already."""
        self.removed = True
        module = self._module()
        for call, key in zip(self._calls, self._keys, strict=True):
            call.target = None
            if isinstance(call, _Backward):
                key.remove()
                if module is not None and not module._backward_hooks:
                    module._is_full_backward_hook = None
            elif module is not None:
                withdraw(module, key, pre=_is_pre(call))
        self._calls, self._keys = [], []

    def _clear(self) -> None:
        self._count, self._last, self._missed, self._traced = 0, None, None, False
        self._all = [] if self._options.keep == "all" else None

    def __enter__(self) -> Self:
        if self.removed:
            self._clear()
            self.register()
        self._thread = get_ident()
        self._stop = Stop([self]) if self._options.stop else None
        self._stance = enter_eager()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        leave_eager(self._stance)
        self.remove()
        return left([self], self._stop, e)

    # -- what is stored -----------------------------------------------------------------------

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
        if self._last is None and not self._options.gather:
            return None
        if isinstance(self._last, Tensor):
            self._last = Kept(self._last, None, None)
        return self._read(self._last)

    @property
    def calls(self) -> L:
        """What each call stored, in the order of the forward calls; needs `keep="all"`."""
        if self._all is None:
            raise OptionError(
                f'{self._options.who}: .calls of {self.label} needs keep="all", and keep="last" '
                'stores only the last call. Make the hook with keep="all".'
            )
        self._not_traced(".calls")
        return L(self._read(kept) for kept in self._all)

    @property
    def n_calls(self) -> int:
        """How many forward calls were seen (with a full backward hook: backward calls)."""
        self._not_traced(".n_calls")
        return self._count

    def _not_traced(self, what: str) -> None:
        if self._traced:
            raise HookError(
                f"{self._options.who}: {what} of {self.label} is not known, since it ran inside a "
                "compiled graph, which keeps only the last value. Run it in a `with` block."
            )

    def _read(self, kept: Any) -> Any:
        o = self._options
        if isinstance(kept, _Grads):
            return tuple(
                None if k is None else k.read(o.who, self.label, o.gather) for k in kept.kept
            )
        if kept is None:
            kept = Kept(None, None, None)
        return kept.read(o.who, self.label, o.gather)

    @property
    def label(self) -> str:
        """The module in words, for messages: its name where it is known, and its class."""
        module = self._module()
        if self.name is not None:
            return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")
        return "a module that is gone" if module is None else brief(module)

    def __repr__(self) -> str:
        if self._traced:
            seen = "traced"
        else:
            seen = "1 call" if self._count == 1 else f"{self._count} calls"
        if self._last is not None and not isinstance(self._last, _Grads):
            value = self._last.value if isinstance(self._last, Kept) else self._last
            seen += f", stored {describe(value)}"
        return f"Hook({self.label}, {seen}{', removed' if self.removed else ''})"

    # -- what the dispatchers call --------------------------------------------------------------

    def _ours(self, module: nn.Module) -> bool:
        if self._thread is None or self._thread == get_ident():
            return True
        self._missed = "thread"
        return False

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        o = self._options
        x = self._picked(output) if self.leaf else output
        if o.hook_func is None:
            return self._seen(module, lambda: x)
        inputs = Inputs(args, kwargs)
        if o.detach and not o.edit:
            inputs, x = tmap(Tensor.detach, inputs), tmap(Tensor.detach, x)
        new = self._seen(module, lambda: called(o.hook_func, module, inputs, x))
        if new is None or not o.edit:
            return None
        return put(output, self.leaf, new) if self.leaf else new

    def _on_pre(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        o = self._options
        inputs = Inputs(args, kwargs)
        x = self._picked(inputs) if self.leaf else inputs
        if o.hook_func is None:
            return self._seen(module, lambda: x)
        if o.detach and not o.edit:
            x = tmap(Tensor.detach, x)
        new = self._seen(module, lambda: called(o.hook_func, module, x))
        if new is None or not o.edit:
            return None
        new = put(inputs, self.leaf, new) if self.leaf else new
        if isinstance(new, Inputs):
            return tuple(new), new.kwargs
        return (new if isinstance(new, tuple) else (new,)), kwargs

    def _seen(self, module: nn.Module, value: Callable[[], Any]) -> Any:
        """Stores `value()` if this call is one of ours; the value, for an edit to hand on."""
        o = self._options
        if is_compiling():
            return self._seen_by_compiler(value)
        if not self._ours(module):
            return None
        if graph_task() != -1:
            self._missed = self._missed or "recomputed"
            return value() if o.edit else None
        new = value()
        self._last = Storer(o).keep(new)
        self._count += 1
        if self._all is not None:
            self._all.append(self._last)
        if self._stop is not None:
            self._stop.fired(self)
        return new if o.edit else None

    def _seen_by_compiler(self, value: Callable[[], Any]) -> Any:
        if torch.compiler.is_exporting():
            return value() if self._options.edit else None
        new = value()
        self._last = tmap(Storer(self._options).tensor, new)
        self._traced = True
        return new if self._options.edit else None

    def _picked(self, x: Any) -> Any:
        try:
            return pick(x, self.leaf)
        except (KeyError, IndexError, AttributeError, TypeError) as e:
            raise HookError(
                f"{self._options.who}: {self.label} has nothing at {self.leaf}; what it gave is "
                f"{describe(x)}. Select a path that is there."
            ) from e

    def _begin(self, module: nn.Module, x: Any) -> Receive | None:
        """A forward call whose gradients are wanted: where they will be put."""
        compiling = is_compiling()
        if not compiling and not self._ours(module):
            return None
        x = self._picked(x) if self.leaf else x
        if compiling or graph_task() == -1:
            self._count += 1
        grads = _Grads(self._count, len(leaves(x)))
        if self._all is not None and graph_task() == -1:
            self._all.append(grads)
        return _receiver(ref(self), grads)

    def _receive(self, grads: _Grads, i: int, grad: Tensor) -> None:
        if self.removed:
            return
        if grads.task != graph_task():
            grads.task, grads.kept = graph_task(), [None] * len(grads.kept)
        grads.kept[i] = Storer(self._options).keep(grad)
        if not isinstance(self._last, _Grads) or self._last.index <= grads.index:
            self._last = grads

    def _on_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        o = self._options
        if o.detach and not o.edit:
            grad_input = tmap(Tensor.detach, grad_input)
            grad_output = tmap(Tensor.detach, grad_output)
        func = o.hook_func
        new = grad_output if func is None else called(func, module, grad_input, grad_output)
        self._last = Storer(o).keep(new)
        self._count += 1
        if self._all is not None:
            self._all.append(self._last)
        return new if o.edit else None

    def _check_backward(self, output: Any) -> None:
        flat = isinstance(output, Tensor) or (
            isinstance(output, tuple)
            and not type(output).__module__.startswith("torch.return_types")
            and all(isinstance(t, Tensor) or not leaves(t) for t in output)
        )
        if not flat and any(t.requires_grad for t in leaves(output)):
            raise HookError(
                f"{self._options.who}: a full backward hook on {self.label} would stay silent or "
                f"be wrong, since it returns {describe(output)} and PyTorch hooks only a tensor "
                "or a flat tuple. Use hook_output(module, grad=True), which takes any structure."
            )

    # -- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        """A hook on the copy of its module, if that is copied too; else one that is removed."""
        alone, module = not memo, self._module()
        new = Hook.__new__(Hook)
        memo[id(self)] = new
        options = copy.copy(self._options)
        object.__setattr__(options, "hook_func", copy.deepcopy(options.hook_func, memo))
        live = not (self.removed or alone or module is None)
        new._adopt(copy.deepcopy(module, memo) if live else None, options, self.name, self.leaf)
        if live:
            new._take_over([copy.deepcopy(call, memo) for call in self._calls], self._keys)
        return new

    def __reduce__(self) -> Any:
        live = not self.removed
        parts = (self._options, self.name, self.leaf, self._calls, self._keys)
        return _unpickled, (self._module() if live else None, *parts)

    def _adopt(self, m: nn.Module | None, options: Options, name: str | None, leaf: str) -> None:
        self._module = ref(m) if m is not None else _gone
        self._options, self.name, self.leaf = options, name, leaf
        self._calls, self._keys = [], []
        self._clear()

    def _take_over(self, calls: list[Dispatcher], keys: list[Any]) -> None:
        """Makes the inert dispatchers that a copied module has call this hook."""
        state = GradState(self._begin)
        for call in calls:
            call.target = self if isinstance(call, (_Plain, _Forward, _Pre)) else state
        self._calls, self._keys, self.removed = calls, list(keys), False


def _gone() -> None:
    return None


def _unpickled(
    module: nn.Module | None, o: Options, name: Any, leaf: str, calls: Any, keys: Any
) -> Hook:
    hook = Hook.__new__(Hook)
    hook._adopt(module, o, name, leaf)
    if module is not None:
        hook._take_over(calls, keys)
    return hook


def _receiver(hook: ref[Hook], grads: _Grads) -> Receive:
    """Held by the autograd graph, which Python's garbage collector cannot see into: weak."""

    def receive(i: int, grad: Tensor) -> None:
        if (h := hook()) is not None:
            h._receive(grads, i, grad)

    return receive


def _is_pre(call: Dispatcher) -> bool:
    return type(call).__name__ in ("_Pre", "_Before", "_BeforeInputs")


def kind_of(who: str, is_forward: bool, pre: bool) -> Kind:
    """The kind of hook that `is_forward` and `pre` ask for."""
    if pre and not is_forward:
        raise OptionError(
            f"{who}: pre=True is for forward hooks, and is_forward=False asks for a backward one. "
            "Use hook_input(module, grad=True) for the gradients of inputs."
        )
    return "pre" if pre else "forward" if is_forward else "backward"


def left(hooks: list[Hook], stop: Stop | None, e: BaseException | None) -> bool:
    """What the end of a `with` block does: True swallows `e`, which was its own stop."""
    if isinstance(e, StopForward):
        return e.owner is stop
    if e is None:
        report(hooks, stop)
    elif isinstance(e, RuntimeError) and "BackwardHookFunction" in str(e):
        names = ", ".join(h.label for h in hooks if h._options.kind == "backward")
        if names:
            e.add_note(
                f"hookkit: the output of a layer with a full backward hook ({names}) was changed "
                "in place. Use hook_output(module, grad=True), which allows that."
            )
    return False


def report(hooks: list[Hook], stop: Stop | None) -> None:
    """Warns, by name, of the hooks that never fired."""
    silent = [
        h
        for h in hooks
        if h._last is None
        and not h._traced
        and not (h._count and h._options.kind in ("forward", "pre", "backward"))
    ]
    if silent:
        who = hooks[0]._options.who
        names = "; ".join(f"{h.label}: {h._missed or 'not called'}" for h in silent)
        warnings.warn(
            f"{who}: {len(silent)} of {len(hooks)} hooks never fired: {names}",
            NeverFiredWarning,
            stacklevel=4,
        )


class Hooks(Collection[Hook], Iterator[Hook]):
    """Many `Hook`s as one: registered all or none, entered, left and removed together.

    A Collection and an Iterator: `len`, `in`, iteration, `next`, `h[0]`, `h[1:3]`, and by name
    (`h["fc"]`) where names are known.
    """

    def __init__(
        self,
        ms: Iterable[nn.Module] | Mapping[str, nn.Module],
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
    ) -> None:
        kind = kind_of("Hooks", is_forward, pre)
        o = Options("Hooks", kind, hook_func, detach, cpu, gather, edit, keep, clone, dtype, stop)
        self._set_up(ms, o)

    @classmethod
    def of(cls, ms: Iterable[nn.Module] | Mapping[str, nn.Module], options: Options) -> Hooks:
        """Registered hooks with these `options`."""
        hooks = cls.__new__(cls)
        hooks._set_up(ms, options)
        return hooks

    def _set_up(self, ms: Any, options: Options) -> None:
        found = named_modules_of(ms, options.who)
        self._options, self._stop, self._stance = options, None, None
        self._select = ms if hasattr(ms, "aliases") else None
        self._next: Iterator[Hook] | None = None
        self.hooks: list[Hook] = []
        for _, module, _ in found:
            check_hookable(module, options.who)
        try:
            for name, module, leaf in found:
                self.hooks.append(Hook.of(module, options, name, leaf))
        except BaseException:
            self.remove()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The modules' names, or their positions as text where no names are known."""
        return tuple(str(i) if h.name is None else h.name for i, h in enumerate(self.hooks))

    @property
    def stored(self) -> L:
        """What each hook stored in its last call, in order; None where it was not called."""
        return L(h.stored for h in self.hooks)

    @property
    def removed(self) -> bool:
        """True when no hook is registered."""
        return all(h.removed for h in self.hooks)

    def register(self) -> None:
        """Puts all hooks on their modules again, or none."""
        try:
            for h in self.hooks:
                h.register()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes all hooks off their modules; what was stored stays."""
        for h in self.hooks:
            h.remove()

    def __enter__(self) -> Self:
        if self.removed:
            for h in self.hooks:
                h._clear()
            self.register()
        me = get_ident()
        self._stop = Stop(self.hooks) if self._options.stop else None
        for h in self.hooks:
            h._thread = me
            h._stop = self._stop
        self._stance = enter_eager()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        leave_eager(self._stance)
        self.remove()
        return left(self.hooks, self._stop, e)

    def __len__(self) -> int:
        return len(self.hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __next__(self) -> Hook:
        if self._next is None:
            self._next = iter(self.hooks)
        return next(self._next)

    def __contains__(self, x: object) -> bool:
        if isinstance(x, str):
            return any(h.name == x for h in self.hooks)
        return any(h is x or h.module is x for h in self.hooks)

    @overload
    def __getitem__(self, i: int | str) -> Hook: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hook]: ...
    def __getitem__(self, i: int | str | slice) -> Hook | list[Hook]:
        return self._by_name(i) if isinstance(i, str) else self.hooks[i]

    def _by_name(self, name: str) -> Hook:
        for h in self.hooks:
            if h.name == name:
                return h
        if self._select is not None:
            for h in self.hooks:
                if h.name is not None and name in self._select.aliases(h.name):
                    return h
        near = nearest(name, self.names) or list(self.names)[:3]
        raise SelectionError(
            f'{self._options.who}: no hook is called "{name}". Nearest: '
            f"{', '.join(map(repr, near)) or 'there are none'}. .names lists all {len(self)}."
        )

    def __repr__(self) -> str:
        few = "1 hook" if len(self) == 1 else f"{len(self)} hooks"
        return f"Hooks({few}{', removed' if self.hooks and self.removed else ''})"


def named_modules_of(ms: Any, who: str) -> list[tuple[str | None, nn.Module, str]]:
    """What `ms` holds, as (name, module, leaf path); names are None where there are none."""
    if isinstance(ms, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return [(name, m, "") for name, m in ms._modules.items() if m is not None]
    if isinstance(ms, Mapping):
        leaf = getattr(ms, "leaf", lambda name: "")
        return [(name, m, leaf(name)) for name, m in ms.items()]
    if isinstance(ms, (str, nn.Module)) or not isinstance(ms, Iterable):
        cure = (
            "select(model, ...)"
            if isinstance(ms, str)
            else "a list, model.children(), or select(model, ...)"
        )
        raise ArgumentError(
            f"{who}: expected several modules, found {f'the string {ms!r}' if isinstance(ms, str) else type(ms).__name__}. "
            f"Pass {cure}; for one module use {'Hook' if who == 'Hooks' else who.rstrip('s')}."
        )
    found = []
    for m in ms:
        named = isinstance(m, tuple) and len(m) == 2 and isinstance(m[0], str)
        found.append((m[0], m[1], "") if named else (None, m, ""))
    return found
