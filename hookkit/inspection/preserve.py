"""`preserve_state`: a block in which a model runs, and which then puts it back as it was.

Builds on `tree`. One mechanism for everything that runs a user's model to look at it: `summary`,
`dummy_eval`, `model_sizes`, `compare_models`, `collect` and `lr_find`. The model itself runs, not a
copy, so that closures, caches and hooks find what they refer to.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Private by its path, in torch 2.11 to 2.13; FlopCounterMode derives from it. It sees every
# operation below autograd; nothing public does, so there is no fallback. `_disable_current_modes`
# lets a copy be made of a real tensor while the model runs on fake ones.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hookkit._core.pytree import PLAIN, Inputs, tree_leaves, tree_map
from hookkit._core.random_state import random_state
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

Restore = Callable[[], object]


@contextmanager
def preserve_state(
    model: nn.Module | Tree, *, params: bool = False, observers: bool = False, watch: bool = True
) -> Iterator[Callable[[Tensor], None]]:
    """Restore at the end, also after an error, what running `model` inside the block has changed.

    Restored are, for each module, also for one that is only held in an attribute:

    - its mode, class, hooks and attributes; what the dicts, lists, sets and deques in them hold,
      at any depth; the attributes of objects in them, but not of objects inside these; and the
      state of a `torch.Generator`;
    - its parameters and buffers, if they were replaced, materialised (lazy ones) or written, or
      their `grad` or `requires_grad` was set; and other tensors in attributes.

    The grad mode and the random states of PyTorch, Python and NumPy are restored too. Attributes of
    classes and of tensors, globals, closures, `__slots__` and what NumPy writes or draws are not.

    hookkit's hooks that only observe are off inside it, so that captures and statistics do not see
    the run; so a forward that reads a capture of its own finds it empty. Edits, the user's own
    hooks and PyTorch's global hooks run.

    Args:
        model: a module, or its `Tree` if there is one already.
        params: copies everything now, which costs nothing for each operation. By default only
            buffers are, and other tensors before their first write; compiled code runs eagerly.
        observers: leaves the hooks that observe on.
        watch: whether writes are seen here; if not, the caller reports them.

    Yields:
        A function that is called with a tensor before its memory is written.

    Cost: a copy of each buffer, and about 5 µs for each operation; with `params` a copy of each
    tensor instead. On a GPU each copy is compared at the end (one sync each).

    >>> net = nn.BatchNorm1d(3)
    >>> with preserve_state(net):
    ...     _ = net.eval().requires_grad_(False)
    ...     net.running_mean += 1
    >>> net.training, net.weight.requires_grad, net.running_mean
    (True, True, tensor([0., 0., 0.]))
    """
    tree = model if isinstance(model, Tree) else Tree(model)
    attributes = Attributes([*tree.wrappers, *tree.modules])
    modules = attributes.modules
    buffers = [t for m in modules for t in m.buffers(recurse=False)]
    inside = [t for m in attributes.hidden for t in m.parameters(recurse=False)]
    contents = Contents([*tree.tensors, *buffers, *inside, *attributes.tensors])
    # kernels such as BatchNorm's write buffers unseen
    for t in contents.tensors if params else buffers:
        contents.copy(t)
    with ExitStack() as undo:
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        for restore in (random_state(), *attributes.generators, contents.restore):
            undo.callback(restore)
        for m in tree.scripted:
            undo.callback(setattr, m, "training", m.training)
        undo.callback(attributes.restore)
        for module in () if observers else modules:
            for table in [vars(module).get(name, {}) for name in _HOOKS]:
                for key, hook in [*table.items()]:
                    if isinstance(hook, (Hook, AttachedFunction)) and hook.observes:
                        del table[key]
        if not params:
            undo.enter_context(layer_by_layer(always=True))  # compiled code would hide writes
            if watch:
                undo.enter_context(_Writes(contents.copy))
        yield contents.copy


def set_mode(tree: Tree, training: bool | None) -> None:
    """Put every module of `tree` into training or evaluation mode; None leaves all as they are."""
    if training is not None:
        for m in (*tree.wrappers, *tree.modules, *tree.scripted):
            m.training = training


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
    """Base of what sees every operation of a run."""

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


# --- attributes


class Attributes:
    """What modules hold in their attributes, so that it can be restored.

    Nothing of the user's runs: a dict that makes its values when they are read, an object that
    loads itself on access or a property would change, or do, something. So containers are read by
    the methods of Python's own classes, and objects by the dict of their attributes.

    Attributes:
        modules: those given, and `hidden`: others that are found in attributes, and all in them.
        tensors: those in attributes.
        generators: functions that restore the random states found.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules, self.hidden = [*modules], list[nn.Module]()
        self.tensors, self.generators = list[Tensor](), list[Restore]()
        self._kinds, self._contents = list[tuple[nn.Module, type]](), list[Any]()
        self._seen = {id(m) for m in modules}
        for m in self.modules:  # grows
            self._kinds.append((m, type(m)))
            own = vars(m)
            self._note(own)
            for name, x in own.items():
                (self._note if name in _OF_TORCH else self._walk)(x)

    def _note(self, x: Any) -> list[Any]:
        """Remember what `x` holds, if it is a container that can be restored, and return that."""
        kind = next((c for c in type(x).__mro__ if c in _CONTAINERS), None)
        if kind is None:
            return []
        content = _content(x, kind)
        self._contents.append((x, kind, content))
        return content[1::2] if issubclass(kind, dict) else content

    def _walk(self, x: Any) -> None:
        """Note everything in `x`: containers at any depth, and objects, but none inside these."""
        stack = [(x, True)]
        while stack:
            x, enter = stack.pop()
            kind = type(x)
            if kind in PLAIN or id(x) in self._seen or issubclass(kind, type | ModuleType):
                continue
            if issubclass(kind, Tensor):
                self.tensors.append(x)
            elif issubclass(kind, nn.Module):
                new = [m for m in x.modules() if id(m) not in self._seen]
                new = [m for m in new if not isinstance(m, torch.jit.ScriptModule)]
                self.hidden += new
                self.modules += new
                self._seen.update(map(id, new))
            elif issubclass(kind, torch.Generator):
                self.generators.append(partial(x.set_state, x.get_state()))
            elif enter or issubclass(kind, (tuple, *_CONTAINERS)):
                self._seen.add(id(x))
                parts = tuple.__iter__(x) if issubclass(kind, tuple) else self._note(x)
                stack += [(part, enter) for part in parts]
                own = _attributes_of(x) if enter else None
                stack += [(part, False) for part in self._note(own)]

    def restore(self) -> None:
        """Put the classes of modules back, and what each container held."""
        for m, kind in self._kinds:
            if type(m) is not kind:  # a lazy module becomes another in its first call
                m.__class__ = kind
        for x, kind, content in self._contents:
            if [*map(id, _content(x, kind))] == [*map(id, content)]:
                continue
            kind.clear(x)
            if issubclass(kind, dict):
                for key, value in zip(content[::2], content[1::2], strict=True):
                    kind.__setitem__(x, key, value)
            else:
                (kind.update if kind is set else kind.extend)(x, content)


def _content(x: Any, kind: Any) -> list[Any]:
    """List the elements of a container as they are stored: of a dict, key, value, key, value …"""
    if issubclass(kind, dict):
        return [part for pair in kind.items(x) for part in pair]
    return [*kind.__iter__(x)]


def _attributes_of(x: Any) -> Any:
    """Return the dict in which Python stores the attributes of `x`; None if there is none.

    A class may have a property of that name, which is not read.
    """
    places = (vars(c)["__dict__"] for c in type(x).__mro__ if "__dict__" in vars(c))
    place: Any = next(places, None)
    is_pythons = isinstance(place, GetSetDescriptorType | MemberDescriptorType)
    return place.__get__(x) if is_pythons else None


class Contents:
    """Tensors of a model: which memory each has, and copies of what is in it.

    Attributes:
        tensors: the different ones, without lazy ones and those of inference mode, which nothing
            outside of it can write; with the gradients of the parameters.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.states = [
            (t, type(t), t.data, t.requires_grad, t.grad if t.is_leaf else None)
            for t in {id(t): t for t in tensors}.values()
        ]
        grads = [grad for *_, grad in self.states if grad is not None]
        every = [*(t for t, *_ in self.states), *grads]
        self.tensors = [t for t in every if not (nn.parameter.is_lazy(t) or t.is_inference())]
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.in_memory: dict[Any, list[Tensor]] = {}
        for t in self.tensors:
            self.in_memory.setdefault(storage_of(t)[0], []).append(t)

    def copy(self, t: Tensor) -> None:
        """Copy the model's tensors in the memory of `t`, unless that is done."""
        tensors = self.in_memory.pop(storage_of(t)[0], ())
        with _disable_current_modes() if tensors else nullcontext():
            self.copies += [(own, own.detach().clone()) for own in tensors]

    def restore(self) -> None:
        """Put back memory, flags, gradients and, where there is a copy, content."""
        for t, kind, data, requires_grad, grad in self.states:
            if type(t) is not kind or _place(t) != _place(data):
                t.data = data
                t.__class__ = kind  # a lazy parameter becomes another in its first call
            if t.is_leaf and t.grad is not grad:
                t.grad = grad
            if t.is_leaf and t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
        for t, content in self.copies:
            if not _is_equal(t, content):  # sync: one for each copy on a GPU
                t.data.copy_(content)  # `.data`, for graphs that have saved `t`


def _place(t: Tensor) -> Any:
    return None if nn.parameter.is_lazy(t) else (t.shape, storage_of(t)[0])


def _is_equal(t: Tensor, content: Tensor) -> bool:
    """Compare values: PyTorch's count of writes misses those of `.data` and of BatchNorm's kernel.

    False where they cannot be compared. An expanded tensor is not written if it is equal.
    """
    try:
        return torch.equal(t, content)
    except Exception:  # meta, sparse and nested tensors, dtypes and subclasses without `equal`
        return False


def real_inputs(inputs: Inputs) -> Inputs:
    """A deep copy of `inputs`, its tensors cloned and detached."""
    return copied_inputs(inputs, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def copied_inputs(inputs: Inputs, one: Callable[[Tensor], Any]) -> Inputs:
    """A deep copy of `inputs` with `one(t)` for each tensor `t`."""
    made = {id(t): one(t) for t in tree_leaves(inputs)}
    try:
        copied: Inputs = copy.deepcopy(inputs, dict(made))
    except Exception:  # an open file, a generator: it is passed on as it is
        copied = tree_map(lambda t: made[id(t)], inputs)
    return copied
