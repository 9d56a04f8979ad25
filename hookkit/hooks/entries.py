"""The callable that a module holds for us, and the low-level way to put one there.

A module's hook dicts travel with it: into deepcopies, pickles, other processes. What stands in
them is therefore a small `Dispatcher` whose copies and pickles do nothing, and the thing that
does something (a function, a `Hook`) is its `target`, which only the original has.

Entries go into the hook dicts directly: `register_forward_hook` builds weak references to them
for each call (2.0 µs with the removal, against 0.2 µs), and a capture block has one per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, Self, cast
from weakref import ref

import torch
from torch import nn

from hookkit.checks import check_module
from hookkit.errors import ArgumentError, HookError
from hookkit.interrupts import uninterrupted
from hookkit.modules import can_run

is_compiling = torch.compiler.is_compiling

if hasattr(torch.compiler, "_is_exporting_flag"):

    def is_exporting() -> bool:
        """Whether torch.export is tracing; torch 2.11 folds its own answer to True in any trace."""
        return bool(torch.compiler._is_exporting_flag)

else:
    is_exporting = torch.compiler.is_exporting

_Scripted = torch.jit.ScriptModule

# PyTorch's own handles count up from 0, so these never meet.
new_key = count(-1, -1).__next__


# Private, probed once: the fallback also holds in both kinds of checkpoint, at 0.1 µs more.
def _running_node() -> int:
    return -1 if torch._C._current_autograd_node() is None else 0


# A number for the backward pass that this thread is running now; -1 outside of any.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _running_node)


def recomputing() -> bool:
    """True while activation checkpointing runs a forward a second time, for its backward.

    Right for reentrant and non-reentrant checkpoints; also true in any forward run from inside a
    backward hook. False while compiling, where a checkpoint is traced once.

    >>> recomputing()
    False
    """
    return not is_compiling() and graph_task() != -1


# Private, probed once: `_is_tracing` is what torch.jit.is_tracing() calls, at a third of the cost;
# `_set_tracing_state` ends and resumes a trace. Where it is gone hooks are traced with the model,
# and torch's check of the trace may fail.
_set_tracing_state: Callable[[Any], None] | None = getattr(torch._C, "_set_tracing_state", None)
is_tracing: Callable[[], bool] = getattr(
    torch._C, "_is_tracing", lambda: torch._C._get_tracing_state() is not None
)
if _set_tracing_state is None:
    is_tracing = bool


@contextmanager
def untraced() -> Iterator[None]:
    """What runs inside is no part of the graph that `torch.jit.trace` records.

    Else a hook's own operations go into the graph, or rename its values, and torch's check of the
    trace fails.
    """
    if is_compiling() or not is_tracing() or _set_tracing_state is None:
        yield
        return
    state = torch._C._get_tracing_state()
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


def in_thread(thread: int | None) -> bool:
    """Whether `thread` makes this call; None stands for every thread.

    The rule of all hooks: who enters a block (or begins a fit) records the calls of his own thread.
    """
    return thread is None or thread == get_ident()


def counts_for(thread: int | None, module: nn.Module) -> bool:
    """Whether a recorder that serves `thread` records this call of `module`.

    Not a recomputation, nor another thread's call, except for DataParallel's replicas, whose
    threads work for the one that called it. True while compiling: a graph is traced once for all
    threads, and a check would become one of its guards.
    """
    if is_compiling():
        return True
    return graph_task() == -1 and (in_thread(thread) or "_is_replica" in module.__dict__)


class Dispatcher:
    """One entry of a module's hook dict. Calls its target; copies and pickles have none."""

    __slots__ = ("__weakref__", "key", "target")

    is_pre = False
    with_kwargs = True
    # Whether it may keep the output in its graph, and give it to a loss: see `gradients.First`.
    keeps_live: Any = True

    def __init__(self, target: Any = None, key: Any = None) -> None:
        self.target, self.key = target, key

    def put_on(self, module: nn.Module) -> None:
        """Makes this one of the module's hooks, after those that are there."""
        key = self.key = new_key()
        me = cast("Callable[..., Any]", self)
        if self.is_pre:  # the flag first: another thread may be calling the module's hooks
            module._forward_pre_hooks_with_kwargs[key] = True
            module._forward_pre_hooks[key] = me
        else:
            if self.with_kwargs:
                module._forward_hooks_with_kwargs[key] = True
            module._forward_hooks[key] = me

    def take_off(self, module: nn.Module | None) -> None:
        """Takes it out again, if nobody else has, and makes it inert for a call under way.

        PyTorch calls a hook that was removed during the same call once more, without the keyword
        inputs, since it looks up at each hook whether they are wanted. So every `__call__` has
        defaults for its last arguments, and looks at its target first.
        """
        self.target = None
        if module is None:
            return
        if self.is_pre:
            module._forward_pre_hooks.pop(self.key, None)
            module._forward_pre_hooks_with_kwargs.pop(self.key, None)
        else:
            module._forward_hooks.pop(self.key, None)
            if self.with_kwargs:
                module._forward_hooks_with_kwargs.pop(self.key, None)

    def stand_in(self) -> Dispatcher | None:
        """What a copy of the module has in its place that is run to see what the model does.

        None where this only observes. An edit is part of what the model computes: it has one that
        edits alike, and that counts and stores nothing here.
        """
        return None

    @property
    def __name__(self) -> str:
        # torch.jit.script alone asks a hook for its name; this error is what it shows
        raise AttributeError(
            "hookkit: torch.jit.script compiles a module's hooks with it, and cannot compile those "
            "of hookkit. Script the model before they are put on, or after they were removed."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        return type(self)(None, self.key)

    def __reduce__(self) -> Any:
        return type(self), (None, self.key)


_SINGLE = ("hook_output", "hook_input", "edit_output", "edit_input", "edit_grad")


def check_hookable(module: Any, who: str) -> None:
    """Raises unless `module` is an nn.Module that runs its Python hooks.

    Raises:
        ArgumentError: it is no module.
        HookError: it is scripted, or inside a traced module, and PyTorch would not call the hook.
    """
    if not isinstance(module, nn.Module):
        several = who in _SINGLE and isinstance(module, Mapping | list | tuple)
        check_module(who, module, f"{who}s takes several." if several else "")
    if isinstance(module, _Scripted) and not can_run(module):
        raise HookError(
            f"{who}: {getattr(module, 'original_name', type(module).__name__)} is scripted or "
            "traced, and TorchScript runs no Python hooks. Hook the model it was made from."
        )


class Attached:
    """A removable handle: which dispatchers are on which module. Holds the module weakly.

    `put_on` puts them there: the handle exists before its hooks, so no interrupt can part them.
    """

    __slots__ = ("_module", "calls")

    def __init__(self, module: nn.Module, *calls: Dispatcher) -> None:
        self._module, self.calls = ref(module), calls

    def put_on(self) -> Self:
        """Puts all of them on the module, or none; the handle itself."""
        module = self._module()
        assert module is not None
        try:
            for call in self.calls:
                call.put_on(module)
        except BaseException:
            self._take_off()
            raise
        return self

    @uninterrupted
    def remove(self) -> None:
        """Takes the hook off; it does not run again, also not later in a call that is under way.

        Can be called any number of times.
        """
        self._take_off()

    def _take_off(self) -> None:
        module = self._module()
        for call in self.calls:
            call.take_off(module)


@uninterrupted
def put_first(hooks: dict[int, Any], key: int) -> None:
    """Makes `key` the first of a module's hooks.

    The dict is filled anew: after `move_to_end`, as PyTorch's own `prepend=True` has it, torch 2.11
    compiles with the hooks in the order in which they were added.
    """
    items = [(key, hooks.pop(key)), *hooks.items()]
    hooks.clear()
    hooks.update(items)


class _Observe(Dispatcher):
    """A forward hook whose result is ignored."""

    __slots__ = ()

    def __call__(
        self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None
    ) -> None:
        fn = self.target
        if fn is not None:
            try:
                fn(module, args, kwargs, output)
            except Exception as e:
                _note(e, fn, module)
                raise


class _Edit(Dispatcher):
    """A forward or forward-pre hook whose result, unless None, replaces what it saw."""

    __slots__ = ()

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        return None if self.target is None else called(self.target, module, *seen)

    def stand_in(self) -> Dispatcher | None:
        f: Any = self.target
        edit: Any = getattr(f, "__self__", None)
        if hasattr(edit, "uncounted"):
            f = getattr(edit.uncounted(), f.__name__)
        return None if f is None else type(self)(f, self.key)


class _PreObserve(Dispatcher):
    """A forward-pre hook whose result is ignored."""

    __slots__ = ()

    is_pre = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self.target is not None:
            called(self.target, module, args, kwargs)


class _PreEdit(_Edit):
    __slots__ = ()

    is_pre = True


def called(fn: Callable[..., Any], module: nn.Module, *seen: Any) -> Any:
    """`fn(module, *seen)`; an exception of the user's function gains a note with the module."""
    try:
        return fn(module, *seen)
    except Exception as e:
        _note(e, fn, module)
        raise


def _note(e: Exception, fn: Callable[..., Any], module: nn.Module) -> None:
    if is_compiling():
        return
    where = f"on {brief(module)}"
    if not any(n.startswith("hookkit:") and n.endswith(where) for n in getattr(e, "__notes__", ())):
        e.add_note(f"hookkit: raised by the hook {_named(fn)} {where}")


def brief(module: nn.Module) -> str:
    """A module in a few words: `Linear(in_features=5, out_features=10, bias=True)`, `Block`."""
    if isinstance(module, _Scripted) or module._modules:
        return type(module).__name__
    text = repr(module).split("\n")[0]
    return text if len(text) <= 60 else type(module).__name__


def _named(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def attach(
    module: nn.Module,
    fn: Callable[..., Any],
    *,
    pre: bool = False,
    prepend: bool = False,
    edit: bool = False,
) -> Attached:
    """Calls `fn(module, args, kwargs, output)` at each forward of `module`; a removable handle.

    The bare mechanism under `Hook`: nothing is stored, detached, counted or kept from recomputed
    calls (see `recomputing`). The module holds `fn` strongly, the handle holds the module weakly;
    deepcopies and pickles of the module do not call `fn`. Traced by `torch.compile(fullgraph=
    True)` if `fn` is, when attached before the first call.

    Args:
        module: any module that is not scripted.
        fn: gets the positional inputs as a tuple, the keyword inputs as a dict, and the output.
        pre: calls `fn(module, args, kwargs)` before the forward instead.
        prepend: before the hooks that are there, instead of after them.
        edit: what `fn` returns (unless None) replaces the output; with `pre`, it is the pair
            `(args, kwargs)`. Without it the result is ignored.

    Raises:
        ArgumentError: `module` is no module.
        HookError: `module` is scripted.

    >>> seen = []
    >>> layer = nn.Linear(2, 3)
    >>> handle = attach(layer, lambda m, args, kwargs, out: seen.append(tuple(out.shape)))
    >>> _ = layer(torch.ones(4, 2)); handle.remove(); _ = layer(torch.ones(5, 2)); seen
    [(4, 3)]
    """
    check_hookable(module, "attach")
    if not callable(fn):
        raise ArgumentError(
            f"attach: fn must be a function, found {type(fn).__name__}. "
            "Pass f(module, args, kwargs, output), or use hook_output(module) to store the output."
        )
    kinds = (_PreEdit if edit else _PreObserve) if pre else (_Edit if edit else _Observe)
    handle = Attached(module, kinds(fn)).put_on()
    if prepend:
        try:
            hooks = module._forward_pre_hooks if pre else module._forward_hooks
            put_first(hooks, handle.calls[0].key)
        except BaseException:
            handle._take_off()
            raise
    return handle
