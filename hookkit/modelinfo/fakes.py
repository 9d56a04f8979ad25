"""`run_fake`: a run of a model on fake tensors, of which none stays behind.

PyTorch's fake tensors have a shape, a dtype and a device, and no values: a forward on them costs no
memory and computes nothing. The model itself runs: PyTorch makes a fake tensor of each parameter
that an operation meets, and writes nothing into real ones. `untouched` puts its modules back.

A forward may also store a tensor where no module holds it: in a global list, an object of a class
of its own, a cached function. A fake tensor that stayed there would come back in every later call.
So everything that the model's code can reach (`Outside`) is noted before the run, and put back if a
fake tensor is still alive after it.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from hookkit.errors import ModelRunError
from hookkit.hooks.attach import HookEntry
from hookkit.hooks.global_hooks import global_tables, is_of_hook_all
from hookkit.modelinfo.tree import Tree
from hookkit.modelinfo.untouched import refill

T = TypeVar("T")

# Looked up once: a Ctrl-C inside `getLogger` can leave the lock of all logging held (Python 3.11).
# The logger is torch's own and private by its name: it reports each operation that fails on fake
# tensors, which is handled here. Under another name its records would be printed.
_LOG = logging.getLogger("torch._subclasses.fake_tensor")

_MAX_OBJECTS = 200_000  # a model whose code reaches more runs for real
_LIBRARIES = {"torch", "numpy", "hookkit", *sys.stdlib_module_names}
_VALUES = (Tensor, ModuleType, str, bytes, int, float)
_CACHED = type(lru_cache(len))


def may_run_fake(tree: Tree) -> bool:
    """Whether the model's own code is all that runs: no forward hook or patched forward of a user.

    Those are there for values: a hook that records or compares would get tensors without any.
    """
    modules = (*tree.wrappers, *tree.modules)
    tables = [vars(m)[name] for m in modules for name in ("_forward_pre_hooks", "_forward_hooks")]
    hooks = [hook for table in (*tables, *global_tables()) for hook in table.values()]
    return all(map(_is_harmless, hooks)) and not any("forward" in vars(m) for m in modules)


def _is_harmless(hook: Any) -> bool:
    """Whether `hook` is one of PyTorch's own, or is off in the run, as it only observes."""
    if isinstance(hook, HookEntry):
        return hook.observes
    home: str = getattr(hook, "__module__", None) or type(hook).__module__
    return is_of_hook_all(hook) or home.split(".")[0] == "torch"


@contextmanager
def _later_ctrl_c() -> Iterator[None]:
    """A Ctrl-C inside it is handled at its end, and what handles it then is the user's own.

    On fake tensors torch 2.13 calls Python from C++ functions that must not throw (it looks up
    `find_torch_dispatch_rule`): a Ctrl-C in there aborts the process. Nothing is computed, so the
    wait is short.
    """
    came = list[Any]()
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    try:
        signal.signal(signal.SIGINT, lambda *why: came.append(why))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])


@_later_ctrl_c()
def run_fake(tree: Tree, run: Callable[[Any], tuple[Any, T]]) -> tuple[Any, T] | None:
    """`run(mode)` with a new mode of fake tensors; None if the model needs values.

    `run` returns a trace, which says whether the model raised, and what was read of it.

    Raises:
        ModelRunError: the forward has stored a fake tensor where it was not found.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to load

    outside = Outside(tree)
    if outside.too_much:
        return None
    thread, mode = threading.get_ident(), FakeTensorMode(allow_non_fake_inputs=True)

    def is_of_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    try:
        _LOG.addFilter(is_of_other)
        result: tuple[Any, T] | None = run(mode)
        if result is not None and result[0].error is not None:
            result = None  # its traceback holds fake tensors
    finally:
        _LOG.removeFilter(is_of_other)
        if _any_left(mode):
            outside.put_back()
            if left := _any_left(mode):
                raise ModelRunError(_LEFT.format(type(tree.model).__name__, left))
    return result


_LEFT = (
    "{0} ran on fake tensors, which have no values, and its forward has stored {1} of them where "
    "they cannot be found. Do not use this model any further: start again, and give summary a "
    "smaller input, with which it runs for real."
)


def _any_left(mode: Any) -> int:
    """How many fake tensors of `mode` are alive."""

    def count() -> int:
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        return sum(getattr(x, "fake_mode", None) is mode for x in tensors)

    if count():  # some may wait in a reference cycle
        gc.collect()
        return count()
    return 0


class Outside:
    """What the code of a model can reach beside its modules, as it is now.

    The search begins with the classes and attributes of all modules. It follows containers,
    attributes of objects, methods, and of each function the closure, the defaults and the global
    names in its code; it does not enter PyTorch, NumPy and the standard library.

    Attributes:
        too_much: more than 200,000 objects were reached, and the search was given up.
    """

    def __init__(self, tree: Tree) -> None:
        self.states: list[tuple[Callable[..., Any], Any]] = []
        own = [*tree.wrappers, *tree.modules, *tree.tensors]
        found = {id(x): x for x in own}  # holds what it has found, so that ids stay unique
        stack = [x for m in own if isinstance(m, nn.Module) for x in (type(m), *vars(m).values())]
        while stack and len(found) < _MAX_OBJECTS:
            x = stack.pop()
            if id(x) not in found and not isinstance(x, _VALUES):
                found[id(x)] = x
                stack += self._note(x)
        self.too_much = bool(stack)

    def put_back(self) -> None:
        """Restores each container that was found, and empties each cached function."""
        for put, content in self.states:
            put(content)

    def _note(self, x: Any) -> Iterable[Any]:
        """Notes the content of `x`, if it has any that can change; gives what it refers to."""
        if isinstance(x, FunctionType):
            return () if _is_library(x) else self._of_function(x)
        if isinstance(x, MethodType | BuiltinMethodType):
            return getattr(x, "__func__", None), x.__self__
        if isinstance(x, _CACHED):
            self.states.append((lambda clear: clear(), x.cache_clear))
            return (x.__wrapped__,)
        if isinstance(x, CellType):
            return self._of_cell(x)
        if isinstance(x, type):
            return self._of_class(x)
        if isinstance(x, (dict, list, set, deque)):
            kind = next(kind for kind in (dict, list, set, deque) if isinstance(x, kind))
            self.states.append((partial(refill, x), kind(x)))
        if isinstance(x, (dict, list, set, deque, tuple, partial)):
            return gc.get_referents(x)
        own = getattr(x, "__dict__", None)
        return (own, type(x)) if type(own) is dict else ()

    def _of_function(self, f: FunctionType) -> list[Any]:
        """Its own global names, and those that it reads in Python modules of the user."""
        names = _names(f.__code__)
        homes, used = [f.__globals__], [f.__closure__, f.__defaults__, f.__kwdefaults__, vars(f)]
        for home in homes:
            content = {name: home[name] for name in names if name in home}
            self.states.append((partial(_set_names, home, names), content))
            modules = [v for v in content.values() if isinstance(v, ModuleType)]
            if home is f.__globals__:
                homes += [vars(m) for m in modules if not _is_library(m)]
            used += content.values()
        return used

    def _of_cell(self, cell: CellType) -> tuple[Any, ...]:
        try:
            content = cell.cell_contents
        except ValueError:  # it is not bound yet
            return ()
        self.states.append((partial(setattr, cell, "cell_contents"), content))
        return (content,)

    def _of_class(self, kind: type) -> list[Any]:
        kinds = [c for c in kind.__mro__ if not _is_library(c)]
        self.states += [(partial(_set_attributes, c), dict(vars(c))) for c in kinds]
        values = [v for c in kinds for v in vars(c).values()]
        return [getattr(v, "fget", None) or getattr(v, "__func__", v) for v in values]


def _names(code: CodeType) -> set[str]:
    """The global names and names of attributes in `code` and in the functions inside it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_library(x: Any) -> bool:
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None)
    return str(name).partition(".")[0] in _LIBRARIES


def _set_names(home: dict[str, Any], names: set[str], content: dict[str, Any]) -> None:
    for name in names.difference(content):
        home.pop(name, None)
    home.update(content)


def _set_attributes(kind: type, content: dict[str, Any]) -> None:
    for name in [name for name in vars(kind) if name not in content]:
        delattr(kind, name)
    for name, value in content.items():
        if vars(kind)[name] is not value:
            setattr(kind, name, value)
