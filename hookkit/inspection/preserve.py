"""`preserve_state` restores a model, and what its attributes refer to, after a block that runs it.

Builds on `tree`. One mechanism for everything that runs a user's model to look at it: `summary`,
`dummy_eval`, `model_sizes`, `compare_models`, `collect` and `lr_find`. The model itself runs, not a
copy, so that closures, caches and hooks find what they refer to.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import is_
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from torch import Tensor, nn

# Private by its path, in torch 2.11 to 2.13; FlopCounterMode derives from it. It sees every
# operation below autograd; nothing public does, so there is no fallback. `_disable_current_modes`
# lets a copy be made of a real tensor while the model runs on fake ones.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hookkit._core.modules import join
from hookkit._core.pytree import PLAIN, Inputs, tree_leaves, tree_map
from hookkit._core.random_state import preserve_random_state, random_states
from hookkit.hooks import Hook
from hookkit.hooks.attach import AttachedFunction
from hookkit.hooks.eager import layer_by_layer
from hookkit.inspection.tree import Tree, storage_of

# Where modules hold hooks. Private by their names, since torch 1.0 (pre-hooks of backward: 2.0): no
# public function takes a hook off that another has registered. One that is missing is skipped.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Attributes that PyTorch gives every module: `Tree` has read the modules and tensors in them.
_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = (OrderedDict, dict, list, set, deque)  # those that can be restored
# Types with a state of their own → the functions that read it and set it.
_VALUES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
    np.ndarray: (np.ndarray.copy, np.copyto),
}
# Objects that are not looked into: they hold no state, or lead to the whole program.
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, FrameType, *ProxyTypes)
_LIBRARIES = ("torch", "builtins", "abc", "typing")  # their classes hold no state of a model
_MOST_OBJECTS = 2_000  # that are compared: an attribute may lead to the whole program
_MOST_BYTES = 2**28  # of an array that is copied


@contextmanager
def preserve_state(
    model: nn.Module | Tree,
    *,
    training: bool | None = None,
    grad: bool | None = None,
    params: bool = False,
    observers: bool = False,
    watch: bool = True,
) -> Iterator[State]:
    """Restore at the end, also after an error, what running `model` inside the block has changed.

    It restores, for each module (also modules that are only held in an attribute):

    - its mode, class, hooks and attributes; in these, at any depth, what dicts, lists, sets and
      deques hold, tensors, NumPy arrays, and random generators of PyTorch, Python and NumPy; and
      the attributes of objects in them, but not of objects inside these;
    - its parameters and buffers, if they were replaced, materialised (lazy ones) or written, or
      their `grad` or `requires_grad` was set.

    The grad mode and the random states of PyTorch, Python and NumPy are restored too.

    `State.not_restored` names what is not restored: iterators in attributes, arrays of more than
    256 MiB and, if they have changed, objects inside objects, `__slots__`, attributes of the
    modules' classes, and globals of the files that define these. Closures, attributes of tensors,
    what NumPy writes into a parameter, and the insides of objects of compiled libraries are neither
    restored nor named.

    Hooks of hookkit that only observe are off inside the block, so captures and statistics do not
    see the run, and a forward that reads a capture of its own finds it empty. Edits, the user's own
    hooks and PyTorch's global hooks run.

    Args:
        model: a module, or its `Tree` if there is one already.
        training: the mode of all modules inside the block; None leaves each its own.
        grad: whether gradients are on inside the block; None leaves that as it is.
        params: copy all tensors at the start, and watch no operation. By default only buffers are
            copied at the start, other tensors before their first write, and compiled code runs
            eagerly.
        observers: leave the hooks that only observe on.
        watch: watch all operations for writes; with False the caller has to call
            `State.before_write` before each write.

    Yields:
        The `State`.

    Cost: a copy of each buffer, and about 5 µs for each operation; with `params` a copy of each
    tensor instead. On a GPU each copy is compared at the end (one sync each).

    >>> net = nn.BatchNorm1d(3)
    >>> with preserve_state(net, training=False):
    ...     _ = net.requires_grad_(False)
    ...     net.running_mean += 1
    >>> net.training, net.weight.requires_grad, net.running_mean
    (True, True, tensor([0., 0., 0.]))
    """
    tree = model if isinstance(model, Tree) else Tree(model)
    state = State(tree, params)
    with ExitStack() as undo:
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        undo.enter_context(preserve_random_state())
        undo.callback(state.restore_tensors)
        for scripted in tree.scripted:
            undo.callback(setattr, scripted, "training", scripted.training)
        undo.callback(state.restore_attributes)
        for module in () if observers else state.modules:
            for table in [vars(module).get(name, {}) for name in _HOOKS]:
                for key, hook in [*table.items()]:
                    if isinstance(hook, (Hook, AttachedFunction)) and hook.observes:
                        del table[key]
        if training is not None:
            for module in (*tree.wrappers, *tree.modules, *tree.scripted):
                module.training = training
        if grad is not None:
            torch.set_grad_enabled(grad)
        if not params:
            undo.enter_context(layer_by_layer(always=True))  # compiled code would hide writes
            if watch:
                undo.enter_context(_Writes(state.before_write))
        yield state


# --- what a run writes


@cache
def _written(func: Any) -> tuple[int | str, ...]:
    # `_schema` is private, in torch 2.11 to 2.13. Without it parameters that a forward writes in
    # place are not restored.
    arguments = enumerate(getattr(getattr(func, "_schema", None), "arguments", ()))
    return tuple(
        a.name if a.kwarg_only else i
        for i, a in arguments
        if a.alias_info is not None and a.alias_info.is_write
    )


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that operation `func`, called with these arguments, writes in place."""
    found = list[Tensor]()
    for at in _written(func):
        found += tree_leaves(args[at] if isinstance(at, int) and at < len(args) else kwargs.get(at))
    return found


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Serves as the base of modes that see every operation of a run."""

    supports_higher_order_operators = True  # else torch raises for flex attention

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    # Private, in torch 2.11 to 2.13: whether the compiler skips what runs inside. True, the
    # default, costs a wrapper around every operation; nothing is compiled here. If torch no longer
    # calls it, only time is lost.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Writes(Operations):  # type: ignore[no-untyped-call]
    """Calls `write` with each tensor before an operation writes it."""

    def __init__(self, write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.write = write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for t in written_by(func, args, kwargs):
            self.write(t)
        return func(*args, **kwargs)


# --- what a model holds


class State:
    """Holds what a run of a model can change, and restores it.

    Reading and restoring must not run the user's code: a property, or a dict that makes its values
    when they are read, could change something. So containers are read by the methods of Python's
    own classes, and objects by the dict of their attributes.

    Objects inside objects, and the globals of a file, may lead to the whole program (a logger, a
    trainer, another thread's queue), which a run must not rewind: they are only compared.

    Attributes:
        modules: the modules of the tree, and those found in attributes, with their submodules.
        generators: the random generators found in attributes, each after what reads its state.
        not_restored: names of attributes and globals that are not as they were, or may not be;
            complete at the end of the block.
    """

    def __init__(self, tree: Tree, params: bool) -> None:
        self.modules, self.not_restored = [*tree.wrappers, *tree.modules], list[str]()
        # restored: classes of modules; containers, of which most are empty; arrays and generators
        self._classes = list[tuple[nn.Module, type]]()
        self._containers = list[tuple[Any, Any, list[Any]]]()
        self._empty: dict[Any, list[Any]] = {kind: [] for kind in _CONTAINERS}
        self._values = list[tuple[Any, Callable[[Any, Any], object], Any]]()
        self.generators = list[tuple[Callable[[Any], Any], Any]]()
        # compared: what objects refer to, with the attribute they are in; names of classes, files
        self._objects = list[tuple[Any, list[Any], str]]()
        self._bindings = list[tuple[Mapping[str, Any], dict[str, Any], str]]()
        self._seen = {id(m) for m in self.modules}
        self._names = {id(place.module): place.name for place in tree.firsts}
        self._found, buffers = [*tree.tensors], [*tree.buffers]
        n_of_tree = len(self.modules)
        for i, m in enumerate(self.modules):  # `_walk` appends to it
            self._classes.append((m, type(m)))
            if i >= n_of_tree:
                self._found += m.parameters(recurse=False)
                buffers += m.buffers(recurse=False)
            self._save(vars(m))
            for key, x in vars(m).items():
                if key in _OF_TORCH:
                    self._save(x)
                elif type(x) not in PLAIN:
                    self._walk(x, join(self._names.get(id(m), ""), key))
        classes = {c for kind in {kind for _, kind in self._classes} for c in kind.__mro__}
        classes = {c for c in classes if c.__module__.partition(".")[0] not in _LIBRARIES}
        for c in classes:
            self._bind(vars(c), c.__name__)
        for name in {c.__module__ for c in classes} & sys.modules.keys():
            self._bind(vars(sys.modules[name]), name)
        every = {id(t): t for t in (*self._found, *buffers)}.values()
        self._tensors = [
            (t, type(t), t.data, t.requires_grad, t.grad if t.is_leaf else None) for t in every
        ]
        tensors = [*every, *(grad for *_, grad in self._tensors if grad is not None)]
        # lazy tensors have no memory; inference tensors cannot be written outside inference mode
        tensors = [t for t in tensors if not (nn.parameter.is_lazy(t) or t.is_inference())]
        self._copies = list[tuple[Tensor, Tensor]]()
        self._in_memory: dict[Any, list[Tensor]] = {}
        for t in tensors:
            self._in_memory.setdefault(storage_of(t)[0], []).append(t)
        for t in tensors if params else buffers:  # kernels such as BatchNorm's write buffers unseen
            self.before_write(t)

    def before_write(self, t: Tensor) -> None:
        """Copy the model's tensors that share the memory of `t`, if they are not copied yet."""
        if tensors := self._in_memory.pop(storage_of(t)[0], ()):
            with _disable_current_modes():
                self._copies += [(own, own.detach().clone()) for own in tensors]

    def random_state(self) -> list[Any]:
        """Return the random states of the process and of `generators`, to be compared by `==`."""
        states = [*random_states().values(), *(get(g) for get, g in self.generators)]
        states = [part for x in states for part in (x if isinstance(x, list) else [x])]
        return [x.tolist() if isinstance(x, Tensor) else repr(x) for x in states]

    def seed(self, seed: int) -> None:
        """Seed the process and `generators`; the end of the block restores their states."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for _, g in self.generators:
            if isinstance(g, torch.Generator):
                g.manual_seed(seed)
            elif isinstance(g, np.random.Generator):
                g.bit_generator.state = type(g.bit_generator)(seed).state
            else:
                g.seed(seed)

    def _save(self, x: Any) -> list[Any]:
        """Save the content of `x` if it is a container that can be restored; return the content."""
        kind = type(x)
        if kind not in _CONTAINERS:
            kind = next((c for c in kind.__mro__ if c in _CONTAINERS), object)
            if kind is object:
                return []
        content = _content(x, kind)
        if content:
            self._containers.append((x, kind, content))
        else:
            self._empty[kind].append(x)
        return content

    def _walk(self, x: Any, name: str) -> None:
        """Save all that attribute `name` refers to, at any depth, to restore or compare it."""
        stack = [(x, 0)]  # each with the number of objects around it
        while stack:
            x, depth = stack.pop()
            kind = type(x)
            if kind in PLAIN or id(x) in self._seen or issubclass(kind, _CLOSED):
                continue
            self._seen.add(id(x))
            if issubclass(kind, Tensor):
                self._found.append(x)
            elif issubclass(kind, nn.Module):
                new = [m for m in x.modules() if m is x or id(m) not in self._seen]
                new = [m for m in new if not isinstance(m, torch.jit.ScriptModule)]
                self.modules += new
                self._seen.update(map(id, new))
                self._names |= {id(m): name for m in new}
            elif issubclass(kind, tuple):
                stack += [(part, depth) for part in tuple.__iter__(x)]
            else:
                self._enter(x, depth, name, stack)

    def _enter(self, x: Any, depth: int, name: str, stack: list[tuple[Any, int]]) -> None:
        """Save `x`, which `depth` objects contain; push what it refers to on `stack`."""
        kind = type(x)
        # containers inside one object are restored; what is deeper is compared only
        if depth < 2 and issubclass(kind, _CONTAINERS):
            stack += [(part, depth) for part in self._save(x)]
        elif len(self._objects) < _MOST_OBJECTS:
            held = _held(x)
            self._objects.append((x, held, name))
            stack += [(part, depth + 1) for part in held]
        if depth == 0:
            stack += [(part, 1) for part in self._save(_attributes_of(x))]
        for valued, (get, put) in _VALUES.items():
            if issubclass(kind, valued):
                if valued is not np.ndarray or (x.flags.writeable and x.nbytes <= _MOST_BYTES):
                    self._values.append((x, put, get(x)))
                    self.generators += [(get, x)] * (valued is not np.ndarray)
                elif x.flags.writeable:
                    self.not_restored.append(name)
        if hasattr(kind, "__next__"):  # nothing tells how far an iterator is
            self.not_restored.append(name)

    def _bind(self, names: Mapping[str, Any], where: str) -> None:
        """Save the attributes of a class, or the globals of a file, to compare them."""
        own = {name: x for name, x in names.items() if not name.startswith("__")}
        self._bindings.append((names, own, where))
        for name, x in own.items():
            if issubclass(type(x), _CONTAINERS):
                self._objects.append((x, _held(x), join(where, name)))

    def restore_attributes(self) -> None:
        """Restore classes of modules, containers and values; name what else has changed."""
        for m, kind in self._classes:
            if type(m) is not kind:  # a lazy module becomes another in its first call
                m.__class__ = kind
        for x, kind, content in self._containers:
            if not _is_same(_content(x, kind), content):
                kind.clear(x)
                if issubclass(kind, dict):
                    n = len(content) // 2
                    for key, value in zip(content[:n], content[n:], strict=True):
                        kind.__setitem__(x, key, value)
                else:
                    (kind.update if kind is set else kind.extend)(x, content)
        for kind, containers in self._empty.items():
            for x in containers:
                if kind.__len__(x):
                    kind.clear(x)
        for x, put, value in self._values:
            put(x, value)
        changed = [name for x, held, name in self._objects if not _is_same(_held(x), held)]
        for names, before, where in self._bindings:
            now = dict(names)
            for name in before.keys() | {name for name in now if not name.startswith("__")}:
                # two defaults, so that a name that was added or deleted counts as changed
                if now.get(name, before) is not before.get(name, now):
                    changed.append(join(where, name))
        self.not_restored[:] = dict.fromkeys(self.not_restored + changed)

    def restore_tensors(self) -> None:
        """Restore memory, flags and gradients of tensors and, where there is a copy, values."""
        for t, kind, data, requires_grad, grad in self._tensors:
            if type(t) is not kind or _place(t) != _place(data):
                t.data = data
                t.__class__ = kind  # a lazy parameter becomes another in its first call
            if t.is_leaf and t.grad is not grad:
                t.grad = grad
            if t.is_leaf and t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
        for t, content in self._copies:
            if not _is_equal(t, content):  # sync: one for each copy on a GPU
                t.data.copy_(content)  # `.data`, for graphs that have saved `t`


def _content(x: Any, kind: Any) -> list[Any]:
    """Return the elements of a container in their order; for a dict its keys, then its values."""
    if issubclass(kind, dict):
        return [*kind.keys(x), *kind.values(x)]
    return [*kind.__iter__(x)]


def _is_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _held(x: Any) -> list[Any]:
    """Return what `x` refers to: its attributes, then what its slots or its C code hold.

    `gc.get_referents` lists these without running any code of the object.
    """
    own = _attributes_of(x)
    content = _content(own, dict) if own is not None else []
    known = {id(own), *map(id, content)}  # depending on the object, the collector lists these too
    return content + [part for part in gc.get_referents(x) if id(part) not in known]


def _attributes_of(x: Any) -> Any:
    """Return the dict in which Python stores the attributes of `x`; None if there is none.

    A property called `__dict__` is not read, because that would run the user's code.
    """
    places = (vars(c)["__dict__"] for c in type(x).__mro__ if "__dict__" in vars(c))
    place: Any = next(places, None)
    is_pythons = isinstance(place, GetSetDescriptorType | MemberDescriptorType)
    return place.__get__(x) if is_pythons else None


def _place(t: Tensor) -> Any:
    return None if nn.parameter.is_lazy(t) else (t.shape, storage_of(t)[0])


def _is_equal(t: Tensor, content: Tensor) -> bool:
    """Return whether `t` still has the values `content`; False if they cannot be compared.

    PyTorch's version counter misses writes through `.data` and by BatchNorm's kernel. An equal
    tensor is not written, because an expanded one refuses to be.
    """
    try:
        return torch.equal(t, content)
    except Exception:  # meta, sparse and nested tensors, dtypes and subclasses without `equal`
        return False


def clone_inputs(inputs: Inputs) -> Inputs:
    """Return a deep copy of `inputs`, its tensors cloned and detached."""
    return copy_inputs(inputs, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def copy_inputs(inputs: Inputs, one: Callable[[Tensor], Any]) -> Inputs:
    """Return a deep copy of `inputs` with `one(t)` for each tensor `t`."""
    made = {id(t): one(t) for t in tree_leaves(inputs)}
    try:
        copied: Inputs = copy.deepcopy(inputs, dict(made))
    except Exception:  # an open file, a generator: it is passed on as it is
        copied = tree_map(lambda t: made[id(t)], inputs)
    return copied
