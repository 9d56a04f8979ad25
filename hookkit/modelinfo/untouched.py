"""`untouched`: a block in which a model runs, and which then puts it back as it was.

Builds on `tree`. One mechanism for everything that runs a user's model to look at it: `summary`,
`dummy_eval`, `model_sizes`, `compare_models`, `collect` and `lr_find`. The model itself runs, not a
copy, so that closures, caches and hooks find what they refer to.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.hooks.attach import HookEntry
from hookkit.hooks.block import Registered
from hookkit.hooks.global_hooks import global_tables, is_of_hook_all
from hookkit.modelinfo.tree import Tree, storage_of
from hookkit.nested import Inputs, leaves, tmap

# Where modules hold hooks. Private by their names, since torch 1.0 (pre-hooks of backward: 2.0): no
# public function takes a hook off that another has registered. One that is missing is skipped.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Restore = Callable[[], None]


@contextmanager
def untouched(
    model: nn.Module | Tree, *, params: bool = False, observers: bool = False
) -> Iterator[Callable[[Tensor], None]]:
    """Puts back at its end, also after an error, what running `model` inside it has changed.

    That are, of each module: its mode, class, hooks and attributes (one level deep: a list that
    grew shrinks again); parameters and buffers that were replaced, materialised (lazy ones) or
    whose `grad` or `requires_grad` was set; what was written into buffers and other tensors in
    attributes; and, of the process, the grad mode and the random states of PyTorch, Python and
    NumPy. What objects hold that are no modules, such as a cache of the user's own class, is not
    put back.

    hookkit's hooks that only observe are off inside it, so that captures, statistics and `hook_all`
    do not see the run, but for captures that the model itself holds. Edits and the user's own hooks
    are part of the model, and run.

    Args:
        model: a module, or its `Tree` if there is one already.
        params: also puts back what is written into parameters and their gradients.
        observers: leaves the hooks that observe on.

    Yields:
        A function that is called with a tensor before its memory is written: it copies the
        parameters and gradients in that memory, so that they are put back without `params`.

    Cost: a copy of each buffer and tensor in an attribute, with `params` of each parameter and
    gradient. On a GPU each copy is compared at the end (one sync each).

    >>> net = nn.BatchNorm1d(3)
    >>> with untouched(net):
    ...     _ = net.eval().requires_grad_(False)
    ...     net.running_mean += 1
    >>> net.training, net.weight.requires_grad, net.running_mean
    (True, True, tensor([0., 0., 0.]))
    """
    tree = model if isinstance(model, Tree) else Tree(model)
    modules = [*tree.wrappers, *tree.modules]
    attributes = [v for m in modules for v in vars(m).values()]
    tables = [] if observers else list(global_tables())
    contents = Contents([*tree.tensors, *(v for v in attributes if isinstance(v, Tensor))])
    large = set() if params else {id(p) for _, p in tree.params} | contents.grads
    for t in contents.tensors:
        if id(t) not in large:
            contents.copy(t)
    with ExitStack() as undo:
        for restore in (*_of_process(), contents.restore):
            undo.callback(restore)
        undo.callback(_of_modules(modules, tree.scripted, [*attributes, *tables]))
        if not observers:
            tables += [vars(m).get(name, {}) for m in modules for name in _HOOKS]
            held = [v for v in attributes if isinstance(v, Registered)]
            own = {id(h) for hook in held for h in hook._each()}
            for table in tables:
                for key in [key for key, hook in table.items() if _observes(hook, own)]:
                    del table[key]
        yield contents.copy


def set_mode(tree: Tree, training: bool | None) -> None:
    """Puts every module of `tree` into training or evaluation mode; None leaves all as they are."""
    if training is not None:
        for m in (*tree.wrappers, *tree.modules, *tree.scripted):
            m.training = training


def _observes(hook: Any, own: set[int]) -> bool:
    """Whether `hook` only observes, and is none of the captures `own` that the model itself has."""
    if not isinstance(hook, HookEntry):
        return is_of_hook_all(hook)
    owner = getattr(getattr(hook, "callback", None), "__self__", None)
    return hook.observes and own.isdisjoint((id(hook), id(owner)))


def _of_modules(modules: list[nn.Module], scripted: list[Any], values: list[Any]) -> Restore:
    """Restores classes and attributes of `modules`, and the content of containers in `values`."""
    states = [(m, type(m), {**vars(m)}) for m in modules]
    modes = [(m, m.training) for m in scripted]
    kinds = (dict, list, set)
    containers = [(v, kind(v)) for kind in kinds for v in values if isinstance(v, kind)]

    def restore() -> None:
        for m, kind, attributes in states:
            if type(m) is not kind:  # a lazy module becomes another in its first call
                m.__class__ = kind
            refill(vars(m), attributes)
        for container, content in containers:
            refill(container, content)
        for module, mode in modes:
            module.training = mode

    return restore


def refill(container: Any, content: Any) -> None:
    """Makes a dict, list, set or deque hold what `content` does, if it does not."""
    if isinstance(container, set):
        same = container == content
    else:
        same = [*map(id, container)] == [*map(id, content)]
        same &= [*map(id, _values(container))] == [*map(id, _values(content))]
    if not same:
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(content)


def _values(x: Any) -> Any:
    return x.values() if isinstance(x, dict) else ()


def _of_process() -> Iterator[Restore]:
    """Restore the grad mode and the random states, each of those that are in use."""
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    for device in (torch.cuda, torch.xpu):
        if device.is_available() and device.is_initialized():
            states.append((device.set_rng_state_all, device.get_rng_state_all()))
    if torch.backends.mps.is_available():
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    for put, state in states:
        yield lambda put=put, state=state: put(state)  # type: ignore[misc]


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
        every = [*(state[0] for state in self.states), *grads]
        self.tensors = [t for t in every if not (nn.parameter.is_lazy(t) or t.is_inference())]
        self.grads = {id(grad) for grad in grads}
        self.copies: list[tuple[Tensor, int, Tensor]] = []
        self.in_memory: dict[Any, list[Tensor]] = {}
        for t in self.tensors:
            self.in_memory.setdefault(storage_of(t)[0], []).append(t)

    def copy(self, t: Tensor) -> None:
        """Copies the model's tensors in the memory of `t`, unless that is done."""
        for own in self.in_memory.pop(storage_of(t)[0], ()):
            # `_version` counts writes in place; see `_is_written`.
            self.copies.append((own, own._version, own.detach().clone()))

    def restore(self) -> None:
        """Puts back memory, flags, gradients and, where there is a copy, content."""
        for t, kind, data, requires_grad, grad in self.states:
            if type(t) is not kind or _is_replaced(t, data):
                t.data = data
                t.__class__ = kind  # a lazy parameter becomes another in its first call
            if t.is_leaf and t.grad is not grad:
                t.grad = grad
            if t.is_leaf and t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
        for t, version, content in self.copies:
            if _is_written(t, version, content):  # sync: one for each copy on a GPU
                t.data.copy_(content)  # `.data`, for graphs that have saved `t`


def _is_replaced(t: Tensor, data: Tensor) -> bool:
    return not nn.parameter.is_lazy(t) and (
        t.shape != data.shape or storage_of(t)[0] != storage_of(data)[0]
    )


def _is_written(t: Tensor, version: int, content: Tensor) -> bool:
    """True if `t` was written in place; what was not is left alone, for graphs that saved it.

    Values are compared, since PyTorch's count of writes misses those through `.data` and of
    BatchNorm's kernel. The count serves where values cannot be compared. It is private, in torch
    2.11 to 2.13; without it those tensors would be copied back always.
    """
    if t.layout is torch.strided and not (t.is_meta or t.is_nested):
        try:
            return not torch.equal(t, content)
        except RuntimeError:  # a dtype or subclass without `equal`
            pass
    return t._version != version


def real_inputs(inputs: Inputs) -> Inputs:
    """A deep copy of `inputs`, its tensors cloned and detached."""
    return copied_inputs(inputs, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def copied_inputs(inputs: Inputs, one: Callable[[Tensor], Any]) -> Inputs:
    """A deep copy of `inputs` with `one(t)` for each tensor `t`."""
    made = {id(t): one(t) for t in leaves(inputs)}
    try:
        copied: Inputs = copy.deepcopy(inputs, dict(made))
    except Exception:  # an open file, a generator: it is passed on as it is
        copied = tmap(lambda t: made[id(t)], inputs)
    return copied
