"""`trace`: one run of a model that changes nothing, recorded by module.

Builds on `untouched`, on `macs` for formulas and on `fakes`. The model itself runs, for real; a run
that gets long or large is stopped and repeated on fake tensors, which have shapes and no values.
Every operation counts for the module whose forward is running. For that each module gets a hook
before and after its call, the latter also on errors, so that the counts stay right when the model
catches an exception of one of its modules. What is recorded are names, numbers and text: no tensor
outlives the run.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import GeneratorType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Private by its path, in torch 2.11 to 2.13; FlopCounterMode derives from it. It sees every
# operation below autograd; nothing public does, so there is no fallback.
from torch.utils._python_dispatch import TorchDispatchMode

from hookkit.autograd_graph import graph_nodes
from hookkit.errors import ArgumentError
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.hooks.global_hooks import switch_fused_path
from hookkit.interrupts import Undo, interruptible
from hookkit.modelinfo.fakes import may_run_fake, run_fake
from hookkit.modelinfo.macs import macs_of, name_of
from hookkit.modelinfo.tree import Tree, dtype_name, storage_of
from hookkit.modelinfo.untouched import copied_inputs, real_inputs, set_mode, untouched
from hookkit.modules import can_run
from hookkit.nested import Inputs, describe, leaves

T = TypeVar("T")

# How far a real run goes: multiply-accumulates, about a second of a CPU core, and bytes that
# autograd saves. Beyond them the model runs on fake tensors.
MAX_MACS, MAX_SAVED_BYTES = 2 * 10**10, 2**30

# Raised by torch.func.grad, vjp, jacrev and hessian, in torch 2.11 to 2.13, as the whole error.
_NO_SAVED_HOOKS = "don't yet support saved tensor hooks"


class _Stopped(BaseException):
    """A real run went too far. No `Exception`, which a model could catch."""


# Where a Ctrl-C is raised that waits for a run on fake tensors (see `fakes`): Python calls a
# module's hooks, and no C++ function that must not throw is around them.
_interrupt_here = interruptible(lambda: None)


@dataclass
class Call:
    """What one module did: how often, what it took and gave, as text."""

    first: int
    n: int = 0
    inputs: str = ""
    outputs: list[str] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)
    in_shape: Any = None
    dtypes: list[str] = field(default_factory=list)


@dataclass
class Trace:
    """A run by module name.

    Attributes:
        run: "real", or without values: "fake" on fake tensors, "meta" for a model on meta.
        saves: `saved` is known.
        macs, saved: multiply-accumulates and bytes saved for backward, by module.
        uncounted: operations without a formula, with how often each ran.
        unused: trainable parameters that the output does not depend on.
        error: what the model raised; `failed` names the modules that were running, outermost first.
    """

    run: str
    saves: bool = True
    calls: dict[str, Call] = field(default_factory=dict)
    macs: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()
    error: Exception | None = None
    failed: tuple[str, ...] = ()


class _Saved:
    """A tensor that autograd saves for the backward pass; alive as long as autograd keeps it."""

    __slots__ = ("__weakref__", "name", "tensor")

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name


@cache
def _written(func: Any) -> tuple[int | str, ...]:
    """Positions, or names, of the arguments that an operation writes in place."""
    # `_schema` is private, in torch 2.11 to 2.13. Without it parameters that a forward writes in
    # place are not put back.
    arguments = enumerate(getattr(getattr(func, "_schema", None), "arguments", ()))
    return tuple(
        a.name if a.kwarg_only else i
        for i, a in arguments
        if a.alias_info is not None and a.alias_info.is_write
    )


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is seen while a model runs: as a mode each operation, by `attach` each module's calls.

    `write` is called with each tensor before it is written, None on fake tensors. A `bounded` run
    is stopped by an exception when it goes too far; `stopped` stays true if the model swallows it.
    """

    supports_higher_order_operators = True  # else torch raises for flex attention

    def __init__(self, tree: Tree, write: Callable[[Tensor], None] | None, bounded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tree, self.write, self.bounded = tree, write, bounded
        is_meta = any(t.is_meta for t in tree.tensors)
        self.trace = Trace("meta" if is_meta else "real" if write else "fake")
        self.names = {
            place.module: place.name
            for place in tree.firsts
            if can_run(place.module) and not isinstance(place.module, torch.jit.ScriptModule)
        }
        # Names of the modules that run, with the exception that was being handled at each call: a
        # model may call modules in an `except` block.
        self.stack: list[tuple[str, BaseException | None]] = []
        self.saved: list[weakref.ref[_Saved]] = []
        self.storages = {storage_of(t)[0] for t in tree.tensors}
        self.n_calls = self.n_macs = self.n_saved_bytes = 0
        self.stopped = False

    # Private, in torch 2.11 to 2.13: whether the compiler skips what runs inside. True, the
    # default, costs a wrapper around every operation; nothing is compiled here. If torch no longer
    # calls it, only time is lost.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # in inference mode composite operations arrive undivided
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if self.bounded and (self.n_macs > MAX_MACS or self.n_saved_bytes > MAX_SAVED_BYTES):
            self.stopped = True
            raise _Stopped
        if self.write is not None:
            for at in _written(func):
                written = args[at] if isinstance(at, int) and at < len(args) else kwargs.get(at)
                for t in leaves(written):
                    self.write(t)
        out = func(*args, **kwargs)
        macs = macs_of(func, args, kwargs, out)
        if macs is None:
            self.trace.uncounted[name_of(func)] += 1
        elif macs:
            self.trace.macs[self.here()] += macs
            self.n_macs += macs
        return out

    def here(self) -> str:
        """Name of the module that is running; the root's outside of every call."""
        return self.stack[-1][0] if self.stack else ""

    def attach(self, stack: Undo) -> None:
        """Hooks every module that can run, until `stack` closes."""
        for m in self.names:
            before = m.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
            stack.callback(before.remove)
            after = m.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            stack.callback(after.remove)

    def _before(self, m: nn.Module, args: Any, kwargs: Any) -> None:
        _interrupt_here()
        name = self.names[m]
        self.stack.append((name, sys.exception()))
        call = self.trace.calls.get(name)
        if call is None:
            call = self.trace.calls[name] = Call(self.n_calls)
            inputs = Inputs(args, kwargs)
            call.inputs = describe(inputs[0] if len(inputs) == 1 and not kwargs else inputs)
            call.in_shape = shape_of(args[0] if len(args) == 1 else args)
        self.n_calls += 1
        call.n += 1

    def _after(self, m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        name, error = self.names[m], sys.exception()
        running = tuple(at for at, _ in self.stack)
        before: BaseException | None = error
        while self.stack:  # also calls that ended by an exception the model caught
            at, before = self.stack.pop()
            if at == name:
                break
        if error is None or error is before:
            self._returned(self.trace.calls[name], out)
        elif isinstance(error, Exception) and error is not self.trace.error:
            self.trace.error, self.trace.failed = error, running

    def _returned(self, call: Call, out: Any) -> None:
        call.shapes.append(shape_of(out))
        text = describe(out)
        if text not in call.outputs:
            call.outputs.append(text)
            names = map(dtype_name, leaves(out))
            call.dtypes = [*dict.fromkeys([*call.dtypes, *names])]

    def pack(self, t: Tensor) -> _Saved:
        """Called by autograd with each tensor that it saves for the backward pass.

        A node that saves its own output would make a reference cycle through it, which nothing
        frees; so what a node has made is detached.
        """
        saved = _Saved(t.detach() if t.grad_fn is not None else t, self.here())
        self.saved.append(weakref.ref(saved))
        key, size = storage_of(t)
        if key not in self.storages:
            self.storages.add(key)
            self.n_saved_bytes += size
        return saved

    def ended(self, out: Any, own: list[Tensor]) -> None:
        """Records what can be seen only while `out` holds the graph; no error is left uncaught.

        `own` are the model's tensors, which are not saved for backward: they are there anyway.
        """
        self.trace.error, self.trace.failed = None, ()
        storages = {storage_of(t)[0] for t in own}
        for saved in (s for ref in self.saved if (s := ref()) is not None):
            key, size = storage_of(saved.tensor)
            if key not in storages:
                storages.add(key)
                self.trace.saved[saved.name] += size
        nodes = [node for node, _ in graph_nodes(out)]
        # what a checkpoint recomputes is not in the graph yet
        if nodes and not any("Checkpoint" in node.name() for node in nodes):
            reached = {id(node.variable) for node in nodes if hasattr(node, "variable")}
            reached |= set(map(id, leaves(out)))
            self.trace.unused = tuple(
                name for name, p in self.tree.params if p.requires_grad and id(p) not in reached
            )


def shape_of(x: Any) -> Any:
    """The shapes in `x` as lists of int in the tuples, lists and dicts they came in, else None."""
    if isinstance(x, Tensor):
        return None if x.is_nested else [int(n) for n in x.shape]
    if isinstance(x, dict):
        return {str(k): shape_of(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [shape_of(v) for v in x] if isinstance(x, list) else tuple(shape_of(v) for v in x)
    return None


def trace(
    tree: Tree, inputs: Inputs, read: Callable[[Trace], T], *, training: bool | None = None
) -> T:
    """Runs the model once and returns `read(trace)`, called before the model is put back.

    The model's own error is stored in the trace. The run goes on without values, on fake tensors,
    where it would take long or much memory (`MAX_MACS`, `MAX_SAVED_BYTES`) and the model can run so
    (see `may_run_fake`). A model on meta runs on meta.

    Args:
        tree: of the model.
        inputs: what its forward takes; it gets copies.
        training: the mode of the run, None the model's own.

    Raises:
        ArgumentError: the model would wait for other processes.
    """
    _refuse_waiting(tree, training)
    is_meta = any(t.is_meta for t in tree.tensors)
    if is_meta:
        inputs = copied_inputs(inputs, lambda t: t.detach().to("meta"))

    def once(mode: Any = None, bounded: bool = False) -> tuple[Trace, T]:
        found = _once(tree, inputs, read, training, mode=mode, bounded=bounded)
        if _NO_SAVED_HOOKS in str(found[0].error):
            found = _once(tree, inputs, read, training, mode=mode, bounded=bounded, saves=False)
        return found

    try:
        return once(bounded=not is_meta and may_run_fake(tree))[1]
    except _Stopped:
        pass
    fake = run_fake(tree, once)
    return fake[1] if fake is not None else once()[1]


def _refuse_waiting(tree: Tree, training: bool | None) -> None:
    """Raises if a run of this process alone would wait for the others."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    for m in (*tree.wrappers, *tree.modules):
        if type(m).__module__.startswith("torch.distributed.fsdp"):
            raise ArgumentError(
                f"the model is sharded by FSDP ({type(m).__name__}): a run would wait for the "
                "other processes. Call it before fully_shard, on the model that one process holds."
            )
        trains = m.training if training is None else training
        if distributed and trains and isinstance(m, nn.SyncBatchNorm):
            raise ArgumentError(
                "the model has a SyncBatchNorm in training mode: a run would wait for the other "
                "processes. Call it before convert_sync_batchnorm, or on model.eval()."
            )


def _once(
    tree: Tree,
    inputs: Inputs,
    read: Callable[[Trace], T],
    training: bool | None,
    *,
    mode: Any,
    bounded: bool,
    saves: bool = True,
) -> tuple[Trace, T]:
    """One run, on the fake tensors of `mode` if there is one. Raises `_Stopped` if it is bounded.

    Without `saves` it does not see saved tensors, which torch.func refuses.
    """
    with Undo() as stack:
        write = stack.enter_context(untouched(tree))
        set_mode(tree, training)
        tracer = Tracer(tree, None if mode else write, bounded)
        tracer.trace.saves = saves
        tracer.attach(stack)
        _switch_off(tracer, stack)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if mode is None:
            inputs = real_inputs(inputs)
        else:
            inputs = copied_inputs(inputs, lambda t: mode.from_tensor(t.detach()))
        try:
            _call(tracer, inputs, mode, saves)
        finally:
            # The autograd graph refers to the tracer where Python's garbage collector cannot see
            # it. With an error in the trace, whose frames hold the graph, none would be freed.
            trace, tracer.trace = tracer.trace, Trace("none")
        return trace, read(trace)


def _switch_off(tracer: Tracer, stack: Undo) -> None:
    """What would hide operations, or keep tensors of the run, is off until `stack` closes.

    That are the compiler, which would compile the tracer; PyTorch's fused path, which calls no
    layers of a TransformerEncoder; and autocast's cache of converted parameters.
    """
    if "torch.nn.attention.flex_attention" in sys.modules:
        # Private, in torch 2.11 to 2.13: what `enter_eager` needs to be loaded. Flex attention
        # loads the compiler when it is called, which is too late: it would be compiled.
        import_module("torch._dynamo.eval_frame")
    stack.callback(leave_eager, tracer)
    enter_eager(tracer)
    stack.callback(switch_fused_path, tracer, False)
    switch_fused_path(tracer, True)
    stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(False)


def _call(tracer: Tracer, inputs: Inputs, mode: Any, saves: bool) -> None:
    """Calls the model under the tracer; its error is recorded."""
    tree = tracer.tree
    with Undo() as stack:
        if mode is not None:
            stack.enter_context(mode)
        if saves:
            stack.enter_context(saved_tensors_hooks(tracer.pack, lambda packed: packed.tensor))
        stack.enter_context(tracer)
        try:
            out = tree.model(*inputs, **inputs.kwargs)
            out = list(out) if isinstance(out, GeneratorType) else out
            # autograd may have saved the fake tensors that `mode` made of the parameters
            fakes = map(mode.from_tensor, tree.tensors) if mode is not None else ()
            tracer.ended(out, [*tree.tensors, *fakes])
        except Exception as e:
            tracer.trace.error = e
    if tracer.stopped:
        raise _Stopped
