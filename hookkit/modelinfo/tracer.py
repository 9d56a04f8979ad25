"""What is seen of a run: hooks around each call, a mode around each operation, saved tensors.

Builds on `tree` for names and on `flops` for formulas. Every operation counts for the module whose
forward is running. For that each module gets a hook before and after its call, the latter also on
errors, so that the counts stay right when the model catches an exception of one of its modules.
What is stored are names, numbers and text: no tensor outlives the run.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Private by its path, in torch 2.11 to 2.13; FlopCounterMode derives from it. It sees every
# operation below autograd; nothing public does, so there is no fallback.
from torch.utils._python_dispatch import TorchDispatchMode

from hookkit.autograd_graph import graph_nodes
from hookkit.interrupts import Undo, interruptible
from hookkit.modelinfo.fake_kernels import FakeKernels
from hookkit.modelinfo.flops import TORCHS_OWN, macs_of, name_of
from hookkit.modelinfo.progress import Progress
from hookkit.modelinfo.tree import Tree, dtype_name, storage_of
from hookkit.modules import can_run
from hookkit.nested import Inputs, describe, leaves

_MAX_SHAPES = 64  # a cell called in a loop would keep thousands

# Private, in torch 2.11 to 2.13: the number that the next autograd node will get. Without it every
# saved tensor is detached, which costs half a run on fake tensors.
_next_node_number = getattr(torch._C._autograd, "_get_sequence_nr", None)


# Private, since torch 2.0: how C++ reads the device of a fake tensor, five times in a `linear`.
# Passing it on as any other operation costs 16 µs more.
_DEVICE = torch.ops.prim.device.default


# Where a Ctrl-C is raised that waits for a run on fake tensors (see `tracing`): Python calls a
# module's hooks, and no C++ function that must not throw is around them.
_interrupt_here = interruptible(lambda: None)


@dataclass
class Call:
    """What one module did in the run: how often, what it took and gave, as text."""

    first: int
    n: int = 0
    inputs: str = ""
    outputs: list[str] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)  # of the first calls, `_MAX_SHAPES` at most
    in_shape: Any = None
    dtypes: list[str] = field(default_factory=list)


@dataclass
class Trace:
    """A run by module name.

    Attributes:
        tree: the model that ran, a copy in general; let it go when its rows are read.
        how: "fake", "real" (a copy), "shared" (a copy with the model's parameters) or "itself" (the
            model); `why` says what needed a real run.
        counted: `macs` and `uncounted` are known.
        saves: `saved` is known.
        unused: trainable parameters that the output does not depend on.
        written: parameters of the model itself that the run of a "shared" copy wrote in place.
        n_hooks: hooks that a user put on the model, or that edit it, and that ran with it.
        drew: True if random numbers were drawn from PyTorch's generators; never on fake tensors.
        error: what the model raised; `failed` names the modules that were running, outermost first.
    """

    tree: Tree
    how: str = "fake"
    why: str = ""
    counted: bool = True
    saves: bool = True
    calls: dict[str, Call] = field(default_factory=dict)
    macs: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    n_hooks: int = 0
    drew: bool = False
    error: BaseException | None = None
    failed: tuple[str, ...] = ()


class _Saved:
    """A tensor that autograd saves for the backward pass; alive as long as autograd keeps it."""

    __slots__ = ("__weakref__", "name", "tensor")

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is seen while a model runs: as a mode each operation, by `attach` each module's calls.

    `kernels` run the operations on fake tensors; None is a real run. With `macs` they are counted.
    """

    supports_higher_order_operators = True  # else torch raises for flex attention

    def __init__(self, tree: Tree, kernels: FakeKernels | None, *, macs: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(tree, "fake" if kernels else "real", counted=macs)
        self.kernels = kernels
        self.names = {
            place.module: place.name
            for place in tree.firsts
            if can_run(place.module) and not isinstance(place.module, torch.jit.ScriptModule)
        }
        # Names of the modules that run, with the exception that was being handled at each call: a
        # model may call modules in an `except` block.
        self.stack: list[tuple[str, BaseException | None]] = []
        self.saved: list[weakref.ref[_Saved]] = []
        self.clock = 0
        self.progress = Progress(len(self.names))

    # Private, in torch 2.11 to 2.13: whether the compiler skips what runs inside. True, the
    # default, costs a wrapper around every operation; nothing is compiled here. If torch no longer
    # calls it, only time is lost.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # in inference mode composite operations arrive undivided
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if self.kernels is None:
            draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
            self.trace.drew |= draws or name_of(func).partition("::")[0] not in TORCHS_OWN
            out = func(*args, **kwargs)
            macs = macs_of(func, args, kwargs, out) if self.trace.counted else 0
        else:
            out, macs = self.kernels.run(func, args, kwargs)
        if macs is None:
            self.trace.uncounted[name_of(func)] += 1
        elif macs:
            self.trace.macs[self.here()] += macs
        return out

    def here(self) -> str:
        """Name of the module that is running; the root's outside of every call."""
        return self.stack[-1][0] if self.stack else ""

    def attach(self, stack: Undo) -> None:
        """Hooks every module that can run, until `stack` closes."""
        stack.callback(self.progress.close)
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
            call = self.trace.calls[name] = Call(self.clock)
            given = Inputs(args, kwargs)
            call.inputs = describe(given[0] if len(given) == 1 and not kwargs else given)
            call.in_shape = shape_of(args[0] if len(args) == 1 else args)
        self.clock += 1
        self.progress.called(len(self.trace.calls))
        call.n += 1

    def _after(self, m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        name = self.names[m]
        error, running = sys.exception(), tuple(at for at, _ in self.stack)
        before: BaseException | None = error
        while self.stack:  # also calls that ended by an exception the model caught
            at, before = self.stack.pop()
            if at == name:
                break
        failed = error is not None and error is not before
        if not failed:
            self._returned(self.trace.calls[name], out)
        elif error is not self.trace.error:
            self.trace.error, self.trace.failed = error, running

    def _returned(self, call: Call, out: Any) -> None:
        text = describe(out)
        if text not in call.outputs:
            call.outputs.append(text)
            for t in leaves(out):
                if (kind := dtype_name(t)) not in call.dtypes:
                    call.dtypes.append(kind)
        if len(call.shapes) < _MAX_SHAPES:
            call.shapes.append(shape_of(out))

    def pack(self, t: Tensor) -> _Saved:
        """Called by autograd with each tensor that it saves for the backward pass.

        A node that saves its own output makes a reference cycle through it, which nothing frees; so
        what may be such an output is detached.
        """
        saved = _Saved(t.detach() if _is_newest(t) else t, self.here())
        self.saved.append(weakref.ref(saved))
        return saved

    def ended(self, out: Any) -> None:
        """Notes what can be seen only while `out` holds the graph; no error is left uncaught."""
        self.trace.error, self.trace.failed = None, ()
        self._count_saved()
        reached = _reached(out)
        if reached is not None:
            free = ((name, p) for name, p in self.trace.tree.params if p.requires_grad)
            self.trace.unused = tuple(name for name, p in free if id(p) not in reached)

    def _count_saved(self) -> None:
        """Counts the distinct storages that autograd still holds; no parameters, no buffers."""
        seen = {storage_of(t)[0] for t in self.trace.tree.tensors}
        for ref in self.saved:
            if (saved := ref()) is None:
                continue  # its graph was dropped within the forward
            key, size = storage_of(saved.tensor)
            if key not in seen:
                seen.add(key)
                self.trace.saved[saved.name] += size


def _is_newest(t: Tensor) -> bool:
    """True if `t` is an output of the newest autograd node."""
    node: Any = t.grad_fn
    if node is None:
        return False
    # `_sequence_nr` is private as the counter above is, and belongs to it.
    return _next_node_number is None or node._sequence_nr() + 1 == _next_node_number()


def _reached(out: Any) -> set[int] | None:
    """Ids of the tensors that a gradient of `out` reaches; None if that cannot be known."""
    reached = {id(t) for t in leaves(out)}
    has_graph = False
    for node, _ in graph_nodes(out):
        has_graph = True
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        elif "Checkpoint" in node.name():
            return None  # what it recomputes is not in the graph yet
    return reached if has_graph else None


def shape_of(x: Any) -> Any:
    """The shapes in `x` as lists of int in the tuples, lists and dicts they came in, else None."""
    if isinstance(x, Tensor):
        return None if x.is_nested else [int(n) for n in x.shape]
    if isinstance(x, Mapping):
        return {str(k): shape_of(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [shape_of(v) for v in x] if isinstance(x, list) else tuple(shape_of(v) for v in x)
    return None
