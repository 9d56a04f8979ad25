"""`HookEntry`: the one thing that hookkit registers on modules; `attach` registers it.

Hooks go on through PyTorch's public functions (`register_forward_hook`,
`register_forward_pre_hook`), so their order, `prepend` and `always_call` are PyTorch's.

    switch = Switch()                              # shared by all hooks of one recorder
    handle = attach(module, f, switch=switch)      # f(module, args, kwargs, output)
    switch.on = False                              # registered still, but f is not called
    handle.remove()                                # any number of times

A module's hooks are copied and pickled with it. What is registered is therefore a small
`HookEntry` whose copies do nothing, and what does something (a function, a `Hook`) is its
`callback`, which only the original has. A recorder is switched on and off by its `Switch`, not by
registering and removing: a compiled model then has two graphs at most.

Also here, for all of hookkit: which calls count (`counts_for`, `recomputing`, `in_jit_trace`), the
part of a value at a path (`part_at`), and whether a replacement has the structure of the original
(`check_same`). Gradients have entries too; `gradients` makes them. The file is longer than 300
lines, a third of them docstrings: it is what recorders, edits and watched loops share with `Hook`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from threading import enumerate as enumerate_threads
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit.checks import OfLast, check_module
from hookkit.errors import ArgumentError, HookError
from hookkit.interrupts import uninterrupted
from hookkit.modules import can_run
from hookkit.nested import Inputs, describe, named_leaves, paths_of, pick

is_compiling = torch.compiler.is_compiling

# Private: `torch.compiler._is_exporting_flag`, True while torch.export traces. The public
# `is_exporting()` is folded to True in any trace by torch 2.11, so edits would be left out of
# compiled graphs. Without it, the public one is used.
if hasattr(torch.compiler, "_is_exporting_flag"):

    def is_exporting() -> bool:
        """Whether torch.export is tracing."""
        return bool(torch.compiler._is_exporting_flag)

else:
    is_exporting = torch.compiler.is_exporting


# Private: `torch._C._current_autograd_node`, the node that runs (since 2.1), or None. Only used
# where the next one is missing; it also says that a backward pass runs, at 0.1 µs more a call.
def _running_node() -> int:
    return -1 if torch._C._current_autograd_node() is None else 0


# Private: `torch._C._current_graph_task_id`, the number of the backward pass that this thread is
# running, -1 outside of any (since 2.0). Without it a checkpoint that runs a forward again would be
# counted as a second call.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _running_node)


def recomputing() -> bool:
    """True while activation checkpointing runs a forward a second time, for its backward.

    Right for reentrant and non-reentrant checkpoints; also true in any forward run from inside a
    backward hook. False while compiling, where a checkpoint is traced once.

    >>> recomputing()
    False
    """
    return not is_compiling() and graph_task() != -1


# Private: `torch._C._is_tracing` is what torch.jit.is_tracing() calls, at a third of the cost, and
# `_get_tracing_state` gives None outside of a trace (since 1.0). Dynamo can trace neither.
is_tracing: Callable[[], bool] = getattr(
    torch._C, "_is_tracing", lambda: torch._C._get_tracing_state() is not None
)


def in_jit_trace() -> bool:
    """Whether torch.jit.trace records this forward: edits are part of its graph, other hooks not.

    >>> in_jit_trace()
    False
    """
    return not is_compiling() and is_tracing()


# -- which calls count ------------------------------------------------------------------------


def in_thread(thread: int | None) -> bool:
    """Whether this call is made by `thread`, or for it in a backward pass; None is every thread.

    The rule of all hooks: a `with` block, or a fit, records the calls of the thread that began it.
    """
    return thread is None or thread == get_ident() or _runs_backward_of(thread)


def _runs_backward_of(thread: int) -> bool:
    """Whether this is a thread of PyTorch's own that runs a backward pass for `thread`.

    On a GPU all backward passes are run so, and what a checkpoint recomputes is called there. The
    thread that began the pass waits in torch.autograd. Of several that wait at once, with the same
    module hooked, it is not known whose pass this is.
    """
    here = get_ident()
    if is_compiling() or graph_task() == -1 or here in _python_threads():
        return False
    frame = sys._current_frames().get(thread)
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.autograd")


def _python_threads() -> set[int | None]:
    """Those that Python has started; it lists others as dummies once they asked for their name."""
    return {t.ident for t in enumerate_threads() if not t.name.startswith("Dummy-")}


def counts_for(thread: int | None, module: nn.Module, again: bool = False) -> bool:
    """Whether a recorder that serves `thread` records this call of `module`.

    Not a recomputation (unless `again`), nor another thread's call, except for DataParallel's
    replicas, whose threads work for the one that called it. True while compiling: a graph is traced
    once for all threads, and a check would become one of its guards.
    """
    # Private: `_is_replica`, which DataParallel sets on each replica of a module (since 1.5).
    # Without it the calls of replicas would not be recorded.
    if is_compiling():
        return True
    if graph_task() != -1:
        return again
    return in_thread(thread) or "_is_replica" in module.__dict__


# -- what is on a module ----------------------------------------------------------------------


class Switch:
    """Whether the hooks that share it call their functions. All that a compiled graph guards on."""

    __slots__ = ("on",)

    def __init__(self, on: bool = True) -> None:
        self.on = on


_ALWAYS = Switch()


class HookEntry:
    """What is registered on a module: passes a call on to `callback`. Copies and pickles do not.

    PyTorch calls it as a forward hook (`module, args, kwargs, output`) or as a forward-pre hook
    (`module, args, kwargs`).

    Attributes:
        callback: called with what PyTorch passes; None makes the entry do nothing, also in a call
            that is under way.
        switch: the callback is called only while it is on.
        edit: what the callback returns replaces the output (or the inputs). Else it is ignored.
        keeps_output: whether the callback may keep the output with its autograd graph; a gradient
            hook that is added later then has to run before it, see `gradients`.
    """

    __slots__ = ("callback", "edit", "keeps_output", "switch")

    def __init__(
        self,
        callback: Callable[..., Any] | None = None,
        switch: Switch | None = None,
        edit: bool = False,
        keeps_output: bool = True,
    ) -> None:
        self.callback, self.switch = callback, switch or _ALWAYS
        self.edit, self.keeps_output = edit, keeps_output

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        """Passes the call on.

        PyTorch calls a hook that was removed during this same call once more, and without the
        keyword inputs; its callback is None by then.
        """
        callback = self.callback
        if callback is None or not self.switch.on:
            return None
        try:
            new = callback(module, *seen)
        except Exception as e:
            note(e, callback, brief(module))
            raise
        return new if self.edit else None

    @property
    def __name__(self) -> str:
        """Asked for by torch.jit.script, which compiles a module's hooks."""
        raise AttributeError(
            "torch.jit.script compiles the hooks of a model, and hookkit's cannot be compiled. "
            "Script the model outside of the block, or remove() the hooks first."
        )

    @property
    def observes(self) -> bool:
        """Whether the model computes the same without this, so that `untouched` takes it off."""
        owner = getattr(self.callback, "__self__", None)
        return not self.edit or getattr(owner, "observes", False) is True

    def __deepcopy__(self, memo: dict[int, Any]) -> HookEntry:
        return HookEntry(None, edit=self.edit, keeps_output=self.keeps_output)

    def __reduce__(self) -> Any:
        return HookEntry, (None, None, self.edit, self.keeps_output)


def _never_compiled_alone(code: CodeType) -> None:
    """Within its module's graph a hook is traced; where that has a break, hooks run eagerly.

    Else the compiler makes a graph of each of them. What those write to in their backward passes,
    as gradients' statistics, they share, and autograd ends such a training with an error.
    """
    # Private: `set_code_exec_strategy`, by which PyTorch's own wrappers are left out (2.11 has it;
    # it changes nothing for code that is traced within another's graph). Without it hooks are
    # compiled alone, as before.
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


_never_compiled_alone(HookEntry.__call__.__code__)


def entry_of(handle: RemovableHandle) -> HookEntry | None:
    """The entry that `handle` removes; None if it is removed. In a copy, the copied entry."""
    hooks = handle.hooks_dict_ref()
    return None if hooks is None else hooks.get(handle.id)


def register(
    module: nn.Module,
    entry: HookEntry,
    *,
    pre: bool = False,
    prepend: bool = False,
    always_call: bool = False,
    backward: bool = False,
) -> RemovableHandle:
    """Registers `entry`, which is on no module yet; called in an `uninterrupted` function.

    `pre`, `prepend` and `always_call` as for `attach`; `backward` makes it PyTorch's full backward
    hook.
    """
    # PyTorch puts a hook into its dict before the note that it wants keyword inputs, and another
    # thread may call the module in between: the entry does nothing until then.
    callback, entry.callback = entry.callback, None
    if backward:
        handle = module.register_full_backward_hook(entry, prepend=prepend)
    elif pre:
        handle = module.register_forward_pre_hook(entry, prepend=prepend, with_kwargs=True)
    else:
        handle = module.register_forward_hook(
            entry, prepend=prepend, with_kwargs=True, always_call=always_call
        )
    entry.callback = callback
    return handle


def unregister(handles: Iterable[RemovableHandle]) -> None:
    """Removes the entries of `handles`, as `Handle.remove`, in an `uninterrupted` function."""
    for handle in handles:
        entry = entry_of(handle)
        if entry is not None:
            entry.callback = None
        handle.remove()


class Handle:
    """Removes entries from their modules, which hold them; it holds neither.

    It exists before its entries are registered, so an interrupt cannot leave one without a handle.
    """

    __slots__ = ("_handles",)

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    @uninterrupted
    def put(self, module: nn.Module, entry: HookEntry, **where: bool) -> None:
        """Registers `entry` on `module`; `where` as for `register`."""
        self._handles.append(register(module, entry, **where))

    @uninterrupted
    def remove(self) -> None:
        """Removes all entries; none runs again, also not later in a call that is under way.

        Can be called any number of times.
        """
        unregister(self._handles)


Placed = tuple[HookEntry, dict[str, bool]]
"""An entry, and where it goes: keywords of `register`."""


def put(module: nn.Module, entries: Iterable[Placed]) -> Handle:
    """A handle of `entries`, all of them registered on `module`, or none."""
    handle = Handle()
    try:
        for entry, where in entries:
            handle.put(module, entry, **where)
    except BaseException:
        handle.remove()
        raise
    return handle


_SINGLE = ("hook_output", "hook_input", "edit_output", "edit_input", "edit_grad")


def check_hookable(module: Any, who: str) -> None:
    """Raises unless `module` is an nn.Module that runs its Python hooks: not scripted or traced."""
    if not isinstance(module, nn.Module):
        several = who in _SINGLE and isinstance(module, Mapping | list | tuple)
        check_module(who, module, f"{who}s takes several." if several else "")
    if isinstance(module, torch.jit.ScriptModule) and not can_run(module):
        raise HookError(
            f"{who}: {getattr(module, 'original_name', type(module).__name__)} is scripted or "
            "traced, and TorchScript runs no Python hooks. Hook the model it was made from."
        )


def attach(
    module: nn.Module,
    fn: Callable[..., Any],
    *,
    pre: bool = False,
    prepend: bool = False,
    always_call: bool = False,
    edit: bool = False,
    switch: Switch | None = None,
    keeps_output: bool = True,
) -> Handle:
    """Calls `fn(module, args, kwargs, output)` at each forward of `module`; a removable handle.

    The bare mechanism under `Hook`: nothing is stored, detached, counted or left out (see
    `counts_for`). The module holds `fn` strongly, the handle holds the module weakly; deepcopies
    and pickles of the module do not call `fn`. Traced by `torch.compile(fullgraph=True)` if `fn`
    is, when attached before the first call.

    Args:
        module: any module that is not scripted.
        fn: gets the positional inputs as a tuple, the keyword inputs as a dict, and the output.
        pre: calls `fn(module, args, kwargs)` before the forward instead.
        prepend: before the hooks that are there, instead of after them.
        always_call: also after a forward that raised; `output` is then None. Not for `pre`.
        edit: what `fn` returns (unless None) replaces the output; with `pre`, it is the pair
            `(args, kwargs)`. Without it the result is ignored.
        switch: `fn` is called only while it is on; one switch can serve many hooks.
        keeps_output: False promises that `fn` does not keep the output with its autograd graph,
            which makes gradient hooks on the same module cheaper.

    Raises:
        ArgumentError: `module` is no module, `fn` no function.
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
    where = {"pre": pre, "prepend": prepend, "always_call": always_call}
    return put(module, [(HookEntry(fn, switch, edit, keeps_output), where)])


# -- notes and messages -----------------------------------------------------------------------


def called(fn: Callable[..., Any], module: nn.Module, *seen: Any) -> Any:
    """`fn(module, *seen)`; an exception of the user's function gains a note with the module."""
    try:
        return fn(module, *seen)
    except Exception as e:
        note(e, fn, brief(module))
        raise


def note(e: Exception, fn: Callable[..., Any], label: str) -> None:
    """Notes on `e` which hook raised it, at which module, unless the hook is hookkit's own."""
    fn = fn.f if isinstance(fn, OfLast) else fn
    if is_compiling() or str(getattr(fn, "__module__", "")).startswith("hookkit."):
        return
    where = f"on {label}"
    if not any(n.startswith("hookkit:") and n.endswith(where) for n in getattr(e, "__notes__", ())):
        name = getattr(fn, "__qualname__", None) or type(fn).__name__
        e.add_note(f"hookkit: raised by the hook {name} {where}")


def brief(module: nn.Module) -> str:
    """A module in a few words: `Linear(in_features=5, out_features=10, bias=True)`, `Block`."""
    if isinstance(module, torch.jit.ScriptModule) or module._modules:
        return type(module).__name__
    text = repr(module).split("\n")[0]
    return text if len(text) <= 60 else type(module).__name__


# -- parts and structures ---------------------------------------------------------------------

# A layer in words, for messages. A function, since to find them costs more than the call.
Label = Callable[[], str]


def part_at(x: Any, path: str, who: str, label: Label) -> Any:
    """The part of `x` at `path`, such as `[0]`; all of it without a path. Or it raises `HookError`.

    >>> part_at({"a": (1, 2)}, "['a'][1]", "Hook", lambda: "Linear")
    2
    """
    try:
        return pick(x, path) if path else x
    except (KeyError, IndexError, AttributeError, TypeError) as e:
        raise HookError(
            f"{who}: {label()} has nothing at {path}; there is {describe(x)}. "
            f"Select a path that is there: {paths_of(x)}."
        ) from e


def check_same(who: str, label: Label, old: Any, new: Any) -> None:
    """Raises unless `new` has the containers of `old`, with tensors in the same places."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return
    paths = [path for path, _ in named_leaves(old)]
    same = type(old) is type(new) and paths == [path for path, _ in named_leaves(new)]
    if paths and not same:
        raise HookError(
            f"{who} on {label()}: the replacement is {_kind_of(new)}, the layer gave "
            f"{_kind_of(old)}. Return the same structure, or None to leave it."
        )


def _kind_of(x: Any) -> str:
    return describe(x) if isinstance(x, Tensor) else f"{type(x).__name__} {describe(x)}"


def positional(who: str, label: Label, inputs: Inputs, new: Any) -> tuple[Any, ...]:
    """The positional inputs that `new` stands for; raises unless there are as many of them."""
    values = new if isinstance(new, tuple) else (new,)
    if len(values) != len(inputs):
        raise HookError(
            f"{who} on {label()}: {len(values)} positional inputs were returned, the layer was "
            f"called with {describe(inputs)}. Return as many, or Inputs(args, kwargs) for all."
        )
    return values
