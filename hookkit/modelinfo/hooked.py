"""The hooks that are on a model, put on the copy of it that a summary runs.

A hook may change what a layer gives, so it is part of what the model computes. PyTorch's own
(weight norm, pruning, lazy layers) and those that the model holds are copied with it. A user's
function cannot be copied: it is shared, and where it refers to the model itself (in a closure, a
default, a global name, an attribute of its owner) a twin of it refers to the copy. Hookkit's own
run if they edit and stay away if they only observe; FSDP's gather from all ranks and stay away.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hookkit.hooks.entries import HookEntry
from hookkit.modules import inner_key, submodules

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_CALL = (*FORWARD, "_backward_pre_hooks", "_backward_hooks")
_OTHER = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# Which of the hooks above take keyword inputs, or are called after an error too.
_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


_SHORT = 1000  # items of a container that are looked through for parts of the model


def from_fsdp(home: str) -> bool:
    """True for a name in FSDP's modules, whose hooks gather from all ranks: not on a copy."""
    return home.startswith("torch.distributed.fsdp")


def _home(hook: Any) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def _hooked(model: nn.Module) -> Iterator[tuple[nn.Module, str, dict[int, Any]]]:
    """Each module's dicts of call hooks that are not empty; scripted modules have none."""
    for m in model.modules():
        if not isinstance(m, torch.jit.ScriptModule):
            for name in _CALL:
                if hooks := m.__dict__.get(name):
                    yield m, name, hooks


def _owners(model: nn.Module) -> set[int]:
    """Ids of the model's modules and of what their attributes hold."""
    return {id(m) for m in model.modules()} | {
        id(value) for m in model.modules() for value in m.__dict__.values()
    }


def _is_own(hook: Any, owners: set[int]) -> bool:
    """True if `hook` is PyTorch's, or bound to an object that the model itself holds."""
    return id(getattr(hook, "__self__", hook)) in owners or _home(hook).split(".")[0] == "torch"


def users_hooks(model: nn.Module) -> list[Any]:
    """The forward hooks and forward-pre hooks on `model` that a user put there."""
    found = [h for _, name, hooks in _hooked(model) if name in FORWARD for h in hooks.values()]
    if not found:
        return []
    owners = _owners(model)
    return [h for h in found if not isinstance(h, HookEntry) and not _is_own(h, owners)]


def n_on_wrappers(model: nn.Module) -> int:
    """How many forward hooks of the user are on the wrappers around a model."""
    n = 0
    while (key := inner_key(model)) is not None:
        hooks = [h for name in FORWARD for h in model.__dict__[name].values()]
        n += sum(not (isinstance(h, HookEntry) or _is_own(h, set())) for h in hooks)
        model = submodules(model)[key]
    return n


def n_running(model: nn.Module) -> int:
    """How many hooks a summary of `model` runs: the user's, and hookkit's that edit."""
    edits = [
        h
        for _, name, hooks in _hooked(model)
        if name in FORWARD
        for h in hooks.values()
        if isinstance(h, HookEntry) and h.for_copy() is not None
    ]
    return len(users_hooks(model)) + len(edits)


def leave_off(model: nn.Module, memo: dict[int, Any]) -> None:
    """Has a `deepcopy` of `model` with `memo` leave all hooks behind; `put_on` brings them."""
    for _, _, hooks in _hooked(model):
        memo[id(hooks)] = type(hooks)()
    for m in model.modules():
        for name in _OTHER if not isinstance(m, torch.jit.ScriptModule) else ():
            if others := m.__dict__.get(name):
                memo[id(others)] = type(others)()


def put_on(model: nn.Module, memo: dict[int, Any]) -> None:
    """Puts the hooks of `model` on its copy, which was made with `memo`, in their order."""
    found = list(_hooked(model))
    twins, owners = _Twins(memo), _owners(model) if found else set()
    for m, name, hooks in found:
        made = memo.get(id(m))
        if made is None:  # a module that does not let itself be copied
            continue
        kept = ((k, _copied(h, memo, owners, twins)) for k, h in hooks.items())
        # in place: the handles that a lazy layer holds refer to these very dicts
        made.__dict__[name].update((k, h) for k, h in kept if h is not None)
        for flags in _FLAGS:
            made.__dict__[flags].update(m.__dict__[flags])


def _copied(hook: Any, memo: dict[int, Any], owners: set[int], twins: _Twins) -> Any:
    """What the copy has for `hook`; None where it has nothing."""
    if from_fsdp(_home(hook)):
        return None
    if isinstance(hook, HookEntry):  # one whose `Hook` the model holds was copied with it
        return memo.get(id(hook)) or hook.for_copy()
    return copy.deepcopy(hook, memo) if _is_own(hook, owners) else twins.of(hook)


def places_of(model: nn.Module) -> Iterator[Any]:
    """Lists, dicts and cells where the user's hooks on `model` may keep what they see.

    Those that a hook names itself, and what the model's modules hold.
    """
    todo = users_hooks(model)
    for m in model.modules() if todo else ():
        yield from (vars(m), m._parameters, m._buffers)
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, MethodType):
            todo += [x.__func__, x.__self__]
        elif isinstance(x, partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, FunctionType):
            yield from x.__closure__ or ()
            yield x.__globals__
            todo += [v for cell in x.__closure__ or () for v in gc.get_referents(cell)]
            todo += [x.__globals__.get(name) for name in _names(x.__code__)]
        elif type(x) in (list, dict):
            yield x
        elif type(held := getattr(x, "__dict__", None)) is dict and not isinstance(x, type):
            yield held
            yield from (v for v in held.values() if type(v) in (list, dict))


def silence(model: nn.Module) -> None:
    """Takes hookkit's hooks that only observe off `model` itself, which `put_back` will undo."""
    for _, _, hooks in _hooked(model):
        for key, hook in list(hooks.items()):
            if isinstance(hook, HookEntry):
                new = hook.for_copy()
                if new is None:
                    del hooks[key]
                else:
                    hooks[key] = new


class _Twins:
    """Functions and objects that refer to the model, and their twins that refer to its copy.

    A cell, a namespace and an owner that several hooks share have one twin, so that the hooks still
    meet there. What does not refer to the model is its own twin: shared with the user's hook.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.made: dict[int, Any] = {}

    def of(self, x: Any) -> Any:
        """The twin of `x`, a hook or what a hook refers to."""
        if id(x) in self.memo:
            return self.memo[id(x)]
        if id(x) not in self.made:
            self.made[id(x)] = x  # while it is looked at: a function may refer to itself
            self.made[id(x)] = self._twin(x)
        return self.made[id(x)]

    def _twin(self, x: Any) -> Any:
        if isinstance(x, FunctionType):
            return self._function(x)
        if isinstance(x, MethodType):
            f, owner = self.of(x.__func__), self.of(x.__self__)
            return x if f is x.__func__ and owner is x.__self__ else MethodType(f, owner)
        if isinstance(x, partial):
            kwargs = {k: self.of(v) for k, v in x.keywords.items()}
            return partial(self.of(x.func), *map(self.of, x.args), **kwargs)
        if type(x) in (list, tuple, dict):
            return self._container(x) if self._refers(x) else x
        return self._object(x)

    def _container(self, x: Any) -> Any:
        if type(x) is dict:
            return {k: self._part(v) for k, v in x.items()}
        return type(x)(self._part(v) for v in x)

    def _part(self, x: Any) -> Any:
        return self.memo.get(id(x), x)

    def _function(self, f: FunctionType) -> FunctionType:
        cells = tuple(self._cell(cell) for cell in f.__closure__ or ())
        defaults, keywords = self.of(f.__defaults__ or ()), self.of(f.__kwdefaults__ or {})
        names = [n for n in _names(f.__code__) if id(f.__globals__.get(n)) in self.memo]
        same = all(new is old for new, old in zip(cells, f.__closure__ or (), strict=True))
        if same and not names and defaults == (f.__defaults__ or ()) and not keywords:
            return f
        home = self._namespace(f.__globals__) if names else f.__globals__
        twin = FunctionType(f.__code__, home, f.__name__, defaults, cells or None)
        twin.__kwdefaults__ = keywords or None
        twin.__dict__.update(f.__dict__)
        return twin

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) not in self.made:
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                return cell
            new = self.of(content)
            self.made[id(cell)] = cell if new is content else CellType(new)
        made: CellType = self.made[id(cell)]
        return made

    def _namespace(self, names: dict[str, Any]) -> dict[str, Any]:
        """A copy of a module's globals in which the model is the copy."""
        if id(names) not in self.made:
            self.made[id(names)] = {k: self._part(v) for k, v in names.items()}
        made: dict[str, Any] = self.made[id(names)]
        return made

    def _object(self, x: Any) -> Any:
        """`x`, or a shallow copy if an attribute of it is the model or a part of it."""
        held = getattr(x, "__dict__", None)
        if type(held) is not dict or isinstance(x, type | nn.Module) or hasattr(x, "__del__"):
            return x  # a copy that ends might close the file of the original
        new = {k: self.of(v) for k, v in held.items() if self._refers(v)}
        if not new:
            return x
        try:
            twin = copy.copy(x)
            twin.__dict__.update(new)
        except Exception:  # it refuses to be copied: it goes on with the model itself
            return x
        return twin

    def _refers(self, x: Any) -> bool:
        """True for a part of the model, and for a short container with one in it."""
        inside = x.values() if type(x) is dict else x if type(x) in (list, tuple) else ()
        return id(x) in self.memo or (
            len(inside) <= _SHORT and any(id(v) in self.memo for v in inside)
        )


def _names(code: CodeType) -> set[str]:
    """The global names in `code` and in the functions inside it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names}.union(*map(_names, inner))
