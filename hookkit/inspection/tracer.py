"""`Tracer`: records a run by hooks around each call, a mode around each operation, saved tensors.

Builds on `tree` for names and on `macs` for formulas. Every operation counts for the module whose
forward is running. For that each module gets a hook before and after its call, the latter also on
errors, so that the counts stay right when the model catches an exception of one of its modules.
What is recorded are names, numbers and text: no tensor outlives the run.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

# Not documented, in torch 1.3 to 2.13; torch.compile uses it. While a reference to a storage is
# alive, no other storage gets the same identity. Without it saved bytes are too few.
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from hookkit._core.graph import graph_nodes
from hookkit._core.modules import can_run
from hookkit._core.pytree import Inputs, describe, tree_leaves
from hookkit.hooks.attach import remove_all
from hookkit.inspection.macs import formula_of, name_of
from hookkit.inspection.preserve import Operations, written_by
from hookkit.inspection.tree import Tree, dtype_name, storage_of


class Stopped(BaseException):
    """Stops a real run that went too far. No `Exception`, which a model could catch."""


@dataclass
class Call:
    """Records the `n` calls of one module as text; `first` is the place of the first in the run."""

    first: int
    n: int = 0
    inputs: str = ""
    outputs: list[str] = field(default_factory=list)
    shape: Any = None
    in_shape: Any = None
    dtypes: list[str] = field(default_factory=list)


@dataclass
class Trace:
    """Records a run by module name.

    Attributes:
        run: "real", or without values: "fake" on fake tensors, "meta" for a model on meta.
        macs, saved: multiply-accumulates and bytes saved for backward, by module.
        uncounted: operations without a formula, with how often each ran.
        unused: trainable parameters that the output does not depend on.
        differentiates: whether the forward asked for a saved tensor that was not kept.
        error: what the model raised; `failed` names the modules that were running, outermost first.
        not_restored: see `State`; complete when the model has been restored.
    """

    run: str
    calls: dict[str, Call] = field(default_factory=dict)
    macs: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()
    differentiates: bool = False
    error: Exception | None = None
    failed: tuple[str, ...] = ()
    not_restored: list[str] = field(default_factory=list)


class Saved:
    """Stands for a tensor that autograd saves for the backward pass, as long as autograd keeps it.

    Attributes:
        name: the name of the module that was running.
        storage: identity and bytes of the tensor's memory.
        hold: the tensor itself, or a weak reference that keeps the identity from being used again.
    """

    __slots__ = ("__weakref__", "hold", "name", "storage")

    def __init__(self, name: str, storage: tuple[Any, int], hold: Any) -> None:
        self.name, self.storage, self.hold = name, storage, hold


class Tracer(Operations):  # type: ignore[no-untyped-call]
    """Records a run: each operation as a mode, each module's calls by the hooks of `attach`.

    Args:
        write: is called with each tensor before it is written.
        run: see `Trace`.
        keeps: keep the tensors that autograd saves. Otherwise they are only counted and their
            memory is freed at once, and a forward that differentiates raises.
        most_macs: raise `Stopped` beyond this number; `stopped` stays true even if the model
            catches it.
    """

    def __init__(
        self,
        tree: Tree,
        write: Callable[[Tensor], None],
        run: str,
        keeps: bool,
        most_macs: float = inf,
    ) -> None:
        super().__init__()
        self.tree, self.write, self.keeps, self.most_macs = tree, write, keeps, most_macs
        self.trace = Trace(run)
        self.names = {
            place.module: place.name
            for place in tree.firsts
            if can_run(place.module) and not isinstance(place.module, torch.jit.ScriptModule)
        }
        # Names of the modules that run, each with the exception that was being handled when its
        # call began: a model may call modules in an `except` block.
        self.stack: list[tuple[str, BaseException | None]] = []
        self.saved: list[weakref.ref[Saved]] = []
        self.n_calls = self.n_macs = 0
        self.stopped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # in inference mode composite operations arrive undivided
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if self.n_macs > self.most_macs:
            self.stopped = True
            raise Stopped
        for t in written_by(func, args, kwargs):
            self.write(t)
        out, formula = func(*args, **kwargs), formula_of(func)
        if formula is None:
            return out
        is_dense = all(x.layout is torch.strided for x in args if isinstance(x, Tensor))
        macs = formula(*args, **{**kwargs, "out": out}) if is_dense else None
        if macs is None:
            self.trace.uncounted[name_of(func)] += 1
        elif macs:
            self.trace.macs[self.here()] += macs
            self.n_macs += macs
        return out

    def here(self) -> str:
        """Return the name of the module that is running; the root's outside of every call."""
        return self.stack[-1][0] if self.stack else ""

    def attach(self, stack: ExitStack) -> None:
        """Hook every module that can run, until `stack` closes."""
        handles = list[RemovableHandle]()
        stack.callback(remove_all, handles)
        for m in self.names:
            handles += (
                m.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                m.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            )

    def _before(self, m: nn.Module, args: Any, kwargs: Any) -> None:
        name = self.names[m]
        self.stack.append((name, sys.exception()))
        call = self.trace.calls.get(name)
        if call is None:
            one = args[0] if len(args) == 1 else args
            inputs = describe(Inputs(args, kwargs) if kwargs or one is args else one)
            self.trace.calls[name] = call = Call(self.n_calls, 0, inputs, in_shape=shape_of(one))
        self.n_calls += 1
        call.n += 1

    def _after(self, m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        name, error, running = self.names[m], sys.exception(), self.stack[:]
        before: BaseException | None = error
        while self.stack:  # also inner calls, which raised an exception that the model caught
            at, before = self.stack.pop()
            if at == name:
                break
        if error is None or error is before:  # no new exception, so the call returned
            self._returned(self.trace.calls[name], out)
        elif isinstance(error, Exception) and error is not self.trace.error:
            self.trace.error, self.trace.failed = error, tuple(at for at, _ in running)

    def _returned(self, call: Call, out: Any) -> None:
        text = describe(out)
        if not call.outputs:
            call.shape = shape_of(out)
        if text not in call.outputs:
            call.outputs.append(text)
            names = map(dtype_name, tree_leaves(out))
            call.dtypes = [*dict.fromkeys([*call.dtypes, *names])]

    def pack(self, t: Tensor) -> Saved:
        """Return a `Saved` in place of `t`, which autograd saves for the backward pass."""
        key, hold = _identity(t)
        hold = _kept(t) if self.keeps else hold
        saved = Saved(self.here(), (key, storage_of(t)[1]), hold)
        self.saved.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Return the tensor that autograd asks for, if it was kept."""
        if not self.keeps:
            self.trace.differentiates = True
            raise RuntimeError("hookkit.summary: the forward differentiates; it is run once more")
        kept: Tensor = saved.hold
        return kept

    def ended(self, out: Any, own: list[Tensor]) -> None:
        """Record saved bytes and unused parameters while `out` holds the graph; clear the error.

        An error that is recorded by now was caught by the model. Memory of the model's tensors,
        `own`, does not count as saved, because it is there anyway.
        """
        self.trace.error, self.trace.failed = None, ()
        storages = {_identity(t)[0] for t in own}
        for saved in (s for ref in self.saved if (s := ref()) is not None):
            key, size = saved.storage
            if key not in storages:
                storages.add(key)
                self.trace.saved[saved.name] += size
        nodes = [node for node, _ in graph_nodes(out)]
        # the graph of a checkpoint's inside does not exist before the backward
        if nodes and not any("Checkpoint" in node.name() for node in nodes):
            reached = {id(node.variable) for node in nodes if hasattr(node, "variable")}
            reached |= set(map(id, tree_leaves(out)))
            self.trace.unused = tuple(
                name for name, p in self.tree.params if p.requires_grad and id(p) not in reached
            )


def _identity(t: Tensor) -> tuple[int, Any]:
    """Return the identity of the memory of `t`, and an object that keeps it from being reused.

    The object is a weak reference to the storage, or the tensor if it does not have one storage.
    """
    try:
        ref = StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, nested, uninitialised
        kept = _kept(t)
        return id(kept), kept
    return ref.cdata, ref


def _kept(t: Tensor) -> Tensor:
    """Return `t` for a graph node to hold: detached if a node made it.

    A node that holds its own output is a reference cycle, which nothing frees.
    """
    return t.detach() if t.grad_fn is not None else t


def shape_of(x: Any) -> Any:
    """Return the shapes in `x` as lists of int in the tuples, lists and dicts they came in."""
    if isinstance(x, Tensor):
        return None if x.is_nested else [*x.shape]
    if isinstance(x, dict):
        return {str(k): shape_of(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [shape_of(v) for v in x] if isinstance(x, list) else tuple(shape_of(v) for v in x)
    return None
