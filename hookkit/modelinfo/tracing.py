"""One run of a model, seen by module: calls in order, shapes, multiply-accumulates, bytes kept.

`trace(model, args, kwargs)` runs a copy on fake tensors, so that nothing is computed or changed. A
model whose control flow reads values cannot run so; then a real copy runs on copies of the inputs
and, if it cannot be copied, the model itself with everything put back (see `isolating`).

Every operation is booked to the module whose forward is running. For that the copy gets a hook
before and after each call, the latter also on errors, so that an exception which the model catches
itself does not confuse the books.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.interrupts import Undo, uninterrupted
from hookkit.modelinfo import fake_kernels, hooked, purge_fake, random_draws, sandbox
from hookkit.modelinfo.flops import is_foreign, macs_of, name_of
from hookkit.modelinfo.saved_tensors import Saved, made_last, storage_of, unused
from hookkit.modules import can_run, unwrap, walk
from hookkit.nested import Inputs, describe, leaves

_MAX_SHAPES = 64  # a cell called in a loop would keep thousands


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
    """A run by module name. `model` is the copy that ran; drop it when its rows are read."""

    model: nn.Module
    how: str = "fake"
    why: str = ""
    calls: dict[str, Call] = field(default_factory=dict)
    macs: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()  # trainable parameters that the output does not depend on
    n_hooks: int = 0  # of the user, which ran with the model
    made: list[weakref.ref[Tensor]] = field(default_factory=list)  # by a run on fake tensors
    drew: bool = False  # random numbers, from PyTorch's generators; never on fake tensors
    error: BaseException | None = None
    failed: tuple[str, ...] = ()


def shape_of(x: Any) -> Any:
    """The shapes in `x` as lists of int in the tuples, lists and dicts they came in, else None."""
    if isinstance(x, Tensor):
        return None if x.is_nested else [int(n) for n in x.shape]
    if isinstance(x, Mapping):
        return {str(k): shape_of(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [shape_of(v) for v in x] if isinstance(x, list) else tuple(shape_of(v) for v in x)
    return None


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books the multiply-accumulates of each dispatched operation to the running module."""

    supports_higher_order_operators = True

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self.free: set[Any] = set()  # operations known to cost nothing

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True costs a wrapper around every operation; nothing is compiled in here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.free:
            return self._watched(func(*args, **kwargs))
        if torch.is_inference_mode_enabled() and hasattr(
            func, "decompose"
        ):  # composite operations arrive whole here
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        fake = self.tracer.trace.how == "fake"
        if fake:
            fake_kernels.check(func, args, self.tracer.real)
        else:
            self.tracer.trace.drew |= _may_draw(func)
        out = fake_kernels.call(func, args, kwargs) if fake else func(*args, **kwargs)
        self.tracer.book(func, args, kwargs, out, self.free)
        return self._watched(out)

    def _watched(self, out: Any) -> Any:
        if self.tracer.trace.how == "fake":
            found = out if isinstance(out, tuple | list) else (out,)
            self.tracer.trace.made += [weakref.ref(t) for t in found if isinstance(t, Tensor)]
        return out


def _may_draw(func: Any) -> bool:
    """True for an operation that draws random numbers, or is not PyTorch's and might."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or is_foreign(func)


class Tracer:
    """Hooks on every module of `model`, and what they see while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace(model)
        self.real: Mapping[int, Tensor] = {}  # inputs by the id of their fakes
        self.names = {
            m: name
            for name, m, first in walk(model)
            if first and can_run(m) and not isinstance(m, torch.jit.ScriptModule)
        }
        # Names of the modules that run, with the exception that was being handled at each call: a
        # model may call modules in an `except` block.
        self.stack: list[tuple[str, BaseException | None]] = []
        self.saved: list[tuple[str, weakref.ref[Saved]]] = []
        self.clock = 0

    def here(self) -> str:
        """Name of the module that is running; the root's outside of every call."""
        return self.stack[-1][0] if self.stack else ""

    def attach(self, stack: ExitStack) -> None:
        """Hooks every module that can run, until `stack` closes."""
        for m in self.names:
            before = m.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
            stack.callback(before.remove)
            after = m.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            stack.callback(after.remove)

    def _before(self, m: nn.Module, args: Any, kwargs: Any) -> None:
        name = self.names[m]
        self.stack.append((name, sys.exception()))
        self.called(name, args, kwargs)

    def called(self, name: str, args: Any, kwargs: Any) -> Call:
        """Writes down that `name` is called with these inputs."""
        call = self.trace.calls.get(name)
        if call is None:
            call = self.trace.calls[name] = Call(self.clock)
            given = Inputs(args, kwargs)
            call.inputs = describe(given[0] if len(given) == 1 and not kwargs else given)
            call.in_shape = shape_of(args[0] if len(args) == 1 else args)
        self.clock += 1
        call.n += 1
        return call

    def _after(self, m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        name = self.names[m]
        error, running = sys.exception(), tuple(at for at, _ in self.stack)
        before: BaseException | None = error
        while self.stack:  # also calls that ended by an exception the model caught
            at, before = self.stack.pop()
            if at == name:
                break
        failed = error is not None and error is not before
        if failed and error is not self.trace.error:
            self.trace.error, self.trace.failed = error, running
        if not failed:
            self.seen(self.trace.calls[name], out)

    def seen(self, call: Call, out: Any) -> None:
        """Writes down what a call gave."""
        text = describe(out)
        if text not in call.outputs:
            call.outputs.append(text)
            for t in leaves(out):
                if (kind := str(t.dtype).removeprefix("torch.")) not in call.dtypes:
                    call.dtypes.append(kind)
        if len(call.shapes) < _MAX_SHAPES:
            call.shapes.append(shape_of(out))

    def book(self, func: Any, args: Any, kwargs: Any, out: Any, free: set[Any]) -> None:
        """Adds one operation to the running module's account."""
        macs = macs_of(func, args, kwargs, out)
        if macs is None:
            self.trace.uncounted[name_of(func)] += 1
        elif macs:
            self.trace.macs[self.here()] += macs
        elif not fake_kernels.looks_at(name_of(func)):
            free.add(func)

    def pack(self, t: Tensor) -> Saved:
        """Called by autograd with each tensor that it keeps for the backward pass."""
        saved = Saved(t.detach() if made_last(t) else t)
        self.saved.append((self.here(), weakref.ref(saved)))
        return saved

    def settle(self) -> None:
        """Counts the distinct storages that autograd still keeps; no parameters, no buffers."""
        model = self.trace.model
        seen = {
            storage_of(t)[0]
            for m in model.modules()
            for t in (*m.parameters(False), *m.buffers(False))
        }
        for name, ref in self.saved:
            if (saved := ref()) is None:
                continue  # its graph was dropped within the forward
            key, size = storage_of(saved.tensor)
            if key not in seen:
                seen.add(key)
                self.trace.saved[name] += size


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool | None = None
) -> Trace:
    """Runs a stand-in of `model` once and tells what each module did; the model's error is kept.

    `trace.error` holds the error if the model raised one, `trace.failed` the names of the modules
    that were running then, outermost first. `training=False` runs the copy in evaluation mode.
    """
    model = unwrap(model)
    with sandbox.undisturbed():
        with random_draws.kept(lambda: False):  # nothing is drawn; a forward may seed
            done = _fake(model, args, kwargs, training)
        sharded = done is not None and any(map(sandbox.is_sharded, model.modules()))
        if done is None or (done.error is not None and not sharded):  # a real run needs all ranks
            why = _reason(done, model, Inputs(args, kwargs))
            done = _real_kept(model, args, kwargs, training)
            done.why = why or done.why
    done.n_hooks = hooked.n_running(model)
    return done


def _reason(done: Trace | None, model: nn.Module, given: Inputs) -> str:
    if done is None:
        return "sparse tensors" if sandbox.has_sparse(model, given) else ""
    error = done.error
    where = f" in {done.failed[-1] or 'the model itself'}" if done.failed else ""
    return f"{type(error).__name__}{where}"


# On fake tensors torch 2.13 calls Python from C++ functions that must not throw (it looks up
# `find_torch_dispatch_rule`): a Ctrl-C in there aborts the process. Nothing is computed here, so
# the wait is short; a second Ctrl-C is raised at once.
@uninterrupted
def _fake(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None
) -> Trace | None:
    mode = sandbox.new_fake_mode()
    if mode is None or sandbox.has_sparse(model, Inputs(args, kwargs)):
        return None
    try:
        home = next((t.device for t in leaves((args, kwargs)) if not t.is_meta), None)
        stand_in = sandbox.fake_copy(model, mode, home)
        given = sandbox.fake_inputs(Inputs(args, kwargs), mode)
        _set_mode(stand_in, training)
    except Exception:  # whatever refuses to be copied without values is run for real
        return None
    held = purge_fake.remember(model)
    pairs = zip(leaves(given), leaves(Inputs(args, kwargs)), strict=True)
    done = _run(stand_in, given, "fake", mode, {id(fake): t for fake, t in pairs})
    done.made += [weakref.ref(t) for t in leaves(given)]
    del given, pairs
    if done.error is not None:
        done.error = done.error.with_traceback(None)  # its frames hold what the run made
    purge_fake.expel(done.made, stand_in, held)
    return done


def _real_kept(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None
) -> Trace:
    done: Trace | None = None
    with random_draws.kept(lambda: done is None or done.drew):
        done = _real(model, args, kwargs, training)
    return done


def _real(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None
) -> Trace:
    try:
        stand_in = sandbox.real_copy(model)
        _set_mode(stand_in, training)
    except Exception:  # it holds a lock, a file, a process group: run it in place
        with sandbox.put_back(model):
            hooked.silence(model)
            _set_mode(model, training)
            return _run(model, sandbox.real_inputs(Inputs(args, kwargs)), "real", None)
    return _run(stand_in, sandbox.real_inputs(Inputs(args, kwargs)), "real", None)


def _set_mode(model: nn.Module, training: bool | None) -> None:
    for m in model.modules() if training is not None else ():
        m.training = bool(training)


def _run(
    model: nn.Module, given: Inputs, how: str, mode: Any, real: Mapping[int, Tensor] | None = None
) -> Trace:
    before = _census(model)
    done = _once(model, given, how, mode, real or {})
    if done.error is None and _census(model) != before:
        # layers made on the first call, with random weights, are seen on the second
        again = _once(model, given, how, mode, real or {})
        again.drew |= done.drew
        return again
    return done


def _census(model: nn.Module) -> list[tuple[str, str]]:
    return [(name, type(m).__name__) for name, m, _ in walk(model)]


def _enter_eager(owner: object) -> None:
    """Compiled parts run as they are written: the compiler would compile these books with them.

    Flex attention loads the compiler when it is called, which would be too late.
    """
    if "torch.nn.attention.flex_attention" in sys.modules:
        import_module("torch._dynamo.eval_frame")
    enter_eager(owner)


def _once(
    model: nn.Module, given: Inputs, how: str, mode: Any, real: Mapping[int, Tensor]
) -> Trace:
    tracer = Tracer(model)
    tracer.trace.how, tracer.real = how, real
    with Undo() as stack:
        if mode is not None:
            stack.enter_context(mode)
        tracer.attach(stack)
        stack.callback(leave_eager, tracer)
        _enter_eager(tracer)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(tracer.pack, lambda saved: saved.tensor))
        stack.enter_context(_Ops(tracer))
        try:
            scripted = isinstance(model, torch.jit.ScriptModule)
            call = tracer.called("", tuple(given), given.kwargs) if scripted else None
            out = model(*given, **given.kwargs)
            if call is not None:
                tracer.seen(call, out)
            if isinstance(out, GeneratorType):
                out = list(out)
            tracer.settle()  # while `out` holds the graph
            tracer.trace.unused = unused(model, out)
            tracer.trace.error, tracer.trace.failed = None, ()
        except Exception as e:
            tracer.trace.error = e
    return tracer.trace
