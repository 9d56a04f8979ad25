"""The hooks that are on a model, for the copy of it that a summary runs.

A hook may change what a layer gives, so it is part of what the model computes. PyTorch's own
(weight norm, pruning, lazy layers) and those that the model holds are copied with it. A user's
function cannot be copied: it is shared, and where it refers to the model itself (in a closure, a
default, a global name, an attribute of its owner) a second function refers to the copy instead.
hookkit's own hooks run on the copy if they edit, and are not copied if they only observe.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from hookkit.hooks.entries import HookEntry
from hookkit.modelinfo.tree import Tree

# The dicts in which nn.Module keeps its hooks. Private, in torch 2.11 to 2.13: nothing public lists
# the hooks of a module, and deepcopy copies these dicts, with functions that still refer to the
# original model. A name that is missing is skipped; those hooks are shared with the copy.
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_CALL = (*_FORWARD, "_backward_pre_hooks", "_backward_hooks")
_STATE = (
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

_SHORT = 1000  # longer containers are not searched for parts of the model


class HookCopies:
    """The call hooks on the modules of `tree`, and how they come onto its copy."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.found: list[tuple[nn.Module, str, dict[int, Any]]] = [
            (m, name, hooks)
            for m in tree.modules
            for name in _CALL
            if (hooks := m.__dict__.get(name))
        ]
        self.owned: set[int] = set()  # ids of the modules and of what their attributes hold
        for m in tree.modules if self.found else ():
            self.owned.update((id(m), *map(id, m.__dict__.values())))
        self.reached: list[Any] = []  # what the hooks refer to, of what can hold a tensor

    def _forward(self) -> list[Any]:
        return [h for _, name, hooks in self.found if name in _FORWARD for h in hooks.values()]

    def of_user(self) -> list[Any]:
        """The forward hooks and forward-pre hooks that a user put on the model."""
        return [h for h in self._forward() if not isinstance(h, HookEntry) and not self._is_own(h)]

    def n_running(self) -> int:
        """How many hooks run with the model: the user's, and hookkit's that edit."""
        entries = [h for h in self._forward() if isinstance(h, HookEntry)]
        return len(self.of_user()) + sum(not h.observes for h in entries)

    def _is_own(self, hook: Any) -> bool:
        """True if `hook` is PyTorch's, or bound to an object that the model itself holds."""
        return id(getattr(hook, "__self__", hook)) in self.owned or _is_torchs(hook)

    def leave_off(self, memo: dict[int, Any]) -> None:
        """Makes a `deepcopy` of the model with `memo` leave all hooks behind."""
        for _, _, hooks in self.found:
            memo[id(hooks)] = type(hooks)()
        for m in self.tree.modules:
            for name in _STATE:
                if others := m.__dict__.get(name):
                    memo[id(others)] = type(others)()

    def put_on(self, memo: dict[int, Any]) -> None:
        """Puts the hooks on the copy of the model that was made with `memo`, in their order."""
        rebound = _Rebound(memo)
        self.reached = rebound.reached
        for m, name, hooks in self.found:
            made = memo.get(id(m))
            if made is None:  # a module whose __deepcopy__ returns itself
                continue
            copies = ((k, self._copied(h, memo, rebound)) for k, h in hooks.items())
            # In place: the handles that a lazy layer holds refer to these very dicts.
            made.__dict__[name].update((k, h) for k, h in copies if h is not None)
            for flags in _FLAGS:
                made.__dict__[flags].update(m.__dict__[flags])

    def _copied(self, hook: Any, memo: dict[int, Any], rebound: _Rebound) -> Any:
        """What the copy has for `hook`; None where it has nothing."""
        if isinstance(hook, HookEntry):  # one whose `Hook` the model holds was copied with it
            return memo.get(id(hook)) or (None if hook.observes else hook)
        return copy.deepcopy(hook, memo) if self._is_own(hook) else rebound.of(hook)

    def remove_observers(self) -> None:
        """Takes hookkit's hooks that only observe off the model; the caller restores them."""
        for _, _, hooks in self.found:
            for key, hook in list(hooks.items()):
                if isinstance(hook, HookEntry) and hook.observes:
                    del hooks[key]

    def containers(self) -> Iterator[Any]:
        """Lists, dicts and cells in which the user's hooks may store what they see.

        Those that `put_on` found the hooks to refer to, and the attributes of the model's modules.
        """
        if self.of_user():
            yield from (table for m in self.tree.modules for table in tables_of(m))
        yield from self.reached


def n_on_wrappers(tree: Tree) -> int:
    """How many forward hooks of the user are on the wrappers, which do not run."""
    hooks = [h for m in tree.wrappers for n in _FORWARD for h in m.__dict__[n].values()]
    return sum(not (isinstance(h, HookEntry) or _is_torchs(h)) for h in hooks)


def tables_of(m: nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts in which `m` holds tensors: attributes, parameters, buffers."""
    # Private, in torch 2.11 to 2.13: only the dicts themselves differ from other containers.
    return vars(m), m._parameters, m._buffers


def _is_torchs(hook: Any) -> bool:
    home: str = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] == "torch"


class _Rebound:
    """Functions and objects that refer to the model, made again so that they refer to its copy.

    `memo` is that of the `deepcopy`: the copy of each part of the model by the part's id. What
    several hooks share (a cell, a namespace, an owner) is made again once. What does not refer to
    the model stays the user's own object.

    Attributes:
        reached: the lists, dicts, cells and namespaces on the way.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.made: dict[int, Any] = {}
        self.reached: list[Any] = []

    def of(self, x: Any) -> Any:
        """`x`, a hook or what a hook refers to, with the copy in the model's place."""
        if id(x) in self.memo:
            return self.memo[id(x)]
        if id(x) not in self.made:
            self.made[id(x)] = x  # meanwhile: a function may refer to itself
            self.made[id(x)] = self._again(x)
        return self.made[id(x)]

    def _again(self, x: Any) -> Any:
        if isinstance(x, FunctionType):
            return self._function(x)
        if isinstance(x, MethodType):
            f, owner = self.of(x.__func__), self.of(x.__self__)
            return x if f is x.__func__ and owner is x.__self__ else MethodType(f, owner)
        if isinstance(x, partial):
            kwargs = {k: self.of(v) for k, v in x.keywords.items()}
            return partial(self.of(x.func), *map(self.of, x.args), **kwargs)
        if isinstance(x, CellType):
            self.reached.append(x)
            content = content_of(x)
            return x if (new := self.of(content)) is content else CellType(new)
        return self._container(x) if type(x) in (dict, list, tuple) else self._object(x)

    def _container(self, x: Any) -> Any:
        """`x`, or a copy of it if it is short and holds a part of the model."""
        self.reached.append(x)
        held = x.values() if type(x) is dict else x
        if len(x) > _SHORT or not any(id(v) in self.memo for v in held):
            return x
        if type(x) is dict:
            return {k: self.memo.get(id(v), v) for k, v in x.items()}
        return type(x)(self.memo.get(id(v), v) for v in x)

    def _function(self, f: FunctionType) -> FunctionType:
        cells = f.__closure__ or ()
        home = self._globals(f.__globals__, f.__code__)
        old = (f.__globals__, f.__defaults__, f.__kwdefaults__, *cells)
        new = (home, self.of(f.__defaults__), self.of(f.__kwdefaults__), *map(self.of, cells))
        if all(map(is_, new, old)):
            return f
        again = FunctionType(f.__code__, home, f.__name__, new[1], new[3:] or None)
        again.__kwdefaults__ = new[2]
        again.__dict__.update(f.__dict__)
        return again

    def _globals(self, names: dict[str, Any], code: CodeType) -> dict[str, Any]:
        """The global names for a function: other ones only if one that it reads is made again."""
        self.reached.append(names)
        read = {n: names[n] for n in _names(code) if n in names}
        new = {n: again for n, v in read.items() if (again := self.of(v)) is not v}
        if not new:
            return names
        made: dict[str, Any] = self.made.setdefault(id(names), {**names})
        made.update(new)
        return made

    def _object(self, x: Any) -> Any:
        """`x`, or a shallow copy of it if one of its attributes is a part of the model."""
        held = getattr(x, "__dict__", None)
        if type(held) is not dict or isinstance(x, type):
            return x
        self.reached.append(held)
        kinds = (dict, list, tuple)
        near = {k: v for k, v in held.items() if id(v) in self.memo or type(v) in kinds}
        new = {k: again for k, v in near.items() if (again := self.of(v)) is not v}
        if not new or isinstance(x, nn.Module) or hasattr(x, "__del__"):
            return x  # the end of a copy might close the file of the original
        try:
            again = copy.copy(x)
            again.__dict__.update(new)
        except Exception:  # it cannot be copied: it goes on with the model itself
            return x
        return again


def content_of(cell: CellType) -> Any:
    """What a closure holds in `cell`; None if that is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: CodeType) -> set[str]:
    """The global names in `code` and in the functions inside it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names}.union(*map(_names, inner))
