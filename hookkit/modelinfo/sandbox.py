"""What a run of a model could change, kept from changing: the model, its inputs, the process.

Builds on `tree` and `hook_copies`. A model runs as a deep copy on copies of its inputs. What has no
copy (a lock, an open file) the copy shares; a model with a module that refuses to be copied runs
itself and is restored afterwards. Of the process, the grad mode, two switches and the random states
are restored.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.hooks.global_hooks import stand_in_runs
from hookkit.interrupts import Undo, block
from hookkit.modelinfo.hook_copies import HookCopies
from hookkit.modelinfo.tree import Tree
from hookkit.nested import Inputs, leaves, tmap

_SHARE_BYTES = 2**30  # from here on a real copy shares the memory of the parameters
_MAX_SHARED = 100  # objects without a copy; each costs one more walk through the model

# --- copies


def copy_memo(tree: Tree, hooks: HookCopies) -> dict[int, Any]:
    """A memo with which `deepcopy` copies the model of `tree` without its hooks.

    Tensors that autograd made, which `deepcopy` refuses, become detached copies. It refuses lazy
    buffers too, unlike lazy parameters: each becomes a new one.
    """
    memo: dict[int, Any] = {}
    hooks.leave_off(memo)
    for b in tree.tensors:
        if isinstance(b, nn.UninitializedBuffer):
            new: Any = type(b)  # its stub gives it the arguments of a tensor
            memo[id(b)] = new(b.requires_grad, b.device, b.dtype)
    for m in tree.modules:
        for value in m.__dict__.values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return memo


def real_copy(tree: Tree, hooks: HookCopies) -> nn.Module:
    """A deep copy of the model, hooks included, whose parameters may be views: `shares_params`."""
    memo = copy_memo(tree, hooks)
    if shares_params(tree):
        memo |= {id(p): _view_of(p) for _, p in tree.params if not nn.parameter.is_lazy(p)}
    for t in tree.tensors:  # once, not in each attempt below
        copy.deepcopy(t, memo)
    made = deep_copy(tree.model, memo)
    hooks.put_on(memo)
    return made


def shares_params(tree: Tree) -> bool:
    """True if the parameters are of more than 1 GiB: a copy shares their memory.

    What the forward writes into them in place, it writes into the model's. Gradients are its own.
    """
    params = [p for _, p in tree.params if not nn.parameter.is_lazy(p)]
    return sum(p.numel() * p.element_size() for p in params) > _SHARE_BYTES


def _view_of(p: Tensor) -> Tensor:
    """A parameter with the memory of `p`; one of another class, which may hold more, is itself."""
    return nn.Parameter(p.detach(), p.requires_grad) if type(p) is nn.Parameter else p


def deep_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A `deepcopy` of `model` that shares what Python cannot copy: a lock, a file, a generator.

    `memo` is filled, as that of `deepcopy`. Raises the TypeError if a module or tensor cannot be
    copied.
    """
    for _ in range(_MAX_SHARED):
        attempt = dict(memo)  # a failed one leaves half-made copies behind
        try:
            made = copy.deepcopy(model, attempt)
        except TypeError as error:
            x = _refused(error)
            if x is None or isinstance(x, nn.Module | Tensor):
                raise
            memo[id(x)] = x
        else:
            memo.update(attempt)
            return made
    raise TypeError(f"more than {_MAX_SHARED} objects in {type(model).__name__} cannot be copied")


def _refused(error: TypeError) -> Any:
    """The object on which `deepcopy` failed: the one of its innermost call; None if unknown.

    By the name of its parameter `x`, in Python 3.11 to 3.13: the error tells only the class.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [f.f_locals.get("x") for f in frames if f.f_code is copy.deepcopy.__code__]
    return found[-1] if found else None


def real_inputs(given: Inputs) -> Inputs:
    """A deep copy of `given`, its tensors cloned and detached."""
    return copied_inputs(given, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def copied_inputs(given: Inputs, one: Callable[[Tensor], Any]) -> Inputs:
    """A deep copy of `given` with `one(t)` for each tensor `t`."""
    made = {id(t): one(t) for t in leaves(given)}
    try:
        copied: Inputs = copy.deepcopy(given, dict(made))
    except Exception:  # an open file, a generator: it is passed on as it is
        copied = tmap(lambda t: made[id(t)], given)
    return copied


@block
def restore_after(tree: Tree, *, params: bool = True) -> Iterator[None]:
    """Restores the modules of `tree` at the end: modes, attributes, hooks, tensors' content.

    Attributes are restored one level deep (a list that grew shrinks again); tensors that were
    written get their content back. Cost: one clone of every buffer and tensor in an attribute and,
    with `params`, of every parameter and its gradient.
    """
    modules = [(m, type(m), {**vars(m)}) for m in (*tree.wrappers, *tree.modules)]
    held = [v for *_, own in modules for v in own.values()]
    contents = [(v, kind(v)) for kind in (dict, list, set) for v in held if isinstance(v, kind)]
    modes = [(m, m.training) for m in tree.scripted]
    with _restore_tensors(tree, [v for v in held if isinstance(v, Tensor)], params=params):
        try:
            yield
        finally:
            for m, kind, attributes in modules:
                m.__class__ = kind
                m.__dict__.clear()
                m.__dict__.update(attributes)
            for container, inside in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(inside)
            for m, mode in modes:
                m.training = mode


@block
def _restore_tensors(tree: Tree, others: list[Tensor], *, params: bool) -> Iterator[None]:
    """Restores the tensors of `tree` and `others`: content, gradients, and that they are lazy."""
    empties = [t for t in tree.tensors if nn.parameter.is_lazy(t)]
    lazy: list[tuple[Any, type, Tensor]] = [(t, type(t), t.data) for t in empties]
    of_params = [p for _, p in tree.params if params and not nn.parameter.is_lazy(p)]
    grads = [(p, p.grad, p.requires_grad) for p in of_params if p.is_leaf]
    tensors = {
        id(t): t
        for t in (*tree.tensors, *others)
        if not nn.parameter.is_lazy(t) and (params or not isinstance(t, nn.Parameter))
    } | {id(grad): grad for _, grad, _ in grads if grad is not None}
    # an inference tensor has no version, and cannot be written outside of inference mode
    written = [t for t in tensors.values() if not t.is_inference()]
    saved = [(t, t._version, t.detach().clone()) for t in written]
    try:
        yield
    finally:
        for p, kind, empty in lazy:
            p.data, p.__class__, p.grad = empty, kind, None
        for p, grad, requires_grad in grads:
            if p.grad is not grad:
                p.grad = grad
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)
        with torch.no_grad():
            for t, version, content in saved:
                if _is_written(t, version, content):
                    t.copy_(content)


def _is_written(t: Tensor, version: int, content: Tensor) -> bool:
    """True if `t` was written in place; what was not is left alone, for graphs that saved it.

    `_version` counts such writes, but not those through `.data` and of BatchNorm's kernel, so that
    values are compared. It serves where they cannot be. Private, in torch 2.11 to 2.13; nothing
    public gives it. Without it those tensors would be copied back.
    """
    if t.layout is torch.strided and not (t.is_meta or t.is_nested):
        try:
            return not torch.equal(t, content)
        except RuntimeError:  # a dtype or subclass without `equal`
            pass
    return t._version != version


def set_mode(tree: Tree, training: bool | None) -> None:
    """Puts every module of `tree` into training or evaluation mode; None leaves all as they are."""
    if training is not None:
        for m in (*tree.wrappers, *tree.modules, *tree.scripted):
            m.training = training


# --- switches of the process

# Looked up once: a Ctrl-C inside `getLogger` can leave the lock of all logging held (Python 3.11).
# The logger is torch's own and private by its name: it reports each operation that fails on fake
# tensors, which is handled here. Under another name its records would be printed.
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@block
def preserve_global_state() -> Iterator[None]:
    """Restores the switches that a run of a copy needs, also after an error.

    The grad mode, and two that are safe with several threads inside: that of the fused transformer
    path, off inside, and the log of fake tensors.
    """
    thread = threading.get_ident()

    def is_of_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    with Undo() as stack:
        stack.enter_context(stand_in_runs())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.enter_context(torch.inference_mode(False))  # a copy made inside could not be trained
        stack.callback(_LOG.removeFilter, is_of_other)
        _LOG.addFilter(is_of_other)
        yield


@block
def without_collections() -> Iterator[None]:
    """Python's garbage collector waits for the end, if it is on.

    A run on fake tensors makes so many small objects at once that the collector looks through the
    whole process for cycles, once in each long run (0.2 s).
    """
    with Undo() as stack:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        yield


# --- random states


@block
def preserve_random_states(drew: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Restores the random states that the code inside moved, also after an error.

    PyTorch, Python and NumPy have one generator each for all threads: to restore its state repeats
    the numbers that another thread drew meanwhile, which is worse than to skip one. So PyTorch's is
    restored if `drew()` is true at the end or if the code seeded it; Python's and NumPy's, if no
    other thread is alive.
    """
    torchs = [(g, g.initial_seed(), g.get_state()) for g in _generators()]
    others = [(get, put, get()) for get, put in _of_python_and_numpy()]
    alone = threading.active_count() == 1
    try:
        yield
    finally:
        for g, seed, state in torchs:
            moved = not torch.equal(g.get_state(), state)
            if moved and (drew() or _seeded(g, seed)):
                g.set_state(state)
        if alone and threading.active_count() == 1:
            for get, put, state in others:
                if pickle.dumps(get()) != pickle.dumps(state):
                    put(state)


def random_states() -> list[bytes]:
    """The states of PyTorch's, Python's and NumPy's generators, to compare: who drew from one?"""
    torchs = [g.get_state().numpy().tobytes() for g in _generators()]
    return torchs + [pickle.dumps(get()) for get, _ in _of_python_and_numpy()]


def _generators() -> Iterator[torch.Generator]:
    """PyTorch's generators of the devices in use; one that was never used has no state to keep."""
    yield torch.default_generator
    for device in (torch.cuda, torch.xpu):
        if device.is_available() and device.is_initialized():
            yield from device.default_generators
    if torch.backends.mps.is_available():
        # Private, behind torch.mps.get_rng_state, in torch 2.11 to 2.13. The public functions read
        # and write the state but not the seed, without which a reseeding could not be seen.
        yield torch.mps._get_default_mps_generator()


def _seeded(g: torch.Generator, seed: int) -> bool:
    """True if `g` was seeded since its seed was `seed`: it has another, or is at its start."""
    fresh = torch.Generator(g.device).manual_seed(g.initial_seed())
    return g.initial_seed() != seed or torch.equal(fresh.get_state(), g.get_state())


def _of_python_and_numpy() -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield lambda: numpy.random.get_state(legacy=False), numpy.random.set_state
